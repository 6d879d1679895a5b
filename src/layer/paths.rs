//! [`Handled`]: on which path this process has run an event lately.
//!
//! Some senders send one event, under one id, to every endpoint that is subscribed to it. Where two
//! routes share a namespace, the second route's delivery is a duplicate of the first one's, and its
//! handler never runs. Nothing fails then, so the layer looks for it.
//!
//! 1. The table has a fixed size. An event that is handled later takes the place of an earlier one.
//! 2. It is one for the whole process, because two layers over one store share their keys too.
//! 3. It is for a log line only: it misses what another process has handled, and two stores with
//!    the same namespaces and ids in one process look like one.

use std::hash::{BuildHasher, RandomState};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::key::DedupKey;

const SLOTS: usize = 4_096;

/// What this process has run.
pub(super) static HANDLED: LazyLock<Handled> = LazyLock::new(Handled::new);

pub(super) struct Handled {
    hasher: RandomState,
    /// The upper half of each is of the key, the lower half of the path.
    slots: Box<[AtomicU64]>,
}

/// A path, hashed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Path(u64);

const PATH_BITS: u64 = 0xFFFF_FFFF;

impl Handled {
    fn new() -> Self {
        Self { hasher: RandomState::new(), slots: (0..SLOTS).map(|_| AtomicU64::new(0)).collect() }
    }

    pub(super) fn path(&self, path: &str) -> Path {
        Path(self.hasher.hash_one(path) & PATH_BITS)
    }

    /// The event of this key runs on this path.
    pub(super) fn insert(&self, key: &DedupKey, path: Path) {
        let (slot, key) = self.slot(key);
        slot.store(key | path.0, Ordering::Relaxed);
    }

    /// Returns `true` if the event ran last on another path, as far as is known.
    pub(super) fn is_elsewhere(&self, key: &DedupKey, path: Path) -> bool {
        let (slot, key) = self.slot(key);
        let found = slot.load(Ordering::Relaxed);
        found & !PATH_BITS == key && found & PATH_BITS != path.0
    }

    /// The key's slot, and what of the key is in it.
    fn slot(&self, key: &DedupKey) -> (&AtomicU64, u64) {
        let hash = self.hasher.hash_one(key);
        let slot = (hash & PATH_BITS) % SLOTS as u64;
        let slot = &self.slots[slot as usize];
        (slot, hash & !PATH_BITS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(id: &str) -> DedupKey {
        DedupKey::new("acme", id).unwrap()
    }

    #[test]
    fn is_elsewhere_is_true_for_another_path_of_a_known_key_only() {
        let handled = Handled::new();
        let (billing, tax) = (handled.path("/billing"), handled.path("/tax"));
        assert!(!handled.is_elsewhere(&key("a"), tax), "nothing is known");
        handled.insert(&key("a"), billing);
        assert!(!handled.is_elsewhere(&key("a"), billing));
        assert!(handled.is_elsewhere(&key("a"), tax));
        assert!(!handled.is_elsewhere(&key("b"), tax));
        handled.insert(&key("a"), tax);
        assert!(!handled.is_elsewhere(&key("a"), tax));
    }

    #[test]
    fn keys_of_one_slot_replace_each_other_and_are_not_taken_for_each_other() {
        let handled = Handled::new();
        let paths = [handled.path("/a"), handled.path("/b")];
        let keys: Vec<DedupKey> = (0..10 * SLOTS).map(|id| key(&id.to_string())).collect();
        for key in &keys {
            handled.insert(key, paths[0]);
        }
        let known = keys.iter().filter(|key| handled.is_elsewhere(key, paths[1])).count();
        assert!((SLOTS / 2..=SLOTS).contains(&known), "{known}");
        assert!(!keys.iter().any(|key| handled.is_elsewhere(key, paths[0])));
    }
}
