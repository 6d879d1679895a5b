//! Logs and metrics: every outcome has its log record and its metrics.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshotter};
use tower::{Layer, ServiceExt};
use tower_dedup::adapter::MemoryAdapter;
use tower_dedup::adapter::contract::{CallTerms, DedupAdapter, Token};
use tower_dedup::adapter::inspect::MaintenanceAdapter;
use tower_dedup::testing::{Fault, StoreCall};
use tower_dedup::verify::{Refusal, VerifyLayer};
use tower_dedup::{
    DedupLayer, KeyError, KeyErrorKind, KeyExtractor, LogIds, OnInFlight, OnMismatch,
    OnUnavailable, Replay, key, provider,
};

use crate::support::log::Log;
use crate::support::{
    FIRST, Faulty, Handler, by_header, faulty, on_claim, request, request_to, send,
};

/// Runs on one thread, with a log and metrics of its own. Every metric has to be described.
pub(crate) fn observed(run: impl AsyncFnOnce(Log, Snapshotter)) {
    use tracing_subscriber::layer::SubscriberExt;
    let (log, recorder) = (Log::default(), DebuggingRecorder::new());
    let snapshotter = recorder.snapshotter();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let subscriber = tracing_subscriber::registry().with(log.clone());
    tracing::subscriber::with_default(subscriber, || {
        metrics::with_local_recorder(&recorder, || {
            tower_dedup::observe::describe_metrics();
            runtime.block_on(run(log, snapshotter));
        });
    });
    for (key, unit, text, _) in recorder.snapshotter().snapshot().into_vec() {
        assert!(unit.is_some() && text.is_some(), "not described: {key:?}");
    }
}

/// The sum of every counter and gauge, and the count of every histogram, by name and labels.
pub(crate) type Sums = BTreeMap<(String, Vec<String>), f64>;

pub(crate) fn measured(snapshotter: &Snapshotter) -> Sums {
    let mut sums = BTreeMap::new();
    for (key, _, _, value) in snapshotter.snapshot().into_vec() {
        let key = key.key();
        let labels = key.labels().map(|label| label.value().to_owned()).collect();
        let value = match value {
            #[expect(clippy::cast_precision_loss, reason = "small numbers")]
            DebugValue::Counter(count) => count as f64,
            DebugValue::Gauge(gauge) => gauge.into_inner(),
            #[expect(clippy::cast_precision_loss, reason = "small numbers")]
            DebugValue::Histogram(samples) => samples.len() as f64,
        };
        sums.insert((key.name().to_owned(), labels), value);
    }
    sums
}

/// Returns one value, or zero for a metric without one.
pub(crate) fn value(sums: &Sums, name: &str, labels: &[&str]) -> f64 {
    let labels = labels.iter().map(|&label| label.to_owned()).collect();
    sums.get(&(name.to_owned(), labels)).copied().unwrap_or_default()
}

fn store() -> Arc<Faulty<MemoryAdapter>> {
    faulty(MemoryAdapter::new())
}

#[test]
fn every_delivery_ends_in_one_log_record_with_its_fields() {
    observed(async |log, _| {
        let handler = Handler::default().then(500).then(200);
        let service = DedupLayer::new(by_header(), store()).layer(handler.service());
        for (outcome, status) in [("failed", "500"), ("completed", "200"), ("duplicate", "200")] {
            send(&service, request("+15005550006")).await;
            let event = log.last("delivery");
            assert_eq!((&*event["outcome"], &*event["status"]), (outcome, status), "{event:?}");
            assert_eq!(
                (&*event["level"], &*event["namespace"], &*event["keys"]),
                ("INFO", "test", "1")
            );
            assert!(event["duration_ms"].parse::<f64>().unwrap() >= 0.0);
            assert_eq!(event["id"], "+15005550006");
            assert_eq!(event.contains_key("age_ms"), outcome == "duplicate");
            assert_eq!(event.contains_key("attempt"), outcome != "duplicate");
        }
        assert_eq!(log.len(), 3);

        // An id may be personal data.
        let hashed = DedupLayer::new(by_header(), store()).log_ids(LogIds::Hashed);
        send(&hashed.layer(handler.service()), request("evt_1")).await;
        assert_eq!(log.last("delivery")["id"], crate::support::dedup_key("evt_1").log_id());
    });
}

/// A sender that does not retry loses the event.
#[test]
fn failure_is_a_warning_where_no_retry_follows_a_response() {
    observed(async |log, _| {
        for (preset, level) in [
            (provider::GITHUB, "WARN"),
            (provider::GITEA, "WARN"),
            (provider::TWILIO, "WARN"),
            (provider::STRIPE, "INFO"),
            (provider::CIRCLECI, "INFO"),
        ] {
            let handler = Handler::default().then(500);
            let service = DedupLayer::new(preset, store()).layer(handler.service());
            let event = tower_dedup::testing::request(preset, "/hook", "1");
            send(&service, event.map(axum::body::Body::new)).await;
            let record = log.last("delivery");
            assert_eq!((&*record["outcome"], &*record["level"]), ("failed", level), "{preset:?}");
        }
    });
}

/// The keys of clients may name persons.
#[test]
fn keys_of_api_clients_are_hashed_in_logs() {
    observed(async |log, _| {
        let layer = DedupLayer::idempotency_key(key::header("x-user"), store());
        let request = http::Request::post("/").header("x-user", "u").header("idempotency-key", "k");
        let request = request.body(axum::body::Body::empty()).unwrap();
        send(&layer.layer(Handler::default().service()), request).await;
        let id = log.last("delivery")["id"].clone();
        assert!(id.len() == 16 && id.bytes().all(|digit| digit.is_ascii_hexdigit()), "{id}");
    });
}

#[test]
fn every_outcome_is_counted_under_its_name() {
    observed(async |log, snapshotter| {
        let store = store();
        let handler = Handler::default();
        let layer = DedupLayer::new(by_header(), Arc::clone(&store))
            .store_timeout(Duration::from_millis(50))
            .on_in_flight(OnInFlight::Reject)
            .body_limit(100);
        let (handle, service) = (layer.handle(), layer.clone().layer(handler.fallible()));
        let deliver = async |id: &str| {
            let service = service.clone();
            let request = request(id);
            tokio::spawn(async move { ServiceExt::oneshot(service, request).await }).await
        };
        let outcome = || log.last("delivery")["outcome"].clone();

        let _ = deliver("a").await;
        assert_eq!(outcome(), "completed");
        let _ = deliver("a").await;
        assert_eq!(outcome(), "duplicate");
        let failing = handler.clone().then(0).then(1);
        let _ = deliver("panic").await;
        assert_eq!(outcome(), "panicked");
        let _ = deliver("error").await;
        assert_eq!(outcome(), "failed");
        drop(failing);

        handler.hold();
        let running = tokio::spawn(ServiceExt::oneshot(service.clone(), request("held")));
        handler.running(1).await;
        let _ = deliver("held").await;
        assert_eq!(outcome(), "in_flight");
        handler.release();
        let _ = running.await.unwrap();

        store.set(StoreCall::Claim, Fault::Fail);
        let _ = deliver("b").await;
        assert_eq!(outcome(), "unavailable");
        assert_eq!(
            log.last("delivery")["error"],
            "calling a faulty adapter: the store is unavailable"
        );
        let open = layer.clone().on_unavailable(OnUnavailable::FailOpen).layer(handler.service());
        send(&open, request("c")).await;
        assert_eq!(log.last("running unprotected: the store did not reply")["level"], "WARN");
        store.set(StoreCall::Claim, Fault::None);

        let _ = deliver("  ").await;
        assert_eq!(outcome(), "invalid_key");
        assert_eq!(log.last("delivery")["error"], "header webhook-id is empty");
        let mut large = request("large");
        *large.body_mut() = "x".repeat(101).into();
        let _ = ServiceExt::oneshot(service.clone(), large).await;
        assert_eq!(outcome(), "too_large");
        let full = layer.clone().max_running(0).layer(handler.service());
        send(&full, request("d")).await;
        assert_eq!(outcome(), "overloaded");
        let record = log.last("delivery");
        assert_eq!(record["error"], "0 of 0 deliveries run, 0 of 256 wait for their event");
        assert!(record["fix"].contains("`max_running`"), "{record:?}");
        drop(layer.clone().max_running(1_024));
        let hangs = Handler::default();
        hangs.hold();
        let timed = layer.clone().handler_timeout(Duration::from_millis(20));
        send(&timed.layer(hangs.service()), request("slow")).await;
        assert_eq!(outcome(), "handler_timeout");
        assert_eq!(log.last("delivery")["level"], "WARN");
        assert_eq!(log.last("delivery")["status"], "504");
        let strict = layer.clone().require_verified().layer(handler.service());
        send(&strict, request("d")).await;
        assert_eq!(outcome(), "unverified");
        let record = log.last("delivery");
        assert_eq!(record["error"], "the request has no extension `Verified`");
        assert!(record["fix"].contains("outside the DedupLayer"), "{record:?}");
        let api = DedupLayer::idempotency_key(key::header("x-tenant"), MemoryAdapter::new());
        let mut unscoped = request("d");
        unscoped.headers_mut().insert("idempotency-key", "d".parse().unwrap());
        send(&api.layer(handler.service()), unscoped).await;
        assert_eq!(outcome(), "unscoped");
        assert_eq!(log.last("delivery")["level"], "ERROR");
        assert_eq!(log.last("delivery")["error"], "the scope is missing");
        assert!(log.last("delivery")["fix"].contains("authenticates"));

        // A success while the store is gone, and a takeover.
        store.set(StoreCall::Complete, Fault::Fail);
        let _ = deliver("late").await;
        assert_eq!(outcome(), "completed");
        store.set(StoreCall::Complete, Fault::None);
        handle.drain().await;
        let ended = log.all("completed in the background");
        assert!(ended.iter().any(|event| event["operation"] == "complete"), "{ended:?}");
        let hour = Duration::from_secs(3_600);
        let dying = CallTerms::on_completion(Token::random(), hour, Duration::ZERO);
        let keys = crate::support::dedup_key("taken");
        store.claim(&keys, &dying).await.unwrap();
        let _ = deliver("taken").await;
        let takeover = "takeover: an earlier handler of this event died or lost its lease";
        assert_eq!(log.last(takeover)["attempt"], "2");
        assert_eq!(log.last("delivery")["takeover"], "true");

        // A lease that is lost.
        handler.hold();
        let losing = tokio::spawn(ServiceExt::oneshot(service.clone(), request("lost")));
        handler.running(1).await;
        store.get_ref().advance(Duration::from_secs(61));
        let keys = crate::support::dedup_key("lost");
        store.claim(&keys, &dying).await.unwrap();
        handler.release();
        let _ = losing.await.unwrap();
        assert!(handler.last().lease_lost());

        let sums = measured(&snapshotter);
        let count = |name: &str, labels: &[&str]| value(&sums, name, labels);
        for (outcome, times) in [
            ("completed", 6.0),
            ("duplicate", 1.0),
            ("panicked", 1.0),
            ("failed", 1.0),
            ("in_flight", 1.0),
            ("unavailable", 1.0),
            ("invalid_key", 1.0),
            ("too_large", 1.0),
            ("overloaded", 1.0),
            ("handler_timeout", 1.0),
            ("unverified", 1.0),
        ] {
            let deliveries = count("tower_dedup_deliveries_total", &["test", outcome]);
            assert_eq!(deliveries, times, "{outcome}: {sums:#?}");
            let timed = count("tower_dedup_delivery_duration_seconds", &["test", outcome]);
            assert_eq!(timed, times, "{outcome}");
        }
        assert_eq!(count("tower_dedup_takeovers_total", &["test"]), 1.0);
        assert_eq!(count("tower_dedup_leases_lost_total", &["test"]), 1.0);
        assert_eq!(count("tower_dedup_unprotected_total", &["test"]), 1.0);
        assert_eq!(count("tower_dedup_background_total", &["complete", "ok"]), 1.0);
        assert!(count("tower_dedup_store_duration_seconds", &["claim", "ok"]) >= 5.0);
        assert_eq!(count("tower_dedup_store_duration_seconds", &["claim", "unavailable"]), 2.0);
        assert_eq!(count("tower_dedup_running", &["test"]), 0.0);
    });
}

#[test]
fn mismatches_and_responses_that_are_not_stored_are_reported() {
    observed(async |log, snapshotter| {
        let handler = Handler::default();
        let reporting = DedupLayer::new(by_header(), store())
            .compare_payload(key::body_digest(), OnMismatch::Report)
            .replay(Replay::new().body_limit(3));
        let deliver = async |layer: &DedupLayer<_>, body: &'static str| {
            let mut event = request("a");
            *event.body_mut() = body.into();
            send(&layer.layer(handler.service()), event).await.status().as_u16()
        };
        assert_eq!(deliver(&reporting, "one").await, 200);
        let not_stored = "response not stored: duplicates of this event get an empty response";
        assert_eq!(log.last(not_stored)["why"], "its body is too long");
        assert_eq!(log.last(not_stored)["id"], "a");
        let differs = "payload mismatch: this event was handled with another payload";
        assert!(log.all(differs).is_empty());
        assert_eq!(deliver(&reporting, "two").await, 200);
        assert_eq!(log.last(differs)["id"], "a");
        assert_eq!(log.last(differs)["level"], "WARN");
        let event = log.last("delivery");
        assert_eq!((&*event["outcome"], &*event["status"]), ("mismatch", "200"));
        assert!(event.contains_key("age_ms"));

        let refusing = reporting.compare_payload(key::body_digest(), OnMismatch::Refuse);
        assert_eq!(deliver(&refusing, "two").await, 422);
        assert_eq!(log.last("delivery")["status"], "422");
        let sums = measured(&snapshotter);
        let count = |name: &str, labels: &[&str]| value(&sums, name, labels);
        assert_eq!(count("tower_dedup_mismatches_total", &["test"]), 2.0);
        assert_eq!(count("tower_dedup_responses_not_stored_total", &["test"]), 1.0);
        assert_eq!(count("tower_dedup_deliveries_total", &["test", "mismatch"]), 2.0);
        assert_eq!(count("tower_dedup_store_duration_seconds", &["claim", "ok"]), 3.0);
    });
}

/// Checks how often each event was counted on another path. Some may be missing, because a delivery of
/// thousands of events in another test may take the places of the noted paths.
fn assert_counted_on_another_path(counts: &[f64], expected: f64) {
    assert!(counts.iter().all(|count| *count <= expected), "{counts:?}");
    assert!(counts.contains(&expected), "{counts:?}");
}

const ON_ANOTHER_PATH: &str = "tower_dedup_other_path_total";

#[test]
fn every_duplicate_on_another_path_is_counted() {
    observed(async |_, snapshotter| {
        let handler = Handler::default();
        let service = DedupLayer::new(by_header(), store()).layer(handler.service());
        let mut counts = Vec::new();
        for number in 0..10 {
            for path in ["/counted", "/other", "/counted", "/other"] {
                let event = request_to(path, &format!("other path {number}"));
                assert_eq!(send(&service, event).await.status(), 200);
            }
            counts.push(value(&measured(&snapshotter), ON_ANOTHER_PATH, &["test"]));
        }
        assert_counted_on_another_path(&counts, 2.0);
        assert_eq!(handler.runs(), 10);
    });
}

#[test]
fn panic_whose_client_has_gone_is_logged_with_its_text() {
    observed(async |log, _| {
        let (layer, handler) = (DedupLayer::new(by_header(), store()), Handler::default().then(0));
        handler.hold();
        let call = tokio::spawn(layer.layer(handler.service()).oneshot(request("a")));
        handler.running(1).await;
        call.abort();
        assert!(call.await.unwrap_err().is_cancelled());
        handler.release();
        layer.handle().drain().await;
        let record = log.last("a handler panicked after its client had gone");
        assert_eq!((&*record["level"], &*record["namespace"]), ("ERROR", "test"));
        assert_eq!(record["panic"], "the handler was told to panic");
    });
}

/// Without a second identity, a captured delivery of GitHub runs again under another id.
#[test]
fn unsigned_id_is_reported_once_if_verification_is_required() {
    observed(async |log, _| {
        let layer = |key: KeyExtractor| DedupLayer::new(key, MemoryAdapter::new());
        let github = KeyExtractor::from(provider::GITHUB).namespace("code");
        let reported = || {
            let mut found = log.beginning("unsigned id").into_iter();
            let first =
                found.next().map(|event| (event["level"].clone(), event["namespace"].clone()));
            assert!(found.next().is_none(), "more than one record");
            first
        };
        let _ = layer(github.clone());
        let by_body = github.clone().content_identity();
        let _ = layer(by_body).require_verified();
        let _ = layer(provider::STRIPE.into()).require_verified();
        let _ = layer(by_header()).require_verified();
        assert_eq!(reported(), None);

        let service = layer(github).require_verified().layer(Handler::default().service());
        for id in ["1", "2"] {
            send(&service, request(id)).await;
        }
        assert_eq!(reported(), Some(("INFO".to_owned(), "code".to_owned())));
    });
}

/// Sends a request through the layer alone.
async fn refused(layer: &VerifyLayer, request: http::request::Builder, body: &str) {
    let service = layer.layer(tower::service_fn(async |_| {
        Ok::<_, std::convert::Infallible>(http::Response::new(String::new()))
    }));
    let request = request.body(axum::body::Body::from(body.to_owned())).unwrap();
    let response = ServiceExt::oneshot(service, request).await.unwrap();
    assert_eq!((response.status().as_u16(), response.into_body()), (401, String::new()));
}

/// The reason is logged with the sender and the path, without another value of the request than its id.
#[test]
fn refusal_of_a_request_is_counted_and_logged_without_its_values() {
    observed(async |log, snapshotter| {
        let verify = VerifyLayer::new(provider::GITHUB.verifier("It's a Secret").unwrap());
        for (signature, reason) in [
            (None, "x-hub-signature-256 is missing"),
            (Some("sha256=00aa"), "the signature does not match the request"),
        ] {
            let mut request = http::Request::post("/hook?token=secret");
            if let Some(signature) = signature {
                request = request.header("x-hub-signature-256", signature);
            }
            refused(&verify, request, "body").await;
            let record = log.last("not verified");
            let [level, why] = ["level", "reason"].map(|field| record[field].as_str());
            assert_eq!((level, why), ("WARN", reason));
            assert_eq!((&*record["preset"], &*record["path"]), ("github", "/hook"));
            assert_eq!(record.len(), 5, "{record:?}");
        }
        let own = VerifyLayer::from_fn(|_, _, _| Err(Refusal::OutOfTime));
        refused(&own, http::Request::post("/own"), "").await;
        assert!(!log.last("not verified").contains_key("preset"));
        refused(&own.clone().named("inhouse"), http::Request::post("/own"), "").await;
        assert_eq!(log.last("not verified")["preset"], "inhouse");
        let sums = measured(&snapshotter);
        for labels in [
            ["github", "missing"],
            ["github", "forged"],
            ["other", "out_of_time"],
            ["inhouse", "out_of_time"],
        ] {
            assert_eq!(value(&sums, "tower_dedup_not_verified_total", &labels), 1.0, "{labels:?}");
        }
    });
}

/// Nobody has verified it, and it is the only trace of the delivery.
#[test]
fn refused_request_is_logged_with_the_id_that_it_claims() {
    observed(async |log, _| {
        let stripe = VerifyLayer::new(provider::STRIPE.verifier("whsec_x").unwrap());
        let github = VerifyLayer::new(provider::GITHUB.verifier("x").unwrap());
        let own = VerifyLayer::from_fn(|_, _, _| Err(Refusal::Forged));
        let by_id = own.clone().claimed_id(by_header());
        let panics = KeyExtractor::from_fn("test", |_| panic!("the closure panics"));
        let panics = own.clone().claimed_id(panics);
        let now = std::time::SystemTime::now();
        let now = now.duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
        let signed = || {
            let signature = format!("t={now},v1=00");
            http::Request::post("/hook").header("stripe-signature", signature)
        };
        let pushed = || http::Request::post("/hook").header("x-github-delivery", "push-1");
        let named = |id: &str| http::Request::post("/hook").header("webhook-id", id.as_bytes());
        let evt = r#"{"id":"evt_1"}"#;
        let large = format!(r#"{{"id":"evt_1","text":"{}"}}"#, "x".repeat(64 * 1024));
        let hashed = crate::support::dedup_key("push-1").log_id();
        for (verify, request, body, id) in [
            (&stripe, signed(), evt, Some("evt_1")),
            (&stripe, signed(), "no json", None),
            (&stripe, signed(), &large, None),
            // The body is not read.
            (&stripe, http::Request::post("/hook"), evt, None),
            (&github, pushed(), &large, Some("push-1")),
            (&github.clone().log_ids(LogIds::Hashed), pushed(), "", Some(&*hashed)),
            (&own, named("a"), "", None),
            (&by_id, named("a"), "", Some("a")),
            (&by_id, named("a\u{202e}\u{9b}b"), "", Some("a\\u{202e}\\u{9b}b")),
            (&panics, named("a"), "", None),
        ] {
            refused(verify, request, body).await;
            let record = log.last("not verified");
            assert_eq!(record.get("claimed_id").map(String::as_str), id, "{record:?}");
        }
    });
}

/// The URL that is configured twice, in the verifier and by the route, is the most common mistake.
#[test]
fn refused_request_is_logged_with_the_url_that_its_sender_has_to_have_signed() {
    observed(async |log, _| {
        let url_signed = [
            (provider::SQUARE, true),
            (provider::TWILIO, true),
            (provider::HUBSPOT, true),
            (provider::GITHUB, false),
        ];
        for (sender, is_signed) in url_signed {
            let verifier =
                sender.verifier_at("https://h.example/webhooks/twilio", "secret").unwrap();
            let request = http::Request::post("/webhooks/twilio?From=%2B1555");
            refused(&VerifyLayer::new(verifier), request, "").await;
            let record = log.last("not verified");
            let url = "https://h.example/webhooks/twilio/webhooks/twilio";
            assert_eq!(record.get("url").map(String::as_str), is_signed.then_some(url));
        }
    });
}

/// Servers let such paths through.
#[test]
fn text_of_a_request_makes_no_further_line_of_a_record_and_reorders_none() {
    observed(async |log, _| {
        let verifier = provider::SQUARE.verifier_at("https://h", "secret").unwrap();
        let path = "/a\u{202e}b\u{9b}c\u{2028}d";
        let uri = http::Uri::from_maybe_shared(bytes::Bytes::from(path)).unwrap();
        refused(&VerifyLayer::new(verifier), http::Request::post(uri), "").await;
        let record = log.last("not verified");
        let shown = r"/a\u{202e}b\u{9b}c\u{2028}d";
        assert_eq!((&*record["path"], &*record["url"]), (shown, &*format!("https://h{shown}")));

        let outside = || KeyError::new(KeyErrorKind::Rejected, "tenant a\u{202e}\nb");
        let key = KeyExtractor::from_fn("test", move |_| Err(outside()));
        let service = DedupLayer::new(key, store()).layer(Handler::default().service());
        send(&service, request("a")).await;
        assert_eq!(log.last("delivery")["error"], r"tenant a\u{202e}\nb was rejected");
    });
}

const NEARLY_FULL: &str = "nearly full: the memory store has reached four fifths of its capacity";

async fn record(adapter: &MemoryAdapter, ids: std::ops::Range<usize>) {
    for id in ids {
        let keys = crate::support::dedup_key(&id.to_string());
        let day = CallTerms::on_claim(Token::random(), Duration::from_secs(86_400));
        assert_eq!(adapter.claim(&keys, &on_claim(&day)).await.unwrap(), FIRST);
    }
}

#[test]
fn a_memory_store_that_is_four_fifths_full_is_logged_once_an_hour() {
    observed(async |log, _| {
        let adapter = MemoryAdapter::with_capacity(10);
        record(&adapter, 0..8).await;
        assert_eq!(log.all(NEARLY_FULL).len(), 0);
        record(&adapter, 8..10).await;
        assert_eq!(log.all(NEARLY_FULL).len(), 1);
        // A forgotten key leaves a row, which the next new keys replace.
        let forget = async |ids: std::ops::Range<usize>| {
            for id in ids {
                adapter.forget(&crate::support::dedup_key(&id.to_string())).await.unwrap();
            }
        };
        forget(0..10).await;
        record(&adapter, 10..20).await;
        assert_eq!(log.all(NEARLY_FULL).len(), 1);
        forget(10..20).await;
        adapter.advance(Duration::from_secs(3_601));
        record(&adapter, 20..30).await;
        assert_eq!(log.all(NEARLY_FULL).len(), 2);
    });
}

/// A subscriber that calls the store, which is allowed because no lock is held.
struct Asks(Arc<MemoryAdapter>);

impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for Asks {
    fn on_event(&self, _: &tracing::Event<'_>, _: tracing_subscriber::layer::Context<'_, S>) {
        let counted = futures_util::FutureExt::now_or_never(self.0.stats());
        assert!(counted.unwrap().unwrap().rows > 0);
    }
}

#[test]
fn a_memory_store_logs_while_it_holds_no_lock() {
    use tracing_subscriber::layer::SubscriberExt;
    let (done, ended) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let adapter = MemoryAdapter::with_capacity(5);
        let adapter = Arc::new(adapter);
        let subscriber = tracing_subscriber::registry().with(Asks(Arc::clone(&adapter)));
        tracing::subscriber::with_default(subscriber, || {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            runtime.block_on(record(&adapter, 0..5));
        });
        done.send(()).unwrap();
    });
    ended.recv_timeout(Duration::from_secs(20)).expect("the subscriber waits for a lock");
}
