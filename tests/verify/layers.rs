//! Requests through both layers, and through the verifying layer alone.

use std::convert::Infallible;
use std::future::ready;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use axum::routing::{any, post};
use axum::{Extension, Router};
use bytes::Bytes;
use futures_util::stream;
use http::{HeaderValue, Request, Response, Uri};
use http_body_util::Full;
use hyper::body::Incoming;
use tower::limit::ConcurrencyLimitLayer;
use tower::{Layer, Service, ServiceBuilder, ServiceExt, service_fn};
use tower_dedup::adapter::MemoryAdapter;
use tower_dedup::adapter::maintenance::MaintenanceAdapter;
use tower_dedup::key::IntoKeyExtractor;
use tower_dedup::verify::{Verifier, Verify, VerifyLayer};
use tower_dedup::{Dedup, DedupKey, DedupLayer, KeyExtractor, Verified, key, provider, testing};

use crate::vectors::{VECTORS, case, cases, senders, signature_header, signed_by};
use support::secrets::test_secrets;

/// The status, and the result if the deduplicating layer answered.
type Answer = (u16, Option<String>);

fn ran() -> Answer {
    (200, None)
}

fn duplicate() -> Answer {
    (200, Some("duplicate".to_owned()))
}

fn unverified() -> Answer {
    (401, None)
}

/// The two layers around a handler, and what the handler saw.
#[derive(Clone)]
struct Site {
    store: Arc<MemoryAdapter>,
    bodies: Arc<Mutex<Vec<Bytes>>>,
    key: KeyExtractor,
    verify: VerifyLayer,
}

impl Site {
    fn new(key: impl IntoKeyExtractor, verify: VerifyLayer) -> Self {
        let store = Arc::new(MemoryAdapter::new());
        Self { store, bodies: Arc::default(), key: key.into(), verify }
    }

    /// The sender is GitHub.
    fn of_github() -> Self {
        Self::new(provider::GITHUB, VerifyLayer::new(github_verifier()))
    }

    fn dedup(&self) -> DedupLayer {
        DedupLayer::new(self.key.clone(), Arc::clone(&self.store)).require_verified()
    }

    fn router(&self) -> Router {
        let bodies = Arc::clone(&self.bodies);
        let handler =
            async move |_: Extension<Verified>, body: Bytes| bodies.lock().unwrap().push(body);
        Router::new().fallback(any(handler))
    }

    /// Returns the layers in the documented order.
    fn right(&self) -> Router {
        self.router().layer(self.dedup()).layer(self.verify.clone())
    }

    /// Returns the layers in the wrong order.
    fn wrong(&self) -> Router {
        self.router().layer(self.verify.clone()).layer(self.dedup())
    }

    /// Returns the number of stored keys and of handler runs.
    async fn counts(&self) -> (u64, usize) {
        (self.store.stats().await.unwrap().rows, self.bodies.lock().unwrap().len())
    }
}

async fn send(app: &Router, request: Request<Body>) -> Answer {
    let response = app.clone().oneshot(request).await.unwrap();
    let result = response.headers().get("x-dedup-result");
    (response.status().as_u16(), result.map(|result| result.to_str().unwrap().to_owned()))
}

/// Returns GitHub's own vector as a delivery.
fn github(id: &str) -> Request<Body> {
    let mut request = cases(VECTORS[2].1).remove(0).request();
    request.headers_mut().insert("x-github-delivery", HeaderValue::from_str(id).unwrap());
    request
}

fn github_verifier() -> Verifier {
    cases(VECTORS[2].1).remove(0).verifier(provider::GITHUB)
}

#[tokio::test]
async fn unverified_request_uses_up_no_id() {
    let site = Site::of_github();
    let app = site.right();
    let unsigned = || {
        let request = Request::post("/hook").header("x-github-delivery", "id-1");
        request.body(Body::from("forged")).unwrap()
    };
    assert_eq!(send(&app, unsigned()).await, unverified());
    let (head, _) = github("id-1").into_parts();
    let forged = Request::from_parts(head, Body::from("forged"));
    assert_eq!(send(&app, forged).await, unverified());
    assert_eq!(site.counts().await, (0, 0));

    assert_eq!(send(&app, github("id-1")).await, ran());
    assert_eq!(send(&app, github("id-1")).await, duplicate());
    assert_eq!(site.counts().await, (1, 1));
    assert!(site.store.get(&DedupKey::new("github", "id-1").unwrap()).await.unwrap().is_some());
    // The answer to a forged request does not reveal whether its id is complete.
    assert_eq!(send(&app, unsigned()).await, unverified());
}

#[tokio::test]
async fn layers_in_the_wrong_order_are_detected() {
    let site = Site::of_github();
    let unverified = (500, Some("unverified".to_owned()));
    assert_eq!(send(&site.wrong(), github("id-1")).await, unverified);
    assert_eq!(site.counts().await, (0, 0));
    assert_eq!(send(&site.right(), github("id-1")).await, ran());
}

/// The request body, the layer's view of it and the handler's body are one buffer.
#[tokio::test]
async fn the_body_is_buffered_once() {
    let checked = Arc::<Mutex<Vec<usize>>>::default();
    let seen_by_layer = Arc::clone(&checked);
    let verify = VerifyLayer::from_fn(move |_, body, _| {
        seen_by_layer.lock().unwrap().push(body.as_ptr().addr());
        Ok(())
    });
    let site = Site::new(key::header("x-id").namespace("acme"), verify);
    let app = site.right();
    let deliver = |id: &str, body| Request::post("/hook").header("x-id", id).body(body).unwrap();

    let sent = Bytes::from(b"{\"id\": 1}\r\n\0\xff".repeat(1_000));
    assert_eq!(send(&app, deliver("1", Body::from(sent.clone()))).await, ran());
    assert_eq!(*checked.lock().unwrap(), [sent.as_ptr().addr()]);
    let seen = site.bodies.lock().unwrap().pop().unwrap();
    assert_eq!((seen.as_ptr(), seen.len()), (sent.as_ptr(), sent.len()));

    // Several buffers become one, which the handler gets.
    let parts: Vec<_> = sent.chunks(100).map(|part| io::Result::Ok(part.to_vec())).collect();
    let body = Body::from_stream(stream::iter(parts));
    assert_eq!(send(&app, deliver("2", body)).await, ran());
    let seen = site.bodies.lock().unwrap().pop().unwrap();
    assert_eq!(seen, sent);
    assert_eq!(checked.lock().unwrap()[1], seen.as_ptr().addr());
}

/// A GET is verified too, because Twilio can be configured to deliver by GET.
#[tokio::test]
async fn get_request_is_verified() {
    let get = case(provider::TWILIO, "sms-inbound-get");
    let verify = VerifyLayer::new(get.verifier(provider::TWILIO));
    let site = Site::new(provider::TWILIO, verify);
    let app = site.right();
    let mut forged = get.request();
    *forged.uri_mut() = Uri::from_static("/twilio/sms?MessageSid=SM3");
    assert_eq!(send(&app, forged).await, unverified());
    assert_eq!(send(&app, get.request()).await, ran());
    assert_eq!(send(&app, get.request()).await, duplicate());
    assert_eq!(site.counts().await, (1, 1));
}

/// Xero switches a webhook on only if each check of the URL is answered so, and off after another answer.
#[tokio::test]
async fn intent_to_receive_of_xero_is_answered_without_a_body() {
    let (_, vectors, ..) = VECTORS.iter().find(|(of, ..)| *of == provider::XERO).unwrap();
    let verify = VerifyLayer::new(case(provider::XERO, "updated").verifier(provider::XERO));
    let site = Site::new(provider::XERO, verify);
    let (app, handshake) = (site.right(), (200, Some("handshake".to_owned())));
    let mut updated = vec![duplicate(), ran()];
    for case in cases(vectors).iter().chain(&cases(vectors)) {
        let expected = match case.name.as_str() {
            "intent-to-receive" => handshake.clone(),
            "updated" => updated.pop().unwrap(),
            _ => unverified(),
        };
        assert_eq!(send(&app, case.request()).await, expected, "{}", case.name);
        let response = app.clone().oneshot(case.request()).await.unwrap();
        assert!(!response.headers().contains_key("set-cookie"), "{}", case.name);
        let body = axum::body::to_bytes(response.into_body(), usize::MAX).await.unwrap();
        assert_eq!(body, "", "{}", case.name);
    }
    assert_eq!(site.counts().await, (1, 1));
}

#[tokio::test(start_paused = true)]
async fn body_that_does_not_arrive_is_not_verified() {
    let verify = VerifyLayer::from_fn(|_, _, _| panic!("there is nothing to check"));
    let verify = verify.body_limit(10).body_timeout(Duration::from_secs(1));
    let site = Site::new(provider::GITHUB, verify);
    let broken = || Err(io::Error::other("broken off"));
    let streamed = |parts: Vec<io::Result<Vec<u8>>>| Body::from_stream(stream::iter(parts));
    let slow = Body::from_stream(stream::pending::<io::Result<Vec<u8>>>());
    for (body, status) in [
        (Body::from("eleven byte"), 413),
        (streamed(vec![Ok(vec![0; 6]), Ok(vec![0; 6])]), 413),
        (streamed(vec![Ok(vec![0; 6]), broken()]), 400),
        (slow, 408),
    ] {
        let request = Request::post("/hook").header("x-github-delivery", "id-1");
        let request = request.body(body).unwrap();
        assert_eq!(send(&site.right(), request).await, (status, None));
    }
    assert_eq!(site.counts().await, (0, 0));
}

/// Nobody can make the server buffer a body without the header of a signature.
#[tokio::test]
async fn request_that_its_head_shows_to_be_unverified_is_refused_before_its_body_is_read() {
    for sender in senders().into_iter().filter(|sender| *sender != provider::ADYEN) {
        let secret = test_secrets(sender.scheme())[0];
        let verify = VerifyLayer::new(sender.verifier_at("https://h", secret).unwrap());
        let app = verify.layer(service_fn(
            async |_: Request<Full<Bytes>>| -> Result<Response<Full<Bytes>>, Infallible> {
                panic!("{}", "the request is not verified")
            },
        ));
        let unread = || {
            Body::from_stream(stream::poll_fn(|_| -> std::task::Poll<Option<io::Result<Bytes>>> {
                panic!("the body was read")
            }))
        };
        let header = signature_header(sender);
        let request = Request::post("/hook").header("content-length", "9");
        let without = request.body(unread()).unwrap();
        let mut twice = Request::post("/hook").body(unread()).unwrap();
        for _ in 0..2 {
            twice.headers_mut().append(&header, HeaderValue::from_static("x"));
        }
        for request in [without, twice] {
            let response = app.clone().oneshot(request).await.unwrap();
            assert_eq!(response.status(), 401, "{sender:?}");
        }
    }
}

/// The route of the sender's URL, inside a nest or not.
#[tokio::test]
async fn nested_route_verifies_the_url_that_the_sender_has() {
    for sender in [provider::SQUARE, provider::TWILIO, provider::HUBSPOT] {
        let secret = test_secrets(sender.scheme())[0];
        let route = |public_url| {
            let verify = VerifyLayer::new(sender.verifier_at(public_url, secret).unwrap());
            post(async || "handled").layer(verify)
        };
        let nested = |path| Router::new().route(path, route("https://h/square"));
        for (app, target) in [
            (Router::new().nest("/square", nested("/")), "/square"),
            (Router::new().nest("/square", nested("/")), "/square?a=1"),
            (Router::new().nest("/square/", nested("/")), "/square/"),
            (Router::new().nest("/square", nested("/hook")), "/square/hook"),
            (Router::new().nest_service("/square", nested("/")), "/square"),
            (Router::new().route("/square", route("https://h")), "/square"),
            (Router::new().route("/", route("https://h")), "/"),
        ] {
            let request = Request::post(target).body(Bytes::from("b=2")).unwrap();
            let now = std::time::SystemTime::now();
            let (head, body) = signed_by(sender, secret, "https://h", now, request).into_parts();
            let forged = Request::from_parts(head.clone(), Body::from("b=3"));
            assert_eq!(send(&app, forged).await, unverified(), "{sender:?} {target}");
            let signed = Request::from_parts(head, Body::from(body));
            assert_eq!(send(&app, signed).await, ran(), "{sender:?} {target}");
        }
    }
}

/// Both layers of one preset have one limit. The larger limit alone would have no effect.
#[tokio::test]
async fn body_limit_of_both_layers_follows_the_preset() {
    let secret = test_secrets(provider::GITHUB.scheme())[0];
    let verify = VerifyLayer::new(provider::GITHUB.verifier(secret).unwrap());
    let site = Site::new(provider::GITHUB, verify);
    for (bytes, expected) in [(25 << 20, ran()), ((25 << 20) + 1, (413, None))] {
        let push = Request::post("/hook").header("x-github-delivery", format!("push-{bytes}"));
        let push = push.body(Bytes::from(vec![b' '; bytes])).unwrap();
        let now = std::time::SystemTime::now();
        let push = signed_by(provider::GITHUB, secret, "https://h", now, push);
        assert_eq!(send(&site.right(), push.map(Body::from)).await, expected, "{bytes} bytes");
    }
}

#[test]
fn invalid_setting_is_reported_by_checked_and_by_the_first_use() {
    let layer = || VerifyLayer::from_fn(|_, _, _| Ok(()));
    for (layer, setting) in [
        (layer().body_limit(0), "body_limit"),
        (layer().body_timeout(Duration::ZERO), "body_timeout"),
    ] {
        let error = layer.clone().checked().unwrap_err();
        assert!(error.to_string().starts_with(&format!("`{setting}` must be")), "{error}");
        let panic = catch_unwind(AssertUnwindSafe(|| layer.layer(()))).unwrap_err();
        assert_eq!(panic.downcast_ref::<String>(), Some(&error.to_string()));
    }
    assert!(layer().body_limit(1).body_timeout(Duration::from_nanos(1)).checked().is_ok());
}

/// The layer calls the service that it polled ready.
#[tokio::test]
async fn verify_layer_calls_the_service_that_is_ready() {
    let mut service = ServiceBuilder::new()
        .layer(VerifyLayer::from_fn(|_, _, _| Ok(())))
        .layer(ConcurrencyLimitLayer::new(1))
        .service(service_fn(async |_: Request<Full<Bytes>>| {
            Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
        }));
    for _ in 0..3 {
        let request = Request::new(Body::empty());
        let response = tokio::time::timeout(Duration::from_secs(10), async {
            let ready = ServiceExt::<Request<Body>>::ready(&mut service).await.unwrap();
            ready.call(request).await.unwrap()
        });
        assert_eq!(response.await.expect("the limit is not used up").status(), 200);
    }
}

/// Both layers compile around a hyper service.
#[test]
fn verify_layer_fits_around_a_hyper_service() {
    fn serves<S: Service<Request<Incoming>> + Clone + Send + 'static>(_: &S) {}
    let site = Site::of_github();
    let inner = service_fn(async |_: Request<Full<Bytes>>| {
        Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
    });
    let layered: Verify<Dedup<_, _>> = site.verify.layer(site.dedup().layer(inner));
    serves(&layered);
}

#[tokio::test]
async fn header_that_is_the_secret_is_sensitive_within() {
    for sender in [provider::GITLAB, provider::TELEGRAM, provider::GITHUB] {
        let verifier = sender.verifier(test_secrets(sender.scheme())[0]).unwrap();
        let verify = VerifyLayer::new(verifier);
        assert_eq!(verify.sender(), Some(sender.name()));
        let is_token = sender.name() != "github";
        let inner = service_fn(move |request: Request<Full<Bytes>>| {
            let marked = request.headers().iter().filter(|(_, value)| value.is_sensitive());
            assert_eq!(marked.count(), usize::from(is_token), "{:?}", request.headers());
            ready(Ok::<_, Infallible>(Response::new(Body::empty())))
        });
        let request = Request::post("/hook").body(Full::new(Bytes::from("{}"))).unwrap();
        let request = testing::sign(request, sender, test_secrets(sender.scheme())[0]);
        let response = verify.layer(inner).oneshot(request).await.unwrap();
        assert_eq!(response.status(), 200, "{}", sender.name());
    }
    assert_eq!(VerifyLayer::select(async |_| Ok(None)).sender(), None);
    assert_eq!(VerifyLayer::from_fn(|_, _, _| Ok(())).named("shop").sender(), Some("shop"));
}
