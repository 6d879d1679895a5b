//! A verifying layer that only reports.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use axum::routing::any;
use axum::{Extension, Router};
use bytes::Bytes;
use futures_util::stream;
use http::Request;
use http_body_util::{BodyExt, Full};
use support::log::Log;
use tower::ServiceExt;
use tower_dedup::adapter::MemoryAdapter;
use tower_dedup::adapter::maintenance::MaintenanceAdapter;
use tower_dedup::provider::GITHUB;
use tower_dedup::verify::{Refusal, VerifyLayer};
use tower_dedup::{DedupLayer, Verified, testing};

const SECRET: &str = "It's a Secret to Everybody";

/// The bodies that the handler saw, and whether each was verified.
type Seen = Arc<Mutex<Vec<(Bytes, bool)>>>;

fn app(seen: &Seen) -> Router {
    let seen = Arc::clone(seen);
    let handler = async move |verified: Option<Extension<Verified>>, body: Bytes| {
        seen.lock().unwrap().push((body, verified.is_some()));
    };
    Router::new().fallback(any(handler))
}

fn github() -> VerifyLayer {
    VerifyLayer::new(GITHUB.verifier(SECRET).unwrap())
}

fn push() -> Request<Full<Bytes>> {
    testing::request(GITHUB, "/hook", "id-1")
}

async fn send(app: &Router, request: Request<Full<Bytes>>) -> u16 {
    app.clone().oneshot(request.map(Body::new)).await.unwrap().status().as_u16()
}

#[tokio::test(start_paused = true)]
async fn request_that_is_not_verified_goes_on_and_is_not_verified() {
    let (log, _guard) = Log::of_this_thread();
    let forged = || testing::sign(push(), GITHUB, "another secret");
    let found = async |_| Ok(Some(GITHUB.verifier(SECRET)?));
    for (verify, request, reason) in [
        (github(), push(), "x-hub-signature-256 is missing"),
        (github(), forged(), "the signature does not match the request"),
        (VerifyLayer::select(found), push(), "x-hub-signature-256 is missing"),
        (VerifyLayer::select(found), forged(), "the signature does not match the request"),
        (VerifyLayer::select(async |_| Ok(None)), push(), "no verifier is known for the request"),
        (VerifyLayer::select(async |_| Err("away".into())), push(), "the look-up failed: away"),
        (
            VerifyLayer::select(async |_| std::future::pending().await),
            push(),
            "the look-up took too long",
        ),
        (
            VerifyLayer::select(async |_| panic!("at a request of a stranger")),
            push(),
            "a closure of the verifying layer panicked",
        ),
        (
            VerifyLayer::from_fn(|_, _, _| Err(Refusal::OutOfTime)),
            push(),
            "the signed time is too old or in the future",
        ),
        (
            VerifyLayer::from_fn(|_, _, _| panic!("at a request of a stranger")),
            push(),
            "a closure of the verifying layer panicked",
        ),
    ] {
        let seen = Seen::default();
        let body = request.body().clone().collect().await.unwrap().to_bytes();
        let reporting = app(&seen).layer(verify.clone().report_only());
        let count = log.all("not verified").len();
        assert_eq!(send(&reporting, request.clone()).await, 200, "{reason}");
        assert_eq!(*seen.lock().unwrap(), [(body, false)], "{reason}");
        let records = log.all("not verified");
        assert_eq!(records.len(), count + 1, "{reason}");
        assert_eq!((&*records[count]["reason"], &*records[count]["reported"]), (reason, "true"));
        // Without it, the same request is refused.
        let enforcing = app(&seen).layer(verify);
        assert!([401, 503].contains(&send(&enforcing, request).await), "{reason}");
        assert!(!log.last("not verified").contains_key("reported"), "{reason}");
        assert_eq!(seen.lock().unwrap().len(), 1);
    }
}

#[tokio::test]
async fn verified_request_goes_on_as_verified() {
    let (log, _guard) = Log::of_this_thread();
    let seen = Seen::default();
    let signed = || testing::sign(push(), GITHUB, SECRET);
    let reporting = app(&seen).layer(github().report_only());
    assert_eq!(send(&reporting, signed()).await, 200);
    // What an outer layer has verified stays so.
    let tried = VerifyLayer::from_fn(|_, _, _| Err(Refusal::Forged)).report_only();
    let twice = app(&seen).layer(tried).layer(github());
    assert_eq!(log.all("not verified").len(), 0);
    assert_eq!(send(&twice, signed()).await, 200);
    let verified: Vec<_> = seen.lock().unwrap().iter().map(|(_, verified)| *verified).collect();
    assert_eq!(verified, [true, true]);
}

/// A layer that reports must not satisfy a layer that demands a verified request.
#[tokio::test]
async fn require_verified_still_refuses() {
    let (seen, store) = (Seen::default(), Arc::new(MemoryAdapter::new()));
    let dedup = DedupLayer::new(GITHUB, Arc::clone(&store)).require_verified();
    let app = app(&seen).layer(dedup).layer(github().report_only());
    for request in [push(), testing::sign(push(), GITHUB, "another secret")] {
        assert_eq!(send(&app, request).await, 500);
    }
    assert!(seen.lock().unwrap().is_empty());
    assert_eq!(store.stats().await.unwrap().rows, 0);
    assert_eq!(send(&app, testing::sign(push(), GITHUB, SECRET)).await, 200);
}

/// There is nothing to pass on.
#[tokio::test(start_paused = true)]
async fn body_that_does_not_arrive_is_refused() {
    let (log, _guard) = Log::of_this_thread();
    let seen = Seen::default();
    let verify = github().body_limit(8).body_timeout(Duration::from_secs(1)).report_only();
    let app = app(&seen).layer(verify);
    let large = Body::from("x".repeat(9));
    let slow = Body::from_stream(stream::pending::<Result<Bytes, std::io::Error>>());
    for (body, status) in [(large, 413), (slow, 408)] {
        let request = Request::post("/hook").body(body).unwrap();
        assert_eq!(app.clone().oneshot(request).await.unwrap().status(), status);
        assert!(!log.last("not verified").contains_key("reported"));
    }
    assert_eq!((log.all("not verified").len(), seen.lock().unwrap().len()), (2, 0));
}
