//! [`PurgeTask`]: the task that purges an adapter's table, without any code of the user's.

use std::future::Future;

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

    /// Returns `true` if there is nothing to start.
    pub(in crate::adapter) fn is_running(&self) -> bool {
        self.task.is_running()
    }

    /// Starts the task on the current runtime, unless one exists. The task ends with `closed`, or once
    /// `adapter` returns `None`. `adapter` must not own the adapter, which would live as long as the task.
    pub(in crate::adapter) fn ensure<A, C>(
        &self,
        closed: impl FnOnce() -> C,
        adapter: impl Fn() -> Option<A> + Send + Sync + 'static,
    ) where
        A: MaintenanceAdapter,
        C: Future<Output = ()> + Send + 'static,
    {
        let purging = self.purging;
        self.task.ensure(|stop| {
            let closed = closed();
            let adapter = move || if is_clock_paused() { None } else { adapter() };
            async move {
                tokio::select! {
                    // First, so that a statement which finds the pool closed is no failure.
                    biased;
                    () = closed => {}
                    () = purging.run(TIMEOUT, adapter, stop) => {}
                }
            }
        });
    }

    /// Ends the task after its current statement, for good.
    pub(in crate::adapter) fn stop(&self) {
        self.task.stop();
    }
}
