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
