//! [`PurgeTask`]: the task that purges an adapter's table, without any code of the user's, and that sees the end of its
//! pool.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use sqlx::{Database, Pool};
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

use super::super::inspect::MaintenanceAdapter;
use super::super::purging::{Purging, TIMEOUT};

/// At most one task at a time. It ends with its runtime, or when this is dropped or stopped, after the current
/// statement.
pub(in crate::adapter) struct PurgeTask {
    purging: Purging,
    runs: Arc<AtomicBool>,
    stop: CancellationToken,
}

impl PurgeTask {
    pub(in crate::adapter) fn new(purging: Purging) -> Self {
        Self { purging, runs: Arc::default(), stop: CancellationToken::new() }
    }

    /// Starts the task on the current runtime, unless one exists. Each call of an adapter asks. The task ends with
    /// `pool`, after `on_close`, or with the store, which the task does not own.
    pub(in crate::adapter) fn ensure<S, A, DB>(
        &self,
        store: &Arc<S>,
        pool: &Pool<DB>,
        adapter: fn(Arc<S>) -> A,
        on_close: fn(&S),
    ) where
        S: Send + Sync + 'static,
        A: MaintenanceAdapter,
        DB: Database,
    {
        if self.runs.load(Ordering::Acquire) || self.stop.is_cancelled() {
            return;
        }
        let Ok(runtime) = Handle::try_current() else { return };
        if self.runs.swap(true, Ordering::AcqRel) {
            return;
        }
        // Made before the task: a runtime that ends drops both, and the next call starts a task again.
        let running = Running(Arc::clone(&self.runs));
        let (purging, stop) = (self.purging, self.stop.clone());
        let (store, closed) = (Arc::downgrade(store), pool.close_event());
        let purged = store.clone();
        let adapter = move || purged.upgrade().filter(|_| !is_clock_paused()).map(adapter);
        let purge = purging.run(TIMEOUT, adapter, stop.clone());
        let purges = !purging.is_off() && !is_clock_paused();
        runtime.spawn(async move {
            let _running = running;
            tokio::select! {
                // First, so that a statement which finds the pool closed is no failure.
                biased;
                () = closed => drop(store.upgrade().map(|store| on_close(&store))),
                () = purge, if purges => {}
                () = stop.cancelled(), if !purges => {}
            }
        });
    }

    /// Ends the task after its current statement, for good.
    pub(in crate::adapter) fn stop(&self) {
        self.stop.cancel();
    }
}

impl Drop for PurgeTask {
    fn drop(&mut self) {
        self.stop();
    }
}

/// A task that runs. The drop notes that it has ended.
struct Running(Arc<AtomicBool>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// Returns `true` if tokio's clock is paused, as in a test. Its pauses would end at once, and the store's
/// clock does not follow it.
fn is_clock_paused() -> bool {
    let before = Instant::now();
    let now = tokio::time::Instant::now().into_std();
    now < before || now > Instant::now()
}
