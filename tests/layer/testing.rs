//! The helpers for tests of a handler.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Body as AxumBody;
use axum::http::StatusCode;
use axum::routing::post;
use bytes::Bytes;
use http::{HeaderName, Request};
use http_body_util::Full;
use tower::limit::ConcurrencyLimitLayer;
use tower::{Layer, ServiceBuilder};
use tower_dedup::adapter::contract::{DedupAdapter, Fetch};
use tower_dedup::adapter::maintenance::{ForgetReply, KeyState, MaintenanceAdapter};
use tower_dedup::adapter::{MemoryAdapter, SqliteAdapter};
use tower_dedup::testing::{Fault, StoreCall, abandon, redeliver, redeliver_at_once};
use tower_dedup::verify::VerifyLayer;
use tower_dedup::{DedupAnswer, DedupLayer, Replay, StoreErrorKind, provider, testing};

use support::secrets::test_secrets;
use support::{Handler, by_header, dedup_key, faulty, memory, request, rows, sqlite_url, terms};

const LEASE: Duration = Duration::from_secs(60);

fn layer() -> DedupLayer {
    DedupLayer::new(by_header(), MemoryAdapter::new())
}

#[tokio::test]
async fn redeliver_returns_the_responses_in_order() {
    let handler = Handler::default().then(500).then(201);
    let service = layer().layer(handler.service());
    let responses = redeliver(service, request("a"), 4).await;
    assert_eq!(responses.statuses(), [500, 201, 200, 200]);
    assert_eq!((responses.handled(), responses.duplicates(), handler.runs()), (2, 2, 2));
    assert_eq!(responses.get(0).body(), "handled");
    assert!(responses.get(2).body().is_empty());
    assert_eq!(responses.get(2).extensions().get(), Some(&DedupAnswer::Duplicate));
    // The results are counted under every header, and without one.
    for header in [Some(HeaderName::from_static("x-other")), None] {
        let layer = layer().result_header(header).replay(Replay::new());
        let responses = redeliver(layer.layer(handler.service()), request("a"), 2).await;
        assert_eq!((responses.handled(), responses.duplicates()), (1, 1));
    }
}

#[tokio::test]
async fn redeliver_sends_head_and_body_with_every_copy() {
    #[derive(Clone)]
    struct Tenant(u32);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let app = {
        let seen = Arc::clone(&seen);
        post(async move |request: axum::extract::Request| {
            let (head, body) = request.into_parts();
            let Tenant(tenant) = head.extensions.get().cloned().unwrap();
            let body = axum::body::to_bytes(body, 1_000).await.unwrap();
            seen.lock().unwrap().push((head.uri.path().to_owned(), tenant, body));
            StatusCode::INTERNAL_SERVER_ERROR
        })
    };
    let app: Router = Router::new().route("/hook", app.layer(layer()));
    let streamed = AxumBody::from_stream(futures_util::stream::iter(
        ["pay", "load"].map(Ok::<_, std::convert::Infallible>),
    ));
    let request = Request::post("/hook").header("webhook-id", "a").extension(Tenant(7));
    let responses = redeliver(app, request.body(streamed).unwrap(), 2).await;
    assert_eq!(responses.statuses(), [500, 500]);
    let one = ("/hook".to_owned(), 7, Bytes::from("payload"));
    assert_eq!(*seen.lock().unwrap(), [one.clone(), one]);
}

/// An inner limit: a copy that is not ready waits for the others.
#[tokio::test]
async fn copies_wait_until_the_service_is_ready() {
    let handler = Handler::default();
    let service = ServiceBuilder::new()
        .layer(ConcurrencyLimitLayer::new(1))
        .layer(layer())
        .service(handler.service());
    let responses = redeliver_at_once(service.clone(), request("a"), 5).await;
    assert_eq!((responses.handled(), responses.duplicates()), (1, 4));
    assert_eq!(redeliver(service, request("a"), 2).await.duplicates(), 2);
}

#[tokio::test(start_paused = true)]
async fn responses_of_copies_at_once_are_in_order_of_arrival() {
    static RUNS: AtomicUsize = AtomicUsize::new(0);
    let handler = async || {
        let run = RUNS.fetch_add(1, Ordering::SeqCst);
        // The first run ends last.
        tokio::time::sleep(Duration::from_secs(3 - run as u64)).await;
        run.to_string()
    };
    let app: Router = Router::new().route("/hook", post(handler));
    let responses = redeliver_at_once(app, request("a"), 3).await;
    assert_eq!([0, 1, 2].map(|copy| responses.get(copy).body()), ["2", "1", "0"]);
}

#[tokio::test]
#[should_panic(expected = "the handler was told to panic")]
async fn panic_of_a_copy_reaches_the_test() {
    let service = layer().layer(Handler::default().then(0).service());
    let _ = redeliver_at_once(service, request("a"), 2).await;
}

#[tokio::test]
#[should_panic(expected = "the service returned an error: \"the handler was told to fail\"")]
async fn error_of_the_service_fails_the_test() {
    let service = layer().layer(Handler::default().then(1).fallible());
    let _ = redeliver(service, request("a"), 2).await;
}

#[tokio::test(start_paused = true)]
async fn abandoned_event_is_in_flight_then_taken_over() {
    let (store, handler) = (memory(), Handler::default());
    let extractor = by_header().content_identity();
    let dedup = DedupLayer::new(extractor, Arc::clone(&store)).lease(LEASE).wait(Duration::ZERO);
    let service = dedup.clone().layer(handler.service());
    abandon(&dedup, request("a")).await;
    assert_eq!(rows(&store).await, 2, "both identities");
    let early = redeliver(service.clone(), request("a"), 1).await;
    assert_eq!((early.count(DedupAnswer::InFlight), handler.runs()), (1, 0));
    // No process renews the lease.
    tokio::time::advance(LEASE - Duration::from_millis(1)).await;
    let early = redeliver(service.clone(), request("a"), 1).await;
    assert_eq!(early.count(DedupAnswer::InFlight), 1);
    tokio::time::advance(Duration::from_millis(1)).await;
    let late = redeliver(service, request("a"), 2).await;
    assert_eq!((late.handled(), late.duplicates()), (1, 1));
    assert!(handler.last().is_takeover());
    assert_eq!(handler.last().attempt(), 2);
}

#[tokio::test]
async fn event_is_abandoned_as_its_ledger_claims() {
    let directory = tempfile::tempdir().unwrap();
    let adapter = SqliteAdapter::connect(&sqlite_url(directory.path())).await.unwrap();
    let transactional = DedupLayer::transactional(by_header(), adapter);
    let transactional = transactional.wait(Duration::ZERO);
    abandon(&transactional, request("a")).await;
    let service = transactional.layer(Handler::default().service());
    assert_eq!(redeliver(service, request("a"), 1).await.count(DedupAnswer::InFlight), 1);

    let on_arrival = DedupLayer::on_arrival(by_header(), memory());
    abandon(&on_arrival, request("a")).await;
    let service = on_arrival.layer(Handler::default().service());
    assert_eq!(redeliver(service, request("a"), 1).await.duplicates(), 1, "it is lost");
}

#[tokio::test]
#[should_panic(expected = "the keys of the request were claimed before")]
async fn abandon_refuses_an_event_that_is_known() {
    let dedup = layer();
    abandon(&dedup, request("a")).await;
    abandon(&dedup, request("a")).await;
}

#[tokio::test]
#[should_panic(expected = "the request has no key")]
async fn abandon_refuses_a_request_without_a_key() {
    abandon(&layer(), Request::post("/hook").body(Full::<Bytes>::default()).unwrap()).await;
}

#[tokio::test]
async fn nth_call_has_its_fault_and_no_other() {
    let store = faulty(MemoryAdapter::new());
    store.set_nth(StoreCall::Claim, 2, Fault::Fail);
    store.set_nth(StoreCall::Claim, 3, Fault::Fail);
    // The last one counts.
    store.set_nth(StoreCall::Claim, 3, Fault::None);
    let is_claimed = async |id| store.claim(&dedup_key(id), &terms()).await.is_ok();
    for (id, claimed) in [("a", true), ("b", false), ("c", true), ("d", true)] {
        assert_eq!(is_claimed(id).await, claimed, "{id}");
    }
    assert_eq!((store.calls(StoreCall::Claim), store.calls(StoreCall::Fetch)), (4, 0));
    // It counts from now on. `set` holds for all others.
    store.set(StoreCall::Claim, Fault::Fail);
    store.set_nth(StoreCall::Claim, 2, Fault::None);
    for (id, claimed) in [("e", false), ("f", true), ("g", false)] {
        assert_eq!(is_claimed(id).await, claimed, "{id}");
    }
}

#[tokio::test(start_paused = true)]
async fn each_fault_executes_what_it_says() {
    let lasting = Duration::from_secs(1);
    for (fault, is_executed, kind) in [
        (Fault::Fail, false, Some(StoreErrorKind::Unavailable)),
        (Fault::Hang, false, None),
        (Fault::LoseReply, true, None),
        (Fault::ExecuteAndFail, true, Some(StoreErrorKind::Corrupt)),
    ] {
        let store = faulty(MemoryAdapter::new());
        store.set_nth(StoreCall::Claim, 1, fault);
        let reply =
            tokio::time::timeout(lasting, async { store.claim(&dedup_key("a"), &terms()).await });
        let reply = reply.await.ok().map(|reply| reply.unwrap_err().kind());
        assert_eq!(reply, kind, "{fault:?}");
        let entry = store.get_ref().get(&dedup_key("a")).await.unwrap();
        assert_eq!(entry.is_some(), is_executed, "{fault:?}");
    }
}

/// A claim that fetches stored data is a claim too.
#[tokio::test]
async fn fault_of_a_fetch_hides_that_of_its_claim() {
    let store = faulty(MemoryAdapter::new());
    store.set(StoreCall::Claim, Fault::Fail);
    store.set_nth(StoreCall::Fetch, 1, Fault::ExecuteAndFail);
    let fetching = || terms().with_fetch(Fetch::Digest);
    for kind in [StoreErrorKind::Corrupt, StoreErrorKind::Unavailable] {
        let reply = store.claim(&dedup_key("a"), &fetching()).await;
        assert_eq!(reply.unwrap_err().kind(), kind);
    }
    assert_eq!((store.calls(StoreCall::Claim), store.calls(StoreCall::Fetch)), (2, 2));
}

#[tokio::test]
async fn faulty_adapter_forwards_the_calls_of_operators() {
    let (store, key) = (faulty(MemoryAdapter::new()), dedup_key("a"));
    let abilities = store.abilities();
    assert!(abilities.leases && abilities.stored_data && !abilities.inspection);
    store.complete(&key, &terms()).await.unwrap();
    assert_eq!(store.get(&key).await.unwrap().unwrap().state, KeyState::Complete);
    assert_eq!(rows(&store).await, 1);
    assert_eq!(store.forget(&key).await.unwrap(), ForgetReply::Removed);
    assert_eq!(store.purge(10).await.unwrap(), 0);
    store.close().await;
    assert!(store.get_ref().stats().await.is_err());
}

/// Each preset's request passes its layer, and the verifying layer once it is signed: the handler runs once.
#[tokio::test]
async fn request_of_every_preset_is_verified_and_runs_once() {
    const URL: &str = "https://hooks.example.com";
    let mut signed = 0;
    for preset in provider::ALL {
        let name = preset.name();
        let dedup = DedupLayer::new(*preset, MemoryAdapter::new());
        let event = |id| testing::request(*preset, "/hook", id);
        let app: Router = Router::new().route("/hook", post(async || "done").layer(dedup.clone()));
        let responses = redeliver(app.clone(), event("1"), 2).await;
        assert_eq!((responses.handled(), responses.duplicates()), (1, 1), "{name}");
        assert_eq!(redeliver(app, event("2"), 1).await.handled(), 1, "{name}");
        if preset.scheme().is_none() {
            continue;
        }
        let [secret, private] = test_secrets(preset.scheme());
        let verify = VerifyLayer::new(preset.verifier_at(URL, secret).unwrap());
        let dedup = dedup.require_verified();
        let app: Router =
            Router::new().route("/hook", post(async || "done").layer((verify, dedup)));
        assert_eq!(redeliver(app.clone(), event("3"), 1).await.statuses(), [401], "{name}");
        let responses =
            redeliver(app, testing::sign_at(event("3"), *preset, URL, private), 2).await;
        assert_eq!((responses.handled(), responses.duplicates()), (1, 1), "{name}");
        signed += 1;
    }
    assert!(signed > 0 && signed < provider::ALL.len());
}
