//! [`PurgeTask`]: the task that purges an adapter's table, without any code of the user's, and that sees the end of its
//! pool.

use std::sync::Arc;
use std::time::Instant;

use sqlx::{Database, Pool};
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use super::super::inspect::MaintenanceAdapter;
use super::super::purging::{Purging, TIMEOUT};

/// At most one task at a time. It ends with its runtime, or when this is dropped or stopped, after the current
/// statement.
pub(in crate::adapter) struct PurgeTask {
    purging: Purging,
    /// Its permit is that of the task.
    free: Arc<Semaphore>,
    stop: CancellationToken,
}

impl PurgeTask {
    pub(in crate::adapter) fn new(purging: Purging) -> Self {
        Self { purging, free: Arc::new(Semaphore::new(1)), stop: CancellationToken::new() }
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
        if self.free.available_permits() == 0 || self.stop.is_cancelled() {
            return;
        }
        let Ok(runtime) = Handle::try_current() else { return };
        // A runtime that ends drops the task with its permit, and the next call starts a task again.
        let Ok(permit) = Arc::clone(&self.free).try_acquire_owned() else { return };
        let (purging, stop) = (self.purging, self.stop.clone());
        let (store, closed) = (Arc::downgrade(store), pool.close_event());
        let purged = store.clone();
        let adapter = move || purged.upgrade().filter(|_| !is_clock_paused()).map(adapter);
        let purge = purging.run(TIMEOUT, adapter, stop.clone());
        let purges = !purging.is_off() && !is_clock_paused();
        runtime.spawn(async move {
            let _permit = permit;
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

/// Returns `true` if tokio's clock is paused, as in a test. Its pauses would end at once, and the store's
/// clock does not follow it.
fn is_clock_paused() -> bool {
    let before = Instant::now();
    let now = tokio::time::Instant::now().into_std();
    now < before || now > Instant::now()
}
