//! [`PurgeTask`]: the task that purges an adapter's table, without any code of the user's.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

use super::super::contract::StoreFuture;
use super::super::inspection::Purged;
use super::super::purging::{Portion, Purging, TIMEOUT, is_clock_paused};

/// At most one task at a time. It ends when this is dropped or stopped.
pub(in crate::adapter) struct PurgeTask {
    purging: Purging,
    /// Whether a task exists. Always `true` if purging is off: there is nothing to start.
    is_running: Arc<AtomicBool>,
    stop: CancellationToken,
}

impl PurgeTask {
    pub(in crate::adapter) fn new(purging: Purging) -> Self {
        Self {
            purging,
            is_running: Arc::new(AtomicBool::new(purging.is_off())),
            stop: CancellationToken::new(),
        }
    }

    /// Returns `true` if there is nothing to start. Each call of an adapter asks: one atomic load.
    pub(in crate::adapter) fn is_running(&self) -> bool {
        self.is_running.load(Ordering::Acquire)
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
        let Ok(runtime) = Handle::try_current() else { return };
        if is_clock_paused() || self.is_running.swap(true, Ordering::AcqRel) {
            return;
        }
        // A runtime that ends drops the task, and so the guard. The next call starts a task again.
        let running = Running(Arc::clone(&self.is_running));
        let (purging, stop, closed) = (self.purging, self.stop.clone(), closed());
        let portion: Portion =
            Arc::new(move |keys| if is_clock_paused() { None } else { portion(keys) });
        runtime.spawn(async move {
            let _running = running;
            tokio::select! {
                // First, so that a portion which finds the pool closed is no failure. A round that is under
                // way ends at its next pause.
                biased;
                () = closed => stop.cancel(),
                () = purging.run(TIMEOUT, portion, stop.clone()) => {}
            }
        });
    }

    /// Ends the task at its next pause, for good.
    pub(in crate::adapter) fn stop(&self) {
        self.stop.cancel();
    }
}

impl Drop for PurgeTask {
    fn drop(&mut self) {
        self.stop();
    }
}

struct Running(Arc<AtomicBool>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}
