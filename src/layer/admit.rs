//! [`Admission`]: from the head of a request to a delivery that runs.

use std::future::{Future, poll_fn};
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Request, Response, request};
use http_body::Body;
use tokio::sync::oneshot;
use tower_service::Service;
use tracing::Instrument;

use super::answer::{DedupResult, Ending};
use super::body::BodyFault;
use super::config::Shared;
use super::delivery::{Run, finish_detached};
use super::gate::{NotAdmitted, Permit, give_up_readiness};
use super::paths::HANDLED;
use super::policy::{OnMissingKey, Verified};
use super::report::ReportFields;
use crate::adapter::Payloads;
use crate::delivery::Delivery;
use crate::error::{KeyError, KeyErrorKind};
use crate::key::{Extracted, KeyPart, Keys, RequestRef};
use crate::ledger::{Ledger, deadline_in};
use crate::observe::Outcome;

/// A request that has not claimed anything yet: its client may go away.
pub(super) struct Admission<S, L, B> {
    /// Ready, except while the request waits for a permit.
    inner: S,
    head: request::Parts,
    shared: Arc<Shared<L>>,
    report: ReportFields,
    inner_body: PhantomData<fn() -> B>,
}

/// What becomes of a request when its body has arrived.
pub(super) enum Dispatch<S, B, ResBody>
where
    S: Service<Request<B>>,
{
    /// The inner service handles it, as if there were no layer.
    Inner(S::Future),
    /// It waits for a permit in the caller's future.
    Permit(Pin<Box<dyn Future<Output = Self> + Send>>),
    /// The delivery waits for something, in a task of its own that sends its ending here.
    Task(oneshot::Receiver<Ending<ResBody, S::Error>>),
    /// It has ended.
    Ended(Ending<ResBody, S::Error>),
}

/// The keys of a request and, where payloads are compared, their digests.
type Found = (Keys, Option<Payloads>);

impl<S, L, B> Admission<S, L, B> {
    pub(super) fn new(inner: S, head: request::Parts, shared: Arc<Shared<L>>) -> Self {
        let report = ReportFields::started_now();
        Self { inner, head, shared, report, inner_body: PhantomData }
    }

    pub(super) fn shared(&self) -> &Arc<Shared<L>> {
        &self.shared
    }

    /// Refuses a request whose body was not read to its end.
    pub(super) fn refuse_body(mut self, fault: BodyFault) -> DedupResult {
        let (outcome, result) = match fault {
            BodyFault::TooLarge => (Outcome::TooLarge, DedupResult::TooLarge),
            BodyFault::Slow => (Outcome::SlowBody, DedupResult::SlowBody),
            BodyFault::Broken(error) => {
                self.report.error = Some(error);
                (Outcome::BrokenBody, DedupResult::BrokenBody)
            }
        };
        self.refuse(outcome, result, None)
    }

    fn refuse(
        &mut self,
        outcome: Outcome,
        result: DedupResult,
        keys: Option<&Keys>,
    ) -> DedupResult {
        let config = &self.shared.config;
        self.report.status = Some(result.status(config));
        self.report.emit(outcome, keys, config);
        result
    }

    /// Returns `true` if an outer layer runs this very delivery. This layer would find its event in
    /// flight, or complete.
    fn is_nested(&self, keys: &Keys) -> bool {
        let outer = self.head.extensions.get::<Delivery>();
        outer.is_some_and(|outer| keys.events().iter().any(|event| outer.runs(event.key())))
    }

    /// Returns `None` for a request that is not deduplicated.
    fn find_keys(&self, body: &Bytes) -> Result<Option<Found>, KeyError> {
        let config = &self.shared.config;
        let request = RequestRef::new(&self.head, body);
        let keys = match config.key.extract(&request)? {
            Extracted::Keys(keys) => keys,
            Extracted::Bypass => return Ok(None),
            Extracted::Missing => match config.on_missing_key {
                OnMissingKey::Reject => {
                    return Err(KeyError::new(KeyErrorKind::Missing, "the key"));
                }
                OnMissingKey::PassThrough => return Ok(None),
                OnMissingKey::BodyDigest => config.key.body_digest(&request)?,
            },
        };
        if keys.identity_count() > config.max_keys {
            return Err(KeyError::new(KeyErrorKind::TooMany, "the request"));
        }
        let payloads = match &config.compare_payload {
            Some(compared) => Some(self.payloads(&compared.part, &keys, body)?),
            None => None,
        };
        // The keys may live on in a background write, which must not hold the body.
        Ok(Some((keys.without_payloads(), payloads)))
    }

    /// Returns the SHA-256 of each event's payload. In a multi-event delivery a payload is the
    /// event's own bytes; an event whose bytes the extractor does not name is not compared.
    fn payloads(&self, part: &KeyPart, keys: &Keys, body: &Bytes) -> Result<Payloads, KeyError> {
        let events = keys.events();
        let mut payloads = Vec::with_capacity(events.len());
        for event in events {
            let Some(bytes) = event.payload().or((!keys.is_multi_event()).then_some(body)) else {
                continue;
            };
            if let Some(digest) = part.sha256(&RequestRef::new(&self.head, bytes))? {
                payloads.push((event.key().clone(), digest));
            }
        }
        // Of two events with one key, the first counts: the other is its duplicate.
        payloads.sort_by(|(one, _), (other, _)| one.cmp(other));
        payloads.dedup_by(|(later, _), (earlier, _)| later == earlier);
        Ok(payloads.into())
    }
}

impl<S, L, B, ResBody> Admission<S, L, B>
where
    S: Service<Request<B>, Response = Response<ResBody>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Send + 'static,
    L: Ledger,
    B: From<Bytes> + Send + 'static,
    ResBody: Body<Data = Bytes> + Send + 'static,
{
    /// Reads the keys of a buffered request and runs it.
    pub(super) fn dispatch(mut self, body: Bytes, cx: &mut Context<'_>) -> Dispatch<S, B, ResBody> {
        let config = &self.shared.config;
        if !config.deduplicates(&self.head.method) {
            return self.forward(body);
        }
        if config.require_verified && self.head.extensions.get::<Verified>().is_none() {
            return self.refuse(Outcome::Unverified, DedupResult::Unverified, None).into();
        }
        let found = match self.find_keys(&body) {
            Ok(Some(found)) => found,
            Ok(None) => {
                self.report.emit(Outcome::Bypass, None, config);
                return self.forward(body);
            }
            Err(error) => {
                self.report.error = Some(error.into());
                return self.refuse(Outcome::InvalidKey, DedupResult::InvalidKey, None).into();
            }
        };
        if self.is_nested(&found.0) {
            config.meters.nested();
            self.report.emit(Outcome::Bypass, Some(&found.0), config);
            return self.forward(body);
        }
        match self.shared.gate.try_run() {
            Some(permit) => self.start(body, found, permit, cx),
            None if config.waits_for_permit => {
                Dispatch::Permit(Box::pin(self.wait_for_permit(body, found)))
            }
            None => {
                self.refuse(Outcome::Overloaded, DedupResult::Unavailable, Some(&found.0)).into()
            }
        }
    }

    fn forward(mut self, body: Bytes) -> Dispatch<S, B, ResBody> {
        Dispatch::Inner(self.inner.call(Request::from_parts(self.head, B::from(body))))
    }

    /// Waits for a permit. Dropped meanwhile, it leaves nothing behind: nothing is claimed yet.
    async fn wait_for_permit(mut self, body: Bytes, found: Found) -> Dispatch<S, B, ResBody> {
        let gate = Arc::clone(&self.shared.gate);
        // A drain waits for this delivery too.
        let _counted = gate.tasks.token();
        give_up_readiness(&mut self.inner);
        let deadline = deadline_in(self.shared.config.times.store_timeout);
        let place = gate.try_wait();
        let admitted = match &place {
            Some(_) => gate.run_by(&mut self.inner, deadline).await,
            None => Err(NotAdmitted::Full),
        };
        let (outcome, ending) = match admitted {
            Ok(permit) => {
                // The delivery may wait again, for another delivery of its event.
                drop(place);
                let waker = poll_fn(|cx| Poll::Ready(cx.waker().clone())).await;
                return self.start(body, found, permit, &mut Context::from_waker(&waker));
            }
            Err(NotAdmitted::Full) => (Outcome::Overloaded, Ending::Own(DedupResult::Unavailable)),
            Err(NotAdmitted::Inner(error)) => (Outcome::Failed, Ending::Inner(Err(error))),
        };
        let config = &self.shared.config;
        self.report.status = ending.own_status(config);
        self.report.emit(outcome, Some(&found.0), config);
        Dispatch::Ended(ending)
    }

    /// Starts a delivery that has its permit: from here it runs to its end.
    fn start(
        self,
        body: Bytes,
        (keys, payloads): Found,
        permit: Permit,
        cx: &mut Context<'_>,
    ) -> Dispatch<S, B, ResBody> {
        let Self { inner, head, shared, report, inner_body } = self;
        let tasks = shared.gate.tasks.clone();
        let running = tasks.token();
        // Two boxes, each below 1 KiB, because common allocators are faster below that size.
        let run = Box::new(Run {
            inner,
            body,
            keys,
            payloads,
            report,
            inner_body,
            path: HANDLED.path(head.uri.path()),
            head: Some(head),
            shared: Arc::clone(&shared),
            permit: Some(permit),
        });
        let mut delivery = Box::pin(run.to_the_end());
        // Nobody can drop the delivery during this poll. A delivery that ends in it needs no task,
        // which would cost more than anything else here.
        if let Poll::Ready(ending) = delivery.as_mut().poll(cx) {
            drop((delivery, running));
            return Dispatch::Ended(ending);
        }
        let (sender, receiver) = oneshot::channel();
        let task = finish_detached(sender, delivery, shared);
        tasks.spawn(task.instrument(tracing::Span::current()));
        Dispatch::Task(receiver)
    }
}

impl<S, B, ResBody> From<DedupResult> for Dispatch<S, B, ResBody>
where
    S: Service<Request<B>>,
{
    fn from(result: DedupResult) -> Self {
        Self::Ended(Ending::Own(result))
    }
}
