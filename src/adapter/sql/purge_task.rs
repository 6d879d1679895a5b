//! [`PurgeTask`]: the task that purges an adapter's table, without any code of the user's.

use std::future::Future;
use std::sync::Arc;

use super::super::background::{BackgroundTask, is_clock_paused};
use super::super::contract::StoreFuture;
use super::super::inspection::Purged;
use super::super::purging::{Portion, Purging, TIMEOUT};

/// At most one task at a time. It ends at its next pause after this is dropped or stopped.
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
    /// `portion` returns `None`. `portion` must not own the adapter, which would live as long as the task.
    pub(in crate::adapter) fn ensure<C>(
        &self,
        closed: impl FnOnce() -> C,
        portion: impl Fn(u32) -> Option<StoreFuture<'static, Option<Purged>>> + Send + Sync + 'static,
    ) where
        C: Future<Output = ()> + Send + 'static,
    {
        let purging = self.purging;
        self.task.ensure(|stop| {
            let closed = closed();
            let portion: Portion =
                Arc::new(move |keys| if is_clock_paused() { None } else { portion(keys) });
            async move {
                tokio::select! {
                    // First, so that a portion which finds the pool closed is no failure. A round that is
                    // under way ends at its next pause.
                    biased;
                    () = closed => stop.cancel(),
                    () = purging.run(TIMEOUT, portion, stop.clone()) => {}
                }
            }
        });
    }

    /// Ends the task at its next pause, for good.
    pub(in crate::adapter) fn stop(&self) {
        self.task.stop();
    }
}
