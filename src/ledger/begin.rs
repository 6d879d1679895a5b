//! [`Begin`]: how the deliveries of a ledger begin.

use std::future::Future;
use std::sync::Arc;

use tokio::time::Instant;

use super::background::Write;
use super::call::Calls;
use super::claim::Claim;
use super::contract::LedgerKind;
use super::held::Held;
use super::hold::{AnyLedger, Hold};
use super::resolve::{Resolution, claim_all, distinct};
use crate::adapter::contract::Seen;
use crate::delivery::{Delivery, Inner, Verdict};
use crate::error::{StoreError, StoreErrorKind};
use crate::key::{Event, Keys, List};
use crate::observe;

/// How a delivery begins.
pub(crate) enum Begin {
    /// The handler runs.
    First {
        /// The claim of the events that run. On arrival there is none: the keys are permanent.
        claim: Option<Claim>,
        /// The events that run, for the handler.
        delivery: Delivery,
        /// Another delivery runs another event of the request: the final answer must not be a 2xx.
        in_flight: bool,
        /// Another event of the request was handled with another payload.
        mismatch: bool,
    },
    /// The request has no key, and the handler runs.
    WithoutKey,
    /// Other deliveries run every event that is not complete.
    InFlight,
    /// Every event is complete. The first one was seen then. It has the data that was fetched.
    Duplicate(Seen),
    /// Every event is complete, and one was handled with another payload.
    Mismatch(Seen),
}

impl AnyLedger {
    /// Begins a delivery of these keys. Without a key, it returns [`Begin::WithoutKey`], and asks
    /// no store.
    ///
    /// If the future is dropped, the keys that it may have claimed are released in the background.
    ///
    /// # Errors
    ///
    /// The store did not reply, and the calls do not fail open. The keys that the call may have
    /// claimed are released in the background.
    pub(crate) fn begin(
        self: &Arc<Self>,
        keys: &Keys,
        calls: Calls,
    ) -> impl Future<Output = Result<Begin, StoreError>> + Send {
        let claimed_at = Instant::now();
        // Outside of the future, which would store the calls beside it.
        let mut hold = Hold::new(self, calls, List::new());
        async move {
            if keys.is_empty() {
                return Ok(Begin::WithoutKey);
            }
            if self.kind == LedgerKind::OnArrival
                && keys.events().iter().any(|event| event.second_identity().is_some())
            {
                let context = "claiming on arrival an event with a second identity";
                return Err(StoreError::new(StoreErrorKind::Config, context));
            }
            let begun = match claim_all(&mut hold, distinct(keys)).await? {
                resolution if resolution.new.is_empty() => resolution.into(),
                resolution => self.start(&mut hold, resolution, claimed_at),
            };
            drop(hold);
            let Begin::First { claim: Some(Claim { renewal: Some(renewal), .. }), .. } = &begun
            else {
                return Ok(begun);
            };
            // Another delivery may have run the events. Dropped, the claim is released.
            if renewal.has_lapsed {
                let context = "claiming keys, whose lease was over before the reply";
                return Err(StoreError::new(StoreErrorKind::Timeout, context));
            }
            if renewal.must_yield {
                tokio::task::yield_now().await;
            }
            Ok(begun)
        }
    }

    /// Starts the delivery of the events that run, with what its ledger holds for it.
    fn start(
        self: &Arc<Self>,
        hold: &mut Hold<'_>,
        resolution: Resolution,
        claimed_at: Instant,
    ) -> Begin {
        let Resolution { new, held, attempt, takeover, in_flight, mismatch, .. } = resolution;
        let is_unprotected = resolution.is_unprotected;
        let (delivery, claim) = if self.kind == LedgerKind::OnArrival {
            if is_unprotected {
                // The key is claimed as soon as the store replies.
                hold.repeat(Write::Claim, held);
            }
            (Delivery(Arc::new(Inner::new(new, attempt, takeover, is_unprotected, None, ()))), None)
        } else {
            let held = Held::new(held, hold.calls.clone());
            held.note(|it| it.demands_commit = self.demands_commit());
            let lease = Arc::new(Inner::new(new, attempt, takeover, is_unprotected, None, held));
            let delivery = Delivery(Arc::<Inner<Held>>::clone(&lease));
            (delivery, Some(Claim::start(self, lease, claimed_at)))
        };
        // A subscriber may panic: the claim exists before.
        if takeover {
            observe::records::takeover(&hold.calls.meters, delivery.key(), attempt);
        }
        Begin::First { claim, delivery, in_flight, mismatch }
    }

    /// Makes the delivery of all events of a request that the handler runs under every verdict.
    /// `claim` is the delivery of the claim, if there is one.
    pub(crate) fn unenforced(
        &self,
        events: &[Event],
        verdict: Verdict,
        claimed: Option<&Delivery>,
        calls: Calls,
    ) -> Delivery {
        let events = events.into();
        if self.kind == LedgerKind::OnArrival {
            return Delivery::unenforced(events, verdict, claimed, ());
        }
        // It holds nothing: its transaction is the handler's alone.
        Delivery::unenforced(events, verdict, claimed, Held::new(List::new(), calls))
    }
}

impl From<Resolution> for Begin {
    /// Returns the verdict on a delivery without a new event.
    fn from(mut resolution: Resolution) -> Self {
        match resolution.all_complete() {
            Some(seen) if resolution.mismatch => Self::Mismatch(seen),
            Some(seen) => Self::Duplicate(seen),
            None => Self::InFlight,
        }
    }
}
