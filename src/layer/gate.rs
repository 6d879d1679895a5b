//! [`Gate`]: bounds how many deliveries run and wait, and wakes those that wait. It has the mode too.
//!
//! A layer shares one gate with its clones, its services and its handles.

use std::collections::HashMap;
use std::future::poll_fn;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};
use tokio_util::task::TaskTracker;
use tower_service::Service;

use super::mode::SharedMode;
use crate::key::DedupKey;

pub(super) struct Gate {
    pub(super) mode: SharedMode,
    /// The deliveries that run.
    pub(super) running: Bound,
    /// The deliveries that wait.
    pub(super) waiting: Bound,
    pub(super) waiters: Waiters,
    pub(super) tasks: TaskTracker,
}

/// Why a delivery may not run.
#[derive(Debug)]
pub(super) enum NotAdmitted<E> {
    /// Until the deadline, no permit was free, or the inner service was not ready.
    Full,
    /// The inner service returned an error instead of readiness.
    Inner(E),
}

impl Gate {
    pub(super) fn new() -> Self {
        let tasks = TaskTracker::new();
        // A closed tracker still takes tasks. `wait` returns only for a closed tracker.
        tasks.close();
        Self {
            mode: SharedMode::default(),
            running: Bound::new(1_024),
            waiting: Bound::new(256),
            waiters: Waiters::default(),
            tasks,
        }
    }

    /// Returns how many deliveries run and wait, of how many that may.
    pub(super) fn load(&self) -> String {
        let of = |bound: &Bound| format!("{} of {}", bound.held(), *bound.limit());
        format!("{} deliveries run, {} wait", of(&self.running), of(&self.waiting))
    }

    /// Waits for a permit to run, then for the readiness of `inner`.
    pub(super) async fn run_by<S, R>(
        &self,
        inner: &mut S,
        deadline: Instant,
    ) -> Result<Permit, NotAdmitted<S::Error>>
    where
        S: Service<R>,
    {
        let admitted = async {
            let permit = self.running.acquire().await.ok_or(NotAdmitted::Full)?;
            poll_fn(|cx| inner.poll_ready(cx)).await.map_err(NotAdmitted::Inner)?;
            Ok(permit)
        };
        timeout_at(deadline, admitted).await.unwrap_or(Err(NotAdmitted::Full))
    }
}

/// Replaces a ready service by a clone that is not ready. Readiness may be a permit of an inner limit,
/// and a delivery that waits must not hold one.
pub(super) fn release_readiness<S: Clone>(inner: &mut S) {
    let unready = inner.clone();
    drop(std::mem::replace(inner, unready));
}

/// A permit to run, or a place among the waiting deliveries. Dropped, it is free again.
pub(super) type Permit = OwnedSemaphorePermit;

/// A number of permits that may change while permits are held.
pub(super) struct Bound {
    permits: Arc<Semaphore>,
    limit: Mutex<usize>,
}

impl Bound {
    fn new(limit: usize) -> Self {
        Self { permits: Arc::new(Semaphore::new(limit)), limit: Mutex::new(limit) }
    }

    /// Changes the number of permits. Takes back none that is held.
    pub(super) fn resize(&self, limit: usize) {
        // No process reaches the number of permits that a semaphore can count.
        let limit = limit.min(Semaphore::MAX_PERMITS);
        let mut current = self.limit();
        if limit < *current {
            *current -= self.permits.forget_permits(*current - limit);
        } else {
            self.permits.add_permits(limit - *current);
            *current = limit;
        }
    }

    pub(super) fn held(&self) -> usize {
        self.limit().saturating_sub(self.permits.available_permits())
    }

    /// Returns a permit, if one is free.
    pub(super) fn try_acquire(&self) -> Option<Permit> {
        Arc::clone(&self.permits).try_acquire_owned().ok()
    }

    /// Waits for a permit. Never returns `None`, because the semaphore is never closed.
    async fn acquire(&self) -> Option<Permit> {
        Arc::clone(&self.permits).acquire_owned().await.ok()
    }

    fn limit(&self) -> MutexGuard<'_, usize> {
        self.limit.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The deliveries of this process that wait for a key. Other processes cannot wake them, so
/// they poll too.
#[derive(Default)]
pub(super) struct Waiters {
    by_key: Mutex<HashMap<DedupKey, Arc<Notify>>>,
    /// How many keys have waiters. At zero, `wake` takes no lock.
    count: AtomicUsize,
}

impl Waiters {
    /// Registers a waiter of `key` until the result is dropped.
    pub(super) fn wait_for(&self, key: &DedupKey) -> Waiter<'_> {
        let mut by_key = self.lock();
        let notify = Arc::clone(by_key.entry(key.clone()).or_default());
        self.count.store(by_key.len(), Ordering::Release);
        Waiter { waiters: self, key: key.clone(), notify }
    }

    /// Wakes the waiters of these keys: their delivery has ended.
    pub(super) fn wake<'k>(&self, keys: impl Iterator<Item = &'k DedupKey>) {
        if self.count.load(Ordering::Acquire) == 0 {
            return;
        }
        let by_key = self.lock();
        for key in keys {
            if let Some(notify) = by_key.get(key) {
                notify.notify_waiters();
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<DedupKey, Arc<Notify>>> {
        self.by_key.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(super) struct Waiter<'w> {
    waiters: &'w Waiters,
    key: DedupKey,
    notify: Arc<Notify>,
}

impl Waiter<'_> {
    pub(super) fn notify(&self) -> Arc<Notify> {
        Arc::clone(&self.notify)
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        let mut by_key = self.waiters.lock();
        drop(std::mem::take(&mut self.notify));
        // The last waiter removes the entry: the map holds the only handle that is left.
        if by_key.get(&self.key).is_some_and(|notify| Arc::strong_count(notify) == 1) {
            by_key.remove(&self.key);
            self.waiters.count.store(by_key.len(), Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn bound_that_grows_admits_more_at_once() {
        let bound = Bound::new(0);
        let mut waits = std::pin::pin!(bound.acquire());
        assert!(futures_util::poll!(waits.as_mut()).is_pending());
        bound.resize(2);
        let held = [waits.await, bound.try_acquire()];
        assert!(held.iter().all(Option::is_some) && bound.try_acquire().is_none());
        bound.resize(usize::MAX);
        assert_eq!(bound.held(), 2);
    }

    fn key(id: &str) -> DedupKey {
        DedupKey::new("test", id).unwrap()
    }

    #[tokio::test]
    async fn end_of_a_delivery_wakes_the_waiters_of_its_keys_only() {
        let waiters = Waiters::default();
        let [a, b] = [key("a"), key("b")];
        waiters.wake([&a].into_iter());
        let waiter = waiters.wait_for(&a);
        let notify = waiter.notify();
        let mut woken = std::pin::pin!(notify.notified());
        woken.as_mut().enable();
        waiters.wake([&b].into_iter());
        assert!(futures_util::poll!(woken.as_mut()).is_pending());
        waiters.wake([&b, &a].into_iter());
        assert!(futures_util::poll!(woken).is_ready());
    }

    #[test]
    fn last_waiter_of_a_key_removes_its_entry() {
        let waiters = Waiters::default();
        let left = || (waiters.lock().len(), waiters.count.load(Ordering::Acquire));
        let [first, second] = [(); 2].map(|()| waiters.wait_for(&key("a")));
        let other = waiters.wait_for(&key("b"));
        assert_eq!(left(), (2, 2));
        drop(first);
        assert_eq!(left(), (2, 2));
        drop(second);
        assert_eq!(left(), (1, 1));
        drop(other);
        assert_eq!(left(), (0, 0));
    }
}
