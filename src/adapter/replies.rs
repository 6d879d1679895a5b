//! The replies of a store, one per key.

use std::sync::Arc;
use std::time::Duration;

use super::stored::StoredData;

/// The facts about an event that was seen before.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Seen {
    /// The time since the event was first seen, by the store's clock.
    pub age: Duration,
    /// The data that is stored with the key. `None` under
    /// [`Fetch::Nothing`](super::contract::Fetch::Nothing). Otherwise `Some`, with an empty
    /// [`StoredData`] where nothing was stored.
    pub stored: Option<Arc<StoredData>>,
}

impl Seen {
    /// Returns an event that was first seen this long ago, without stored data.
    #[must_use]
    pub const fn new(age: Duration) -> Self {
        Self { age, stored: None }
    }

    pub(crate) fn with_stored(mut self, stored: Arc<StoredData>) -> Self {
        self.stored = Some(stored);
        self
    }
}

/// The reply to a claim of one key.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ClaimReply {
    /// The caller holds the key. Under
    /// [`Permanence::OnClaim`](super::contract::Permanence::OnClaim) the key is complete.
    #[non_exhaustive]
    First {
        /// How often the key was claimed, this time included.
        attempt: u32,
        /// An earlier lease lapsed: its handler may have half-run.
        takeover: bool,
    },
    /// The key is complete.
    Duplicate(Seen),
    /// Another token holds the key under a live lease.
    InFlight,
}

impl ClaimReply {
    /// Returns the reply to a claim that holds the key. `attempt` counts from 1.
    #[must_use]
    pub const fn first(attempt: u32, takeover: bool) -> Self {
        Self::First { attempt, takeover }
    }
}

/// The reply to a renewal of one key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RenewReply {
    /// The caller holds the key for another lease.
    Held,
    /// An open transaction holds the row of the key, as that of a handler that completes its event.
    /// Nothing changed, and the caller asks again soon.
    Locked,
    /// Another token holds the key, or the key is complete or released. Nothing changed.
    Lost,
}

/// The reply to a completion of one key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum CompleteReply {
    /// The caller held the key. The key is complete now.
    Held,
    /// The caller did not hold the key: another handler may have run. The key is complete.
    LeaseLost,
    /// The store did not know the key, and the caller's completion is the first. The key is
    /// complete now.
    Inserted,
}
