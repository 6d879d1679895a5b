//! Requests through both layers, and through the verifying layer alone.

use std::convert::Infallible;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::routing::{any, post};
use bytes::Bytes;
use futures_util::stream;
use http::{HeaderValue, Request, Response, Uri};
use http_body_util::Full;
use hyper::body::Incoming;
use tower::limit::ConcurrencyLimitLayer;
use tower::util::BoxCloneSyncService;
use tower::{Layer, Service, ServiceBuilder, ServiceExt, service_fn};
use tower_dedup::adapter::MemoryAdapter;
use tower_dedup::adapter::inspect::MaintenanceAdapter;
use tower_dedup::key::IntoKeyExtractor;
use tower_dedup::provider::Preset;
use tower_dedup::verify::{Verifier, Verify, VerifyLayer};
use tower_dedup::{
    ConfigErrorKind, Dedup, DedupKey, DedupLayer, KeyExtractor, Verified, key, provider,
};

use crate::secrets::test_secrets;
use crate::vectors::{VECTORS, at, case, cases, scheme, senders, signature_header};

type Store = Arc<MemoryAdapter>;

/// The response, with the result if the layer answered.
type Answer = (u16, Option<String>);

type App = BoxCloneSyncService<Request<Body>, Answer, Infallible>;

fn answer<B>(response: &Response<B>) -> Answer {
    let result = response.headers().get("x-dedup-result");
    (response.status().as_u16(), result.map(|result| result.to_str().unwrap().to_owned()))
}

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
    store: Store,
    bodies: Arc<Mutex<Vec<Bytes>>>,
    key: KeyExtractor,
    verify: VerifyLayer,
}

impl Site {
    fn new(key: impl IntoKeyExtractor, verifier: Verifier) -> Self {
        Self::with(key, VerifyLayer::new(verifier))
    }

    fn with(key: impl IntoKeyExtractor, verify: VerifyLayer) -> Self {
        Self {
            store: Arc::new(MemoryAdapter::new()),
            bodies: Arc::default(),
            key: key.into(),
            verify,
        }
    }

    fn at(mut self, clock: fn() -> i64) -> Self {
        self.verify = self.verify.clock(move || at(clock()));
        self
    }

    fn dedup(&self) -> DedupLayer {
        DedupLayer::new(self.key.clone(), Arc::clone(&self.store)).require_verified()
    }

    /// Wraps a service without a framework; `outside` is the outer layer.
    fn in_tower<O, I>(&self, outside: O, inside: I) -> App
    where
        I: Layer<Plain>,
        O: Layer<I::Service>,
        O::Service: Service<Request<Body>, Error = Infallible, Future: Send + 'static>
            + Clone
            + Send
            + Sync
            + 'static,
        <O::Service as Service<Request<Body>>>::Response: Answered,
    {
        let service = ServiceBuilder::new().layer(outside).layer(inside).service(self.plain());
        BoxCloneSyncService::new(service.map_response(|response| response.answer()))
    }

    /// Returns the handler as a service.
    fn plain(&self) -> Plain {
        let bodies = Arc::clone(&self.bodies);
        BoxCloneSyncService::new(service_fn(move |request: Request<Full<Bytes>>| {
            let bodies = Arc::clone(&bodies);
            async move {
                assert!(request.extensions().get::<Verified>().is_some(), "not verified");
                let body = to_bytes(Body::new(request.into_body()), usize::MAX).await.unwrap();
                bodies.lock().unwrap().push(body);
                Ok(Response::new(Full::default()))
            }
        }))
    }

    /// Returns the handler as routes of an axum router.
    fn router(&self) -> Router {
        let bodies = Arc::clone(&self.bodies);
        let handler = async move |body: Bytes| bodies.lock().unwrap().push(body);
        Router::new().fallback(any(handler.clone())).route("/hook", post(handler))
    }

    /// Returns the layers in the documented order, without axum and with it.
    fn right(&self) -> [App; 2] {
        let router = self.router().layer(self.dedup()).layer(self.verify.clone());
        [self.in_tower(self.verify.clone(), self.dedup()), in_axum(router)]
    }

    /// Returns the layers in the wrong order.
    fn wrong(&self) -> [App; 2] {
        let router = self.router().layer(self.verify.clone()).layer(self.dedup());
        [self.in_tower(self.dedup(), self.verify.clone()), in_axum(router)]
    }

    /// Returns the number of stored keys and of handler runs.
    async fn counts(&self) -> (u64, usize) {
        (self.store.stats().await.unwrap().rows, self.bodies.lock().unwrap().len())
    }
}

type Plain = BoxCloneSyncService<Request<Full<Bytes>>, Response<Full<Bytes>>, Infallible>;

/// A response with any body.
trait Answered {
    fn answer(&self) -> Answer;
}

impl<B> Answered for Response<B> {
    fn answer(&self) -> Answer {
        answer(self)
    }
}

fn in_axum(router: Router) -> App {
    let service = ServiceBuilder::new().map_response(|response| answer(&response));
    BoxCloneSyncService::new(service.service(router))
}

async fn send(app: &App, request: Request<Body>) -> Answer {
    app.clone().oneshot(request).await.unwrap()
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
    for app in 0..2 {
        let site = Site::new(provider::GITHUB, github_verifier());
        let app = &site.right()[app];
        let unsigned = Request::post("/hook").header("x-github-delivery", "id-1");
        assert_eq!(send(app, unsigned.body(Body::from("forged")).unwrap()).await, unverified());
        let (head, _) = github("id-1").into_parts();
        let forged = Request::from_parts(head, Body::from("forged"));
        assert_eq!(send(app, forged).await, unverified());
        assert_eq!(site.counts().await, (0, 0));

        assert_eq!(send(app, github("id-1")).await, ran());
        assert_eq!(send(app, github("id-1")).await, duplicate());
        assert_eq!(site.counts().await, (1, 1));
        assert!(site.store.get(&DedupKey::new("github", "id-1").unwrap()).await.unwrap().is_some());
        // The answer to a forged request does not reveal whether its id is complete.
        let forged = Request::post("/hook").header("x-github-delivery", "id-1");
        assert_eq!(send(app, forged.body(Body::from("forged")).unwrap()).await, unverified());
    }
}

#[tokio::test]
async fn layers_in_the_wrong_order_are_detected() {
    for app in 0..2 {
        let site = Site::new(provider::GITHUB, github_verifier());
        let app = &site.wrong()[app];
        assert_eq!(send(app, github("id-1")).await, (500, Some("unverified".to_owned())));
        assert_eq!(site.counts().await, (0, 0));
        assert_eq!(send(&site.right()[0], github("id-1")).await, ran());
    }
}

/// The request body, the layer's view of it and the handler's body are one buffer.
#[tokio::test]
async fn the_body_is_buffered_once() {
    for app in 0..2 {
        let checked = Arc::<Mutex<Vec<usize>>>::default();
        let verify = {
            let checked = Arc::clone(&checked);
            VerifyLayer::from_fn(move |_, body, _| {
                checked.lock().unwrap().push(body.as_ptr().addr());
                Ok(())
            })
        };
        let site = Site::with(key::header("x-id").namespace("acme"), verify);
        let app = &site.right()[app];
        let deliver =
            |id: &str, body| Request::post("/hook").header("x-id", id).body(body).unwrap();

        let sent = Bytes::from(b"{\"id\": 1}\r\n\0\xff".repeat(1_000));
        assert_eq!(send(app, deliver("1", Body::from(sent.clone()))).await, ran());
        assert_eq!(*checked.lock().unwrap(), [sent.as_ptr().addr()]);
        let seen = site.bodies.lock().unwrap().pop().unwrap();
        assert_eq!((seen.as_ptr(), seen.len()), (sent.as_ptr(), sent.len()));

        // Several buffers become one, which the handler gets.
        let parts: Vec<_> = sent.chunks(100).map(|part| io::Result::Ok(part.to_vec())).collect();
        let body = Body::from_stream(stream::iter(parts));
        assert_eq!(send(app, deliver("2", body)).await, ran());
        let seen = site.bodies.lock().unwrap().pop().unwrap();
        assert_eq!(seen, sent);
        assert_eq!(checked.lock().unwrap()[1], seen.as_ptr().addr());
        assert_ne!(seen.as_ptr(), sent.as_ptr());
    }
}

/// A retry has the same id, a new signature, and a new time if the time is signed.
#[tokio::test]
async fn retry_is_a_duplicate_whatever_its_signature() {
    type At = (&'static str, fn() -> i64);
    let slack = || key::json("/event_id").namespace("slack");
    let senders: [(Preset, KeyExtractor, [At; 2]); 3] = [
        (
            provider::STANDARD_WEBHOOKS,
            provider::STANDARD_WEBHOOKS.into(),
            [
                ("official-sign-vector", || 1_614_265_330),
                ("retry-new-timestamp-same-id", || 1_614_265_630),
            ],
        ),
        (
            provider::STRIPE,
            provider::STRIPE.into(),
            [("invoice.paid", || 1_753_900_006), ("invoice.paid-retry", || 1_753_903_606)],
        ),
        (
            provider::SLACK,
            slack(),
            [("event_callback", || 1_531_420_700), ("event_callback-retry-1", || 1_531_420_701)],
        ),
    ];
    for (sender, key, [(first, at), (retry, later)]) in senders {
        let (first, retry) = (case(sender, first), case(sender, retry));
        let header = signature_header(sender);
        let signatures = [&first, &retry].map(|case| case.head().headers[&header].clone());
        assert_ne!(signatures[0], signatures[1], "{sender:?}");
        for app in 0..2 {
            let site = Site::new(key.clone(), first.verifier(sender)).at(at);
            assert_eq!(send(&site.right()[app], first.request()).await, ran(), "{sender:?}");
            let site = site.at(later);
            assert_eq!(send(&site.right()[app], retry.request()).await, duplicate(), "{sender:?}");
            assert_eq!(site.counts().await, (1, 1), "{sender:?}");
        }
    }
}

/// A GET is verified too, because Twilio can be configured to deliver by GET.
#[tokio::test]
async fn get_request_is_verified() {
    let get = case(provider::TWILIO, "sms-inbound-get");
    for app in 0..2 {
        let site = Site::new(provider::TWILIO, get.verifier(provider::TWILIO));
        let app = &site.right()[app];
        let mut forged = get.request();
        *forged.uri_mut() = Uri::from_static("/twilio/sms?MessageSid=SM3");
        assert_eq!(send(app, forged).await, unverified());
        assert_eq!(send(app, get.request()).await, ran());
        assert_eq!(send(app, get.request()).await, duplicate());
        assert_eq!(site.counts().await, (1, 1));
    }
}

#[tokio::test(start_paused = true)]
async fn body_that_does_not_arrive_is_not_verified() {
    let verify = VerifyLayer::from_fn(|_, _, _| panic!("there is nothing to check"));
    let verify = verify.body_limit(10).body_timeout(Duration::from_secs(1));
    let site = Site::with(provider::GITHUB, verify);
    let broken = || Err(io::Error::other("broken off"));
    let streamed = |parts: Vec<io::Result<Vec<u8>>>| Body::from_stream(stream::iter(parts));
    for app in 0..2 {
        let slow = Body::from_stream(stream::pending::<io::Result<Vec<u8>>>());
        for (body, status) in [
            (Body::from("eleven byte"), 413),
            (streamed(vec![Ok(vec![0; 6]), Ok(vec![0; 6])]), 413),
            (streamed(vec![Ok(vec![0; 6]), broken()]), 400),
            (slow, 408),
        ] {
            let request = Request::post("/hook").header("x-github-delivery", "id-1");
            let answer = send(&site.right()[app], request.body(body).unwrap()).await;
            assert_eq!(answer, (status, None));
        }
        assert_eq!(site.counts().await, (0, 0));
    }
}

/// Nobody can make the server buffer a body without the header of a signature.
#[tokio::test]
async fn request_that_its_head_shows_to_be_unverified_is_refused_before_its_body_is_read() {
    for sender in senders().into_iter().filter(|sender| *sender != provider::ADYEN) {
        let secret = test_secrets(sender)[0];
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
        let secret = test_secrets(sender)[0];
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
            let signed = scheme(sender).sign(secret, Some("https://h"), now, request).unwrap();
            let (head, body) = signed.into_parts();
            let forged = Request::from_parts(head.clone(), Body::from("b=3"));
            let app = in_axum(app);
            assert_eq!(send(&app, forged).await, unverified(), "{sender:?} {target}");
            let signed = Request::from_parts(head, Body::from(body));
            assert_eq!(send(&app, signed).await, ran(), "{sender:?} {target}");
        }
    }
}

/// Both layers of one preset have one limit. The larger limit alone would have no effect.
#[tokio::test]
async fn body_limit_of_both_layers_follows_the_preset() {
    let secret = test_secrets(provider::GITHUB)[0];
    let site = Site::new(provider::GITHUB, provider::GITHUB.verifier(secret).unwrap());
    for (bytes, expected) in [(25 << 20, ran()), ((25 << 20) + 1, (413, None))] {
        let push = Request::post("/hook").header("x-github-delivery", format!("push-{bytes}"));
        let push = push.body(Bytes::from(vec![b' '; bytes])).unwrap();
        let push = scheme(provider::GITHUB)
            .sign(secret, None, std::time::SystemTime::now(), push)
            .unwrap();
        assert_eq!(send(&site.right()[0], push.map(Body::from)).await, expected, "{bytes} bytes");
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
        assert_eq!(error.kind(), ConfigErrorKind::Setting);
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

/// Meta checks a URL by an unsigned GET: a handler that is added after the layers is not verified.
#[tokio::test]
async fn handler_added_after_the_layers_is_not_verified() {
    let site = Site::new(provider::GITHUB, github_verifier());
    let layers = (site.verify.clone(), site.dedup());
    let route = post(async || "handled").layer(layers).get(async || "challenge");
    let app = in_axum(Router::new().route("/hook", route));
    for (method, answer) in [("GET", ran()), ("POST", unverified())] {
        let request = Request::builder().method(method).uri("/hook").body(Body::empty());
        assert_eq!(send(&app, request.unwrap()).await, answer, "{method}");
    }
}

/// Both layers compile around a hyper service and in an axum route.
#[test]
fn verify_layer_fits_into_router_and_service_builder() {
    fn serves<S: Service<Request<Incoming>> + Clone + Send + 'static>(_: &S) {}
    let site = Site::new(provider::GITHUB, github_verifier());
    let layered: Verify<Dedup<_, _>> = site.verify.layer(site.dedup().layer(site.plain()));
    serves(&layered);
    let both = (site.verify.clone(), site.dedup());
    let _: Router = Router::new().route("/hook", post(async || "handled").layer(both));
}
