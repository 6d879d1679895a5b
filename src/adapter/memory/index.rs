//! Where in a shard a key is.

use super::order::Slot;
use super::shard::MOST_SHARD_KEYS;

/// Slots by the hash of their keys, in buckets of one cache line.
///
/// 1. A place holds a slot and the upper 19 bits of its hash, in four bytes. A key that is new is
///    looked for and put down in one cache line, and the rows of others are not read.
/// 2. A bucket is compared as a whole, without a branch that depends on where in it something is.
///    For a new key the way through is always the same, and the processor goes on to the rest of the
///    insertion while that line is still on its way from memory.
/// 3. Those bits say where a slot belongs at every size that the index can have. So it grows
///    without a look at the rows, in microseconds.
/// 4. What does not fit into its bucket goes to the next one that has room. Where something is
///    removed from a full bucket, what had gone on moves up: there are no tombstones.
/// 5. At most three quarters of the places are taken.
///
/// # Why not `hashbrown`?
///
/// It keeps tags and values apart, two cache misses for one here, and reads every row again when it
/// grows. At a million keys an insertion took a fifth longer with it than with linear probing over
/// places like these, and that longer than with these buckets.
#[derive(Default)]
pub(super) struct Index {
    /// None, or a power of two of them.
    buckets: Vec<Bucket>,
    len: usize,
}

const WIDTH: usize = 16;

/// Its places are taken from the first one on.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Bucket([Place; WIDTH]);

const _: () = assert!(size_of::<Bucket>() == 64);

#[derive(Clone, Copy, PartialEq, Eq)]
struct Place(u32);

const SLOT_BITS: u32 = 13;
const TAG_BITS: u32 = 32 - SLOT_BITS;
/// The slot of all ones is no slot of a shard.
const EMPTY: Place = Place(u32::MAX);
const _: () = assert!(MOST_SHARD_KEYS < (1 << SLOT_BITS) - 1);

impl Place {
    fn new(tag: u32, slot: Slot) -> Self {
        Self(tag << SLOT_BITS | u32::from(slot))
    }

    fn tag(self) -> u32 {
        self.0 >> SLOT_BITS
    }

    fn slot(self) -> Slot {
        // 13 bits are left.
        Slot::try_from(self.0 & ((1 << SLOT_BITS) - 1)).unwrap_or_default()
    }
}

impl Bucket {
    fn is_full(&self) -> bool {
        self.0[WIDTH - 1] != EMPTY
    }

    fn len(&self) -> usize {
        self.0.iter().map(|place| usize::from(*place != EMPTY)).sum()
    }

    /// Empty places have the tag of all ones.
    fn has_tag(&self, tag: u32) -> bool {
        self.0.iter().fold(false, |has, place| has | (place.tag() == tag))
    }

    fn slots(&self, tag: u32) -> impl Iterator<Item = Slot> {
        let of_tag = self.0.iter().filter(move |place| place.tag() == tag && **place != EMPTY);
        of_tag.map(|place| place.slot())
    }

    /// Adds a place to one that is not full.
    fn push(&mut self, place: Place) {
        self.0[self.len()] = place;
    }

    fn remove(&mut self, at: usize) -> Place {
        let last = self.len() - 1;
        self.0.swap(at, last);
        std::mem::replace(&mut self.0[last], EMPTY)
    }
}

impl Index {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn find(&self, hash: u64, is: impl Fn(Slot) -> bool) -> Option<Slot> {
        if self.buckets.is_empty() {
            return None;
        }
        let tag = tag(hash);
        let mut at = self.home(tag);
        loop {
            let bucket = &self.buckets[at];
            if bucket.has_tag(tag)
                && let Some(slot) = bucket.slots(tag).find(|slot| is(*slot))
            {
                return Some(slot);
            }
            if !bucket.is_full() {
                return None;
            }
            at = self.next(at);
        }
    }

    /// Adds a slot that is not there.
    pub(super) fn insert(&mut self, hash: u64, slot: Slot) {
        if (self.len + 1) * 4 > self.buckets.len() * WIDTH * 3 {
            self.grow();
        }
        self.put(Place::new(tag(hash), slot));
        self.len += 1;
    }

    /// Removes a slot that is there.
    pub(super) fn remove(&mut self, hash: u64, slot: Slot) {
        if self.buckets.is_empty() {
            return;
        }
        let place = Place::new(tag(hash), slot);
        let mut hole = self.home(place.tag());
        let found = loop {
            let bucket = &self.buckets[hole];
            match bucket.0.iter().position(|other| *other == place) {
                Some(found) => break found,
                None if bucket.is_full() => hole = self.next(hole),
                None => return,
            }
        };
        self.len -= 1;
        let mut passed = self.buckets[hole].is_full();
        self.buckets[hole].remove(found);
        let mut at = hole;
        // As long as a bucket is full, something may have gone past it.
        while passed {
            at = self.next(at);
            passed = self.buckets[at].is_full();
            if let Some(moves) = self.moves_up(at, hole) {
                let place = self.buckets[at].remove(moves);
                self.buckets[hole].push(place);
                hole = at;
            }
        }
    }

    /// What of the bucket `at` has gone past the bucket `hole`, or would have.
    fn moves_up(&self, at: usize, hole: usize) -> Option<usize> {
        let mask = self.buckets.len() - 1;
        let from_hole = at.wrapping_sub(hole) & mask;
        self.buckets[at].0.iter().position(|place| {
            let from_home = at.wrapping_sub(self.home(place.tag())) & mask;
            *place != EMPTY && from_home >= from_hole
        })
    }

    fn grow(&mut self) {
        let buckets = (self.buckets.len() * 2).max(1);
        let old = std::mem::replace(&mut self.buckets, vec![Bucket([EMPTY; WIDTH]); buckets]);
        let places = old.iter().flat_map(|bucket| bucket.0);
        places.filter(|place| *place != EMPTY).for_each(|place| self.put(place));
    }

    fn put(&mut self, place: Place) {
        let mut at = self.home(place.tag());
        while self.buckets[at].is_full() {
            at = self.next(at);
        }
        self.buckets[at].push(place);
    }

    /// The upper bits of the tag, as many as there are bits in the number of a bucket.
    fn home(&self, tag: u32) -> usize {
        // A tag is shorter than a `usize` on every platform with a heap.
        (usize::try_from(tag).unwrap_or_default() * self.buckets.len()) >> TAG_BITS
    }

    fn next(&self, at: usize) -> usize {
        (at + 1) & (self.buckets.len() - 1)
    }
}

fn tag(hash: u64) -> u32 {
    // 19 bits are left.
    u32::try_from(hash >> (u64::BITS - TAG_BITS)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    /// Hashes that crowd: their homes are few, at the end of the table among them.
    fn crowded() -> impl Strategy<Value = u64> {
        const LAST: u32 = (1 << TAG_BITS) - 1;
        prop_oneof![4 => Just(0), 4 => 0..4_u32, 4 => LAST - 3..=LAST, 1 => 0..=LAST]
            .prop_flat_map(|tag| (0_u64..9).prop_map(move |low| u64::from(tag) << 45 | low))
    }

    proptest! {
        #[test]
        fn it_finds_what_was_inserted_and_not_removed(
            steps in prop::collection::vec((crowded(), prop::bool::weighted(0.7)), 1..300),
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
                let taken = index.buckets.iter().map(Bucket::len).sum::<usize>();
                prop_assert_eq!(taken, model.len());
            }
        }
    }

    #[test]
    fn it_takes_as_many_as_a_shard_may_have_in_8192_places() {
        let mut index = Index::default();
        let hash = |slot: Slot| u64::from(slot).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let most = Slot::try_from(MOST_SHARD_KEYS).unwrap();
        for slot in 0..most {
            index.insert(hash(slot), slot);
        }
        assert_eq!(index.buckets.len() * WIDTH, 8_192);
        for slot in 0..most {
            assert_eq!(index.find(hash(slot), |found| found == slot), Some(slot));
        }
    }
}
