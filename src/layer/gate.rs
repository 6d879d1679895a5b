//! The bounds of a layer: how many deliveries run, how many wait, and who wakes them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio_util::task::TaskTracker;

use crate::key::DedupKey;

pub(super) struct Gate {
    max_running: usize,
    max_waiting: usize,
    pub(super) running: Arc<Semaphore>,
    pub(super) waiting: Arc<Semaphore>,
    pub(super) waiters: Waiters,
    pub(super) tasks: TaskTracker,
}

impl Gate {
    /// Bounds beyond what a semaphore can count are as good as none.
    pub(super) fn new(max_running: usize, max_waiting: usize) -> Self {
        let max_running = max_running.min(Semaphore::MAX_PERMITS);
        let max_waiting = max_waiting.min(Semaphore::MAX_PERMITS);
        let tasks = TaskTracker::new();
        // A closed tracker still takes tasks; being closed is what lets a drain end.
        tasks.close();
        Self {
            max_running,
            max_waiting,
            running: Arc::new(Semaphore::new(max_running)),
            waiting: Arc::new(Semaphore::new(max_waiting)),
            waiters: Waiters::default(),
            tasks,
        }
    }

    pub(super) fn max_running(&self) -> usize {
        self.max_running
    }

    pub(super) fn max_waiting(&self) -> usize {
        self.max_waiting
    }

    pub(super) fn running(&self) -> usize {
        self.max_running - self.running.available_permits()
    }

    pub(super) fn waiting(&self) -> usize {
        self.max_waiting - self.waiting.available_permits()
    }

    pub(super) async fn drain(&self) {
        self.tasks.wait().await;
    }

    pub(super) fn permit_to_run(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.running).try_acquire_owned().ok()
    }
}

/// Who waits for which key in this process. Other processes are not heard of: a waiter polls too.
#[derive(Default)]
pub(super) struct Waiters {
    by_key: Mutex<HashMap<DedupKey, Arc<Notify>>>,
    /// How many keys are waited for, so that nobody locks for nothing.
    count: AtomicUsize,
}

impl Waiters {
    /// Waits for `key` from now on, until the answer is dropped.
    pub(super) fn wait_for(&self, key: &DedupKey) -> Waiter<'_> {
        let mut by_key = self.lock();
        let notify = Arc::clone(by_key.entry(key.clone()).or_default());
        self.count.store(by_key.len(), Ordering::Release);
        Waiter { waiters: self, key: key.clone(), notify: Some(notify) }
    }

    /// A delivery of these keys has ended, one way or the other.
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
    /// Taken when dropped.
    notify: Option<Arc<Notify>>,
}

impl Waiter<'_> {
    pub(super) fn notify(&self) -> Arc<Notify> {
        self.notify.clone().unwrap_or_default()
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        let mut by_key = self.waiters.lock();
        drop(self.notify.take());
        // The last one out: the map holds the only handle that is left.
        if by_key.get(&self.key).is_some_and(|notify| Arc::strong_count(notify) == 1) {
            by_key.remove(&self.key);
            self.waiters.count.store(by_key.len(), Ordering::Release);
        }
    }
}
