//! [`Purger`]: deletes expired keys in the background, for an adapter that does not purge by itself.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::inspect::MaintenanceAdapter;
use super::purging::{Purging, TIMEOUT};
use crate::error::valid;

/// Deletes expired keys from a store, at an interval.
///
/// For an adapter that does not purge by itself. The SQL adapters purge by themselves ([`Purging`]), and a memory
/// adapter removes expired keys while it claims new ones. A purger over one of them does no harm: each key is deleted
/// and counted once.
///
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// use std::sync::Arc;
/// use tower_dedup::adapter::{MemoryAdapter, Purger};
/// use tower_dedup::{DedupLayer, provider};
///
/// let store = Arc::new(MemoryAdapter::new());
/// let dedup = DedupLayer::new(provider::STRIPE, Arc::clone(&store));
/// let purger = Purger::new(store).spawn();
/// // … serve …
/// purger.stop().await;
/// # let _ = dedup;
/// # });
/// ```
///
/// 1. Rounds, pauses and log records are those of [`Purging`].
/// 2. Expired keys stay for another hour ([`PURGE_GRACE`](super::inspect::PURGE_GRACE)). So a clock that is ahead by
///    less than an hour makes no purge delete a key too early.
/// 3. If the handle is dropped, the purger stops at its next pause. [`PurgerHandle::stop`] waits for that.
#[derive(Clone)]
#[must_use = "a purger does nothing until it is spawned"]
pub struct Purger {
    adapter: Arc<dyn MaintenanceAdapter>,
    purging: Purging,
    timeout: Duration,
}

impl Purger {
    /// Makes a purger that deletes 1,000 keys in a statement, every ten minutes. A statement may
    /// take 30 seconds.
    pub fn new(adapter: impl MaintenanceAdapter) -> Self {
        Self { adapter: Arc::new(adapter), purging: Purging::new(), timeout: TIMEOUT }
    }

    /// Sets the pause between two rounds.
    ///
    /// A pause below 1 ms or above 365 days is invalid.
    pub fn every(self, interval: Duration) -> Self {
        Self { purging: self.purging.every(interval), ..self }
    }

    /// Sets how many keys one statement deletes at most. A statement with fewer keys holds its locks
    /// for a shorter time.
    ///
    /// 0 is invalid.
    pub fn keys_per_statement(self, keys: u32) -> Self {
        Self { purging: self.purging.keys_per_statement(keys), ..self }
    }

    /// Sets how long one statement may take before its round fails.
    pub fn timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// Starts the purger on the current runtime.
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime, and for an invalid setting.
    #[track_caller]
    pub fn spawn(self) -> PurgerHandle {
        valid(self.purging.check());
        let stop = CancellationToken::new();
        let Self { adapter, purging, timeout } = self;
        let adapter = move || Some(Arc::clone(&adapter));
        let task = tokio::spawn(purging.run(timeout, adapter, stop.clone()));
        PurgerHandle { _stops: stop.drop_guard(), task }
    }
}

impl fmt::Debug for Purger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Purger").field("purging", &self.purging).finish_non_exhaustive()
    }
}

/// A running [`Purger`], which stops at its next pause if the handle is dropped.
#[derive(Debug)]
#[must_use = "dropping the handle stops the purger"]
pub struct PurgerHandle {
    _stops: tokio_util::sync::DropGuard,
    task: JoinHandle<()>,
}

impl PurgerHandle {
    /// Stops the purger and waits for its current statement.
    pub async fn stop(self) {
        let Self { _stops: stops, task } = self;
        drop(stops);
        // The task never panics: it catches the panics of the store.
        let _ = task.await;
    }
}
