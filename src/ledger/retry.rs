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

/// How many calls of a job run at once, each with its whole bound. A store that writes one key after the other
/// and waits 100 ms for a replica takes 1.6 s. With more, the last keys would never have their turn.
const MOST_IN_BACKGROUND: usize = 16;

/// Runs jobs in the background: each repeats its calls until they succeed.
pub(super) struct RetryPool {
    tasks: TaskTracker,
    slots: Arc<Semaphore>,
}

/// Calls of one kind, one for each key.
pub(super) struct RetryJob {
    /// For logs and metrics.
    pub(super) operation: &'static str,
    pub(super) adapter: Arc<dyn DedupAdapter>,
    pub(super) keys: Arc<[DedupKey]>,
    pub(super) terms: CallTerms,
    /// The bound of one call.
    pub(super) store_timeout: Duration,
    /// The bound of the job.
    pub(super) bound: Duration,
    /// Whether the calls are repeated after this error.
    pub(super) repeats: fn(&Error) -> bool,
}

/// The errors of the calls for some keys of a job.
pub(super) type Errors<'j> = BoxFuture<'j, Vec<Error>>;

impl RetryJob {
    /// Makes the calls, a few at a time: a key that the store refuses delays no other key. Returns an error after
    /// which the job is repeated, if there is one, or else another error.
    async fn attempt(
        &self,
        calls: impl for<'j> Fn(&'j Self, &'j [DedupKey]) -> Errors<'j>,
    ) -> Result<(), Error> {
        let mut errors = Vec::new();
        for keys in self.keys.chunks(MOST_IN_BACKGROUND) {
            errors.extend(calls(self, keys).await);
        }
        let repeated = errors.iter().position(self.repeats).unwrap_or_default();
        if errors.is_empty() { Ok(()) } else { Err(errors.swap_remove(repeated)) }
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

    /// Repeats the calls with growing pauses until they succeed, their bound has passed, or an error ends the job.
    /// Then drops `guard`.
    ///
    /// Reserves a slot unless the caller has one. Without a runtime or a free slot, the job is refused,
    /// which is logged.
    pub(super) fn repeat<A, G>(
        &self,
        slot: Option<OwnedSemaphorePermit>,
        job: RetryJob,
        guard: G,
        calls: A,
    ) where
        A: for<'j> Fn(&'j RetryJob, &'j [DedupKey]) -> Errors<'j> + Send + Sync + 'static,
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
                let Err(error) = job.attempt(&calls).await else { break observe::Background::Done };
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
