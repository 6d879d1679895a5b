//! [`DedupHandle`]: counts running deliveries and waits for them.

use std::fmt;
use std::sync::Arc;

use super::gate::Gate;
use crate::ledger::PendingWrites;

/// Watches the deliveries of a [`DedupLayer`](crate::DedupLayer), its clones and its services.
///
/// Cloning makes another handle to the same deliveries.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "memory")]
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// # use std::time::Duration;
/// # use tower_dedup::{DedupLayer, adapter::MemoryAdapter, provider};
/// let dedup = DedupLayer::new(provider::GITHUB, MemoryAdapter::new());
/// let handle = dedup.handle();
/// // … serve with `dedup` until the process has to stop, accept no more connections, then:
/// let drained = tokio::time::timeout(Duration::from_secs(25), handle.drain()).await;
/// if drained.is_err() {
///     // A delivery that still runs loses its lease; the sender's retry takes it over.
/// }
/// # });
/// ```
#[derive(Clone)]
pub struct DedupHandle {
    gate: Arc<Gate>,
    pending_writes: PendingWrites,
}

impl DedupHandle {
    pub(super) fn new(gate: Arc<Gate>, pending_writes: PendingWrites) -> Self {
        Self { gate, pending_writes }
    }

    /// Returns how many deliveries hold a permit to run.
    #[must_use]
    pub fn running(&self) -> usize {
        self.gate.running()
    }

    /// Returns how many deliveries wait for another delivery of their event, or for a permit.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.gate.waiting()
    }

    /// Returns how many completions and releases of ended deliveries have not reached the store
    /// yet. The layer repeats such a write until it succeeds or its bound has passed.
    #[must_use]
    pub fn pending_writes(&self) -> usize {
        self.pending_writes.count()
    }

    /// Waits until no delivery runs or waits and no write is pending.
    ///
    /// It does not refuse new deliveries: stop accepting connections first. It has no bound of its
    /// own. It waits for the slowest handler. While the store does not reply, it waits until the
    /// bound of the last write has passed. That bound is ten minutes, or one
    /// [lease](crate::DedupLayer::lease) if that is longer.
    pub async fn drain(&self) {
        self.gate.drain().await;
        self.pending_writes.drain().await;
    }
}

impl fmt::Debug for DedupHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DedupHandle")
            .field("running", &self.running())
            .field("waiting", &self.waiting())
            .field("pending_writes", &self.pending_writes())
            .finish_non_exhaustive()
    }
}
