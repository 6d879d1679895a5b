//! The slots of a shard: where its rows are.

use slab::Slab;

use super::fingerprint::Fingerprint;
use super::order::{Linked, Links, NONE, Slot};
use super::row::{Packed, Place, Row};

/// Slots come in chunks that never move: a store that grows copies no rows.
const CHUNK: usize = 128;

#[derive(Clone, Copy)]
struct Entry {
    fingerprint: Fingerprint,
    links: Links,
    row: Packed,
}

/// The goal of 64 bytes a key leaves 16 to its place in the index, which takes 5 to 11.
const _: () = assert!(size_of::<Entry>() == 48);

pub(super) struct Slots {
    chunks: Vec<Vec<Entry>>,
    /// How many slots of the chunks have ever been used.
    used: Slot,
    /// The first of the used slots that are free, linked by `after`.
    free: Slot,
    /// Rows that do not fit into a slot: what is in flight or released, and what keeps something.
    wide: Slab<Row>,
}

impl Default for Slots {
    fn default() -> Self {
        Self { chunks: Vec::new(), used: 0, free: NONE, wide: Slab::new() }
    }
}

impl Slots {
    pub(super) fn add(&mut self, fingerprint: Fingerprint, row: Row) -> Slot {
        let row = self.hold(row);
        let added = Entry { fingerprint, links: Links { before: NONE, after: NONE }, row };
        let slot = self.free;
        if slot != NONE {
            self.free = self.slot(slot).links.after;
            *self.slot_mut(slot) = added;
            return slot;
        }
        let slot = self.used;
        self.used += 1;
        if usize::from(slot) / CHUNK == self.chunks.len() {
            self.chunks.push(Vec::with_capacity(CHUNK));
        }
        self.chunks[usize::from(slot) / CHUNK].push(added);
        slot
    }

    pub(super) fn fingerprint(&self, slot: Slot) -> Fingerprint {
        self.slot(slot).fingerprint
    }

    pub(super) fn row(&self, slot: Slot) -> Row {
        match self.slot(slot).row.place() {
            Place::Packed(row) => row,
            Place::Wide(index) => self.wide[index].clone(),
        }
    }

    pub(super) fn set(&mut self, slot: Slot, row: Row) {
        match (self.slot(slot).row.place(), Packed::new(&row)) {
            (Place::Wide(index), None) => self.wide[index] = row,
            (place, _) => {
                self.leave(&place);
                let row = self.hold(row);
                self.slot_mut(slot).row = row;
            }
        }
    }

    /// Frees a slot that is in no lane any more.
    pub(super) fn remove(&mut self, slot: Slot) {
        self.leave(&self.slot(slot).row.place());
        let free = self.free;
        self.slot_mut(slot).links.after = free;
        self.free = slot;
    }

    /// Gives memory back. Every slot is free.
    pub(super) fn clear(&mut self) {
        self.chunks.truncate(1);
        self.chunks.iter_mut().for_each(Vec::clear);
        self.used = 0;
        self.free = NONE;
        self.wide = Slab::new();
    }

    /// Removes the wide row that a slot had.
    fn leave(&mut self, place: &Place) {
        if let Place::Wide(index) = place {
            self.wide.remove(*index);
            if self.wide.is_empty() && self.wide.capacity() > CHUNK {
                self.wide = Slab::new();
            }
        }
    }

    fn hold(&mut self, row: Row) -> Packed {
        Packed::new(&row).unwrap_or_else(|| Packed::wide(self.wide.insert(row)))
    }

    fn slot(&self, slot: Slot) -> &Entry {
        &self.chunks[usize::from(slot) / CHUNK][usize::from(slot) % CHUNK]
    }

    fn slot_mut(&mut self, slot: Slot) -> &mut Entry {
        &mut self.chunks[usize::from(slot) / CHUNK][usize::from(slot) % CHUNK]
    }

    #[cfg(test)]
    pub(super) fn used(&self) -> (Slot, usize) {
        (self.used, self.wide.len())
    }
}

impl Linked for Slots {
    fn links(&mut self, slot: Slot) -> &mut Links {
        &mut self.slot_mut(slot).links
    }

    fn due(&self, slot: Slot) -> u64 {
        match self.slot(slot).row.place() {
            Place::Packed(row) => row.due(),
            Place::Wide(index) => self.wide[index].due(),
        }
    }

    fn after(&self, slot: Slot) -> Slot {
        self.slot(slot).links.after
    }
}
