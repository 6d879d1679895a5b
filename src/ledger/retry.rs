//! Background writes: calls that continue after the answer has left, bounded in number and in time.

use std::sync::Arc;
use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBuilder};
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;
use tokio_util::task::TaskTracker;

use super::call;
use super::held::HeldLease;
use super::renewal::report;
use crate::adapter::contract::{CallTerms, DedupAdapter};
use crate::error::{StoreError, StoreErrorKind};
use crate::key::DedupKey;
use crate::observe;

const FIRST_DELAY: Duration = Duration::from_millis(50);
const LONGEST_DELAY: Duration = Duration::from_secs(5);

/// How many calls of a job run at once, each with its whole bound. A store that writes one key after the other
/// and waits 100 ms for a replica takes 1.6 s. With more, the last keys would never have their turn.
const MOST_IN_BACKGROUND: usize = 16;

/// After this time, a write is not repeated. Until then the lease of a completion is renewed too, because a store
/// may take renewals and no completions. A release under a lease is repeated as long, however short the lease is: the
/// claim may reach the store after it, and would hold the key for a further lease.
const BOUND: Duration = Duration::from_secs(600);

/// Runs jobs in the background: each repeats its calls until they succeed.
pub(super) struct RetryPool {
    tasks: TaskTracker,
    slots: Arc<Semaphore>,
}

/// Calls of one kind, one for each key.
pub(super) struct RetryJob {
    pub(super) write: Write,
    pub(super) adapter: Arc<dyn DedupAdapter>,
    pub(super) keys: Arc<[DedupKey]>,
    pub(super) terms: CallTerms,
    /// The bound of one call.
    pub(super) store_timeout: Duration,
}

/// The kind of a background write.
pub(super) enum Write {
    Claim,
    /// A delivery that ran unprotected has claimed nothing.
    Complete {
        lease: Arc<HeldLease>,
        is_claimed: bool,
    },
    Release,
}

impl RetryJob {
    /// Returns the name of the calls in logs and metrics.
    fn operation(&self) -> &'static str {
        match self.write {
            Write::Claim => "claim",
            Write::Complete { .. } => "complete",
            Write::Release => "release",
        }
    }

    fn report_done(&self) {
        let report = match self.write {
            Write::Claim => observe::background_claimed,
            Write::Complete { .. } => observe::background_completed,
            Write::Release => observe::background_released,
        };
        report(&self.keys[0]);
    }

    /// Returns `true` if the job is repeated after this error. A release that ends early may lose an event, and
    /// most errors that seem to last do not: a pooler without prepared statements has one server of many.
    fn repeats(&self, error: &StoreError) -> bool {
        !matches!(self.write, Write::Release) || error.kind() != StoreErrorKind::Unsupported
    }

    /// Makes the calls, a few at a time: a key that the store refuses delays no other key. After `end`, no call
    /// follows an error. Returns an error after which the job is repeated, if there is one, or else another error.
    async fn attempt(&self, end: Instant) -> Result<(), StoreError> {
        let (adapter, terms, bound) = (&*self.adapter, &self.terms, self.store_timeout);
        let mut errors = Vec::new();
        for keys in self.keys.chunks(MOST_IN_BACKGROUND) {
            if !errors.is_empty() && Instant::now() >= end {
                break;
            }
            errors.extend(match &self.write {
                Write::Claim => call::errors(call::claim(adapter, keys, terms, bound).await),
                Write::Release => call::errors(call::release(adapter, keys, terms, bound).await),
                Write::Complete { lease, is_claimed } => {
                    let replies = call::complete(adapter, keys, terms, bound).await;
                    report(keys, &replies, *is_claimed, lease);
                    call::errors(replies)
                }
            });
        }
        let repeated = errors.iter().position(|error| self.repeats(error)).unwrap_or_default();
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
    pub(super) fn repeat(
        &self,
        slot: Option<OwnedSemaphorePermit>,
        job: RetryJob,
        guard: impl Send + 'static,
    ) {
        // Calls without a key reach no store.
        let Some(key) = job.keys.first() else { return };
        let operation = job.operation();
        let (slot, runtime) = (slot.or_else(|| self.reserve()), Handle::try_current());
        let (Some(slot), Ok(runtime)) = (slot, runtime) else {
            return observe::background_refused(key, operation);
        };
        let pending = observe::pending_write(key);
        let task = async move {
            let end = Instant::now() + BOUND;
            let mut delays = ExponentialBuilder::new()
                .with_min_delay(FIRST_DELAY)
                .with_max_delay(LONGEST_DELAY)
                .with_jitter()
                .without_max_times()
                .build();
            let ended = loop {
                let Err(error) = job.attempt(end).await else { break Ok(()) };
                let left = end.saturating_duration_since(Instant::now());
                if left.is_zero() || !job.repeats(&error) {
                    break Err(error);
                }
                tokio::time::sleep(delays.next().unwrap_or(LONGEST_DELAY).min(left)).await;
            };
            match ended {
                Ok(()) => job.report_done(),
                Err(error) => observe::background_failed(&job.keys[0], operation, &error),
            }
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
