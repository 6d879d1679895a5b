//! [`Table`]: which shards a call locks, and what it does to their rows.

use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::clock::{Clock, ms};
use super::expiry::Slot;
use super::pressure::{Gauge, Pressure};
use super::row::{Fingerprint, KeyHasher, Row, RowState};
use super::shard::{MAX_SHARD_KEYS, Room, Shard};
use super::sync::{Mutex, MutexGuard};
use crate::adapter::contract::PURGE_GRACE;
use crate::adapter::replies::{
    Claimed, Completed, Entry, EntryState, Forgotten, Released, Renewed,
};
use crate::adapter::stored::{Fetch, StoredData};
use crate::adapter::terms::{CallTerms, Permanence};
use crate::error::{Error, ErrorKind};
use crate::key::DedupKey;

/// A shard is worth a lock of its own from this many keys on.
const MIN_SHARD_KEYS: usize = 1_024;
/// A store with enough keys has at least this many shards.
const MIN_SHARDS: usize = 16;
/// How many keys a purge removes before it lets others into the shard.
const PURGED_PER_LOCK: usize = 256;

/// What a [`MemoryAdapter`](super::MemoryAdapter) does with a new key when it is full.
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

pub(super) struct Table {
    shards: Box<[Mutex<Shard>]>,
    pub(super) shard_capacity: usize,
    pub(super) at_capacity: AtCapacity,
    pub(super) clock: Clock,
    gauge: Gauge,
    hasher: KeyHasher,
    /// The shard at which the next purge begins, so that small purges reach all shards.
    purge_at: AtomicUsize,
}

/// What a call does with a key that it does not find.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Missing {
    Insert,
    Ignore,
}

/// One key of a call, and its row.
struct RowCursor<'a> {
    shard: &'a mut Shard,
    slot: Option<Slot>,
    fingerprint: Fingerprint,
    key: &'a DedupKey,
    terms: &'a CallTerms,
    now: u64,
}

impl RowCursor<'_> {
    fn row(&self) -> Option<&Row> {
        self.slot.map(|slot| self.shard.row(slot))
    }

    fn new_row(&self) -> Row {
        Row::leased(self.fingerprint, self.terms, self.now)
    }

    /// Inserts the row, or replaces the one that is there.
    fn put(&mut self, row: Row) {
        match self.slot {
            Some(slot) => self.shard.update(slot, |old| *old = row),
            None => self.shard.insert(row),
        }
    }

    fn update(&mut self, change: impl FnOnce(&mut Row)) {
        if let Some(slot) = self.slot {
            self.shard.update(slot, change);
        }
    }

    fn remove(&mut self) {
        if let Some(slot) = self.slot {
            self.shard.remove(slot);
        }
    }
}

impl Table {
    pub(super) fn new(capacity: usize, hasher: KeyHasher) -> Self {
        let capacity = capacity.max(1);
        let shards =
            (capacity / MIN_SHARD_KEYS).clamp(1, MIN_SHARDS).max(capacity.div_ceil(MAX_SHARD_KEYS));
        let shard_capacity = capacity.div_ceil(shards);
        Self {
            shards: (0..shards).map(|_| Mutex::new(Shard::new(shard_capacity))).collect(),
            shard_capacity,
            at_capacity: AtCapacity::default(),
            clock: Clock::new(),
            gauge: Gauge::default(),
            hasher,
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
        self.each(keys, terms, Missing::Insert, |cursor| {
            let (key, now) = (cursor.key, cursor.now);
            let mut row = cursor.new_row();
            if let Some(old) = cursor.row() {
                match old.state(now) {
                    RowState::Complete if on_claim && old.is_by(terms.token()) => {
                        // A completion without a claim has counted no attempt.
                        return Claimed::first(old.attempts.max(1), old.takeover);
                    }
                    RowState::Complete => return Claimed::Duplicate(old.seen(now, terms.fetch())),
                    _ if !on_claim && old.is_claimed_by(terms.token()) => {
                        row.attempts = old.attempts;
                        row.takeover = old.takeover;
                        row.first_seen_at = old.first_seen_at;
                    }
                    RowState::Leased => return Claimed::InFlight,
                    state @ (RowState::Lapsed | RowState::Released) => {
                        row.attempts = old.attempts.saturating_add(1);
                        row.takeover = state == RowState::Lapsed;
                        row.first_seen_at = old.first_seen_at;
                    }
                    RowState::Expired => {}
                }
            }
            if on_claim {
                row.complete(key, terms, now);
            }
            let first = Claimed::first(row.attempts, row.takeover);
            cursor.put(row);
            first
        })
    }

    pub(super) fn renew(
        &self,
        keys: &[DedupKey],
        terms: &CallTerms,
    ) -> Result<Vec<Renewed>, Error> {
        self.each(keys, terms, Missing::Insert, |cursor| {
            let new = cursor.new_row();
            match cursor.row() {
                Some(row) if row.is_claimed_by(terms.token()) => {
                    cursor.update(|row| row.ends_at = new.ends_at);
                }
                Some(_) => return Renewed::Lost,
                None => cursor.put(new),
            }
            Renewed::Held
        })
    }

    pub(super) fn complete(
        &self,
        keys: &[DedupKey],
        terms: &CallTerms,
    ) -> Result<Vec<Completed>, Error> {
        self.each(keys, terms, Missing::Insert, |cursor| {
            let (key, now) = (cursor.key, cursor.now);
            // An expired complete row is as good as missing; an incomplete one counts.
            let row = cursor.row().filter(|row| !row.is_complete || row.expires_at > now);
            let Some(row) = row else {
                let mut row = Row { attempts: 0, ..cursor.new_row() };
                row.complete(key, terms, now);
                cursor.put(row);
                return Completed::Inserted;
            };
            let held = row.is_by(terms.token());
            if !row.is_complete {
                cursor.update(|row| row.complete(key, terms, now));
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
        self.each(keys, terms, Missing::Ignore, |cursor| {
            let is_held = |row: &Row| row.is_complete == on_claim && row.is_by(terms.token());
            if !cursor.row().is_some_and(is_held) {
                return Released::NotHeld;
            }
            if on_claim {
                cursor.remove();
            } else {
                cursor.update(|row| row.token = None);
            }
            Released::Released
        })
    }

    pub(super) fn get(&self, key: &DedupKey) -> Option<Entry> {
        self.look(key, |row, now| {
            let wall = |at| self.clock.wall(at);
            let state = match row.state(now) {
                RowState::Expired => return None,
                RowState::Complete => EntryState::Complete { completed_at: wall(row.ends_at) },
                RowState::Released => EntryState::Released,
                RowState::Leased | RowState::Lapsed => {
                    EntryState::InFlight { lease_until: wall(row.ends_at) }
                }
            };
            let entry = Entry::new(state, wall(row.first_seen_at), wall(row.expires_at));
            let mut entry = entry.with_attempts(row.attempts, row.takeover);
            if row.is_complete {
                let stored = row.stored.as_ref();
                entry.stored = StoredData::fetched(stored, Fetch::DigestAndResponse);
            }
            Some(entry)
        })
    }

    pub(super) fn forget(&self, key: &DedupKey) -> Forgotten {
        let fingerprint = self.hasher.fingerprint(key);
        let mut shard = self.lock(fingerprint.shard(self.shards.len()));
        let Some(slot) = shard.find(fingerprint) else { return Forgotten::Missing };
        if shard.row(slot).state(self.clock.now()) == RowState::Leased {
            return Forgotten::InFlight;
        }
        shard.remove(slot);
        Forgotten::Removed
    }

    pub(super) fn purge(&self, limit: u32) -> u64 {
        let mut left = usize::try_from(limit).unwrap_or(usize::MAX);
        let mut total = 0;
        let start = self.purge_at.fetch_add(1, Ordering::Relaxed);
        let until = self.clock.now().saturating_sub(ms(PURGE_GRACE));
        for number in 0..self.shards.len() {
            let number = start.wrapping_add(number) % self.shards.len();
            while left > 0 {
                let portion = left.min(PURGED_PER_LOCK);
                let purged = self.lock(number).purge(portion, until);
                left -= purged;
                total += purged as u64;
                if purged < portion {
                    break;
                }
            }
        }
        total
    }

    pub(super) fn count(&self) -> u64 {
        let keys: usize = (0..self.shards.len()).map(|number| self.lock(number).len()).sum();
        keys as u64
    }

    /// Runs `step` on every key, in order, while all their shards are locked.
    ///
    /// All or nothing: the shards have room for all missing keys before the first step, or the call
    /// fails and changes nothing.
    fn each<T>(
        &self,
        keys: &[DedupKey],
        terms: &CallTerms,
        missing: Missing,
        mut step: impl FnMut(&mut RowCursor<'_>) -> T,
    ) -> Result<Vec<T>, Error> {
        let place = |key: &DedupKey| {
            let fingerprint = self.hasher.fingerprint(key);
            (fingerprint.shard(self.shards.len()), fingerprint)
        };
        let mut pressure = Pressure::default();
        // Almost every call has one key.
        if let [key] = keys {
            let (number, fingerprint) = place(key);
            let mut shard = self.lock(number);
            let now = self.clock.now();
            let slot = shard.find(fingerprint);
            if slot.is_none() && missing == Missing::Insert {
                shard.purge_for(1, now);
                let room = shard.room_for(1, &[], self.may_evict(), now).ok_or_else(full)?;
                pressure.make_room(&mut shard, &room, self.shard_capacity, now);
            }
            let cursor = RowCursor { shard: &mut shard, slot, fingerprint, key, terms, now };
            let reply = step(&mut { cursor });
            drop(shard);
            self.gauge.report(&pressure, now);
            return Ok(vec![reply]);
        }
        let places: Vec<(usize, Fingerprint)> = keys.iter().map(place).collect();
        let mut by_shard = places.clone();
        by_shard.sort_unstable_by_key(|(number, _)| *number);
        let groups = || by_shard.chunk_by(|(one, _), (other, _)| one == other);
        // In ascending order, so that two calls never wait for each other.
        let mut shards: Vec<(usize, MutexGuard<'_, Shard>)> =
            groups().map(|group| (group[0].0, self.lock(group[0].0))).collect();
        let now = self.clock.now();
        if missing == Missing::Insert {
            let mut rooms = Vec::with_capacity(shards.len());
            for ((_, shard), group) in shards.iter_mut().zip(groups()) {
                rooms.push(self.room_for(shard, group, now)?);
            }
            for ((_, shard), room) in shards.iter_mut().zip(&rooms) {
                pressure.make_room(shard, room, self.shard_capacity, now);
            }
        }
        let steps = keys.iter().zip(places).map(|(key, (number, fingerprint))| {
            let at = shards.binary_search_by_key(&number, |(number, _)| *number);
            let shard = &mut *shards[at.unwrap_or_default()].1;
            let slot = shard.find(fingerprint);
            step(&mut RowCursor { shard, slot, fingerprint, key, terms, now })
        });
        let replies = steps.collect();
        drop(shards);
        self.gauge.report(&pressure, now);
        Ok(replies)
    }

    fn room_for(
        &self,
        shard: &mut Shard,
        keys: &[(usize, Fingerprint)],
        now: u64,
    ) -> Result<Room, Error> {
        let present = |shard: &Shard| -> Vec<Slot> {
            keys.iter().filter_map(|(_, fingerprint)| shard.find(*fingerprint)).collect()
        };
        let mut spared = present(shard);
        // The purge may remove some of these keys.
        if shard.purge_for(keys.len() - spared.len(), now) > 0 {
            spared = present(shard);
        }
        spared.sort_unstable();
        let missing = keys.len() - spared.len();
        shard.room_for(missing, &spared, self.may_evict(), now).ok_or_else(full)
    }

    fn may_evict(&self) -> bool {
        self.at_capacity == AtCapacity::EvictOldest
    }

    fn look<T>(&self, key: &DedupKey, read: impl FnOnce(&Row, u64) -> Option<T>) -> Option<T> {
        let fingerprint = self.hasher.fingerprint(key);
        let shard = self.lock(fingerprint.shard(self.shards.len()));
        read(shard.row(shard.find(fingerprint)?), self.clock.now())
    }

    fn lock(&self, number: usize) -> MutexGuard<'_, Shard> {
        // No step leaves a shard half-changed when it panics.
        self.shards[number].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn full() -> Error {
    Error::new(ErrorKind::Full, "claiming keys")
}
