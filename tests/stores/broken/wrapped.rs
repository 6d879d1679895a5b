//! The memory store with a fault.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tower_dedup::adapter::MemoryAdapter;
use tower_dedup::adapter::contract::{
    Abilities, CallTerms, ClaimReply, CompleteReply, DedupAdapter, Fetch, RenewReply, StoreFuture,
    StoredData,
};
use tower_dedup::adapter::maintenance::{Entry, ForgetReply, KeyState, MaintenanceAdapter, Stats};
use tower_dedup::{DedupKey, StoreError, StoreErrorKind};
use tower_dedup_conformance::Store;

pub(super) const NO_FAULT: u8 = 0;
pub(super) const INSERTED_ONCE: u8 = 1;
pub(super) const LEASE_TAKEN: u8 = 2;
pub(super) const REVIVED: u8 = 3;
pub(super) const TAKEN_ANEW: u8 = 4;
pub(super) const SECOND_STEP: u8 = 5;
pub(super) const PURGES_FIFTY: u8 = 6;
pub(super) const REPLAYS_CORRUPT: u8 = 7;
pub(super) const HIDES_STORED_DATA: u8 = 8;
pub(super) const MIXES_REPLIES: u8 = 9;
pub(super) const STORES_LATE: u8 = 10;
pub(super) const OVERWRITES_DATA: u8 = 11;
pub(super) const LOSES_LATE_DATA: u8 = 12;
pub(super) const CLAIMS_UNPOLLED: u8 = 13;
pub(super) const COUNTS_NO_ATTEMPTS: u8 = 14;
pub(super) const COUNTS_FORGOTTEN: u8 = 15;
pub(super) const IGNORES_THE_PAST: u8 = 16;
pub(super) const SORTS_ENTRIES: u8 = 17;

pub(super) struct Wrapped<const FAULT: u8> {
    inner: MemoryAdapter,
    /// Keys that a completion inserted, or completed late.
    completed: Mutex<HashSet<DedupKey>>,
    /// Keys whose response is unreadable.
    corrupt: Mutex<HashSet<DedupKey>>,
    /// How many claims are under way, and the reply to the last one.
    mixed: Mutex<(usize, Option<ClaimReply>)>,
    digests: Mutex<HashMap<DedupKey, Option<[u8; 32]>>>,
    forgotten: Mutex<u64>,
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
        if FAULT == CLAIMS_UNPOLLED {
            let claimed = self.inner.claim(key, terms).now_or_never();
            return Box::pin(async { claimed.unwrap() });
        }
        Box::pin(async move {
            if FAULT == MIXES_REPLIES {
                self.mixed.lock().unwrap().0 += 1;
                let claimed = self.inner.claim(key, terms).await;
                tokio::task::yield_now().await;
                let mut mixed = self.mixed.lock().unwrap();
                mixed.0 -= 1;
                let last = mixed.1.replace(claimed?);
                return Ok(last.filter(|_| mixed.0 > 0).or_else(|| mixed.1.clone()).unwrap());
            }
            if matches!(FAULT, STORES_LATE | OVERWRITES_DATA) && terms.fetch() == Fetch::Digest {
                let digest = terms.payload_sha256();
                let claimed = self.inner.claim(key, terms).await?;
                let is_first = matches!(claimed, ClaimReply::First { .. });
                if FAULT == STORES_LATE && is_first {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                let ClaimReply::Duplicate(mut seen) = claimed else {
                    self.digests.lock().unwrap().insert(key.clone(), digest);
                    return Ok(claimed);
                };
                let mut digests = self.digests.lock().unwrap();
                let known = digests.get(key).copied().flatten();
                seen.stored = Some(Arc::new(StoredData::new(known, None)));
                if FAULT == OVERWRITES_DATA {
                    digests.insert(key.clone(), digest);
                }
                return Ok(ClaimReply::Duplicate(seen));
            }
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
            if FAULT == IGNORES_THE_PAST && terms.handled_at_ms().is_some() {
                let now = CallTerms::on_claim(terms.token(), terms.retention());
                return self.inner.claim(key, &now).await;
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
        self.digests.lock().unwrap().remove(key);
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
            if FAULT == LOSES_LATE_DATA {
                let state = self.inner.get(key).await?.map(|entry| entry.state);
                if state != Some(KeyState::InFlight) && state != Some(KeyState::Complete) {
                    let (token, retention) = (terms.token(), terms.retention());
                    let lease = Duration::from_secs(60);
                    let bare = CallTerms::on_completion(token, retention, lease);
                    return self.inner.complete(key, &bare).await;
                }
            }
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
        Box::pin(async move {
            let forgotten = self.inner.forget(key).await?;
            *self.forgotten.lock().unwrap() += u64::from(forgotten == ForgetReply::Removed);
            Ok(forgotten)
        })
    }

    fn get<'a>(&'a self, key: &'a DedupKey) -> StoreFuture<'a, Option<Entry>> {
        Box::pin(async move {
            let mut entry = self.inner.get(key).await?;
            if let Some(entry) = &mut entry {
                entry.response_is_unreadable = self.is_corrupt(key);
                if FAULT == COUNTS_NO_ATTEMPTS {
                    (entry.attempts, entry.takeover) = (1, false);
                }
            }
            Ok(entry)
        })
    }

    fn get_many<'a>(&'a self, keys: &'a [DedupKey]) -> StoreFuture<'a, Vec<Option<Entry>>> {
        Box::pin(async move {
            let mut entries = self.inner.get_many(keys).await?;
            if FAULT == SORTS_ENTRIES {
                entries.sort_by_key(Option::is_none);
            }
            Ok(entries)
        })
    }

    fn stats(&self) -> StoreFuture<'_, Stats> {
        Box::pin(async move {
            let mut stats = self.inner.stats().await?;
            if FAULT == COUNTS_FORGOTTEN {
                stats.rows += *self.forgotten.lock().unwrap();
            }
            Ok(stats)
        })
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
            mixed: Mutex::default(),
            digests: Mutex::default(),
            forgotten: Mutex::default(),
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
