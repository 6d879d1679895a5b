//! The layer in every composition that the documentation promises.
//!
//! Each composition is compiled and run. A delivery is sent twice. The handler runs once and gets
//! the sent bytes. The second answer is 200 with the result `duplicate`. The cases of `guards` only
//! have to compile.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "what cannot be unwrapped fails the test"
)]

mod guards;
mod http_layers;
mod routers;
mod services;

use std::convert::Infallible;
use std::fmt::Debug;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::extract::Request as AxumRequest;
use axum::routing::{MethodRouter, post};
use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use http_body_util::{BodyExt, Full};
use tower::{Service, ServiceExt, service_fn};
use tower_dedup::adapter::MemoryAdapter;
use tower_dedup::{DedupLayer, Delivery, key};

use support::answered;

/// Neither UTF-8 nor one line, so that a change of the bytes on their way is visible.
const BODY: &[u8] = b"{\"id\":\"evt_1\"}\r\n\0\xff \xf0\x9f";

/// Longer than the minimum that `CompressionLayer` compresses.
const ANSWER: &str = "handled, handled, handled, handled, handled, handled, handled, handled";

fn dedup(store: &Arc<MemoryAdapter>) -> DedupLayer {
    DedupLayer::new(key::header("x-id").namespace("acme"), Arc::clone(store))
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

/// A handler that records the bodies of its runs.
#[derive(Clone, Default)]
struct Handler {
    bodies: Arc<Mutex<Vec<Bytes>>>,
}

impl Handler {
    fn bodies(&self) -> Vec<Bytes> {
        self.bodies.lock().unwrap().clone()
    }

    /// Returns the handler as a service over any body.
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

    /// Returns the handler as the route `/hook`.
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

/// The status of a response, the result of the layer, and the body.
type Answer = (u16, Option<String>, Bytes);

async fn answer<B: Body<Error: Debug>>(response: Response<B>) -> Answer {
    let (status, told) = answered(&response);
    let told = told.map(str::to_owned);
    (status, told, response.into_body().collect().await.unwrap().to_bytes())
}

fn handled() -> Answer {
    (200, None, ANSWER.into())
}

fn own(status: u16, result: &str) -> Answer {
    (status, Some(result.to_owned()), Bytes::new())
}

fn duplicate() -> Answer {
    own(200, "duplicate")
}

/// Sends a request through a clone of the service, for ten seconds at most.
async fn send<S, B, R>(service: &S, request: Request<B>) -> Answer
where
    S: Service<Request<B>, Response = Response<R>, Error: Debug> + Clone,
    R: Body<Error: Debug>,
{
    soon(async { answer(service.clone().oneshot(request).await.unwrap()).await }).await
}

/// Waits for ten seconds at most.
async fn soon<F: Future>(event: F) -> F::Output {
    tokio::time::timeout(Duration::from_secs(10), event).await.expect("not within ten seconds")
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
