//! [`Shard`]: the rows under one lock, the index that finds them, and the order in which they are due.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use hashbrown::HashTable;
use slab::Slab;

use super::clock::END;
use super::gauge::Pressure;
use super::row::Row;
use crate::adapter::inspect::KeyState;
use crate::error::{Error, ErrorKind};

/// How many expired keys are removed for a new one. More than one, so that a store that is only
/// written to stays clean without a purger.
const PURGED_PER_INSERT: usize = 2;
/// An empty shard keeps memory for this many rows.
const KEPT_ROWS: usize = 128;
/// The order may have this many outdated entries, and as many more as there are rows.
const MAX_OUTDATED: usize = 16;

/// How a full [`MemoryAdapter`](super::MemoryAdapter) treats a new key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum AtCapacity {
    /// Refuses the key with [`ErrorKind::Full`]; the layer answers 503, so the sender retries.
    /// Duplicates are still recognised; every *new* event is refused until keys expire.
    #[default]
    Refuse,
    /// Evicts the key of the same shard that is nearest to its expiry and not in flight. The event
    /// of that key would run again. Each eviction is counted (`tower_dedup_evicted_total`), and a
    /// warning is logged, once a minute at most.
    EvictOldest,
}

/// 128 bits that identify a key in one adapter.
pub(super) type Fingerprint = [u64; 2];

/// The number of a row in its shard.
type Slot = u16;

const _: () = assert!(END >> (u64::BITS - Slot::BITS) == 0);

/// Returns when the row is due, with its slot in the lower bits.
fn due(slot: Slot, row: &Row) -> u64 {
    row.due() << Slot::BITS | u64::from(slot)
}

pub(super) struct Shard {
    capacity: usize,
    rows: Slab<(Fingerprint, Row)>,
    index: HashTable<Slot>,
    /// Every row has its present entry, here or in `out_of_turn`. Other entries are outdated.
    ///
    /// Most keys have one retention, so most entries come in the order in which they are due. A timing wheel does not
    /// know which row of a bucket is due first.
    order: VecDeque<u64>,
    /// The entries that are due before the last one of `order`.
    out_of_turn: BinaryHeap<Reverse<u64>>,
}

impl Shard {
    pub(super) fn new(capacity: usize) -> Self {
        let (order, out_of_turn) = (VecDeque::new(), BinaryHeap::new());
        Self { capacity, rows: Slab::new(), index: HashTable::new(), order, out_of_turn }
    }

    pub(super) fn rows(&self) -> impl Iterator<Item = &Row> {
        self.rows.iter().map(|(_, (_, row))| row)
    }

    /// Runs an operation on the row of a key, and stores the row, or removes it. A new row without room is refused.
    ///
    /// This is the only way to a row, so no other call comes between the reading and the writing.
    pub(super) fn update<T>(
        &mut self,
        fingerprint: Fingerprint,
        at_capacity: AtCapacity,
        now: u64,
        operation: impl FnOnce(&mut Option<Row>) -> T,
    ) -> Result<(T, Pressure), Error> {
        let found = self.find(fingerprint);
        let mut row = found.map(|slot| self.rows[usize::from(slot)].1.clone());
        let reply = operation(&mut row);
        let mut pressure = Pressure::default();
        match (found, row) {
            (None, None) => {}
            // A full shard needs no row that has expired: a release never fails.
            (None, Some(row)) if self.rows.len() >= self.capacity && row.due() <= now => {}
            (None, Some(row)) => {
                pressure = self.make_room(at_capacity, now)?;
                self.insert(fingerprint, row);
            }
            (Some(slot), None) => drop(self.remove(slot)),
            (Some(slot), Some(new)) => {
                let row = &mut self.rows[usize::from(slot)].1;
                let is_due_as_before = row.due() == new.due();
                *row = new;
                if !is_due_as_before {
                    self.push(slot);
                }
            }
        }
        Ok((reply, pressure))
    }

    /// Removes the row that is due first, if it is due by `until`.
    pub(super) fn remove_due(&mut self, until: u64) -> Option<Row> {
        self.pop(until).map(|slot| self.remove(slot))
    }

    fn make_room(&mut self, at_capacity: AtCapacity, now: u64) -> Result<Pressure, Error> {
        for _ in 0..PURGED_PER_INSERT {
            self.remove_due(now);
        }
        let mut evicted_age_ms = None;
        if self.rows.len() >= self.capacity {
            let evicted = match at_capacity {
                AtCapacity::Refuse => None,
                AtCapacity::EvictOldest => self.evict(now),
            };
            let evicted = evicted.ok_or_else(|| Error::new(ErrorKind::Full, "claiming keys"))?;
            evicted_age_ms = Some(now.saturating_sub(evicted.first_seen_at));
        }
        let nearly_full = self.rows.len() == 4 * self.capacity / 5;
        Ok(Pressure { evicted_age_ms, nearly_full })
    }

    fn evict(&mut self, now: u64) -> Option<Row> {
        let mut spared = Vec::new();
        let mut evicted = None;
        while evicted.is_none()
            && let Some(slot) = self.pop(END)
        {
            let is_in_flight = self.rows[slot.into()].1.state(now) == Some(KeyState::InFlight);
            if !is_in_flight { evicted = Some(slot) } else { spared.push(slot) }
        }
        spared.into_iter().for_each(|slot| self.push(slot));
        evicted.map(|slot| self.remove(slot))
    }

    fn find(&self, fingerprint: Fingerprint) -> Option<Slot> {
        let is_same = |slot: &Slot| self.rows[usize::from(*slot)].0 == fingerprint;
        self.index.find(fingerprint[0], is_same).copied()
    }

    fn insert(&mut self, fingerprint: Fingerprint, row: Row) {
        let len = self.rows.len();
        if len == self.rows.capacity() {
            // Doubled, but not beyond the capacity of the shard.
            let more = len.max(8).min(self.capacity.saturating_sub(len));
            self.rows.reserve_exact(more);
            self.order.reserve_exact(more);
        }
        // A shard has fewer rows than `Slot` has values.
        let slot = Slot::try_from(self.rows.insert((fingerprint, row))).unwrap_or(Slot::MAX);
        self.push(slot);
        let rows = &self.rows;
        self.index.insert_unique(fingerprint[0], slot, |slot| rows[usize::from(*slot)].0[0]);
    }

    fn remove(&mut self, slot: Slot) -> Row {
        let (fingerprint, row) = self.rows.remove(slot.into());
        if let Ok(found) = self.index.find_entry(fingerprint[0], |other| *other == slot) {
            found.remove();
        }
        if self.rows.is_empty() && self.rows.capacity() > KEPT_ROWS {
            *self = Self::new(self.capacity);
        }
        row
    }

    /// Adds the row to the order.
    fn push(&mut self, slot: Slot) {
        let entry = due(slot, &self.rows[slot.into()].1);
        if self.order.len() + self.out_of_turn.len() > 2 * self.rows.len() + MAX_OUTDATED {
            let rows = self.rows.iter();
            let entries = rows.filter_map(|(at, (_, row))| Some(due(at.try_into().ok()?, row)));
            let mut order: Vec<u64> = entries.collect();
            order.sort_unstable();
            (self.order, self.out_of_turn) = (order.into(), BinaryHeap::new());
        } else if self.order.back().is_some_and(|last| last >> Slot::BITS > entry >> Slot::BITS) {
            self.out_of_turn.push(Reverse(entry));
        } else {
            self.order.push_back(entry);
        }
    }

    /// Takes the row that is due first out of the order, if it is due by `until`.
    fn pop(&mut self, until: u64) -> Option<Slot> {
        loop {
            let in_turn = self.order.front().copied();
            let out_of_turn = self.out_of_turn.peek().map(|Reverse(entry)| *entry);
            let first = in_turn.into_iter().chain(out_of_turn).min()?;
            if first >> Slot::BITS > until {
                return None;
            }
            if in_turn == Some(first) {
                self.order.pop_front();
            } else {
                self.out_of_turn.pop();
            }
            let [low, high, ..] = first.to_le_bytes();
            let slot = Slot::from_le_bytes([low, high]);
            if self.rows.get(slot.into()).is_some_and(|(_, row)| due(slot, row) == first) {
                return Some(slot);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::Duration;

    use proptest::prelude::*;

    use super::super::row::Call;
    use super::*;
    use crate::adapter::terms::{CallTerms, Token};
    use crate::key::DedupKey;

    proptest! {
        #[test]
        fn rows_come_in_the_order_in_which_they_are_due(
            steps in prop::collection::vec((0_u64..8, 1_u64..20, any::<bool>()), 1..200),
            until in 0_u64..25,
        ) {
            let (mut shard, mut times) = (Shard::new(8), BTreeMap::new());
            for (id, due, stays) in steps {
                let terms = CallTerms::on_claim(Token::random(), Duration::from_millis(due));
                let key = DedupKey::new("n", "a").unwrap();
                let (mut row, mut is_pushed) = (None, false);
                if stays {
                    Call { key: &key, terms: &terms, now: 0 }.claim(&mut row);
                    is_pushed = times.insert(id, due) != Some(due);
                } else {
                    times.remove(&id);
                }
                shard.update([id; 2], AtCapacity::Refuse, 0, |old| *old = row).unwrap();
                let entries = shard.order.len() + shard.out_of_turn.len();
                prop_assert!(!is_pushed || entries <= 2 * times.len() + MAX_OUTDATED + 1);
            }
            let mut expected: Vec<u64> = times.into_values().collect();
            expected.sort_unstable();
            let late = expected.split_off(expected.partition_point(|due| *due <= until));
            let mut purged = |until| -> Vec<u64> {
                std::iter::from_fn(|| shard.remove_due(until)).map(|row| row.due()).collect()
            };
            prop_assert_eq!(purged(until), expected);
            prop_assert_eq!(purged(END), late);
        }
    }
}
