//! Shadow: the layer judges a delivery, and its handler runs under every verdict.
//!
//! 1. The verdict comes from a fault of the request, from the lack of a free permit, or else from
//!    the claim.
//! 2. The handler runs once, without a bound. Its response, error or panic is the ending. No
//!    response is stored.
//! 3. A delivery whose verdict is not `First` runs without a claim.
//! 4. The claim is settled as under a lease, and the result changes the log record only.
//!
//! [`delivery`](super::delivery) says what happens if a future is dropped.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};

use bytes::Bytes;
use futures_util::FutureExt;
use http::{Request, Response};
use http_body::Body;
use tower_service::Service;

use super::answer::{Ended, Ending};
use super::delivery::judge;
use super::end::DeliveryEnd;
use super::request::{NOT_VERIFIED, Run, caught, set_end};
use crate::adapter::contract::Fetch;
use crate::delivery::{Delivery, Verdict};
use crate::error::KeyError;
use crate::key::{Event, hex, sha256};
use crate::ledger::{Begin, Claim, HandlerSuccess, Settled};
use crate::observe::{Outcome, ShadowFields};

/// Why a layer that enforces its verdict would refuse a request before it takes a permit.
pub(super) enum RequestFault {
    Unverified,
    Key(KeyError),
}

impl<S, L, B> Run<S, L, B> {
    /// Reads the keys of a request. Under a fault, its key is the digest of its body.
    pub(super) fn read_in_shadow(&mut self) -> Option<RequestFault> {
        let (keys, fault) = self.extract_leniently();
        let digested = fault.map_or_else(|| caught(|| self.digested(keys.clone())), Err);
        let (keys, fault) = match digested {
            Ok(keys) => (keys, None),
            Err(fault) => (keys.without_payloads(), Some(fault)),
        };
        self.keys = keys;
        if self.is_verified() {
            fault.map(RequestFault::Key)
        } else {
            Some(RequestFault::Unverified)
        }
    }

    /// Takes a permit for a request without a fault. Returns the verdict on a delivery that claims
    /// nothing.
    pub(super) fn admit_in_shadow(&mut self, fault: Option<RequestFault>) -> Option<Verdict> {
        let (verdict, error) = match fault {
            Some(RequestFault::Unverified) => (Verdict::Unverified, NOT_VERIFIED.into()),
            Some(RequestFault::Key(error)) => (Verdict::NoKey, error.into()),
            None => {
                self.permit = self.layer.gate.running.try_acquire();
                if self.permit.is_some() {
                    return None;
                }
                (Verdict::Overloaded, self.layer.gate.load().into())
            }
        };
        self.logs_keys = verdict.is_of_a_key();
        self.report.error = Some(error);
        Some(verdict)
    }

    /// Puts the verdict into the log record.
    fn report_verdict(&mut self, verdict: Verdict) {
        if let Some(age) = verdict.age() {
            self.report_known(age);
        }
        let is_fault = matches!(
            verdict,
            Verdict::NoKey | Verdict::Unavailable | Verdict::Overloaded | Verdict::Unverified
        );
        let payload = self.payload_digest();
        self.report.shadow = Some(ShadowFields { verdict: verdict.as_str(), is_fault, payload });
    }

    /// Returns the first 16 hex digits of the SHA-256 of the part of the payload that is compared,
    /// or else of the body.
    fn payload_digest(&self) -> String {
        let compared = self.keys.events().first().and_then(Event::payload_sha256);
        hex(&compared.unwrap_or_else(|| sha256(&self.body))[..8])
    }

    /// Adds a [`Delivery`] of all events to the request. `claimed` has the events of the claim.
    fn extend_in_shadow(&mut self, verdict: Verdict, claimed: Option<&Delivery>) {
        if self.keys.is_empty() {
            return;
        }
        let extensions = &mut self.head.extensions;
        if extensions.get::<Delivery>().is_some_and(|outer| !outer.is_unenforced()) {
            // The outer layer decides what runs, and its events are completed in the handler's
            // transaction.
            return;
        }
        let (ledger, config) = (&self.layer.ledger, &self.layer.config);
        let calls = config.calls(ledger, Fetch::Nothing);
        let delivery = ledger.unenforced(self.keys.events(), verdict, claimed, calls);
        delivery.set_request(&self.keys);
        extensions.insert(delivery);
    }
}

impl<S, L, B, ResBody> Run<S, L, B>
where
    S: Service<Request<B>, Response = Response<ResBody>> + Clone,
    B: From<Bytes>,
    ResBody: Body<Data = Bytes>,
{
    /// Runs the delivery to its end and reports it. A delivery that was `refused` claims nothing.
    #[expect(clippy::manual_async_fn, reason = "an `async fn` stores its arguments twice")]
    pub(super) fn to_the_end_in_shadow(
        mut self: Box<Self>,
        refused: Option<Verdict>,
    ) -> impl Future<Output = Ending<ResBody, S::Error>> {
        async move {
            let running = self.layer.config.meters.running();
            let delivered = AssertUnwindSafe(self.deliver_in_shadow(refused)).catch_unwind().await;
            self.finish(delivered, running)
        }
    }

    async fn deliver_in_shadow(&mut self, refused: Option<Verdict>) -> Ended<ResBody, S::Error> {
        let (verdict, claim, claimed) = match refused {
            Some(verdict) => (verdict, None, None),
            None => self.claim_in_shadow().await,
        };
        self.report_verdict(verdict);
        if let Some(claimed) = &claimed {
            self.report_run(claimed);
        }
        self.extend_in_shadow(verdict, claimed.as_ref());
        let called = self.call(None).await;
        let config = &self.layer.config;
        let mut has_panicked = false;
        let mut ended = judge(called, config, &mut self.report, |head| {
            let is_success = catch_unwind(AssertUnwindSafe(|| config.success.is(head)));
            has_panicked = is_success.is_err();
            is_success.unwrap_or(false)
        });
        if has_panicked {
            self.report.error = Some("`success_when` panicked".into());
        }
        if let Some(claim) = claim {
            let success = (ended.outcome == Outcome::Completed).then(HandlerSuccess::default);
            // No transaction of the handler touches the claim, so the settling has no other result
            // to report.
            if let Settled::NotReleased(error) = claim.settle(success).await {
                self.report.error = Some(error.into());
            }
        }
        if let Some(claimed) = &claimed {
            self.wake_waiters(claimed);
        }
        self.set_retry_after(&mut ended.ending);
        set_end(&mut ended.ending, self.reports_end.then_some(DeliveryEnd::Undecided));
        ended
    }

    /// Claims the keys, and does not wait. Returns the verdict, and the claim with its events.
    async fn claim_in_shadow(&mut self) -> (Verdict, Option<Claim>, Option<Delivery>) {
        let config = &self.layer.config;
        // An unreadable response must not hide the verdict.
        let is_compared = config.compare_payload.is_some();
        let fetch = if is_compared { Fetch::Digest } else { Fetch::Nothing };
        let calls = config.calls(&self.layer.ledger, fetch);
        let verdict = match self.layer.ledger.begin(&self.keys, calls).await {
            Ok(Begin::First { claim, delivery, .. }) => {
                // The layer completes the events as under a lease.
                delivery.nothing_to_write();
                return (delivery.verdict(), claim, Some(delivery));
            }
            Ok(Begin::WithoutKey) => Verdict::NoKey,
            Ok(Begin::InFlight) => Verdict::InFlight,
            Ok(Begin::Duplicate(seen)) => Verdict::Duplicate { age: seen.age },
            Ok(Begin::Mismatch(seen)) => Verdict::Mismatch { age: seen.age },
            Err(error) => {
                self.report.error = Some(error.into());
                Verdict::Unavailable
            }
        };
        (verdict, None, None)
    }
}
