//! Keys with unfinished work in this process, which the store does not know of yet.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::adapter::KeyedTerms;
use crate::adapter::contract::Token;
use crate::key::{DedupKey, List};

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
    /// Removes the keys that are pending. Returns them with their positions, each with what its latest work knows.
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

    /// Returns a number that changes whenever keys are removed. If the number is unchanged and a key is
    /// absent now, the key was absent all the time.
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
        // `removals` changes before `count`: a reader that sees an empty set must see that it changed.
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
