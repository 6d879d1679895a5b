//! One shard of the table: an index by fingerprint, the rows, and in which order they expire.

use super::fingerprint::Fingerprint;
use super::index::Index;
use super::order::{Linked, Order, Slot};
use super::row::{Row, Standing};
use super::slots::Slots;
use crate::key::List;

/// A shard is worth its own lock from this many keys on.
pub(super) const SHARD_KEYS: usize = 1_024;
/// And is split before it has more: as many as an index of 8,192 places takes, so that the index is
/// full when the shard is.
pub(super) const MOST_SHARD_KEYS: usize = 6_144;

#[derive(Default)]
pub(super) struct Shard {
    index: Index,
    slots: Slots,
    order: Order,
}

impl Shard {
    pub(super) fn len(&self) -> usize {
        self.index.len()
    }

    /// The slot of this key.
    pub(super) fn find(&self, fingerprint: Fingerprint) -> Option<Slot> {
        self.index.find(fingerprint.hash(), |slot| self.slots.fingerprint(slot) == fingerprint)
    }

    pub(super) fn row(&self, slot: Slot) -> Row {
        self.slots.row(slot)
    }

    pub(super) fn insert(&mut self, fingerprint: Fingerprint, row: Row) {
        let due = row.due();
        let slot = self.slots.add(fingerprint, row);
        self.order.insert(&mut self.slots, slot, due);
        self.index.insert(fingerprint.hash(), slot);
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
        self.index.remove(self.slots.fingerprint(slot).hash(), slot);
        self.order.remove(&mut self.slots, slot);
        self.slots.remove(slot);
        if self.len() == 0 {
            self.slots.clear();
            self.index = Index::default();
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
    pub(super) fn oldest(&self, count: usize, now: u64, spared: &[Slot]) -> List<Slot> {
        let evictable = |slot: &Slot| {
            spared.binary_search(slot).is_err()
                && self.slots.row(*slot).standing(now) != Standing::Leased
        };
        // Of one, it is mostly the first.
        if count == 1
            && let Some(first) = self.order.next(u64::MAX).filter(evictable)
        {
            return List::from([first]);
        }
        self.order.iter(&self.slots).filter(evictable).take(count).collect::<Vec<_>>().into()
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
