//! [`Batching`]: how an adapter batches.

use crate::error::{ConfigError, check};

/// Configures how a SQL adapter sends concurrent calls together.
///
/// A call that is alone is sent at once, as a statement of its own. A batch holds calls with the same retention, the
/// same lease and the same stored data, so many layers that differ in these make small batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub struct Batching {
    pub(in crate::adapter) lanes: usize,
    pub(super) max_batch_keys: usize,
    pub(super) max_queued_keys: usize,
}

impl Batching {
    /// Two lanes, 1,024 keys a batch, 16,384 waiting keys.
    pub const fn new() -> Self {
        Self { lanes: 2, max_batch_keys: 1_024, max_queued_keys: 16_384 }
    }

    /// Sets how many batches are sent at the same time. Each needs a connection, and a core of the
    /// database.
    ///
    /// While batches take longer than 500 ms, up to as many more are sent, because their connections
    /// may have fallen silent. SQLite has one writer, and therefore one lane.
    ///
    /// 0 is invalid.
    pub fn lanes(self, lanes: usize) -> Self {
        Self { lanes, ..self }
    }

    /// Sets how many calls one statement takes; each names one key.
    ///
    /// 0 is invalid.
    pub fn max_batch_keys(self, keys: usize) -> Self {
        Self { max_batch_keys: keys, ..self }
    }

    /// Sets how many calls may wait; past that, claims are refused. Renewals, completions and releases are
    /// not refused, because a running event depends on them.
    ///
    /// 0 is invalid.
    pub fn max_queued_keys(self, keys: usize) -> Self {
        Self { max_queued_keys: keys, ..self }
    }

    pub(in crate::adapter) fn check(self) -> Result<(), ConfigError> {
        const RULE: &str = "at least 1";
        check(self.lanes > 0, "lanes", RULE)?;
        check(self.max_batch_keys > 0, "max_batch_keys", RULE)?;
        check(self.max_queued_keys > 0, "max_queued_keys", RULE)
    }
}

impl Default for Batching {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_is_refused() {
        let batching = Batching::new();
        assert_eq!(batching.check(), Ok(()));
        let refused = [batching.lanes(0), batching.max_batch_keys(0), batching.max_queued_keys(0)];
        assert!(refused.into_iter().all(|batching| batching.check().is_err()));
    }
}
