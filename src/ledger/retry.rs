//! Background writes: calls that continue after the answer has left, bounded in number and in time.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBuilder};
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;
use tokio_util::task::TaskTracker;

use crate::adapter::Released;
use crate::error::Error;
use crate::key::DedupKey;
use crate::observe;

const FIRST_DELAY: Duration = Duration::from_millis(50);
const LONGEST_DELAY: Duration = Duration::from_secs(5);

/// The background writes of one kind.
pub(super) struct Background {
    tasks: TaskTracker,
    slots: Arc<Semaphore>,
}

/// A call to repeat.
pub(super) struct RetryJob {
    /// For logs and metrics.
    pub(super) operation: &'static str,
    /// For logs.
    pub(super) key: Option<DedupKey>,
    /// After this time the job is given up.
    pub(super) bound: Duration,
    /// After this time of [`RetryResult::NotHeld`] the job is done.
    pub(super) not_held_grace: Duration,
}

/// The result of one attempt.
pub(super) enum RetryResult {
    Done,
    /// The store does not hold what is to be released: the claim never arrived, or is on its way.
    NotHeld,
    Again,
}

impl From<Result<Vec<Released>, Error>> for RetryResult {
    fn from(replies: Result<Vec<Released>, Error>) -> Self {
        match replies {
            Ok(all) if all.iter().all(|one| *one == Released::Released) => Self::Done,
            Ok(_) => Self::NotHeld,
            Err(_) => Self::Again,
        }
    }
}

impl Background {
    /// Has slots for `most` jobs at once.
    pub(super) fn new(most: usize) -> Self {
        let tasks = TaskTracker::new();
        // A closed tracker still takes tasks; `wait` ends only on a closed one.
        tasks.close();
        Self { tasks, slots: Arc::new(Semaphore::new(most)) }
    }

    /// Reserves a slot for a job that must not be refused later.
    pub(super) fn reserve(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.slots).try_acquire_owned().ok()
    }

    /// Repeats `attempt` with growing pauses until it is done or its bound has passed. Then drops
    /// `guard`.
    ///
    /// Without a runtime or a free slot, the job is refused, which is logged.
    pub(super) fn repeat<F, G>(
        &self,
        job: RetryJob,
        attempt: impl FnMut() -> F + Send + 'static,
        guard: G,
    ) where
        F: Future<Output = RetryResult> + Send,
        G: Send + 'static,
    {
        match self.reserve() {
            Some(slot) => self.repeat_in(slot, job, attempt, guard),
            None => refuse(&job),
        }
    }

    /// Does the same as [`repeat`](Self::repeat), in a reserved slot.
    pub(super) fn repeat_in<F, G>(
        &self,
        slot: OwnedSemaphorePermit,
        job: RetryJob,
        mut attempt: impl FnMut() -> F + Send + 'static,
        guard: G,
    ) where
        F: Future<Output = RetryResult> + Send,
        G: Send + 'static,
    {
        let Ok(runtime) = Handle::try_current() else { return refuse(&job) };
        let task = async move {
            let start = Instant::now();
            let mut not_held_since = None;
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
                        let since: &mut Instant = not_held_since.get_or_insert_with(Instant::now);
                        if since.elapsed() >= job.not_held_grace {
                            break observe::Background::Done;
                        }
                    }
                    RetryResult::Again => not_held_since = None,
                }
                let left = job.bound.saturating_sub(start.elapsed());
                if left.is_zero() {
                    break observe::Background::GaveUp;
                }
                tokio::time::sleep(delays.next().unwrap_or(LONGEST_DELAY).min(left)).await;
            };
            observe::background(job.operation, result, job.key.as_ref());
            drop((guard, slot));
        };
        self.tasks.spawn_on(task, &runtime);
    }

    /// Returns the number of jobs.
    pub(super) fn count(&self) -> usize {
        self.tasks.len()
    }

    /// Waits until there is no job.
    pub(super) async fn drain(&self) {
        self.tasks.wait().await;
    }
}

fn refuse(job: &RetryJob) {
    observe::background(job.operation, observe::Background::Refused, job.key.as_ref());
}
