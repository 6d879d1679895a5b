//! A layer that passes only requests with a valid signature.
//!
//! 1. It buffers the body once, up to a limit in bytes and time, and verifies the signature over these
//!    bytes. It passes the same buffer on, without a copy if the body was one buffer.
//! 2. A verified request carries [`Verified`], which
//!    [`require_verified`](tower_dedup::DedupLayer::require_verified) demands.
//! 3. Every other request is answered 401. If a genuine sender gets a 401, the secret or the clock is
//!    wrong *here*. A sender that retries then delivers again once that is fixed. Some senders give up on a
//!    401 (Event Grid), so test a secret before events depend on it. The status is not 403, which stops
//!    some senders (Postmark). It is not 2xx, which loses a genuine event, and not 5xx, because the
//!    server works.
//! 4. It belongs *outside* the dedup layer: added after it to an axum route, or before it to a
//!    `ServiceBuilder`. Then an unverified request uses up no id.
//!
//! It takes any request body whose data is [`Bytes`]. It wraps any service that takes [`Full<Bytes>`]:
//! an axum route, a [`Dedup`](tower_dedup::Dedup), a hyper service.

use std::error::Error;
use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, UNIX_EPOCH};

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body::Body;
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use tokio::time::timeout;
use tower::{Layer, Service};
use tower_dedup::Verified;

use super::signature::{Check, Received};

/// Verifies requests. A clone shares the check.
#[derive(Clone)]
pub(crate) struct VerifyLayer {
    check: Check,
    body_limit: usize,
    body_timeout: Duration,
    clock: fn() -> i64,
}

impl VerifyLayer {
    /// Creates the layer with the limits of [`DedupLayer`](tower_dedup::DedupLayer): 2 MiB, 10 s.
    pub(crate) fn new(check: Check) -> Self {
        let body_timeout = Duration::from_secs(10);
        Self { check, body_limit: 2 * 1024 * 1024, body_timeout, clock: unix_time }
    }

    /// Sets the largest body, in bytes. A larger body is answered 413.
    pub(crate) fn body_limit(mut self, bytes: usize) -> Self {
        self.body_limit = bytes;
        self
    }

    /// Sets the time in which a body must arrive. A slower body is answered 408.
    pub(crate) fn body_timeout(mut self, time: Duration) -> Self {
        self.body_timeout = time;
        self
    }

    /// Sets the clock, which returns seconds since 1970.
    pub(crate) fn clock(mut self, clock: fn() -> i64) -> Self {
        self.clock = clock;
        self
    }
}

fn unix_time() -> i64 {
    UNIX_EPOCH.elapsed().map_or(0, |since| i64::try_from(since.as_secs()).unwrap_or(i64::MAX))
}

impl<S> Layer<S> for VerifyLayer {
    type Service = Verify<S>;

    fn layer(&self, inner: S) -> Verify<S> {
        Verify { inner, layer: self.clone() }
    }
}

/// The service of [`VerifyLayer`].
#[derive(Clone)]
pub(crate) struct Verify<S> {
    inner: S,
    layer: VerifyLayer,
}

impl<S, R, B> Service<Request<R>> for Verify<S>
where
    S: Service<Request<Full<Bytes>>, Response = Response<B>> + Clone + Send + 'static,
    S::Future: Send,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Into<Box<dyn Error + Send + Sync>>,
    B: Default,
{
    type Response = Response<B>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<B>, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<R>) -> Self::Future {
        // Takes the ready service, and leaves the clone, which is not ready yet.
        let clone = self.inner.clone();
        let mut inner = mem::replace(&mut self.inner, clone);
        let layer = self.layer.clone();
        Box::pin(async move {
            match layer.verify(request).await {
                Ok(request) => inner.call(request).await,
                Err(status) => {
                    let mut response = Response::new(B::default());
                    *response.status_mut() = status;
                    Ok(response)
                }
            }
        })
    }
}

impl VerifyLayer {
    async fn verify<R>(&self, request: Request<R>) -> Result<Request<Full<Bytes>>, StatusCode>
    where
        R: Body<Data = Bytes>,
        R::Error: Into<Box<dyn Error + Send + Sync>>,
    {
        let (mut head, body) = request.into_parts();
        // Refuses a body of an announced length before it is read.
        if body.size_hint().lower() > u64::try_from(self.body_limit).unwrap_or(u64::MAX) {
            return Err(StatusCode::PAYLOAD_TOO_LARGE);
        }
        let body = timeout(self.body_timeout, Limited::new(body, self.body_limit).collect())
            .await
            .map_err(|_| StatusCode::REQUEST_TIMEOUT)?
            .map_err(|error| match error.is::<LengthLimitError>() {
                true => StatusCode::PAYLOAD_TOO_LARGE,
                false => StatusCode::BAD_REQUEST,
            })?
            .to_bytes();
        let received = Received { head: &head, body: &body, now: (self.clock)() };
        (self.check)(&received).map_err(|refusal| {
            tracing::warn!(path = head.uri.path(), %refusal, "a request is not verified");
            StatusCode::UNAUTHORIZED
        })?;
        head.extensions.insert(Verified);
        Ok(Request::from_parts(head, Full::new(body)))
    }
}
