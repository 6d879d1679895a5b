//! [`Shard`]: the rows under one lock, the index that finds them, and their expiry order.

use hashbrown::HashTable;
use slab::Slab;

use super::clock::END;
use super::expiry::{ExpiryOrder, Slot};
use super::row::{Fingerprint, Row, RowState};

/// A shard has at most this many rows: as many as an index of 8,192 buckets takes.
pub(super) const MAX_SHARD_KEYS: usize = 7_168;
/// How many expired keys are removed for a new one. More than one, so that a store that is only
/// written to stays clean without a purger.
const PURGED_PER_INSERT: usize = 2;
/// An empty shard keeps room for this many rows.
const ROWS_KEPT: usize = 128;

pub(super) struct Shard {
    capacity: usize,
    rows: Slab<Row>,
    index: HashTable<Slot>,
    expiry: ExpiryOrder,
}

/// What a call has to do before it adds keys to a shard.
pub(super) struct Room {
    pub(super) added: usize,
    pub(super) evicted: Vec<Slot>,
}

impl Shard {
    pub(super) fn new(capacity: usize) -> Self {
        let (rows, index) = (Slab::new(), HashTable::new());
        Self { capacity, rows, index, expiry: ExpiryOrder::default() }
    }

    pub(super) fn len(&self) -> usize {
        self.rows.len()
    }

    pub(super) fn find(&self, fingerprint: Fingerprint) -> Option<Slot> {
        let is_same = |slot: &Slot| self.row(*slot).fingerprint == fingerprint;
        self.index.find(fingerprint.hash(), is_same).copied()
    }

    pub(super) fn row(&self, slot: Slot) -> &Row {
        &self.rows[usize::from(slot)]
    }

    /// Inserts a row whose key is not in the shard. [`room_for`](Self::room_for) has made room.
    pub(super) fn insert(&mut self, row: Row) {
        let hash = row.fingerprint.hash();
        let len = self.rows.len();
        if len == self.rows.capacity() {
            // Doubled, but not beyond the capacity of the shard.
            let more = len.max(8).min(self.capacity.saturating_sub(len));
            self.rows.reserve_exact(more);
            self.expiry.reserve(more);
        }
        // A shard has fewer rows than `Slot` has values.
        let slot = Slot::try_from(self.rows.insert(row)).unwrap_or(Slot::MAX);
        self.expiry.push(&self.rows, slot);
        let rows = &self.rows;
        self.index.insert_unique(hash, slot, |slot| rows[usize::from(*slot)].fingerprint.hash());
    }

    pub(super) fn update<T>(&mut self, slot: Slot, change: impl FnOnce(&mut Row) -> T) -> T {
        let row = &mut self.rows[usize::from(slot)];
        let due = row.due();
        let changed = change(row);
        if row.due() != due {
            self.expiry.push(&self.rows, slot);
        }
        changed
    }

    pub(super) fn remove(&mut self, slot: Slot) {
        let row = self.rows.remove(slot.into());
        if let Ok(entry) = self.index.find_entry(row.fingerprint.hash(), |other| *other == slot) {
            entry.remove();
        }
        if self.rows.is_empty() && self.rows.capacity() > ROWS_KEPT {
            *self = Self::new(self.capacity);
        }
    }

    /// Removes some expired rows before `missing` keys are added. Returns how many.
    pub(super) fn purge_for(&mut self, missing: usize, now: u64) -> usize {
        self.purge(missing.saturating_mul(PURGED_PER_INSERT), now)
    }

    /// Removes up to `limit` rows that are due by `until`, and returns how many.
    pub(super) fn purge(&mut self, limit: usize, until: u64) -> usize {
        let mut purged = 0;
        while purged < limit
            && let Some(slot) = self.expiry.pop(&self.rows, until)
        {
            self.remove(slot);
            purged += 1;
        }
        purged
    }

    /// Returns what it takes to add `missing` keys; `None` if the keys have no room.
    ///
    /// A live lease is not evicted, nor are the `spared` rows, which are sorted.
    pub(super) fn room_for(
        &mut self,
        missing: usize,
        spared: &[Slot],
        may_evict: bool,
        now: u64,
    ) -> Option<Room> {
        let excess = (self.len() + missing).saturating_sub(self.capacity);
        if excess == 0 {
            return Some(Room { added: missing, evicted: Vec::new() });
        }
        if !may_evict {
            return None;
        }
        let rows = &self.rows;
        let is_evictable = |slot: &Slot| {
            let is_leased = rows[usize::from(*slot)].state(now) == RowState::Leased;
            !is_leased && spared.binary_search(slot).is_err()
        };
        let (mut oldest, mut evicted) = (Vec::new(), Vec::new());
        while evicted.len() < excess
            && let Some(slot) = self.expiry.pop(rows, END)
        {
            oldest.push(slot);
            evicted.extend(Some(slot).filter(&is_evictable));
        }
        // The call may still fail for another shard.
        for slot in oldest {
            self.expiry.push(rows, slot);
        }
        (evicted.len() == excess).then_some(Room { added: missing, evicted })
    }
}
