//! [`OnArrival`]: the key becomes permanent before the handler runs.
//!
//! 1. At most once: a handler that fails, panics, or dies with its process is not run again. Choose
//!    this only for effects that are worse twice than never.
//! 2. A claim whose reply was lost is released by its token. The sender got 503, and its retry must
//!    find the key free; otherwise the event is lost without a run.
//! 3. The claim may still be on its way to the store. Once the release has returned, the claim has no effect
//!    any more, however late it arrives. A release that fails is repeated for 10 min.
//! 4. From the claim to its reply, or to the end of the release, this process treats the key as in flight where the
//!    store replies "complete" to another delivery. Another process gets "complete" in that time, and so does this one
//!    if the runtime of the release has ended; where that matters, use the lease ledger.
//! 5. An event has one identity. A second one would be complete before the key is claimed, and would have to be
//!    released if the key is not claimed: meanwhile other processes acknowledge an event that nobody runs.
//!
//! # Timeline of a claim whose reply is lost
//!
//! | step | in this process | a retry of the event |
//! |---|---|---|
//! | 1 | a slot for the release is reserved, and the claim is sent | runs the handler, if its claim is first |
//! | 2 | the store completes the key, and its reply is lost | in this process: in flight. In another process: a duplicate, and the event is lost |
//! | 3 | after `store_timeout`, `releasing` contains the key, and the sender gets 503 | as in step 2 |
//! | 4 | the release is repeated until the store has executed it | as in step 2 |
//! | 5 | `releasing` drops the key | runs the handler |

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::claims::{Claims, Doubt};
use super::contract::{
    Begin, BeginContext, Claim, FailOpen, HandlerSuccess, Ledger, Sealed, fails_open,
};
use super::pending::Pending;
use super::resolve::{Resolution, flatten};
use super::retry::{PendingWrites, RetryPool, Write};
use crate::adapter::contract::{Abilities, DedupAdapter, Permanence};
use crate::error::{ConfigError, ConfigErrorKind, StoreError, StoreErrorKind};
use crate::key::{DedupKey, Keys};

/// The number of claims that may wait for their reply, or for their release, at once.
const MOST_RELEASES: usize = 16_384;

/// Claims keys that are complete at once: no event runs twice, and an event whose handler fails is
/// lost.
///
/// [`DedupLayer::on_arrival`](crate::DedupLayer::on_arrival) selects it.
pub struct OnArrival {
    adapter: Arc<dyn DedupAdapter>,
    abilities: Abilities,
    /// Keys whose claims have no reply, with the times at which these were made.
    claiming: Arc<Pending<Instant>>,
    /// Keys that deliveries with a 503 may have claimed.
    releasing: Arc<Pending>,
    pool: RetryPool,
}

impl OnArrival {
    pub(crate) fn new(adapter: Arc<dyn DedupAdapter>) -> Self {
        let abilities = adapter.abilities();
        let (claiming, releasing) = (Arc::default(), Arc::default());
        Self { adapter, abilities, claiming, releasing, pool: RetryPool::new(MOST_RELEASES) }
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
    ) -> Result<Begin<Self::Claim>, StoreError> {
        if keys.is_empty() {
            return Ok(Begin::WithoutKey);
        }
        if keys.events().iter().any(|event| event.second_identity().is_some()) {
            let context = "claiming on arrival an event with a second identity";
            return Err(StoreError::new(StoreErrorKind::Config, context));
        }
        let (events, first) = flatten(keys);
        let mut terms = context.terms(&events, self.abilities);
        terms.permanence = Permanence::OnClaim;
        // Reserved before the claim, because a refused release loses an event.
        let slot = self.pool.reserve();
        if slot.is_none() {
            let error =
                StoreError::new(StoreErrorKind::Unavailable, "reserving a slot for a release");
            if fails_open(&terms, &error) {
                return Ok(Resolution::unprotected(events, &error).begin(|_| (), |_| ArrivalClaim));
            }
            return Err(error);
        }
        let (claiming, releasing) = (&self.claiming, &self.releasing);
        let own = claiming.add(first.iter().cloned().collect(), Instant::now());
        let removals = releasing.removals();
        let mut claims = Claims::new(&self.adapter, &self.pool, terms, &context.store_timeout);
        let doubt = Doubt { slot, releasing, guard: None, claiming, own, removals };
        claims.doubt = Some(Box::new(doubt));
        let start = |claims: &mut Claims<'_>, resolution: &mut Resolution| {
            if resolution.is_unprotected {
                self.spawn_claim(&resolution.held, claims);
            }
            resolution.begin(|_| (), |_| ArrivalClaim)
        };
        claims.begin(events, first, start).await
    }

    /// No request has an identity of its content.
    async fn record(self: &Arc<Self>, _: &Keys, _: &BeginContext) -> Result<(), StoreError> {
        Ok(())
    }

    fn check(
        &self,
        has_second_identity: bool,
        _: Duration,
        _: Duration,
    ) -> Result<(), ConfigError> {
        let rule = "one identity of an event on arrival, and not a second one";
        let is_valid = !has_second_identity;
        if is_valid { Ok(()) } else { Err(ConfigError::new(ConfigErrorKind::Unsupported, rule)) }
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
    async fn commit(self, _: &HandlerSuccess) -> Result<(), StoreError> {
        Ok(())
    }

    async fn rollback(self) -> Result<(), StoreError> {
        Ok(())
    }
}
