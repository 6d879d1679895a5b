//! A layer that lets nothing pass but what its sender has signed.
//!
//! 1. It reads the body once, up to a limit in bytes and time, has the signature checked over those
//!    bytes, and hands the same buffer on. Nothing is copied if the body was one buffer.
//! 2. What is verified carries [`Verified`], which
//!    [`require_verified`](tower_dedup::DedupLayer::require_verified) asks for.
//! 3. What is not is answered 401 and goes no further. 401 says that the credentials are wrong,
//!    and whoever retries such an answer is a sender whose secret or clock is wrong *here*: its
//!    events wait until that is put right. Some senders give an event up on a 401 (Event Grid), as
//!    is right for a forgery: try a secret out before events depend on it. It is not 403, which
//!    tells some (Postmark) to stop; not 2xx, which loses a genuine event; and not 5xx, since
//!    nothing is wrong with the server.
//! 4. It belongs *outside* the layer that deduplicates: added after it to an axum route, before it
//!    to a `ServiceBuilder`. Then what is not verified uses no id up.
//!
//! It takes any request body whose data is [`Bytes`], and wraps any service that takes
//! [`Full<Bytes>`]: a route of axum's, a [`Dedup`](tower_dedup::Dedup), a hyper server's service.

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

/// Verifies requests. A clone is another handle to the same check.
#[derive(Clone)]
pub(crate) struct VerifyLayer {
    check: Check,
    body_limit: usize,
    body_timeout: Duration,
    clock: fn() -> i64,
}

impl VerifyLayer {
    /// With the limits of [`DedupLayer`](tower_dedup::DedupLayer): 2 MiB, 10 s.
    pub(crate) fn new(check: Check) -> Self {
        let body_timeout = Duration::from_secs(10);
        Self { check, body_limit: 2 * 1024 * 1024, body_timeout, clock: unix_time }
    }

    /// The largest body, in bytes; a larger one is answered 413.
    pub(crate) fn body_limit(mut self, bytes: usize) -> Self {
        self.body_limit = bytes;
        self
    }

    /// How long a body may take to arrive; a slower one is answered 408.
    pub(crate) fn body_timeout(mut self, time: Duration) -> Self {
        self.body_timeout = time;
        self
    }

    /// What tells the time, in seconds since 1970.
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

/// The service that [`VerifyLayer`] makes of an inner one.
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
        // The clone is not ready: it stays here, to be asked, and the ready one goes.
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
        // What the client announces is refused before it is read.
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
