//! The adapter: which shards a call locks, and what it does to their rows.

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::super::contract::{
    Claimed, Completed, DedupAdapter, Entry, EntryState, Forgotten, LeaseAdapter, Maintain,
    Receipt, Recorded, Released, Renewed,
};
use super::super::kept::{Kept, Recall};
use super::shard::{Clock, SHARD_KEYS, Shard, Slot, Standing, expiry, ms};
use crate::error::{Error, ErrorKind};
use crate::key::DedupKey;

const DEFAULT_CAPACITY: usize = 1_000_000;
const MOST_SHARDS: usize = 16;
/// How many expired keys an insertion clears away: more than it adds, so that a store which is
/// only written to stays clean without a purger.
const CLEARED_PER_INSERT: u32 = 2;

/// Keeps keys in this process.
///
/// Not `Clone`: share it in an [`Arc`], which is an adapter too.
///
/// # Example
///
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// use std::time::Duration;
/// use tower_dedup::DedupKey;
/// use tower_dedup::adapter::{Claimed, LeaseAdapter, MemoryAdapter, Receipt, Token};
///
/// let adapter = MemoryAdapter::with_capacity(10_000);
/// let keys = [DedupKey::new("acme", "evt_1").unwrap()];
/// let mine = Receipt::new(Token::random(), Duration::from_secs(3_600)).with_lease(Duration::from_secs(60));
/// assert_eq!(adapter.claim(&keys, &mine).await.unwrap(), [Claimed::first(1, false)]);
///
/// let theirs = Receipt::new(Token::random(), Duration::from_secs(3_600)).with_lease(Duration::from_secs(60));
/// assert_eq!(adapter.claim(&keys, &theirs).await.unwrap(), [Claimed::InFlight]);
/// # });
/// ```
pub struct MemoryAdapter {
    shards: Box<[Mutex<Shard>]>,
    hasher: RandomState,
    shard_capacity: usize,
    at_capacity: AtCapacity,
    clock: Clock,
}

/// What a [`MemoryAdapter`] does with a new key when it is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum AtCapacity {
    /// Refuses it with [`ErrorKind::Full`]; the layer answers 503 and the sender comes again.
    #[default]
    Refuse,
    /// Forgets the key nearest to its expiry that is not in flight. Its event would run again.
    EvictOldest,
}

impl MemoryAdapter {
    /// An adapter for up to 1,000,000 keys.
    #[must_use]
    pub fn new() -> Self {
        Self::with_capacity(DEFAULT_CAPACITY)
    }

    /// An adapter for up to `capacity` keys, at least one.
    ///
    /// Above 2,048 keys they are spread over shards by a keyed hash, each with its share of the
    /// capacity: the first refusal may come a few per cent early.
    #[must_use]
    pub fn with_capacity(capacity: usize) -> Self {
        let capacity = capacity.max(1);
        let shards = (capacity / SHARD_KEYS).clamp(1, MOST_SHARDS);
        Self {
            shards: (0..shards).map(|_| Mutex::default()).collect(),
            hasher: RandomState::new(),
            shard_capacity: capacity.div_ceil(shards),
            at_capacity: AtCapacity::default(),
            clock: Clock { start: Instant::now(), skew_ms: AtomicU64::new(0) },
        }
    }

    /// What to do with a new key when the adapter is full: by default, refuse it.
    #[must_use]
    pub fn at_capacity(mut self, at_capacity: AtCapacity) -> Self {
        self.at_capacity = at_capacity;
        self
    }

    /// Moves this adapter's clock forward: leases lapse and keys expire as if `by` had passed.
    /// For tests.
    pub fn advance(&self, by: Duration) {
        let skew = &self.clock.skew_ms;
        // The closure never declines, so there is nothing to answer.
        let _ = skew.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |skew| {
            Some(skew.saturating_add(ms(by)))
        });
    }

    /// Runs `step` on every key, in order, while all their shards are locked.
    fn each<T>(
        &self,
        keys: &[DedupKey],
        mut step: impl FnMut(&mut Shard, &DedupKey, u64) -> Result<T, Error>,
    ) -> Result<Vec<T>, Error> {
        if let [key] = keys {
            let mut shard = self.lock(self.shard_of(key));
            return Ok(vec![step(&mut shard, key, self.clock.now())?]);
        }
        let mut wanted: Vec<usize> = keys.iter().map(|key| self.shard_of(key)).collect();
        wanted.sort_unstable();
        wanted.dedup();
        // In ascending order, so that two calls never wait for each other.
        let mut locked: Vec<_> = wanted.iter().map(|index| self.lock(*index)).collect();
        let now = self.clock.now();
        let places: Vec<usize> = keys
            .iter()
            .map(|key| wanted.binary_search(&self.shard_of(key)).unwrap_or_default())
            .collect();
        let before: Vec<Option<Slot>> = keys
            .iter()
            .zip(&places)
            .map(|(key, place)| locked[*place].slots.get(key).cloned())
            .collect();
        let mut answers = Vec::with_capacity(keys.len());
        let mut put = Vec::new();
        let mut full = None;
        for (key, place) in keys.iter().zip(&places) {
            match step(&mut locked[*place], key, now) {
                Ok(answer) => answers.push(answer),
                Err(error) => {
                    full = Some(error);
                    break;
                }
            }
            if locked[*place].slots.contains_key(key) {
                put.push((key, *place));
            }
        }
        // A set that is larger than the store may have evicted its own first keys.
        if put.iter().any(|(key, place)| !locked[*place].slots.contains_key(*key)) {
            full.get_or_insert_with(no_room);
        }
        let Some(error) = full else { return Ok(answers) };
        // All or nothing: a caller that is told so has left nothing behind.
        for ((key, place), slot) in keys.iter().zip(&places).zip(before) {
            locked[*place].restore(key, slot);
        }
        Err(error)
    }

    fn shard_of(&self, key: &DedupKey) -> usize {
        if self.shards.len() == 1 {
            return 0;
        }
        let modulus = self.shards.len() as u64;
        // The remainder is below the number of shards.
        usize::try_from(self.hasher.hash_one(key) % modulus).unwrap_or_default()
    }

    fn lock(&self, shard: usize) -> MutexGuard<'_, Shard> {
        // No step leaves a shard half-changed when it panics.
        self.shards[shard].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn room(&self, shard: &mut Shard, now: u64) -> Result<(), Error> {
        shard.purge(CLEARED_PER_INSERT, now);
        if shard.slots.len() < self.shard_capacity {
            return Ok(());
        }
        if self.at_capacity == AtCapacity::EvictOldest && shard.evict(now) {
            return Ok(());
        }
        Err(no_room())
    }
}

fn no_room() -> Error {
    Error::new(ErrorKind::Full, "remembering a key")
}

impl Default for MemoryAdapter {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for MemoryAdapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryAdapter")
            .field("shards", &self.shards.len())
            .field("shard_capacity", &self.shard_capacity)
            .field("at_capacity", &self.at_capacity)
            .finish_non_exhaustive()
    }
}

impl DedupAdapter for MemoryAdapter {
    async fn record(&self, keys: &[DedupKey], receipt: &Receipt) -> Result<Vec<Recorded>, Error> {
        self.each(keys, |shard, key, now| {
            if let Some(slot) = shard.slots.get(key) {
                match slot.standing(now) {
                    Standing::Complete if slot.token == Some(receipt.token()) => {
                        return Ok(Recorded::First);
                    }
                    Standing::Complete => return Ok(Recorded::Duplicate(slot.seen(now))),
                    Standing::Leased => return Ok(Recorded::InFlight),
                    Standing::Lapsed | Standing::Released | Standing::Expired => {}
                }
            } else {
                self.room(shard, now)?;
            }
            shard.put(key, Slot::complete(key, receipt, now));
            Ok(Recorded::First)
        })
    }

    async fn unrecord(&self, keys: &[DedupKey], receipt: &Receipt) -> Result<Vec<Released>, Error> {
        self.each(keys, |shard, key, _| {
            let ours = shard.slots.get(key).is_some_and(|slot| {
                slot.completed_at.is_some() && slot.token == Some(receipt.token())
            });
            if ours {
                shard.remove(key);
            }
            Ok(if ours { Released::Released } else { Released::NotHeld })
        })
    }
}

impl LeaseAdapter for MemoryAdapter {
    async fn claim(&self, keys: &[DedupKey], receipt: &Receipt) -> Result<Vec<Claimed>, Error> {
        self.each(keys, |shard, key, now| {
            let mut slot = Slot::leased(receipt, now);
            if let Some(old) = shard.slots.get(key) {
                let repeated = old.completed_at.is_none() && old.token == Some(receipt.token());
                match old.standing(now) {
                    _ if repeated => {
                        slot.attempts = old.attempts;
                        slot.takeover = old.takeover;
                        slot.first_seen_at = old.first_seen_at;
                    }
                    Standing::Complete => return Ok(Claimed::Duplicate(old.seen(now))),
                    Standing::Leased => return Ok(Claimed::InFlight),
                    standing @ (Standing::Lapsed | Standing::Released) => {
                        slot.attempts = old.attempts.saturating_add(1);
                        slot.takeover = standing == Standing::Lapsed;
                        slot.first_seen_at = old.first_seen_at;
                    }
                    Standing::Expired => {}
                }
            } else {
                self.room(shard, now)?;
            }
            let granted = Claimed::first(slot.attempts, slot.takeover);
            shard.put(key, slot);
            Ok(granted)
        })
    }

    async fn renew(&self, keys: &[DedupKey], receipt: &Receipt) -> Result<Vec<Renewed>, Error> {
        self.each(keys, |shard, key, now| {
            match shard.slots.get_mut(key) {
                Some(slot)
                    if slot.completed_at.is_none() && slot.token == Some(receipt.token()) =>
                {
                    slot.lease_until = now.saturating_add(ms(receipt.lease()));
                }
                Some(_) => return Ok(Renewed::Lost),
                None => {
                    self.room(shard, now)?;
                    shard.put(key, Slot::leased(receipt, now));
                }
            }
            Ok(Renewed::Held)
        })
    }

    async fn complete(
        &self,
        keys: &[DedupKey],
        receipt: &Receipt,
    ) -> Result<Vec<Completed>, Error> {
        self.each(keys, |shard, key, now| {
            let Some(slot) = shard.slots.get_mut(key) else {
                self.room(shard, now)?;
                shard.put(key, Slot { attempts: 0, ..Slot::complete(key, receipt, now) });
                return Ok(Completed::Inserted);
            };
            let held = slot.token == Some(receipt.token());
            if slot.completed_at.is_none() {
                slot.completed_at = Some(now);
                slot.kept = receipt.kept_for(key).map(Arc::new);
            } else if slot.expires_at <= now {
                shard.put(key, Slot { attempts: 0, ..Slot::complete(key, receipt, now) });
                return Ok(Completed::Inserted);
            }
            if slot.expires_at <= now {
                let expires_at = expiry(receipt, now);
                let revived = Slot { expires_at, due: expires_at, ..slot.clone() };
                shard.put(key, revived);
            }
            Ok(if held { Completed::Held } else { Completed::LeaseLost })
        })
    }

    async fn release(&self, keys: &[DedupKey], receipt: &Receipt) -> Result<Vec<Released>, Error> {
        self.each(keys, |shard, key, _| match shard.slots.get_mut(key) {
            Some(slot) if slot.completed_at.is_none() && slot.token == Some(receipt.token()) => {
                slot.token = None;
                Ok(Released::Released)
            }
            _ => Ok(Released::NotHeld),
        })
    }
}

impl Recall for MemoryAdapter {
    async fn recall(&self, keys: &[DedupKey]) -> Result<Vec<Option<Kept>>, Error> {
        let recalled = keys.iter().map(|key| {
            let shard = self.lock(self.shard_of(key));
            let slot = shard.slots.get(key)?;
            let complete = slot.standing(self.clock.now()) == Standing::Complete;
            complete.then(|| slot.kept.as_deref().cloned().unwrap_or_default())
        });
        Ok(recalled.collect())
    }
}

impl Maintain for MemoryAdapter {
    async fn purge(&self, limit: u32) -> Result<u64, Error> {
        let mut purged = 0;
        for index in 0..self.shards.len() {
            let left = limit - purged;
            if left == 0 {
                break;
            }
            let now = self.clock.now();
            purged += self.lock(index).purge(left, now);
        }
        Ok(u64::from(purged))
    }

    async fn forget(&self, key: &DedupKey) -> Result<Forgotten, Error> {
        let mut shard = self.lock(self.shard_of(key));
        let now = self.clock.now();
        Ok(match shard.slots.get(key).map(|slot| slot.standing(now)) {
            None => Forgotten::Missing,
            Some(Standing::Leased) => Forgotten::InFlight,
            Some(_) => {
                shard.remove(key);
                Forgotten::Removed
            }
        })
    }

    async fn get(&self, key: &DedupKey) -> Result<Option<Entry>, Error> {
        let shard = self.lock(self.shard_of(key));
        let now = self.clock.now();
        let Some(slot) = shard.slots.get(key) else { return Ok(None) };
        let state = match (slot.standing(now), slot.completed_at) {
            (Standing::Expired, _) => return Ok(None),
            (_, Some(at)) => EntryState::Complete { completed_at: self.clock.wall(at) },
            (Standing::Released, None) => EntryState::Released,
            (_, None) => EntryState::InFlight { lease_until: self.clock.wall(slot.lease_until) },
        };
        let (first_seen_at, expires_at) =
            (self.clock.wall(slot.first_seen_at), self.clock.wall(slot.expires_at));
        let entry = Entry::new(state, first_seen_at, expires_at);
        Ok(Some(entry.with_attempts(slot.attempts, slot.takeover)))
    }

    async fn count(&self) -> Result<u64, Error> {
        let keys: usize = (0..self.shards.len()).map(|index| self.lock(index).slots.len()).sum();
        Ok(keys as u64)
    }

    async fn close(&self) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adapter::Token;

    fn key(id: usize) -> [DedupKey; 1] {
        [DedupKey::new("n", &id.to_string()).unwrap()]
    }

    fn receipt() -> Receipt {
        Receipt::new(Token::random(), Duration::from_secs(100)).with_lease(Duration::from_secs(10))
    }

    #[tokio::test]
    async fn trap_30_at_capacity_a_new_key_is_refused_and_no_live_one_is_evicted() {
        let adapter = MemoryAdapter::with_capacity(3);
        for id in 0..3 {
            adapter.record(&key(id), &receipt()).await.unwrap();
        }
        let full = adapter.record(&key(3), &receipt()).await.unwrap_err();
        assert_eq!(full.kind(), ErrorKind::Full);
        for id in 0..3 {
            let again = adapter.record(&key(id), &receipt()).await.unwrap();
            assert!(matches!(again[..], [Recorded::Duplicate(_)]));
        }
        adapter.advance(Duration::from_secs(100));
        assert_eq!(adapter.record(&key(3), &receipt()).await.unwrap(), [Recorded::First]);
    }

    #[tokio::test]
    async fn a_set_that_does_not_fit_leaves_nothing_behind() {
        let set: Vec<DedupKey> = (0..5).flat_map(key).collect();
        for at_capacity in [AtCapacity::Refuse, AtCapacity::EvictOldest] {
            let adapter = MemoryAdapter::with_capacity(4).at_capacity(at_capacity);
            adapter.record(&set[..1], &receipt()).await.unwrap();
            let full = adapter.record(&set, &receipt()).await.unwrap_err();
            assert_eq!(full.kind(), ErrorKind::Full);
            let full = adapter.claim(&set, &receipt()).await.unwrap_err();
            assert_eq!(full.kind(), ErrorKind::Full);
            for (place, key) in set.iter().enumerate() {
                let entry = adapter.get(key).await.unwrap();
                assert_eq!(entry.is_some(), place == 0, "{at_capacity:?} {place}");
            }
            // The rest fits.
            let rest = adapter.record(&set[1..4], &receipt()).await.unwrap();
            assert_eq!(rest, [Recorded::First; 3]);
        }
    }

    #[tokio::test]
    async fn eviction_is_a_choice_and_spares_what_is_in_flight() {
        let adapter = MemoryAdapter::with_capacity(2).at_capacity(AtCapacity::EvictOldest);
        adapter.claim(&key(0), &receipt()).await.unwrap();
        adapter.record(&key(1), &receipt()).await.unwrap();
        adapter.record(&key(2), &receipt()).await.unwrap();
        assert_eq!(adapter.claim(&key(0), &receipt()).await.unwrap(), [Claimed::InFlight]);
        assert_eq!(adapter.get(&key(1)[0]).await.unwrap(), None);
        adapter.claim(&key(2), &receipt()).await.unwrap();
        adapter.forget(&key(2)[0]).await.unwrap();
        adapter.claim(&key(3), &receipt()).await.unwrap();
        let full = adapter.record(&key(4), &receipt()).await.unwrap_err();
        assert_eq!(full.kind(), ErrorKind::Full);
    }

    #[tokio::test]
    async fn a_key_that_is_claimed_for_ever_takes_no_more_room() {
        let adapter = MemoryAdapter::with_capacity(10);
        for _ in 0..20_000 {
            let mine = receipt();
            adapter.claim(&key(0), &mine).await.unwrap();
            adapter.release(&key(0), &mine).await.unwrap();
            adapter.advance(Duration::from_millis(1));
        }
        let named = adapter.lock(0).named;
        assert!(named <= SHARD_KEYS + 2, "{named}");
        adapter.advance(Duration::from_secs(100));
        assert_eq!(adapter.purge(10).await.unwrap(), 1);
    }

    #[tokio::test]
    async fn a_lease_that_outlives_its_retention_is_purged_once_it_lapses() {
        let adapter = MemoryAdapter::new();
        let brief = Receipt::new(Token::random(), Duration::from_secs(1))
            .with_lease(Duration::from_secs(10));
        adapter.claim(&key(0), &brief).await.unwrap();
        adapter.advance(Duration::from_secs(5));
        assert_eq!(adapter.purge(10).await.unwrap(), 0);
        adapter.renew(&key(0), &brief).await.unwrap();
        adapter.advance(Duration::from_secs(6));
        assert_eq!(adapter.purge(10).await.unwrap(), 0);
        adapter.advance(Duration::from_secs(6));
        assert_eq!(adapter.purge(10).await.unwrap(), 1);
    }

    #[tokio::test]
    async fn insertions_clear_expired_keys_without_a_purger() {
        let adapter = MemoryAdapter::new();
        for id in 0..2_000 {
            adapter.record(&key(id), &receipt()).await.unwrap();
        }
        adapter.advance(Duration::from_secs(100));
        for id in 2_000..4_000 {
            adapter.record(&key(id), &receipt()).await.unwrap();
        }
        let kept = adapter.count().await.unwrap();
        assert!((2_000..2_300).contains(&kept), "{kept}");
    }
}
