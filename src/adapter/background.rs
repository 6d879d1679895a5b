//! [`BackgroundTask`]: a task that an adapter starts by itself.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::runtime::Handle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// At most one task at a time. It ends when this is dropped or stopped.
pub(super) struct BackgroundTask {
    /// Whether a task exists. Always `true` for a task that is off: there is nothing to start.
    is_running: Arc<AtomicBool>,
    stop: CancellationToken,
}

impl BackgroundTask {
    pub(super) fn new(is_off: bool) -> Self {
        Self { is_running: Arc::new(AtomicBool::new(is_off)), stop: CancellationToken::new() }
    }

    /// Returns `true` if there is nothing to start. Each call of an adapter asks: one atomic load.
    pub(super) fn is_running(&self) -> bool {
        self.is_running.load(Ordering::Acquire)
    }

    /// Starts the task on the current runtime, unless one exists. `task` must end once its token is
    /// cancelled.
    pub(super) fn ensure<F>(&self, task: impl FnOnce(CancellationToken) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let Ok(runtime) = Handle::try_current() else { return };
        if self.stop.is_cancelled()
            || is_clock_paused()
            || self.is_running.swap(true, Ordering::AcqRel)
        {
            return;
        }
        // A runtime that ends drops the task, and so the guard. The next call starts a task again.
        let running = Running(Arc::clone(&self.is_running));
        let task = task(self.stop.clone());
        runtime.spawn(async move {
            let _running = running;
            task.await;
        });
    }

    /// Ends the task. No other one is started.
    pub(super) fn stop(&self) {
        self.stop.cancel();
    }
}

impl Drop for BackgroundTask {
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

/// Returns `true` if tokio's clock is paused, as in a test. Its pauses would end at once, and the store's
/// clock does not follow it.
pub(super) fn is_clock_paused() -> bool {
    let before = std::time::Instant::now();
    let now = Instant::now().into_std();
    now < before || now > std::time::Instant::now()
}
