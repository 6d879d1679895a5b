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
use tower_dedup::key::{self, KeyExtractor};
use tower_dedup::{DedupLayer, Delivery, OnMissingKey};

use crate::requests::{letters, with_body, with_form, with_headers};
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
