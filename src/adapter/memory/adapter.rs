//! [`MemoryAdapter`]: the table behind the traits.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::super::contract::{
    CallTerms, Claimed, Completed, DedupAdapter, Entry, Forgotten, LeaseAdapter,
    MaintenanceAdapter, Recorded, Released, Renewed,
};
use super::super::stored::{Fetch, Recall, StoredData};
use super::row::KeyHasher;
use super::table::{AtCapacity, Table};
use crate::error::{Error, ErrorKind};
use crate::key::DedupKey;

const DEFAULT_CAPACITY: usize = 1_000_000;

/// Stores keys in this process.
///
/// Not `Clone`: share the adapter in an [`Arc`](std::sync::Arc), which is an adapter too.
///
/// The clock is monotonic. In tests it follows [`tokio::time::pause`] and
/// [`tokio::time::advance`] on the threads of the paused runtime, so leases lapse and keys expire
/// with paused time; see also [`advance`](Self::advance).
///
/// # Example
///
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// use std::time::Duration;
/// use tower_dedup::DedupKey;
/// use tower_dedup::adapter::{Claimed, LeaseAdapter, MemoryAdapter, CallTerms, Token};
///
/// let adapter = MemoryAdapter::with_capacity(10_000);
/// let keys = [DedupKey::new("acme", "evt_1").unwrap()];
/// let mine = CallTerms::new(Token::random(), Duration::from_secs(3_600)).with_lease(Duration::from_secs(60));
/// assert_eq!(adapter.claim(&keys, &mine).await.unwrap(), [Claimed::first(1, false)]);
///
/// let theirs = CallTerms::new(Token::random(), Duration::from_secs(3_600)).with_lease(Duration::from_secs(60));
/// assert_eq!(adapter.claim(&keys, &theirs).await.unwrap(), [Claimed::InFlight]);
/// # });
/// ```
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

    /// Sets what the adapter does with a new key when it is full. The default is to refuse it.
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

impl DedupAdapter for MemoryAdapter {
    async fn record(&self, keys: &[DedupKey], terms: &CallTerms) -> Result<Vec<Recorded>, Error> {
        self.table()?.record(keys, terms)
    }

    async fn unrecord(&self, keys: &[DedupKey], terms: &CallTerms) -> Result<Vec<Released>, Error> {
        self.table()?.unrecord(keys, terms)
    }
}

impl LeaseAdapter for MemoryAdapter {
    async fn claim(&self, keys: &[DedupKey], terms: &CallTerms) -> Result<Vec<Claimed>, Error> {
        self.table()?.claim(keys, terms)
    }

    async fn renew(&self, keys: &[DedupKey], terms: &CallTerms) -> Result<Vec<Renewed>, Error> {
        self.table()?.renew(keys, terms)
    }

    async fn complete(
        &self,
        keys: &[DedupKey],
        terms: &CallTerms,
    ) -> Result<Vec<Completed>, Error> {
        self.table()?.complete(keys, terms)
    }

    async fn release(&self, keys: &[DedupKey], terms: &CallTerms) -> Result<Vec<Released>, Error> {
        self.table()?.release(keys, terms)
    }
}

impl Recall for MemoryAdapter {
    async fn recall(
        &self,
        keys: &[DedupKey],
        wanted: Fetch,
    ) -> Result<Vec<Option<StoredData>>, Error> {
        Ok(self.table()?.recall(keys, wanted))
    }
}

impl MaintenanceAdapter for MemoryAdapter {
    async fn purge(&self, limit: u32) -> Result<u64, Error> {
        Ok(self.table()?.purge(limit))
    }

    async fn forget(&self, key: &DedupKey) -> Result<Forgotten, Error> {
        Ok(self.table()?.forget(key))
    }

    async fn get(&self, key: &DedupKey) -> Result<Option<Entry>, Error> {
        Ok(self.table()?.get(key))
    }

    async fn count(&self) -> Result<u64, Error> {
        Ok(self.table()?.count())
    }

    /// Every later call fails. The keys stay in memory until the adapter is dropped.
    async fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }
}
