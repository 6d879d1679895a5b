//! Modes: in shadow every delivery reaches the handler, with the verdict that it would have got. Off,
//! the layer does nothing.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderValue, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use tower::{Layer, ServiceExt};
use tower_dedup::adapter::MemoryAdapter;
use tower_dedup::adapter::maintenance::KeyState;
use tower_dedup::testing::{Fault, StoreCall};
use tower_dedup::{
    DedupAnswer, DedupLayer, KeyExtractor, Mode, OnMismatch, OnMissingKey, OnUnavailable, Replay,
    Verdict, Verified, key,
};

use crate::observed::{measured, observed};
use support::log::Log;
use support::words::by_word;
use support::{
    Body, FaultyStore, Handler, answered, by_header, dedup_key, event, faulty_memory as store,
    polled, request, result, send, state, until,
};

const SOON: Duration = Duration::from_millis(50);

fn shadow(store: &FaultyStore) -> DedupLayer {
    DedupLayer::new(by_header(), Arc::clone(store)).store_timeout(SOON).mode(Mode::Shadow)
}

fn without_key(body: &'static str) -> Request<Body> {
    Request::post("/hook").body(Full::from(body)).unwrap()
}

/// Delivers a request to a layer in shadow. The handler responds with 418, and nothing but that may
/// reach the client. Returns the verdict that the handler saw, after it was compared with the log.
async fn judged(layer: &DedupLayer, log: &Log, request: Request<Body>) -> Verdict {
    judged_within(layer, 1_024, log, request).await
}

/// Does the same while so many deliveries may run.
async fn judged_within(
    layer: &DedupLayer,
    max_running: usize,
    log: &Log,
    request: Request<Body>,
) -> Verdict {
    let handler = Handler::default().then(418);
    let service = layer.layer(handler.service());
    drop(layer.clone().max_running(max_running));
    let response = send(&service, request).await;
    assert_eq!((response.status(), handler.runs()), (StatusCode::IM_A_TEAPOT, 1));
    assert_eq!(result(&response), None);
    assert!(response.extensions().get::<DedupAnswer>().is_none());
    let (delivery, record) = (handler.last(), log.last("delivery"));
    let verdict = delivery.verdict();
    assert_eq!(delivery.is_unprotected(), verdict != Verdict::First);
    assert_eq!((&*record["mode"], &*record["verdict"]), ("shadow", verdict.as_str()));
    assert_eq!((&*record["outcome"], &*record["status"]), ("failed", "418"));
    assert_eq!(record.contains_key("age_ms"), verdict.age().is_some());
    assert_eq!(record.contains_key("attempt"), verdict == Verdict::First);
    assert_eq!(record["payload"].len(), 16);
    verdict
}

#[test]
fn every_verdict_is_reported_and_the_client_gets_the_handlers_response() {
    observed(async |log, snapshotter| {
        let store = store();
        let layer = shadow(&store);
        assert_eq!(judged(&layer, &log, request("a")).await, Verdict::First);
        assert_eq!(log.last("delivery")["payload"], "239f59ed55e737c7", "SHA-256 of `payload`");
        let completes = layer.layer(Handler::default().service());
        send(&completes, request("a")).await;
        let verdict = judged(&layer, &log, request("a")).await;
        assert!(matches!(verdict, Verdict::Duplicate { .. }), "{verdict:?}");
        assert_eq!(log.last("delivery")["id"], "a");
        let complete = Some(KeyState::Complete);
        assert_eq!(state(&store, "a").await, complete, "the failed duplicate changed nothing");

        let holds = Handler::default();
        holds.hold();
        let running = tokio::spawn(layer.layer(holds.service()).oneshot(request("b")));
        holds.running(1).await;
        assert_eq!(judged(&layer, &log, request("b")).await, Verdict::InFlight);
        holds.release();
        running.await.unwrap().unwrap();

        let compares = layer.clone().compare_payload(key::body_digest(), OnMismatch::Refuse);
        send(&compares.layer(Handler::default().service()), event("c", "1")).await;
        let verdict = judged(&compares, &log, event("c", "2")).await;
        assert!(matches!(verdict, Verdict::Mismatch { .. }), "{verdict:?}");

        let mut repeated = request("d");
        repeated.headers_mut().append("webhook-id", HeaderValue::from_static("e"));
        for bad in [without_key("body"), repeated, request("")] {
            assert_eq!(judged(&layer, &log, bad).await, Verdict::NoKey);
            let record = log.last("delivery");
            assert!(record.contains_key("error") && !record.contains_key("id"), "{record:?}");
        }
        let two = DedupLayer::new(by_word(), Arc::clone(&store)).max_keys(1).mode(Mode::Shadow);
        assert_eq!(judged(&two, &log, event("", "x y")).await, Verdict::NoKey);
        let unscoped = DedupLayer::idempotency_key(key::header("x-tenant"), Arc::clone(&store));
        let mut keyed = request("d");
        keyed.headers_mut().insert("idempotency-key", HeaderValue::from_static("d"));
        let handler = Handler::default().then(418);
        let unscoped = unscoped.mode(Mode::Shadow).layer(handler.service());
        assert_eq!(send(&unscoped, keyed).await.status(), StatusCode::IM_A_TEAPOT);
        assert_eq!(log.last("delivery")["verdict"], "no_key");

        for fault in [Fault::Fail, Fault::Hang, Fault::Panic, Fault::ExecuteAndFail] {
            store.set(StoreCall::Claim, fault);
            assert_eq!(judged(&layer, &log, request("f")).await, Verdict::Unavailable);
            assert!(log.last("delivery").contains_key("error"), "{fault:?}");
        }
        store.set(StoreCall::Claim, Fault::None);

        let full = DedupLayer::new(by_header(), Arc::clone(&store)).mode(Mode::Shadow);
        assert_eq!(judged_within(&full, 0, &log, request("g")).await, Verdict::Overloaded);
        assert!(log.last("delivery").contains_key("error"));

        let verified = layer.clone().require_verified();
        assert_eq!(judged(&verified, &log, request("h")).await, Verdict::Unverified);
        assert!(log.last("delivery").contains_key("error"));
        let mut marked = request("h");
        marked.extensions_mut().insert(Verified);
        assert_eq!(judged(&verified, &log, marked).await, Verdict::First);

        let counted = measured(&snapshotter);
        let total = |verdict: &str| {
            let labels = vec!["test".to_owned(), verdict.to_owned()];
            counted.get(&("tower_dedup_shadow_total".to_owned(), labels)).copied()
        };
        for (verdict, times) in [
            ("first", 5.0),
            ("duplicate", 1.0),
            ("in_flight", 1.0),
            ("mismatch", 1.0),
            ("no_key", 4.0),
            ("unavailable", 4.0),
            ("overloaded", 1.0),
            ("unverified", 1.0),
        ] {
            // `a` twice, `b`, `c` and `h` were the first.
            assert_eq!(total(verdict), Some(times), "{verdict}");
        }
    });
}

/// `PassThrough` is for requests that are verified.
#[tokio::test]
async fn request_without_a_key_passes_in_shadow_if_it_is_verified() {
    let (log, _guard) = Log::of_this_thread();
    let layer = shadow(&store()).require_verified().on_missing_key(OnMissingKey::PassThrough);
    let handler = Handler::default();
    let service = layer.layer(handler.service());
    for (is_verified, outcome, verdict) in
        [(false, "completed", Some("unverified")), (true, "bypass", None)]
    {
        let mut request = without_key("body");
        if is_verified {
            request.extensions_mut().insert(Verified);
        }
        assert_eq!(send(&service, request).await.status(), StatusCode::OK);
        let record = log.last("delivery");
        assert_eq!(record["outcome"], outcome);
        assert_eq!(record.get("verdict").map(String::as_str), verdict);
    }
    assert_eq!(handler.runs(), 2);
}

#[tokio::test]
async fn faulty_request_takes_no_permit_in_shadow() {
    let (layer, handler) = (shadow(&store()).max_running(1), Handler::default());
    handler.hold();
    let service = layer.layer(handler.service());
    let faulty = tokio::spawn(service.clone().oneshot(without_key("body")));
    handler.running(1).await;
    assert_eq!(layer.handle().running(), 0);
    let sound = tokio::spawn(service.oneshot(request("a")));
    handler.running(2).await;
    assert_eq!(layer.handle().running(), 1);
    handler.release();
    for ended in [faulty, sound] {
        assert_eq!(ended.await.unwrap().unwrap().status(), StatusCode::OK);
    }
}

/// The layer that fails open completes the key afterwards, as under `Enforce`.
#[tokio::test(start_paused = true)]
async fn layer_that_fails_open_completes_its_key_in_shadow_too() {
    let (store, handler) = (store(), Handler::default());
    let layer = shadow(&store).on_unavailable(OnUnavailable::FailOpen);
    store.set(StoreCall::Claim, Fault::Fail);
    let response = send(&layer.layer(handler.service()), request("a")).await;
    assert_eq!((response.status(), handler.runs()), (StatusCode::OK, 1));
    let delivery = handler.last();
    assert!(delivery.verdict() == Verdict::Unavailable && delivery.is_unprotected());
    assert_eq!(state(&store, "a").await, Some(KeyState::Complete));
}

#[tokio::test]
async fn duplicate_in_shadow_gets_the_handlers_body_and_no_response_is_stored() {
    let (store, handler) = (store(), Handler::default());
    let layer = shadow(&store).replay(Replay::new());
    let (handle, service) = (layer.handle(), layer.layer(handler.service()));
    for _ in 0..2 {
        let response = send(&service, request("a")).await;
        assert_eq!(result(&response), None);
        assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "handled");
    }
    assert_eq!(store.calls(StoreCall::Fetch), 0);
    handle.set_mode(Mode::Enforce);
    let replayed = send(&service, request("a")).await;
    assert_eq!((result(&replayed), handler.runs()), (Some("duplicate"), 2));
    assert!(replayed.into_body().collect().await.unwrap().to_bytes().is_empty());
}

#[tokio::test]
async fn panic_of_a_closure_of_the_layer_changes_no_response() {
    let store = store();
    let panics = KeyExtractor::from_fn("test", |_| panic!("the closure panics"));
    for mode in [Mode::Shadow, Mode::Off] {
        let handler = Handler::default().then(202);
        let layer = DedupLayer::new(panics.clone(), Arc::clone(&store)).mode(mode);
        assert_eq!(send(&layer.layer(handler.service()), request("a")).await.status(), 202);
        assert!(handler.last().id().starts_with("body_"));
    }
    let (log, _guard) = Log::of_this_thread();
    let handler = Handler::default();
    let layer = shadow(&store).success_when(|_| panic!("the closure panics"));
    assert_eq!(send(&layer.layer(handler.service()), request("a")).await.status(), 200);
    assert_eq!(log.last("delivery")["error"], "`success_when` panicked");
    assert_eq!(state(&store, "a").await, Some(KeyState::Released));
}

/// Each bound of the layer is one that the handler exceeds.
#[tokio::test(start_paused = true)]
async fn handler_has_no_bound_of_the_layer_in_shadow_and_off() {
    for mode in [Mode::Shadow, Mode::Off] {
        let slow = tower::service_fn(async |_: Request<Body>| {
            tokio::time::sleep(2 * SOON).await;
            Ok::<_, Infallible>(http::Response::new(Body::from("handled")))
        });
        let layer = shadow(&store()).mode(mode).handler_timeout(SOON).max_running(1).max_waiting(1);
        let layer = layer.wait(Duration::ZERO);
        let service = layer.layer(slow);
        let sent = ["a", "a", "b", "c"].map(|id| send(&service, request(id)));
        for response in futures_util::future::join_all(sent).await {
            assert_eq!(answered(&response), (200, None), "{mode}");
        }
    }
}

/// Under a wrong key, two different events have one key. A handler that skips events loses none.
#[tokio::test]
async fn delivery_in_shadow_has_all_events_and_every_event_needs_to_run() {
    let (store, handler) = (store(), Handler::default());
    let layer = DedupLayer::new(by_word(), Arc::clone(&store)).mode(Mode::Shadow);
    let service = layer.layer(handler.service());
    send(&service, event("", "a b")).await;
    send(&service, event("", "b c c")).await;
    let delivery = handler.last();
    let ids: Vec<&str> = delivery.keys().map(tower_dedup::DedupKey::id).collect();
    assert_eq!(ids, ["b", "c", "c"]);
    assert_eq!(delivery.verdict(), Verdict::First, "`c` is new");
    for id in ["b", "c", "unknown"] {
        assert!(delivery.needs_run(&dedup_key(id)), "{id}");
    }
    // The same idempotency keys as under `Enforce`.
    let enforced = Handler::default();
    let other = DedupLayer::new(by_word(), MemoryAdapter::new()).layer(enforced.service());
    send(&other, event("", "b c c")).await;
    assert_eq!(delivery.idempotency_key("mail"), enforced.last().idempotency_key("mail"));
}

#[test]
fn off_calls_no_store_and_reports_nothing() {
    observed(async |log, snapshotter| {
        let (store, handler) = (store(), Handler::default());
        let layer = DedupLayer::new(by_header(), Arc::clone(&store)).mode(Mode::Off);
        let service = layer.layer(handler.service());
        drop(layer.max_running(0));
        send(&service, request("a")).await;
        send(&service, request("a")).await;
        let delivery = handler.last();
        assert_eq!((delivery.id(), delivery.verdict()), ("a", Verdict::Off));
        assert!(delivery.is_unprotected() && delivery.needs_run(delivery.key()));
        send(&service, without_key("body")).await;
        assert!(handler.last().id().starts_with("body_"));
        send(&service, without_key("")).await;
        assert_eq!((handler.runs(), handler.deliveries().len()), (4, 3), "the last has none");
        assert_eq!((log.count(), store.calls(StoreCall::Claim)), (0, 0));
        assert!(measured(&snapshotter).is_empty());
    });
}

/// A handshake and a key that is missing by choice have no `Delivery` in any mode.
#[tokio::test]
async fn request_that_is_not_deduplicated_has_no_delivery_in_any_mode() {
    for mode in [Mode::Enforce, Mode::Shadow, Mode::Off] {
        let handler = Handler::default();
        let layer = DedupLayer::new(by_header(), store()).on_missing_key(OnMissingKey::PassThrough);
        let service = layer.mode(mode).layer(handler.service());
        assert_eq!(send(&service, without_key("body")).await.status(), 200);
        let get = Request::get("/").header("webhook-id", "a").body(Body::default()).unwrap();
        assert_eq!(send(&service, get).await.status(), 200);
        assert_eq!((handler.runs(), handler.deliveries().len()), (2, 0), "{mode}");
    }
}

#[tokio::test]
async fn event_of_shadow_is_a_duplicate_after_the_switch_and_event_of_off_is_unknown() {
    let (log, _guard) = Log::of_this_thread();
    let (store, handler) = (store(), Handler::default());
    let layer = shadow(&store);
    let (handle, service) = (layer.handle(), layer.layer(handler.service()));
    send(&service, request("in shadow")).await;
    handle.set_mode(Mode::Off);
    send(&service, request("while off")).await;
    handle.set_mode(Mode::Enforce);
    handle.set_mode(Mode::Enforce);
    assert_eq!(result(&send(&service, request("in shadow")).await), Some("duplicate"));
    assert_eq!(result(&send(&service, request("while off")).await), None);
    assert_eq!(handler.runs(), 3);
    let changes = log.all("mode changed");
    let changes: Vec<_> = changes.iter().map(|to| (&*to["from"], &*to["to"])).collect();
    assert_eq!(changes, [("shadow", "off"), ("off", "enforce")], "each change is logged once");
    assert!(log.all("mode changed").iter().all(|change| change["namespace"] == "test"));
}

#[test]
fn mode_is_shared_by_clones_services_and_handles() {
    let layer = DedupLayer::new(by_header(), MemoryAdapter::new());
    let (clone, handle) = (layer.clone(), layer.handle());
    assert_eq!(handle.mode(), Mode::Enforce);
    let _layer = layer.mode(Mode::Shadow);
    assert_eq!((handle.mode(), clone.handle().mode()), (Mode::Shadow, Mode::Shadow));
    handle.set_mode(Mode::Off);
    assert_eq!(clone.handle().mode(), Mode::Off);
    for mode in [Mode::Enforce, Mode::Shadow, Mode::Off] {
        assert_eq!(mode.to_string().parse(), Ok(mode));
    }
    let error = "Shadow".parse::<Mode>().unwrap_err().to_string();
    assert_eq!(error, "`mode` must be `enforce`, `shadow` or `off`, not \"Shadow\"");
}

#[tokio::test]
async fn delivery_in_shadow_outlives_its_caller_and_delivery_of_off_does_not() {
    let (store, handler) = (store(), Handler::default());
    let layer = shadow(&store);
    let (handle, service) = (layer.handle(), layer.layer(handler.service()));
    handler.hold();
    assert!(polled(service.clone().oneshot(request("a")), 1, false).await.is_none());
    handler.running(1).await;
    handler.release();
    handle.drain().await;
    assert_eq!(state(&store, "a").await, Some(KeyState::Complete));

    handle.set_mode(Mode::Off);
    let alive = Arc::new(());
    let held = Arc::clone(&alive);
    let never = tower::service_fn(move |_: Request<Body>| {
        let held = Arc::clone(&held);
        async move {
            let _held = held;
            std::future::pending::<Result<http::Response<Body>, Infallible>>().await
        }
    });
    let service = layer.layer(never);
    let mut caller = Box::pin(service.oneshot(request("b")));
    assert!(futures_util::poll!(&mut caller).is_pending());
    let running = Arc::strong_count(&alive);
    drop(caller);
    assert!(Arc::strong_count(&alive) < running, "the handler was dropped");
}

/// Two layers over the same store and keys. The inner one lets the claims of one in shadow through, and enforces the rest.
#[tokio::test]
async fn each_of_two_nested_layers_does_what_its_mode_says() {
    use Mode::{Enforce, Off, Shadow};
    for (outer, inner, runs, claims, verdict) in [
        (Off, Enforce, 1, 2, "first"),
        (Off, Shadow, 2, 2, "duplicate"),
        (Shadow, Enforce, 1, 3, "first"),
        // They judge a delivery once.
        (Shadow, Shadow, 2, 2, "duplicate"),
        (Enforce, Off, 1, 2, "first"),
    ] {
        let (store, handler) = (store(), Handler::default());
        let layer = |mode| DedupLayer::new(by_header(), Arc::clone(&store)).mode(mode);
        let service = layer(inner).inner_body::<Body>().layer(handler.service());
        let service = layer(outer).inner_body::<Body>().layer(service);
        for told in [None, (runs == 1).then_some("duplicate")] {
            let response = send(&service, request("a")).await;
            assert_eq!(answered(&response), (200, told), "{outer} {inner}");
        }
        let found = (handler.runs(), store.calls(StoreCall::Claim), handler.last().verdict());
        assert_eq!(
            (found.0, found.1, found.2.as_str()),
            (runs, claims, verdict),
            "{outer} {inner}"
        );
    }
}

/// On arrival, an event whose handler failed is lost under `Enforce`. Shadow shows it.
#[tokio::test]
async fn on_arrival_layer_judges_the_retry_of_a_failed_event_as_a_duplicate() {
    let (store, handler) = (store(), Handler::default().then(500));
    let layer = DedupLayer::on_arrival(by_header(), Arc::clone(&store)).mode(Mode::Shadow);
    let service = layer.layer(handler.service());
    assert_eq!(send(&service, request("a")).await.status(), 500);
    let retry = send(&service, request("a")).await;
    assert_eq!((retry.status(), result(&retry), handler.runs()), (StatusCode::OK, None, 2));
    assert!(matches!(handler.last().verdict(), Verdict::Duplicate { .. }));
    assert!(handler.deliveries()[0].verdict() == Verdict::First);
}

/// A delivery waits under `Enforce` for one that began in shadow, and is woken when it ends.
#[tokio::test(start_paused = true)]
async fn delivery_that_waits_is_woken_by_one_in_shadow() {
    let (store, handler) = (store(), Handler::default());
    let layer = shadow(&store).wait(Duration::from_secs(60));
    let (handle, service) = (layer.handle(), layer.layer(handler.service()));
    handler.hold();
    let first = tokio::spawn(service.clone().oneshot(request("a")));
    handler.running(1).await;
    handle.set_mode(Mode::Enforce);
    let waits = tokio::spawn(service.oneshot(request("a")));
    until(|| handle.waiting() == 1).await;
    let released = tokio::time::Instant::now();
    handler.release();
    assert_eq!(result(&first.await.unwrap().unwrap()), None);
    assert_eq!(result(&waits.await.unwrap().unwrap()), Some("duplicate"));
    assert!(released.elapsed() < Duration::from_millis(2), "woken, before its next poll");
    assert_eq!(handler.runs(), 1);
}
