//! Background writes: calls that continue after the answer has left, bounded in number and in time.

use std::sync::Arc;
use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBuilder};
use futures_util::future::BoxFuture;
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;
use tokio_util::task::TaskTracker;

use crate::adapter::contract::{CallTerms, DedupAdapter};
use crate::error::Error;
use crate::key::DedupKey;
use crate::observe;

const FIRST_DELAY: Duration = Duration::from_millis(50);
const LONGEST_DELAY: Duration = Duration::from_secs(5);

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
    /// Whether the call is repeated after this error.
    pub(super) repeats: fn(&Error) -> bool,
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

    /// Repeats `attempt` with growing pauses until it succeeds, its bound has passed, or an error ends it.
    /// Then drops `guard`.
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
        A: for<'j> Fn(&'j RetryJob) -> BoxFuture<'j, Result<(), Error>> + Send + 'static,
        G: Send + 'static,
    {
        let Some(slot) = slot.or_else(|| self.reserve()) else { return refuse(&job) };
        let Ok(runtime) = Handle::try_current() else { return refuse(&job) };
        let pending = job.keys.first().map(observe::pending_write);
        let task = async move {
            let start = Instant::now();
            let mut delays = ExponentialBuilder::new()
                .with_min_delay(FIRST_DELAY)
                .with_max_delay(LONGEST_DELAY)
                .with_jitter()
                .without_max_times()
                .build();
            let result = loop {
                let Err(error) = attempt(&job).await else { break observe::Background::Done };
                let left = job.bound.saturating_sub(start.elapsed());
                if left.is_zero() || !(job.repeats)(&error) {
                    break observe::Background::GaveUp(error);
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
