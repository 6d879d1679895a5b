//! Copies of one request, and their responses.

use std::fmt;
use std::future::poll_fn;
use std::sync::Arc;

use bytes::Bytes;
use http::{Request, Response, StatusCode, request};
use http_body::Body;
use http_body_util::BodyExt;
use tokio::sync::Barrier;
use tokio::task::JoinSet;
use tower_service::Service;

use crate::observe::DedupAnswer;

/// Sends this many copies of a request, each after the response to the copy before it.
///
/// Panics if the service returns an error, or if a body ends in an error. A panic of the handler
/// reaches the caller.
///
/// ```
/// # #[cfg(feature = "memory")]
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// use axum::extract::Request;
/// use axum::{Router, body::Body, routing::post};
/// use tower_dedup::adapter::MemoryAdapter;
/// use tower_dedup::{DedupLayer, key, testing};
///
/// let dedup = DedupLayer::new(key::header("webhook-id").namespace("acme"), MemoryAdapter::new());
/// let app: Router = Router::new().route("/", post(async || "done").layer(dedup));
/// let request = Request::post("/").header("webhook-id", "msg_1").body(Body::empty()).unwrap();
///
/// let responses = testing::redeliver(app, request, 2).await;
/// assert_eq!(responses.statuses(), [200, 200]);
/// assert_eq!(responses.get(0).body(), "done");
/// assert_eq!(responses.get(1).headers()["x-dedup-result"], "duplicate");
/// # });
/// ```
pub async fn redeliver<S, B, R>(mut service: S, request: Request<B>, copies: usize) -> Responses
where
    S: Service<Request<B>, Response = Response<R>, Error: fmt::Debug>,
    B: Body<Data = Bytes, Error: fmt::Debug> + From<Bytes>,
    R: Body<Error: fmt::Debug>,
{
    let (head, body) = buffered(request).await;
    let mut responses = Vec::with_capacity(copies);
    for _ in 0..copies {
        responses.push(send(&mut service, copy(&head, &body)).await);
    }
    Responses(responses)
}

/// Sends this many copies of a request at the same time.
///
/// Each copy is sent in a task of its own. No task sends its copy before all tasks have started. On
/// a runtime of one thread, which is the default of `#[tokio::test]`, the copies take turns at each
/// `.await` that waits. A handler that never waits ends within one turn, so it overlaps with
/// nothing there. With `#[tokio::test(flavor = "multi_thread")]`, the copies run in parallel.
///
/// The responses have the order in which they arrived.
///
/// Panics if the service returns an error, or if a body ends in an error. A panic of the handler
/// reaches the caller.
///
/// ```
/// # #[cfg(feature = "memory")]
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// use axum::{Router, routing::post};
/// use tower_dedup::adapter::MemoryAdapter;
/// use tower_dedup::{DedupLayer, provider, testing};
///
/// let dedup = DedupLayer::new(provider::GITHUB, MemoryAdapter::new());
/// let app: Router = Router::new().route("/", post(tokio::task::yield_now).layer(dedup));
/// let request = testing::request(provider::GITHUB, "/", "5b1f");
///
/// let responses = testing::redeliver_at_once(app, request, 8).await;
/// assert_eq!((responses.handled(), responses.duplicates()), (1, 7));
/// # });
/// ```
pub async fn redeliver_at_once<S, B, R>(service: S, request: Request<B>, copies: usize) -> Responses
where
    S: Service<Request<B>, Response = Response<R>, Future: Send, Error: fmt::Debug>
        + Clone
        + Send
        + 'static,
    B: Body<Data = Bytes, Error: fmt::Debug> + From<Bytes> + Send + 'static,
    R: Body<Data: Send, Error: fmt::Debug> + Send + 'static,
{
    let (head, body) = buffered(request).await;
    let start = Arc::new(Barrier::new(copies));
    let mut tasks = JoinSet::new();
    for _ in 0..copies {
        let (mut service, start) = (service.clone(), Arc::clone(&start));
        let request = copy::<B>(&head, &body);
        tasks.spawn(async move {
            start.wait().await;
            send(&mut service, request).await
        });
    }
    let mut responses = Vec::with_capacity(copies);
    while let Some(ended) = tasks.join_next().await {
        responses.push(ended.unwrap_or_else(|error| match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(error) => panic!("a copy did not end: {error}"),
        }));
    }
    Responses(responses)
}

/// The responses to the copies of a request, in the order in which they arrived.
///
/// The layer puts a [`DedupAnswer`] into the extensions of its own responses. The counts are read
/// from there, so they do not depend on the [`result_header`](crate::DedupLayer::result_header).
#[derive(Debug)]
#[must_use = "a test asserts something about the responses"]
pub struct Responses(Vec<Response<Bytes>>);

impl Responses {
    /// Returns how many responses are not the layer's own: the handler or another layer wrote them.
    #[must_use]
    pub fn handled(&self) -> usize {
        self.results().filter(Option::is_none).count()
    }

    /// Returns how many copies were duplicates.
    #[must_use]
    pub fn duplicates(&self) -> usize {
        self.count(DedupAnswer::Duplicate)
    }

    /// Returns how many copies the layer answered with this result.
    #[must_use]
    pub fn count(&self, result: DedupAnswer) -> usize {
        self.results().filter(|found| *found == Some(result)).count()
    }

    /// Returns the layer's result for each copy; `None` for a response that is not the layer's own.
    fn results(&self) -> impl Iterator<Item = Option<DedupAnswer>> {
        self.0.iter().map(|response| response.extensions().get().copied())
    }

    /// Returns the status of each response. A list of statuses equals a list of numbers:
    /// `assert_eq!(responses.statuses(), [500, 200])`.
    #[must_use]
    pub fn statuses(&self) -> Vec<StatusCode> {
        self.0.iter().map(Response::status).collect()
    }

    /// Returns one response. The first response has the index 0.
    ///
    /// Panics if there is no such response.
    #[must_use]
    #[track_caller]
    pub fn get(&self, index: usize) -> &Response<Bytes> {
        &self.0[index]
    }
}

pub(super) async fn buffered(
    request: Request<impl Body<Error: fmt::Debug>>,
) -> (request::Parts, Bytes) {
    let (head, body) = request.into_parts();
    (head, collected("request", body).await)
}

async fn collected(of: &str, body: impl Body<Error: fmt::Debug>) -> Bytes {
    match body.collect().await {
        Ok(body) => body.to_bytes(),
        Err(error) => panic!("the body of the {of} ended in an error: {error:?}"),
    }
}

fn copy<B: From<Bytes>>(head: &request::Parts, body: &Bytes) -> Request<B> {
    Request::from_parts(head.clone(), B::from(body.clone()))
}

async fn send<S, B, R>(service: &mut S, request: Request<B>) -> Response<Bytes>
where
    S: Service<Request<B>, Response = Response<R>, Error: fmt::Debug>,
    R: Body<Error: fmt::Debug>,
{
    poll_fn(|cx| service.poll_ready(cx)).await.unwrap_or_else(|error| failed(&error));
    let response = service.call(request).await.unwrap_or_else(|error| failed(&error));
    let (head, body) = response.into_parts();
    Response::from_parts(head, collected("response", body).await)
}

fn failed<T>(error: &impl fmt::Debug) -> T {
    panic!("the service returned an error: {error:?}")
}
