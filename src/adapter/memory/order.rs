//! In which order the keys of a shard expire.

/// The number of a slot. A shard has fewer than there are.
pub(super) type Slot = u16;

/// No slot.
pub(super) const NONE: Slot = Slot::MAX;

/// What a slot knows of its neighbours in its lane.
#[derive(Clone, Copy)]
pub(super) struct Links {
    pub(super) before: Slot,
    pub(super) after: Slot,
}

/// The slots that the lanes run through.
pub(super) trait Linked {
    fn links(&mut self, slot: Slot) -> &mut Links;
    fn due(&self, slot: Slot) -> u64;
    fn after(&self, slot: Slot) -> Slot;
}

/// Lists of slots, each in ascending order of its due times.
///
/// 1. A slot goes to the end of the lane whose last due time is the nearest before its own. Only
///    if there is none does it open another lane.
/// 2. So every retention that is in use costs at most one lane, since time only goes forward, and
///    appending to and removing from a lane take constant time. Retentions of any length at random
///    make about 2√n lanes of n slots, which are looked through for every insertion.
/// 3. Where a slot was removed, nothing is left behind.
#[derive(Default)]
pub(super) struct Order {
    lanes: Vec<Lane>,
}

struct Lane {
    first: Slot,
    last: Slot,
    /// The due times of both ends, so that slots are only visited when they change.
    first_due: u64,
    last_due: u64,
}

impl Order {
    /// The slot that is due first, if it is due by `until`.
    pub(super) fn next(&self, until: u64) -> Option<Slot> {
        let lane = self.lanes.iter().min_by_key(|lane| lane.first_due)?;
        (lane.first_due <= until).then_some(lane.first)
    }

    pub(super) fn insert(&mut self, slots: &mut impl Linked, slot: Slot, due: u64) {
        let fits = self.lanes.iter_mut().filter(|lane| lane.last_due <= due);
        let before = match fits.max_by_key(|lane| lane.last_due) {
            Some(lane) => {
                slots.links(lane.last).after = slot;
                lane.last_due = due;
                std::mem::replace(&mut lane.last, slot)
            }
            None => {
                self.lanes.push(Lane { first: slot, last: slot, first_due: due, last_due: due });
                NONE
            }
        };
        *slots.links(slot) = Links { before, after: NONE };
    }

    pub(super) fn remove(&mut self, slots: &mut impl Linked, slot: Slot) {
        let Links { before, after } = *slots.links(slot);
        if before != NONE {
            slots.links(before).after = after;
        }
        if after != NONE {
            slots.links(after).before = before;
        }
        if before != NONE && after != NONE {
            return;
        }
        let Some(place) =
            self.lanes.iter().position(|lane| lane.first == slot || lane.last == slot)
        else {
            return;
        };
        if before == after {
            self.lanes.swap_remove(place);
            return;
        }
        let lane = &mut self.lanes[place];
        if before == NONE {
            lane.first = after;
            lane.first_due = slots.due(after);
        } else {
            lane.last = before;
            lane.last_due = slots.due(before);
        }
    }

    /// Every slot, the one that is due first in front.
    pub(super) fn iter<'a>(&self, slots: &'a impl Linked) -> impl Iterator<Item = Slot> + 'a {
        let mut heads: Vec<(u64, Slot)> =
            self.lanes.iter().map(|lane| (lane.first_due, lane.first)).collect();
        std::iter::from_fn(move || {
            let place = (0..heads.len()).min_by_key(|place| heads[*place].0)?;
            let slot = heads[place].1;
            match slots.after(slot) {
                NONE => {
                    heads.swap_remove(place);
                }
                after => heads[place] = (slots.due(after), after),
            }
            Some(slot)
        })
    }

    #[cfg(test)]
    pub(super) fn lanes(&self) -> usize {
        self.lanes.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Due times and links, by slot.
    struct Slots(Vec<(u64, Links)>);

    impl Linked for Slots {
        fn links(&mut self, slot: Slot) -> &mut Links {
            &mut self.0[usize::from(slot)].1
        }

        fn due(&self, slot: Slot) -> u64 {
            self.0[usize::from(slot)].0
        }

        fn after(&self, slot: Slot) -> Slot {
            self.0[usize::from(slot)].1.after
        }
    }

    impl Slots {
        fn add(&mut self, due: u64) -> Slot {
            self.0.push((due, Links { before: NONE, after: NONE }));
            Slot::try_from(self.0.len() - 1).unwrap()
        }
    }

    proptest! {
        #[test]
        fn slots_come_in_the_order_of_their_due_times(
            steps in prop::collection::vec((0_u64..20, any::<prop::sample::Index>(), 0..3), 1..100),
        ) {
            let (mut order, mut slots) = (Order::default(), Slots(Vec::new()));
            let mut left: Vec<Slot> = Vec::new();
            for (due, index, step) in steps {
                if step == 0 && !left.is_empty() {
                    let slot = left.swap_remove(index.index(left.len()));
                    order.remove(&mut slots, slot);
                } else {
                    let slot = slots.add(due);
                    order.insert(&mut slots, slot, due);
                    left.push(slot);
                }
                let found: Vec<Slot> = order.iter(&slots).collect();
                let dues: Vec<u64> = found.iter().map(|slot| slots.due(*slot)).collect();
                prop_assert!(dues.is_sorted(), "{:?}", dues);
                let (mut found, mut expected) = (found, left.clone());
                found.sort_unstable();
                expected.sort_unstable();
                prop_assert_eq!(found, expected);
                let first = order.next(u64::MAX).map(|slot| slots.due(slot));
                prop_assert_eq!(first, dues.first().copied());
                prop_assert_eq!(first.and_then(|due| order.next(due.checked_sub(1)?)), None);
            }
            for slot in left {
                order.remove(&mut slots, slot);
            }
            prop_assert_eq!(order.lanes(), 0);
        }
    }

    #[test]
    fn every_retention_in_use_has_a_lane_and_no_more() {
        let (mut order, mut slots) = (Order::default(), Slots(Vec::new()));
        for now in 0..1_000 {
            for retention in [60, 3_600, 86_400] {
                let slot = slots.add(now + retention);
                order.insert(&mut slots, slot, now + retention);
            }
        }
        assert_eq!(order.lanes(), 3);
    }
}
