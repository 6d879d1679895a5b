//! Background writes: calls that continue after the answer has left, bounded in number and in time.

use std::sync::Arc;
use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBuilder};
use futures_util::future::BoxFuture;
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;
use tokio_util::task::TaskTracker;

use crate::adapter::{CallTerms, DedupAdapter, Released};
use crate::error::Error;
use crate::key::DedupKey;
use crate::observe;

const FIRST_DELAY: Duration = Duration::from_millis(50);
const LONGEST_DELAY: Duration = Duration::from_secs(5);
/// Lost bytes are sent again after pauses that double, up to this one on Linux (`TCP_RTO_MAX`).
const LONGEST_RETRANSMISSION: Duration = Duration::from_secs(120);

/// Runs jobs in the background: calls of one kind, each repeated until it succeeds.
pub(super) struct RetryPool {
    tasks: TaskTracker,
    slots: Arc<Semaphore>,
}

/// A call to repeat.
pub(super) struct RetryJob {
    /// For logs and metrics.
    pub(super) operation: &'static str,
    pub(super) adapter: Arc<dyn DedupAdapter>,
    pub(super) keys: Arc<[DedupKey]>,
    pub(super) terms: CallTerms,
    /// The bound of one attempt.
    pub(super) store_timeout: Duration,
    /// The bound of the job.
    pub(super) bound: Duration,
    /// After this time of [`RetryResult::NotHeld`] the job is done; see [`grace_after`](Self::grace_after).
    /// `None` for a job that is not a release, and never has this result.
    pub(super) not_held_grace: Option<Duration>,
}

impl RetryJob {
    /// Returns how long a store is asked again that could not be reached for the time of `outage`.
    ///
    /// The bytes of a claim may still be on their way when new connections work again. They arrive within
    /// the time that the outage took, because the pauses between retransmissions double.
    fn grace_after(&self, outage: Duration) -> Duration {
        match self.not_held_grace {
            Some(grace) if !grace.is_zero() && !outage.is_zero() => {
                grace.max(outage.min(LONGEST_RETRANSMISSION) + 2 * LONGEST_DELAY)
            }
            grace => grace.unwrap_or_default(),
        }
    }
}

/// The result of one attempt.
pub(super) enum RetryResult {
    Done,
    /// The store does not hold every key to release: a claim was not granted, or has not arrived yet.
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

impl RetryPool {
    /// Makes a pool for at most `most` jobs at once.
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
    /// Reserves a slot unless the caller has one. Without a runtime or a free slot, the job is refused,
    /// which is logged.
    pub(super) fn repeat<A, G>(
        &self,
        slot: Option<OwnedSemaphorePermit>,
        job: RetryJob,
        guard: G,
        attempt: A,
    ) where
        A: for<'j> Fn(&'j RetryJob) -> BoxFuture<'j, RetryResult> + Send + 'static,
        G: Send + 'static,
    {
        let Some(slot) = slot.or_else(|| self.reserve()) else { return refuse(&job) };
        let Ok(runtime) = Handle::try_current() else { return refuse(&job) };
        let pending = job.keys.first().map(observe::pending_write);
        let task = async move {
            let start = Instant::now();
            let (mut not_held_since, mut outage) = (None, Duration::ZERO);
            let mut delays = ExponentialBuilder::new()
                .with_min_delay(FIRST_DELAY)
                .with_max_delay(LONGEST_DELAY)
                .with_jitter()
                .without_max_times()
                .build();
            let result = loop {
                match attempt(&job).await {
                    RetryResult::Done => break observe::Background::Done,
                    RetryResult::NotHeld => {
                        let since: &mut Instant = not_held_since.get_or_insert_with(Instant::now);
                        if since.elapsed() >= job.grace_after(outage) {
                            break observe::Background::Done;
                        }
                    }
                    RetryResult::Again => {
                        (not_held_since, outage) = (None, start.elapsed() + job.store_timeout);
                    }
                }
                let left = job.bound.saturating_sub(start.elapsed());
                if left.is_zero() {
                    break observe::Background::GaveUp;
                }
                tokio::time::sleep(delays.next().unwrap_or(LONGEST_DELAY).min(left)).await;
            };
            observe::background(job.operation, result, job.keys.first());
            drop((guard, slot, pending));
        };
        self.tasks.spawn_on(task, &runtime);
    }
}

/// The writes of a ledger that continue in the background.
#[derive(Debug, Clone, Default)]
pub struct PendingWrites(Arc<[TaskTracker]>);

impl PendingWrites {
    pub(super) fn of(pools: &[&RetryPool]) -> Self {
        Self(pools.iter().map(|pool| pool.tasks.clone()).collect())
    }

    /// Returns the number of background writes.
    #[must_use]
    pub fn count(&self) -> usize {
        self.0.iter().map(TaskTracker::len).sum()
    }

    /// Waits until there is no background write.
    pub async fn drain(&self) {
        for tasks in &*self.0 {
            tasks.wait().await;
        }
    }
}

fn refuse(job: &RetryJob) {
    observe::background(job.operation, observe::Background::Refused, job.keys.first());
}
