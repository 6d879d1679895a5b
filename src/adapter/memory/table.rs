//! The concurrent core: which shards a call locks, and what it does to their rows.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::super::contract::{
    CallTerms, Claimed, Completed, Entry, EntryState, Forgotten, PURGE_GRACE, Permanence, Released,
    Renewed,
};
use super::super::stored::StoredData;
use super::clock::{Clock, ms};
use super::fingerprint::{Caller, Fingerprint, Keyed};
use super::lock::Lock;
use super::order::Slot;
use super::pressure::{Gauge, Pressure};
use super::row::{Row, Standing, expiry};
use super::shard::{MOST_SHARD_KEYS, SHARD_KEYS, Shard};
use super::store::AtCapacity;
use crate::error::{Error, ErrorKind};
use crate::key::{DedupKey, List};

/// As many locks as a small store has, once it has keys enough.
const LOCKS: usize = 16;
/// How many expired keys an insertion clears away: more than it adds, so that a store which is
/// only written to stays clean without a purger.
const CLEARED_PER_INSERT: u32 = 2;
/// How many keys a purge clears away before it lets others into the shard.
const CLEARED_PER_TURN: u32 = 256;

pub(super) struct Table<L> {
    shards: Box<[L]>,
    pub(super) shard_capacity: usize,
    pub(super) at_capacity: AtCapacity,
    pub(super) clock: Clock,
    gauge: Gauge,
    keyed: Keyed,
    /// Where the next purge begins, so that small ones get around.
    purge_at: AtomicUsize,
}

/// Whether a call adds the keys that it does not find.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Absent {
    Added,
    Left,
}

/// One key in the course of a call.
struct Step<'a> {
    shard: &'a mut Shard,
    key: &'a DedupKey,
    fingerprint: Fingerprint,
    slot: Option<Slot>,
    caller: Caller,
    now: u64,
}

impl Step<'_> {
    fn row(&self) -> Option<Row> {
        self.slot.map(|slot| self.shard.row(slot))
    }

    /// There is room for a key that was not found: it was made before the first step.
    fn put(&mut self, row: Row) {
        match self.slot {
            Some(slot) => self.shard.set(slot, row),
            None => self.shard.insert(self.fingerprint, row),
        }
    }

    fn remove(&mut self) {
        if let Some(slot) = self.slot {
            self.shard.remove(slot);
        }
    }
}

impl<L: Lock> Table<L> {
    pub(super) fn new(capacity: usize, keyed: Keyed) -> Self {
        let capacity = capacity.max(1);
        let shards =
            (capacity / SHARD_KEYS).clamp(1, LOCKS).max(capacity.div_ceil(MOST_SHARD_KEYS));
        Self {
            shards: (0..shards).map(|_| L::default()).collect(),
            shard_capacity: capacity.div_ceil(shards),
            at_capacity: AtCapacity::default(),
            clock: Clock::new(),
            gauge: Gauge::default(),
            keyed,
            purge_at: AtomicUsize::new(0),
        }
    }

    pub(super) fn shards(&self) -> usize {
        self.shards.len()
    }

    pub(super) fn claim(
        &self,
        keys: &[DedupKey],
        terms: &CallTerms,
    ) -> Result<Vec<Claimed>, Error> {
        let on_claim = terms.permanence() == Permanence::OnClaim;
        self.each(keys, terms, Absent::Added, |step| {
            let mut row = if on_claim {
                Row::complete(step.caller, step.key, terms, step.now)
            } else {
                Row::leased(step.caller, terms, step.now)
            };
            if let Some(old) = step.row() {
                match old.standing(step.now) {
                    Standing::Complete if on_claim && old.is_of(&step.caller) => {
                        // A completion that was inserted counts no attempt.
                        return Claimed::first(old.attempts.max(1), old.takeover);
                    }
                    Standing::Complete => {
                        let mut seen = old.seen(step.now);
                        seen.stored = StoredData::fetched(old.kept.as_ref(), terms.fetch());
                        return Claimed::Duplicate(seen);
                    }
                    _ if !on_claim && old.is_claimed_by(&step.caller) => {
                        row.attempts = old.attempts;
                        row.takeover = old.takeover;
                        row.first_seen_at = old.first_seen_at;
                    }
                    Standing::Leased => return Claimed::InFlight,
                    standing @ (Standing::Lapsed | Standing::Released) => {
                        row.attempts = old.attempts.saturating_add(1);
                        row.takeover = standing == Standing::Lapsed;
                        row.first_seen_at = old.first_seen_at;
                    }
                    Standing::Expired => {}
                }
            }
            let granted = Claimed::first(row.attempts, row.takeover);
            step.put(row);
            granted
        })
    }

    pub(super) fn renew(
        &self,
        keys: &[DedupKey],
        terms: &CallTerms,
    ) -> Result<Vec<Renewed>, Error> {
        self.each(keys, terms, Absent::Added, |step| {
            let lease_until = step.now.saturating_add(ms(terms.lease()));
            match step.row() {
                Some(row) if row.is_claimed_by(&step.caller) => {
                    step.put(Row { lease_until, ..row });
                }
                Some(_) => return Renewed::Lost,
                None => step.put(Row::leased(step.caller, terms, step.now)),
            }
            Renewed::Held
        })
    }

    pub(super) fn complete(
        &self,
        keys: &[DedupKey],
        terms: &CallTerms,
    ) -> Result<Vec<Completed>, Error> {
        self.each(keys, terms, Absent::Added, |step| {
            let now = step.now;
            let expired = |row: &Row| row.expires_at <= now;
            let old = step.row().filter(|row| row.completed_at.is_none() || !expired(row));
            let Some(mut row) = old else {
                let row = Row::complete(step.caller, step.key, terms, now);
                step.put(Row { attempts: 0, ..row });
                return Completed::Inserted;
            };
            let held = row.is_of(&step.caller);
            if row.completed_at.is_none() {
                row.completed_at = Some(now);
                row.kept = terms.stored_data_for(step.key).map(Arc::new);
                if expired(&row) {
                    row.expires_at = expiry(terms, now);
                }
                step.put(row);
            }
            if held { Completed::Held } else { Completed::LeaseLost }
        })
    }

    pub(super) fn release(
        &self,
        keys: &[DedupKey],
        terms: &CallTerms,
    ) -> Result<Vec<Released>, Error> {
        let on_claim = terms.permanence() == Permanence::OnClaim;
        self.each(keys, terms, Absent::Left, |step| match step.row() {
            Some(row) if on_claim && row.completed_at.is_some() && row.is_of(&step.caller) => {
                step.remove();
                Released::Released
            }
            Some(row) if !on_claim && row.is_claimed_by(&step.caller) => {
                step.put(Row { holder: None, ..row });
                Released::Released
            }
            _ => Released::NotHeld,
        })
    }

    pub(super) fn get(&self, key: &DedupKey) -> Option<Entry> {
        let row = self.look(key)?;
        let wall = |at| self.clock.wall(at);
        let state = match (row.standing(self.clock.now()), row.completed_at) {
            (Standing::Expired, _) => return None,
            (_, Some(at)) => EntryState::Complete { completed_at: wall(at) },
            (Standing::Released, None) => EntryState::Released,
            (_, None) => EntryState::InFlight { lease_until: wall(row.lease_until) },
        };
        let entry = Entry::new(state, wall(row.first_seen_at), wall(row.expires_at));
        Some(entry.with_attempts(row.attempts, row.takeover))
    }

    pub(super) fn forget(&self, key: &DedupKey) -> Forgotten {
        let fingerprint = self.keyed.fingerprint(key);
        let mut shard = self.lock(fingerprint);
        let Some(slot) = shard.find(fingerprint) else { return Forgotten::Missing };
        if shard.row(slot).standing(self.clock.now()) == Standing::Leased {
            return Forgotten::InFlight;
        }
        shard.remove(slot);
        Forgotten::Removed
    }

    pub(super) fn purge(&self, limit: u32) -> u32 {
        let shards = self.shards.len();
        let start = self.purge_at.fetch_add(1, Ordering::Relaxed);
        let until = self.clock.now().saturating_sub(ms(PURGE_GRACE));
        let mut purged = 0;
        for place in 0..shards {
            loop {
                let turn = CLEARED_PER_TURN.min(limit - purged);
                if turn == 0 {
                    return purged;
                }
                let mut shard = self.shards[start.wrapping_add(place) % shards].lock();
                let cleared = shard.purge(turn, until);
                purged += cleared;
                if cleared < turn {
                    break;
                }
            }
        }
        purged
    }

    pub(super) fn count(&self) -> u64 {
        let keys: usize = self.shards.iter().map(|shard| shard.lock().len()).sum();
        keys as u64
    }

    /// Runs `step` on every key, in order, while all their shards are locked.
    ///
    /// All or nothing: the keys that it adds have room before the first step, or there is none.
    fn each<T>(
        &self,
        keys: &[DedupKey],
        terms: &CallTerms,
        absent: Absent,
        mut step: impl FnMut(&mut Step<'_>) -> T,
    ) -> Result<Vec<T>, Error> {
        let caller = self.keyed.caller(terms);
        if let [key] = keys {
            let fingerprint = self.keyed.fingerprint(key);
            let mut shard = self.lock(fingerprint);
            let now = self.clock.now();
            let slot = shard.find(fingerprint);
            let mut pressure = Pressure::default();
            if slot.is_none() && absent == Absent::Added {
                shard.purge(CLEARED_PER_INSERT, now);
                let evicted = self.evicted(&shard, 1, &[], now)?;
                pressure.evict(&mut shard, &evicted, now);
                pressure.fill(shard.len(), 1, self.shard_capacity);
            }
            let answer = {
                let shard = &mut *shard;
                step(&mut Step { shard, key, fingerprint, slot, caller, now })
            };
            drop(shard);
            self.gauge.note(&pressure, now);
            return Ok(vec![answer]);
        }
        let of_key: Vec<(usize, Fingerprint)> = keys
            .iter()
            .map(|key| {
                let fingerprint = self.keyed.fingerprint(key);
                (fingerprint.shard(self.shards.len()), fingerprint)
            })
            .collect();
        let mut by_shard = of_key.clone();
        by_shard.sort_unstable_by_key(|(shard, _)| *shard);
        let of_shard: Vec<&[(usize, Fingerprint)]> =
            by_shard.chunk_by(|(one, _), (other, _)| one == other).collect();
        // In ascending order, so that two calls never wait for each other.
        let mut locked: Vec<_> =
            of_shard.iter().map(|of_shard| self.shards[of_shard[0].0].lock()).collect();
        let now = self.clock.now();
        let mut pressure = Pressure::default();
        if absent == Absent::Added {
            let mut room = Vec::with_capacity(locked.len());
            for (shard, of_shard) in locked.iter_mut().zip(&of_shard) {
                let wanted: Vec<Fingerprint> =
                    of_shard.iter().map(|(_, fingerprint)| *fingerprint).collect();
                room.push(self.room(shard, &wanted, now)?);
            }
            for (shard, (added, evicted)) in locked.iter_mut().zip(room) {
                pressure.evict(shard, &evicted, now);
                pressure.fill(shard.len(), added, self.shard_capacity);
            }
        }
        let steps = keys.iter().zip(of_key).map(|(key, (shard, fingerprint))| {
            let place = of_shard.binary_search_by_key(&shard, |of_shard| of_shard[0].0);
            let shard = &mut locked[place.unwrap_or_default()];
            let slot = shard.find(fingerprint);
            step(&mut Step { shard, key, fingerprint, slot, caller, now })
        });
        let answers = steps.collect();
        drop(locked);
        self.gauge.note(&pressure, now);
        Ok(answers)
    }

    /// How many of these keys are not there yet, and what has to be evicted for them to have room.
    fn room(
        &self,
        shard: &mut Shard,
        keys: &[Fingerprint],
        now: u64,
    ) -> Result<(usize, List<Slot>), Error> {
        let is_absent = |shard: &Shard, key: &Fingerprint| shard.find(*key).is_none();
        let absent = keys.iter().filter(|key| is_absent(shard, key)).count();
        if absent == 0 {
            return Ok((0, List::default()));
        }
        let absent = u32::try_from(absent).unwrap_or(u32::MAX);
        shard.purge(absent.saturating_mul(CLEARED_PER_INSERT), now);
        // Some of those that were there may just have been purged.
        let mut present: Vec<Slot> = keys.iter().filter_map(|key| shard.find(*key)).collect();
        present.sort_unstable();
        let added = keys.len() - present.len();
        Ok((added, self.evicted(shard, added, &present, now)?))
    }

    /// What has to be evicted, but for some sorted slots, for so many keys to have room.
    fn evicted(
        &self,
        shard: &Shard,
        added: usize,
        spared: &[Slot],
        now: u64,
    ) -> Result<List<Slot>, Error> {
        let over = (shard.len() + added).saturating_sub(self.shard_capacity);
        if over == 0 {
            return Ok(List::default());
        }
        if self.at_capacity == AtCapacity::EvictOldest {
            let evicted = shard.oldest(over, now, spared);
            if evicted.len() == over {
                return Ok(evicted);
            }
        }
        Err(Error::new(ErrorKind::Full, "remembering a key"))
    }

    fn look(&self, key: &DedupKey) -> Option<Row> {
        let fingerprint = self.keyed.fingerprint(key);
        let shard = self.lock(fingerprint);
        shard.find(fingerprint).map(|slot| shard.row(slot))
    }

    fn lock(&self, of: Fingerprint) -> L::Guard<'_> {
        self.shards[of.shard(self.shards.len())].lock()
    }

    #[cfg(test)]
    pub(super) fn shard_of(&self, key: &DedupKey) -> usize {
        self.keyed.fingerprint(key).shard(self.shards.len())
    }

    /// Of every shard how many slots and wide rows are in use or free, and its lanes.
    #[cfg(test)]
    pub(super) fn used(&self) -> Vec<(Slot, usize, usize)> {
        let used = self.shards.iter().map(|shard| {
            let shard = shard.lock();
            let (slots, wide) = shard.slots().used();
            (slots, wide, shard.order().lanes())
        });
        used.collect()
    }
}
