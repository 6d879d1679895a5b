//! The adapter: the table behind the traits.

use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::BoxFuture;

use super::super::contract::{
    Abilities, CallTerms, Claimed, Completed, DedupAdapter, Entry, Forgotten, MaintenanceAdapter,
    Released, Renewed, StoreFuture,
};
use super::fingerprint::Keyed;
use super::shard::Shard;
use super::table::Table;
use crate::error::{Error, ErrorKind};
use crate::key::DedupKey;

const DEFAULT_CAPACITY: usize = 1_000_000;

/// Keeps keys in this process.
///
/// Not `Clone`: share it in an [`Arc`](std::sync::Arc), which is an adapter too.
///
/// # Example
///
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// use std::time::Duration;
/// use tower_dedup::DedupKey;
/// use tower_dedup::adapter::{CallTerms, Claimed, DedupAdapter, MemoryAdapter, Token};
///
/// let adapter = MemoryAdapter::with_capacity(10_000);
/// let keys = [DedupKey::new("acme", "evt_1").unwrap()];
/// let (hour, lease) = (Duration::from_secs(3_600), Duration::from_secs(60));
/// let mine = CallTerms::on_completion(Token::random(), hour, lease);
/// assert_eq!(adapter.claim(&keys, &mine).await.unwrap(), [Claimed::first(1, false)]);
///
/// let theirs = CallTerms::on_completion(Token::random(), hour, lease);
/// assert_eq!(adapter.claim(&keys, &theirs).await.unwrap(), [Claimed::InFlight]);
/// # });
/// ```
pub struct MemoryAdapter {
    table: Table<Mutex<Shard>>,
    closed: AtomicBool,
}

/// What a [`MemoryAdapter`] does with a new key when it is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum AtCapacity {
    /// Refuses it with [`ErrorKind::Full`]; the layer answers 503 and the sender comes again.
    /// Duplicates are still recognised; every *new* event is refused until keys expire.
    #[default]
    Refuse,
    /// Forgets the key of the new one's shard that is nearest to its expiry and not in flight. Its
    /// event would run again, so each is counted (`tower_dedup_evicted_total`), and a warning is
    /// logged, once a minute at most.
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
        Self { table: Table::new(capacity, Keyed::random()), closed: AtomicBool::new(false) }
    }

    /// What to do with a new key when the adapter is full: by default, refuse it.
    #[must_use]
    pub fn at_capacity(mut self, at_capacity: AtCapacity) -> Self {
        self.table.at_capacity = at_capacity;
        self
    }

    /// Moves this adapter's clock forward: leases lapse and keys expire as if `by` had passed.
    /// For tests.
    pub fn advance(&self, by: Duration) {
        self.table.clock.advance(by);
    }

    /// Sets this adapter's clock back, by a year in all at most: leases and retentions last longer.
    /// For tests of what a store's clock may do.
    pub fn set_back(&self, by: Duration) {
        self.table.clock.set_back(by);
    }

    fn table(&self) -> Result<&Table<Mutex<Shard>>, Error> {
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
    fn abilities(&self) -> Abilities {
        Abilities::new().with_leases().with_stored_data()
    }

    fn claim<'a>(
        &'a self,
        keys: &'a [DedupKey],
        terms: &'a CallTerms,
    ) -> StoreFuture<'a, Vec<Claimed>> {
        Box::pin(async move { self.table()?.claim(keys, terms) })
    }

    fn release<'a>(
        &'a self,
        keys: &'a [DedupKey],
        terms: &'a CallTerms,
    ) -> StoreFuture<'a, Vec<Released>> {
        Box::pin(async move { self.table()?.release(keys, terms) })
    }

    fn renew<'a>(
        &'a self,
        keys: &'a [DedupKey],
        terms: &'a CallTerms,
    ) -> StoreFuture<'a, Vec<Renewed>> {
        Box::pin(async move { self.table()?.renew(keys, terms) })
    }

    fn complete<'a>(
        &'a self,
        keys: &'a [DedupKey],
        terms: &'a CallTerms,
    ) -> StoreFuture<'a, Vec<Completed>> {
        Box::pin(async move { self.table()?.complete(keys, terms) })
    }
}

impl MaintenanceAdapter for MemoryAdapter {
    fn purge(&self, limit: u32) -> StoreFuture<'_, u64> {
        Box::pin(async move { Ok(self.table()?.purge(limit).into()) })
    }

    fn forget<'a>(&'a self, key: &'a DedupKey) -> StoreFuture<'a, Forgotten> {
        Box::pin(async move { Ok(self.table()?.forget(key)) })
    }

    fn get<'a>(&'a self, key: &'a DedupKey) -> StoreFuture<'a, Option<Entry>> {
        Box::pin(async move { Ok(self.table()?.get(key)) })
    }

    fn count(&self) -> StoreFuture<'_, u64> {
        Box::pin(async move { Ok(self.table()?.count()) })
    }

    /// The keys stay where they are.
    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async move { self.closed.store(true, Ordering::Release) })
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
        let (retention, lease) = (Duration::from_secs(100), Duration::from_secs(10));
        CallTerms::on_completion(Token::random(), retention, lease)
    }

    fn complete_at_once() -> CallTerms {
        CallTerms::on_claim(Token::random(), Duration::from_secs(100))
    }

    #[tokio::test]
    async fn trap_30_at_capacity_a_new_key_is_refused_and_no_live_one_is_evicted() {
        let adapter = MemoryAdapter::with_capacity(3);
        for id in 0..3 {
            adapter.claim(&key(id), &complete_at_once()).await.unwrap();
        }
        let full = adapter.claim(&key(3), &complete_at_once()).await.unwrap_err();
        assert_eq!(full.kind(), ErrorKind::Full);
        for id in 0..3 {
            let again = adapter.claim(&key(id), &complete_at_once()).await.unwrap();
            assert!(matches!(again[..], [Claimed::Duplicate(_)]));
        }
        adapter.advance(Duration::from_secs(100));
        assert_eq!(
            adapter.claim(&key(3), &complete_at_once()).await.unwrap(),
            [Claimed::first(1, false)]
        );
    }

    #[tokio::test]
    async fn a_set_that_does_not_fit_leaves_nothing_behind() {
        let set: Vec<DedupKey> = (0..5).flat_map(key).collect();
        for at_capacity in [AtCapacity::Refuse, AtCapacity::EvictOldest] {
            let adapter = MemoryAdapter::with_capacity(4).at_capacity(at_capacity);
            adapter.claim(&set[..1], &complete_at_once()).await.unwrap();
            let full = adapter.claim(&set, &complete_at_once()).await.unwrap_err();
            assert_eq!(full.kind(), ErrorKind::Full);
            let full = adapter.claim(&set, &terms()).await.unwrap_err();
            assert_eq!(full.kind(), ErrorKind::Full);
            for (place, key) in set.iter().enumerate() {
                let entry = adapter.get(key).await.unwrap();
                assert_eq!(entry.is_some(), place == 0, "{at_capacity:?} {place}");
            }
            // The rest fits.
            let rest = adapter.claim(&set[1..4], &complete_at_once()).await.unwrap();
            assert_eq!(rest, vec![Claimed::first(1, false); 3]);
        }
    }

    #[tokio::test]
    async fn eviction_is_a_choice_and_spares_what_is_in_flight() {
        let adapter = MemoryAdapter::with_capacity(2).at_capacity(AtCapacity::EvictOldest);
        adapter.claim(&key(0), &terms()).await.unwrap();
        adapter.claim(&key(1), &complete_at_once()).await.unwrap();
        adapter.claim(&key(2), &complete_at_once()).await.unwrap();
        assert_eq!(adapter.claim(&key(0), &terms()).await.unwrap(), [Claimed::InFlight]);
        assert_eq!(adapter.get(&key(1)[0]).await.unwrap(), None);
        adapter.claim(&key(2), &terms()).await.unwrap();
        adapter.forget(&key(2)[0]).await.unwrap();
        adapter.claim(&key(3), &terms()).await.unwrap();
        let full = adapter.claim(&key(4), &complete_at_once()).await.unwrap_err();
        assert_eq!(full.kind(), ErrorKind::Full);
    }

    #[tokio::test]
    async fn a_key_that_is_claimed_for_ever_takes_no_more_room() {
        let adapter = MemoryAdapter::with_capacity(10);
        for _ in 0..20_000 {
            let mine = terms();
            adapter.claim(&key(0), &mine).await.unwrap();
            adapter.release(&key(0), &mine).await.unwrap();
            adapter.advance(Duration::from_millis(1));
        }
        assert_eq!(adapter.table.used(), [(1, 1, 1)]);
        adapter.advance(Duration::from_secs(100) + PURGE_GRACE);
        assert_eq!(adapter.purge(10).await.unwrap(), 1);
    }

    #[tokio::test]
    async fn a_lease_that_outlives_its_retention_is_purged_an_hour_after_it_lapsed() {
        let adapter = MemoryAdapter::new();
        let brief =
            CallTerms::on_completion(Token::random(), Duration::from_secs(1), 2 * PURGE_GRACE);
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
    async fn insertions_clear_expired_keys_without_a_purger() {
        let adapter = MemoryAdapter::new();
        for id in 0..2_000 {
            adapter.claim(&key(id), &complete_at_once()).await.unwrap();
        }
        adapter.advance(Duration::from_secs(100));
        for id in 2_000..4_000 {
            adapter.claim(&key(id), &complete_at_once()).await.unwrap();
        }
        let kept = adapter.count().await.unwrap();
        assert!((2_000..2_300).contains(&kept), "{kept}");
    }
}
