//! [`MemoryAdapter`]: the table behind the traits.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::BoxFuture;

use super::super::contract::{Abilities, DedupAdapter, MaintenanceAdapter, StoreFuture};
use super::super::inspection::{Purged, Stats};
use super::super::replies::{Claimed, Completed, Entry, Forgotten, Renewed};
use super::super::terms::CallTerms;
use super::row::KeyHasher;
use super::table::{AtCapacity, Table};
use crate::error::{Error, ErrorKind};
use crate::key::DedupKey;

const DEFAULT_CAPACITY: usize = 1_000_000;

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
/// 1. Nothing survives a restart, and no other process sees the keys. **Behind a load balancer with two replicas,
///    every event can run twice.**
/// 2. The adapter is bounded. At capacity it refuses a new key with a typed error (the layer answers 503), unless
///    [`AtCapacity::EvictOldest`] was chosen. It logs a warning when it becomes fuller than four fifths; evicted keys
///    are counted, and logged with their age.
/// 3. A live lease is never evicted, purged or expired.
/// 4. The keys of one call are claimed in one atomic step.
///
/// Not `Clone`: share the adapter in an [`Arc`](std::sync::Arc), which is an adapter too.
///
/// # Time in tests
///
/// The clock is monotonic, and follows `tokio::time::pause` and `tokio::time::advance` on the
/// threads of the paused runtime: leases lapse and keys expire with paused time. Threads without a
/// runtime use real time. [`advance`](Self::advance) works with and without paused time.
pub struct MemoryAdapter {
    table: Table,
    closed: AtomicBool,
}

impl MemoryAdapter {
    /// Creates an adapter for up to 1,000,000 keys.
    #[must_use]
    pub fn new() -> Self {
        Self::with_capacity(DEFAULT_CAPACITY)
    }

    /// Creates an adapter for up to `capacity` keys, at least one.
    ///
    /// From 2,048 keys on, a keyed hash spreads the keys over shards, each with its share of the
    /// capacity. The first refusal may therefore come a few per cent early.
    #[must_use]
    pub fn with_capacity(capacity: usize) -> Self {
        Self { table: Table::new(capacity, KeyHasher::random()), closed: AtomicBool::new(false) }
    }

    /// Sets whether a full adapter refuses a new key or evicts an old one. By default it refuses.
    #[must_use]
    pub fn at_capacity(mut self, at_capacity: AtCapacity) -> Self {
        self.table.at_capacity = at_capacity;
        self
    }

    /// Moves this adapter's clock forward, for tests: leases lapse and keys expire as if `by` had
    /// passed.
    pub fn advance(&self, by: Duration) {
        self.table.clock.advance(by);
    }

    /// Sets this adapter's clock back, for tests of a store's clock that jumps. Leases and
    /// retention last longer. All calls together set it back by one year at most.
    pub fn set_back(&self, by: Duration) {
        self.table.clock.set_back(by);
    }

    fn table(&self) -> Result<&Table, Error> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::new(ErrorKind::Unavailable, "using an adapter that was closed"));
        }
        Ok(&self.table)
    }
}

impl Default for MemoryAdapter {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for MemoryAdapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryAdapter")
            .field("shards", &self.table.shards())
            .field("shard_capacity", &self.table.shard_capacity)
            .field("at_capacity", &self.table.at_capacity)
            .finish_non_exhaustive()
    }
}

/// Defines the method as a call of the table.
macro_rules! call {
    ($method:ident -> $reply:ty) => {
        fn $method<'a>(
            &'a self,
            keys: &'a [DedupKey],
            terms: &'a CallTerms,
        ) -> StoreFuture<'a, Vec<$reply>> {
            Box::pin(async move { self.table()?.$method(keys, terms) })
        }
    };
}

impl DedupAdapter for MemoryAdapter {
    fn abilities(&self) -> Abilities {
        Abilities::new().with_leases().with_stored_data()
    }

    call!(claim -> Claimed);
    fn release<'a>(&'a self, keys: &'a [DedupKey], terms: &'a CallTerms) -> StoreFuture<'a, ()> {
        Box::pin(async move { self.table()?.release(keys, terms) })
    }

    call!(renew -> Renewed);
    call!(complete -> Completed);
}

impl MaintenanceAdapter for MemoryAdapter {
    fn purge(&self, limit: u32) -> StoreFuture<'_, Purged> {
        Box::pin(async move {
            let deleted = self.table()?.purge(limit);
            Ok(Purged::new(deleted, deleted < u64::from(limit)))
        })
    }

    fn forget<'a>(&'a self, key: &'a DedupKey) -> StoreFuture<'a, Forgotten> {
        Box::pin(async move { Ok(self.table()?.forget(key)) })
    }

    fn get<'a>(&'a self, key: &'a DedupKey) -> StoreFuture<'a, Option<Entry>> {
        Box::pin(async move { Ok(self.table()?.get(key)) })
    }

    fn stats(&self) -> StoreFuture<'_, Stats> {
        Box::pin(async move { Ok(self.table()?.stats()) })
    }

    /// Every later call fails. The keys stay in memory until the adapter is dropped.
    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async move { self.closed.store(true, Ordering::Release) })
    }
}
