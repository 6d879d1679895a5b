//! [`DedupHandle`]: counts running deliveries, waits for them, and changes the mode.

use std::fmt;
use std::sync::Arc;

use tokio_util::task::TaskTracker;

use super::gate::Gate;
use super::mode::Mode;
use crate::observe;

/// Watches the deliveries of a [`DedupLayer`](crate::DedupLayer), its clones and its services, and
/// changes their mode.
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
    pub(super) gate: Arc<Gate>,
    pub(super) pending_writes: TaskTracker,
    pub(super) namespace: Arc<str>,
}

impl DedupHandle {
    /// Returns the mode of the layer.
    #[must_use]
    pub fn mode(&self) -> Mode {
        self.gate.mode.get()
    }

    /// Sets the mode of the layer, its clones and its services. A change is logged. [`Mode`] says
    /// what happens to the deliveries that run.
    pub fn set_mode(&self, mode: Mode) {
        let previous = self.gate.mode.set(mode);
        if previous != mode {
            observe::records::mode_changed(&self.namespace, previous.as_str(), mode.as_str());
        }
    }

    /// Returns how many deliveries hold a permit to run.
    #[must_use]
    pub fn running(&self) -> usize {
        self.gate.running.held()
    }

    /// Returns how many deliveries wait for another delivery of their event.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.gate.waiting.held()
    }

    /// Returns how many completions and releases of ended deliveries have not reached the store
    /// yet. The layer repeats such a write until it succeeds or its bound has passed.
    #[must_use]
    pub fn pending_writes(&self) -> usize {
        self.pending_writes.len()
    }

    /// Waits until no delivery runs or waits and no write is pending.
    ///
    /// It does not refuse new deliveries: stop accepting connections first. It has no time limit of
    /// its own. It waits for the slowest handler and, while the store does not reply, for the bound
    /// of the last write, ten minutes.
    ///
    /// Await it before the runtime ends, because the pending writes end with the runtime. Under the
    /// on-arrival ledger, an event whose claim has not been released is then lost. Under a lease,
    /// its key is free when the lease lapses.
    pub async fn drain(&self) {
        // `wait` returns only for a closed tracker, which still takes tasks.
        self.gate.tasks.close();
        self.gate.tasks.wait().await;
        self.pending_writes.wait().await;
    }
}

impl fmt::Debug for DedupHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DedupHandle")
            .field("mode", &self.mode())
            .field("running", &self.running())
            .field("waiting", &self.waiting())
            .field("pending_writes", &self.pending_writes())
            .finish_non_exhaustive()
    }
}
