//! What goes on after the answer has left: bounded in number, in time, and in haste.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBuilder};
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;
use tokio_util::task::TaskTracker;

use crate::key::DedupKey;
use crate::observe;

const FIRST_DELAY: Duration = Duration::from_millis(50);
const LONGEST_DELAY: Duration = Duration::from_secs(5);

pub(super) struct Background {
    tasks: TaskTracker,
    permits: Arc<Semaphore>,
}

/// What is to be repeated.
pub(super) struct RetryJob {
    /// For logs and metrics.
    pub(super) operation: &'static str,
    /// For logs.
    pub(super) key: Option<DedupKey>,
    /// After this long it is given up.
    pub(super) bound: Duration,
    /// After this long of [`RetryResult::NotHeld`] it is settled.
    pub(super) patience: Duration,
}

/// What an attempt has come to.
pub(super) enum RetryResult {
    Done,
    /// The store answers, and knows nothing of what is to be undone: it never arrived there, or is
    /// still on its way.
    NotHeld,
    Again,
}

impl Background {
    /// Room for `most` at once.
    pub(super) fn new(most: usize) -> Self {
        let tasks = TaskTracker::new();
        // A closed tracker still takes tasks; being closed is what lets a drain end.
        tasks.close();
        Self { tasks, permits: Arc::new(Semaphore::new(most)) }
    }

    /// Room for one that must not be refused later.
    pub(super) fn reserve(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.permits).try_acquire_owned().ok()
    }

    /// Repeats `attempt`, with growing pauses, until it is settled or its bound has passed; then
    /// drops `until_then`.
    ///
    /// Outside a runtime, or with too much under way, nothing is done and that is logged.
    pub(super) fn repeat<F, G>(
        &self,
        work: RetryJob,
        attempt: impl FnMut() -> F + Send + 'static,
        until_then: G,
    ) where
        F: Future<Output = RetryResult> + Send,
        G: Send + 'static,
    {
        match self.reserve() {
            Some(permit) => self.repeat_with(permit, work, attempt, until_then),
            None => {
                let refused = observe::Background::Refused;
                observe::background(work.operation, refused, work.key.as_ref());
            }
        }
    }

    /// [`repeat`](Self::repeat) in room that was reserved.
    pub(super) fn repeat_with<F, G>(
        &self,
        permit: OwnedSemaphorePermit,
        work: RetryJob,
        mut attempt: impl FnMut() -> F + Send + 'static,
        until_then: G,
    ) where
        F: Future<Output = RetryResult> + Send,
        G: Send + 'static,
    {
        let RetryJob { operation, key, bound, patience } = work;
        let Ok(runtime) = Handle::try_current() else {
            observe::background(operation, observe::Background::Refused, key.as_ref());
            return;
        };
        let task = async move {
            let start = Instant::now();
            let mut absent_since = None;
            let mut delays = ExponentialBuilder::new()
                .with_min_delay(FIRST_DELAY)
                .with_max_delay(LONGEST_DELAY)
                .with_jitter()
                .without_max_times()
                .build();
            let result = loop {
                match attempt().await {
                    RetryResult::Done => break observe::Background::Done,
                    RetryResult::NotHeld => {
                        let since: &mut Instant = absent_since.get_or_insert_with(Instant::now);
                        if since.elapsed() >= patience {
                            break observe::Background::Done;
                        }
                    }
                    RetryResult::Again => absent_since = None,
                }
                let left = bound.saturating_sub(start.elapsed());
                if left.is_zero() {
                    break observe::Background::GaveUp;
                }
                tokio::time::sleep(delays.next().unwrap_or(LONGEST_DELAY).min(left)).await;
            };
            observe::background(operation, result, key.as_ref());
            drop((until_then, permit));
        };
        self.tasks.spawn_on(task, &runtime);
    }

    /// How much is under way.
    pub(super) fn count(&self) -> usize {
        self.tasks.len()
    }

    /// Waits until nothing is under way.
    pub(super) async fn drain(&self) {
        self.tasks.wait().await;
    }
}
