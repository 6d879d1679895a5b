//! Where in a shard a key is.

use super::order::{NONE, Slot};

/// Slots by the hash of their keys: open addressing, linear probing.
///
/// 1. A place holds a slot and the upper 16 bits of its hash, in four bytes. A key that is new is
///    looked for and put down in one cache line, and the rows of others are not read.
/// 2. Those bits say where a slot belongs at every size that the index can have. So it grows
///    without a look at the rows, in microseconds.
/// 3. What follows a removed slot moves up: there are no tombstones.
/// 4. At most three quarters of the places are taken.
///
/// # Why not `hashbrown`?
///
/// It keeps tags and values apart, two cache misses for one here, and reads every row again when it
/// grows. At a million keys an insertion took a fifth longer with it.
#[derive(Default)]
pub(super) struct Index {
    /// None, or a power of two of them.
    places: Vec<Place>,
    len: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct Place {
    tag: u16,
    /// [`NONE`] if the place is empty.
    slot: Slot,
}

const EMPTY: Place = Place { tag: 0, slot: NONE };
const FEWEST: usize = 16;

impl Index {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn find(&self, hash: u64, is: impl Fn(Slot) -> bool) -> Option<Slot> {
        if self.len == 0 {
            return None;
        }
        let tag = tag(hash);
        let mut at = self.home(tag);
        loop {
            let place = self.places[at];
            if place == EMPTY {
                return None;
            }
            if place.tag == tag && is(place.slot) {
                return Some(place.slot);
            }
            at = self.next(at);
        }
    }

    /// Adds a slot that is not there.
    pub(super) fn insert(&mut self, hash: u64, slot: Slot) {
        if (self.len + 1) * 4 > self.places.len() * 3 {
            self.grow();
        }
        self.put(Place { tag: tag(hash), slot });
        self.len += 1;
    }

    /// Removes a slot that is there.
    pub(super) fn remove(&mut self, hash: u64, slot: Slot) {
        let place = Place { tag: tag(hash), slot };
        let mut hole = self.home(place.tag);
        while self.places[hole] != place {
            if self.places[hole] == EMPTY {
                return;
            }
            hole = self.next(hole);
        }
        self.len -= 1;
        let mask = self.places.len() - 1;
        let mut at = hole;
        loop {
            at = self.next(at);
            let place = self.places[at];
            if place == EMPTY {
                break;
            }
            // It may move up to the hole, but not before its home.
            let from_home = at.wrapping_sub(self.home(place.tag)) & mask;
            if from_home >= at.wrapping_sub(hole) & mask {
                self.places[hole] = place;
                hole = at;
            }
        }
        self.places[hole] = EMPTY;
    }

    fn grow(&mut self) {
        let places = (self.places.len() * 2).max(FEWEST);
        let old = std::mem::replace(&mut self.places, vec![EMPTY; places]);
        old.into_iter().filter(|place| *place != EMPTY).for_each(|place| self.put(place));
    }

    fn put(&mut self, place: Place) {
        let mut at = self.home(place.tag);
        while self.places[at] != EMPTY {
            at = self.next(at);
        }
        self.places[at] = place;
    }

    /// The upper bits of the tag, as many as there are bits in the number of a place.
    fn home(&self, tag: u16) -> usize {
        (usize::from(tag) * self.places.len()) >> u16::BITS
    }

    fn next(&self, at: usize) -> usize {
        (at + 1) & (self.places.len() - 1)
    }
}

fn tag(hash: u64) -> u16 {
    // 16 bits are left.
    u16::try_from(hash >> 48).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    /// Hashes that crowd: their homes are few, at the end of the table among them.
    fn crowded() -> impl Strategy<Value = u64> {
        prop_oneof![Just(0_u16), 0_u16..4, 0xfffc_u16..=0xffff, any::<u16>()]
            .prop_flat_map(|tag| (0_u64..3).prop_map(move |low| u64::from(tag) << 48 | low))
    }

    proptest! {
        #[test]
        fn it_finds_what_was_inserted_and_not_removed(
            steps in prop::collection::vec((crowded(), any::<bool>()), 1..200),
        ) {
            let (mut index, mut model, mut hashes) = (Index::default(), HashMap::new(), Vec::new());
            for (hash, insert) in steps {
                let is = |slot: Slot| hashes[usize::from(slot)] == hash;
                let found = index.find(hash, is);
                prop_assert_eq!(found, model.get(&hash).copied());
                match found {
                    None if insert => {
                        let slot = Slot::try_from(hashes.len()).unwrap();
                        hashes.push(hash);
                        index.insert(hash, slot);
                        model.insert(hash, slot);
                    }
                    Some(slot) if !insert => {
                        index.remove(hash, slot);
                        model.remove(&hash);
                    }
                    _ => {}
                }
                prop_assert_eq!(index.len(), model.len());
                for (hash, slot) in &model {
                    let is = |slot: Slot| hashes[usize::from(slot)] == *hash;
                    prop_assert_eq!(index.find(*hash, is), Some(*slot));
                }
                let taken = index.places.iter().filter(|place| **place != EMPTY).count();
                prop_assert_eq!(taken, model.len());
            }
        }
    }

    #[test]
    fn it_takes_as_many_as_a_shard_may_have_in_8192_places() {
        let mut index = Index::default();
        let hash = |slot: Slot| u64::from(slot).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let most = Slot::try_from(super::super::shard::MOST_SHARD_KEYS).unwrap();
        for slot in 0..most {
            index.insert(hash(slot), slot);
        }
        assert_eq!(index.places.len(), 8_192);
        for slot in 0..most {
            assert_eq!(index.find(hash(slot), |found| found == slot), Some(slot));
        }
    }
}
