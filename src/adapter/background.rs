//! [`BackgroundTask`]: a task that an adapter starts by itself.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

/// How often a task shows that its runtime is driven.
const BEAT: Duration = Duration::from_secs(10);

/// At most one task at a time. It ends when this is dropped or stopped.
///
/// A runtime may live and not be driven, as one that `main` used for its first calls. After three missed
/// beats, another runtime starts a task, and the first task ends if its runtime goes on.
pub(super) struct BackgroundTask {
    /// `None` for a task that is off: there is nothing to start.
    running: Option<Arc<Running>>,
    stop: CancellationToken,
}

struct Running {
    created: Instant,
    beat: Duration,
    /// How many tasks were started.
    started: AtomicU64,
    /// The number of the task that runs, from 1 on. 0 if none does.
    number: AtomicU64,
    /// The last beat, in milliseconds since `created`.
    last_beat: AtomicU64,
}

impl BackgroundTask {
    pub(super) fn new(is_off: bool) -> Self {
        Self::with_beat(is_off, BEAT)
    }

    fn with_beat(is_off: bool, beat: Duration) -> Self {
        let running = Running {
            created: Instant::now(),
            beat,
            started: AtomicU64::new(0),
            number: AtomicU64::new(0),
            last_beat: AtomicU64::new(0),
        };
        Self { running: (!is_off).then(|| Arc::new(running)), stop: CancellationToken::new() }
    }

    /// Returns `true` if there is nothing to start. Each call of an adapter asks.
    pub(super) fn is_running(&self) -> bool {
        self.running.as_ref().is_none_or(|running| {
            running.number.load(Ordering::Acquire) != 0 && !running.is_overdue()
        })
    }

    /// Starts the task on the current runtime, unless one exists. `task` must end once its token is
    /// cancelled. It may be dropped at any `.await`.
    pub(super) fn ensure<F>(&self, task: impl FnOnce(CancellationToken) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let (Ok(runtime), Some(running)) = (Handle::try_current(), &self.running) else { return };
        // Read first: a task that begins after it is not replaced.
        let last = running.number.load(Ordering::Acquire);
        if self.stop.is_cancelled() || is_clock_paused() || self.is_running() {
            return;
        }
        let number = running.started.fetch_add(1, Ordering::AcqRel) + 1;
        running.note_beat();
        if running
            .number
            .compare_exchange(last, number, Ordering::AcqRel, Ordering::Acquire)
            .is_err()
        {
            return;
        }
        // A runtime that ends drops the task, and so the guard. The next call starts a task again.
        let guard = Guard(Arc::clone(running), number);
        let task = task(self.stop.clone());
        runtime.spawn(async move {
            tokio::select! {
                () = task => {}
                () = guard.beats() => {}
            }
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

impl Running {
    fn now(&self) -> u64 {
        u64::try_from(self.created.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn note_beat(&self) {
        self.last_beat.store(self.now(), Ordering::Release);
    }

    fn is_overdue(&self) -> bool {
        let silent = self.now().saturating_sub(self.last_beat.load(Ordering::Acquire));
        Duration::from_millis(silent) > 3 * self.beat
    }
}

/// The task of this number. The drop notes that it has ended.
struct Guard(Arc<Running>, u64);

impl Guard {
    /// Shows that the runtime is driven, until another task has begun.
    async fn beats(&self) {
        let Self(running, number) = self;
        while running.number.load(Ordering::Acquire) == *number && !is_clock_paused() {
            running.note_beat();
            tokio::time::sleep(running.beat).await;
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let Self(running, number) = self;
        // Unless another task has begun.
        let _ = running.number.compare_exchange(*number, 0, Ordering::AcqRel, Ordering::Acquire);
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
    use std::sync::atomic::AtomicUsize;

    use tokio::runtime::{Builder, Runtime};

    use super::*;

    const SHORT: Duration = Duration::from_millis(200);

    fn runtime() -> Runtime {
        Builder::new_current_thread().enable_all().build().unwrap()
    }

    /// Starts a task that counts itself as long as it lives.
    fn start(background: &BackgroundTask, alive: &Arc<AtomicUsize>) {
        let alive = Arc::clone(alive);
        background.ensure(|stop| async move {
            struct Alive(Arc<AtomicUsize>);
            impl Drop for Alive {
                fn drop(&mut self) {
                    self.0.fetch_sub(1, Ordering::SeqCst);
                }
            }
            alive.fetch_add(1, Ordering::SeqCst);
            let _alive = Alive(alive);
            stop.cancelled().await;
        });
    }

    #[test]
    fn task_of_a_runtime_that_is_not_driven_is_replaced() {
        let background = BackgroundTask::with_beat(false, SHORT);
        let (first, second) = (runtime(), runtime());
        let alive = [(); 2].map(|()| Arc::new(AtomicUsize::new(0)));
        let count = || alive.each_ref().map(|alive| alive.load(Ordering::SeqCst));
        first.block_on(async {
            start(&background, &alive[0]);
            tokio::time::sleep(SHORT).await;
        });
        assert!(background.is_running());
        std::thread::sleep(5 * SHORT);
        assert!(!background.is_running(), "the first runtime is not driven");
        second.block_on(async {
            start(&background, &alive[1]);
            assert!(background.is_running());
            tokio::time::sleep(SHORT).await;
        });
        assert_eq!(count(), [1, 1]);
        // The first task ends when its runtime goes on, and leaves the second one alone.
        first.block_on(async { tokio::time::sleep(2 * SHORT).await });
        assert_eq!(count(), [0, 1]);
        second.block_on(async {
            tokio::time::sleep(2 * SHORT).await;
            assert!(background.is_running());
            start(&background, &alive[0]);
            tokio::time::sleep(SHORT).await;
        });
        assert_eq!(count(), [0, 1], "one task at a time");
        drop(second);
        assert_eq!(count(), [0, 0]);
        assert!(!background.is_running(), "its runtime has ended");
    }

    #[test]
    fn task_that_is_off_or_stopped_is_not_started() {
        let (off, stopped) = (BackgroundTask::new(true), BackgroundTask::new(false));
        stopped.stop();
        assert!(off.is_running() && !stopped.is_running());
        runtime().block_on(async {
            for background in [off, stopped] {
                background.ensure(|_| async { unreachable!("it is not started") });
                tokio::task::yield_now().await;
            }
        });
    }
}
