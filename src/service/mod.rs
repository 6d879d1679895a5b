//! [`Dedup`]: the way of one delivery.
//!
//! 1. The body is buffered and the keys are read in the caller's future: nothing is claimed yet,
//!    and a client that goes away costs nothing.
//! 2. From the claim on, the delivery runs to its end, whatever the client does: servers drop the
//!    future of a request whose client hung up, and senders do hang up. So from the first time that
//!    it has to wait for something, it runs in a task of its own. Until then nobody can drop it, and
//!    most deliveries over a store in memory end before. The current tracing span goes along;
//!    task-locals do not.
//! 3. A delivery needs one of `max_running` permits and the inner service's readiness before it
//!    claims. One that waits for another delivery of its event gives both up, and takes both
//!    again, in that order, before it begins again.
//! 4. The *ready* inner service is called, never a fresh clone of it.
//! 5. `type Error = S::Error`: what goes wrong in this layer is a response, so that axum needs no
//!    `HandleErrorLayer`, and never a 2xx: that would mean "stop retrying".
//! 6. A request that already carries this very delivery, because the same layer is around the route
//!    twice, passes through: the inner layer would find its event in flight, or complete.
//! 7. A panic of the handler is resumed in the caller, so that a catching layer works as if there
//!    were no task.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use http_body_util::Full;
use tower_service::Service;

use crate::body::ResponseBody;
use crate::error::BoxError;
use crate::future::ResponseFuture;
use crate::layer::Config;
use crate::ledger::Ledger;

mod answer;
mod gate;
mod paths;
mod run;
mod start;

pub(crate) use answer::{Answer, own, replayed};
pub(crate) use gate::Gate;
pub(crate) use start::{Next, Start};

/// The service that [`DedupLayer`](crate::DedupLayer) makes of an inner one.
///
/// # Clone
///
/// A clone shares the ledger and the bounds, and clones the inner service.
pub struct Dedup<S, L, B = Full<Bytes>> {
    inner: S,
    shared: Arc<Shared<L>>,
    body: PhantomData<fn() -> B>,
}

/// What all deliveries through one service share.
pub(crate) struct Shared<L> {
    pub(crate) ledger: Arc<L>,
    pub(crate) config: Config,
    pub(crate) gate: Arc<Gate>,
}

impl<S, L, B> Dedup<S, L, B> {
    pub(crate) fn new(inner: S, ledger: Arc<L>, config: Config, gate: Arc<Gate>) -> Self {
        Self { inner, shared: Arc::new(Shared { ledger, config, gate }), body: PhantomData }
    }

    /// The inner service.
    pub fn get_ref(&self) -> &S {
        &self.inner
    }

    /// The inner service, to change.
    pub fn get_mut(&mut self) -> &mut S {
        &mut self.inner
    }

    /// The inner service, taken out.
    pub fn into_inner(self) -> S {
        self.inner
    }
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
        // The clone is not ready: it stays here, to be asked, and the ready one goes.
        let clone = self.inner.clone();
        let ready = std::mem::replace(&mut self.inner, clone);
        let (head, body) = request.into_parts();
        ResponseFuture::new(Start::new(ready, head, Arc::clone(&self.shared)), body)
    }
}

impl<S: Clone, L, B> Clone for Dedup<S, L, B> {
    fn clone(&self) -> Self {
        let (inner, shared) = (self.inner.clone(), Arc::clone(&self.shared));
        Self { inner, shared, body: PhantomData }
    }
}

impl<S: fmt::Debug, L, B> fmt::Debug for Dedup<S, L, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dedup").field("inner", &self.inner).finish_non_exhaustive()
    }
}
