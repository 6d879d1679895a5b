//! [`ExpiryOrder`]: the order in which the rows of a shard expire.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use slab::Slab;

use super::clock::END;
use super::row::Row;

/// The index of a row in its shard. A shard has fewer rows than `u16` has values.
pub(super) type Slot = u16;

/// The heap may have this many outdated entries, and as many more as there are rows.
const MAX_OUTDATED: usize = 16;

/// A heap of due times, with a slot in the lower 16 bits of each.
///
/// 1. Every row has an entry with its present [`Row::due`].
/// 2. An entry is outdated when its row was removed, or is due at another time. Outdated entries
///    are discarded when they come up, or all together when they outnumber the rows.
///
/// # Why not a timing wheel, or a `BTreeSet`?
///
/// A wheel does not know which key of a bucket expires first. A `BTreeSet` takes some 30 bytes a
/// key; the heap takes 8 to 16.
#[derive(Default)]
pub(super) struct ExpiryOrder(BinaryHeap<Reverse<u64>>);

/// A due time and a slot fit into 64 bits.
const _: () = assert!(END >> (u64::BITS - Slot::BITS) == 0);

fn entry(due: u64, slot: Slot) -> Reverse<u64> {
    Reverse(due << Slot::BITS | u64::from(slot))
}

impl ExpiryOrder {
    pub(super) fn reserve(&mut self, more: usize) {
        self.0.reserve_exact(more);
    }

    /// Adds a row, or a row whose due time has changed.
    pub(super) fn push(&mut self, rows: &Slab<Row>, slot: Slot) {
        if self.0.len() > 2 * rows.len() + MAX_OUTDATED {
            let slot = |at| Slot::try_from(at).unwrap_or(Slot::MAX);
            self.0 = rows.iter().map(|(at, row)| entry(row.due(), slot(at))).collect();
        } else {
            self.0.push(entry(rows[slot.into()].due(), slot));
        }
    }

    /// Removes the entry of the row that is due first, if it is due by `until`, and returns the row.
    pub(super) fn pop(&mut self, rows: &Slab<Row>, until: u64) -> Option<Slot> {
        while let Some(Reverse(first)) = self.0.peek()
            && first >> Slot::BITS <= until
        {
            let first = *first;
            // A row has equal entries if its due time has changed twice.
            while self.0.peek() == Some(&Reverse(first)) {
                self.0.pop();
            }
            let slot = Slot::try_from(first & u64::from(Slot::MAX)).unwrap_or(Slot::MAX);
            let row = rows.get(slot.into());
            if row.is_some_and(|row| entry(row.due(), slot) == Reverse(first)) {
                return Some(slot);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::super::row::KeyHasher;
    use super::*;
    use crate::adapter::{CallTerms, Token};
    use crate::key::DedupKey;

    fn row(due: u64) -> Row {
        let fingerprint = KeyHasher::random().fingerprint(&DedupKey::new("n", "a").unwrap());
        let terms = CallTerms::on_claim(Token::random(), Duration::from_millis(due));
        Row::leased(fingerprint, &terms, 0)
    }

    proptest! {
        #[test]
        fn rows_come_in_the_order_of_their_due_times(
            steps in prop::collection::vec((0_u64..20, any::<prop::sample::Index>(), 0..4), 1..200),
            until in 0_u64..25,
        ) {
            let (mut order, mut rows) = (ExpiryOrder::default(), Slab::<Row>::new());
            let mut left: Vec<Slot> = Vec::new();
            for (due, index, step) in steps {
                match step {
                    0 if !left.is_empty() => {
                        rows.remove(left.swap_remove(index.index(left.len())).into());
                    }
                    1 if !left.is_empty() => {
                        let slot = left[index.index(left.len())];
                        rows[usize::from(slot)].expires_at = due;
                        order.push(&rows, slot);
                    }
                    _ => {
                        let slot = Slot::try_from(rows.insert(row(due))).unwrap();
                        order.push(&rows, slot);
                        left.push(slot);
                    }
                }
                prop_assert!(step == 0 || order.0.len() <= 2 * left.len() + MAX_OUTDATED + 1);
            }
            let due = |slot: &Slot| rows[usize::from(*slot)].due();
            let early: Vec<Slot> = std::iter::from_fn(|| order.pop(&rows, until)).collect();
            prop_assert!(early.iter().all(|slot| due(slot) <= until));
            let late: Vec<Slot> = std::iter::from_fn(|| order.pop(&rows, END)).collect();
            prop_assert!(late.iter().all(|slot| due(slot) > until));
            let mut found = [early, late].concat();
            prop_assert!(found.iter().map(due).is_sorted());
            found.sort_unstable();
            left.sort_unstable();
            prop_assert_eq!(found, left);
        }
    }
}
