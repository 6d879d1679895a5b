//! The layer in every place that it is promised to fit into.
//!
//! Each composition is compiled and run: a delivery is sent twice, the handler runs once and sees
//! the bytes that were sent, and the second answer is a 200 that says `duplicate`. The guards at
//! the end only have to compile.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "what cannot be unwrapped fails the test"
)]

use std::convert::Infallible;
use std::fmt::Debug;
use std::io::{Read, Write};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::extract::Request as AxumRequest;
use axum::middleware::{Next, from_fn};
use axum::routing::{MethodRouter, post};
use bytes::Bytes;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use futures_util::future::join_all;
use http::{HeaderValue, Request, Response, StatusCode, header};
use http_body::Body;
use http_body_util::{BodyExt, Empty, Full};
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Barrier, Notify};
use tower::limit::ConcurrencyLimitLayer;
use tower::util::{BoxCloneService, BoxCloneSyncService};
use tower::{Layer, Service, ServiceBuilder, ServiceExt, service_fn};
use tower_dedup::adapter::{
    DedupAdapter, EntryState, MaintenanceAdapter, MemoryAdapter, SqliteAdapter,
};
use tower_dedup::key::{KeyExtractor, KeyPart};
use tower_dedup::ledger::{Lease, OnArrival};
use tower_dedup::{
    ConfigError, Dedup, DedupHandle, DedupKey, DedupLayer, DedupResult, Delivery, Error, InnerBody,
    KeyError, OnMissingKey, ResponseBody, ResponseFuture, Verified, key,
};
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::compression::CompressionLayer;
use tower_http::decompression::RequestDecompressionLayer;
use tower_http::limit::RequestBodyLimitLayer;
use tower_http::trace::TraceLayer;

/// Neither text nor one line: whatever touches the bytes on their way shows.
const BODY: &[u8] = b"{\"id\":\"evt_1\"}\r\n\0\xff \xf0\x9f";

/// Long enough for a response to be worth compressing.
const ANSWER: &str = "handled, handled, handled, handled, handled, handled, handled, handled";

type Store = Arc<MemoryAdapter>;

fn store() -> Store {
    Arc::new(MemoryAdapter::new())
}

fn dedup(store: &Store) -> DedupLayer {
    DedupLayer::new(key::header("x-id").namespace("acme"), Arc::clone(store))
}

fn acme(id: &str) -> DedupKey {
    DedupKey::new("acme", id).unwrap()
}

fn delivery<B: From<Bytes>>(id: &str, body: &'static [u8]) -> Request<B> {
    let body = B::from(Bytes::from_static(body));
    Request::post("/hook").header("x-id", id).body(body).unwrap()
}

fn full(id: &str, body: &'static [u8]) -> Request<Full<Bytes>> {
    delivery(id, body)
}

fn streaming(id: &str, body: &'static [u8]) -> AxumRequest {
    delivery(id, body)
}

/// A handler that remembers the bodies of its runs.
#[derive(Clone, Default)]
struct Handler {
    bodies: Arc<Mutex<Vec<Bytes>>>,
}

impl Handler {
    fn bodies(&self) -> Vec<Bytes> {
        self.bodies.lock().unwrap().clone()
    }

    /// As a service over any body.
    fn service<B>(
        &self,
    ) -> impl Service<
        Request<B>,
        Response = Response<Full<Bytes>>,
        Error = Infallible,
        Future: Send + 'static,
    > + Clone
    + Send
    + Sync
    + 'static
    where
        B: Body<Data = Bytes, Error: Debug> + Send + 'static,
    {
        let bodies = Arc::clone(&self.bodies);
        service_fn(move |request: Request<B>| {
            let bodies = Arc::clone(&bodies);
            async move {
                assert!(request.extensions().get::<Delivery>().is_some(), "undeduplicated");
                let body = request.into_body().collect().await.unwrap().to_bytes();
                bodies.lock().unwrap().push(body);
                Ok(response())
            }
        })
    }

    /// As the route `/hook`.
    fn router(&self) -> Router {
        Router::new().route("/hook", self.route())
    }

    fn route(&self) -> MethodRouter {
        let bodies = Arc::clone(&self.bodies);
        let handler = async move |_: Delivery, body: Bytes| {
            bodies.lock().unwrap().push(body);
            ANSWER
        };
        post(handler)
    }
}

fn response() -> Response<Full<Bytes>> {
    Response::new(Full::from(ANSWER))
}

/// What of a response the tests ask for.
#[derive(Debug, PartialEq)]
struct Answer {
    status: StatusCode,
    result: Option<HeaderValue>,
    body: Bytes,
}

async fn answer<B: Body<Error: Debug>>(response: Response<B>) -> Answer {
    let (head, body) = response.into_parts();
    let result = head.headers.get("x-dedup-result").cloned();
    Answer { status: head.status, result, body: body.collect().await.unwrap().to_bytes() }
}

fn handled() -> Answer {
    Answer { status: StatusCode::OK, result: None, body: Bytes::from_static(ANSWER.as_bytes()) }
}

fn own(status: StatusCode, result: &'static str) -> Answer {
    let result = Some(HeaderValue::from_static(result));
    Answer { status, result, body: Bytes::new() }
}

fn duplicate() -> Answer {
    own(StatusCode::OK, "duplicate")
}

/// Sends a request through a clone of the service, in a bounded time.
async fn send<S, B, R>(service: &S, request: Request<B>) -> Answer
where
    S: Service<Request<B>, Response = Response<R>, Error: Debug> + Clone,
    R: Body<Error: Debug>,
{
    soon(async { answer(service.clone().oneshot(request).await.unwrap()).await }).await
}

/// What does not happen within ten seconds will not happen at all.
async fn soon<F: Future>(event: F) -> F::Output {
    tokio::time::timeout(Duration::from_secs(10), event).await.expect("it has not happened")
}

async fn delivers_once<S, B, R>(service: S, handler: &Handler)
where
    S: Service<Request<B>, Response = Response<R>, Error: Debug> + Clone,
    B: From<Bytes>,
    R: Body<Error: Debug>,
{
    assert_eq!(send(&service, delivery("evt_1", BODY)).await, handled());
    assert_eq!(send(&service, delivery("evt_1", BODY)).await, duplicate());
    assert_eq!(handler.bodies(), [BODY]);
    assert_eq!(send(&service, delivery("evt_2", b"")).await, handled());
    assert_eq!(handler.bodies(), [BODY, &[]]);
}

// Axum

#[tokio::test]
async fn router_layer() {
    let handler = Handler::default();
    let app = handler.router().layer(dedup(&store()));
    delivers_once::<_, axum::body::Body, _>(app, &handler).await;
}

#[tokio::test]
async fn router_route_layer() {
    let handler = Handler::default();
    let app = handler.router().route_layer(dedup(&store()));
    delivers_once::<_, axum::body::Body, _>(app, &handler).await;
}

#[tokio::test]
async fn method_router_layer() {
    let handler = Handler::default();
    let route = axum::routing::any_service(handler.service()).layer(dedup(&store()));
    let app = Router::<()>::new().route("/hook", route);
    delivers_once::<_, axum::body::Body, _>(app, &handler).await;
}

#[tokio::test]
async fn router_nested_inside_and_outside() {
    let handler = Handler::default();
    let inside = Router::new().route("/", handler.route()).layer(dedup(&store()));
    delivers_once::<_, axum::body::Body, _>(Router::new().nest("/hook", inside), &handler).await;

    let handler = Handler::default();
    let inside = Router::new().route("/", handler.route());
    let app = Router::new().nest("/hook", inside).layer(dedup(&store()));
    delivers_once::<_, axum::body::Body, _>(app, &handler).await;
}

#[tokio::test]
async fn nested_service() {
    let handler = Handler::default();
    let service = dedup(&store()).layer(handler.service());
    let app = Router::<()>::new().nest_service("/hook", service);
    delivers_once::<_, axum::body::Body, _>(app, &handler).await;
}

#[tokio::test]
async fn from_fn_outside() {
    async fn verify(mut request: AxumRequest, next: Next) -> axum::response::Response {
        request.extensions_mut().insert(Verified);
        next.run(request).await
    }
    let handler = Handler::default();
    let app = handler.router().layer(dedup(&store()).require_verified()).layer(from_fn(verify));
    delivers_once::<_, axum::body::Body, _>(app, &handler).await;
}

#[tokio::test]
async fn a_verifying_layer_on_the_wrong_side_is_found_out() {
    async fn verify(mut request: AxumRequest, next: Next) -> axum::response::Response {
        request.extensions_mut().insert(Verified);
        next.run(request).await
    }
    let (handler, store) = (Handler::default(), store());
    let app = handler.router().layer(from_fn(verify)).layer(dedup(&store).require_verified());
    let answer = send(&app, streaming("evt_1", BODY)).await;
    assert_eq!(answer, own(StatusCode::INTERNAL_SERVER_ERROR, "unverified"));
    assert_eq!((handler.bodies().len(), store.count().await.unwrap()), (0, 0));
}

async fn untouched(request: AxumRequest, next: Next) -> axum::response::Response {
    next.run(request).await
}

#[tokio::test]
async fn from_fn_inside_behind_a_router() {
    let handler = Handler::default();
    let app = handler.router().layer(from_fn(untouched)).layer(dedup(&store()));
    delivers_once::<_, axum::body::Body, _>(app, &handler).await;
}

#[tokio::test]
async fn from_fn_directly_inside_takes_the_body_of_axum() {
    let handler = Handler::default();
    let inside = ServiceBuilder::new()
        .layer(dedup(&store()).inner_body::<axum::body::Body>())
        .layer(from_fn(untouched));
    let app = handler.router().layer(inside);
    delivers_once::<_, axum::body::Body, _>(app, &handler).await;
}

#[tokio::test]
async fn two_dedup_layers_nested() {
    let (handler, store) = (Handler::default(), store());
    let outer = DedupLayer::new(key::header("x-id").namespace("outer"), Arc::clone(&store));
    let app = handler.router().layer(dedup(&store)).layer(outer);
    delivers_once::<_, axum::body::Body, _>(app, &handler).await;
    // Each has remembered both events.
    assert_eq!(store.count().await.unwrap(), 4);
}

#[tokio::test]
async fn two_dedup_layers_nested_with_keys_of_their_own() {
    let (handler, store) = (Handler::default(), store());
    let by_body = DedupLayer::on_arrival(key::body_digest().namespace("body"), Arc::clone(&store));
    let service = ServiceBuilder::new()
        .layer(dedup(&store))
        .layer(by_body)
        .service(handler.service::<Full<Bytes>>());
    assert_eq!(send(&service, full("evt_1", BODY)).await, handled());
    // Another id, the same bytes: the inner one answers, and to the outer that is a success.
    assert_eq!(send(&service, full("evt_2", BODY)).await, duplicate());
    assert_eq!(send(&service, full("evt_2", b"other")).await, duplicate());
    assert_eq!(send(&service, full("evt_3", b"other")).await, handled());
    assert_eq!(handler.bodies(), [BODY, &b"other"[..]]);
}

#[tokio::test]
async fn a_store_chosen_at_run_time() {
    let handler = Handler::default();
    let store: Arc<dyn MaintenanceAdapter> =
        tower_dedup::adapter::connect("memory:").await.unwrap();
    let dedup = DedupLayer::new(key::header("x-id").namespace("acme"), store);
    delivers_once::<_, axum::body::Body, _>(handler.router().layer(dedup), &handler).await;
}

// Tower-http

#[tokio::test]
async fn the_usual_stack_around_a_router() {
    let handler = Handler::default();
    let stack = ServiceBuilder::new()
        .layer(TraceLayer::new_for_http())
        .layer(CatchPanicLayer::new())
        .layer(RequestBodyLimitLayer::new(64 * 1024))
        .layer(RequestDecompressionLayer::new())
        .layer(dedup(&store()))
        .layer(CompressionLayer::new());
    delivers_once::<_, axum::body::Body, _>(handler.router().layer(stack), &handler).await;
}

#[tokio::test]
async fn the_usual_stack_around_a_service() {
    let handler = Handler::default();
    let service = ServiceBuilder::new()
        .layer(TraceLayer::new_for_http())
        .layer(CatchPanicLayer::new())
        .layer(RequestBodyLimitLayer::new(64 * 1024))
        .layer(RequestDecompressionLayer::new())
        .layer(dedup(&store()))
        .layer(CompressionLayer::new())
        .service(handler.service());
    delivers_once::<_, Full<Bytes>, _>(service, &handler).await;
}

fn gzip(bytes: &[u8], level: u32) -> Bytes {
    let mut encoder = GzEncoder::new(Vec::new(), flate2::Compression::new(level));
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap().into()
}

fn gzipped(id: &str, body: Bytes) -> Request<Full<Bytes>> {
    let mut request = delivery(id, b"");
    request.headers_mut().insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    *request.body_mut() = Full::new(body);
    request
}

#[tokio::test]
async fn request_decompression_outside() {
    let (handler, store) = (Handler::default(), store());
    let by_body = dedup(&store).on_missing_key(OnMissingKey::BodyDigest);
    let service = ServiceBuilder::new()
        .layer(RequestDecompressionLayer::new())
        .layer(by_body)
        .service(handler.service::<Full<Bytes>>());
    assert_eq!(send(&service, gzipped("evt_1", gzip(BODY, 9))).await, handled());
    assert_eq!(send(&service, gzipped("evt_1", gzip(BODY, 0))).await, duplicate());
    assert_eq!(send(&service, full("evt_1", BODY)).await, duplicate());
    assert_eq!(handler.bodies(), [BODY]);

    // A digest is over the bytes that the handler sees, however they were compressed.
    let no_id = |mut request: Request<Full<Bytes>>| {
        request.headers_mut().remove("x-id");
        request
    };
    assert_eq!(send(&service, no_id(gzipped("", gzip(BODY, 9)))).await, handled());
    assert_eq!(send(&service, no_id(gzipped("", gzip(BODY, 0)))).await, duplicate());

    // Half an upload claims nothing.
    let count = store.count().await.unwrap();
    let half = gzip(BODY, 9).split_to(20);
    let broken = own(StatusCode::BAD_REQUEST, "broken-body");
    assert_eq!(send(&service, gzipped("evt_2", half)).await, broken);
    assert_eq!(store.count().await.unwrap(), count);
    assert_eq!(send(&service, gzipped("evt_2", gzip(BODY, 9))).await, handled());
}

#[tokio::test]
async fn compression_inside() {
    let handler = Handler::default();
    let service = ServiceBuilder::new()
        .layer(dedup(&store()))
        .layer(CompressionLayer::new())
        .service(handler.service::<Full<Bytes>>());
    let request = || {
        let mut request = full("evt_1", BODY);
        let gzip = HeaderValue::from_static("gzip");
        request.headers_mut().insert(header::ACCEPT_ENCODING, gzip);
        request
    };
    let first = service.clone().oneshot(request()).await.unwrap();
    assert_eq!(first.headers()[header::CONTENT_ENCODING], "gzip");
    let mut plain = String::new();
    let compressed = first.into_body().collect().await.unwrap().to_bytes();
    GzDecoder::new(&*compressed).read_to_string(&mut plain).unwrap();
    assert_eq!(plain, ANSWER);

    let second = service.oneshot(request()).await.unwrap();
    assert!(!second.headers().contains_key(header::CONTENT_ENCODING));
    assert_eq!(answer(second).await, duplicate());
    assert_eq!(handler.bodies(), [BODY]);
}

#[tokio::test]
async fn a_body_over_the_limit_of_an_outer_layer_is_413_and_nothing_is_recorded() {
    let (handler, store) = (Handler::default(), store());
    let service = ServiceBuilder::new()
        .layer(RequestBodyLimitLayer::new(BODY.len()))
        .layer(dedup(&store))
        .service(handler.service::<Full<Bytes>>());
    const LONGER: &[u8] = &[b'x'; BODY.len() + 1];
    let stream = |body: &'static [u8]| {
        let chunks = body.chunks(3).map(|chunk| Ok::<_, Infallible>(Bytes::from_static(chunk)));
        let body = axum::body::Body::from_stream(futures_util::stream::iter(chunks));
        streaming("evt_1", b"").map(|_| body)
    };

    // Its length announced, the outer layer refuses it without a look at the body.
    let mut announced = streaming("evt_1", LONGER);
    announced.headers_mut().insert(header::CONTENT_LENGTH, HeaderValue::from(LONGER.len()));
    let refused = send(&service, announced).await;
    assert_eq!((refused.status, refused.result), (StatusCode::PAYLOAD_TOO_LARGE, None));

    // Otherwise it is found while the body is read.
    let too_large = own(StatusCode::PAYLOAD_TOO_LARGE, "too-large");
    assert_eq!(send(&service, stream(LONGER)).await, too_large);
    assert_eq!((handler.bodies().len(), store.count().await.unwrap()), (0, 0));

    // No id was burnt, and the limit itself fits.
    assert_eq!(send(&service, stream(BODY)).await, handled());
    assert_eq!(send(&service, stream(BODY)).await, duplicate());
    assert_eq!(handler.bodies(), [BODY]);
}

#[tokio::test]
async fn a_panic_behind_catch_panic_is_500_and_the_key_is_free() {
    let store = store();
    let attempts = service_fn(async |request: Request<Full<Bytes>>| {
        let delivery = request.extensions().get::<Delivery>().unwrap();
        assert!(delivery.attempt() > 1, "the first attempt fails");
        assert!(!delivery.is_takeover());
        Ok::<_, Infallible>(response())
    });
    let service =
        ServiceBuilder::new().layer(CatchPanicLayer::new()).layer(dedup(&store)).service(attempts);
    let failed = send(&service, full("evt_1", BODY)).await;
    assert_eq!((failed.status, failed.result), (StatusCode::INTERNAL_SERVER_ERROR, None));
    let entry = store.get(&acme("evt_1")).await.unwrap().unwrap();
    assert_eq!(entry.state, EntryState::Released);
    assert_eq!(send(&service, full("evt_1", BODY)).await, handled());
    assert_eq!(send(&service, full("evt_1", BODY)).await, duplicate());
}

// Tower

#[tokio::test]
async fn service_fn_over_full() {
    let handler = Handler::default();
    let service = dedup(&store()).layer(handler.service());
    delivers_once::<_, Full<Bytes>, _>(service, &handler).await;
}

#[tokio::test]
async fn boxed_outside_and_inside() {
    let handler = Handler::default();
    let inner = BoxCloneSyncService::new(handler.service::<Full<Bytes>>());
    let service = BoxCloneSyncService::new(dedup(&store()).layer(inner));
    delivers_once::<_, Full<Bytes>, _>(service, &handler).await;

    // A service that is not `Sync`.
    let handler = Handler::default();
    let inner = BoxCloneService::new(handler.service::<Full<Bytes>>());
    let service = BoxCloneService::new(dedup(&store()).layer(inner));
    delivers_once::<_, Full<Bytes>, _>(service, &handler).await;
}

#[tokio::test]
async fn concurrency_limit_inside_and_outside() {
    let handler = Handler::default();
    let service = ServiceBuilder::new()
        .concurrency_limit(1)
        .layer(dedup(&store()))
        .concurrency_limit(1)
        .service(handler.service());
    delivers_once::<_, Full<Bytes>, _>(service, &handler).await;

    let handler = Handler::default();
    let app = handler
        .router()
        .layer(ConcurrencyLimitLayer::new(1))
        .layer(dedup(&store()))
        .layer(ConcurrencyLimitLayer::new(1));
    delivers_once::<_, axum::body::Body, _>(app, &handler).await;
}

#[tokio::test]
async fn the_service_that_is_ready_is_the_one_that_is_called() {
    // One place, and one service that is called again and again: a clone of it would be called
    // without having been asked, and panic.
    let handler = Handler::default();
    let mut service = ServiceBuilder::new()
        .layer(dedup(&store()).body_limit(BODY.len()))
        .concurrency_limit(1)
        .service(handler.service::<Full<Bytes>>());
    for (id, body, expected) in [
        ("evt_1", BODY, handled()),
        ("evt_1", BODY, duplicate()),
        // Whatever does not reach the inner service gives its place back.
        ("evt_2", &[b'x'; BODY.len() + 1], own(StatusCode::PAYLOAD_TOO_LARGE, "too-large")),
        ("", BODY, own(StatusCode::BAD_REQUEST, "invalid-key")),
        ("evt_3", BODY, handled()),
    ] {
        let ready = ServiceExt::<Request<Full<Bytes>>>::ready(&mut service);
        let response = soon(ready).await.unwrap().call(full(id, body));
        assert_eq!(answer(response.await.unwrap()).await, expected, "{id}");
    }
    assert_eq!(handler.bodies(), [BODY, BODY]);
}

#[tokio::test]
async fn an_inner_concurrency_limit_holds() {
    let running = Arc::new(AtomicUsize::new(0));
    let most = Arc::new(AtomicUsize::new(0));
    let pair = Arc::new(Barrier::new(2));
    let handler = {
        let (running, most) = (Arc::clone(&running), Arc::clone(&most));
        service_fn(move |_: Request<Full<Bytes>>| {
            let (running, most, pair) =
                (Arc::clone(&running), Arc::clone(&most), Arc::clone(&pair));
            async move {
                most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                pair.wait().await;
                running.fetch_sub(1, Ordering::SeqCst);
                Ok::<_, Infallible>(response())
            }
        })
    };
    let service =
        ServiceBuilder::new().layer(dedup(&store())).concurrency_limit(2).service(handler);
    let ids: Vec<_> = (0..8).map(|id| id.to_string()).collect();
    let answers = join_all(ids.iter().map(|id| send(&service, full(id, BODY)))).await;
    assert!(answers.iter().all(|answer| *answer == handled()), "{answers:?}");
    assert_eq!((running.load(Ordering::SeqCst), most.load(Ordering::SeqCst)), (0, 2));
}

#[tokio::test]
async fn a_waiting_delivery_holds_no_place_in_an_inner_concurrency_limit() {
    let (started, go) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let handler = {
        let (started, go) = (Arc::clone(&started), Arc::clone(&go));
        service_fn(move |request: Request<Full<Bytes>>| {
            let (started, go) = (Arc::clone(&started), Arc::clone(&go));
            async move {
                if request.headers()["x-id"] == "slow" {
                    started.notify_one();
                    go.notified().await;
                }
                Ok::<_, Infallible>(response())
            }
        })
    };
    let dedup =
        dedup(&store()).on_in_flight(tower_dedup::OnInFlight::Wait(Duration::from_secs(30)));
    let handle = dedup.handle();
    let service = ServiceBuilder::new().layer(dedup).concurrency_limit(2).service(handler);
    let deliver = |id: &'static str| {
        let service = service.clone();
        tokio::spawn(async move { send(&service, full(id, BODY)).await })
    };

    let first = deliver("slow");
    soon(started.notified()).await;
    let second = deliver("slow");
    soon(async {
        while handle.waiting() == 0 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    // The first has one place, the second has none: there is one for another event.
    assert_eq!(deliver("quick").await.unwrap(), handled());
    go.notify_one();
    assert_eq!(first.await.unwrap(), handled());
    assert_eq!(second.await.unwrap(), duplicate());
}

// Hyper

#[tokio::test]
async fn a_bare_hyper_server() {
    let (handler, store) = (Handler::default(), store());
    let service = dedup(&store).layer(handler.service::<Full<Bytes>>());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let server = tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        hyper::server::conn::http1::Builder::new()
            .serve_connection(TokioIo::new(stream), TowerToHyperService::new(service))
            .await
            .unwrap();
    });

    let stream = TcpStream::connect(address).await.unwrap();
    let (mut client, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
    let connection = tokio::spawn(connection);
    // Longer than any one read of the server's.
    let long: Bytes = BODY.repeat(40_000).into();
    for (body, expected) in [(&long, handled()), (&long, duplicate())] {
        let mut request = full("evt_1", b"").map(|_| Full::new(body.clone()));
        request.headers_mut().insert(header::HOST, HeaderValue::from_static("localhost"));
        client.ready().await.unwrap();
        let response = client.send_request(request).await.unwrap();
        assert_eq!(answer(response).await, expected);
    }
    assert!(handler.bodies() == [long], "the bytes differ");
    drop(client);
    connection.await.unwrap().unwrap();
    server.await.unwrap();
}

// The body

#[tokio::test]
async fn a_body_of_one_buffer_is_not_copied() {
    let handler = Handler::default();
    let sent = Bytes::from(BODY.to_vec());
    let service = dedup(&store()).layer(handler.service::<Full<Bytes>>());
    let request = full("evt_1", b"").map(|_| Full::new(sent.clone()));
    assert_eq!(send(&service, request).await, handled());
    assert_eq!(handler.bodies()[0].as_ptr(), sent.as_ptr());

    let app = handler.router().layer(dedup(&store()));
    let request = full("evt_1", b"").map(|_| axum::body::Body::from(sent.clone()));
    assert_eq!(send(&app, request).await, handled());
    assert_eq!(handler.bodies()[1].as_ptr(), sent.as_ptr());
}

#[tokio::test]
async fn a_request_without_a_body_gives_the_handler_an_empty_one() {
    let handler = Handler::default();
    let service = dedup(&store()).layer(handler.service::<Full<Bytes>>());
    let request = || full("evt_1", b"").map(|_| Empty::<Bytes>::new());
    assert_eq!(send(&service, request()).await, handled());
    assert_eq!(send(&service, request()).await, duplicate());
    assert_eq!(handler.bodies(), [Bytes::new()]);
}

#[tokio::test]
async fn an_outer_layer_reads_the_result_from_the_extensions() {
    let handler = Handler::default();
    let service = dedup(&store()).result_header(None).layer(handler.service::<Full<Bytes>>());
    for expected in [None, Some(DedupResult::Duplicate)] {
        let response = service.clone().oneshot(full("evt_1", BODY)).await.unwrap();
        assert_eq!(response.extensions().get::<DedupResult>().copied(), expected);
        assert!(!response.headers().contains_key("x-dedup-result"));
    }
}

// What has to compile

fn is_send<T: Send + 'static>() {}
fn is_shared<T: Send + Sync + ?Sized + 'static>() {}
fn is_cloned<T: Clone + Send + Sync + 'static>() {}
fn is_error<T: std::error::Error + Send + Sync + 'static>() {}
fn is_debug<T: Debug>() {}
fn is_adapter<T: DedupAdapter + ?Sized>() {}
fn is_maintained<T: MaintenanceAdapter>() {}

/// A body that can be sent, and is not `Sync`: what axum's is.
type Unsync = axum::body::Body;

type Erased = Lease;

/// Clone and Send, and not Sync.
type Inner = BoxCloneService<Request<Full<Bytes>>, Response<Unsync>, Infallible>;
type SyncInner = BoxCloneSyncService<Request<Full<Bytes>>, Response<Unsync>, Infallible>;

#[test]
fn types_are_as_shareable_as_promised() {
    is_cloned::<DedupLayer<Erased>>();
    is_cloned::<InnerBody<OnArrival, Unsync>>();
    is_cloned::<Dedup<SyncInner, Erased>>();
    is_cloned::<Dedup<SyncInner, Erased, Unsync>>();
    is_send::<Dedup<Inner, Erased>>();
    is_send::<ResponseFuture<Inner, Erased, Full<Bytes>, Unsync, Full<Bytes>>>();
    is_send::<ResponseFuture<Inner, Erased, Full<Bytes>, hyper::body::Incoming, Full<Bytes>>>();
    is_send::<ResponseBody<Unsync>>();
    is_shared::<ResponseBody<Full<Bytes>>>();
    is_cloned::<DedupHandle>();
    is_cloned::<Delivery>();
    is_cloned::<DedupKey>();
    is_cloned::<KeyExtractor>();
    is_cloned::<KeyPart>();
    is_cloned::<DedupResult>();
    is_cloned::<Verified>();
    is_shared::<MemoryAdapter>();
    is_shared::<SqliteAdapter>();
    is_error::<Error>();
    is_error::<KeyError>();
    is_error::<ConfigError>();
}

#[test]
fn types_show_themselves() {
    is_debug::<DedupLayer>();
    is_debug::<Dedup<SyncInner, Erased>>();
    is_debug::<ResponseFuture<Inner, Erased, Full<Bytes>, Unsync, Full<Bytes>>>();
    is_debug::<DedupHandle>();
    is_debug::<Delivery>();
}

#[test]
fn erased_adapter_is_an_adapter() {
    is_shared::<dyn MaintenanceAdapter>();
    is_adapter::<Arc<dyn MaintenanceAdapter>>();
    is_maintained::<Arc<dyn MaintenanceAdapter>>();
    is_adapter::<dyn MaintenanceAdapter>();
    is_adapter::<Arc<Arc<MemoryAdapter>>>();
    let _: fn(MemoryAdapter) -> Arc<dyn MaintenanceAdapter> = |adapter| Arc::new(adapter);
    let _: fn(SqliteAdapter) -> Box<dyn MaintenanceAdapter> = |adapter| Box::new(adapter);
    let _: fn(Arc<dyn MaintenanceAdapter>) -> Arc<dyn DedupAdapter> = |adapter| adapter;
}

#[test]
fn the_inner_service_can_be_reached() {
    let mut service = dedup(&store()).layer(7);
    assert_eq!(*service.get_ref(), 7);
    *service.get_mut() = 8;
    assert_eq!(service.into_inner(), 8);
}
