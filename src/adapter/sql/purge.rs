//! [`PurgeTask`]: the task that purges an adapter's table, without any code of the user's.

use std::sync::Arc;

use sqlx::{Database, Pool};

use super::super::background::{BackgroundTask, is_clock_paused};
use super::super::inspect::{MaintenanceAdapter, PURGE_GRACE};
use super::super::purging::{Purging, TIMEOUT};

/// [`PURGE_GRACE`] for a statement.
pub(in crate::adapter) fn grace_ms() -> u128 {
    PURGE_GRACE.as_millis()
}

/// At most one task at a time. It ends when this is dropped or stopped, after the current statement.
pub(in crate::adapter) struct PurgeTask {
    purging: Purging,
    task: BackgroundTask,
}

impl PurgeTask {
    pub(in crate::adapter) fn new(purging: Purging) -> Self {
        Self { purging, task: BackgroundTask::new(purging.is_off()) }
    }

    /// Starts the task on the current runtime, unless one exists. The task ends with `pool`, or with the store, which
    /// the task does not own.
    pub(in crate::adapter) fn ensure<S, A, DB>(
        &self,
        store: &Arc<S>,
        pool: &Pool<DB>,
        adapter: fn(Arc<S>) -> A,
    ) where
        S: Send + Sync + 'static,
        A: MaintenanceAdapter,
        DB: Database,
    {
        // Each call of an adapter asks.
        if self.task.is_running() {
            return;
        }
        let (purging, store, closed) = (self.purging, Arc::downgrade(store), pool.close_event());
        let adapter = move || store.upgrade().filter(|_| !is_clock_paused()).map(adapter);
        self.task.ensure(|stop| async move {
            tokio::select! {
                // First, so that a statement which finds the pool closed is no failure.
                biased;
                () = closed => {}
                () = purging.run(TIMEOUT, adapter, stop) => {}
            }
        });
    }

    /// Ends the task after its current statement, for good.
    pub(in crate::adapter) fn stop(&self) {
        self.task.stop();
    }
}
