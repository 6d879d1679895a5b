//! [`Dedup`]: the tower service. [`ResponseFuture`]: buffers the body, dispatches the request, and
//! awaits the ending.

use std::fmt;
use std::future::Future;
use std::panic::resume_unwind;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use http_body_util::Full;
use pin_project_lite::pin_project;
use tower_layer::Layer;
use tower_service::Service;

use super::admit::{Dispatch, EndingFuture};
use super::body::{Collect, ResponseBody};
use super::builder::DedupLayer;
use super::request::Run;
use crate::error::{BoxError, valid};
use crate::ledger::Ledger;

impl<S, L: Ledger, B> Layer<S> for DedupLayer<L, B> {
    type Service = Dedup<S, L, B>;

    /// # Panics
    ///
    /// If the layer is invalid.
    #[track_caller]
    fn layer(&self, inner: S) -> Self::Service {
        valid(self.check());
        Dedup { inner, layer: Arc::new(self.clone()) }
    }
}

/// The service that [`DedupLayer`](crate::DedupLayer) makes of an inner one.
///
/// # Clone
///
/// A clone is a handle to the same ledger and the same bounds, with a clone of the inner service.
pub struct Dedup<S, L, B = Full<Bytes>> {
    inner: S,
    layer: Arc<DedupLayer<L, B>>,
}

impl<S, L, B, R, ResBody> Service<Request<R>> for Dedup<S, L, B>
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
    type Response = Response<ResponseBody<ResBody>>;
    type Error = S::Error;
    type Future = ResponseFuture<S, L, B, R, ResBody>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<R>) -> Self::Future {
        // A fresh clone is not ready: it stays here, and the ready service goes with the request.
        let clone = self.inner.clone();
        let ready = std::mem::replace(&mut self.inner, clone);
        let (head, body) = request.into_parts();
        let config = &self.layer.config;
        let body = Collect::new(body, config.body_limit, config.body_timeout);
        let run = Some(Run::new(ready, head, Arc::clone(&self.layer)));
        ResponseFuture { state: State::Buffering { body, run } }
    }
}

impl<S: Clone, L, B> Clone for Dedup<S, L, B> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), layer: Arc::clone(&self.layer) }
    }
}

impl<S: fmt::Debug, L, B> fmt::Debug for Dedup<S, L, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dedup").field("inner", &self.inner).finish_non_exhaustive()
    }
}

pin_project! {
    /// The response future of [`Dedup`](crate::Dedup).
    ///
    /// # Cancel safety
    ///
    /// Dropped while it buffers the body, it leaves nothing behind. Dropped
    /// later, the delivery runs to its end without it. For a request by a method that is not
    /// deduplicated, it drops the inner service's future.
    pub struct ResponseFuture<S, L, B, R, ResBody>
    where
        S: Service<Request<B>>,
    {
        #[pin]
        state: State<S, L, B, R, ResBody>,
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
        Waiting {
            ending: EndingFuture<ResBody, S::Error>,
        },
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
        let ending = loop {
            let (body, run) = match this.state.as_mut().project() {
                StateProj::Waiting { ending } => break ready!(ending.as_mut().poll(cx)),
                StateProj::Buffering { body, run } => (ready!(body.poll(cx)), run.take()),
            };
            let dispatch = match (run, body) {
                (Some(run), Ok(body)) => run.dispatch(body, cx),
                (Some(mut run), Err(fault)) => break run.refuse_body(fault),
                (None, _) => panic!("a future is polled after it was ready"),
            };
            match dispatch {
                Dispatch::Ended(ending) => break ending,
                Dispatch::Waiting(ending) => this.state.set(State::Waiting { ending }),
            }
        };
        Poll::Ready(ending.unwrap_or_else(|panic| resume_unwind(panic)))
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
