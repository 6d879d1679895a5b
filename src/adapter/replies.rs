//! The replies of a store: one per key, and the entry of one key.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::stored::StoredData;

/// The facts about an event that was seen before.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Seen {
    /// The time since the event was first seen, by the store's clock.
    pub age: Duration,
    /// The data that is stored with the key. `None` under [`Fetch::Nothing`](super::Fetch::Nothing).
    /// Otherwise `Some`, with an empty [`StoredData`] where nothing was stored.
    pub stored: Option<Arc<StoredData>>,
}

impl Seen {
    /// Returns an event that was first seen this long ago, without stored data.
    #[must_use]
    pub const fn new(age: Duration) -> Self {
        Self { age, stored: None }
    }

    /// Adds the stored data.
    #[must_use]
    pub fn with_stored(mut self, stored: Arc<StoredData>) -> Self {
        self.stored = Some(stored);
        self
    }
}

/// The reply to a claim of one key.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ClaimReply {
    /// The caller holds the key. Under [`Permanence::OnClaim`](super::Permanence::OnClaim) the key is
    /// complete.
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
    /// The store did not know the key. The key is complete now.
    Inserted,
}

/// The reply to [`MaintenanceAdapter::forget`](super::MaintenanceAdapter::forget).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ForgetReply {
    /// The key was there, and is new now.
    Removed,
    /// There was no such key, or it had expired.
    Missing,
    /// The key is under a live lease and stays: otherwise two handlers could run.
    InFlight,
}

/// The state and the stored data of one key: the reply to
/// [`MaintenanceAdapter::get`](super::MaintenanceAdapter::get).
///
/// With the feature `serde`, it is serialized as one flat object:
///
/// | member | |
/// |---|---|
/// | `state` | the name of a [`KeyState`](super::KeyState); this machine's clock decides whether a lease has lapsed |
/// | `event_type`, `attempts`, `takeover`, `response_is_unreadable` | the fields |
/// | `first_seen_at`, `expires_at` | the fields, in UTC and whole seconds: `2026-01-31T12:00:00Z` |
/// | `lease_until` | the same of a key that is in flight or lapsed, or null |
/// | `completed_at` | the same of a complete key, or null |
/// | `payload_sha256` | the digest in hex, or null |
/// | `response` | `status` and `bytes` of a stored response, or null; its headers and body may be personal data |
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Entry {
    /// The state of the key.
    pub state: EntryState,
    /// How often the key was claimed since it was first seen.
    pub attempts: u32,
    /// Whether the last claim was a takeover.
    pub takeover: bool,
    /// When the key was first seen.
    pub first_seen_at: SystemTime,
    /// When the retention of the key ends.
    pub expires_at: SystemTime,
    /// The data that is stored with a complete key; empty [`StoredData`] where nothing was stored.
    /// `None` if the key is not complete, or if the store holds no such data.
    pub stored: Option<Arc<StoredData>>,
    /// Whether a response is stored that cannot be read. `stored` is without the response then. A
    /// claim that fetches the response fails with [`ErrorKind::Corrupt`](crate::ErrorKind::Corrupt).
    pub response_is_unreadable: bool,
    /// The event's type, as the sender names it; `None` if the preset does not know it.
    pub event_type: Option<String>,
}

impl Entry {
    /// Returns an entry with one attempt, which was no takeover, and without stored data.
    #[must_use]
    pub const fn new(state: EntryState, first_seen_at: SystemTime, expires_at: SystemTime) -> Self {
        Self {
            state,
            attempts: 1,
            takeover: false,
            first_seen_at,
            expires_at,
            stored: None,
            response_is_unreadable: false,
            event_type: None,
        }
    }

    /// Sets the number of attempts, and whether the last one was a takeover.
    #[must_use]
    pub const fn with_attempts(mut self, attempts: u32, takeover: bool) -> Self {
        self.attempts = attempts;
        self.takeover = takeover;
        self
    }

    /// Adds the stored data.
    #[must_use]
    pub fn with_stored(mut self, stored: Arc<StoredData>) -> Self {
        self.stored = Some(stored);
        self
    }

    /// Adds the event's type.
    #[must_use]
    pub fn with_event_type(mut self, event_type: impl Into<String>) -> Self {
        self.event_type = Some(event_type.into());
        self
    }
}

/// The state of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum EntryState {
    /// Claimed and not complete.
    InFlight {
        /// When the lease lapses. A time in the past means that the lease has lapsed.
        lease_until: SystemTime,
    },
    /// Claimed before, and released because the handler failed.
    Released,
    /// Complete: every further delivery is a duplicate.
    Complete {
        /// When the key became complete.
        completed_at: SystemTime,
    },
}
