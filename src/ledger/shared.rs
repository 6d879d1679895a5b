//! [`Shared`]: what the deliveries of one ledger share.

use std::sync::Arc;

use tokio::time::Instant;
use tokio_util::task::TaskTracker;

use super::call::Calls;
use super::contract::{BeginContext, Permanent};
use super::pending::Pending;
use super::renewal::Renewals;
use super::retry::RetryPool;
use crate::adapter::contract::{Abilities, CallTerms, DedupAdapter};
use crate::key::Event;

/// Background writes of each kind at once. On arrival, a release loses an event if it finds no slot; under a lease, it
/// leaves its key to the lease.
const MOST_COMPLETIONS: usize = 16_384;
const MOST_RELEASES: usize = 4_096;
const MOST_RELEASES_ON_ARRIVAL: usize = 16_384;

pub(super) struct Shared {
    pub(super) permanent: Permanent,
    pub(super) adapter: Arc<dyn DedupAdapter>,
    pub(super) abilities: Abilities,
    pub(super) renewals: Arc<Renewals>,
    /// Keys that succeeded in this process and are not completed in the store yet, with the terms of their completion.
    pub(super) completing: Arc<Pending<CallTerms>>,
    /// On arrival: keys whose claims have no reply, with the times at which these were made.
    pub(super) claiming: Arc<Pending<Instant>>,
    /// On arrival: keys that deliveries with a 503 may have claimed, until they are released.
    pub(super) releasing: Arc<Pending>,
    /// The writes that continue in the background.
    pub(super) tasks: TaskTracker,
    pub(super) completions: RetryPool,
    /// Separate from `completions`, because an outage leads to many releases. A refused release blocks
    /// a key for a lease; a refused completion runs an event twice.
    pub(super) releases: RetryPool,
}

impl Shared {
    pub(super) fn new(permanent: Permanent, adapter: Arc<dyn DedupAdapter>) -> Self {
        let most_releases = match permanent {
            Permanent::OnArrival => MOST_RELEASES_ON_ARRIVAL,
            Permanent::Lease | Permanent::Transactional => MOST_RELEASES,
        };
        let tasks = TaskTracker::new();
        // A closed tracker still takes tasks; `wait` ends only on a closed one.
        tasks.close();
        Self {
            permanent,
            abilities: adapter.abilities(),
            adapter,
            renewals: Arc::default(),
            completing: Arc::default(),
            claiming: Arc::default(),
            releasing: Arc::default(),
            completions: RetryPool::new(MOST_COMPLETIONS, &tasks),
            releases: RetryPool::new(most_releases, &tasks),
            tasks,
        }
    }
    /// Returns the calls of a delivery of these events.
    pub(super) fn calls(&self, context: BeginContext, events: &[Event]) -> Calls {
        let (adapter, bound) = (Arc::clone(&self.adapter), context.store_timeout);
        Calls { adapter, terms: context.terms(events, self.abilities), bound }
    }
}
