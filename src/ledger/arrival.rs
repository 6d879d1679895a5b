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

use super::call::claim;
use super::contract::{
    Begin, BeginContext, CanShadow, Claim, FailOpen, HandlerSuccess, Ledger, Sealed,
};
use super::pending::Pending;
use super::release::Release;
use super::resolve::{KeyState, flatten, resolve, states};
use super::retry::{PendingWrites, RetryJob, RetryPool};
use crate::adapter::{CallTerms, DedupAdapter, Permanence};
use crate::delivery::{Delivery, Protection};
use crate::error::{Error, ErrorKind};
use crate::key::{DedupKey, Event, Keys, List};
use crate::observe;

/// After this time, the release of a claim of unknown outcome is not repeated.
const RELEASE_BOUND: Duration = Duration::from_secs(600);

/// The number of claims that may wait for their reply, or for their release, at once.
const MOST_RELEASES: usize = 16_384;

/// Claims keys that are complete at once: no event runs twice, and an event whose handler fails is
/// lost.
///
/// [`DedupLayer::on_arrival`](crate::DedupLayer::on_arrival) selects it.
pub struct OnArrival {
    adapter: Arc<dyn DedupAdapter>,
    /// Whether the adapter stores types of events.
    labels: bool,
    /// Keys that deliveries with a 503 may have claimed.
    releasing: Arc<Pending>,
    /// Keys of events with two identities, while they are claimed. A claimed identity is released if
    /// another delivery runs the event under the other identity.
    claiming: Arc<Pending>,
    pool: RetryPool,
}

impl OnArrival {
    pub(crate) fn new(adapter: Arc<dyn DedupAdapter>) -> Self {
        let (releasing, claiming) = (Arc::default(), Arc::default());
        let labels = adapter.abilities().inspection;
        Self { adapter, labels, releasing, claiming, pool: RetryPool::new(MOST_RELEASES) }
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
        };
        self.pool.repeat(slot, job, (), |job| {
            Box::pin(async {
                claim(&*job.adapter, &job.keys, &job.terms, job.store_timeout).await.map(drop)
            })
        });
    }

    /// Returns the release of these keys. Until it has ended, this process treats the keys as in
    /// flight.
    fn release<'l>(
        &'l self,
        slot: Option<OwnedSemaphorePermit>,
        keys: &'l [DedupKey],
        terms: &'l CallTerms,
        store_timeout: Duration,
    ) -> Release<'l> {
        Release {
            adapter: &self.adapter,
            pool: &self.pool,
            keys,
            terms,
            store_timeout,
            bound: RELEASE_BOUND,
            slot,
            releasing: Some(&self.releasing),
        }
    }

    /// Returns `true` if a claim of this key is being released, or any claim was since `removals` was
    /// read.
    fn may_be_released(&self, key: &DedupKey, removals: usize) -> bool {
        self.releasing.contains(key) || self.releasing.removals() != removals
    }

    /// Treats a complete identity as in flight if another delivery claims it now and the event's
    /// other identity is not complete. That delivery may release it.
    fn treat_shared_as_in_flight(
        &self,
        events: &[Event],
        flat: &[DedupKey],
        states: &mut [KeyState],
    ) {
        for event in events.iter().filter(|event| event.second_identity().is_some()) {
            let places: Vec<usize> =
                event.identities().filter_map(|key| flat.binary_search(key).ok()).collect();
            let is_duplicate = |place: &usize| matches!(states[*place], KeyState::Duplicate(_));
            if places.iter().all(is_duplicate) {
                continue;
            }
            let complete: Vec<usize> = places.into_iter().filter(is_duplicate).collect();
            for place in complete {
                if self.claiming.is_shared(&flat[place]) {
                    states[place] = KeyState::InFlight;
                }
            }
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
        let (events, flat) = flatten(keys);
        let (terms, store_timeout) =
            (context.terms(Permanence::OnClaim, &events, self.labels), context.store_timeout);
        // Reserved before the claim, because a refused release loses an event.
        let slot = self.pool.reserve();
        if slot.is_none() {
            let error = Error::new(ErrorKind::Unavailable, "reserving a slot for a release");
            return if context.fails_open(&error) {
                unprotected(events, &error)
            } else {
                Err(error)
            };
        }
        let removals = self.releasing.removals();
        let has_second_identities = flat.len() > events.len();
        // Held until `releasing` contains the keys to release.
        let _claiming = has_second_identities.then(|| self.claiming.add((*flat).into()));
        // Starts if this future is dropped, or if the outcome of the claim is unknown.
        let mut release = self.release(slot, &flat, &terms, store_timeout);
        let replies = match claim(&*self.adapter, &flat, &terms, store_timeout).await {
            Ok(replies) => replies,
            Err(error) if context.fails_open(&error) => {
                self.spawn_claim(release.disarm(), &flat, terms.clone(), store_timeout);
                return unprotected(events, &error);
            }
            Err(error) => {
                release.claim_failed(&error);
                return Err(error);
            }
        };
        // No `.await` follows, so the future cannot be dropped between the claim and its release.
        let slot = release.disarm();
        let mut states = states(&flat, replies, Vec::new(), |_| KeyState::InFlight);
        for (key, state) in flat.iter().zip(states.iter_mut()) {
            // The claim that completed the key may be in release: its handler never ran.
            if matches!(state, KeyState::Duplicate(_)) && self.may_be_released(key, removals) {
                *state = KeyState::InFlight;
            }
        }
        if has_second_identities {
            self.treat_shared_as_in_flight(&events, &flat, &mut states);
        }
        let resolution = resolve(events, &flat, &states, &terms);
        self.release(slot, &resolution.release, &terms, store_timeout).start();
        if resolution.new.is_empty() {
            return Ok(resolution.without_new());
        }
        resolution.report_run();
        let (in_flight, mismatch) = (resolution.in_flight, resolution.mismatch);
        let delivery = resolution.delivery(Protection::Claimed, ()).into();
        Ok(Begin::First { claim: ArrivalClaim, delivery, in_flight, mismatch })
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
