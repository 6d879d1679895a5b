//! [`DynAdapter`]: an adapter behind a pointer, for stores that are chosen at run time.

use futures_util::future::BoxFuture;

use super::contract::{
    CallTerms, Claimed, Completed, DedupAdapter, Entry, Forgotten, LeaseAdapter,
    MaintenanceAdapter, Recorded, Released, Renewed,
};
use super::stored::{Fetch, Recall, StoredData};
use crate::error::Error;
use crate::key::DedupKey;

/// The boxed twin of [`LeaseAdapter`], [`MaintenanceAdapter`] and [`Recall`], implemented for everything that
/// implements all three. `Arc<dyn DynAdapter>` is an adapter again.
///
/// Each call costs one allocation more than the adapter it stands for.
pub trait DynAdapter: Send + Sync + 'static {
    /// [`DedupAdapter::record`]
    fn dyn_record<'a>(
        &'a self,
        keys: &'a [DedupKey],
        terms: &'a CallTerms,
    ) -> BoxFuture<'a, Result<Vec<Recorded>, Error>>;
    /// [`DedupAdapter::unrecord`]
    fn dyn_unrecord<'a>(
        &'a self,
        keys: &'a [DedupKey],
        terms: &'a CallTerms,
    ) -> BoxFuture<'a, Result<Vec<Released>, Error>>;
    /// [`LeaseAdapter::claim`]
    fn dyn_claim<'a>(
        &'a self,
        keys: &'a [DedupKey],
        terms: &'a CallTerms,
    ) -> BoxFuture<'a, Result<Vec<Claimed>, Error>>;
    /// [`LeaseAdapter::renew`]
    fn dyn_renew<'a>(
        &'a self,
        keys: &'a [DedupKey],
        terms: &'a CallTerms,
    ) -> BoxFuture<'a, Result<Vec<Renewed>, Error>>;
    /// [`LeaseAdapter::complete`]
    fn dyn_complete<'a>(
        &'a self,
        keys: &'a [DedupKey],
        terms: &'a CallTerms,
    ) -> BoxFuture<'a, Result<Vec<Completed>, Error>>;
    /// [`LeaseAdapter::release`]
    fn dyn_release<'a>(
        &'a self,
        keys: &'a [DedupKey],
        terms: &'a CallTerms,
    ) -> BoxFuture<'a, Result<Vec<Released>, Error>>;
    /// [`Recall::recall`]
    fn dyn_recall<'a>(
        &'a self,
        keys: &'a [DedupKey],
        wanted: Fetch,
    ) -> BoxFuture<'a, Result<Vec<Option<StoredData>>, Error>>;
    /// [`MaintenanceAdapter::purge`]
    fn dyn_purge(&self, limit: u32) -> BoxFuture<'_, Result<u64, Error>>;
    /// [`MaintenanceAdapter::forget`]
    fn dyn_forget<'a>(&'a self, key: &'a DedupKey) -> BoxFuture<'a, Result<Forgotten, Error>>;
    /// [`MaintenanceAdapter::get`]
    fn dyn_get<'a>(&'a self, key: &'a DedupKey) -> BoxFuture<'a, Result<Option<Entry>, Error>>;
    /// [`MaintenanceAdapter::count`]
    fn dyn_count(&self) -> BoxFuture<'_, Result<u64, Error>>;
    /// [`MaintenanceAdapter::close`]
    fn dyn_close(&self) -> BoxFuture<'_, ()>;
}

impl<A: LeaseAdapter + MaintenanceAdapter + Recall> DynAdapter for A {
    fn dyn_record<'a>(
        &'a self,
        keys: &'a [DedupKey],
        terms: &'a CallTerms,
    ) -> BoxFuture<'a, Result<Vec<Recorded>, Error>> {
        Box::pin(self.record(keys, terms))
    }

    fn dyn_unrecord<'a>(
        &'a self,
        keys: &'a [DedupKey],
        terms: &'a CallTerms,
    ) -> BoxFuture<'a, Result<Vec<Released>, Error>> {
        Box::pin(self.unrecord(keys, terms))
    }

    fn dyn_claim<'a>(
        &'a self,
        keys: &'a [DedupKey],
        terms: &'a CallTerms,
    ) -> BoxFuture<'a, Result<Vec<Claimed>, Error>> {
        Box::pin(self.claim(keys, terms))
    }

    fn dyn_renew<'a>(
        &'a self,
        keys: &'a [DedupKey],
        terms: &'a CallTerms,
    ) -> BoxFuture<'a, Result<Vec<Renewed>, Error>> {
        Box::pin(self.renew(keys, terms))
    }

    fn dyn_complete<'a>(
        &'a self,
        keys: &'a [DedupKey],
        terms: &'a CallTerms,
    ) -> BoxFuture<'a, Result<Vec<Completed>, Error>> {
        Box::pin(self.complete(keys, terms))
    }

    fn dyn_release<'a>(
        &'a self,
        keys: &'a [DedupKey],
        terms: &'a CallTerms,
    ) -> BoxFuture<'a, Result<Vec<Released>, Error>> {
        Box::pin(self.release(keys, terms))
    }

    fn dyn_recall<'a>(
        &'a self,
        keys: &'a [DedupKey],
        wanted: Fetch,
    ) -> BoxFuture<'a, Result<Vec<Option<StoredData>>, Error>> {
        Box::pin(self.recall(keys, wanted))
    }

    fn dyn_purge(&self, limit: u32) -> BoxFuture<'_, Result<u64, Error>> {
        Box::pin(self.purge(limit))
    }

    fn dyn_forget<'a>(&'a self, key: &'a DedupKey) -> BoxFuture<'a, Result<Forgotten, Error>> {
        Box::pin(self.forget(key))
    }

    fn dyn_get<'a>(&'a self, key: &'a DedupKey) -> BoxFuture<'a, Result<Option<Entry>, Error>> {
        Box::pin(self.get(key))
    }

    fn dyn_count(&self) -> BoxFuture<'_, Result<u64, Error>> {
        Box::pin(self.count())
    }

    fn dyn_close(&self) -> BoxFuture<'_, ()> {
        Box::pin(self.close())
    }
}

impl DedupAdapter for dyn DynAdapter {
    async fn record(&self, keys: &[DedupKey], terms: &CallTerms) -> Result<Vec<Recorded>, Error> {
        self.dyn_record(keys, terms).await
    }

    async fn unrecord(&self, keys: &[DedupKey], terms: &CallTerms) -> Result<Vec<Released>, Error> {
        self.dyn_unrecord(keys, terms).await
    }
}

impl LeaseAdapter for dyn DynAdapter {
    async fn claim(&self, keys: &[DedupKey], terms: &CallTerms) -> Result<Vec<Claimed>, Error> {
        self.dyn_claim(keys, terms).await
    }

    async fn renew(&self, keys: &[DedupKey], terms: &CallTerms) -> Result<Vec<Renewed>, Error> {
        self.dyn_renew(keys, terms).await
    }

    async fn complete(
        &self,
        keys: &[DedupKey],
        terms: &CallTerms,
    ) -> Result<Vec<Completed>, Error> {
        self.dyn_complete(keys, terms).await
    }

    async fn release(&self, keys: &[DedupKey], terms: &CallTerms) -> Result<Vec<Released>, Error> {
        self.dyn_release(keys, terms).await
    }
}

impl Recall for dyn DynAdapter {
    async fn recall(
        &self,
        keys: &[DedupKey],
        wanted: Fetch,
    ) -> Result<Vec<Option<StoredData>>, Error> {
        self.dyn_recall(keys, wanted).await
    }
}

impl MaintenanceAdapter for dyn DynAdapter {
    async fn purge(&self, limit: u32) -> Result<u64, Error> {
        self.dyn_purge(limit).await
    }

    async fn forget(&self, key: &DedupKey) -> Result<Forgotten, Error> {
        self.dyn_forget(key).await
    }

    async fn get(&self, key: &DedupKey) -> Result<Option<Entry>, Error> {
        self.dyn_get(key).await
    }

    async fn count(&self) -> Result<u64, Error> {
        self.dyn_count().await
    }

    async fn close(&self) {
        self.dyn_close().await;
    }
}
