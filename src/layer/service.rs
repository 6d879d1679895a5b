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

use super::body::ResponseBody;
use super::config::{Config, ServiceState};
use super::delivery::Run;
use super::future::ResponseFuture;
use super::gate::Gate;
use crate::error::BoxError;
use crate::ledger::Ledger;

/// The service that [`DedupLayer`](crate::DedupLayer) makes of an inner one.
///
/// # Clone
///
/// A clone is a handle to the same ledger and the same bounds, with a clone of the inner service.
pub struct Dedup<S, L, B = Full<Bytes>> {
    inner: S,
    service: Arc<ServiceState<L>>,
    inner_body: PhantomData<fn() -> B>,
}

impl<S, L, B> Dedup<S, L, B> {
    pub(super) fn new(inner: S, ledger: Arc<L>, config: Config, gate: Arc<Gate>) -> Self {
        Self {
            inner,
            service: Arc::new(ServiceState { ledger, config, gate }),
            inner_body: PhantomData,
        }
    }

    /// Returns the inner service.
    pub fn get_ref(&self) -> &S {
        &self.inner
    }

    /// Returns the inner service.
    pub fn get_mut(&mut self) -> &mut S {
        &mut self.inner
    }

    /// Returns the inner service.
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
        // A fresh clone is not ready: it stays here, and the ready service goes with the request.
        let clone = self.inner.clone();
        let ready = std::mem::replace(&mut self.inner, clone);
        let (head, body) = request.into_parts();
        ResponseFuture::new(Run::new(ready, head, Arc::clone(&self.service)), body)
    }
}

impl<S: Clone, L, B> Clone for Dedup<S, L, B> {
    fn clone(&self) -> Self {
        let (inner, service) = (self.inner.clone(), Arc::clone(&self.service));
        Self { inner, service, inner_body: PhantomData }
    }
}

impl<S: fmt::Debug, L, B> fmt::Debug for Dedup<S, L, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dedup").field("inner", &self.inner).finish_non_exhaustive()
    }
}
