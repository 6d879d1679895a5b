//! Logs and metrics: every outcome has its log record and its metrics.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body as AxumBody;
use http_body_util::Full;
use metrics_util::debugging::Snapshotter;
use tower::{Layer, ServiceExt};
use tower_dedup::adapter::MemoryAdapter;
use tower_dedup::adapter::contract::{CallTerms, DedupAdapter, Token};
use tower_dedup::ledger::Ledger;
use tower_dedup::testing::{Fault, StoreCall};
use tower_dedup::verify::{Refusal, VerifyLayer};
use tower_dedup::{
    DedupLayer, KeyError, KeyErrorKind, KeyExtractor, LogIds, Mode, OnMismatch, OnUnavailable,
    Replay, Verified, key, provider,
};

use crate::observed::{Sums, measured, observed, value};
use support::log::Log;
use support::{
    Handler, by_header, dedup_key, faulty_memory as store, request, request_to, send, terms,
};

pub(crate) type Watch = (Log, Snapshotter);

/// Checks that the last of so many deliveries has this record, and its metrics. Returns the record, and what was
/// measured since the last look.
pub(crate) fn checked(
    (log, snapshotter): &Watch,
    deliveries: usize,
    [outcome, level, status]: [&str; 3],
) -> (BTreeMap<String, String>, Sums) {
    let mut records = log.all("delivery");
    assert_eq!(records.len(), deliveries, "{outcome}: one record for each delivery");
    let record = records.pop().unwrap();
    let field = |name| record.get(name).map_or("", String::as_str);
    assert_eq!(["outcome", "level", "status"].map(field), [outcome, level, status], "{record:?}");
    assert!(field("duration_ms").parse::<f64>().unwrap() >= 0.0);
    let sums = measured(snapshotter);
    for name in ["tower_dedup_deliveries_total", "tower_dedup_delivery_duration_seconds"] {
        assert_eq!(value(&sums, name, &[field("namespace"), outcome]), 1.0, "{outcome}: {sums:#?}");
    }
    assert_eq!(value(&sums, "tower_dedup_running", &[field("namespace")]), 0.0, "{outcome}");
    let is_first = field("attempt") == "1";
    let first = ["completed", "failed"].map(|result| {
        value(&sums, "tower_dedup_first_attempts_total", &[field("namespace"), result]) == 1.0
    });
    let is_completed = outcome == "completed";
    assert_eq!(first, [is_first && is_completed, is_first && !is_completed], "{record:?}");
    (record, sums)
}

/// Sends one delivery, and checks its record and its metrics.
async fn reported<L: Ledger>(
    watch: &Watch,
    layer: DedupLayer<L>,
    handler: &Handler,
    request: http::Request<impl Into<AxumBody>>,
    row: [&str; 3],
) -> (BTreeMap<String, String>, Sums) {
    reported_within(watch, (layer, 1_024), handler, request, row).await
}

/// Does the same while so many deliveries may run.
async fn reported_within<L: Ledger>(
    watch: &Watch,
    (layer, max_running): (DedupLayer<L>, usize),
    handler: &Handler,
    request: http::Request<impl Into<AxumBody>>,
    row: [&str; 3],
) -> (BTreeMap<String, String>, Sums) {
    let (before, _) = (watch.0.all("delivery").len(), measured(&watch.1));
    let service = layer.layer(handler.fallible());
    drop(layer.max_running(max_running));
    // A panic ends the task, and an error has no status.
    let _ = tokio::spawn(service.oneshot(request.map(Into::into))).await;
    checked(watch, before + 1, row)
}

fn body(id: &str, body: impl Into<AxumBody>) -> http::Request<AxumBody> {
    let mut request = request(id).map(|_| body.into());
    request.headers_mut().insert("x-kind", "order.paid".parse().unwrap());
    request
}

#[test]
fn every_outcome_has_its_record_and_its_metrics() {
    observed(async |log, snapshotter| {
        let (watch, store) = (&(log.clone(), snapshotter), store());
        let layer = |key: KeyExtractor| {
            DedupLayer::new(key, Arc::clone(&store))
                .store_timeout(Duration::from_millis(50))
                .wait(Duration::ZERO)
                .body_limit(100)
        };
        let test = || layer(by_header().event_type(key::header("x-kind")));
        let handler = Handler::default();
        let ends = async |layer, id: &str, row| {
            reported(watch, layer, &handler, body(id, "payload"), row).await
        };
        let is = |record: &BTreeMap<_, _>, field: &str, text: &str| {
            assert_eq!(record.get(field).map(String::as_str), Some(text), "{field}: {record:?}");
        };

        // What the handler did.
        for (status, row) in [
            (500, ["failed", "INFO", "500"]),
            (1, ["failed", "INFO", ""]),
            (0, ["panicked", "ERROR", ""]),
        ] {
            let handler = Handler::default().then(status);
            reported(watch, test(), &handler, body("+15005550006", ""), row).await;
        }
        let (record, sums) = ends(test(), "+15005550006", ["completed", "INFO", "200"]).await;
        for (field, text) in [
            ("id", "+15005550006"),
            ("namespace", "test"),
            ("keys", "1"),
            ("attempt", "4"),
            ("takeover", "false"),
            ("event_type", "order.paid"),
        ] {
            is(&record, field, text);
        }
        assert!(!record.contains_key("age_ms"));
        for call in ["claim", "complete"] {
            let calls = value(&sums, "tower_dedup_store_duration_seconds", &[call, "ok"]);
            assert_eq!(calls, 1.0, "{call}");
        }
        let (record, _) = ends(test(), "+15005550006", ["duplicate", "INFO", "200"]).await;
        assert!(record.contains_key("age_ms") && !record.contains_key("attempt"), "{record:?}");
        is(&record, "event_type", "order.paid");
        let hangs = Handler::default();
        hangs.hold();
        let timed = test().handler_timeout(Duration::from_millis(20));
        reported(watch, timed, &hangs, body("b", ""), ["handler_timeout", "WARN", "504"]).await;

        // What another process did.
        let hour = Duration::from_secs(3_600);
        let lapsed = CallTerms::on_completion(Token::random(), hour, Duration::ZERO);
        store.claim(&dedup_key("taken"), &lapsed).await.unwrap();
        let (record, sums) = ends(test(), "taken", ["completed", "INFO", "200"]).await;
        is(&record, "takeover", "true");
        assert_eq!(value(&sums, "tower_dedup_takeovers_total", &["test"]), 1.0);
        let takeover = "takeover: an earlier handler of this event died or lost its lease";
        is(&log.last(takeover), "attempt", "2");
        store.claim(&dedup_key("held"), &terms()).await.unwrap();
        ends(test(), "held", ["in_flight", "INFO", "503"]).await;

        // What the store did.
        store.set(StoreCall::Claim, Fault::Fail);
        let (record, sums) = ends(test(), "c", ["unavailable", "WARN", "503"]).await;
        is(&record, "error", "calling a faulty adapter: the store is unavailable");
        let calls = value(&sums, "tower_dedup_store_duration_seconds", &["claim", "unavailable"]);
        assert_eq!(calls, 1.0);
        let open = test().on_unavailable(OnUnavailable::FailOpen);
        let (_, sums) = ends(open, "c", ["completed", "INFO", "200"]).await;
        assert_eq!(value(&sums, "tower_dedup_unprotected_total", &["test"]), 1.0);
        is(&log.last("running unprotected: the store did not reply"), "level", "WARN");
        store.set(StoreCall::Claim, Fault::None);
        store.set(StoreCall::Release, Fault::Fail);
        let failing = Handler::default().then(500);
        let row = ["failed", "INFO", "500"];
        let (record, _) = reported(watch, test(), &failing, body("e", ""), row).await;
        is(&record, "error", "calling a faulty adapter: the store is unavailable");
        store.set(StoreCall::Release, Fault::None);

        // What is wrong with the request.
        let (record, _) = ends(test(), "  ", ["invalid_key", "WARN", "400"]).await;
        is(&record, "error", "header webhook-id is empty");
        // Most often the pointer or the name is wrong.
        let stripe = key::json("/account").and(key::json("/id")).or(key::json("/id"));
        for (key, place) in [
            (key::header("x-id").namespace("test"), "the key (header x-id)"),
            (
                stripe.namespace("test"),
                "the key (JSON value /account|JSON value /id or JSON value /id)",
            ),
            (
                key::form("a").optional().and(key::query("b")).namespace("test"),
                "the key (form field a?|query parameter b)",
            ),
            (key::body_digest().namespace("test"), "the key (the body)"),
        ] {
            let layer = DedupLayer::new(key, Arc::clone(&store));
            let content = if place.contains("JSON") { "{}" } else { "" };
            let row = ["invalid_key", "WARN", "400"];
            let (record, _) = reported(watch, layer, &handler, body("d", content), row).await;
            is(&record, "error", &format!("{place} is missing"));
        }
        let broken = futures_util::stream::iter([Err::<&str, _>("the upload breaks")]);
        let slow = futures_util::stream::pending::<Result<&str, &str>>();
        for (body_of, row) in [
            ("x".repeat(101).into(), ["too_large", "WARN", "413"]),
            (AxumBody::from_stream(broken), ["broken_body", "WARN", "400"]),
            (AxumBody::from_stream(slow), ["slow_body", "WARN", "408"]),
        ] {
            let layer = test().body_timeout(Duration::from_millis(20));
            reported(watch, layer, &handler, body("d", body_of), row).await;
        }
        let (record, _) =
            ends(test().require_verified(), "d", ["unverified", "ERROR", "500"]).await;
        is(&record, "error", "the request has no extension `Verified`");
        assert!(record["fix"].contains("outside the DedupLayer"), "{record:?}");
        let api = DedupLayer::idempotency_key(key::header("x-tenant"), Arc::clone(&store));
        let mut unscoped = body("d", "");
        unscoped.headers_mut().insert("idempotency-key", "d".parse().unwrap());
        let row = ["unscoped", "ERROR", "500"];
        let (record, _) = reported(watch, api, &handler, unscoped, row).await;
        is(&record, "error", "the scope is missing");
        assert!(record["fix"].contains("authenticates"), "{record:?}");
        let row = ["overloaded", "WARN", "503"];
        let (record, _) = reported_within(watch, (test(), 0), &handler, body("d", ""), row).await;
        is(&record, "error", "0 of 0 deliveries run, 0 of 256 wait for their event");
        assert!(record["fix"].contains("`max_running`"), "{record:?}");

        // Requests without an event.
        let bypass = layer(by_header().bypass_when(|_| true));
        ends(bypass, "e", ["bypass", "DEBUG", "200"]).await;
        let handshake = layer(by_header().handshake_when(|_| true));
        ends(handshake, "e", ["handshake", "INFO", "200"]).await;

        // Two payloads, and a response that is too long to be stored.
        let comparing = |refuse| {
            test().compare_payload(key::body_digest(), refuse).replay(Replay::new().body_limit(3))
        };
        let (_, sums) =
            ends(comparing(OnMismatch::Report), "f", ["completed", "INFO", "200"]).await;
        assert_eq!(value(&sums, "tower_dedup_responses_not_stored_total", &["test"]), 1.0);
        let not_stored = "response not stored: duplicates of this event get an empty response";
        is(&log.last(not_stored), "why", "its body is too long");
        is(&log.last(not_stored), "id", "f");
        let differs = "payload mismatch: this event was handled with another payload";
        assert!(log.all(differs).is_empty());
        for (refuse, status) in [(OnMismatch::Report, "200"), (OnMismatch::Refuse, "422")] {
            let row = ["mismatch", "WARN", status];
            let (record, sums) =
                reported(watch, comparing(refuse), &handler, body("f", "two"), row).await;
            assert!(record.contains_key("age_ms"));
            assert_eq!(value(&sums, "tower_dedup_mismatches_total", &["test"]), 1.0);
            is(&log.last(differs), "id", "f");
            is(&log.last(differs), "level", "WARN");
        }
    });
}

/// An id may be personal data, and the keys of clients may name persons.
#[test]
fn ids_are_hashed_by_choice_and_those_of_api_clients_always() {
    observed(async |log, _| {
        let (handler, hash) = (Handler::default(), dedup_key("k").log_id());
        let hashed = DedupLayer::new(by_header(), store()).log_ids(LogIds::Hashed);
        send(&hashed.layer(handler.service()), request("k")).await;
        assert_eq!(log.last("delivery")["id"], hash);
        let layer = DedupLayer::idempotency_key(key::header("x-user"), store());
        let mut request = request("k");
        for (name, value) in [("x-user", "u"), ("idempotency-key", "k")] {
            request.headers_mut().insert(name, value.parse().unwrap());
        }
        send(&layer.layer(handler.service()), request).await;
        let id = log.last("delivery")["id"].clone();
        assert!(id.len() == 16 && id.bytes().all(|digit| digit.is_ascii_hexdigit()), "{id}");
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
            let retried = DedupLayer::new(preset, store()).failures_are_retried();
            for (layer, level) in [(DedupLayer::new(preset, store()), level), (retried, "INFO")] {
                let service = layer.layer(Handler::default().then(500).service());
                let event = tower_dedup::testing::request(preset, "/hook", "1");
                send(&service, event.map(axum::body::Body::new)).await;
                let record = log.last("delivery");
                let found = (&*record["outcome"], &*record["level"]);
                assert_eq!(found, ("failed", level), "{preset:?}");
            }
        }
    });
}

/// A layer whose sender signs, and which nobody has put behind a verification.
#[test]
fn sender_that_signs_and_is_not_verified_is_reported_once() {
    let stripe = || KeyExtractor::from(provider::STRIPE);
    let own = || by_header();
    for (key, verified, requires, expected) in [
        (stripe(), false, false, 1),
        (stripe(), true, false, 0),
        (stripe(), true, true, 0),
        (own(), false, false, 0),
    ] {
        observed(async |log, _| {
            let layer = DedupLayer::new(key.clone(), store());
            let layer = if requires { layer.require_verified() } else { layer };
            let service = layer.layer(Handler::default().service());
            for id in ["evt_1", "evt_2"] {
                let sent = tower_dedup::testing::request(provider::STRIPE, "/hook", id);
                let mut sent = sent.map(axum::body::Body::new);
                sent.headers_mut().insert("webhook-id", id.parse().unwrap());
                if verified {
                    sent.extensions_mut().insert(Verified);
                }
                assert_eq!(send(&service, sent).await.status(), 200);
            }
            assert_eq!(log.beginning("nobody verifies").len(), expected, "{key:?} {verified}");
        });
    }
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
    for (mode, runs) in [(Mode::Enforce, 10), (Mode::Shadow, 40)] {
        observed(async |_, snapshotter| {
            let (layer, handler) = (DedupLayer::new(by_header(), store()), Handler::default());
            let service = layer.mode(mode).layer(handler.service());
            let mut counts = Vec::new();
            for number in 0..10 {
                for path in ["/counted", "/other", "/counted", "/other"] {
                    let event = request_to(path, &format!("other path {number}"));
                    assert_eq!(send(&service, event).await.status(), 200);
                }
                counts.push(value(&measured(&snapshotter), ON_ANOTHER_PATH, &["test"]));
            }
            assert_counted_on_another_path(&counts, 2.0);
            assert_eq!(handler.runs(), runs, "{mode}");
        });
    }
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
        for labels in [["other", "refused"], ["inhouse", "refused"]] {
            assert_eq!(value(&sums, "tower_dedup_verifications_total", &labels), 1.0, "{labels:?}");
        }
        assert_eq!(value(&sums, "tower_dedup_verifications_total", &["github", "refused"]), 2.0);
    });
}

/// Only with those that passed, refusals can be told from a sender whose every request is refused.
#[test]
fn request_to_a_verifying_layer_is_counted_once_by_its_result() {
    observed(async |_, snapshotter| {
        const SECRET: &str = "It's a Secret";
        let verify = VerifyLayer::new(provider::GITHUB.verifier(SECRET).unwrap());
        let found = VerifyLayer::select(async |_| Ok(Some(provider::GITHUB.verifier(SECRET)?)));
        let own = VerifyLayer::from_fn(
            |_, body, _| {
                if body == b"good" { Ok(()) } else { Err(Refusal::Forged) }
            },
        );
        let reporting = verify.clone().named("reporting").report_only();
        let signed = || {
            let request = tower_dedup::testing::request(provider::GITHUB, "/hook", "id-1");
            tower_dedup::testing::sign(request, provider::GITHUB, SECRET)
        };
        let unsigned = |body: &'static str| http::Request::new(Full::from(body));
        for (layer, request, status) in [
            (&verify, signed(), 200),
            (&found, signed(), 200),
            (&found, unsigned(""), 401),
            (&own, unsigned("good"), 200),
            (&own, unsigned("bad"), 401),
            (&reporting, signed(), 200),
            (&reporting, unsigned(""), 200),
            (&reporting.clone().body_limit(1), unsigned("large"), 413),
        ] {
            let service = layer.layer(tower::service_fn(async |_| {
                Ok::<_, std::convert::Infallible>(http::Response::new(String::new()))
            }));
            let response = ServiceExt::oneshot(service, request).await.unwrap();
            assert_eq!(response.status(), status);
        }
        let sums = measured(&snapshotter);
        let name = "tower_dedup_verifications_total";
        for (labels, count) in [
            (["github", "passed"], 2.0),
            (["github", "refused"], 1.0),
            (["other", "passed"], 1.0),
            (["other", "refused"], 1.0),
            (["reporting", "passed"], 1.0),
            (["reporting", "reported"], 1.0),
            (["reporting", "refused"], 1.0),
        ] {
            assert_eq!(value(&sums, name, &labels), count, "{labels:?}");
        }
        assert_eq!(sums.keys().filter(|(of, _)| of == name).count(), 7);
    });
}

/// Nobody has verified it, and it is the only trace of the delivery.
#[test]
fn refused_request_is_logged_with_the_id_that_it_claims() {
    observed(async |log, _| {
        let stripe = VerifyLayer::new(provider::STRIPE.verifier("whsec_x").unwrap());
        let github = VerifyLayer::new(provider::GITHUB.verifier("x").unwrap());
        let tenants =
            VerifyLayer::select(async |_| Ok(Some(provider::GITHUB.verifier("of a tenant")?)));
        let own = VerifyLayer::from_fn(|_, _, _| Err(Refusal::Forged));
        let now = std::time::SystemTime::now();
        let now = now.duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
        let signed = || {
            let signature = format!("t={now},v1=00");
            http::Request::post("/hook").header("stripe-signature", signature)
        };
        let pushed = || http::Request::post("/hook").header("x-github-delivery", "push-1");
        let named = |id: &str| http::Request::post("/hook").header("webhook-id", id.as_bytes());
        let evt = r#"{"id":"evt_1"}"#;
        let of_length = |length: usize| {
            let around = r#"{"id":"evt_1","text":""}"#;
            around.replace(r#""""#, &format!(r#""{}""#, "x".repeat(length - around.len())))
        };
        let (long, large) = (of_length(4 * 1024), of_length(4 * 1024 + 1));
        // Of a list, nothing after its first event is read.
        let [hubspot, whatsapp, adyen] = [provider::HUBSPOT, provider::WHATSAPP, provider::ADYEN]
            .map(|sender| {
                VerifyLayer::new(sender.verifier_at("https://h", "6120".repeat(8)).unwrap())
            });
        let contacts = http::Request::post("/hook")
            .header("x-hubspot-signature-v3", "AA==")
            .header("x-hubspot-request-timestamp", format!("{now}000"));
        let contact = r#"[{"portalId":1,"appId":2,"subscriptionId":3,"eventId":4},{},[],1]"#;
        let signed_by_meta =
            || http::Request::post("/hook").header("x-hub-signature-256", "sha256=00");
        let messages = r#"{"entry":[{"changes":[{"value":{"messages":[{"id":"m1"},{"id":[]},1]}},
            {"value":{"messages":7}},7]},{"changes":7},7]}"#;
        let items = r#"{"notificationItems":[{"NotificationRequestItem":{"pspReference":"p1",
            "eventCode":"REFUND","success":true}},{},7]}"#;
        let hashed = dedup_key("push-1").log_id();
        for (verify, request, body, id) in [
            (&stripe, signed(), evt, Some("evt_1")),
            (&stripe, signed(), "no json", None),
            (&stripe, signed(), &long, Some("evt_1")),
            (&stripe, signed(), &large, None),
            (&hubspot, contacts, contact, Some("1|2|3|4|||")),
            (&whatsapp, signed_by_meta(), messages, Some("|m1")),
            (&whatsapp, signed_by_meta(), r#"{"entry":[{"changes":7},7]}"#, None),
            (&adyen, http::Request::post("/hook"), items, Some("|p1|REFUND|true")),
            // The body is not read.
            (&stripe, http::Request::post("/hook"), evt, None),
            (&github, pushed(), &large, Some("push-1")),
            (&github.clone().log_ids(LogIds::Hashed), pushed(), "", Some(&*hashed)),
            (&tenants, pushed(), "", Some("push-1")),
            (&own, named("a"), "", None),
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

        let tenant = "a\u{202e}b\u{200f}c\u{2028}d";
        let key = by_header().namespace_by(move |_| Some(tenant.to_owned())).content_identity();
        let service = DedupLayer::new(key, store()).layer(Handler::default().service());
        send(&service, request("a")).await;
        send(&service, request("b")).await;
        let shown = r"a\u{202e}b\u{200f}c\u{2028}d";
        let record = log.last("same body: it was handled under another id, and this id stays free");
        assert_eq!(record["namespace"], format!("test:{shown}"));
        assert_eq!(record["by_namespace"], format!("test.body:{shown}"));
        assert_eq!(log.last("delivery")["namespace"], format!("test:{shown}"));
    });
}
