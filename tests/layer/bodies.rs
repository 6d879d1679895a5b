//! Bodies, methods, missing and malformed keys: answers that precede the claim.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use http::{HeaderValue, Request, Response, StatusCode};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use tower::Layer;
use tower_dedup::adapter::maintenance::MaintenanceAdapter;
use tower_dedup::{
    DedupKey, DedupLayer, KeyExtractor, Mode, OnMissingKey, Verified, key, provider,
};

use support::ledgers::Inner;
use support::log::Log;
use support::{
    Handler, answered, by_header, dedup_key, memory, request, result, rows, send, spawn_send,
};

type Chunks = Vec<Result<Frame<Bytes>, std::io::Error>>;

fn chunks(parts: &[&'static str]) -> Chunks {
    parts.iter().map(|part| Ok(Frame::data(Bytes::from_static(part.as_bytes())))).collect()
}

fn streamed(
    id: &str,
    chunks: Chunks,
) -> Request<impl http_body::Body<Data = Bytes, Error = std::io::Error>> {
    let body = StreamBody::new(futures_util::stream::iter(chunks));
    Request::post("/hook").header("webhook-id", id).body(body).unwrap()
}

/// A handler that returns the request's body.
fn echo() -> impl Inner {
    tower::service_fn(|request: Request<support::Body>| async {
        Ok(Response::new(request.into_body()))
    })
}

#[tokio::test]
async fn handler_gets_the_bytes_that_were_sent() {
    let service = DedupLayer::new(by_header(), memory()).layer(echo());
    let sent = chunks(&["a", "", "bc", "def"]);
    let answer = send(&service, streamed("a", sent)).await;
    assert_eq!(answer.into_body().collect().await.unwrap().to_bytes(), "abcdef");
    let answer = send(&service, streamed("b", Vec::new())).await;
    assert_eq!(answer.into_body().collect().await.unwrap().to_bytes(), "");
    // A duplicate's answer has no body, and its size hint says so.
    let answer = send(&service, streamed("a", chunks(&["a"]))).await;
    assert_eq!(http_body::Body::size_hint(answer.body()).exact(), Some(0));
    assert_eq!(answer.into_body().collect().await.unwrap().to_bytes(), "");
}

/// A body that announces its length and is never read.
struct Announced(u64);

impl http_body::Body for Announced {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        panic!("the body was read");
    }

    fn size_hint(&self) -> http_body::SizeHint {
        http_body::SizeHint::with_exact(self.0)
    }
}

#[tokio::test]
async fn body_over_the_limit_is_413_and_claims_nothing() {
    let (adapter, handler) = (memory(), Handler::default());
    let service =
        DedupLayer::new(by_header(), Arc::clone(&adapter)).body_limit(8).layer(handler.service());
    // The length is announced, as by Content-Length, or not, and the body comes in pieces.
    let announced = send(&service, request("a").map(|_| Announced(9))).await;
    let streamed = send(&service, streamed("b", chunks(&["1234", "5678", "9"]))).await;
    for answer in [announced, streamed] {
        assert_eq!(answered(&answer), (413, Some("too-large")));
    }
    assert_eq!((rows(&adapter).await, handler.runs()), (0, 0));
    let mut just = request("c");
    *just.body_mut() = "12345678".into();
    assert_eq!(send(&service, just).await.status(), 200);
}

#[tokio::test(start_paused = true)]
async fn body_that_breaks_or_does_not_arrive_is_refused_and_claims_nothing() {
    let (adapter, handler) = (memory(), Handler::default());
    let service = DedupLayer::new(by_header(), Arc::clone(&adapter)).layer(handler.service());
    let half = || futures_util::stream::iter(chunks(&["half"]));
    let broken = Err(std::io::Error::from(std::io::ErrorKind::ConnectionReset));
    let broken = half().chain(futures_util::stream::iter([broken])).boxed();
    let slow = half().chain(futures_util::stream::pending()).boxed();
    for (body, answer, seconds) in
        [(broken, (400, Some("broken-body")), 0), (slow, (408, Some("slow-body")), 10)]
    {
        let started = tokio::time::Instant::now();
        let refused = send(&service, request("a").map(|_| StreamBody::new(body))).await;
        assert_eq!((answered(&refused), started.elapsed().as_secs()), (answer, seconds));
        assert_eq!((rows(&adapter).await, handler.runs()), (0, 0));
    }
}

#[tokio::test]
async fn malformed_and_missing_ids_are_400_and_claim_nothing() {
    let (adapter, handler) = (memory(), Handler::default());
    let service = DedupLayer::new(by_header(), Arc::clone(&adapter)).layer(handler.service());
    let with = |values: &[&[u8]]| {
        let mut request = request("x");
        request.headers_mut().remove("webhook-id");
        for value in values {
            request.headers_mut().append("webhook-id", HeaderValue::from_bytes(value).unwrap());
        }
        request
    };
    let blank: &[&[&[u8]]] = &[&[b""], &[b"  \t "]];
    let bad: &[&[&[u8]]] = &[&[b"a", b"a"], &[b"a", b"b"], &[b"\xff\xfe"], &[b"caf\xe9"]];
    // The policy for missing keys does not apply to malformed keys.
    let pass = DedupLayer::new(by_header(), Arc::clone(&adapter));
    let pass = pass.on_missing_key(OnMissingKey::PassThrough).layer(handler.service());
    let digest = key::header("webhook-id").or(key::body_digest()).namespace("test");
    let digest = DedupLayer::new(digest, Arc::clone(&adapter)).layer(handler.service());
    let services = [&service, &pass, &digest];
    let refused = async |count: usize, values: &[&[u8]]| {
        for service in &services[..count] {
            let answer = send(*service, with(values)).await;
            assert_eq!(answered(&answer), (400, Some("invalid-key")), "{values:?}");
        }
    };
    refused(1, &[]).await;
    for values in blank {
        refused(2, values).await;
    }
    for values in bad {
        refused(3, values).await;
    }
    assert_eq!((rows(&adapter).await, handler.runs()), (0, 0));
    // Before an alternative, a blank value is a missing one.
    for (values, answer) in blank.iter().zip([(200, None), (200, Some("duplicate"))]) {
        assert_eq!(answered(&send(&digest, with(values)).await), answer);
    }
    assert_eq!((rows(&adapter).await, handler.runs()), (1, 1));
    // Ten kilobytes are long, but not malformed.
    let long = "i".repeat(10_000);
    assert_eq!(send(&service, with(&[long.as_bytes()])).await.status(), 200);
    assert_eq!(result(&send(&service, with(&[long.as_bytes()])).await), Some("duplicate"));
    let stored = DedupKey::new("test", &long).unwrap();
    assert_eq!(stored.id().len(), 64);
    assert!(adapter.get(&stored).await.unwrap().is_some());
}

#[tokio::test]
async fn missing_key_is_handled_as_the_policy_says() {
    let or_body = key::header("webhook-id").or(key::body_digest()).namespace("test");
    for (key, policy, runs, told) in [
        (by_header(), OnMissingKey::Reject, 0, Some("invalid-key")),
        (by_header(), OnMissingKey::PassThrough, 2, None),
        (or_body, OnMissingKey::Reject, 1, Some("duplicate")),
    ] {
        let (adapter, handler) = (memory(), Handler::default());
        let layer = DedupLayer::new(key, Arc::clone(&adapter)).on_missing_key(policy);
        let service = layer.layer(handler.service());
        let keyless = |body| Request::post("/hook").body(support::Body::from(body)).unwrap();
        send(&service, keyless("same")).await;
        assert_eq!(result(&send(&service, keyless("same")).await), told, "{policy:?}");
        assert_eq!(handler.runs(), runs, "{policy:?}");
        if told == Some("duplicate") {
            assert_eq!(result(&send(&service, keyless("other")).await), None);
            let hash = "body_0967115f2813a3541eaef77de9d9d5773f1c0c04314b0bbfe4ff3b3b1c55b5d5";
            assert!(adapter.get(&dedup_key(hash)).await.unwrap().is_some());
        }
    }
}

#[tokio::test]
async fn methods_that_are_not_deduplicated_pass_through() {
    let handler = Handler::default();
    let service = DedupLayer::new(by_header(), memory()).layer(handler.service());
    let by = |method: &str| {
        let mut request = request("a");
        *request.method_mut() = method.parse().unwrap();
        request
    };
    for method in ["GET", "HEAD", "OPTIONS", "BREW"] {
        for _ in 0..2 {
            assert_eq!(result(&send(&service, by(method)).await), None, "{method}");
        }
    }
    assert_eq!(handler.runs(), 8);
    for method in ["POST", "PUT", "PATCH", "DELETE"] {
        let told = result(&send(&service, by(method)).await) == Some("duplicate");
        assert_eq!(told, method != "POST", "{method}: one key, whatever the method");
    }
}

/// The first request to a new hook must be no 500 for a handler that takes a `Delivery`.
#[tokio::test]
async fn handshake_that_needs_only_a_2xx_is_answered_by_the_layer() {
    let (log, _collecting) = Log::of_this_thread();
    let (adapter, handler) = (memory(), Handler::default());
    let github = || KeyExtractor::from(provider::GITHUB).content_identity();
    let layer = || DedupLayer::new(github(), Arc::clone(&adapter));
    let ping = || {
        let head = Request::post("/").header("x-github-event", "ping");
        let head = head.header("x-github-delivery", "1");
        head.body(support::Body::from(r#"{"zen": "Keep it", "hook_id": 1}"#)).unwrap()
    };
    let answer = async |layer: DedupLayer<_>, request| {
        let response = send(&layer.layer(handler.service()), request).await;
        (response.status().as_u16(), result(&response).map(str::to_owned), handler.runs())
    };
    let handshake = || Some("handshake".to_owned());
    assert_eq!(answer(layer(), ping()).await, (200, handshake(), 0));
    let created = layer().duplicate_status(201.try_into().unwrap());
    assert_eq!(answer(created, ping()).await, (200, handshake(), 0));

    let strict = || layer().require_verified();
    let unverified = (500, Some("unverified".to_owned()), 0);
    assert_eq!(answer(strict(), ping()).await, unverified, "after verification only");
    let mut verified = ping();
    verified.extensions_mut().insert(Verified);
    assert_eq!(answer(strict(), verified).await, (200, handshake(), 0));

    let bypassed = DedupLayer::new(github().bypass_when(|_| true), Arc::clone(&adapter));
    assert_eq!(answer(bypassed, ping()).await, (200, None, 1), "what is bypassed stays so");
    assert_eq!(answer(layer().mode(Mode::Shadow), ping()).await, (200, None, 2));
    assert_eq!(answer(layer().mode(Mode::Off), ping()).await, (200, None, 3));
    assert_eq!(rows(&adapter).await, 0);
    let outcomes: Vec<_> = log.all("delivery").iter().map(|r| r["outcome"].clone()).collect();
    let bypasses = ["bypass", "bypass"];
    let expected = ["handshake", "handshake", "unverified", "handshake"];
    assert_eq!(outcomes, [&expected[..], &bypasses[..]].concat());
}

/// The sender gets an answer, and the log has the reason.
#[tokio::test]
async fn key_whose_closure_panics_is_503_and_logged() {
    let (log, _collecting) = Log::of_this_thread();
    let (adapter, handler) = (memory(), Handler::default());
    let layer = |key: KeyExtractor| DedupLayer::new(key, Arc::clone(&adapter));
    fn panics<T>() -> T {
        panic!("the closure panics")
    }
    let part = || key::from_fn(|_| panics());
    let layers = [
        layer(part().namespace("test")),
        layer(KeyExtractor::from_fn("test", |_| panics())),
        layer(by_header().handshake_when(|_| panics())),
        layer(by_header().bypass_when(|_| panics())),
        layer(by_header().namespace_by(|_| panics())),
        layer(by_header().alias("alias", part())),
        layer(by_header()).compare_payload(part(), tower_dedup::OnMismatch::Report),
        DedupLayer::idempotency_key(part(), Arc::clone(&adapter)),
    ];
    for (number, layer) in layers.into_iter().enumerate() {
        let service = layer.max_running(1).layer(handler.service());
        for _ in 0..2 {
            let mut request = request("a");
            request.headers_mut().insert("idempotency-key", HeaderValue::from_static("a"));
            let answer = send(&service, request).await;
            assert_eq!(answered(&answer), (503, Some("unavailable")), "{number}");
            let record = log.last("delivery");
            assert_eq!(record["outcome"], "unavailable");
            assert_eq!(record["error"], "the key has a closure that panicked");
        }
    }
    assert_eq!(log.all("delivery").len(), 16);
    assert_eq!((rows(&adapter).await, handler.runs()), (0, 0));
}

#[tokio::test]
async fn answers_of_the_layer_are_configurable() {
    let handler = Handler::default();
    let layer = DedupLayer::new(by_header(), memory())
        .duplicate_status(StatusCode::ACCEPTED)
        .result_header(None)
        .wait(Duration::ZERO)
        .in_flight_status(StatusCode::TOO_MANY_REQUESTS)
        .retry_after_in_flight(Duration::from_millis(6_001))
        .retry_after_unavailable(Duration::from_secs(9));
    let service = layer.clone().layer(handler.service());
    handler.hold();
    let first = spawn_send(&service, request("a"));
    handler.running(1).await;
    let in_flight = send(&service, request("a")).await;
    assert_eq!(answered(&in_flight), (429, None));
    assert_eq!(in_flight.headers()["retry-after"], "7", "rounded up");
    handler.release();
    assert_eq!(first.await.unwrap(), StatusCode::OK);
    let again = send(&service, request("a")).await;
    assert_eq!(answered(&again), (202, None));
    assert!(again.headers().is_empty(), "{:?}", again.headers());
    drop(layer.max_running(0));
    assert_eq!(send(&service, request("b")).await.headers()["retry-after"], "9");
}
