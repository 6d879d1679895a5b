//! From a buffered request to a running delivery, all at once: nothing here waits.

use std::future::Future;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use bytes::Bytes;
use http::{Request, Response, request};
use http_body::Body;
use tokio::sync::oneshot;
use tower_service::Service;
use tracing::Instrument;

use super::answer::{Answer, DedupResult, status};
use super::body::BodyFault;
use super::config::Shared;
use super::delivery::{Job, answer_to, run_to_the_end};
use super::policy::{LogIds, OnMissingKey, Verified};
use crate::adapter::Payloads;
use crate::delivery::Delivery;
use crate::error::{KeyError, KeyErrorKind};
use crate::key::{DedupKey, Extracted, KeyPart, Keys, RequestRef};
use crate::ledger::Ledger;
use crate::observe::{Outcome, Report};

/// A delivery whose body is still on its way.
pub(super) struct Start<S, L> {
    inner: S,
    head: request::Parts,
    shared: Arc<Shared<L>>,
    started: Instant,
}

/// What becomes of a delivery once its body is there.
pub(super) enum Next<S, B, ResBody>
where
    S: Service<Request<B>>,
{
    /// It reaches the inner service as if there were no layer.
    Inner(S::Future),
    /// It has run to its end.
    Ended(Answer<ResBody, S::Error>),
    /// It has to wait for something: it runs in a task of its own, which will answer here.
    Task(oneshot::Receiver<Answer<ResBody, S::Error>>),
    /// It is refused.
    Own(DedupResult),
}

impl<S, L> Start<S, L> {
    pub(super) fn new(inner: S, head: request::Parts, shared: Arc<Shared<L>>) -> Self {
        Self { inner, head, shared, started: Instant::now() }
    }

    pub(super) fn shared(&self) -> &Arc<Shared<L>> {
        &self.shared
    }

    /// The body was not read to its end: nothing was claimed, and nothing is recorded.
    pub(super) fn broken(&self, fault: &BodyFault) -> DedupResult {
        let (result, outcome, cause) = match fault {
            BodyFault::TooLarge => (DedupResult::TooLarge, Outcome::TooLarge, None),
            BodyFault::Slow => (DedupResult::SlowBody, Outcome::SlowBody, None),
            BodyFault::Broken(error) => {
                (DedupResult::BrokenBody, Outcome::BrokenBody, Some(&**error as _))
            }
        };
        self.refuse(result, outcome, None, 0, cause)
    }

    /// Reads the keys of a buffered request and sets it on its way.
    pub(super) fn go<B, ResBody>(mut self, body: Bytes, cx: &mut Context<'_>) -> Next<S, B, ResBody>
    where
        S: Service<Request<B>, Response = Response<ResBody>> + Clone + Send + 'static,
        S::Future: Send,
        S::Error: Send + 'static,
        L: Ledger,
        B: From<Bytes> + Send + 'static,
        ResBody: Body<Data = Bytes> + Send + 'static,
    {
        let config = &self.shared.config;
        if !config.deduplicates(&self.head.method) {
            return Next::Inner(self.pass(body));
        }
        if config.require_verified && self.head.extensions.get::<Verified>().is_none() {
            return Next::Own(self.refuse(
                DedupResult::Unverified,
                Outcome::Unverified,
                None,
                0,
                None,
            ));
        }
        let (keys, payloads) = match self.keys(&body) {
            Ok(Some(found)) => found,
            Ok(None) => {
                self.report(Outcome::Bypass, None, None, 0, None);
                return Next::Inner(self.pass(body));
            }
            Err(error) => {
                let (result, outcome) = (DedupResult::InvalidKey, Outcome::InvalidKey);
                return Next::Own(self.refuse(result, outcome, None, 0, Some(&error)));
            }
        };
        if self.is_nested(&keys) {
            self.shared.config.meters.nested();
            self.report(Outcome::Bypass, None, Some(keys.first()), keys.events().len(), None);
            return Next::Inner(self.pass(body));
        }
        let Some(permit) = self.shared.gate.permit_to_run() else {
            let (result, outcome) = (DedupResult::Unavailable, Outcome::Overloaded);
            let count = keys.events().len();
            return Next::Own(self.refuse(result, outcome, Some(keys.first()), count, None));
        };
        let Self { inner, head, shared, started } = self;
        let running = shared.gate.tasks.token();
        let job =
            Job::new(inner, head, body, (keys, payloads), Arc::clone(&shared), started, permit);
        // In a box of its own: allocators are quick with what is below a kilobyte.
        let job = Box::new(job);
        let mut delivery = Box::pin(run_to_the_end::<S, L, B, ResBody>(job));
        // Nobody can drop the delivery within this very poll. One that needs no other goes without
        // a task, which would cost it more than anything else here.
        if let Poll::Ready(answer) = delivery.as_mut().poll(cx) {
            drop((delivery, running));
            return Next::Ended(answer);
        }
        let (sender, receiver) = oneshot::channel();
        let tasks = shared.gate.tasks.clone();
        let task = answer_to(sender, delivery, shared);
        tasks.spawn(task.instrument(tracing::Span::current()));
        Next::Task(receiver)
    }

    /// Returns `true` if an outer layer runs this very delivery.
    fn is_nested(&self, keys: &Keys) -> bool {
        let outer = self.head.extensions.get::<Delivery>();
        outer.is_some_and(|outer| keys.events().iter().any(|event| outer.runs(event.key())))
    }

    fn pass<B>(&mut self, body: Bytes) -> S::Future
    where
        S: Service<Request<B>>,
        B: From<Bytes>,
    {
        let (empty, ()) = Request::new(()).into_parts();
        let head = std::mem::replace(&mut self.head, empty);
        self.inner.call(Request::from_parts(head, B::from(body)))
    }

    /// `None` if the request is to reach the inner service undeduplicated.
    fn keys(&self, body: &Bytes) -> Result<Option<(Keys, Option<Payloads>)>, KeyError> {
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
        // What is held for a pending completion must not hold the body as well.
        Ok(Some((keys.without_payloads(), payloads)))
    }

    /// The SHA-256 of each event's payload. That of a batch's event is its own bytes; where an
    /// extractor does not say which those are, they are not compared.
    fn payloads(&self, part: &KeyPart, keys: &Keys, body: &Bytes) -> Result<Payloads, KeyError> {
        let events = keys.events();
        let mut payloads = Vec::with_capacity(events.len());
        for event in events {
            let Some(bytes) = event.payload().or((!keys.is_batch()).then_some(body)) else {
                continue;
            };
            if let Some(digest) = part.sha256(&RequestRef::new(&self.head, bytes))? {
                payloads.push((event.key().clone(), digest));
            }
        }
        // Of two of one key, the first: the other one is its duplicate within the delivery.
        payloads.sort_by(|(one, _), (other, _)| one.cmp(other));
        payloads.dedup_by(|(later, _), (earlier, _)| later == earlier);
        Ok(payloads.into())
    }

    fn refuse(
        &self,
        result: DedupResult,
        outcome: Outcome,
        key: Option<&DedupKey>,
        keys: usize,
        error: Option<&(dyn std::error::Error + 'static)>,
    ) -> DedupResult {
        self.report(outcome, Some(result), key, keys, error);
        result
    }

    fn report(
        &self,
        outcome: Outcome,
        result: Option<DedupResult>,
        key: Option<&DedupKey>,
        keys: usize,
        error: Option<&(dyn std::error::Error + 'static)>,
    ) {
        let config = &self.shared.config;
        Report {
            outcome,
            meters: &config.meters,
            key,
            keys,
            plain_ids: config.log_ids == LogIds::Plain,
            attempt: None,
            age: None,
            status: result.map(|result| status(result, config)),
            duration: self.started.elapsed(),
            error,
        }
        .emit();
    }
}
