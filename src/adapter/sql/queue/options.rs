//! [`Batching`]: how an adapter batches.

/// Configures how a SQL adapter sends concurrent calls together.
///
/// Batching is on by default. A call that is alone is sent at once, as the plain statement that it
/// would be without batching.
///
/// # Example
///
/// ```
/// use tower_dedup::adapter::Batching;
///
/// let small = Batching::new().lanes(1).max_batch_keys(64).max_queued_keys(1_000);
/// assert_ne!(small, Batching::default());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub struct Batching {
    /// `None` if every call is a statement of its own.
    lanes: Option<usize>,
    max_batch_keys: usize,
    max_queued_keys: usize,
}

impl Batching {
    /// Two lanes, 1,024 keys a batch, 16,384 waiting keys.
    pub const fn new() -> Self {
        Self { lanes: Some(2), max_batch_keys: 1_024, max_queued_keys: 16_384 }
    }

    /// No batching: every call is a statement of its own, on a connection of the pool.
    pub const fn off() -> Self {
        Self { lanes: None, ..Self::new() }
    }

    /// Sets how many batches are sent at the same time, at least one. Each needs a connection, and a
    /// core of the database.
    ///
    /// While batches take longer than 500 ms, up to as many more are sent, because their connections
    /// may have fallen silent. Each runtime has lanes of its own. SQLite has one writer, and
    /// therefore always one lane.
    pub const fn lanes(mut self, lanes: usize) -> Self {
        self.lanes = Some(if lanes == 0 { 1 } else { lanes });
        self
    }

    /// Sets how many keys one statement takes, at least one. A call with more keys is a batch by
    /// itself.
    pub const fn max_batch_keys(mut self, keys: usize) -> Self {
        self.max_batch_keys = if keys == 0 { 1 } else { keys };
        self
    }

    /// Sets how many keys may wait, at least one; past that, calls are refused. A single call with
    /// more keys waits if no other call does.
    pub const fn max_queued_keys(mut self, keys: usize) -> Self {
        self.max_queued_keys = if keys == 0 { 1 } else { keys };
        self
    }

    pub(in crate::adapter) const fn lane_count(self) -> Option<usize> {
        self.lanes
    }

    pub(super) const fn batch_keys(self) -> usize {
        self.max_batch_keys
    }

    pub(super) const fn queued_keys(self) -> usize {
        self.max_queued_keys
    }
}

impl Default for Batching {
    fn default() -> Self {
        Self::new()
    }
}
