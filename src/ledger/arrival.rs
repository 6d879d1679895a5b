//! On arrival: the key becomes permanent before the handler runs.
//!
//! 1. At most once: a handler that fails, panics, or dies with its process is not run again. Choose
//!    this only for effects that are worse twice than never.
//! 2. A claim whose reply was lost is released by its token. The sender got 503, and its retry must
//!    find the key free; otherwise the event is lost without a run.
//! 3. The claim may still be on its way to the store. Once the release has returned, the claim has
//!    no effect any more, however late it arrives. A release that fails is repeated for 10 min.
//! 4. From the claim to its reply, or to the end of the release, this ledger treats the key as in
//!    flight where the store replies "complete" to another delivery. The clones of a layer share
//!    their ledger. Another layer or process gets "complete" in that time, and so does this one if
//!    the runtime of the release has ended; where that matters, use the lease ledger.
//! 5. An event has one identity. A second one would be complete before the key is claimed, and
//!    would have to be released if the key is not claimed: meanwhile other processes acknowledge an
//!    event that nobody runs.
//!
//! # Timeline of a claim whose reply is lost
//!
//! | step | in this ledger | a retry of the event |
//! |---|---|---|
//! | 1 | a slot for the release is reserved, and the claim is sent | runs the handler, if its claim is first |
//! | 2 | the store completes the key, and its reply is lost | in this ledger: in flight. In another one: a duplicate, and the event is lost |
//! | 3 | after `store_timeout`, `releasing` contains the key, and the sender gets 503 | as in step 2 |
//! | 4 | the release is repeated until the store has executed it | as in step 2 |
//! | 5 | `releasing` drops the key | runs the handler |

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

use super::background::{Background, Pending, PendingGuard};
use super::call::Reply;
use crate::adapter::KeyedTerms;
use crate::adapter::contract::{ClaimReply, Token};
use crate::error::{StoreError, StoreErrorKind};
use crate::key::DedupKey;

/// How much older a row may seem than it is: a store takes both times in whole milliseconds, and by
/// a clock of its own.
const AGE_ERROR: Duration = Duration::from_millis(10);

/// Keys of which this process knows more than the store.
#[derive(Default)]
pub(super) struct Arrivals {
    /// Keys whose claims have no reply, with the times at which these were made.
    claiming: Arc<Pending<Instant>>,
    /// Keys that deliveries with a 503 may have claimed, until they are released.
    releasing: Arc<Pending>,
}

/// A key that is complete in the store is in flight while the claim that completed it has no reply,
/// or may be released: its handler may never run.
pub(super) struct Doubt {
    arrivals: Arc<Arrivals>,
    /// A slot for the release, which must not be refused.
    pub(super) slot: Option<OwnedSemaphorePermit>,
    releasing: Option<PendingGuard>,
    /// The token of these claims.
    own: Token,
    _claiming: PendingGuard<Instant>,
    /// The removals from `releasing` before the delivery. If there was one meanwhile, any key may
    /// have been released.
    removals: usize,
}

impl Doubt {
    /// Reserves a slot for the release of these keys, which are claimed now by the token `own`.
    ///
    /// # Errors
    ///
    /// No slot is free. A refused release loses an event, so the keys must not be claimed.
    pub(super) fn begin(
        arrivals: &Arc<Arrivals>,
        background: &Background,
        keys: &[KeyedTerms],
        own: Token,
    ) -> Result<Self, StoreError> {
        let slot = background.reserve();
        if slot.is_none() {
            let context = "reserving a slot for a release";
            return Err(StoreError::new(StoreErrorKind::Overloaded, context));
        }
        let claiming = arrivals.claiming.add(known(keys, Instant::now()), own);
        let (arrivals, removals) = (Arc::clone(arrivals), arrivals.releasing.removals());
        Ok(Self { arrivals, slot, releasing: None, own, _claiming: claiming, removals })
    }

    /// Changes the replies of which this process knows more than the store.
    pub(super) fn apply(&self, keys: &[KeyedTerms], replies: &mut [Reply]) {
        let Arrivals { claiming, releasing } = &*self.arrivals;
        for (KeyedTerms { key, .. }, reply) in keys.iter().zip(replies) {
            let Ok(ClaimReply::Duplicate(seen)) = &*reply else { continue };
            // A row that is older than a claim was not written by it.
            let may_be_by = |claimed_at: &Instant| claimed_at.elapsed() + AGE_ERROR >= seen.age;
            if claiming.any(key, |claim, claimed_at| *claim != self.own && may_be_by(claimed_at))
                || releasing.any(key, |_, ()| true)
                || releasing.removals() != self.removals
            {
                *reply = Ok(ClaimReply::InFlight);
            }
        }
    }

    /// These keys are in flight until the doubt is dropped.
    pub(super) fn release(&mut self, keys: &[KeyedTerms]) {
        self.releasing = Some(self.arrivals.releasing.add(known(keys, ()), self.own));
    }
}

/// Returns each key with what is known of it.
fn known<T: Copy>(keys: &[KeyedTerms], known: T) -> impl Iterator<Item = (DedupKey, T)> {
    keys.iter().map(move |it| (it.key.clone(), known))
}
