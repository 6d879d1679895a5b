//! [`Shard`]: the rows under one lock, the index that finds them, and their expiry order.

use std::time::Duration;

use hashbrown::HashTable;
use slab::Slab;

use super::clock::END;
use super::expiry::{ExpiryOrder, Slot};
use super::pressure::Pressure;
use super::row::{Fingerprint, Row, RowState};
use crate::adapter::inspection::Stats;
use crate::key::List;

/// A shard has at most this many rows: as many as an index of 8,192 buckets takes.
pub(super) const MAX_SHARD_KEYS: usize = 7_168;
/// How many expired keys are removed for a new one. More than one, so that a store that is only
/// written to stays clean without a purger.
const PURGED_PER_INSERT: usize = 2;
/// An empty shard reserves memory for this many rows.
const RESERVED_ROWS: usize = 128;

pub(super) struct Shard {
    capacity: usize,
    rows: Slab<Row>,
    index: HashTable<Slot>,
    expiry: ExpiryOrder,
    /// Since the caller took it.
    pub(super) pressure: Pressure,
}

/// The change of a key beyond the change of its row in place.
pub(super) enum Change {
    None,
    /// Inserts the row, or replaces the row of the key.
    Put(Row),
    Remove,
}

impl Shard {
    pub(super) fn new(capacity: usize) -> Self {
        let (rows, index, expiry) = (Slab::new(), HashTable::new(), ExpiryOrder::default());
        Self { capacity, rows, index, expiry, pressure: Pressure::default() }
    }

    pub(super) fn len(&self) -> usize {
        self.rows.len()
    }

    /// Counts the rows by their states.
    pub(super) fn add_to(&self, stats: &mut Stats, now: u64) {
        for (_, row) in &self.rows {
            let (number, oldest, since) = match row.state(now) {
                RowState::Leased => {
                    (&mut stats.in_flight, Some(&mut stats.oldest_in_flight), row.first_seen_at)
                }
                RowState::Lapsed => {
                    (&mut stats.lapsed, Some(&mut stats.oldest_lapsed), row.ends_at)
                }
                RowState::Released => (&mut stats.released, None, now),
                RowState::Complete => (&mut stats.complete, None, now),
                RowState::Expired => {
                    (&mut stats.expired, Some(&mut stats.oldest_expired), row.due())
                }
            };
            *number += 1;
            let age = Duration::from_millis(now.saturating_sub(since));
            if let Some(oldest) = oldest {
                *oldest = (*oldest).max(Some(age));
            }
        }
        stats.rows += self.rows.len() as u64;
    }

    /// Passes the row of the key to `step`, and makes the change that `step` returns. A new row needs
    /// [`room_for`](Self::room_for) its key.
    pub(super) fn change<T>(
        &mut self,
        fingerprint: Fingerprint,
        step: impl FnOnce(Option<&mut Row>) -> (T, Change),
    ) -> T {
        let Some(slot) = self.find(fingerprint) else {
            let (reply, change) = step(None);
            if let Change::Put(row) = change {
                self.insert(row);
            }
            return reply;
        };
        let row = &mut self.rows[usize::from(slot)];
        let due = row.due();
        let (reply, change) = step(Some(row));
        match change {
            Change::None => {}
            Change::Put(new) => *row = new,
            Change::Remove => {
                self.remove(slot);
                return reply;
            }
        }
        if row.due() != due {
            self.expiry.push(&self.rows, slot);
        }
        reply
    }

    fn find(&self, fingerprint: Fingerprint) -> Option<Slot> {
        let is_same = |slot: &Slot| self.rows[usize::from(*slot)].fingerprint == fingerprint;
        self.index.find(fingerprint.hash(), is_same).copied()
    }

    fn insert(&mut self, row: Row) {
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
        self.pressure.nearly_full |= len == 4 * self.capacity / 5;
    }

    fn remove(&mut self, slot: Slot) -> Row {
        let row = self.rows.remove(slot.into());
        if let Ok(entry) = self.index.find_entry(row.fingerprint.hash(), |other| *other == slot) {
            entry.remove();
        }
        if self.rows.is_empty() && self.rows.capacity() > RESERVED_ROWS {
            let pressure = std::mem::take(&mut self.pressure);
            *self = Self { pressure, ..Self::new(self.capacity) };
        }
        row
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

    /// Returns the rows to evict for these keys, and purges some expired rows. `None` if the keys have
    /// no room: a live lease is not evicted, nor is a row of the keys.
    pub(super) fn room_for(
        &mut self,
        keys: &[(usize, Fingerprint)],
        may_evict: bool,
        now: u64,
    ) -> Option<List<Slot>> {
        let count_missing = |shard: &Self| {
            keys.iter().filter(|(_, fingerprint)| shard.find(*fingerprint).is_none()).count()
        };
        let mut missing = count_missing(self);
        if self.purge(missing.saturating_mul(PURGED_PER_INSERT), now) > 0 {
            // The purge may have removed some of the keys.
            missing = count_missing(self);
        }
        let excess = (self.len() + missing).saturating_sub(self.capacity);
        if excess > 0 && !may_evict {
            return None;
        }
        let (mut popped, mut evicted) = (List::new(), List::new());
        while evicted.len() < excess
            && let Some(slot) = self.expiry.pop(&self.rows, END)
        {
            popped.push(slot);
            let row = &self.rows[usize::from(slot)];
            let is_own = keys.iter().any(|(_, fingerprint)| *fingerprint == row.fingerprint);
            if !is_own && row.state(now) != RowState::Leased {
                evicted.push(slot);
            }
        }
        // The call may still fail for another shard.
        for slot in popped {
            self.expiry.push(&self.rows, slot);
        }
        (evicted.len() == excess).then_some(evicted)
    }

    pub(super) fn evict(&mut self, slots: List<Slot>, now: u64) {
        for slot in slots {
            let row = self.remove(slot);
            if row.state(now) != RowState::Expired {
                self.pressure.add_evicted(now.saturating_sub(row.first_seen_at));
            }
        }
    }
}
