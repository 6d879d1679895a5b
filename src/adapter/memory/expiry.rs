//! [`ExpiryOrder`]: the order in which the rows of a shard expire.

use slab::Slab;

use super::row::Row;

/// The place of a row in its shard. A shard has fewer rows than `u16` has values.
pub(super) type Slot = u16;

const NONE: Slot = Slot::MAX;

/// The neighbours of a row in its list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Links {
    before: Slot,
    after: Slot,
}

impl Links {
    /// The links of a row that is in no list.
    pub(super) const NONE: Self = Self { before: NONE, after: NONE };
}

/// Doubly linked lists of rows, each in ascending order of [`Row::due`].
///
/// 1. A row is appended to the list whose last due time is the nearest before its own. Only if
///    there is none, the row starts another list.
/// 2. Time goes forward, so each retention in use needs at most one list, and appending and
///    removing take constant time. n rows with random retentions make about 2√n lists, and every
///    insertion looks at the ends of all lists.
/// 3. Removing a row leaves nothing behind.
///
/// # Why not a timing wheel, a heap or a `BTreeSet`?
///
/// A wheel does not know which key of a bucket expires first. A heap moves a row about at every
/// removal. A `BTreeSet` takes some 30 bytes a key; the links take 4.
#[derive(Default)]
pub(super) struct ExpiryOrder {
    lists: Vec<List>,
}

struct List {
    first: Slot,
    last: Slot,
    /// The due times of both ends. Copies, so that finding a list reads no rows.
    first_due: u64,
    last_due: u64,
}

impl ExpiryOrder {
    /// Returns the row that is due first, if it is due by `until`.
    pub(super) fn first(&self, until: u64) -> Option<Slot> {
        let list = self.lists.iter().min_by_key(|list| list.first_due)?;
        (list.first_due <= until).then_some(list.first)
    }

    pub(super) fn insert(&mut self, rows: &mut Slab<Row>, slot: Slot) {
        let due = row(rows, slot).due();
        let fits = self.lists.iter_mut().filter(|list| list.last_due <= due);
        let before = match fits.max_by_key(|list| list.last_due) {
            Some(list) => {
                links(rows, list.last).after = slot;
                list.last_due = due;
                std::mem::replace(&mut list.last, slot)
            }
            None => {
                self.lists.push(List { first: slot, last: slot, first_due: due, last_due: due });
                NONE
            }
        };
        *links(rows, slot) = Links { before, after: NONE };
    }

    pub(super) fn remove(&mut self, rows: &mut Slab<Row>, slot: Slot) {
        let Links { before, after } = std::mem::replace(links(rows, slot), Links::NONE);
        if before != NONE {
            links(rows, before).after = after;
        }
        if after != NONE {
            links(rows, after).before = before;
        }
        if before != NONE && after != NONE {
            return;
        }
        let is_end = |list: &List| list.first == slot || list.last == slot;
        let Some(at) = self.lists.iter().position(is_end) else { return };
        let list = &mut self.lists[at];
        if before != NONE {
            list.last = before;
            list.last_due = row(rows, before).due();
        } else if after != NONE {
            list.first = after;
            list.first_due = row(rows, after).due();
        } else {
            self.lists.swap_remove(at);
        }
    }

    /// Returns every row, the one that is due first in front.
    pub(super) fn iter<'a>(&self, rows: &'a Slab<Row>) -> impl Iterator<Item = Slot> + 'a {
        let mut heads: Vec<(u64, Slot)> =
            self.lists.iter().map(|list| (list.first_due, list.first)).collect();
        std::iter::from_fn(move || {
            let at = (0..heads.len()).min_by_key(|at| heads[*at].0)?;
            let slot = heads[at].1;
            match row(rows, slot).links.after {
                NONE => drop(heads.swap_remove(at)),
                after => heads[at] = (row(rows, after).due(), after),
            }
            Some(slot)
        })
    }

    #[cfg(test)]
    pub(super) fn lists(&self) -> usize {
        self.lists.len()
    }
}

fn row(rows: &Slab<Row>, slot: Slot) -> &Row {
    &rows[usize::from(slot)]
}

fn links(rows: &mut Slab<Row>, slot: Slot) -> &mut Links {
    &mut rows[usize::from(slot)].links
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::super::row::KeyHasher;
    use super::*;
    use crate::adapter::{CallTerms, Token};
    use crate::key::DedupKey;

    /// Adds a row that is due at this time.
    fn add(rows: &mut Slab<Row>, due: u64) -> Slot {
        let fingerprint = KeyHasher::random().fingerprint(&DedupKey::new("n", "a").unwrap());
        let terms = CallTerms::new(Token::random(), Duration::from_millis(due));
        Slot::try_from(rows.insert(Row::leased(fingerprint, &terms, 0))).unwrap()
    }

    proptest! {
        #[test]
        fn rows_come_in_the_order_of_their_due_times(
            steps in prop::collection::vec((0_u64..20, any::<prop::sample::Index>(), 0..3), 1..100),
        ) {
            let (mut order, mut rows) = (ExpiryOrder::default(), Slab::new());
            let mut left: Vec<Slot> = Vec::new();
            for (due, index, step) in steps {
                if step == 0 && !left.is_empty() {
                    let slot = left.swap_remove(index.index(left.len()));
                    order.remove(&mut rows, slot);
                    rows.remove(slot.into());
                } else {
                    let slot = add(&mut rows, due);
                    order.insert(&mut rows, slot);
                    left.push(slot);
                }
                let mut found: Vec<Slot> = order.iter(&rows).collect();
                let dues: Vec<u64> = found.iter().map(|slot| row(&rows, *slot).due()).collect();
                prop_assert!(dues.is_sorted(), "{:?}", dues);
                let mut expected = left.clone();
                found.sort_unstable();
                expected.sort_unstable();
                prop_assert_eq!(found, expected);
                let first = order.first(u64::MAX).map(|slot| row(&rows, slot).due());
                prop_assert_eq!(first, dues.first().copied());
                prop_assert_eq!(first.and_then(|due| order.first(due.checked_sub(1)?)), None);
            }
            for slot in left {
                order.remove(&mut rows, slot);
            }
            prop_assert_eq!(order.lists(), 0);
        }
    }

    #[test]
    fn each_retention_in_use_has_one_list() {
        let (mut order, mut rows) = (ExpiryOrder::default(), Slab::new());
        for now in 0..1_000 {
            for retention in [60, 3_600, 86_400] {
                let slot = add(&mut rows, now + retention);
                order.insert(&mut rows, slot);
            }
        }
        assert_eq!(order.lists(), 3);
    }
}
