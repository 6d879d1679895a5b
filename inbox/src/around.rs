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
use std::future::Future;
use std::mem;
use std::panic::{AssertUnwindSafe, resume_unwind};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_util::{FutureExt, stream};
use http::{HeaderValue, Request, Response, StatusCode};
use http_body::{Body, Frame};
use http_body_util::{Full, StreamBody};
use tokio::sync::oneshot;
use tokio::time::timeout;
use tower_dedup::adapter::contract::Token;
use tower_dedup::key::RequestRef;
use tower_dedup::ledger::{Lease, Ledger, Transactional};
#[cfg(feature = "verify")]
use tower_dedup::verify::VerifyLayer;
use tower_dedup::{
    BoxError, Dedup, DedupLayer, Mode, OnUnavailable, ReportEnd, ResponseBody, Verified,
};
use tower_layer::Layer;
use tower_service::Service;
use tracing::Instrument;

use crate::core::Core;
use crate::decide::{End, History, decide};
use crate::observe;
use crate::row::{Change, Fate, NewRow, Place, identities};
use crate::settings::{FLOOR, InboxError, SPARE, rule};
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
        drop(self.dedup.clone().checked().map_err(invalid)?);
        Ok(self)
    }

    /// Checks all but the settings of the [`DedupLayer`].
    fn check(&self) -> Result<(), InboxError> {
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
            drop(verify.clone().checked().map_err(invalid)?);
        }
        Ok(())
    }
}

fn invalid(error: impl fmt::Display) -> InboxError {
    InboxError::Setting(error.to_string())
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
        Inboxed { inner: self.dedup.layer(inner), around: Arc::new(self.clone()) }
    }
}

/// The service of [`Around`].
pub struct Inboxed<S, L, B> {
    inner: Dedup<S, L, B>,
    around: Arc<Around<L, B>>,
}

impl<S: Clone, L, B> Clone for Inboxed<S, L, B> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), around: Arc::clone(&self.around) }
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
        let clone = self.clone();
        let ready = mem::replace(self, clone);
        let Around { dedup, verification, .. } = &*self.around;
        let ticket = request.extensions().get::<Ticket>();
        let is_outside = matches!(verification, Verification::Outside);
        // A redelivery never takes this way: it would run its handler without a report.
        if ticket.is_none() && !is_outside && request.extensions().get::<Verified>().is_some() {
            observe::verified_outside(dedup.settings().namespace());
            return Box::pin(ready.pass(request));
        }
        let was_verified = |ticket: &Ticket| Some(ticket.was_verified_by(verification.name()?));
        if ticket.and_then(was_verified) == Some(true) {
            request.extensions_mut().insert(Verified);
            return Box::pin(ready.run(request));
        }
        #[cfg(feature = "verify")]
        if let Verification::By(verify) = verification {
            return Box::pin(verify.layer(Step(ready)).call(request));
        }
        Box::pin(ready.run(request))
    }
}

/// What follows the verification: a ready service.
#[cfg(feature = "verify")]
#[derive(Clone)]
struct Step<I>(I);

/// Called once, for the request that it was made for.
#[cfg(feature = "verify")]
impl<S, L, B, R, ResBody> Service<Request<R>> for Step<Inboxed<S, L, B>>
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
        Box::pin(mem::replace(self, clone).0.run(request))
    }
}

impl<S, L, B, ResBody> Inboxed<S, L, B>
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
        let Around { core, dedup, verification } = &*self.around;
        let settings = dedup.settings();
        let is_enforced = dedup.handle().mode() == Mode::Enforce;
        if ticket.is_none() && !(is_enforced && settings.deduplicates(&head.method)) {
            return self.pass(Request::from_parts(head, body)).await;
        }
        let body = match settings.collect(body).await {
            Ok(body) => body,
            // The layer refuses it, by its own answer, record and metric.
            Err(error) => {
                let broken = StreamBody::new(stream::iter([Err::<Frame<Bytes>, _>(error)]));
                return self.pass(Request::from_parts(head, broken)).await;
            }
        };
        let keys = settings.keys(&RequestRef::new(&head, &body));
        let namespace = settings.namespace();
        // A verification that only reports lets requests through without this.
        let is_verified = head.extensions.get::<Verified>().is_some();
        let may_run = is_verified || !settings.requires_verified();
        let (reply, answer) = oneshot::channel();
        if let Some(ticket) = ticket {
            let found = keys.as_ref().map(identities).unwrap_or_default();
            let refused = if !ticket.is_of(core.address(), namespace, &found) {
                Report::Misrouted("its layer has another namespace, or reads other keys")
            } else if !settings.deduplicates(&head.method) {
                Report::Misrouted("its layer does not deduplicate the method")
            } else if !may_run {
                Report::Misrouted("its layer requires a verification, and nothing has verified it")
            } else if !is_enforced {
                Report::NotEnforced
            } else {
                let task =
                    self.redeliver(ticket, Request::from_parts(head, Full::new(body)), reply);
                tokio::spawn(task.in_current_span());
                return answer_of(answer).await;
            };
            ticket.report(refused);
            return Ok(unavailable());
        }
        let (Some(keys), true) = (keys, may_run) else {
            return self.pass(Request::from_parts(head, Full::new(body))).await;
        };
        let verified = if is_verified { verification.name().map(str::to_owned) } else { None };
        let mut row = NewRow::new(&core.service, namespace, &keys, &head, &body, verified);
        row.turn = (!core.settings.later).then(Token::random);
        let tasks = core.tasks.clone();
        let task = self.deliver(row, Request::from_parts(head, Full::new(body)), reply);
        tasks.spawn(task.in_current_span());
        answer_of(answer).await
    }

    /// Stores a delivery, runs it, and says what became of it.
    async fn deliver(
        mut self,
        row: NewRow,
        request: Request<Full<Bytes>>,
        reply: oneshot::Sender<Called<ResBody, S::Error>>,
    ) {
        let around = Arc::clone(&self.around);
        let core = &around.core;
        let stored = || Ok(Ok(around.stored()));
        let (namespace, turn) = (row.namespace.clone(), row.turn);
        let call = AssertUnwindSafe(async { self.inner.call(request).await }).catch_unwind();
        let mut at = match (core.store(row).await, turn) {
            (None, _) => {
                let _ = reply.send(call.await);
                return;
            }
            (Some(Stored::New(seq)), Some(turn)) => Place { seq, version: 1, turn },
            // The loop runs it, or another process does.
            (Some(_), _) => {
                core.wake.notify_one();
                let _ = reply.send(stored());
                return;
            }
        };
        let run = core.ender.begin(at);
        let (mut reply, mut history) = (Some(reply), History::default());
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
                        let _ = reply.send(stored());
                    }
                }
                call.await
            }
        };
        let end = End::of(&called);
        let (fate, last) = (decide(&core.settings, end, history), end.text());
        observe::ended(&namespace, at.seq, fate, &last, false);
        let answered = fate.is_stored() && reply.is_some();
        let change = Change { at, fate, answered, last: Some(last) };
        let Some(reply) = reply else { return core.ender.change_later(change, run) };
        let answer = if !answered {
            core.ender.change_later(change, run);
            called
        } else if let Some(Changed::Done) = core.ender.change(change, Some(run)).await {
            stored()
        } else {
            // Nobody can say that the row is there: the sender gets the failure.
            called
        };
        let _ = reply.send(answer);
    }

    /// Runs a row again.
    async fn redeliver(
        mut self,
        ticket: Ticket,
        request: Request<Full<Bytes>>,
        reply: oneshot::Sender<Called<ResBody, S::Error>>,
    ) {
        let mut running = ticket.reached();
        let call = AssertUnwindSafe(async { self.inner.call(request).await }).catch_unwind();
        let called = call.await;
        running.end = End::of(&called);
        drop(running);
        let _ = reply.send(called);
    }
}

/// Waits for the task of a delivery, which no layer outside can drop.
async fn answer_of<B, E>(
    answer: oneshot::Receiver<Called<B, E>>,
) -> Result<Response<ResponseBody<B>>, E> {
    match answer.await {
        Ok(called) => called.unwrap_or_else(|panic| resume_unwind(panic)),
        // The runtime ends. The turn of the row lapses.
        Err(_) => Ok(unavailable()),
    }
}

fn unavailable<B>() -> Response<ResponseBody<B>> {
    let mut response = Response::new(ResponseBody::default());
    *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    response
}

impl<L, B> Around<L, B> {
    fn stored<ResBody>(&self) -> Response<ResponseBody<ResBody>> {
        let mut response = Response::new(ResponseBody::default());
        if let Some(name) = self.dedup.settings().result_header() {
            response.headers_mut().insert(name.clone(), HeaderValue::from_static("stored"));
        }
        response
    }
}
