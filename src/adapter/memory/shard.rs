//! One shard of the table: an index by fingerprint, the rows, and in which order they expire.

use hashbrown::HashTable;

use super::fingerprint::Fingerprint;
use super::order::{Linked, Order, Slot};
use super::row::{Row, Standing};
use super::slots::Slots;

/// A shard is worth its own lock from this many keys on.
pub(super) const SHARD_KEYS: usize = 1_024;
/// And is split before it has more: as many as an index of 8,192 places takes, so that it is full
/// when the shard is, and so that to rebuild it takes a fraction of a millisecond.
pub(super) const MOST_SHARD_KEYS: usize = 7_168;

#[derive(Default)]
pub(super) struct Shard {
    index: HashTable<Slot>,
    slots: Slots,
    order: Order,
}

impl Shard {
    pub(super) fn len(&self) -> usize {
        self.index.len()
    }

    /// The slot of this key.
    pub(super) fn find(&self, fingerprint: Fingerprint) -> Option<Slot> {
        let is = |slot: &Slot| self.slots.fingerprint(*slot) == fingerprint;
        self.index.find(fingerprint.hash(), is).copied()
    }

    pub(super) fn row(&self, slot: Slot) -> Row {
        self.slots.row(slot)
    }

    pub(super) fn insert(&mut self, fingerprint: Fingerprint, row: Row) {
        let due = row.due();
        let slot = self.slots.add(fingerprint, row);
        self.order.insert(&mut self.slots, slot, due);
        let hash = |slot: &Slot| self.slots.fingerprint(*slot).hash();
        self.index.insert_unique(fingerprint.hash(), slot, hash);
    }

    pub(super) fn set(&mut self, slot: Slot, row: Row) {
        let due = row.due();
        if due == self.slots.due(slot) {
            self.slots.set(slot, row);
            return;
        }
        self.order.remove(&mut self.slots, slot);
        self.slots.set(slot, row);
        self.order.insert(&mut self.slots, slot, due);
    }

    pub(super) fn remove(&mut self, slot: Slot) {
        let hash = self.slots.fingerprint(slot).hash();
        if let Ok(entry) = self.index.find_entry(hash, |other| *other == slot) {
            entry.remove();
        }
        self.order.remove(&mut self.slots, slot);
        self.slots.remove(slot);
        if self.index.is_empty() {
            self.slots.clear();
            if self.index.capacity() > SHARD_KEYS {
                self.index = HashTable::new();
            }
        }
    }

    /// Removes up to `limit` expired keys.
    pub(super) fn purge(&mut self, limit: u32, now: u64) -> u32 {
        let mut purged = 0;
        while purged < limit
            && let Some(slot) = self.order.next(now)
        {
            self.remove(slot);
            purged += 1;
        }
        purged
    }

    /// The keys nearest to their expiry that no handler is running, but for some sorted ones:
    /// `count` of them, or fewer if there are no more.
    pub(super) fn oldest(&self, count: usize, now: u64, spared: &[Slot]) -> Vec<Slot> {
        let evictable = |slot: &Slot| {
            spared.binary_search(slot).is_err()
                && self.slots.row(*slot).standing(now) != Standing::Leased
        };
        self.order.iter(&self.slots).filter(evictable).take(count).collect()
    }

    #[cfg(test)]
    pub(super) fn order(&self) -> &Order {
        &self.order
    }

    #[cfg(test)]
    pub(super) fn slots(&self) -> &Slots {
        &self.slots
    }
}
