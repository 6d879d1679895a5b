//! [`Table`]: the shards that a call locks, and the changes of their rows.

use std::collections::HashSet;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::clock::{Clock, ms};
use super::pressure::{Gauge, Pressure};
use super::row::{Fingerprint, KeyHasher, Row, RowState};
use super::shard::{Change, MAX_SHARD_KEYS, Shard};
use super::sync::{Mutex, MutexGuard};
use crate::adapter::contract::PURGE_GRACE;
use crate::adapter::inspection::Stats;
use crate::adapter::replies::{Claimed, Completed, Entry, EntryState, Forgotten, Renewed};
use crate::adapter::stored::Fetch;
use crate::adapter::terms::{CallTerms, Permanence};
use crate::error::{Error, ErrorKind};
use crate::key::DedupKey;

/// A shard is worth a lock of its own from this many keys on.
const MIN_SHARD_KEYS: usize = 1_024;
/// A store with enough keys has at least this many shards.
const MIN_SHARDS: usize = 16;
/// How many keys a purge removes before it releases the lock of the shard.
const PURGED_PER_LOCK: usize = 256;

/// How a full [`MemoryAdapter`](super::MemoryAdapter) treats a new key.
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

type Replies<T> = Result<Vec<T>, Error>;

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

    /// On arrival, claims the later identities of events in a second step: see
    /// [`DedupAdapter`](super::super::DedupAdapter).
    pub(super) fn claim(&self, keys: &[DedupKey], terms: &CallTerms) -> Replies<Claimed> {
        let later_of = |key: &DedupKey| match terms.permanence() {
            Permanence::OnClaim => terms.later_identity_of(key).cloned(),
            Permanence::OnCompletion { .. } => None,
        };
        let later: HashSet<DedupKey> = keys.iter().filter_map(later_of).collect();
        let mut replies = self.claim_unless(&later, keys, terms)?;
        if later.is_empty() {
            return Ok(replies);
        }
        let firsts =
            keys.iter().zip(&replies).filter(|(_, reply)| matches!(reply, Claimed::First { .. }));
        let mut granted: Vec<DedupKey> = firsts.filter_map(|(key, _)| later_of(key)).collect();
        granted.retain(|key| keys.binary_search(key).is_ok());
        let claimed = self.claim_unless(&HashSet::new(), &granted, terms);
        for (key, reply) in granted.iter().zip(claimed.map_err(Error::with_unknown_outcome)?) {
            if let Ok(place) = keys.binary_search(key) {
                replies[place] = reply;
            }
        }
        Ok(replies)
    }

    /// Claims the keys that are free. A free key of `others` is in flight.
    fn claim_unless(
        &self,
        others: &HashSet<DedupKey>,
        keys: &[DedupKey],
        terms: &CallTerms,
    ) -> Replies<Claimed> {
        let on_claim = terms.permanence() == Permanence::OnClaim;
        self.each(keys, terms, true, |row, mut new, key, now| {
            if let Some(old) = row {
                match old.state(now) {
                    RowState::Complete if on_claim && old.is_by(terms.token()) => {
                        // A completion without a claim has counted no attempt.
                        let first = Claimed::first(old.attempts.max(1), old.takeover);
                        return (first, Change::None);
                    }
                    RowState::Complete => {
                        return (Claimed::Duplicate(old.seen(now, terms.fetch())), Change::None);
                    }
                    _ if !on_claim && old.is_claimed_by(terms.token()) => {
                        new.attempts = old.attempts;
                        new.takeover = old.takeover;
                        new.first_seen_at = old.first_seen_at;
                    }
                    RowState::Leased => return (Claimed::InFlight, Change::None),
                    state @ (RowState::Lapsed | RowState::Released) => {
                        new.attempts = old.attempts.saturating_add(1);
                        new.takeover = state == RowState::Lapsed;
                        new.first_seen_at = old.first_seen_at;
                    }
                    RowState::Expired => {}
                }
            }
            if others.contains(key) {
                return (Claimed::InFlight, Change::None);
            }
            if on_claim {
                new.complete(key, terms, now);
            }
            (Claimed::first(new.attempts, new.takeover), Change::Put(new))
        })
    }

    pub(super) fn renew(&self, keys: &[DedupKey], terms: &CallTerms) -> Replies<Renewed> {
        self.each(keys, terms, true, |row, new, _, _| match row {
            Some(row) if row.is_claimed_by(terms.token()) => {
                row.ends_at = new.ends_at;
                (Renewed::Held, Change::None)
            }
            Some(_) => (Renewed::Lost, Change::None),
            None => (Renewed::Held, Change::Put(new)),
        })
    }

    pub(super) fn complete(&self, keys: &[DedupKey], terms: &CallTerms) -> Replies<Completed> {
        self.each(keys, terms, true, |row, mut new, key, now| {
            // An expired complete row counts as missing. An incomplete row does not.
            let Some(row) = row.filter(|row| !row.is_complete || row.expires_at > now) else {
                new.attempts = 0;
                new.complete(key, terms, now);
                return (Completed::Inserted, Change::Put(new));
            };
            if !row.is_complete {
                row.complete(key, terms, now);
            }
            let held = row.is_by(terms.token());
            (if held { Completed::Held } else { Completed::LeaseLost }, Change::None)
        })
    }

    pub(super) fn release(&self, keys: &[DedupKey], terms: &CallTerms) -> Result<(), Error> {
        let on_claim = terms.permanence() == Permanence::OnClaim;
        self.each(keys, terms, false, |row, _, _, _| match row {
            Some(row) if row.is_complete == on_claim && row.is_by(terms.token()) => {
                row.token = None;
                ((), if on_claim { Change::Remove } else { Change::None })
            }
            _ => ((), Change::None),
        })
        .map(drop)
    }

    pub(super) fn get(&self, key: &DedupKey) -> Option<Entry> {
        self.change(key, |row, now| {
            let wall = |at| self.clock.wall(at);
            let entry = row.and_then(|row| {
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
                    entry.stored = row.seen(now, Fetch::DigestAndResponse).stored;
                }
                Some(entry)
            });
            (entry, Change::None)
        })
    }

    pub(super) fn forget(&self, key: &DedupKey) -> Forgotten {
        self.change(key, |row, now| match row.map(|row| row.state(now)) {
            Some(RowState::Leased) => (Forgotten::InFlight, Change::None),
            Some(RowState::Expired) | None => (Forgotten::Missing, Change::None),
            Some(_) => (Forgotten::Removed, Change::Remove),
        })
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

    /// Reads every row, one shard at a time: a call waits for the rows of one shard, 7,168 at most.
    pub(super) fn stats(&self) -> Stats {
        let now = self.clock.now();
        let mut stats = Stats { is_exact: true, ..Stats::default() };
        for number in 0..self.shards.len() {
            self.lock(number).add_to(&mut stats, now);
        }
        stats
    }

    /// Runs `step` on every key, in order, while all their shards are locked. `step` gets the key's
    /// row, a leased row that could replace it, the key and the time.
    ///
    /// If the call inserts, it makes room for all missing keys before the first step. If the keys have no
    /// room, the call fails and changes nothing.
    fn each<T>(
        &self,
        keys: &[DedupKey],
        terms: &CallTerms,
        inserts: bool,
        step: impl Fn(Option<&mut Row>, Row, &DedupKey, u64) -> (T, Change),
    ) -> Replies<T> {
        let may_evict = self.at_capacity == AtCapacity::EvictOldest;
        let full = || Error::new(ErrorKind::Full, "claiming keys");
        // Almost every call has one key.
        if let [key] = keys {
            let (number, fingerprint) = self.place(key);
            let mut shard = self.lock(number);
            let now = self.clock.now();
            if inserts {
                let evicted = shard.room_for(&[(number, fingerprint)], may_evict, now);
                shard.evict(evicted.ok_or_else(full)?, now);
            }
            let new = Row::leased(fingerprint, terms, now);
            let reply = shard.change(fingerprint, |row| step(row, new, key, now));
            let pressure = std::mem::take(&mut shard.pressure);
            drop(shard);
            self.gauge.report(&pressure, now);
            return Ok(vec![reply]);
        }
        let places: Vec<(usize, Fingerprint)> = keys.iter().map(|key| self.place(key)).collect();
        let mut by_shard = places.clone();
        by_shard.sort_unstable_by_key(|(number, _)| *number);
        let groups = || by_shard.chunk_by(|(one, _), (other, _)| one == other);
        // In ascending order, so that two calls never wait for each other.
        let mut shards: Vec<(usize, MutexGuard<'_, Shard>)> =
            groups().map(|group| (group[0].0, self.lock(group[0].0))).collect();
        let now = self.clock.now();
        if inserts {
            let mut evicted = Vec::new();
            for ((_, shard), group) in shards.iter_mut().zip(groups()) {
                evicted.push(shard.room_for(group, may_evict, now).ok_or_else(full)?);
            }
            for ((_, shard), evicted) in shards.iter_mut().zip(evicted) {
                shard.evict(evicted, now);
            }
        }
        let steps = keys.iter().zip(places).map(|(key, (number, fingerprint))| {
            let at = shards.binary_search_by_key(&number, |(number, _)| *number);
            let shard = &mut shards[at.unwrap_or_default()].1;
            let new = Row::leased(fingerprint, terms, now);
            shard.change(fingerprint, |row| step(row, new, key, now))
        });
        let replies = steps.collect();
        let mut pressure = Pressure::default();
        for (_, mut shard) in shards {
            pressure.add(&std::mem::take(&mut shard.pressure));
        }
        self.gauge.report(&pressure, now);
        Ok(replies)
    }

    /// Runs `step` on the row of one key.
    fn change<T>(
        &self,
        key: &DedupKey,
        step: impl FnOnce(Option<&mut Row>, u64) -> (T, Change),
    ) -> T {
        let (number, fingerprint) = self.place(key);
        self.lock(number).change(fingerprint, |row| step(row, self.clock.now()))
    }

    /// Returns the number of the key's shard, and the key's fingerprint.
    fn place(&self, key: &DedupKey) -> (usize, Fingerprint) {
        let fingerprint = self.hasher.fingerprint(key);
        (fingerprint.shard(self.shards.len()), fingerprint)
    }

    fn lock(&self, number: usize) -> MutexGuard<'_, Shard> {
        // No step leaves a shard half-changed when it panics.
        self.shards[number].lock().unwrap_or_else(PoisonError::into_inner)
    }
}
