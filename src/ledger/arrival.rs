//! [`OnArrival`]: the key becomes permanent before the handler runs.
//!
//! 1. At most once: a handler that fails, panics, or dies with its process is not run again. Choose
//!    this only for effects that are worse twice than never.
//! 2. A claim whose reply was lost is released by its token. The sender got 503, and its retry must
//!    find the key free; otherwise the event is lost without a run.
//! 3. The claim may still be on its way to the store. Once the release has returned, the claim has no effect
//!    any more, however late it arrives. A release that fails is repeated for 10 min.
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

use tokio::time::Instant;

use super::claims::{Claims, Doubt};
use super::contract::{
    Begin, BeginContext, Claim, FailOpen, HandlerSuccess, Ledger, Sealed, fails_open,
};
use super::pending::Pending;
use super::resolve::{Resolution, flatten};
use super::retry::{PendingWrites, RetryPool, Write};
use crate::adapter::contract::{Abilities, DedupAdapter, Permanence};
use crate::error::{Error, ErrorKind};
use crate::key::{DedupKey, Event, Keys};

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
    /// When each delivery has begun that claims second identities.
    claiming: Arc<Pending<Instant>>,
    pool: RetryPool,
}

impl OnArrival {
    pub(crate) fn new(adapter: Arc<dyn DedupAdapter>) -> Self {
        let (releasing, claiming) = (Arc::default(), Arc::default());
        let abilities = adapter.abilities();
        Self { adapter, abilities, releasing, claiming, pool: RetryPool::new(MOST_RELEASES) }
    }

    /// Claims the keys of an unprotected delivery as soon as the store replies.
    fn spawn_claim(&self, keys: &[DedupKey], claims: &mut Claims<'_>) {
        let job = claims.job(Write::Claim, keys.into());
        self.pool.repeat(claims.take_slot(), job, ());
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
            return Ok(Begin::WithoutKey);
        }
        let (events, first) = flatten(keys);
        let mut terms = context.terms(&events, self.abilities);
        terms.permanence = Permanence::OnClaim;
        // Reserved before the claim, because a refused release loses an event.
        let slot = self.pool.reserve();
        if slot.is_none() {
            let error = Error::new(ErrorKind::Unavailable, "reserving a slot for a release");
            if fails_open(&terms, &error) {
                return Ok(Resolution::unprotected(events, &error).begin(|_| (), |_| ArrivalClaim));
            }
            return Err(error);
        }
        let seconds: Arc<[_]> = events.iter().filter_map(Event::second_identity).cloned().collect();
        let claiming = (!seconds.is_empty()).then(|| self.claiming.add(seconds, Instant::now()));
        let (releasing, removals) = (&self.releasing, self.releasing.removals());
        let mut claims = Claims::new(&self.adapter, &self.pool, terms, &context.store_timeout);
        claims.doubt = Some(Box::new(Doubt { slot, releasing, guard: None, removals, claiming }));
        let start = |claims: &mut Claims<'_>, resolution: &mut Resolution| {
            if resolution.is_unprotected {
                self.spawn_claim(&resolution.held, claims);
            }
            resolution.begin(|_| (), |_| ArrivalClaim)
        };
        claims.begin(events, first, start).await
    }

    fn stores_data(&self) -> bool {
        self.abilities.stored_data
    }

    fn pending_writes(&self) -> PendingWrites {
        PendingWrites::of(&[&self.pool])
    }
}

impl FailOpen for OnArrival {}

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
