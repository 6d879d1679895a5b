//! [`Run`]: one delivery, from its claim to its ending.
//!
//! [`Run::to_the_end`] takes the way of [`run`](crate::run). To its steps it adds these:
//!
//! 1. While the delivery waits for another one, it gives up its permit and the inner service's readiness. It takes
//!    both again for each of its claims.
//! 2. `judge` decides whether the handler succeeded. `store_response` reads the response of a success, if
//!    duplicates get it.
//! 3. Deliveries that wait for the event are woken once the claim is settled.
//!
//! A request without a key takes the same way, with nothing to claim.
//!
//! # Shadow
//!
//! In [`Mode::Shadow`](super::Mode::Shadow), the handler runs once, under every verdict, and its response,
//! error or panic is the ending. The result of the settling changes the log record only. A delivery whose
//! verdict is not `First` runs without a claim.
//!
//! # What happens if a future is dropped?
//!
//! - *The caller's future*, because the client hangs up: nothing. The delivery runs in its own task,
//!   and no one drops it. A request by a method that is not deduplicated has no [`Run`]: the inner service's
//!   future is dropped with the caller's.
//! - *The delivery itself*, because the runtime shuts down: a caller that still waits answers 503. The
//!   claim is dropped, but the runtime starts no task that could release it. So a lease lapses, and the
//!   retry runs as a takeover. A transaction is rolled back. On arrival, an event whose handler has not
//!   ended is lost.

use std::future::Future;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use http::{Extensions, Method, Request, Response, header, request};
use http_body::Body;
use tower_service::Service;

use super::answer::{self, Ending};
use super::body::{ResponseBody, buffer_response};
use super::builder::DedupLayer;
use super::config::{Config, WithoutResponse};
use super::gate::{Admitted, NotAdmitted, Permit};
use super::paths::LAST_PATHS;
use super::policy::{OnInFlight, OnMismatch};
use crate::adapter::Payloads;
use crate::adapter::contract::{Seen, StoredResponse};
use crate::delivery::{Delivery, RetryAfterOfLayer, Verdict};
use crate::error::StoreError;
use crate::key::{DedupKey, Event, Keys, hex, sha256};
use crate::ledger::{AnyLedger, Begin, Claim, HandlerSuccess, RunsWithoutKey, Settled};
use crate::observe::{self, DedupAnswer, Meters, Outcome, Report, ShadowFields};
use crate::replay::{Replay, is_stream};
use crate::run::{Admission, Called, call};

/// How the layer treats the verdict on a delivery.
#[derive(Clone, Copy)]
pub(super) enum Judged {
    Enforced,
    /// The handler runs under every verdict. A verdict that is known before claims nothing.
    InShadow(Option<Verdict>),
}

impl Judged {
    /// Returns the events that log records may name.
    pub(super) fn logged(self, keys: &Keys) -> &[Event] {
        match self {
            Self::InShadow(Some(verdict)) if !verdict.is_of_a_key() => &[],
            _ => keys.events(),
        }
    }
}

/// A request, and the delivery that it becomes.
pub(super) struct Run<S, L, B> {
    /// Ready, except while the delivery waits for another delivery.
    pub(super) inner: S,
    /// Taken when the handler is called, with the body.
    pub(super) head: request::Parts,
    /// Empty until it was read.
    pub(super) body: Bytes,
    /// Empty until they were extracted, and of a request without a key.
    pub(super) keys: Keys,
    /// The digests of the payloads, if the layer compares payloads.
    pub(super) payloads: Option<Payloads>,
    pub(super) judged: Judged,
    pub(super) layer: Arc<DedupLayer<L, B>>,
    /// `None` while the delivery waits, and in shadow if none was free.
    pub(super) permit: Option<Permit>,
    pub(super) report: Report,
}

impl<S, L, B> Run<S, L, B> {
    /// In a box from the beginning, because it goes through many hands.
    pub(super) fn new(inner: S, head: request::Parts, layer: Arc<DedupLayer<L, B>>) -> Box<Self> {
        Box::new(Self {
            inner,
            head,
            body: Bytes::new(),
            keys: Keys::none(),
            payloads: None,
            judged: Judged::Enforced,
            layer,
            permit: None,
            report: Report::started_now(),
        })
    }
}

/// What the handler of a delivery runs on.
#[derive(Default)]
struct Runs {
    claim: Option<Claim>,
    /// The events that were claimed.
    delivery: Option<Delivery>,
    /// The ending of a success, if another event of the request must come again.
    instead: Option<Outcome>,
}

/// How a delivery ended, for its log record and for its caller.
type Ended<B, E> = (Outcome, Ending<B, E>);

/// Why the handler does not run. If every event is complete, with when the first of them was seen.
type NotRun = (Outcome, Option<Seen>);

/// A claim after its wait, or the ending of a delivery that may not go on.
type Waited<B, E> = Result<Result<Begin, StoreError>, Box<Ended<B, E>>>;

impl<S, L, B, ResBody> Run<S, L, B>
where
    S: Service<Request<B>, Response = Response<ResBody>> + Clone,
    B: From<Bytes>,
    ResBody: Body<Data = Bytes>,
{
    /// Runs the delivery to its end and reports it.
    #[expect(clippy::manual_async_fn, reason = "an `async fn` stores its arguments twice")]
    pub(super) fn to_the_end(
        mut self: Box<Self>,
    ) -> impl Future<Output = Ending<ResBody, S::Error>> {
        async move {
            let running = self.layer.config.meters.running();
            // A panic in an extension or in a response body counts as a panic of the handler. The dropped
            // claim is released. The ledger catches the panics of an adapter.
            let (outcome, ending) = match AssertUnwindSafe(self.deliver()).catch_unwind().await {
                Ok(ended) => ended,
                Err(panic) => (Outcome::Panicked, Err(panic)),
            };
            drop(running);
            self.report(outcome, &ending);
            ending
        }
    }

    async fn deliver(&mut self) -> Ended<ResBody, S::Error> {
        let begun = match self.judged {
            Judged::InShadow(Some(verdict)) => Err(verdict),
            _ => match self.claim().await {
                Ok(begun) => Ok(begun),
                Err(ended) => return *ended,
            },
        };
        let (verdict, runs) = match begun {
            Ok(begun) => self.judge_claim(begun),
            Err(verdict) => (verdict, Ok(Runs::default())),
        };
        self.note(verdict);
        let Runs { claim, delivery, instead } = match (runs, self.judged) {
            (Ok(runs), _) => runs,
            (Err(_), Judged::InShadow(_)) => Runs::default(),
            (Err((outcome, None)), Judged::Enforced) => return self.own(outcome),
            (Err((outcome, Some(seen))), Judged::Enforced) => {
                return (outcome, self.answer_known(&seen));
            }
        };
        if let Some(delivery) = &delivery {
            // Set before the handler runs: under the on-arrival ledger, a delivery of this event on another
            // path is a duplicate from now on.
            LAST_PATHS.insert(delivery.keys(), self.head.uri.path());
            self.report.attempt = Some((delivery.attempt(), delivery.is_takeover()));
        }
        // Each step writes the ending here. As an output it would be moved four times.
        let mut ended: Ended<_, _> = (Outcome::Panicked, Err(Box::new(())));
        let settled = self.handle(claim, delivery.as_ref(), &mut ended).await;
        if let Some(delivery) = &delivery {
            let identities = delivery.events().iter().flat_map(Event::identities);
            self.layer.gate.waiters.wake(identities);
        }
        self.conclude(&mut ended, settled, instead);
        ended
    }

    /// Claims the keys, and waits if the policy says so. Returns an ending if the delivery may not wait, or
    /// not go on.
    async fn claim(&mut self) -> Waited<ResBody, S::Error> {
        let DedupLayer { ledger, config, .. } = &*self.layer;
        let in_shadow = matches!(self.judged, Judged::InShadow(_));
        let calls = config.calls(ledger, self.payloads.as_ref(), in_shadow);
        let begun = ledger.begin(&self.keys, calls).await;
        match (&begun, self.judged, self.layer.config.on_in_flight) {
            // Boxed, because most deliveries do not wait and their future stays small.
            (Ok(Begin::InFlight), Judged::Enforced, OnInFlight::Wait(bound)) => {
                Box::pin(self.wait(bound)).await
            }
            _ => Ok(begun),
        }
    }

    /// Waits until the event's other delivery has ended, and claims again.
    async fn wait(&mut self, bound: Duration) -> Waited<ResBody, S::Error> {
        let Self { inner, permit, layer, keys, payloads, .. } = self;
        let DedupLayer { ledger, config, gate, .. } = &**layer;
        let mut admission = Admitted { inner, permit, gate, request: PhantomData };
        admission.release();
        let Some(waiter) = gate.waiters.wait_for(keys) else {
            return Ok(Ok(Begin::InFlight));
        };
        let Some(_place) = gate.waiting.try_acquire() else {
            let answer = answer::own(DedupAnswer::InFlight, config);
            return Err(Box::new((Outcome::Overloaded, answer)));
        };
        let _waiting = config.meters.waiting();
        let calls = config.calls(ledger, payloads.as_ref(), false);
        let begun = waiter.claim(ledger, &calls, bound, &mut admission).await;
        begun.map_err(|reason| match reason {
            NotAdmitted::Full => Box::new(own(Outcome::Overloaded, config)),
            NotAdmitted::Inner(error) => Box::new((Outcome::Failed, Ok(Err(error)))),
        })
    }

    /// Returns the verdict, with what the handler runs on.
    fn judge_claim(&mut self, begun: Result<Begin, StoreError>) -> (Verdict, Result<Runs, NotRun>) {
        let refuses = self.layer.config.on_mismatch == OnMismatch::Refuse;
        let (verdict, refusal) = match begun {
            Ok(Begin::First { claim, delivery, in_flight, mismatch }) => {
                // The retry finds the events of this run complete, and runs the others.
                let in_flight = in_flight.then_some(Outcome::InFlight);
                let instead = in_flight.or((mismatch && refuses).then_some(Outcome::Mismatch));
                let verdict = delivery.verdict();
                return (verdict, Ok(Runs { claim, delivery: Some(delivery), instead }));
            }
            Ok(Begin::WithoutKey) => return (Verdict::NoKey, Ok(Runs::default())),
            Ok(Begin::Duplicate(seen)) => {
                (Verdict::Duplicate { age: seen.age }, (Outcome::Duplicate, Some(seen)))
            }
            Ok(Begin::Mismatch(seen)) => {
                let verdict = Verdict::Mismatch { age: seen.age };
                (verdict, (Outcome::Mismatch, (!refuses).then_some(seen)))
            }
            Ok(Begin::InFlight) => (Verdict::InFlight, (Outcome::InFlight, None)),
            Err(error) => {
                self.report.error = Some(error.into());
                (Verdict::Unavailable, (Outcome::Unavailable, None))
            }
        };
        (verdict, Err(refusal))
    }

    fn own(&self, outcome: Outcome) -> Ended<ResBody, S::Error> {
        own(outcome, &self.layer.config)
    }

    /// Answers a delivery of which every event is complete.
    fn answer_known(&self, seen: &Seen) -> Ending<ResBody, S::Error> {
        let config = &self.layer.config;
        let stored = seen.stored.as_ref().and_then(|stored| stored.response.as_deref());
        match (stored, config.without_response) {
            (Some(response), _) => answer::replayed(response, config),
            (None, WithoutResponse::Empty(_)) => answer::own(DedupAnswer::Duplicate, config),
            (None, WithoutResponse::Refuse) => answer::own(DedupAnswer::ResponseNotStored, config),
        }
    }

    /// Puts the verdict into the log record. Reports a delivery that is acknowledged on another path than
    /// the one on which its event was handled.
    fn note(&mut self, verdict: Verdict) {
        let config = &self.layer.config;
        self.report.age = verdict.age();
        let keys = &self.keys;
        if verdict.age().is_some()
            && LAST_PATHS.is_elsewhere(keys.first(), self.head.uri.path())
            && config.meters.counts_other_path()
        {
            observe::records::other_path(&config.meters, keys.first());
        }
        if let Judged::InShadow(_) = self.judged {
            self.judged = Judged::InShadow(Some(verdict));
            self.report.shadow = Some(ShadowFields {
                verdict: verdict.as_str(),
                is_fault: matches!(
                    verdict,
                    Verdict::NoKey
                        | Verdict::Unavailable
                        | Verdict::Overloaded
                        | Verdict::Unverified
                ),
                payload: self.payload_digest(),
            });
        }
    }

    /// Returns the first 16 hex digits of the SHA-256 of the part of the payload that is compared, or else
    /// of the body.
    fn payload_digest(&self) -> String {
        let compared = || {
            let first = self.keys.events().first()?.key();
            self.payloads.as_ref()?.iter().find(|(key, _)| key == first).map(|(_, digest)| *digest)
        };
        hex(&compared().unwrap_or_else(|| sha256(&self.body))[..8])
    }

    /// Calls the inner service, judges its response, writes the ending to `ended`, and settles the claim.
    fn handle<'r>(
        &'r mut self,
        claim: Option<Claim>,
        delivery: Option<&Delivery>,
        ended: &'r mut Ended<ResBody, S::Error>,
    ) -> impl Future<Output = Settled> + use<'r, S, L, B, ResBody> {
        let Self { inner, head, body, keys, judged, .. } = self;
        let (config, report, judged) = (&self.layer.config, &mut self.report, *judged);
        let is_head = head.method == Method::HEAD;
        extend(&mut head.extensions, keys, judged, delivery, &self.layer.ledger, &config.meters);
        let (bound, replay) = match judged {
            Judged::Enforced => (config.times.handler_timeout, config.replay.as_deref()),
            Judged::InShadow(_) => (None, None),
        };
        async move {
            let called = call(bound, || {
                let head = std::mem::replace(head, Request::new(()).into_parts().0);
                inner.call(Request::from_parts(head, B::from(std::mem::take(body))))
            });
            *ended = judge(called.await, config, judged, report);
            let success = match (ended.0, replay, keys.events()) {
                // The response to a HEAD has no body, where the response to a GET has one.
                (Outcome::Completed, Some(replay), [only]) if !is_head => {
                    Box::pin(store(ended, replay, config, only.key())).await
                }
                (Outcome::Completed, ..) => Some(HandlerSuccess::default()),
                _ => None,
            };
            match claim {
                Some(claim) => claim.settle(success).await,
                None => Settled::Done,
            }
        }
    }

    /// Decides how a delivery ends whose handler has run.
    fn conclude(
        &mut self,
        ended: &mut Ended<ResBody, S::Error>,
        settled: Settled,
        instead: Option<Outcome>,
    ) {
        let is_enforced = matches!(self.judged, Judged::Enforced);
        let is_success = ended.0 == Outcome::Completed && is_enforced;
        match settled {
            Settled::CompletedElsewhere(seen)
                if matches!(ended.0, Outcome::Completed | Outcome::Failed) =>
            {
                self.report.age = Some(seen.age);
                *ended = match instead {
                    Some(outcome) => self.own(outcome),
                    None => (Outcome::Duplicate, self.answer_known(&seen)),
                };
            }
            Settled::Uncommitted => {
                self.report.error = Some(NO_COMMIT.into());
                if is_success {
                    *ended = self.own(Outcome::Uncommitted);
                }
            }
            Settled::Unconfirmed(error) => {
                self.report.error = Some(error.into());
                if is_success {
                    // A retry may succeed.
                    *ended = (Outcome::Uncommitted, self.own(Outcome::Unavailable).1);
                }
            }
            Settled::Done | Settled::CompletedElsewhere(_) => {}
        }
        match (ended.0, instead) {
            _ if !is_enforced => {}
            (Outcome::Completed, Some(outcome)) => *ended = self.own(outcome),
            // A 2xx that is no success, after which the other event would not come again.
            (Outcome::Failed, Some(outcome @ Outcome::InFlight))
                if self.report.status.is_some_and(|status| status.is_success()) =>
            {
                ended.1 = self.own(outcome).1;
            }
            (Outcome::Completed | Outcome::Failed, _) if self.keys.is_empty() => {
                ended.0 = Outcome::Bypass;
            }
            _ => {}
        }
        if let Ok(Ok(response)) = &mut ended.1
            && response.extensions_mut().remove::<RetryAfterOfLayer>().is_some()
        {
            let seconds = answer::seconds(self.layer.config.retry_after_unavailable);
            response.headers_mut().insert(header::RETRY_AFTER, seconds.into());
        }
    }
}

/// The record has a `fix`.
const NO_COMMIT: &str = "no transaction of the handler has completed the event";

/// Adds the delivery to a request.
fn extend(
    extensions: &mut Extensions,
    keys: &Keys,
    judged: Judged,
    delivery: Option<&Delivery>,
    ledger: &AnyLedger,
    meters: &Arc<Meters>,
) {
    let delivery = match (judged, delivery) {
        (Judged::Enforced, None) => {
            extensions.insert(RunsWithoutKey);
            return;
        }
        (Judged::Enforced, Some(delivery)) => delivery.clone(),
        (Judged::InShadow(Some(verdict)), claim) if !keys.is_empty() => {
            if let Some(claim) = claim {
                // The layer completes the events as under a lease.
                claim.nothing_to_write();
            }
            if extensions.get::<Delivery>().is_some_and(|outer| !outer.is_unenforced()) {
                // The outer layer decides what runs, and its events are completed in the handler's transaction.
                return;
            }
            ledger.unenforced(keys.events(), verdict, claim, meters)
        }
        (Judged::InShadow(_), _) => return,
    };
    delivery.set_request(keys);
    extensions.insert(delivery);
}

/// Decides whether the handler succeeded.
fn judge<ResBody, E>(
    called: Called<Response<ResBody>, E>,
    config: &Config,
    judged: Judged,
    report: &mut Report,
) -> Ended<ResBody, E> {
    let response = match called {
        Called::Returned(Ok(response)) => response,
        Called::Returned(Err(error)) => return (Outcome::Failed, Ok(Err(error))),
        Called::Panicked(panic) => return (Outcome::Panicked, Err(panic)),
        Called::TimedOut => return own(Outcome::HandlerTimeout, config),
    };
    let (head, body) = response.into_parts();
    report.status = Some(head.status);
    let is_success = catch_unwind(AssertUnwindSafe(|| config.success.is(&head)));
    let response = Ok(Ok(Response::from_parts(head, ResponseBody::inner(body))));
    match (is_success, judged) {
        (Ok(true), _) => (Outcome::Completed, response),
        (Ok(false), _) => (Outcome::Failed, response),
        (Err(panic), Judged::Enforced) => (Outcome::Panicked, Err(panic)),
        (Err(_panic), Judged::InShadow(_)) => {
            report.error = Some("`success_when` panicked".into());
            (Outcome::Failed, response)
        }
    }
}

/// Returns the ending of a delivery that the layer answers.
fn own<B, E>(outcome: Outcome, config: &Config) -> Ended<B, E> {
    (outcome, answer::own(outcome.answer(), config))
}

/// Reads the response of a success, so that duplicates get it. A body that ends in an error or panics is no
/// success.
async fn store<ResBody: Body<Data = Bytes>, E>(
    ended: &mut Ended<ResBody, E>,
    replay: &Replay,
    config: &Config,
    key: &DedupKey,
) -> Option<HandlerSuccess> {
    let Ok(Ok(response)) = &mut ended.1 else { return Some(HandlerSuccess::default()) };
    if is_stream(response.headers()) {
        observe::records::response_not_stored(&config.meters, key, "its body is a stream");
        return Some(HandlerSuccess::default());
    }
    let Some(body) = std::mem::take(response.body_mut()).into_inner() else {
        return Some(HandlerSuccess::default());
    };
    let read = buffer_response(body, replay.body_limit, config.body_timeout);
    let (bytes, body) = match AssertUnwindSafe(read).catch_unwind().await {
        Ok(Ok(buffered)) => buffered,
        Ok(Err(_)) => {
            *ended = own(Outcome::BrokenResponse, config);
            return None;
        }
        Err(panic) => {
            *ended = (Outcome::Panicked, Err(panic));
            return None;
        }
    };
    *response.body_mut() = body;
    let stored = bytes.and_then(|bytes| {
        Ok(StoredResponse::new(response.status(), replay.select(response.headers())?, bytes))
    });
    let stored =
        stored.inspect_err(|why| observe::records::response_not_stored(&config.meters, key, why));
    Some(HandlerSuccess { response: stored.ok().map(Arc::new) })
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use http_body_util::Full;
    use tower::util::BoxCloneSyncService;

    use super::*;
    use crate::ledger::Lease;

    type Handler = BoxCloneSyncService<Request<Full<Bytes>>, Response<Full<Bytes>>, Infallible>;

    fn size_of_future<A, F: Future>(_: impl FnOnce(A) -> F) -> usize {
        size_of::<F>()
    }

    /// Common allocators are faster up to 1,024 bytes.
    #[test]
    fn both_boxes_of_a_delivery_are_small() {
        let delivery = Run::<Handler, Lease, Full<Bytes>>::to_the_end;
        let sizes = [size_of::<Run<Handler, Lease, Full<Bytes>>>(), size_of_future(delivery)];
        assert!(sizes.iter().all(|size| *size <= 1_024), "{sizes:?}");
    }
}
