//! [`VerifyLayer`] and [`Verify`].

use std::borrow::Cow;
use std::fmt;
use std::future::{Future, poll_fn};
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use futures_util::FutureExt;
use http::header::{HeaderValue, RETRY_AFTER};
use http::request::Parts;
use http::{Request, Response, StatusCode};
use http_body::Body;
use http_body_util::Full;
use tokio::time::timeout;
use tower_layer::Layer;
use tower_service::Service;

use super::error::Refusal;
use super::verifier::Verifier;
use crate::error::{BoxError, ConfigError, NOT_ZERO, check, valid};
use crate::key::{LogIds, RequestRef, escaped};
use crate::layer::{BODY_LIMIT, BODY_TIMEOUT, Collect, Verified};
use crate::observe::records;
use crate::provider::Preset;

type OwnCheck = dyn Fn(&Parts, &[u8], SystemTime) -> Result<(), Refusal> + Send + Sync;
type FoundVerifier = Pin<Box<dyn Future<Output = Result<Option<Verifier>, BoxError>> + Send>>;
type Select = dyn Fn(Parts) -> FoundVerifier + Send + Sync;

/// The longest body, in bytes, in which the id of a refused request is looked for: whoever cannot
/// sign must not make the server parse more. The search costs less than the signature of such a
/// body.
const CLAIM_LIMIT: usize = 4 * 1024;

/// The longest look-up of a verifier: as long as a call of the store by default. Senders wait for 3
/// s and longer.
const LOOK_UP_TIMEOUT: Duration = Duration::from_secs(2);

/// The `Retry-After` of a look-up that failed, in seconds: that of a `DedupLayer` whose store is
/// not available.
const RETRY_LOOK_UP: HeaderValue = HeaderValue::from_static("30");

/// Why a request is not verified.
struct Unverified {
    /// The answer, unless the layer only reports.
    status: StatusCode,
    /// The name of the reason in metrics.
    name: &'static str,
    reason: Cow<'static, str>,
}

impl From<Refusal> for Unverified {
    fn from(refusal: Refusal) -> Self {
        let (status, reason) = (StatusCode::UNAUTHORIZED, refusal.to_string().into());
        Self { status, name: refusal.name(), reason }
    }
}

impl Unverified {
    /// A closure panicked: the fault is not the sender's, who delivers again.
    fn by_panic() -> Self {
        let reason = "a closure of the verifying layer panicked".into();
        Self { status: StatusCode::SERVICE_UNAVAILABLE, name: "panicked", reason }
    }
}

/// What verifies a request.
enum Check {
    Verifier(Box<Verifier>),
    Own(Box<OwnCheck>),
    /// Looks up the verifier of each request.
    Select(Box<Select>),
}

/// Passes only requests with a valid signature, unless it [only reports](Self::report_only), and
/// inserts [`Verified`] into their extensions.
///
/// It belongs *outside* the [`DedupLayer`](crate::DedupLayer): first in a tuple, or in a
/// `ServiceBuilder`. Then an unverified request claims no id.
///
/// ```
/// # #[cfg(feature = "memory")] {
/// use axum::Router;
/// use axum::routing::post;
/// use tower_dedup::adapter::MemoryAdapter;
/// use tower_dedup::verify::VerifyLayer;
/// use tower_dedup::{DedupLayer, provider};
///
/// let secret = "whsec_test_secret"; // from the environment, not from the source
/// let verify = VerifyLayer::new(provider::STRIPE.verifier(secret)?);
/// let dedup = DedupLayer::new(provider::STRIPE, MemoryAdapter::new()).require_verified();
/// // The first layer of the tuple is outermost: an unsigned request uses up no id.
/// let app: Router = Router::new().route("/hook", post(async || "done").layer((verify, dedup)));
/// # let _ = app;
/// # }
/// # Ok::<(), tower_dedup::verify::VerifierError>(())
/// ```
///
/// It takes every request body whose data is [`Bytes`]. It wraps every service that takes
/// [`Full<Bytes>`]: an axum route, a [`Dedup`](crate::Dedup), a hyper service.
///
/// If the head alone shows that a request is not verified, as without the header of the signature,
/// the request is refused before its body is read. A form of more than 1,000 fields is refused. So
/// is an item of Adyen with a colon in a value, which could belong to the next value. Two values
/// may have colons: the `pspReference` of a `REPORT_AVAILABLE`, and the `merchantReference` of any
/// other item.
///
/// | answer | when |
/// |---|---|
/// | 401 | the request is not verified, or [`select`](Self::select) knows no verifier for it |
/// | 503, `Retry-After: 30` | `select` failed, or took more than 2 s; a closure panicked |
/// | 413 | the body is larger than [`body_limit`](Self::body_limit) |
/// | 408 | the body does not arrive within [`body_timeout`](Self::body_timeout) |
/// | 400 | the body ends in an error |
///
/// A header whose value is the secret itself, such as GitLab's token, is marked
/// [sensitive](http::HeaderValue::is_sensitive) in the request that passes, so that no layer inside
/// stores or logs it.
///
/// # Clone
///
/// A clone shares the secrets.
#[derive(Clone)]
#[must_use = "a layer does nothing until it wraps a service"]
pub struct VerifyLayer {
    check: Arc<Check>,
    /// The name of the sender in log records and metrics.
    name: Option<Arc<str>>,
    log_ids: LogIds,
    body_limit: usize,
    body_timeout: Duration,
    /// Requests that are not verified pass.
    reports_only: bool,
}

impl VerifyLayer {
    /// Makes a layer with the default limits of [`DedupLayer`](crate::DedupLayer) for the same
    /// preset: 10 s, and 2 MiB or the [largest body](crate::guide::providers) of the preset's
    /// sender if that is larger.
    pub fn new(verifier: Verifier) -> Self {
        let largest = verifier.preset.and_then(|preset| preset.max_body).unwrap_or_default();
        let layer = Self::with(Check::Verifier(Box::new(verifier)));
        Self { body_limit: BODY_LIMIT.max(largest), ..layer }
    }

    /// Makes a layer for a sender that no [`Scheme`](super::Scheme) describes. The limits are 2 MiB
    /// and 10 s. The closure takes the head, the whole raw body and the server's time.
    /// [`named`](Self::named) names the sender.
    pub fn from_fn<F>(check: F) -> Self
    where
        F: Fn(&Parts, &[u8], SystemTime) -> Result<(), Refusal> + Send + Sync + 'static,
    {
        Self::with(Check::Own(Box::new(check)))
    }

    /// Makes a layer that looks up the verifier of each request: for a secret for each tenant or
    /// endpoint.
    ///
    /// The closure takes the head of the request. If it returns `Ok(None)`, because there is no
    /// secret for the request, the answer is 401. An error, or a look-up that takes more than 2 s,
    /// is answered 503, so that the sender delivers again. The look-up runs for each request, also
    /// for forged ones, before the body is read: if you need a cache, put it into the closure. If
    /// the client hangs up, the look-up is dropped at its `.await`.
    ///
    /// The limits are 2 MiB and 10 s. Log records have the name of the found preset, unless the
    /// layer is [`named`](Self::named). The path is raw: `/%61cme` is not `/acme`. [The
    /// guide](crate::guide::keys#tenants) has the keys.
    ///
    /// ```
    /// use std::collections::HashMap;
    /// use std::sync::Arc;
    ///
    /// use tower_dedup::provider;
    /// use tower_dedup::verify::VerifyLayer;
    ///
    /// // From a database in a real program.
    /// let secrets = HashMap::from([("/stripe/acme", "whsec_1"), ("/stripe/globex", "whsec_2")]);
    /// let secrets = Arc::new(secrets);
    /// let verify = VerifyLayer::select(move |head| {
    ///     let secrets = Arc::clone(&secrets);
    ///     async move {
    ///         let Some(secret) = secrets.get(head.uri.path()) else { return Ok(None) };
    ///         Ok(Some(provider::STRIPE.verifier(secret)?))
    ///     }
    /// });
    /// # let _ = verify;
    /// ```
    pub fn select<F, Fut>(look_up: F) -> Self
    where
        F: Fn(Parts) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Option<Verifier>, BoxError>> + Send + 'static,
    {
        Self::with(Check::Select(Box::new(move |head| Box::pin(look_up(head)))))
    }

    fn with(check: Check) -> Self {
        Self {
            check: Arc::new(check),
            name: None,
            log_ids: LogIds::default(),
            body_limit: BODY_LIMIT,
            body_timeout: BODY_TIMEOUT,
            reports_only: false,
        }
    }

    /// Sets the name of the sender: `preset` in log records and metrics. The default is the
    /// preset's name; without a preset, the log record has none, and metrics have `other`.
    pub fn named(mut self, name: &str) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Returns the name of the sender; `None` without a preset and without a [name](Self::named).
    #[must_use]
    pub fn sender(&self) -> Option<&str> {
        let Check::Verifier(verifier) = &*self.check else { return self.name.as_deref() };
        self.name_of(Some(verifier))
    }

    /// Sets how log records name an id: see [`DedupLayer::log_ids`](crate::DedupLayer::log_ids).
    ///
    /// The log record `not verified` has the id of a request that a preset's verifier has refused,
    /// as `claimed_id`. **Nobody has verified this id.** The record does not have it if the head
    /// alone was refused and the id is in the body, or if the id is in a body of more than 4 KiB.
    /// Of several events, the record names the first.
    pub fn log_ids(mut self, ids: LogIds) -> Self {
        self.log_ids = ids;
        self
    }

    /// Sets the largest body, in bytes. A larger body is answered 413. The smaller of this limit
    /// and the [limit](crate::DedupLayer::body_limit) of the `DedupLayer` applies: set both.
    pub fn body_limit(mut self, bytes: usize) -> Self {
        self.body_limit = bytes;
        self
    }

    /// Sets the time in which a body must arrive. A slower body is answered 408.
    pub fn body_timeout(mut self, time: Duration) -> Self {
        self.body_timeout = time;
        self
    }

    /// Lets a request that is not verified pass, without [`Verified`], after it was logged
    /// (`not verified`, with `reported`) and counted. Use it to introduce verification [in a
    /// running service](crate::guide::verification#in-a-running-service).
    ///
    /// **The layer then protects nothing**: a forged request reaches the handler. With
    /// [`require_verified`](crate::DedupLayer::require_verified), the deduplicating layer still
    /// refuses it, by 500. A body that is too large, too slow or broken cannot be passed, and is
    /// refused in any case.
    pub fn report_only(mut self) -> Self {
        self.reports_only = true;
        self
    }

    /// Returns the layer if its settings are valid. A layer with an invalid setting panics when it
    /// wraps a service.
    ///
    /// # Errors
    ///
    /// A [`body_limit`](Self::body_limit) of 0 bytes, or a [`body_timeout`](Self::body_timeout) of
    /// zero.
    pub fn checked(self) -> Result<Self, ConfigError> {
        check(self.body_limit > 0, "body_limit", "at least 1 byte", &self.body_limit)?;
        check(!self.body_timeout.is_zero(), "body_timeout", NOT_ZERO, &self.body_timeout)?;
        Ok(self)
    }

    async fn verify<R>(&self, request: Request<R>) -> Result<Request<Full<Bytes>>, StatusCode>
    where
        R: Body<Data = Bytes>,
        R::Error: Into<BoxError>,
    {
        let (mut head, body) = request.into_parts();
        let mut found = None;
        let check = match &*self.check {
            Check::Verifier(verifier) => Ok(Ok(&**verifier)),
            Check::Own(check) => Ok(Err(check)),
            Check::Select(look_up) => {
                let verifier = self.look_up(look_up, &head).await;
                verifier.map(|verifier| Ok(&*found.insert(verifier)))
            }
        };
        let verifier = check.as_ref().ok().and_then(|check| check.ok());
        let read = verifier.map_or(Ok(()), |known| known.verify_head(&head, SystemTime::now()));
        let check = check.and_then(|check| read.map(|()| check).map_err(Unverified::from));
        // Only a layer that reports passes the body of such a request on.
        let check = match check {
            Err(failed) if !self.reports_only => {
                return Err(self.report(verifier, &head, &Bytes::new(), &failed, false));
            }
            check => check,
        };
        let mut body = pin!(Collect::new(body, self.body_limit, self.body_timeout));
        let body = poll_fn(|cx| body.as_mut().poll(cx)).await.map_err(|fault| {
            let outcome = fault.outcome();
            let (status, reason) = (outcome.answer().status(), fault.to_string().into());
            let failed = Unverified { status, name: outcome.as_str(), reason };
            self.report(verifier, &head, &Bytes::new(), &failed, false)
        })?;
        let now = SystemTime::now();
        let verified = check.and_then(|check| match check {
            Ok(verifier) => Ok(verifier.verify(&head, &body, now)?),
            Err(check) => {
                let checked = catch_unwind(AssertUnwindSafe(|| check(&head, &body, now)));
                Ok(checked.map_err(|_| Unverified::by_panic())??)
            }
        });
        match verified {
            Ok(()) => {
                head.extensions.insert(Verified);
                records::verified(self.name_of(verifier), "passed");
            }
            Err(failed) => {
                let status = self.report(verifier, &head, &body, &failed, self.reports_only);
                if !self.reports_only {
                    return Err(status);
                }
            }
        }
        if let Some(verifier) = verifier {
            verifier.mark_tokens(&mut head.headers);
        }
        Ok(Request::from_parts(head, Full::new(body)))
    }

    /// Looks up what verifies the request.
    async fn look_up(&self, look_up: &Select, head: &Parts) -> Result<Verifier, Unverified> {
        // The closure may panic before it returns its future.
        let look_up = AssertUnwindSafe(async { look_up(head.clone()).await }).catch_unwind();
        let reason = match timeout(LOOK_UP_TIMEOUT, look_up).await {
            Ok(Ok(Ok(Some(verifier)))) => return Ok(verifier),
            Ok(Ok(Ok(None))) => return Err(Refusal::Unknown.into()),
            Ok(Err(_)) => return Err(Unverified::by_panic()),
            Ok(Ok(Err(error))) => {
                format!("the look-up failed: {}", escaped(&records::chain(&*error))).into()
            }
            Err(_) => "the look-up took too long".into(),
        };
        Err(Unverified { status: StatusCode::SERVICE_UNAVAILABLE, name: "look_up_failed", reason })
    }

    /// Logs and counts a request that is not verified, and returns its answer. `body` is what was
    /// read of it. `passes` says that it goes on.
    fn report(
        &self,
        verifier: Option<&Verifier>,
        head: &Parts,
        body: &Bytes,
        failed: &Unverified,
        passes: bool,
    ) -> StatusCode {
        let url = verifier.and_then(|verifier| verifier.signed_url(head));
        let preset = verifier.and_then(|verifier| verifier.preset);
        let name = self.name_of(verifier);
        records::verified(name, if passes { "reported" } else { "refused" });
        records::not_verified(
            name,
            &escaped(head.uri.path()),
            url.as_deref().map(|url| escaped(url)).as_deref(),
            preset.as_ref().and_then(|sender| self.unverified_id(sender, head, body)).as_deref(),
            passes.then_some(true),
            failed.name,
            &failed.reason,
        );
        failed.status
    }

    /// Returns the name of the sender in log records and metrics.
    fn name_of(&self, verifier: Option<&Verifier>) -> Option<&str> {
        let preset = verifier.and_then(|verifier| verifier.preset.as_ref());
        self.name.as_deref().or(preset.map(Preset::name))
    }

    /// Returns the id that a refused request of this sender claims to have.
    fn unverified_id(&self, sender: &Preset, head: &Parts, body: &Bytes) -> Option<String> {
        let body = if body.len() > CLAIM_LIMIT { &Bytes::new() } else { body };
        let key = sender.extractor().read_first(&RequestRef::new(head, body))?;
        Some(key.shown_id(self.log_ids).into_owned())
    }
}

impl<S> Layer<S> for VerifyLayer {
    type Service = Verify<S>;

    fn layer(&self, inner: S) -> Verify<S> {
        Verify { inner, layer: valid(self.clone().checked()) }
    }
}

impl fmt::Debug for VerifyLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VerifyLayer")
            .field("body_limit", &self.body_limit)
            .field("body_timeout", &self.body_timeout)
            .field("reports_only", &self.reports_only)
            .finish_non_exhaustive()
    }
}

/// The service of [`VerifyLayer`].
///
/// It calls the inner service that it polled ready. If its future is dropped before the inner
/// service is called, the request has had no effect.
#[derive(Debug, Clone)]
pub struct Verify<S> {
    inner: S,
    layer: VerifyLayer,
}

impl<S, R, B> Service<Request<R>> for Verify<S>
where
    S: Service<Request<Full<Bytes>>, Response = Response<B>> + Clone + Send + 'static,
    S::Future: Send,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Into<BoxError>,
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
                    if status == StatusCode::SERVICE_UNAVAILABLE {
                        response.headers_mut().insert(RETRY_AFTER, RETRY_LOOK_UP);
                    }
                    Ok(response)
                }
            }
        })
    }
}
