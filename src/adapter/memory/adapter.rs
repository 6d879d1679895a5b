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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adapter::{PURGE_GRACE, Token};

    fn key(id: usize) -> [DedupKey; 1] {
        [DedupKey::new("n", &id.to_string()).unwrap()]
    }

    fn terms() -> CallTerms {
        CallTerms::new(Token::random(), Duration::from_secs(100))
            .with_lease(Duration::from_secs(10))
    }

    #[tokio::test]
    async fn claim_at_capacity_is_refused_and_evicts_nothing() {
        let adapter = MemoryAdapter::with_capacity(3);
        for id in 0..3 {
            adapter.record(&key(id), &terms()).await.unwrap();
        }
        let full = adapter.record(&key(3), &terms()).await.unwrap_err();
        assert_eq!(full.kind(), ErrorKind::Full);
        for id in 0..3 {
            let again = adapter.record(&key(id), &terms()).await.unwrap();
            assert!(matches!(again[..], [Recorded::Duplicate(_)]));
        }
        adapter.advance(Duration::from_secs(100));
        assert_eq!(adapter.record(&key(3), &terms()).await.unwrap(), [Recorded::First]);
    }

    #[tokio::test]
    async fn call_that_does_not_fit_inserts_none_of_its_keys() {
        let set: Vec<DedupKey> = (0..5).flat_map(key).collect();
        for at_capacity in [AtCapacity::Refuse, AtCapacity::EvictOldest] {
            let adapter = MemoryAdapter::with_capacity(4).at_capacity(at_capacity);
            adapter.record(&set[..1], &terms()).await.unwrap();
            let full = adapter.record(&set, &terms()).await.unwrap_err();
            assert_eq!(full.kind(), ErrorKind::Full);
            let full = adapter.claim(&set, &terms()).await.unwrap_err();
            assert_eq!(full.kind(), ErrorKind::Full);
            for (place, key) in set.iter().enumerate() {
                let entry = adapter.get(key).await.unwrap();
                assert_eq!(entry.is_some(), place == 0, "{at_capacity:?} {place}");
            }
            // The rest fits.
            let rest = adapter.record(&set[1..4], &terms()).await.unwrap();
            assert_eq!(rest, [Recorded::First; 3]);
        }
    }

    #[tokio::test]
    async fn eviction_spares_keys_in_flight() {
        let adapter = MemoryAdapter::with_capacity(2).at_capacity(AtCapacity::EvictOldest);
        adapter.claim(&key(0), &terms()).await.unwrap();
        adapter.record(&key(1), &terms()).await.unwrap();
        adapter.record(&key(2), &terms()).await.unwrap();
        assert_eq!(adapter.claim(&key(0), &terms()).await.unwrap(), [Claimed::InFlight]);
        assert_eq!(adapter.get(&key(1)[0]).await.unwrap(), None);
        adapter.claim(&key(2), &terms()).await.unwrap();
        adapter.forget(&key(2)[0]).await.unwrap();
        adapter.claim(&key(3), &terms()).await.unwrap();
        let full = adapter.record(&key(4), &terms()).await.unwrap_err();
        assert_eq!(full.kind(), ErrorKind::Full);
    }

    #[tokio::test]
    async fn key_claimed_many_times_takes_one_row() {
        let adapter = MemoryAdapter::with_capacity(10);
        for _ in 0..20_000 {
            let mine = terms();
            adapter.claim(&key(0), &mine).await.unwrap();
            adapter.release(&key(0), &mine).await.unwrap();
            adapter.advance(Duration::from_millis(1));
        }
        assert_eq!(adapter.table.used(), [(1, 1)]);
        adapter.advance(Duration::from_secs(100) + PURGE_GRACE);
        assert_eq!(adapter.purge(10).await.unwrap(), 1);
    }

    #[tokio::test]
    async fn lease_longer_than_retention_is_purged_one_hour_after_it_lapses() {
        let adapter = MemoryAdapter::new();
        let brief =
            CallTerms::new(Token::random(), Duration::from_secs(1)).with_lease(2 * PURGE_GRACE);
        adapter.claim(&key(0), &brief).await.unwrap();
        adapter.advance(PURGE_GRACE + Duration::from_secs(5));
        assert_eq!(adapter.purge(10).await.unwrap(), 0);
        adapter.renew(&key(0), &brief).await.unwrap();
        adapter.advance(3 * PURGE_GRACE - Duration::from_secs(5));
        assert_eq!(adapter.purge(10).await.unwrap(), 0);
        adapter.advance(Duration::from_secs(6));
        assert_eq!(adapter.purge(10).await.unwrap(), 1);
    }

    #[tokio::test]
    async fn insertions_remove_expired_keys_without_a_purger() {
        let adapter = MemoryAdapter::new();
        for id in 0..2_000 {
            adapter.record(&key(id), &terms()).await.unwrap();
        }
        adapter.advance(Duration::from_secs(100));
        for id in 2_000..4_000 {
            adapter.record(&key(id), &terms()).await.unwrap();
        }
        let kept = adapter.count().await.unwrap();
        assert!((2_000..2_300).contains(&kept), "{kept}");
    }
}
