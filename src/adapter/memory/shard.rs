//! [`Shard`]: the rows under one lock, and the order in which they are due.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::hash::{BuildHasherDefault, Hash, Hasher};

use super::row::MemoryRow;
use crate::error::{StoreError, StoreErrorKind};

/// How many expired keys are removed for a new one. More than one, so that a store that is only
/// written to stays clean without a purge.
const PURGED_PER_INSERT: usize = 2;
/// An empty shard keeps memory for this many rows.
const KEPT_ROWS: usize = 128;
/// The order may have this many outdated entries, and as many more as there are rows.
const MAX_OUTDATED: usize = 16;

/// 128 bits that identify a key in one adapter. They are random, so 64 of them are a hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Fingerprint(pub(super) [u64; 2]);

impl Hash for Fingerprint {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        hasher.write_u64(self.0[0]);
    }
}

/// Returns the 64 bits that were written.
#[derive(Default)]
pub(super) struct AsWritten(u64);

impl Hasher for AsWritten {
    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }

    fn write(&mut self, _: &[u8]) {}

    fn finish(&self) -> u64 {
        self.0
    }
}

type Rows = HashMap<Fingerprint, MemoryRow, BuildHasherDefault<AsWritten>>;

pub(super) struct Shard {
    capacity: usize,
    pub(super) rows: Rows,
    /// When each row is due. An entry is outdated if its row is due at another time, or is gone.
    ///
    /// Most keys have one retention, so most entries come in their order, and a push takes one
    /// comparison.
    order: BinaryHeap<Reverse<(u64, Fingerprint)>>,
}

impl Shard {
    pub(super) fn new(capacity: usize) -> Self {
        Self { capacity, rows: Rows::default(), order: BinaryHeap::new() }
    }

    /// Runs an operation on the row of a key, and stores the row, or removes it. A new row without
    /// room is refused. Returns `true` beside the reply if the shard becomes fuller than four
    /// fifths.
    ///
    /// This is the only way to a row, so no other call comes between the reading and the writing.
    pub(super) fn update<T>(
        &mut self,
        fingerprint: Fingerprint,
        has_room: impl Fn() -> bool,
        now: u64,
        operation: impl FnOnce(&mut Option<MemoryRow>) -> T,
    ) -> Result<(T, bool), StoreError> {
        let mut row = self.rows.get(&fingerprint).cloned();
        let due_before = row.as_ref().map(MemoryRow::due);
        let reply = operation(&mut row);
        let Some(row) = row else {
            self.remove(fingerprint);
            return Ok((reply, false));
        };
        let mut is_nearly_full = false;
        if due_before.is_none() {
            // A full shard needs no row that has expired: a release never fails.
            if row.due() <= now && !(self.rows.len() < self.capacity && has_room()) {
                return Ok((reply, false));
            }
            self.make_room(has_room, now)?;
            is_nearly_full = self.rows.len() == 4 * self.capacity / 5;
        }
        let due = row.due();
        self.rows.insert(fingerprint, row);
        if due_before != Some(due) {
            self.push(due, fingerprint);
        }
        Ok((reply, is_nearly_full))
    }

    /// Removes the row that is due first, if it is due by `until`.
    pub(super) fn remove_due(&mut self, until: u64) -> Option<MemoryRow> {
        loop {
            let Reverse((due, fingerprint)) = *self.order.peek()?;
            if due > until {
                return None;
            }
            self.order.pop();
            if self.rows.get(&fingerprint).is_some_and(|row| row.due() == due) {
                return self.remove(fingerprint);
            }
        }
    }

    /// Makes room for a new row.
    fn make_room(&mut self, has_room: impl Fn() -> bool, now: u64) -> Result<(), StoreError> {
        for _ in 0..PURGED_PER_INSERT {
            self.remove_due(now);
        }
        let len = self.rows.len();
        if len >= self.capacity || !has_room() {
            return Err(StoreError::new(StoreErrorKind::Full, "claiming keys"));
        }
        if len == self.rows.capacity() {
            // The map itself would double its size where removed rows have left no place free.
            let room = (2 * len).max(8).min(self.capacity);
            let mut rows = Rows::with_capacity_and_hasher(room + room / 16, Default::default());
            rows.extend(self.rows.drain());
            self.rows = rows;
        }
        Ok(())
    }

    fn remove(&mut self, fingerprint: Fingerprint) -> Option<MemoryRow> {
        let row = self.rows.remove(&fingerprint);
        if self.rows.is_empty() && self.rows.capacity() > KEPT_ROWS {
            *self = Self::new(self.capacity);
        }
        row
    }

    /// Adds a row to the order.
    fn push(&mut self, due: u64, fingerprint: Fingerprint) {
        self.order.push(Reverse((due, fingerprint)));
        if self.order.len() > 2 * self.rows.len() + MAX_OUTDATED {
            let rows = self.rows.iter();
            self.order = rows.map(|(key, row)| Reverse((row.due(), *key))).collect();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::Duration;

    use proptest::prelude::*;

    use super::super::row::MemoryCall;
    use super::*;
    use crate::adapter::terms::{CallTerms, Token};

    proptest! {
        #[test]
        fn rows_come_in_the_order_in_which_they_are_due(
            steps in prop::collection::vec((0_u64..8, 1_u64..20, any::<bool>()), 1..200),
            until in 0_u64..25,
        ) {
            let (mut shard, mut times) = (Shard::new(8), BTreeMap::new());
            for (id, due, stays) in steps {
                let terms = CallTerms::on_claim(Token::random(), Duration::from_millis(due));
                let (mut row, mut is_pushed) = (None, false);
                if stays {
                    let stored = &Default::default();
                    MemoryCall { terms: &terms, now: 0, stored }.claim(&mut row);
                    is_pushed = times.insert(id, due) != Some(due);
                } else {
                    times.remove(&id);
                }
                shard.update(Fingerprint([id; 2]), || true, 0, |old| *old = row).unwrap();
                let most = 2 * times.len() + MAX_OUTDATED;
                prop_assert!(!is_pushed || shard.order.len() <= most);
            }
            let mut expected: Vec<u64> = times.into_values().collect();
            expected.sort_unstable();
            let late = expected.split_off(expected.partition_point(|due| *due <= until));
            let mut purged = |until| -> Vec<u64> {
                std::iter::from_fn(|| shard.remove_due(until)).map(|row| row.due()).collect()
            };
            prop_assert_eq!(purged(until), expected);
            prop_assert_eq!(purged(u64::MAX), late);
        }
    }
}
