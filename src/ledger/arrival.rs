//! [`OnArrival`]: the key becomes permanent before the handler runs.
//!
//! 1. At most once: a handler that fails, panics, or dies with its process is not run again. Choose
//!    this only for effects that are worse twice than never.
//! 2. A claim whose reply was lost is released by its token. The sender got 503, and its retry must
//!    find the key free; otherwise the event is lost without a run.
//! 3. The claim may still be on its way to the store. Once the release has returned, the claim has no effect
//!    any more, however late it arrives. A store that does not reply is asked again for 10 min.
//! 4. Until the release has ended, this process treats the key as in flight where the store replies
//!    "complete". Another process gets "complete" in that time; where that matters, use the lease
//!    ledger.
//! 5. A second identity is complete before its event's key is claimed. It is released if the key is not
//!    claimed. Until that is decided, this process treats the second identity as in flight.
//! 6. A second identity that is complete for the very key of an event says nothing about the event once the
//!    claim that completed it can no longer be released: 12 min later. Before, it makes the event a duplicate.
//!    Otherwise that claim could lose the key to this one, and release the second identity of an event that
//!    runs, and a twin would run.
//!
//! # Timeline of a claim whose reply is lost
//!
//! | step | in this process | a retry of the event |
//! |---|---|---|
//! | 1 | a slot for the release is reserved, and the claim is sent | runs the handler, if its claim is first |
//! | 2 | the store completes the key, and its reply is lost | a duplicate, and the event is lost |
//! | 3 | after `store_timeout`, `releasing` contains the key, and the sender gets 503 | in this process: in flight. In another process: a duplicate, and the event is lost |
//! | 4 | the release is repeated until the store has executed it | as in step 3 |
//! | 5 | `releasing` drops the key | runs the handler |

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::OwnedSemaphorePermit;

use super::call::{all, claim};
use super::claiming::{Claiming, ClaimingGuard};
use super::claims::{Claims, RELEASE_BOUND};
use super::contract::{
    Begin, BeginContext, CanShadow, Claim, FailOpen, HandlerSuccess, Ledger, Sealed,
};
use super::pending::Pending;
use super::resolve::{KeyState, States, fails_open, flatten, has_second_identity, identities};
use super::retry::{PendingWrites, RetryJob, RetryPool};
use crate::adapter::contract::{Abilities, CallTerms, DedupAdapter, Permanence};
use crate::delivery::{Delivery, Protection};
use crate::error::{Error, ErrorKind};
use crate::key::{DedupKey, Event, Keys, List};
use crate::observe;

/// After this time, no second identity that an earlier claim has completed is released: the claims of the
/// identities and a release take less than 2 min before and after the bound.
const MAY_BE_RELEASED: Duration = Duration::from_secs(720);

/// The number of claims that may wait for their reply, or for their release, at once.
const MOST_RELEASES: usize = 16_384;

/// Claims keys that are complete at once: no event runs twice, and an event whose handler fails is
/// lost.
///
/// [`DedupLayer::on_arrival`](crate::DedupLayer::on_arrival) selects it.
pub struct OnArrival {
    adapter: Arc<dyn DedupAdapter>,
    abilities: Abilities,
    /// Keys that deliveries with a 503 may have claimed.
    releasing: Arc<Pending>,
    claiming: Arc<Claiming>,
    pool: RetryPool,
}

impl OnArrival {
    pub(crate) fn new(adapter: Arc<dyn DedupAdapter>) -> Self {
        let (releasing, claiming) = (Arc::default(), Arc::default());
        let abilities = adapter.abilities();
        Self { adapter, abilities, releasing, claiming, pool: RetryPool::new(MOST_RELEASES) }
    }

    /// Claims the keys of an unprotected delivery as soon as the store replies.
    fn spawn_claim(
        &self,
        slot: Option<OwnedSemaphorePermit>,
        keys: &[DedupKey],
        terms: CallTerms,
        store_timeout: Duration,
    ) {
        let job = RetryJob {
            operation: "claim",
            adapter: Arc::clone(&self.adapter),
            keys: keys.into(),
            terms,
            store_timeout,
            bound: RELEASE_BOUND,
            repeats: |_| true,
        };
        self.pool.repeat(slot, job, (), |job| {
            Box::pin(async {
                let replies = claim(&*job.adapter, &job.keys, &job.terms, job.store_timeout).await;
                all(replies).map(drop)
            })
        });
    }

    /// Returns the claims of a delivery. Until a key is released, this process treats it as in flight.
    fn claims(
        &self,
        slot: Option<OwnedSemaphorePermit>,
        terms: CallTerms,
        store_timeout: Duration,
    ) -> Claims<'_> {
        Claims {
            adapter: &self.adapter,
            pool: &self.pool,
            held: List::new(),
            asked: List::new(),
            terms,
            store_timeout,
            slot,
            releasing: Some(&self.releasing),
            completing: None,
        }
    }

    /// Goes on after the first step, for events with second identities.
    async fn go_on(
        &self,
        mut claims: Claims<'_>,
        events: List<Event>,
        first: States,
        context: &BeginContext,
        removals: usize,
    ) -> Result<Begin<ArrivalClaim>, Error> {
        let mut later = claims.claim_later(&events, &first).await;
        self.doubt(&mut later, removals, None);
        let begun = self.conclude(&mut claims, events, first, later, context);
        if begun.as_ref().is_ok_and(Begin::runs_nothing) {
            claims.finish().await;
        }
        begun
    }

    /// Makes the claim of the events that run. What is to be released is left in `claims`.
    fn conclude(
        &self,
        claims: &mut Claims<'_>,
        events: List<Event>,
        mut first: States,
        mut later: States,
        context: &BeginContext,
    ) -> Result<Begin<ArrivalClaim>, Error> {
        if let Some(error) = fails_open(&mut first, &mut later, context) {
            let (terms, slot) = (claims.terms.clone(), claims.disarm());
            self.spawn_claim(slot, &identities(&events), terms, claims.store_timeout);
            return unprotected(events, &error);
        }
        let resolution = claims.resolve(events, first, later);
        if resolution.new.is_empty() {
            return resolution.without_new();
        }
        resolution.report_run();
        let (in_flight, mismatch) = (resolution.in_flight, resolution.mismatch);
        let delivery = resolution.delivery(Protection::Claimed, ()).into();
        Ok(Begin::First { claim: ArrivalClaim, delivery, in_flight, mismatch })
    }

    /// Treats a complete key as in flight if the claim that completed it may be released, because its handler
    /// never ran: any claim was released since `removals` was read, or the claim of a second identity goes on.
    fn doubt(&self, states: &mut States, removals: usize, claiming: Option<&ClaimingGuard>) {
        for (key, state) in states.iter_mut() {
            let KeyState::Duplicate(seen) = state else { continue };
            let is_released = self.releasing.contains(key) || self.releasing.removals() != removals;
            if is_released || claiming.is_some_and(|claiming| claiming.is_shared(key, seen.age)) {
                *state = KeyState::InFlight;
            }
        }
    }
}

/// Makes second identities say for no key that they are complete for it, while they may still be released:
/// rule 6.
fn disregard_recent(states: &mut States, claiming: &ClaimingGuard) {
    for (key, state) in states.iter_mut() {
        if let KeyState::Duplicate(seen) = state
            && claiming.contains(key)
            && seen.age < MAY_BE_RELEASED
        {
            seen.stored = None;
        }
    }
}

impl fmt::Debug for OnArrival {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OnArrival").finish_non_exhaustive()
    }
}

impl Sealed for OnArrival {}

impl Ledger for OnArrival {
    type Claim = ArrivalClaim;

    async fn begin(
        self: &Arc<Self>,
        keys: &Keys,
        context: &BeginContext,
    ) -> Result<Begin<Self::Claim>, Error> {
        if keys.is_empty() {
            return Ok(Begin::WithoutKey(None));
        }
        let (events, first) = flatten(keys);
        let terms = context.terms(Permanence::OnClaim, &events, self.abilities);
        // Reserved before the claim, because a refused release loses an event.
        let slot = self.pool.reserve();
        if slot.is_none() {
            let error = Error::new(ErrorKind::Unavailable, "reserving a slot for a release");
            return if context.fails_open(&error) {
                unprotected(events, &error)
            } else {
                Err(error)
            };
        };
        let removals = self.releasing.removals();
        // Held until `releasing` contains the keys to release.
        let claiming = has_second_identity(&events).then(|| self.claiming.add(&events));
        let mut claims = self.claims(slot, terms, context.store_timeout);
        let mut first = claims.claim(first).await;
        self.doubt(&mut first, removals, claiming.as_ref());
        match claiming {
            None => self.conclude(&mut claims, events, first, States::default(), context),
            Some(claiming) => {
                disregard_recent(&mut first, &claiming);
                // Boxed, because most events have one identity.
                let begun = Box::pin(self.go_on(claims, events, first, context, removals)).await;
                // `releasing` has what goes on to be released.
                drop(claiming);
                begun
            }
        }
    }

    fn stores_data(&self) -> bool {
        self.adapter.abilities().stored_data
    }

    fn pending_writes(&self) -> PendingWrites {
        PendingWrites::of(&[&self.pool])
    }
}

/// Lets the handler run, although the store has not replied.
fn unprotected(events: List<Event>, error: &Error) -> Result<Begin<ArrivalClaim>, Error> {
    let delivery = Delivery::new(events, 1, false, Protection::Unprotected);
    observe::unprotected(delivery.key(), error);
    Ok(Begin::First { claim: ArrivalClaim, delivery, in_flight: false, mismatch: false })
}

impl FailOpen for OnArrival {}

impl CanShadow for OnArrival {}

/// The claim of a delivery whose keys are permanent: there is nothing to commit or to roll back.
#[derive(Debug)]
pub struct ArrivalClaim;

impl Claim for ArrivalClaim {
    async fn commit(self, _: &HandlerSuccess) -> Result<(), Error> {
        Ok(())
    }

    async fn rollback(self) -> Result<(), Error> {
        Ok(())
    }
}
