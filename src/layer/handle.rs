//! [`DedupHandle`]: waits for running deliveries.

use std::fmt;
use std::sync::Arc;

use futures_util::future::BoxFuture;

use super::gate::Gate;
use crate::ledger::Ledger;

/// Watches over the deliveries of a [`DedupLayer`](crate::DedupLayer) and of its clones.
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
/// // … serve with `dedup` until the process is told to stop, accept no more connections, then:
/// let drained = tokio::time::timeout(Duration::from_secs(25), handle.drain()).await;
/// if drained.is_err() {
///     // What still runs will lose its lease; its sender's retry runs it again.
/// }
/// # });
/// ```
#[derive(Clone)]
pub struct DedupHandle {
    gate: Arc<Gate>,
    drain_ledger: Arc<dyn Fn() -> BoxFuture<'static, ()> + Send + Sync>,
    background: Arc<dyn Fn() -> usize + Send + Sync>,
}

impl DedupHandle {
    pub(super) fn new<L: Ledger>(gate: &Arc<Gate>, ledger: &Arc<L>) -> Self {
        let for_drain = Arc::clone(ledger);
        let drain_ledger = move || -> BoxFuture<'static, ()> {
            let ledger = Arc::clone(&for_drain);
            Box::pin(async move { ledger.drain().await })
        };
        let ledger = Arc::clone(ledger);
        Self {
            gate: Arc::clone(gate),
            drain_ledger: Arc::new(drain_ledger),
            background: Arc::new(move || ledger.pending_writes()),
        }
    }

    /// How many deliveries hold a permit to run.
    #[must_use]
    pub fn running(&self) -> usize {
        self.gate.running()
    }

    /// How many deliveries wait for another delivery of their event.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.gate.waiting()
    }

    /// How many completions, releases and undone records are still to reach the store, of
    /// deliveries that have ended.
    #[must_use]
    pub fn background(&self) -> usize {
        (self.background)()
    }

    /// Waits until no delivery runs or waits and nothing is left to be recorded in the background.
    ///
    /// It does not keep new deliveries out: stop accepting connections first. Without a bound it
    /// may wait for as long as the slowest handler. For a store that does not come back, it waits
    /// until the last attempt is given up: after ten minutes, or after one [lease](crate::DedupLayer::lease)
    /// where that is longer.
    pub async fn drain(&self) {
        self.gate.drain().await;
        (self.drain_ledger)().await;
    }
}

impl fmt::Debug for DedupHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DedupHandle")
            .field("running", &self.running())
            .field("waiting", &self.waiting())
            .field("background", &self.background())
            .finish_non_exhaustive()
    }
}
