//! Work that continues after the answer has left. [`Background`]: calls that are repeated, bounded
//! in number and in time.
//! [`Pending`]: keys with unfinished work in this process, which the store does not know of yet.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;
use tokio_util::task::TaskTracker;

use super::call::{self, Calls};
use super::contract::LedgerKind;
use super::held::{HeldLease, report};
use super::times::delays;
use crate::adapter::KeyedTerms;
use crate::adapter::contract::Token;
use crate::error::{StoreError, StoreErrorKind};
use crate::key::{DedupKey, List};
use crate::observe::{self, Meters};

const FIRST_DELAY: Duration = Duration::from_millis(50);
const LONGEST_DELAY: Duration = Duration::from_secs(5);

/// How many calls of a job run at once, each with its whole bound. A store that writes one key
/// after the other and waits 100 ms for a replica takes 1.6 s. With more, the last keys would never
/// have their turn.
const MOST_IN_BACKGROUND: usize = 16;

/// After this time, a write is not repeated. Until then the lease of a completion is renewed too,
/// because a store may take renewals and no completions. A release under a lease is repeated as
/// long, however short the lease is: the claim may reach the store after it, and would hold the key
/// for a further lease.
const BOUND: Duration = Duration::from_secs(600);

/// Jobs of each kind at once. On arrival, a release loses an event if it finds no slot; under a
/// lease, it leaves its key to the lease.
const MOST_COMPLETIONS: usize = 16_384;
const MOST_RELEASES: usize = 4_096;
const MOST_RELEASES_ON_ARRIVAL: usize = 16_384;

/// Runs jobs in the background: each repeats its calls until they succeed.
pub(super) struct Background {
    pub(super) tasks: TaskTracker,
    completions: Arc<Semaphore>,
    /// Separate from `completions`, because an outage leads to many releases. A refused release
    /// blocks a key for a lease; a refused completion runs an event twice.
    releases: Arc<Semaphore>,
}

/// Calls of one kind, one for each key.
pub(super) struct RetryJob {
    pub(super) write: Write,
    pub(super) calls: Calls,
    pub(super) keys: List<KeyedTerms>,
}

/// The kind of a background write.
pub(super) enum Write {
    Claim,
    Complete(Arc<HeldLease>),
    Release,
}

impl RetryJob {
    /// Returns the name of the calls in logs and metrics, and the record of their success.
    fn operation(&self) -> (&'static str, fn(&Meters, &DedupKey)) {
        match self.write {
            Write::Claim => ("claim", observe::records::background_claimed),
            Write::Complete(_) => ("complete", observe::records::background_completed),
            Write::Release => ("release", observe::records::background_released),
        }
    }

    /// Returns `true` if the job is repeated after this error. A release that ends early may lose
    /// an event, and most errors that seem to last do not: a pooler without prepared statements has
    /// one server of many.
    fn repeats(&self, error: &StoreError) -> bool {
        !matches!(self.write, Write::Release) || error.kind() != StoreErrorKind::Unsupported
    }

    /// Makes the calls, a few at a time: a key that the store refuses delays no other key. After
    /// `end`, no call follows an error. Returns the first error.
    async fn attempt(&self, end: Instant) -> Option<StoreError> {
        let (calls, mut failed) = (&self.calls, None);
        for keys in self.keys.chunks(MOST_IN_BACKGROUND) {
            if failed.is_some() && Instant::now() >= end {
                break;
            }
            let error = match &self.write {
                Write::Claim => call::error(calls.claim(keys).await),
                Write::Release => call::error(calls.release(keys).await),
                Write::Complete(lease) => {
                    let replies = calls.complete(keys).await;
                    report(keys, &replies, lease);
                    call::error(replies)
                }
            };
            failed = failed.or(error);
        }
        failed
    }
}

impl Background {
    pub(super) fn new(kind: LedgerKind) -> Self {
        let most_releases = match kind {
            LedgerKind::OnArrival => MOST_RELEASES_ON_ARRIVAL,
            LedgerKind::Lease | LedgerKind::Transactional => MOST_RELEASES,
        };
        let tasks = TaskTracker::new();
        // A closed tracker still takes tasks; `wait` ends only on a closed one.
        tasks.close();
        let [completions, releases] =
            [MOST_COMPLETIONS, most_releases].map(|most| Arc::new(Semaphore::new(most)));
        Self { tasks, completions, releases }
    }

    /// Reserves a slot for a release that must not be refused later.
    pub(super) fn reserve(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.releases).try_acquire_owned().ok()
    }

    /// Repeats the calls with growing pauses until they succeed, their bound has passed, or an
    /// error ends the job. Then drops `guard`.
    ///
    /// Reserves a slot unless the caller has one. Without a runtime or a free slot, the job is
    /// refused, which is logged.
    pub(super) fn repeat(
        &self,
        slot: Option<OwnedSemaphorePermit>,
        job: RetryJob,
        guard: impl Send + 'static,
    ) {
        // Calls without a key reach no store.
        let Some(KeyedTerms { key, .. }) = job.keys.first() else { return };
        let (operation, report_done) = job.operation();
        let slots = match job.write {
            Write::Complete(_) => &self.completions,
            Write::Claim | Write::Release => &self.releases,
        };
        let slot = slot.or_else(|| Arc::clone(slots).try_acquire_owned().ok());
        let runtime = Handle::try_current();
        let (Some(slot), Ok(runtime)) = (slot, runtime) else {
            return observe::records::background_refused(&job.calls.meters, key, operation);
        };
        let pending = job.calls.meters.pending_write();
        let task = async move {
            let end = Instant::now() + BOUND;
            let mut delays = delays(FIRST_DELAY, LONGEST_DELAY, 2.0);
            let failed = loop {
                let Some(error) = job.attempt(end).await else { break None };
                let left = end.saturating_duration_since(Instant::now());
                if left.is_zero() || !job.repeats(&error) {
                    break Some(error);
                }
                tokio::time::sleep(delays.next().unwrap_or(LONGEST_DELAY).min(left)).await;
            };
            let (meters, key) = (&job.calls.meters, &job.keys[0].key);
            match failed {
                None => report_done(meters, key),
                Some(error) => {
                    observe::records::background_failed(meters, key, operation, &error);
                }
            }
            drop((guard, slot, pending));
        };
        self.tasks.spawn_on(task, &runtime);
    }
}

/// Keys, each with what every unfinished work knows of it.
pub(super) struct Pending<T = ()> {
    keys: Mutex<ByKey<T>>,
    /// The number of keys, so that an empty set needs no lock.
    count: AtomicUsize,
    /// How often keys were removed.
    removals: AtomicUsize,
}

/// The token of its delivery identifies a work.
type ByKey<T> = HashMap<DedupKey, Vec<(Token, T)>>;

impl<T> Default for Pending<T> {
    fn default() -> Self {
        Self { keys: Mutex::default(), count: AtomicUsize::new(0), removals: AtomicUsize::new(0) }
    }
}

impl<T: Clone> Pending<T> {
    /// Removes the keys that are pending. Returns them with their positions, each with what its
    /// latest work knows.
    pub(super) fn split(&self, keys: &mut List<KeyedTerms>) -> Vec<(usize, KeyedTerms, T)> {
        let mut found = Vec::new();
        if !self.is_empty() {
            let (pending, mut at) = (self.lock(), 0);
            keys.retain(|it| {
                let latest = pending.get(&it.key).and_then(|works| works.last());
                found.extend(latest.map(|(_, known)| (at, it.clone(), known.clone())));
                at += 1;
                latest.is_none()
            });
        }
        found
    }

    /// Returns `true` if a work has the key and is such.
    pub(super) fn any(&self, key: &DedupKey, is_such: impl Fn(&Token, &T) -> bool) -> bool {
        let is_such = |(work, known): &(Token, T)| is_such(work, known);
        !self.is_empty() && self.lock().get(key).is_some_and(|works| works.iter().any(is_such))
    }

    /// Returns a number that changes whenever keys are removed. If the number is unchanged and a
    /// key is absent now, the key was absent all the time.
    pub(super) fn removals(&self) -> usize {
        self.removals.load(Ordering::Acquire)
    }

    fn is_empty(&self) -> bool {
        self.count.load(Ordering::Acquire) == 0
    }

    /// Adds the keys of a work, each with what is known of it, until the guard is dropped.
    pub(super) fn add(
        self: &Arc<Self>,
        known: impl Iterator<Item = (DedupKey, T)>,
        work: Token,
    ) -> PendingGuard<T> {
        let (mut pending, mut keys) = (self.lock(), List::new());
        for (key, known) in known {
            pending.entry(key.clone()).or_default().push((work, known));
            keys.push(key);
        }
        self.count.store(pending.len(), Ordering::Release);
        drop(pending);
        PendingGuard { pending: Arc::clone(self), keys, work }
    }
}

impl<T> Pending<T> {
    fn lock(&self) -> MutexGuard<'_, ByKey<T>> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Removes its keys when it is dropped.
pub(super) struct PendingGuard<T = ()> {
    pending: Arc<Pending<T>>,
    keys: List<DedupKey>,
    work: Token,
}

impl<T> Drop for PendingGuard<T> {
    fn drop(&mut self) {
        let mut pending = self.pending.lock();
        for key in &self.keys {
            if let Some(works) = pending.get_mut(key) {
                works.retain(|(work, _)| *work != self.work);
                if works.is_empty() {
                    pending.remove(key);
                }
            }
        }
        // `removals` changes before `count`: a reader that sees an empty set must see that it
        // changed.
        self.pending.removals.fetch_add(1, Ordering::AcqRel);
        self.pending.count.store(pending.len(), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ended_work_leaves_nothing_behind() {
        let (pending, key) = (Arc::new(Pending::default()), DedupKey::new("n", "a").unwrap());
        let add = |token: [u8; 16]| pending.add([(key.clone(), ())].into_iter(), token.into());
        let (first, second) = (add([1; 16]), add([2; 16]));
        drop(first);
        assert!(pending.any(&key, |_, ()| true));
        drop(second);
        assert!(pending.is_empty() && pending.lock().is_empty());
    }
}
