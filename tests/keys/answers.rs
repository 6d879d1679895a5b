//! Answers of the layer to missing, malformed and duplicate keys.
#![expect(clippy::unwrap_used, reason = "what cannot be unwrapped fails the test")]

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use tower::{Layer, ServiceExt, service_fn};
use tower_dedup::adapter::MemoryAdapter;
use tower_dedup::adapter::inspect::MaintenanceAdapter;
use tower_dedup::key::{self, Event, Extracted, KeyExtractor, Keys};
use tower_dedup::{DedupKey, DedupLayer, Delivery, KeyError, KeyErrorKind, OnMissingKey};

use crate::requests::{dedup_key, letters, sha256, with_body, with_form, with_headers};
use crate::support::rows;

/// A handler behind a layer, its number of runs, and the layer's store.
struct Bench {
    layer: DedupLayer,
    store: Arc<dyn MaintenanceAdapter>,
    runs: Arc<AtomicUsize>,
}

impl Bench {
    fn new(key: KeyExtractor) -> Self {
        let store: Arc<dyn MaintenanceAdapter> = Arc::new(MemoryAdapter::new());
        let layer = DedupLayer::new(key, Arc::clone(&store));
        Self { layer, store, runs: Arc::default() }
    }

    /// Sends a request. Returns the status and, if the layer answered, its result.
    async fn send(&self, request: Request<&'static str>) -> (StatusCode, Option<String>) {
        let runs = Arc::clone(&self.runs);
        let handler = service_fn(move |request: Request<Full<Bytes>>| {
            runs.fetch_add(1, Ordering::SeqCst);
            let protected = request.extensions().get::<Delivery>().is_some();
            let status = if protected { StatusCode::CREATED } else { StatusCode::ACCEPTED };
            async move {
                let mut response = Response::new(Full::<Bytes>::default());
                *response.status_mut() = status;
                Ok::<_, Infallible>(response)
            }
        });
        let request = request.map(|body| Full::new(Bytes::from(body)));
        let response = self.layer.layer(handler).oneshot(request).await.unwrap();
        let why = response.headers().get("x-dedup-result");
        (response.status(), why.map(|why| why.to_str().unwrap().to_owned()))
    }

    fn runs(&self) -> usize {
        self.runs.load(Ordering::SeqCst)
    }

    async fn stored(&self) -> u64 {
        rows(&self.store).await
    }
}

/// The response of a handler that got a `Delivery`.
fn ran() -> (StatusCode, Option<String>) {
    (StatusCode::CREATED, None)
}

/// The response of a handler that got none.
fn ran_unprotected() -> (StatusCode, Option<String>) {
    (StatusCode::ACCEPTED, None)
}

fn duplicate() -> (StatusCode, Option<String>) {
    (StatusCode::OK, Some("duplicate".to_owned()))
}

fn invalid() -> (StatusCode, Option<String>) {
    (StatusCode::BAD_REQUEST, Some("invalid-key".to_owned()))
}

#[tokio::test]
async fn a_malformed_key_is_400_and_claims_nothing() {
    for (part, request) in [
        (key::header("x-id"), with_headers(&[b"a", b"b"])),
        (key::header("x-id"), with_headers(&[b""])),
        (key::header("x-id"), with_headers(&[b"\xff"])),
        (key::form("id"), with_form("id=%00")),
        (key::form("id"), with_form("id=%ff")),
        (key::query("id"), Request::post("/?id=a&id=b").body("").unwrap()),
        (key::json("/id"), with_body(r#"{"id":"a\u0000"}"#)),
        (key::json("/id"), with_body(r#"{"id":"a","id":"b"}"#)),
        (key::json("/id"), with_body("{")),
    ] {
        // The policy for missing keys does not apply to malformed keys.
        for policy in [OnMissingKey::Reject, OnMissingKey::PassThrough, OnMissingKey::BodyDigest] {
            let mut bench = Bench::new(part.clone().namespace("n"));
            bench.layer = bench.layer.on_missing_key(policy);
            assert_eq!(bench.send(request.clone()).await, invalid(), "{part:?}");
            assert_eq!((bench.runs(), bench.stored().await), (0, 0), "{part:?}");
        }
    }
}

#[tokio::test]
async fn a_missing_key_is_400_by_default() {
    let bench = Bench::new(key::header("x-id").namespace("n"));
    assert_eq!(bench.send(with_body("abc")).await, invalid());
    assert_eq!((bench.runs(), bench.stored().await), (0, 0));
}

#[tokio::test]
async fn a_missing_key_reaches_the_handler_under_pass_through() {
    let mut bench = Bench::new(key::header("x-id").namespace("n"));
    bench.layer = bench.layer.on_missing_key(OnMissingKey::PassThrough);
    for _ in 0..2 {
        assert_eq!(bench.send(with_body("abc")).await, ran_unprotected());
    }
    assert_eq!((bench.runs(), bench.stored().await), (2, 0));
}

#[tokio::test]
async fn a_missing_key_is_replaced_by_the_body_digest_under_body_digest() {
    let mut bench = Bench::new(key::header("x-id").namespace("n"));
    bench.layer = bench.layer.on_missing_key(OnMissingKey::BodyDigest);
    assert_eq!(bench.send(with_body("abc")).await, ran());
    assert_eq!(bench.send(with_body("abc")).await, duplicate());
    assert_eq!(bench.send(with_body("abd")).await, ran());
    let abc = dedup_key("n", &format!("body_{}", sha256(b"abc")));
    assert!(bench.store.get(&abc).await.unwrap().is_some());
}

/// Otherwise the second delivery without key and body would be a duplicate of the first.
#[tokio::test]
async fn body_digest_of_an_empty_body_is_a_missing_key() {
    let mut bench = Bench::new(key::header("x-id").namespace("n"));
    bench.layer = bench.layer.on_missing_key(OnMissingKey::BodyDigest);
    assert_eq!(bench.send(with_body("")).await, invalid());
    let by_body = Bench::new(key::body_digest().namespace("n"));
    assert_eq!(by_body.send(with_body("")).await, invalid());
    assert_eq!((bench.stored().await, by_body.stored().await), (0, 0));
    let mut by_body = Bench::new(key::body_digest().namespace("n"));
    by_body.layer = by_body.layer.on_missing_key(OnMissingKey::PassThrough);
    for _ in 0..2 {
        assert_eq!(by_body.send(with_body("")).await, ran_unprotected());
    }
}

#[tokio::test]
async fn a_bypassed_request_always_reaches_the_handler() {
    let bench = Bench::new(
        key::header("x-id").namespace("n").bypass_when(|request| request.body() == "ping"),
    );
    let ping = || with_headers(&[b"1"]).map(|_| "ping");
    assert_eq!(bench.send(ping()).await, ran_unprotected());
    assert_eq!(bench.send(ping()).await, ran_unprotected());
    // The bypassed requests have claimed no key.
    assert_eq!(bench.send(with_headers(&[b"1"])).await, ran());
    assert_eq!(bench.stored().await, 1);
}

#[tokio::test]
async fn a_delivery_is_a_duplicate_if_either_identity_is_complete() {
    let bench =
        Bench::new(key::header("a").namespace("n").second_identity("object", key::header("b")));
    assert_eq!(bench.send(letters(&[("a", "1"), ("b", "2")])).await, ran());
    assert_eq!(bench.stored().await, 2);
    assert_eq!(bench.send(letters(&[("a", "1"), ("b", "2")])).await, duplicate());
    assert_eq!(bench.send(letters(&[("a", "9"), ("b", "2")])).await, duplicate());
    assert_eq!(bench.send(letters(&[("a", "1"), ("b", "9")])).await, duplicate());
    assert_eq!(bench.send(letters(&[("a", "1")])).await, duplicate());
    // The namespaces differ, so a key never equals a second identity.
    assert_eq!(bench.send(letters(&[("a", "2"), ("b", "1")])).await, ran());
}

#[tokio::test]
async fn equal_ids_in_two_namespaces_are_two_events() {
    let bench = Bench::new(key::header("x-id").namespace("one"));
    let other = DedupLayer::new(key::header("x-id").namespace("two"), Arc::clone(&bench.store));
    let other = Bench { layer: other, store: Arc::clone(&bench.store), runs: Arc::default() };
    assert_eq!(bench.send(with_headers(&[b"1"])).await, ran());
    assert_eq!(other.send(with_headers(&[b"1"])).await, ran());
    assert_eq!(bench.send(with_headers(&[b"1"])).await, duplicate());
    assert_eq!(bench.stored().await, 2);
}

/// Reads one event from each line.
fn lines() -> KeyExtractor {
    KeyExtractor::from_fn("lines", |request| {
        let body = std::str::from_utf8(request.body())
            .map_err(|_| KeyError::new(KeyErrorKind::Rejected, "the body"))?;
        let keys = body.lines().map(|line| DedupKey::new("lines", line).map(Event::new));
        let keys = keys.collect::<Result<Vec<_>, _>>()?;
        Ok(Keys::new(keys).map_or(Extracted::Missing, Extracted::Keys))
    })
    .unwrap()
}

#[tokio::test]
async fn closure_gives_several_keys() {
    let bench = Bench::new(lines());
    assert_eq!(bench.send(with_body("1\n2\n3")).await, ran());
    assert_eq!(bench.stored().await, 3);
    assert_eq!(bench.send(with_body("2")).await, duplicate());
    assert_eq!(bench.send(with_body("3\n1")).await, duplicate());
    // A delivery with one new event runs.
    assert_eq!(bench.send(with_body("3\n4")).await, ran());
    assert_eq!(bench.send(with_body("")).await, invalid());
    assert_eq!(bench.send(with_body("5\n\n6")).await, invalid());
    assert_eq!((bench.runs(), bench.stored().await), (2, 4));
}

#[tokio::test]
async fn more_keys_than_max_keys_are_400() {
    let mut bench = Bench::new(lines());
    bench.layer = bench.layer.max_keys(2);
    assert_eq!(bench.send(with_body("1\n2")).await, ran());
    assert_eq!(bench.send(with_body("3\n4\n5")).await, invalid());
    // Second identities count.
    let mut bench =
        Bench::new(key::header("a").namespace("n").second_identity("object", key::header("b")));
    bench.layer = bench.layer.max_keys(1);
    assert_eq!(bench.send(letters(&[("a", "1"), ("b", "2")])).await, invalid());
    assert_eq!((bench.runs(), bench.stored().await), (0, 0));
}
