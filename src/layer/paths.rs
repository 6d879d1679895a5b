//! [`LastPaths`]: the path on which this process last ran an event.
//!
//! Some senders send one event, under one id, to every endpoint that is subscribed to it. If two
//! routes share a namespace, the second delivery is a duplicate, and the second route's handler
//! never runs. Nothing fails, so the layer detects this and logs it.
//!
//! 1. The table has a fixed size. A later event replaces an earlier one in its slot.
//! 2. The process has one table, because two layers over one store share their keys.
//! 3. The table is good enough for a log record only. It does not know the events of other
//!    processes, and it takes two stores with the same keys for one.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::key::DedupKey;

const SLOTS: usize = 4_096;

/// The path on which this process last began to run each of its recent events.
pub(super) static LAST_PATHS: LastPaths = LastPaths::new();

/// The upper half of a slot is of the key's hash, the lower half of the path's.
pub(super) struct LastPaths([AtomicU64; SLOTS]);

const PATH_BITS: u64 = 0xFFFF_FFFF;

impl LastPaths {
    const fn new() -> Self {
        Self([const { AtomicU64::new(0) }; SLOTS])
    }

    fn path(path: &str) -> u64 {
        hash(path) & PATH_BITS
    }

    /// Notes that the events of these keys run on this path.
    pub(super) fn insert<'k>(&self, keys: impl Iterator<Item = &'k DedupKey>, path: &str) {
        let path = Self::path(path);
        for key in keys {
            let (slot, key) = self.slot(key);
            slot.store(key | path, Ordering::Relaxed);
        }
    }

    /// Returns `true` if this process last ran the event on another path, as far as is known.
    pub(super) fn is_elsewhere(&self, key: &DedupKey, path: &str) -> bool {
        let (slot, key) = self.slot(key);
        let found = slot.load(Ordering::Relaxed);
        found & !PATH_BITS == key && found & PATH_BITS != Self::path(path)
    }

    /// Returns the key's slot, and the part of the key's hash that is stored in it.
    fn slot(&self, key: &DedupKey) -> (&AtomicU64, u64) {
        let hash = hash(key);
        let slot = (hash & PATH_BITS) % SLOTS as u64;
        (&self.0[slot as usize], hash & !PATH_BITS)
    }
}

/// Without a secret: two keys of one hash change a log record only.
fn hash(value: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(id: &str) -> DedupKey {
        DedupKey::new("acme", id).unwrap()
    }

    #[test]
    fn is_elsewhere_is_true_for_another_path_of_a_known_key_only() {
        let last_paths = LastPaths::new();
        assert!(!last_paths.is_elsewhere(&key("a"), "/tax"), "nothing is known");
        for (path, other) in [("/billing", "/tax"), ("/tax", "/billing")] {
            last_paths.insert([&key("a")].into_iter(), path);
            assert!(!last_paths.is_elsewhere(&key("a"), path));
            assert!(last_paths.is_elsewhere(&key("a"), other));
            assert!(!last_paths.is_elsewhere(&key("b"), other));
        }
    }

    #[test]
    fn keys_of_one_slot_replace_each_other_and_are_not_taken_for_each_other() {
        let last_paths = LastPaths::new();
        let keys: Vec<DedupKey> = (0..10 * SLOTS).map(|id| key(&id.to_string())).collect();
        last_paths.insert(keys.iter(), "/a");
        let known = keys.iter().filter(|key| last_paths.is_elsewhere(key, "/b")).count();
        assert!((SLOTS / 2..=SLOTS).contains(&known), "{known}");
        assert!(!keys.iter().any(|key| last_paths.is_elsewhere(key, "/a")));
    }
}
