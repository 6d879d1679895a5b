//! [`BackgroundTask`]: a task that an adapter starts by itself.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

/// At most one task at a time. It ends with its runtime, or when this is dropped or stopped.
pub(super) struct BackgroundTask {
    /// Whether a task runs. `None` for a task that is off: there is nothing to start.
    runs: Option<Arc<AtomicBool>>,
    stop: CancellationToken,
}

impl BackgroundTask {
    pub(super) fn new(is_off: bool) -> Self {
        Self { runs: (!is_off).then(Arc::default), stop: CancellationToken::new() }
    }

    /// Returns `true` if there is nothing to start. Each call of an adapter asks.
    pub(super) fn is_running(&self) -> bool {
        self.runs.as_ref().is_none_or(|runs| runs.load(Ordering::Acquire))
    }

    /// Starts the task on the current runtime, unless one exists. `task` must end once its token is
    /// cancelled. It may be dropped at any `.await`.
    pub(super) fn ensure<F>(&self, task: impl FnOnce(CancellationToken) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let (Ok(runtime), Some(runs)) = (Handle::try_current(), &self.runs) else { return };
        let is_stopped = self.stop.is_cancelled() || is_clock_paused();
        if is_stopped || runs.swap(true, Ordering::AcqRel) {
            return;
        }
        // Made before the task: a runtime that ends drops both, and the next call starts a task again.
        let guard = Guard(Arc::clone(runs));
        let task = task(self.stop.clone());
        runtime.spawn(async move {
            let _guard = guard;
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

/// A task that runs. The drop notes that it has ended.
struct Guard(Arc<AtomicBool>);

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// Returns `true` if tokio's clock is paused, as in a test. Its pauses would end at once, and the store's
/// clock does not follow it.
pub(super) fn is_clock_paused() -> bool {
    let before = Instant::now();
    let now = tokio::time::Instant::now().into_std();
    now < before || now > Instant::now()
}

#[cfg(test)]
mod tests {
    use tokio::runtime::{Builder, Runtime};

    use super::*;

    fn runtime() -> Runtime {
        Builder::new_current_thread().enable_all().build().unwrap()
    }

    #[test]
    fn task_starts_again_after_its_end_or_that_of_its_runtime() {
        let background = BackgroundTask::new(false);
        let wait = |stop: CancellationToken| async move { stop.cancelled().await };
        for polls in [0, 1] {
            let runtime = runtime();
            runtime.block_on(async {
                background.ensure(wait);
                assert!(background.is_running());
                background.ensure(|_| async { unreachable!("one task at a time") });
                for _ in 0..polls {
                    tokio::task::yield_now().await;
                }
            });
            assert!(background.is_running());
            drop(runtime);
            assert!(!background.is_running(), "its runtime has ended");
        }
        runtime().block_on(async {
            background.ensure(|_| async {});
            tokio::task::yield_now().await;
            assert!(!background.is_running(), "it has ended");
        });
    }
}
