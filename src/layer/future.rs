//! [`ResponseFuture`]: buffers the body, dispatches the request, and awaits the ending.

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

use super::admit::Dispatch;
use super::answer::{DedupResult, Ending, own, replayed};
use super::body::{Collect, ResponseBody};
use super::config::ServiceState;
use super::delivery::Run;
use crate::error::BoxError;
use crate::ledger::Ledger;

pin_project! {
    /// The response future of [`Dedup`](crate::Dedup).
    ///
    /// # Cancel safety
    ///
    /// Dropped while it buffers the body or waits for a permit, it leaves nothing behind. Dropped
    /// later, the delivery runs to its end without it. For a request by a method that is not deduplicated,
    /// it drops the inner service's future.
    pub struct ResponseFuture<S, L, B, R, ResBody>
    where
        S: Service<Request<B>>,
    {
        #[pin]
        state: State<S, L, B, R, ResBody>,
        service: Arc<ServiceState<L>>,
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
            run: Option<Box<Run<S, L, B>>>,
        },
        Inner {
            #[pin]
            future: S::Future,
        },
        Permit {
            future: Pin<Box<dyn Future<Output = Dispatch<S, B, ResBody>> + Send>>,
        },
        Task {
            ending: oneshot::Receiver<Ending<ResBody, S::Error>>,
        },
    }
}

impl<S, L, B, R, ResBody> ResponseFuture<S, L, B, R, ResBody>
where
    S: Service<Request<B>>,
    R: Body<Data = Bytes>,
    R::Error: Into<BoxError>,
{
    pub(super) fn new(run: Box<Run<S, L, B>>, body: R) -> Self {
        let service = Arc::clone(&run.service);
        let body = Collect::new(body, service.config.body_limit, service.config.body_timeout);
        Self { state: State::Buffering { body, run: Some(run) }, service }
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
            let dispatch = match this.state.as_mut().project() {
                StateProj::Buffering { body, run } => {
                    let body = ready!(body.poll(cx));
                    match (run.take(), body) {
                        (Some(run), Ok(body)) => run.dispatch(body, cx),
                        (Some(mut run), Err(fault)) => run.refuse_body(fault).into(),
                        // The caller polls again after the future was ready.
                        (None, _) => DedupResult::Unavailable.into(),
                    }
                }
                StateProj::Inner { future } => {
                    let response = ready!(future.poll(cx))?;
                    return Poll::Ready(Ok(response.map(ResponseBody::inner)));
                }
                StateProj::Permit { future } => ready!(future.as_mut().poll(cx)),
                StateProj::Task { ending } => match ready!(Pin::new(ending).poll(cx)) {
                    Ok(ending) => Dispatch::Ended(ending),
                    // The runtime has dropped the task, because it shuts down.
                    Err(_) => DedupResult::Unavailable.into(),
                },
            };
            let config = &this.service.config;
            match dispatch {
                Dispatch::Inner(future) => this.state.set(State::Inner { future }),
                Dispatch::Permit(future) => this.state.set(State::Permit { future }),
                Dispatch::Task(ending) => this.state.set(State::Task { ending }),
                Dispatch::Ended(Ending::Inner(response)) => return Poll::Ready(response),
                Dispatch::Ended(Ending::Own(result)) => {
                    return Poll::Ready(Ok(own(result, config)));
                }
                Dispatch::Ended(Ending::Replay(stored)) => {
                    return Poll::Ready(Ok(replayed(&stored, config)));
                }
                Dispatch::Ended(Ending::Panicked(panic)) => resume_unwind(panic),
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
