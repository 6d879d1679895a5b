//! Keys with unfinished work in this process, which the store does not know of yet.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::adapter::contract::StoredData;
use crate::key::{DedupKey, List};

#[derive(Default)]
pub(super) struct Pending {
    keys: Mutex<HashMap<DedupKey, PendingKey>>,
    /// The number of keys, so that an empty set needs no lock.
    count: AtomicUsize,
    /// How often keys were removed.
    removals: AtomicUsize,
}

#[derive(Default)]
struct PendingKey {
    /// How often the key was added.
    times: usize,
    /// The data to store with the key.
    stored: Arc<StoredData>,
}

/// A pending key, and the data to store with it.
type PendingData = (DedupKey, Arc<StoredData>);

impl Pending {
    /// Splits keys into those that are not pending and those that are, each part in the given order.
    pub(super) fn split(&self, mut keys: List<DedupKey>) -> (List<DedupKey>, Vec<PendingData>) {
        let mut found = Vec::new();
        if !self.is_empty() {
            let pending = self.lock();
            keys.retain(|key| {
                let entry = pending.get(key);
                found.extend(entry.map(|entry| (key.clone(), Arc::clone(&entry.stored))));
                entry.is_none()
            });
        }
        (keys, found)
    }

    pub(super) fn contains(&self, key: &DedupKey) -> bool {
        !self.is_empty() && self.lock().contains_key(key)
    }

    /// Returns a number that changes whenever keys are removed. If the number is unchanged and a key is
    /// absent now, the key was absent all the time.
    pub(super) fn removals(&self) -> usize {
        self.removals.load(Ordering::Acquire)
    }

    fn is_empty(&self) -> bool {
        self.count.load(Ordering::Acquire) == 0
    }

    /// Adds keys until the guard is dropped.
    pub(super) fn add(self: &Arc<Self>, keys: Arc<[DedupKey]>) -> PendingGuard {
        self.add_with(keys, |_| None)
    }

    /// Adds keys until the guard is dropped, with the data to store with each.
    pub(super) fn add_with(
        self: &Arc<Self>,
        keys: Arc<[DedupKey]>,
        stored_data_for: impl Fn(&DedupKey) -> Option<StoredData>,
    ) -> PendingGuard {
        let mut set = self.lock();
        for key in keys.iter() {
            let entry = set.entry(key.clone()).or_default();
            entry.times += 1;
            if let Some(stored) = stored_data_for(key) {
                entry.stored = Arc::new(stored);
            }
        }
        self.count.store(set.len(), Ordering::Release);
        drop(set);
        PendingGuard { pending: Arc::clone(self), keys }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<DedupKey, PendingKey>> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Removes its keys when it is dropped.
pub(super) struct PendingGuard {
    pending: Arc<Pending>,
    keys: Arc<[DedupKey]>,
}

impl Drop for PendingGuard {
    fn drop(&mut self) {
        let mut set = self.pending.lock();
        for key in self.keys.iter() {
            if let Some(entry) = set.get_mut(key) {
                entry.times -= 1;
                if entry.times == 0 {
                    set.remove(key);
                }
            }
        }
        // `removals` changes before `count`: a reader that sees an empty set must see that it changed.
        self.pending.removals.fetch_add(1, Ordering::AcqRel);
        self.pending.count.store(set.len(), Ordering::Release);
    }
}
