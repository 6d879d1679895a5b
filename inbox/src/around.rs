//! [`Around`]: the layer around a [`DedupLayer`], and the path of a delivery through it.
//!
//! 1. The request is verified, if the inbox does so, and buffered within the bounds of the layer.
//! 2. A request that the layer would not deduplicate goes to the layer unchanged.
//! 3. From here on, the delivery has a task of its own, which no client can drop. It is stored, and
//!    goes to the layer.
//! 4. [`decide`] decides what happens to the row. If the answer is *stored*, the row records that
//!    before the answer leaves.
//!
//! # What happens if a future is dropped?
//!
//! - *The caller's future*: before step 3, nothing is stored; after that, the delivery continues.
//! - *The task*, because the runtime ends: the row's turn lapses, and any process of the service
//!   takes it.

use std::any::Any;
use std::fmt;
use std::future::{Future, Pending, pending};
use std::marker::PhantomData;
use std::mem;
use std::panic::{AssertUnwindSafe, resume_unwind};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use http::{HeaderValue, Request, Response, StatusCode, request};
use http_body::{Body, Frame};
use http_body_util::{BodyExt, Full, Limited};
use tokio::sync::oneshot;
use tokio::time::timeout;
use tower_dedup::adapter::contract::Token;
use tower_dedup::key::RequestRef;
use tower_dedup::ledger::{Lease, Ledger, Transactional};
#[cfg(feature = "verify")]
use tower_dedup::verify::VerifyLayer;
use tower_dedup::{
    BoxError, Dedup, DedupHandle, DedupLayer, Mode, OnUnavailable, ReportEnd, ResponseBody,
    Verified,
};
use tower_layer::Layer;
use tower_service::Service;
use tracing::Instrument;

use crate::core::Core;
use crate::decide::{Decision, End, History, decide};
use crate::observe;
use crate::row::{Change, Fate, NewRow, Place, identities};
use crate::settings::{FLOOR, InboxError, SPARE};
use crate::table::{Changed, Stored};
use crate::ticket::{Report, Ticket};

/// A ledger that releases an event whose handler has failed: only such an event can be delivered
/// again. On arrival, it cannot:
///
/// ```compile_fail,E0277
/// # use tower_dedup::adapter::MemoryAdapter;
/// # use tower_dedup::{DedupLayer, provider};
/// # fn of(inbox: &tower_dedup_inbox::Inbox) {
/// let dedup = DedupLayer::on_arrival(provider::GITHUB, MemoryAdapter::new());
/// let _ = inbox.around(dedup.inner_body::<axum::body::Body>());
/// # }
/// ```
///
/// ```
/// # use tower_dedup::adapter::MemoryAdapter;
/// # use tower_dedup::{DedupLayer, provider};
/// # fn of(inbox: &tower_dedup_inbox::Inbox) {
/// let dedup = DedupLayer::new(provider::GITHUB, MemoryAdapter::new());
/// let _ = inbox.around(dedup.inner_body::<axum::body::Body>());
/// # }
/// ```
#[diagnostic::on_unimplemented(
    message = "an inbox cannot be around a layer whose ledger is `{Self}`",
    note = "on arrival, a key is complete before its handler runs: an event whose handler failed would be a duplicate"
)]
pub trait Releases: Ledger {}

impl Releases for Lease {}

impl Releases for Transactional {}

/// The name of a verification outside of the inbox, in the table.
const OUTSIDE: &str = "outside";

/// An inbox around a [`DedupLayer`]: made by [`Inbox::around`](crate::Inbox::around).
///
/// An invalid layer panics when it wraps a service, as a [`DedupLayer`] does;
/// [`checked`](Self::checked) reports it. A layer is invalid if it [replays](DedupLayer::replay)
/// responses or is for the clients of an API, because a sender may be answered before there is a
/// response, or if it [fails open](OnUnavailable::FailOpen).
#[must_use = "a layer does nothing until it wraps a service"]
pub struct Around<L, B> {
    core: Arc<Core>,
    dedup: DedupLayer<L, B>,
    verification: Verification,
}

#[derive(Clone)]
enum Verification {
    None,
    #[cfg(feature = "verify")]
    By(VerifyLayer),
    Outside,
}

impl Verification {
    /// Returns the name that rows have.
    fn name(&self) -> Option<&str> {
        match self {
            Self::None => None,
            #[cfg(feature = "verify")]
            Self::By(verify) => verify.sender(),
            Self::Outside => Some(OUTSIDE),
        }
    }
}

impl<L: Releases, B> Around<L, B> {
    pub(crate) fn new(core: Arc<Core>, dedup: DedupLayer<L, B>) -> Self {
        let settings = dedup.settings();
        let least = settings.retention_floor().unwrap_or(FLOOR) + SPARE;
        let retention = settings.retention().max(least);
        let dedup = dedup.retention(retention).failures_are_retried();
        core.register(dedup.settings().namespace(), dedup.handle());
        Self { core, dedup, verification: Verification::None }
    }

    /// Verifies requests before they are stored. A request that has passed this verification is not
    /// verified again when it is redelivered, because its signature may be too old by then.
    ///
    /// Invalid without a [name](VerifyLayer::sender), because two verifications must not accept
    /// each other's rows. Rename a verification only while the table has no row of it.
    #[cfg(feature = "verify")]
    pub fn verified_by(self, verify: VerifyLayer) -> Self {
        Self { verification: Verification::By(verify), ..self }
    }

    /// States that a layer outside the inbox verifies requests, and that it also lets requests
    /// through whose signature is no longer valid, because a redelivery passes through the whole
    /// `app`. Without this call, a request that arrives with [`Verified`] is not stored, and an
    /// error is logged: the layers are in the wrong order.
    pub fn verified_outside(self) -> Self {
        Self { verification: Verification::Outside, ..self }
    }

    /// Returns the layer, if it can be applied.
    ///
    /// # Errors
    ///
    /// [`InboxError::Setting`] for an invalid setting of the inbox or of the layer.
    pub fn checked(self) -> Result<Self, InboxError> {
        self.check()?;
        let invalid = self.dedup.clone().checked();
        invalid.map(drop).map_err(|error| InboxError::Setting(error.to_string()))?;
        Ok(self)
    }

    /// Checks all but the settings of the [`DedupLayer`].
    fn check(&self) -> Result<(), InboxError> {
        let rule = |is_met: bool, text: &str| {
            if is_met { Ok(()) } else { Err(InboxError::Setting(text.to_owned())) }
        };
        self.core.check()?;
        let settings = self.dedup.settings();
        rule(!settings.replays(), "an inbox cannot be around a layer with `replay`")?;
        rule(!settings.is_of_clients(), "an inbox cannot be around a layer for `Idempotency-Key`")?;
        let fails_open = settings.on_unavailable() == OnUnavailable::FailOpen;
        rule(!fails_open, "an inbox cannot be around a layer that fails open")?;
        let has_name =
            matches!(self.verification, Verification::None) || self.verification.name().is_some();
        rule(has_name, "`verified_by` must have a layer with a name: `VerifyLayer::named`")?;
        #[cfg(feature = "verify")]
        if let Verification::By(verify) = &self.verification {
            rule(verify.sender() != Some(OUTSIDE), "`verified_by` must not be named `outside`")?;
            let invalid = verify.clone().checked();
            invalid.map(drop).map_err(|error| InboxError::Setting(error.to_string()))?;
        }
        Ok(())
    }
}

impl<L, B> Clone for Around<L, B> {
    fn clone(&self) -> Self {
        let Self { core, dedup, verification } = self;
        Self { core: Arc::clone(core), dedup: dedup.clone(), verification: verification.clone() }
    }
}

impl<L, B> fmt::Debug for Around<L, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Around").field("dedup", &self.dedup).finish_non_exhaustive()
    }
}

impl<S, L: Releases, B> Layer<S> for Around<L, B> {
    type Service = Inboxed<S, L, B>;

    /// # Panics
    ///
    /// If the layer, or its inbox, is invalid.
    fn layer(&self, inner: S) -> Inboxed<S, L, B> {
        if let Err(error) = self.check() {
            panic!("{error}");
        }
        let parts = Parts {
            core: Arc::clone(&self.core),
            handle: self.dedup.handle(),
            dedup: self.dedup.clone(),
            verification: self.verification.clone(),
        };
        Inboxed { inner: self.dedup.layer(inner), parts: Arc::new(parts) }
    }
}

/// The service of [`Around`].
pub struct Inboxed<S, L, B> {
    inner: Dedup<S, L, B>,
    parts: Arc<Parts<L, B>>,
}

struct Parts<L, B> {
    core: Arc<Core>,
    dedup: DedupLayer<L, B>,
    handle: DedupHandle,
    verification: Verification,
}

impl<S: Clone, L, B> Clone for Inboxed<S, L, B> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), parts: Arc::clone(&self.parts) }
    }
}

impl<S: fmt::Debug, L, B> fmt::Debug for Inboxed<S, L, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inboxed").field("inner", &self.inner).finish_non_exhaustive()
    }
}

/// How a call of the layer has ended.
type Called<B, E> = Result<Result<Response<ResponseBody<B>>, E>, Box<dyn Any + Send>>;

type CallFuture<B, E> = Pin<Box<dyn Future<Output = Result<Response<ResponseBody<B>>, E>> + Send>>;

impl<S, L, B, R, ResBody> Service<Request<R>> for Inboxed<S, L, B>
where
    S: Service<Request<B>, Response = Response<ResBody>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Send + 'static,
    L: Releases,
    B: From<Bytes> + Send + 'static,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Into<BoxError>,
    ResBody: Body<Data = Bytes> + Send + 'static,
{
    type Response = Response<ResponseBody<ResBody>>;
    type Error = S::Error;
    type Future = CallFuture<ResBody, S::Error>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        Service::<Request<Full<Bytes>>>::poll_ready(&mut self.inner, cx)
    }

    fn call(&mut self, mut request: Request<R>) -> Self::Future {
        let clone = self.inner.clone();
        let ready = mem::replace(&mut self.inner, clone);
        let (parts, inner) = (Arc::clone(&self.parts), ready);
        let step = Step { inner, parts };
        let ticket = request.extensions().get::<Ticket>().cloned();
        let is_outside = matches!(step.parts.verification, Verification::Outside);
        let is_verified = request.extensions().get::<Verified>().is_some();
        // A redelivery never takes this way: it would run its handler without a report.
        if is_verified && !is_outside && ticket.is_none() {
            observe::verified_outside(step.parts.dedup.settings().namespace());
            return Box::pin(step.pass(request));
        }
        let name = step.parts.verification.name();
        if let (Some(ticket), Some(name)) = (&ticket, name)
            && ticket.was_verified_by(name)
        {
            request.extensions_mut().insert(Verified);
            return Box::pin(step.run(request));
        }
        #[cfg(feature = "verify")]
        if let Verification::By(verify) = &step.parts.verification {
            let verify = verify.clone();
            return Box::pin(verify.layer(step).call(request));
        }
        Box::pin(step.run(request))
    }
}

/// What follows the verification.
struct Step<S, L, B> {
    /// Ready.
    inner: Dedup<S, L, B>,
    parts: Arc<Parts<L, B>>,
}

impl<S: Clone, L, B> Clone for Step<S, L, B> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), parts: Arc::clone(&self.parts) }
    }
}

/// Called once, for the request that it was made for.
impl<S, L, B, R, ResBody> Service<Request<R>> for Step<S, L, B>
where
    S: Service<Request<B>, Response = Response<ResBody>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Send + 'static,
    L: Releases,
    B: From<Bytes> + Send + 'static,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Into<BoxError>,
    ResBody: Body<Data = Bytes> + Send + 'static,
{
    type Response = Response<ResponseBody<ResBody>>;
    type Error = S::Error;
    type Future = CallFuture<ResBody, S::Error>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<R>) -> Self::Future {
        let clone = self.clone();
        Box::pin(mem::replace(self, clone).run(request))
    }
}

impl<S, L, B, ResBody> Step<S, L, B>
where
    S: Service<Request<B>, Response = Response<ResBody>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Send + 'static,
    L: Releases,
    B: From<Bytes> + Send + 'static,
    ResBody: Body<Data = Bytes> + Send + 'static,
{
    /// Calls the layer as if there were no inbox.
    async fn pass<R>(
        mut self,
        request: Request<R>,
    ) -> Result<Response<ResponseBody<ResBody>>, S::Error>
    where
        R: Body<Data = Bytes> + Send + 'static,
        R::Error: Into<BoxError>,
    {
        self.inner.call(request).await
    }

    async fn run<R>(self, request: Request<R>) -> Result<Response<ResponseBody<ResBody>>, S::Error>
    where
        R: Body<Data = Bytes> + Send + 'static,
        R::Error: Into<BoxError>,
    {
        let (mut head, body) = request.into_parts();
        let ticket = head.extensions.remove::<Ticket>();
        head.extensions.insert(ReportEnd);
        let settings = self.parts.dedup.settings();
        let is_enforced = self.parts.handle.mode() == Mode::Enforce;
        if ticket.is_none() && !(is_enforced && settings.deduplicates(&head.method)) {
            return self.pass(Request::from_parts(head, body)).await;
        }
        let body = match collect(body, settings.body_limit(), settings.body_timeout()).await {
            Ok(body) => body,
            Err(fault) => return self.refuse(head, fault).await,
        };
        let keys = settings.keys(&RequestRef::new(&head, &body));
        let namespace = settings.namespace().to_owned();
        // A verification that only reports lets requests through without this.
        let is_verified = head.extensions.get::<Verified>().is_some();
        let may_run = is_verified || !settings.requires_verified();
        if let Some(ticket) = ticket {
            let found = keys.as_ref().map(identities).unwrap_or_default();
            let refused = if !ticket.is_of(self.parts.core.address(), &namespace, &found) {
                Report::Misrouted("its layer has another namespace, or reads other keys")
            } else if !settings.deduplicates(&head.method) {
                Report::Misrouted("its layer does not deduplicate the method")
            } else if !may_run {
                Report::Misrouted("its layer requires a verification, and nothing has verified it")
            } else if !is_enforced {
                Report::NotEnforced
            } else {
                return self.redeliver(ticket, Request::from_parts(head, Full::new(body))).await;
            };
            ticket.report(refused);
            let mut response = Response::new(ResponseBody::default());
            *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
            return Ok(response);
        }
        let (Some(keys), true) = (keys, may_run) else {
            return self.pass(Request::from_parts(head, Full::new(body))).await;
        };
        let core = &self.parts.core;
        let verified = if is_verified { self.parts.verification.name() } else { None };
        let verified = verified.map(str::to_owned);
        let mut row = NewRow::new(&core.service, &namespace, &keys, &head, &body, verified);
        row.turn = (!core.settings.later).then(Token::random);
        let (reply, answer) = oneshot::channel();
        let tasks = core.tasks.clone();
        let task = self.deliver(row, Request::from_parts(head, Full::new(body)), reply);
        tasks.spawn(task.in_current_span());
        match answer.await {
            Ok(called) => called.unwrap_or_else(|panic| resume_unwind(panic)),
            // The runtime ends. The row's turn lapses.
            Err(_) => {
                let mut response = Response::new(ResponseBody::default());
                *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
                Ok(response)
            }
        }
    }

    /// Stores a delivery, runs it, and says what became of it.
    async fn deliver(
        mut self,
        row: NewRow,
        request: Request<Full<Bytes>>,
        reply: oneshot::Sender<Called<ResBody, S::Error>>,
    ) {
        let core = Arc::clone(&self.parts.core);
        let (namespace, turn) = (row.namespace.clone(), row.turn);
        let call = AssertUnwindSafe(async { self.inner.call(request).await }).catch_unwind();
        let mut at = match (core.store(row).await, turn) {
            (None, _) => {
                let _ = reply.send(call.await);
                return;
            }
            (Some(Stored::New { seq, version }), Some(turn)) => Place { seq, version, turn },
            // The loop runs it, or another process does.
            (Some(_), _) => {
                core.wake.notify_one();
                let _ = reply.send(Ok(Ok(self.parts.stored())));
                return;
            }
        };
        let run = core.ender.begin(at);
        let (mut reply, mut history) = (Some(reply), History::NEW);
        let mut call = pin!(call);
        let called = match timeout(core.settings.answer_within, call.as_mut()).await {
            Ok(called) => called,
            Err(_elapsed) => {
                let told = Change { at, fate: Fate::Keep, answered: true, last: None };
                if let Some(Changed::Done) = core.ender.change(told, None).await {
                    // Its own step alone: another delivery may have raised the version, too,
                    // because it was told *stored*. The ledger has not been asked for it yet.
                    at.version += 1;
                    history.answered = true;
                    if let Some(reply) = reply.take() {
                        let _ = reply.send(Ok(Ok(self.parts.stored())));
                    }
                }
                call.await
            }
        };
        let end = End::of(&called);
        let Decision { fate, is_stored } = decide(&core.settings, end, history);
        let last = end.text();
        observe::ended(&namespace, at.seq, fate, &last, false);
        let answered = is_stored && reply.is_some();
        let change = Change { at, fate, answered, last: Some(last) };
        let Some(reply) = reply else { return core.ender.change_later(change, run) };
        let answer = if !is_stored {
            core.ender.change_later(change, run);
            called
        } else if matches!(core.ender.change(change, Some(run)).await, Some(Changed::Done)) {
            Ok(Ok(self.parts.stored()))
        } else {
            // Nobody can say that the row is there: the sender gets the failure.
            called
        };
        let _ = reply.send(answer);
    }

    /// Runs a row again, in a task that no layer outside can drop.
    async fn redeliver(
        mut self,
        ticket: Ticket,
        request: Request<Full<Bytes>>,
    ) -> Result<Response<ResponseBody<ResBody>>, S::Error> {
        let mut running = ticket.reached();
        let (reply, answer) = oneshot::channel();
        let task = async move {
            let call = AssertUnwindSafe(async { self.inner.call(request).await }).catch_unwind();
            let called: Called<ResBody, S::Error> = call.await;
            running.end = End::of(&called);
            drop(running);
            let _ = reply.send(called);
        };
        tokio::spawn(task.in_current_span());
        match answer.await {
            Ok(called) => called.unwrap_or_else(|panic| resume_unwind(panic)),
            Err(_) => pending().await,
        }
    }

    /// Lets the layer refuse a body that was not read to its end, by its own answer, record and
    /// metric.
    async fn refuse(
        self,
        head: request::Parts,
        fault: Fault,
    ) -> Result<Response<ResponseBody<ResBody>>, S::Error> {
        let dedup = self.parts.dedup.clone();
        let is_slow = matches!(fault, Fault::Slow);
        // It has waited already.
        let dedup = if is_slow { dedup.body_timeout(Duration::from_millis(1)) } else { dedup };
        dedup.layer(Never(PhantomData)).call(Request::from_parts(head, fault)).await
    }
}

/// Why a body was not read to its end; as a body, one that ends so.
enum Fault {
    Slow,
    /// Too large, or broken.
    Error(Option<BoxError>),
}

async fn collect<R>(body: R, limit: usize, time: Duration) -> Result<Bytes, Fault>
where
    R: Body<Data = Bytes>,
    R::Error: Into<BoxError>,
{
    match timeout(time, Limited::new(body, limit).collect()).await {
        Ok(Ok(read)) => Ok(read.to_bytes()),
        Ok(Err(error)) => Err(Fault::Error(Some(error))),
        Err(_elapsed) => Err(Fault::Slow),
    }
}

impl Body for Fault {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match &mut *self {
            Self::Slow => Poll::Pending,
            Self::Error(error) => Poll::Ready(error.take().map(Err)),
        }
    }
}

/// A service that is never called.
struct Never<B, E>(PhantomData<fn() -> (B, E)>);

impl<B, E> Clone for Never<B, E> {
    fn clone(&self) -> Self {
        Self(PhantomData)
    }
}

impl<T, B, E> Service<T> for Never<B, E> {
    type Response = Response<B>;
    type Error = E;
    type Future = Pending<Result<Response<B>, E>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), E>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: T) -> Self::Future {
        pending()
    }
}

impl<L, B> Parts<L, B> {
    fn stored<ResBody>(&self) -> Response<ResponseBody<ResBody>> {
        let mut response = Response::new(ResponseBody::default());
        if let Some(name) = self.dedup.settings().result_header() {
            response.headers_mut().insert(name.clone(), HeaderValue::from_static("stored"));
        }
        response
    }
}
