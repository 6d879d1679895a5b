//! Keys that this process knows more of than the store does yet.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::adapter::StoredData;
use crate::key::DedupKey;

#[derive(Default)]
pub(super) struct Pending {
    keys: Mutex<HashMap<DedupKey, Held>>,
    /// How many there are, so that nobody locks for nothing.
    count: AtomicUsize,
    /// How often some were taken out.
    removals: AtomicUsize,
}

#[derive(Default)]
struct Held {
    /// How often the key was added.
    times: usize,
    /// What will be kept with it.
    kept: StoredData,
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

    /// Whether somebody else has added a key that the caller has added too.
    pub(super) fn is_shared(&self, key: &DedupKey) -> bool {
        self.lock().get(key).is_some_and(|held| held.times > 1)
    }

    /// Changes whenever keys are taken out: whoever finds it unchanged, and a key not there, knows
    /// that it was not there in between.
    pub(super) fn removals(&self) -> usize {
        self.removals.load(Ordering::Acquire)
    }

    /// What will be kept with a key that is pending.
    pub(super) fn kept(&self, key: &DedupKey) -> Option<StoredData> {
        if self.is_empty() { None } else { self.lock().get(key).map(|held| held.kept.clone()) }
    }

    fn is_empty(&self) -> bool {
        self.count.load(Ordering::Acquire) == 0
    }

    /// Adds keys, until the answer is dropped.
    pub(super) fn add(self: &Arc<Self>, keys: Arc<[DedupKey]>) -> StillPending {
        self.add_with(keys, |_| None)
    }

    /// The same, with what will be kept with each.
    pub(super) fn add_with(
        self: &Arc<Self>,
        keys: Arc<[DedupKey]>,
        stored_data_for: impl Fn(&DedupKey) -> Option<StoredData>,
    ) -> StillPending {
        let mut set = self.lock();
        for key in keys.iter() {
            let held = set.entry(key.clone()).or_default();
            held.times += 1;
            if let Some(kept) = stored_data_for(key) {
                held.kept = kept;
            }
        }
        self.count.store(set.len(), Ordering::Release);
        drop(set);
        StillPending { pending: Arc::clone(self), keys }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<DedupKey, Held>> {
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
            if let Some(held) = set.get_mut(key) {
                held.times -= 1;
                if held.times == 0 {
                    set.remove(key);
                }
            }
        }
        // Before the count: who finds nothing pending any more has to find that something was.
        self.pending.removals.fetch_add(1, Ordering::AcqRel);
        self.pending.count.store(set.len(), Ordering::Release);
    }
}
