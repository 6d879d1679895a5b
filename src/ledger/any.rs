//! [`AnyLedger`]: begins the deliveries of one ledger.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::task::TaskTracker;

use super::call::Calls;
use super::claims::Claims;
use super::contract::{Ledger, Permanent};
use super::held::Held;
use super::lease::Claim;
use super::renewal::RenewalGuard;
use super::resolve::{Resolution, distinct};
use super::retry::Write;
use super::shared::Shared;
use super::times::Times;
use crate::adapter::Terms;
use crate::adapter::contract::{DedupAdapter, Permanence, Seen, Token};
use crate::delivery::{Delivery, Inner, Verdict};
use crate::error::{ConfigError, StoreError, StoreErrorKind, check};
use crate::key::{Event, Keys, List};
use crate::observe::{self, Meters};

/// How a delivery begins.
#[derive(Debug)]
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
    /// Every event is complete. The first one was seen then. It has stored data only if the response is fetched.
    Duplicate(Seen),
    /// Every event is complete, and one was handled with another payload.
    Mismatch(Seen),
}

/// A ledger of each kind. Cloning makes another handle to the same ledger.
#[derive(Clone)]
pub(crate) struct AnyLedger(Arc<Shared>);

impl AnyLedger {
    /// Makes the ledger of this kind over a store.
    pub(crate) fn of<L: Ledger>(adapter: impl DedupAdapter) -> Self {
        Self(Arc::new(Shared::new(L::PERMANENT, Arc::new(adapter))))
    }

    #[cfg(feature = "testing")]
    pub(crate) fn adapter(&self) -> &dyn DedupAdapter {
        &*self.0.adapter
    }

    /// Makes the calls of one delivery under these times. `after` is the bound on what follows the handler before the
    /// commit.
    pub(crate) fn calls(&self, times: &Times, after: Duration, meters: &Arc<Meters>) -> Calls {
        let Times { retention, lease, store_timeout: bound, handler_timeout } = *times;
        let permanence = match self.0.permanent {
            Permanent::OnArrival => Permanence::OnClaim,
            Permanent::Lease | Permanent::Transactional => Permanence::OnCompletion { lease },
        };
        let most = |handler: Duration| handler.saturating_add(after).saturating_add(bound);
        Calls {
            adapter: Arc::clone(&self.0.adapter),
            abilities: self.0.abilities,
            terms: Terms::new(Token::random(), retention, permanence),
            meters: Arc::clone(meters),
            replay: None,
            fails_open: false,
            bound,
            handler_bound: handler_timeout.map_or(Duration::ZERO, most),
        }
    }

    /// Begins a delivery of these keys. Without a key, it returns [`Begin::WithoutKey`], and asks no store.
    ///
    /// If the future is dropped, the keys that it may have claimed are released in the background.
    ///
    /// # Errors
    ///
    /// The store did not reply, and the calls do not fail open. The keys that the call may have
    /// claimed are released in the background.
    pub(crate) fn begin(
        &self,
        keys: &Keys,
        calls: Calls,
    ) -> impl Future<Output = Result<Begin, StoreError>> + Send {
        let (shared, events, claimed_at) = (&*self.0, distinct(keys), Instant::now());
        // Outside of the future, which would store what they are made of beside them.
        let calls = calls.fetching_for(&events);
        let mut claims = Claims::new(shared, calls, events, List::new());
        async move {
            if keys.is_empty() {
                return Ok(Begin::WithoutKey);
            }
            if shared.permanent == Permanent::OnArrival
                && keys.events().iter().any(|event| event.second_identity().is_some())
            {
                let context = "claiming on arrival an event with a second identity";
                return Err(StoreError::new(StoreErrorKind::Config, context));
            }
            let begun = match claims.resolve().await? {
                resolution if resolution.new.is_empty() => resolution.into(),
                resolution => self.start(&mut claims, resolution, claimed_at),
            };
            drop(claims);
            let is = |of: fn(&RenewalGuard) -> bool| match &begun {
                Begin::First { claim: Some(claim), .. } => claim.renewal.as_ref().is_some_and(of),
                _ => false,
            };
            // Another delivery may have run the events. Dropped, the claim is released.
            if is(|renewal| renewal.has_lapsed) {
                let context = "claiming keys, whose lease was over before the reply";
                return Err(StoreError::new(StoreErrorKind::Timeout, context));
            }
            if !is(|renewal| renewal.must_yield) {
                return Ok(begun);
            }
            // Boxed, because few claims wake the sweeper.
            let yielded = Box::pin(async move {
                tokio::task::yield_now().await;
                begun
            });
            Ok(yielded.await)
        }
    }

    /// Starts the delivery of the events that run, with what its ledger holds for it.
    fn start(&self, claims: &mut Claims<'_>, resolution: Resolution, claimed_at: Instant) -> Begin {
        let Resolution { new, held, attempt, takeover, in_flight, mismatch, .. } = resolution;
        let is_unprotected = resolution.is_unprotected;
        let run = (attempt, takeover);
        let (delivery, claim) = if self.0.permanent == Permanent::OnArrival {
            if is_unprotected {
                // The key is claimed as soon as the store replies.
                claims.repeat(Write::Claim, held);
            }
            (Delivery(Arc::new(Inner::new(new, run, is_unprotected, None, ()))), None)
        } else {
            let held = Held::new(held, claims.calls.clone());
            if self.demands_commit() {
                held.demands_commit.note();
            }
            let lease = Arc::new(Inner::new(new, run, is_unprotected, None, held));
            let delivery = Delivery(Arc::<Inner<Held>>::clone(&lease));
            (delivery, Some(Claim::start(&self.0, lease, claimed_at)))
        };
        // A subscriber may panic: the claim exists before.
        if takeover {
            observe::records::takeover(&claims.calls.meters, delivery.key(), attempt);
        }
        Begin::First { claim, delivery, in_flight, mismatch }
    }

    /// Makes the delivery of all events of a request that the handler runs under every verdict. `claim` is the delivery
    /// of the claim, if there is one.
    pub(crate) fn unenforced(
        &self,
        events: &[Event],
        verdict: Verdict,
        claim: Option<&Delivery>,
        meters: &Arc<Meters>,
    ) -> Delivery {
        let events = events.into();
        if self.0.permanent == Permanent::OnArrival {
            return Delivery::unenforced(events, verdict, claim, ());
        }
        // It holds nothing: its transaction is the handler's alone.
        let held = Held::new(List::new(), self.calls(&Times::default(), Duration::ZERO, meters));
        Delivery::unenforced(events, verdict, claim, held)
    }

    /// # Errors
    ///
    /// An adapter that lacks an ability which the ledger needs, or keys or times that it does not take.
    pub(crate) fn check(
        &self,
        times: &Times,
        has_second_identity: bool,
    ) -> Result<(), ConfigError> {
        let Shared { permanent, abilities, .. } = &*self.0;
        let needs = |is_met: bool, rule| {
            if is_met { Ok(()) } else { Err(ConfigError::new(rule)) }
        };
        if *permanent == Permanent::OnArrival {
            let rule = "one identity of an event on arrival, and not a second one";
            return needs(!has_second_identity, rule);
        }
        needs(abilities.leases, "the adapter does not support leases")?;
        // A row that expires before its lease is over tells no takeover, and counts no attempts.
        let Times { retention, lease, .. } = times;
        check(retention >= lease, "retention", "at least the lease", retention)?;
        let completes = *permanent == Permanent::Lease || abilities.completion;
        needs(completes, "the adapter completes no events in a handler's transaction")
    }

    /// Returns `true` if a success must have completed its events in a transaction.
    pub(crate) fn demands_commit(&self) -> bool {
        self.0.permanent == Permanent::Transactional
    }

    /// Returns `true` if the adapter stores payload digests and responses.
    pub(crate) fn stores_data(&self) -> bool {
        self.0.abilities.stored_data
    }

    /// Returns the writes that continue in the background.
    #[must_use]
    pub(crate) fn pending_writes(&self) -> &TaskTracker {
        &self.0.background.tasks
    }
}

impl fmt::Debug for AnyLedger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("AnyLedger").field(&self.0.permanent).finish()
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
