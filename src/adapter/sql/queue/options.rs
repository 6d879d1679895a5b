//! [`Batching`]: how an adapter batches.

/// How a SQL adapter sends concurrent calls together, or that it does not.
///
/// On by default. A call that is alone is sent at once, as the plain statement that it would be
/// without batching.
///
/// # Example
///
/// ```
/// use tower_dedup::adapter::Batching;
///
/// let small = Batching::new().lanes(1).rows(64).queue(1_000);
/// assert_ne!(small, Batching::default());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub struct Batching {
    /// None if every call is a statement of its own.
    lanes: Option<usize>,
    rows: usize,
    queue: usize,
}

impl Batching {
    /// Two lanes, 1,024 rows a batch, 16,384 rows that wait.
    pub const fn new() -> Self {
        Self { lanes: Some(2), rows: 1_024, queue: 16_384 }
    }

    /// Every call is a statement of its own, on a connection of the pool.
    pub const fn off() -> Self {
        Self { lanes: None, ..Self::new() }
    }

    /// How many batches may be on the wire at once, at least one: each needs a connection, and a
    /// core of the database. Up to as many more are opened while batches take longer than 500 ms,
    /// because their connections may have fallen silent. Each runtime has lanes of its own. SQLite
    /// has one writer, and so one lane, whatever is said here.
    pub const fn lanes(mut self, lanes: usize) -> Self {
        self.lanes = Some(if lanes == 0 { 1 } else { lanes });
        self
    }

    /// How many keys one statement takes, at least one. A call with more keys is a batch by itself.
    pub const fn rows(mut self, rows: usize) -> Self {
        self.rows = if rows == 0 { 1 } else { rows };
        self
    }

    /// How many keys may wait, at least one; beyond, calls are refused. A single call with more
    /// keys waits if nothing else does.
    pub const fn queue(mut self, rows: usize) -> Self {
        self.queue = if rows == 0 { 1 } else { rows };
        self
    }

    pub(in crate::adapter) const fn lane_count(self) -> Option<usize> {
        self.lanes
    }

    pub(super) const fn most_rows(self) -> usize {
        self.rows
    }

    pub(super) const fn most_waiting(self) -> usize {
        self.queue
    }
}

impl Default for Batching {
    fn default() -> Self {
        Self::new()
    }
}
