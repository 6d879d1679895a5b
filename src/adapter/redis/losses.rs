//! [`StoreLoss`]: acknowledged writes that the store has lost, as far as they show.

use std::time::SystemTime;

/// Writes that the store had acknowledged and does not have any more.
///
/// Under the lease ledger, no event is lost by it: an event of this time may run a second time.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreLoss {
    /// How the loss shows.
    pub kind: LossKind,
    /// The address of the primary that has lost writes.
    pub primary: String,
    /// Writes from this time on may be lost, by this machine's clock.
    pub since: SystemTime,
    /// When the loss was found, by this machine's clock.
    pub found_at: SystemTime,
}

/// How a loss shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LossKind {
    /// A new primary's history ends before writes that the old primary had acknowledged.
    Rewound,
    /// A key that this process had written is gone: the store was flushed, or restarted empty.
    Emptied,
    /// The server evicted keys to free memory. They may be keys of another program.
    Evicted,
    /// The replication history is a new one, so a loss can neither be shown nor excluded.
    Suspected,
}

impl LossKind {
    /// Returns a short name for logs and metric labels.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Rewound => "rewound",
            Self::Emptied => "emptied",
            Self::Evicted => "evicted",
            Self::Suspected => "suspected",
        }
    }
}
