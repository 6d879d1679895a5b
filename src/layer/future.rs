//! [`ResponseFuture`]: collects the body, then awaits what became of it.

use std::fmt;
use std::future::Future;
use std::panic::resume_unwind;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use pin_project_lite::pin_project;
use tokio::sync::oneshot;
use tower_service::Service;

use super::admit::{Next, Start};
use super::answer::{Answer, DedupResult, own, replayed};
use super::body::{Collect, ResponseBody};
use super::config::Shared;
use crate::error::BoxError;
use crate::ledger::Ledger;

pin_project! {
    /// The response future of [`Dedup`](crate::Dedup).
    ///
    /// # Cancel safety
    ///
    /// Dropped while the body arrives, nothing was claimed. Dropped later, the delivery runs to
    /// its end without it.
    pub struct ResponseFuture<S, L, B, R, ResBody>
    where
        S: Service<Request<B>>,
    {
        #[pin]
        state: State<S, L, B, R, ResBody>,
        shared: Arc<Shared<L>>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<S, L, B, R, ResBody>
    where
        S: Service<Request<B>>,
    {
        Buffering {
            #[pin]
            body: Collect<R>,
            start: Option<Start<S, L>>,
        },
        Inner {
            #[pin]
            future: S::Future,
        },
        Task {
            answer: oneshot::Receiver<Answer<ResBody, S::Error>>,
        },
    }
}

impl<S, L, B, R, ResBody> ResponseFuture<S, L, B, R, ResBody>
where
    S: Service<Request<B>>,
{
    pub(super) fn new(start: Start<S, L>, body: R) -> Self {
        let shared = Arc::clone(start.shared());
        let body = Collect::new(body, shared.config.body_limit, shared.config.body_timeout);
        Self { state: State::Buffering { body, start: Some(start) }, shared }
    }
}

impl<S, L, B, R, ResBody> Future for ResponseFuture<S, L, B, R, ResBody>
where
    S: Service<Request<B>, Response = Response<ResBody>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Send + 'static,
    L: Ledger,
    B: From<Bytes> + Send + 'static,
    R: Body<Data = Bytes>,
    R::Error: Into<BoxError>,
    ResBody: Body<Data = Bytes> + Send + 'static,
{
    type Output = Result<Response<ResponseBody<ResBody>>, S::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        loop {
            let next = match this.state.as_mut().project() {
                StateProj::Buffering { body, start } => {
                    let body = ready!(body.poll(cx));
                    match (start.take(), body) {
                        (Some(start), Ok(body)) => start.go(body, cx),
                        (Some(start), Err(fault)) => Next::Own(start.broken(&fault)),
                        // Polled again after it was ready, against the contract of futures.
                        (None, _) => Next::Own(DedupResult::Unavailable),
                    }
                }
                StateProj::Inner { future } => {
                    let response = ready!(future.poll(cx))?;
                    return Poll::Ready(Ok(response.map(ResponseBody::inner)));
                }
                StateProj::Task { answer } => match ready!(Pin::new(answer).poll(cx)) {
                    Ok(answer) => Next::Ended(answer),
                    // The runtime shuts down and has dropped the task.
                    Err(_) => Next::Own(DedupResult::Unavailable),
                },
            };
            match next {
                Next::Ended(Answer::Inner(response)) => return Poll::Ready(response),
                Next::Ended(Answer::Replay(response)) => {
                    return Poll::Ready(Ok(replayed(&response, &this.shared.config)));
                }
                Next::Ended(Answer::Panicked(panic)) => resume_unwind(panic),
                Next::Ended(Answer::Own(result)) | Next::Own(result) => {
                    return Poll::Ready(Ok(own(result, &this.shared.config)));
                }
                Next::Inner(future) => this.state.set(State::Inner { future }),
                Next::Task(answer) => this.state.set(State::Task { answer }),
            }
        }
    }
}

impl<S, L, B, R, ResBody> fmt::Debug for ResponseFuture<S, L, B, R, ResBody>
where
    S: Service<Request<B>>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}
