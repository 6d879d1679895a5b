//! [`MemoryAdapter`]: the shards, and the operations on the row of a key.

use std::fmt;
use std::iter;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
#[cfg(any(test, feature = "testing"))]
use std::time::Duration;

use futures_util::future::BoxFuture;
use siphasher::sip128::SipHasher13;

use super::clock::{Clock, ms};
use super::row::{MemoryCall, MemoryRow};
use super::shard::{Fingerprint, Shard};
use crate::adapter::contract::{Abilities, DedupAdapter, StoreFuture};
use crate::adapter::maintenance::{Entry, ForgetReply, MaintenanceAdapter, PURGE_GRACE, Stats};
use crate::adapter::replies::{ClaimReply, CompleteReply, RenewReply};
use crate::adapter::terms::CallTerms;
use crate::error::{StoreError, StoreErrorKind};
use crate::key::DedupKey;
use crate::observe;

const DEFAULT_STORED_BYTES: usize = 256 << 20;
/// A shard holds so many keys, or up to twice as many: a call may wait while a shard grows.
const SHARD_KEYS: usize = 1_600;
/// An adapter that is asked for more than 100 million keys has larger shards, so that `usize::MAX`
/// is a capacity too.
const MOST_SHARDS: usize = 65_536;

/// Stores keys in this process, for tests, development and services of a single process.
///
/// ```
/// use tower_dedup::adapter::MemoryAdapter;
/// use tower_dedup::{DedupLayer, provider};
///
/// let store = MemoryAdapter::with_capacity(10_000);
/// let dedup = DedupLayer::new(provider::STRIPE, store);
/// # let _ = dedup;
/// ```
///
/// 1. Nothing survives a restart, and no other process sees the keys. **Behind a load balancer with
///    two replicas, every event can run twice.**
/// 2. The adapter is bounded, in keys and in the bytes of stored responses. A full one refuses new
///    keys with [`StoreErrorKind::Full`] until keys expire: the layer answers new events 503, and
///    still recognises duplicates. It logs a warning when it becomes fuller than four fifths.
/// 3. A key is never evicted: its event would run again. For more keys, raise the capacity, shorten
///    the retention, or use SQLite.
///
/// Not `Clone`: share the adapter in an [`Arc`](std::sync::Arc), which is an adapter too.
///
/// # Time in tests
///
/// The clock is monotonic, and follows `tokio::time::pause` and `tokio::time::advance` on the
/// threads of the paused runtime: leases lapse and keys expire with paused time. Threads without a
/// runtime use real time. With the feature `testing`, `advance` and `set_back` move the clock,
/// paused or not.
pub struct MemoryAdapter {
    shards: Box<[Mutex<Shard>]>,
    /// The bytes of the data that all rows store.
    stored: Arc<AtomicUsize>,
    max_stored_bytes: usize,
    clock: Clock,
    /// When the next warning may be logged.
    next_warning_ms: AtomicU64,
    hasher: SipHasher13,
    closed: AtomicBool,
}

impl MemoryAdapter {
    /// Creates an adapter for up to 1,000,000 keys.
    #[must_use]
    pub fn new() -> Self {
        Self::with_capacity(1_000_000)
    }

    /// Creates an adapter for up to `capacity` keys, at least one.
    ///
    /// From 3,200 keys on, a keyed hash spreads the keys over shards, each with its share of the
    /// capacity. The first refusal may therefore come up to a tenth early.
    #[must_use]
    pub fn with_capacity(capacity: usize) -> Self {
        let shards = (capacity / SHARD_KEYS).clamp(1, MOST_SHARDS);
        let shard = || Mutex::new(Shard::new(capacity.max(1).div_ceil(shards)));
        Self {
            shards: iter::repeat_with(shard).take(shards).collect(),
            stored: Arc::default(),
            max_stored_bytes: DEFAULT_STORED_BYTES,
            clock: Clock::new(),
            next_warning_ms: AtomicU64::new(0),
            // Only this adapter knows the secret.
            hasher: SipHasher13::new_with_key(&rand::random()),
            closed: AtomicBool::new(false),
        }
    }

    /// Sets how many bytes the stored responses of all keys may take; 256 MiB by default.
    ///
    /// Beyond it, new keys are refused until keys expire. Events that run already still complete,
    /// so the bytes may exceed the bound by the responses of these.
    #[must_use]
    pub fn max_stored_bytes(mut self, bytes: usize) -> Self {
        self.max_stored_bytes = bytes;
        self
    }

    /// Moves this adapter's clock forward: leases lapse and keys expire as if `by` had passed.
    #[cfg(any(test, feature = "testing"))]
    pub fn advance(&self, by: Duration) {
        self.clock.shift(|offset| offset.saturating_add(ms(by)));
    }

    /// Sets this adapter's clock back, for tests of a store's clock that jumps. Leases and
    /// retention last longer. All calls together set it back by one year at most.
    #[cfg(any(test, feature = "testing"))]
    pub fn set_back(&self, by: Duration) {
        self.clock.shift(|offset| offset.saturating_sub(ms(by)));
    }

    /// Runs an operation on the row of one key.
    fn one<T>(
        &self,
        key: &DedupKey,
        operation: impl FnOnce(&mut Option<MemoryRow>, u64) -> T,
    ) -> Result<T, StoreError> {
        self.check_open()?;
        let hash = self.hasher.hash(key.as_bytes());
        // The upper half of the product is below the number of shards. The index does not use this
        // half of the hash.
        let product = u128::from(hash.h2) * (self.shards.len() as u128);
        let mut shard = self.lock(usize::try_from(product >> 64).unwrap_or_default());
        let now = self.clock.now();
        let has_room = || self.stored.load(Ordering::Relaxed) < self.max_stored_bytes;
        let operation = |row: &mut Option<MemoryRow>| operation(row, now);
        let (reply, is_nearly_full) =
            shard.update(Fingerprint([hash.h1, hash.h2]), has_room, now, operation)?;
        // The lock is released first: a subscriber may be slow, or call the store.
        drop(shard);
        // Once an hour.
        let (order, next) = (Ordering::Relaxed, |at| (now >= at).then_some(now + 3_600_000));
        if is_nearly_full && self.next_warning_ms.fetch_update(order, order, next).is_ok() {
            observe::records::nearly_full();
        }
        Ok(reply)
    }

    fn check_open(&self) -> Result<(), StoreError> {
        let closed = "using an adapter that was closed";
        let is_open = !self.closed.load(Ordering::Acquire);
        is_open.then_some(()).ok_or_else(|| StoreError::new(StoreErrorKind::Unavailable, closed))
    }

    fn lock(&self, number: usize) -> MutexGuard<'_, Shard> {
        // No step leaves a shard half-changed when it panics.
        self.shards[number].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for MemoryAdapter {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for MemoryAdapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryAdapter").finish_non_exhaustive()
    }
}

/// Defines the method by an operation on the row of the key.
macro_rules! call {
    ($($method:ident -> $reply:ty),+) => {$(
        fn $method<'a>(
            &'a self,
            key: &'a DedupKey,
            terms: &'a CallTerms,
        ) -> StoreFuture<'a, $reply> {
            Box::pin(async move {
                self.one(key, |row, now| MemoryCall { terms, now, stored: &self.stored }.$method(row))
            })
        }
    )+};
}

impl DedupAdapter for MemoryAdapter {
    fn abilities(&self) -> Abilities {
        Abilities { leases: true, stored_data: true, ..Abilities::default() }
    }

    call!(claim -> ClaimReply, release -> (), renew -> RenewReply, complete -> CompleteReply);
}

impl MaintenanceAdapter for MemoryAdapter {
    /// Locks a shard for one row at a time.
    fn purge(&self, limit: u32) -> StoreFuture<'_, u64> {
        Box::pin(async move {
            self.check_open()?;
            let until = self.clock.now().saturating_sub(ms(PURGE_GRACE));
            let purged = (0..self.shards.len())
                .flat_map(|number| iter::from_fn(move || self.lock(number).remove_due(until)));
            Ok((0..limit).zip(purged).count() as u64)
        })
    }

    fn forget<'a>(&'a self, key: &'a DedupKey) -> StoreFuture<'a, ForgetReply> {
        Box::pin(async move { self.one(key, MemoryRow::forget) })
    }

    fn get<'a>(&'a self, key: &'a DedupKey) -> StoreFuture<'a, Option<Entry>> {
        Box::pin(async move { self.one(key, |row, now| row.as_ref()?.entry(now)) })
    }

    /// Locks a shard while its rows are counted.
    fn stats(&self) -> StoreFuture<'_, Stats> {
        Box::pin(async move {
            self.check_open()?;
            let now = self.clock.now();
            let mut stats = Stats { is_exact: true, ..Stats::default() };
            for number in 0..self.shards.len() {
                self.lock(number).rows.values().for_each(|row| row.add_to(&mut stats, now));
            }
            Ok(stats)
        })
    }

    /// Every later call fails. The keys stay in memory until the adapter is dropped.
    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async move { self.closed.store(true, Ordering::Release) })
    }
}

#[cfg(test)]
mod tests {
    /// An attacker who knew the secret could construct keys with one fingerprint.
    #[test]
    fn each_adapter_has_a_secret_of_its_own() {
        let hash = || super::MemoryAdapter::new().hasher.hash(b"a").as_u128();
        assert_ne!(hash(), hash());
    }
}
