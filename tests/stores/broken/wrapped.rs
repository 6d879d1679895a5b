//! The memory store with a fault.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::BoxFuture;
use tower_dedup::adapter::MemoryAdapter;
use tower_dedup::adapter::contract::{
    Abilities, CallTerms, ClaimReply, CompleteReply, DedupAdapter, Fetch, RenewReply, StoreFuture,
};
use tower_dedup::adapter::inspect::{Entry, ForgetReply, MaintenanceAdapter, Stats};
use tower_dedup::conformance::Store;
use tower_dedup::{DedupKey, StoreError, StoreErrorKind};

pub(super) const NO_FAULT: u8 = 0;
pub(super) const INSERTED_ONCE: u8 = 1;
pub(super) const LEASE_TAKEN: u8 = 2;
pub(super) const REVIVED: u8 = 3;
pub(super) const TAKEN_ANEW: u8 = 4;
pub(super) const SECOND_STEP: u8 = 5;
pub(super) const PURGES_FIFTY: u8 = 6;
pub(super) const REPLAYS_CORRUPT: u8 = 7;
pub(super) const HIDES_STORED_DATA: u8 = 8;

pub(super) struct Wrapped<const FAULT: u8> {
    inner: MemoryAdapter,
    /// Keys that a completion inserted, or completed late.
    completed: Mutex<HashSet<DedupKey>>,
    /// Keys whose response is unreadable.
    corrupt: Mutex<HashSet<DedupKey>>,
}

impl<const FAULT: u8> Wrapped<FAULT> {
    fn is_corrupt(&self, key: &DedupKey) -> bool {
        self.corrupt.lock().unwrap().contains(key)
    }
}

impl<const FAULT: u8> DedupAdapter for Wrapped<FAULT> {
    fn abilities(&self) -> Abilities {
        let mut abilities = self.inner.abilities();
        abilities.stored_data &= FAULT != HIDES_STORED_DATA;
        abilities
    }

    fn claim<'a>(&'a self, key: &'a DedupKey, terms: &'a CallTerms) -> StoreFuture<'a, ClaimReply> {
        Box::pin(async move {
            if FAULT == SECOND_STEP && terms.fetch() != Fetch::Nothing {
                let first_step = terms.clone().with_fetch(Fetch::Nothing);
                let mut claimed = self.inner.claim(key, &first_step).await?;
                if let ClaimReply::Duplicate(seen) = &mut claimed {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                    let entry = self.inner.get(key).await?;
                    seen.stored = Some(entry.and_then(|entry| entry.stored).unwrap_or_default());
                }
                return Ok(claimed);
            }
            let is_known = self.inner.get(key).await?.is_some();
            let claimed = self.inner.claim(key, terms).await?;
            if self.is_corrupt(key)
                && terms.fetch() == Fetch::DigestAndResponse
                && let ClaimReply::Duplicate(mut seen) = claimed
            {
                if FAULT != REPLAYS_CORRUPT {
                    return Err(StoreError::new(StoreErrorKind::Corrupt, "reading a response"));
                }
                seen.stored = Some(Arc::default());
                return Ok(ClaimReply::Duplicate(seen));
            }
            let is_first = matches!(claimed, ClaimReply::First { .. });
            let is_anew = FAULT == TAKEN_ANEW && !is_known && is_first;
            Ok(if is_anew { ClaimReply::first(1, false) } else { claimed })
        })
    }

    fn release<'a>(&'a self, key: &'a DedupKey, terms: &'a CallTerms) -> StoreFuture<'a, ()> {
        self.inner.release(key, terms)
    }

    fn renew<'a>(&'a self, key: &'a DedupKey, terms: &'a CallTerms) -> StoreFuture<'a, RenewReply> {
        Box::pin(async move {
            let is_known = self.inner.get(key).await?.is_some();
            let renewed = self.inner.renew(key, terms).await?;
            Ok(if FAULT == REVIVED && !is_known { RenewReply::Held } else { renewed })
        })
    }

    fn complete<'a>(
        &'a self,
        key: &'a DedupKey,
        terms: &'a CallTerms,
    ) -> StoreFuture<'a, CompleteReply> {
        Box::pin(async move {
            let completed = self.inner.complete(key, terms).await?;
            let is_again = !self.completed.lock().unwrap().insert(key.clone());
            Ok(match (FAULT, completed) {
                (INSERTED_ONCE, CompleteReply::Inserted) if is_again => CompleteReply::Held,
                (LEASE_TAKEN, CompleteReply::Held) if is_again => CompleteReply::LeaseLost,
                (_, completed) => completed,
            })
        })
    }
}

impl<const FAULT: u8> MaintenanceAdapter for Wrapped<FAULT> {
    fn purge(&self, limit: u32) -> StoreFuture<'_, u64> {
        self.inner.purge(if FAULT == PURGES_FIFTY { limit.min(50) } else { limit })
    }

    fn forget<'a>(&'a self, key: &'a DedupKey) -> StoreFuture<'a, ForgetReply> {
        self.inner.forget(key)
    }

    fn get<'a>(&'a self, key: &'a DedupKey) -> StoreFuture<'a, Option<Entry>> {
        Box::pin(async move {
            let mut entry = self.inner.get(key).await?;
            if let Some(entry) = &mut entry {
                entry.response_is_unreadable = self.is_corrupt(key);
            }
            Ok(entry)
        })
    }

    fn stats(&self) -> StoreFuture<'_, Stats> {
        self.inner.stats()
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        self.inner.close()
    }
}

pub(super) struct WrappedStore<const FAULT: u8>(Arc<Wrapped<FAULT>>);

impl<const FAULT: u8> Store for WrappedStore<FAULT> {
    type Adapter = Wrapped<FAULT>;

    async fn create() -> Self {
        Self(Arc::new(Wrapped {
            inner: MemoryAdapter::new(),
            completed: Mutex::default(),
            corrupt: Mutex::default(),
        }))
    }

    fn adapter(&self) -> Arc<Wrapped<FAULT>> {
        Arc::clone(&self.0)
    }

    async fn advance(&self, by: Duration) {
        self.0.inner.advance(by);
    }

    async fn set_back(&self, by: Duration) {
        self.0.inner.set_back(by);
    }

    async fn corrupt(&self, key: &DedupKey) {
        self.0.corrupt.lock().unwrap().insert(key.clone());
    }
}
