//! [`Dedup`]: the tower service.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use http_body_util::Full;
use tower_service::Service;

use super::admit::Start;
use super::body::ResponseBody;
use super::config::{Config, Shared};
use super::future::ResponseFuture;
use super::gate::Gate;
use crate::error::BoxError;
use crate::ledger::Ledger;

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

impl<S, L, B> Dedup<S, L, B> {
    pub(super) fn new(inner: S, ledger: Arc<L>, config: Config, gate: Arc<Gate>) -> Self {
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
