//! The verifier of each request, looked up.

use std::future::Ready;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::routing::post;
use bytes::Bytes;
use futures_util::stream;
use http::{Request, Response};
use support::log::Log;
use tower::ServiceExt;
use tower_dedup::adapter::MemoryAdapter;
use tower_dedup::adapter::maintenance::MaintenanceAdapter;
use tower_dedup::verify::{Part, Scheme, VerifyLayer};
use tower_dedup::{BoxError, DedupLayer, key, provider};

const SCHEME: Scheme =
    Scheme::hmac_sha256("x-signature", &[Part::Seconds("x-time"), Part::Text("."), Part::Body]);

/// Looks up the secret of the tenant, which is the first part of the path.
fn tenants(looked_up: &Arc<AtomicUsize>) -> VerifyLayer {
    let looked_up = Arc::clone(looked_up);
    VerifyLayer::select(move |head| {
        looked_up.fetch_add(1, Ordering::Relaxed);
        async move {
            tokio::task::yield_now().await;
            let secret = match head.uri.path() {
                "/acme" => "of acme",
                "/globex" => "of globex",
                "/github" => return Ok(Some(provider::GITHUB.verifier("of github")?)),
                "/broken" => return Err("the database\nis away".into()),
                "/empty" => "",
                "/slow" => std::future::pending().await,
                _ => return Ok(None),
            };
            Ok(Some(SCHEME.verifier(secret)?))
        }
    })
}

fn app(verify: VerifyLayer) -> (Router, Arc<MemoryAdapter>) {
    let store = Arc::new(MemoryAdapter::new());
    let key = key::json("/id").namespace("tenant");
    let key = key.namespace_by(|request| Some(request.uri().path()[1..].to_owned()));
    let dedup = DedupLayer::new(key, Arc::clone(&store)).require_verified();
    let handler = post(async || "done").layer((verify, dedup));
    (Router::new().route("/{tenant}", handler), store)
}

fn signed(path: &str, secret: &str) -> Request<Body> {
    let event = Request::post(path).body(Bytes::from(r#"{"id":"e1"}"#)).unwrap();
    let now = std::time::SystemTime::now();
    SCHEME.sign(secret, None, now, event).unwrap().map(Body::from)
}

async fn send(app: &Router, request: Request<Body>) -> Response<Body> {
    app.clone().oneshot(request).await.unwrap()
}

/// Each request is looked up, and none leaves a key that it must not leave.
#[tokio::test(start_paused = true)]
async fn verifier_of_each_request_is_looked_up() {
    let (log, _guard) = Log::of_this_thread();
    let looked_up = Arc::default();
    let (app, store) = app(tenants(&looked_up));
    const FORGED: &str = "the signature does not match the request";
    const UNKNOWN: &str = "no verifier is known for the request";
    for (sent, (path, secret, status, reason, rows)) in [
        ("/acme", "of acme", 200, None, 1),
        ("/acme", "of acme", 200, None, 1),
        ("/globex", "of globex", 200, None, 2),
        ("/globex", "of acme", 401, Some(FORGED), 2),
        ("/nobody", "of acme", 401, Some(UNKNOWN), 2),
        ("/%61cme", "of acme", 401, Some(UNKNOWN), 2),
        ("/github", "of github", 401, Some("x-hub-signature-256 is missing"), 2),
        ("/broken", "of acme", 503, Some(r"the look-up failed: the database\nis away"), 2),
        ("/empty", "of acme", 503, Some("the look-up failed: the secret is empty"), 2),
        ("/slow", "of acme", 503, Some("the look-up took too long"), 2),
    ]
    .into_iter()
    .enumerate()
    {
        let refused = log.all("not verified").len();
        let began = tokio::time::Instant::now();
        let response = send(&app, signed(path, secret)).await;
        assert!(began.elapsed() < Duration::from_secs(3), "{path}");
        assert_eq!(response.status(), status, "{path}");
        let retry_after = response.headers().get("retry-after").map(|value| value.as_bytes());
        assert_eq!(retry_after, (status == 503).then_some(&b"30"[..]), "{path}");
        assert_eq!(store.stats().await.unwrap().rows, rows, "{path}");
        assert_eq!(looked_up.load(Ordering::Relaxed), sent + 1, "{path}");
        let records = log.all("not verified");
        assert_eq!(records.len() - refused, usize::from(reason.is_some()), "{path}");
        if let Some(reason) = reason {
            let record = records.last().unwrap();
            assert_eq!((&*record["reason"], &*record["path"]), (reason, path));
            let preset = record.get("preset").map(String::as_str);
            assert_eq!(preset, (path == "/github").then_some("github"));
        }
    }
    let named = app_of(tenants(&looked_up).named("in-house"));
    assert_eq!(send(&named, signed("/nobody", "x")).await.status(), 401);
    assert_eq!(log.last("not verified")["preset"], "in-house");
}

fn app_of(verify: VerifyLayer) -> Router {
    app(verify).0
}

/// Nobody can make the server buffer a body for a tenant that it does not know.
#[tokio::test(start_paused = true)]
async fn look_up_runs_before_the_body_is_read() {
    let app = app_of(tenants(&Arc::default()));
    for (path, status) in [("/nobody", 401), ("/broken", 503), ("/slow", 503), ("/acme", 401)] {
        let body = stream::poll_fn(|_| -> std::task::Poll<Option<Result<Bytes, BoxError>>> {
            panic!("the body was read")
        });
        let request = Request::post(path).body(Body::from_stream(body)).unwrap();
        assert_eq!(send(&app, request).await.status(), status, "{path}");
    }
}

/// Anybody can send the bytes at which a closure panics: they are looked at before the signature holds.
#[tokio::test]
async fn panic_of_a_closure_is_answered_503_and_leaves_a_record() {
    let (log, _guard) = Log::of_this_thread();
    let layers = [
        VerifyLayer::from_fn(|_, body, _| panic!("{body:?} of nobody")),
        VerifyLayer::select(|head| -> Ready<_> { panic!("{:?} of nobody", head.uri) }),
        VerifyLayer::select(async |head| panic!("{:?} of nobody", head.uri)),
        VerifyLayer::select(async |head| {
            tokio::task::yield_now().await;
            panic!("{:?} of nobody", head.uri)
        }),
    ];
    for (count, verify) in layers.into_iter().enumerate() {
        let (app, store) = app(verify.named("in-house"));
        let response = send(&app, signed("/acme", "of acme")).await;
        assert_eq!(response.status(), 503);
        assert_eq!(response.headers()["retry-after"], "30");
        assert_eq!(response.headers().len(), 2, "{:?}", response.headers());
        let body = axum::body::to_bytes(response.into_body(), 100).await.unwrap();
        assert_eq!((&*body, store.stats().await.unwrap().rows), (&b""[..], 0));
        assert_eq!(log.all("not verified").len(), count + 1);
        let record = log.last("not verified");
        let reason = "a closure of the verifying layer panicked";
        assert_eq!((&*record["preset"], &*record["reason"]), ("in-house", reason));
    }
}

/// A client that hangs up drops the look-up, and with it what the look-up holds.
#[tokio::test]
async fn dropped_request_leaves_no_look_up() {
    let held = Arc::new(Mutex::new(()));
    let look_up = Arc::clone(&held);
    let verify = VerifyLayer::select(move |_| {
        let held = Arc::clone(&look_up);
        async move {
            let _held = held;
            std::future::pending().await
        }
    });
    let (app, store) = app(verify);
    let mut request = Box::pin(send(&app, signed("/acme", "of acme")));
    assert!(futures_util::poll!(&mut request).is_pending());
    assert_eq!(Arc::strong_count(&held), 3);
    drop(request);
    assert_eq!(Arc::strong_count(&held), 2);
    assert_eq!(store.stats().await.unwrap().rows, 0);
}
