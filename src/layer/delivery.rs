//! One delivery, from its claim to its ending.
//!
//! [`Run::to_the_end`] follows the steps of [`run`](crate::run), and adds these:
//!
//! 1. While the delivery waits for another one, it gives up its permit and the inner service's
//!    readiness. It takes both again for each of its claims.
//! 2. `judge` decides whether the handler succeeded. `read_success` reads the response of a
//!    success, if duplicates get it.
//! 3. Deliveries that wait for the event are woken once the claim is settled.
//!
//! A request without a key follows the same steps, with nothing to claim. [`shadow`](super::shadow)
//! has its own steps.
//!
//! # What happens if a future is dropped?
//!
//! - *The caller's future*, because the client hangs up: nothing. The delivery runs in its own
//!   task, and no one drops it. A request by a method that is not deduplicated has no [`Run`]: the
//!   inner service's future is dropped with the caller's.
//! - *The delivery itself*, because the runtime shuts down: a caller that still waits answers 503.
//!   The claim is dropped, but the runtime starts no task that could release it. So a lease lapses,
//!   and the retry runs as a takeover. A transaction is rolled back. On arrival, an event whose
//!   handler has not ended is lost.

use std::future::Future;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use http::{Method, Request, Response, response};
use http_body::Body;
use tower_service::Service;

use super::answer::{self, Ended, Ending};
use super::body::ResponseBody;
use super::builder::DedupLayer;
use super::config::Config;
use super::end::DeliveryEnd;
use super::gate::{Admitted, NotAdmitted};
use super::policy::OnMismatch;
use super::request::{Run, set_end};
use super::stored::read_success;
use crate::adapter::contract::Seen;
use crate::delivery::Delivery;
use crate::error::StoreError;
use crate::ledger::{Begin, Claim, HandlerSuccess, RunsWithoutKey, Settled};
use crate::observe::{DedupAnswer, Outcome, Report};
use crate::run::{Admission, Called, NotBegun, call};

/// What becomes of a delivery after its claim.
enum Plan<B, E> {
    /// The handler runs.
    Run {
        claim: Option<Claim>,
        /// The events that were claimed.
        delivery: Option<Delivery>,
        /// The outcome in place of a success, if another event of the request must come again.
        instead: Option<Outcome>,
    },
    /// The handler does not run.
    End(Ended<B, E>),
}

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
            let delivered = AssertUnwindSafe(self.deliver()).catch_unwind().await;
            self.finish(delivered, running)
        }
    }

    async fn deliver(&mut self) -> Ended<ResBody, S::Error> {
        let (claim, delivery, instead) = match self.claim().await {
            Plan::Run { claim, delivery, instead } => (claim, delivery, instead),
            Plan::End(ended) => return ended,
        };
        self.handle(claim, delivery, instead).await
    }

    /// Claims the keys, and waits if the policy says so.
    async fn claim(&mut self) -> Plan<ResBody, S::Error> {
        let DedupLayer { ledger, config, .. } = &*self.layer;
        let calls = config.calls(ledger, config.fetch());
        let begun = ledger.begin(&self.keys, calls).await;
        if matches!(begun, Ok(Begin::InFlight)) && !self.layer.config.wait.is_zero() {
            // Boxed, because most deliveries do not wait and their future stays small.
            return Box::pin(self.wait()).await;
        }
        self.plan(begun)
    }

    /// Waits until the event's other delivery has ended, and claims again.
    async fn wait(&mut self) -> Plan<ResBody, S::Error> {
        let layer = Arc::clone(&self.layer);
        let DedupLayer { ledger, config, gate, .. } = &*layer;
        let Self { inner, permit, .. } = self;
        let mut admission = Admitted { inner, permit, gate, request: PhantomData };
        admission.release();
        let Some(waiter) = gate.waiters.wait_for(&self.keys) else {
            return self.plan(Ok(Begin::InFlight));
        };
        let Some(_place) = gate.waiting.try_acquire() else {
            let ending = answer::own(DedupAnswer::InFlight, config);
            return Plan::End(Ended { outcome: Outcome::Overloaded, ending });
        };
        let _waiting = config.meters.waiting();
        let calls = config.calls(ledger, config.fetch());
        match waiter.claim(ledger, &calls, config.wait, &mut admission).await {
            Ok(begun) => self.plan(Ok(begun)),
            Err(NotBegun::Failed(error)) => self.plan(Err(error)),
            Err(NotBegun::Refused(NotAdmitted::Full)) => Plan::End(self.ended(Outcome::Overloaded)),
            Err(NotBegun::Refused(NotAdmitted::Inner(error))) => {
                Plan::End(Ended { outcome: Outcome::Failed, ending: Ok(Err(error)) })
            }
        }
    }

    /// Decides what becomes of a delivery whose claim has its reply.
    fn plan(&mut self, begun: Result<Begin, StoreError>) -> Plan<ResBody, S::Error> {
        let refuses = self.layer.config.on_mismatch == OnMismatch::Refuse;
        let ended = match begun {
            Ok(Begin::First { claim, delivery, in_flight, mismatch }) => {
                // The retry finds the events of this run complete, and runs the others.
                let in_flight = in_flight.then_some(Outcome::InFlight);
                let instead = in_flight.or((mismatch && refuses).then_some(Outcome::Mismatch));
                return Plan::Run { claim, delivery: Some(delivery), instead };
            }
            Ok(Begin::WithoutKey) => {
                return Plan::Run { claim: None, delivery: None, instead: None };
            }
            Ok(Begin::InFlight) => self.ended(Outcome::InFlight),
            Ok(Begin::Duplicate(seen)) => {
                self.report_known(seen.age);
                self.known(Outcome::Duplicate, &seen)
            }
            Ok(Begin::Mismatch(seen)) => {
                self.report_known(seen.age);
                if refuses {
                    self.ended(Outcome::Mismatch)
                } else {
                    self.known(Outcome::Mismatch, &seen)
                }
            }
            Err(error) => {
                self.report.error = Some(error.into());
                self.ended(Outcome::Unavailable)
            }
        };
        Plan::End(ended)
    }

    /// Calls the inner service, judges its response, and settles the claim. Apart from the claim,
    /// so that the futures of both share their memory.
    #[expect(clippy::manual_async_fn, reason = "an `async fn` stores its arguments twice")]
    fn handle(
        &mut self,
        claim: Option<Claim>,
        delivery: Option<Delivery>,
        instead: Option<Outcome>,
    ) -> impl Future<Output = Ended<ResBody, S::Error>> {
        async move {
            if let Some(delivery) = &delivery {
                self.report_run(delivery);
                delivery.set_request(&self.keys);
                self.head.extensions.insert(delivery.clone());
            } else {
                self.head.extensions.insert(RunsWithoutKey);
            }
            let is_elsewhere = instead == Some(Outcome::InFlight);
            let is_head = self.head.method == Method::HEAD;
            let called = self.call(self.layer.config.times.handler_timeout).await;
            let config = &self.layer.config;
            let mut ended = judge(called, config, &mut self.report, |head| config.success.is(head));
            if self.keys.is_empty() && matches!(ended.outcome, Outcome::Completed | Outcome::Failed)
            {
                ended.outcome = Outcome::Bypass;
            }
            let Ended { outcome, ending } = &mut ended;
            let success = match (outcome, ending, &config.replay, self.keys.events()) {
                // The response to a HEAD has no body, where the response to a GET has one.
                (Outcome::Completed, Ok(Ok(response)), Some(replay), [only]) if !is_head => {
                    match Box::pin(read_success(response, replay, config, only.key())).await {
                        Ok(success) => Some(success),
                        Err(broken) => {
                            ended = broken;
                            None
                        }
                    }
                }
                (Outcome::Completed, ..) => Some(HandlerSuccess::default()),
                _ => None,
            };
            // Under the on-arrival ledger, the key is permanent already.
            let is_permanent = claim.is_none();
            let settled = match claim {
                Some(claim) => claim.settle(success).await,
                None => Settled::Done,
            };
            if let Some(delivery) = &delivery {
                self.wake_waiters(delivery);
            }
            let mut is_own = ended.outcome == Outcome::HandlerTimeout;
            if let Some(other) = self.other_ending(ended.outcome, settled, instead) {
                ended = other;
                is_own = true;
            }
            self.set_retry_after(&mut ended.ending);
            let end = match (&delivery, ended.outcome) {
                (None, _) => None,
                (Some(it), _) if it.is_unprotected() => Some(DeliveryEnd::Undecided),
                (Some(_), Outcome::Completed) => Some(DeliveryEnd::Complete),
                (Some(_), Outcome::Failed | Outcome::HandlerTimeout) => Some(if is_elsewhere {
                    DeliveryEnd::InFlight
                } else if is_permanent {
                    // The key is complete since its claim.
                    DeliveryEnd::Complete
                } else {
                    DeliveryEnd::Released
                }),
                // An answer of the layer's own has its end.
                _ => return ended,
            };
            // An answer of the layer's own has its end, whether the request asks or not.
            set_end(&mut ended.ending, end.filter(|_| is_own || self.reports_end));
            ended
        }
    }

    /// Calls the inner service with the request.
    pub(super) fn call(
        &mut self,
        bound: Option<Duration>,
    ) -> impl Future<Output = Called<Response<ResBody>, S::Error>> {
        let Self { inner, head, body, .. } = self;
        call(bound, || {
            let head = std::mem::replace(head, Request::new(()).into_parts().0);
            inner.call(Request::from_parts(head, B::from(std::mem::take(body))))
        })
    }

    /// Returns the ending that replaces the handler's, if one does.
    fn other_ending(
        &mut self,
        outcome: Outcome,
        settled: Settled,
        instead: Option<Outcome>,
    ) -> Option<Ended<ResBody, S::Error>> {
        match settled {
            Settled::CompletedElsewhere(seen)
                if matches!(outcome, Outcome::Completed | Outcome::Failed) =>
            {
                self.report.age = Some(seen.age);
                let known = || self.known(Outcome::Duplicate, &seen);
                return Some(instead.map_or_else(known, |outcome| self.ended(outcome)));
            }
            // It follows a success only.
            Settled::Uncommitted => {
                self.report.error = Some(NO_COMMIT.into());
                return Some(self.ended(Outcome::Uncommitted));
            }
            // It follows a success only, too, and a retry may succeed.
            Settled::Unconfirmed(error) => {
                self.report.error = Some(error.into());
                let ended = self.ended(Outcome::Unavailable);
                return Some(Ended { outcome: Outcome::Uncommitted, ..ended });
            }
            Settled::NotReleased(error) => self.report.error = Some(error.into()),
            Settled::Done | Settled::CompletedElsewhere(_) => {}
        }
        match (outcome, instead) {
            (Outcome::Completed, Some(instead)) => Some(self.ended(instead)),
            // A 2xx that is no success, after which the other event would not come again.
            (Outcome::Failed, Some(instead @ Outcome::InFlight))
                if self.report.status.is_some_and(|status| status.is_success()) =>
            {
                Some(Ended { outcome, ..self.ended(instead) })
            }
            _ => None,
        }
    }

    fn ended(&self, outcome: Outcome) -> Ended<ResBody, S::Error> {
        answer::ended(outcome, &self.layer.config)
    }

    fn known(&self, outcome: Outcome, seen: &Seen) -> Ended<ResBody, S::Error> {
        Ended { outcome, ending: answer::known(seen, &self.layer.config) }
    }
}

/// The record has a `fix`.
const NO_COMMIT: &str = "no transaction of the handler has completed the event";

/// Decides how a delivery ends whose handler has been called.
pub(super) fn judge<ResBody, E>(
    called: Called<Response<ResBody>, E>,
    config: &Config,
    report: &mut Report,
    is_success: impl FnOnce(&response::Parts) -> bool,
) -> Ended<ResBody, E> {
    let ended = |outcome, ending| Ended { outcome, ending };
    let response = match called {
        Called::Returned(Ok(response)) => response,
        Called::Returned(Err(error)) => return ended(Outcome::Failed, Ok(Err(error))),
        Called::Panicked(panic) => return ended(Outcome::Panicked, Err(panic)),
        Called::TimedOut => return answer::ended(Outcome::HandlerTimeout, config),
    };
    let (head, body) = response.into_parts();
    report.status = Some(head.status);
    let is_success = catch_unwind(AssertUnwindSafe(|| is_success(&head)));
    let response = Response::from_parts(head, ResponseBody::inner(body));
    match is_success {
        Ok(true) => ended(Outcome::Completed, Ok(Ok(response))),
        Ok(false) => ended(Outcome::Failed, Ok(Ok(response))),
        Err(panic) => ended(Outcome::Panicked, Err(panic)),
    }
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
    fn boxes_of_a_delivery_are_small() {
        type Own = Run<Handler, Lease, Full<Bytes>>;
        let in_shadow = |run| Own::to_the_end_in_shadow(run, None);
        let futures = [size_of_future(Own::to_the_end), size_of_future(in_shadow)];
        let sizes = [size_of::<Own>(), futures[0], futures[1]];
        assert!(sizes.iter().all(|size| *size <= 1_024), "{sizes:?}");
    }
}
