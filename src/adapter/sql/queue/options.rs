//! [`Batching`]: how an adapter batches.

use crate::error::{ConfigError, check, valid};

/// Configures how a SQL adapter sends concurrent calls together.
///
/// A call that is alone is sent at once, as a statement of its own.
///
/// # Example
///
/// ```
/// use tower_dedup::adapter::Batching;
///
/// let small = Batching::new().lanes(1).max_batch_keys(64).max_queued_keys(1_000);
/// assert_ne!(small, Batching::default());
/// assert!(small.try_lanes(0).is_err());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub struct Batching {
    lanes: usize,
    max_batch_keys: usize,
    max_queued_keys: usize,
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
    /// may have fallen silent. A runtime without a lane starts one. SQLite has one writer, and
    /// therefore one lane.
    ///
    /// # Panics
    ///
    /// For 0: see [`try_lanes`](Self::try_lanes).
    #[track_caller]
    pub fn lanes(self, lanes: usize) -> Self {
        valid(self.try_lanes(lanes))
    }

    /// Sets how many batches are sent at the same time, for a value from a file.
    ///
    /// # Errors
    ///
    /// [`ConfigError::InvalidSetting`] for 0.
    pub fn try_lanes(self, lanes: usize) -> Result<Self, ConfigError> {
        Ok(Self { lanes: at_least_one("lanes", lanes)?, ..self })
    }

    /// Sets how many calls one statement takes; each names one key.
    ///
    /// # Panics
    ///
    /// For 0: see [`try_max_batch_keys`](Self::try_max_batch_keys).
    #[track_caller]
    pub fn max_batch_keys(self, keys: usize) -> Self {
        valid(self.try_max_batch_keys(keys))
    }

    /// Sets how many keys one statement takes, for a value from a file.
    ///
    /// # Errors
    ///
    /// [`ConfigError::InvalidSetting`] for 0.
    pub fn try_max_batch_keys(self, keys: usize) -> Result<Self, ConfigError> {
        Ok(Self { max_batch_keys: at_least_one("max_batch_keys", keys)?, ..self })
    }

    /// Sets how many calls may wait; past that, claims are refused. Renewals, completions and releases are
    /// not refused, because a running event depends on them.
    ///
    /// # Panics
    ///
    /// For 0: see [`try_max_queued_keys`](Self::try_max_queued_keys).
    #[track_caller]
    pub fn max_queued_keys(self, keys: usize) -> Self {
        valid(self.try_max_queued_keys(keys))
    }

    /// Sets how many keys may wait, for a value from a file.
    ///
    /// # Errors
    ///
    /// [`ConfigError::InvalidSetting`] for 0.
    pub fn try_max_queued_keys(self, keys: usize) -> Result<Self, ConfigError> {
        Ok(Self { max_queued_keys: at_least_one("max_queued_keys", keys)?, ..self })
    }

    pub(in crate::adapter) const fn lane_count(self) -> usize {
        self.lanes
    }

    pub(super) const fn batch_keys(self) -> usize {
        self.max_batch_keys
    }

    pub(super) const fn queued_keys(self) -> usize {
        self.max_queued_keys
    }
}

fn at_least_one(setting: &'static str, value: usize) -> Result<usize, ConfigError> {
    check(value > 0, setting, "at least 1")?;
    Ok(value)
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
    fn settings_are_those_that_were_set_and_zero_is_refused() {
        let seen = |batching: Batching| {
            (batching.lane_count(), batching.batch_keys(), batching.queued_keys())
        };
        let set = Batching::new().lanes(3).max_batch_keys(64).max_queued_keys(1_000);
        assert_eq!(seen(set), (3, 64, 1_000));
        assert_eq!(seen(Batching::default()), (2, 1_024, 16_384));
        for refused in [set.try_lanes(0), set.try_max_batch_keys(0), set.try_max_queued_keys(0)] {
            assert!(matches!(refused, Err(ConfigError::InvalidSetting { .. })), "{refused:?}");
        }
    }
}
