//! Keys that this process knows more of than the store does yet.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::key::DedupKey;

#[derive(Default)]
pub(super) struct Pending {
    /// Each with how often it was added.
    keys: Mutex<HashMap<DedupKey, usize>>,
    /// How many there are, so that nobody locks for nothing.
    count: AtomicUsize,
}

impl Pending {
    /// Splits off the keys that are pending: the rest, if it is not all of them.
    pub(super) fn rest(&self, keys: &[DedupKey]) -> Option<Vec<DedupKey>> {
        if self.is_empty() {
            return None;
        }
        let pending = self.lock();
        let rest: Vec<DedupKey> =
            keys.iter().filter(|key| !pending.contains_key(*key)).cloned().collect();
        (rest.len() < keys.len()).then_some(rest)
    }

    pub(super) fn contains(&self, key: &DedupKey) -> bool {
        !self.is_empty() && self.lock().contains_key(key)
    }

    fn is_empty(&self) -> bool {
        self.count.load(Ordering::Acquire) == 0
    }

    /// Adds keys, until the answer is dropped.
    pub(super) fn add(self: &Arc<Self>, keys: Arc<[DedupKey]>) -> StillPending {
        let mut set = self.lock();
        for key in keys.iter() {
            *set.entry(key.clone()).or_default() += 1;
        }
        self.count.store(set.len(), Ordering::Release);
        drop(set);
        StillPending { pending: Arc::clone(self), keys }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<DedupKey, usize>> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(super) struct StillPending {
    pending: Arc<Pending>,
    keys: Arc<[DedupKey]>,
}

impl Drop for StillPending {
    fn drop(&mut self) {
        let mut set = self.pending.lock();
        for key in self.keys.iter() {
            if let Some(times) = set.get_mut(key) {
                *times -= 1;
                if *times == 0 {
                    set.remove(key);
                }
            }
        }
        self.pending.count.store(set.len(), Ordering::Release);
    }
}
