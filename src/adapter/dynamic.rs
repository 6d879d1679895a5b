//! [`DynAdapter`]: an adapter behind a pointer, for stores that are chosen at run time.

use futures_util::future::BoxFuture;

use super::contract::{
    Claimed, Completed, DedupAdapter, Entry, Forgotten, LeaseAdapter, Maintain, Receipt, Recorded,
    Released, Renewed,
};
use super::kept::{Kept, Recall, Wanted};
use crate::error::Error;
use crate::key::DedupKey;

/// The boxed twin of [`LeaseAdapter`], [`Maintain`] and [`Recall`], implemented for everything that
/// implements all three. `Arc<dyn DynAdapter>` is an adapter again.
///
/// Each call costs one allocation more than the adapter it stands for.
pub trait DynAdapter: Send + Sync + 'static {
    /// [`DedupAdapter::record`]
    fn dyn_record<'a>(
        &'a self,
        keys: &'a [DedupKey],
        receipt: &'a Receipt,
    ) -> BoxFuture<'a, Result<Vec<Recorded>, Error>>;
    /// [`DedupAdapter::unrecord`]
    fn dyn_unrecord<'a>(
        &'a self,
        keys: &'a [DedupKey],
        receipt: &'a Receipt,
    ) -> BoxFuture<'a, Result<Vec<Released>, Error>>;
    /// [`LeaseAdapter::claim`]
    fn dyn_claim<'a>(
        &'a self,
        keys: &'a [DedupKey],
        receipt: &'a Receipt,
    ) -> BoxFuture<'a, Result<Vec<Claimed>, Error>>;
    /// [`LeaseAdapter::renew`]
    fn dyn_renew<'a>(
        &'a self,
        keys: &'a [DedupKey],
        receipt: &'a Receipt,
    ) -> BoxFuture<'a, Result<Vec<Renewed>, Error>>;
    /// [`LeaseAdapter::complete`]
    fn dyn_complete<'a>(
        &'a self,
        keys: &'a [DedupKey],
        receipt: &'a Receipt,
    ) -> BoxFuture<'a, Result<Vec<Completed>, Error>>;
    /// [`LeaseAdapter::release`]
    fn dyn_release<'a>(
        &'a self,
        keys: &'a [DedupKey],
        receipt: &'a Receipt,
    ) -> BoxFuture<'a, Result<Vec<Released>, Error>>;
    /// [`Recall::recall`]
    fn dyn_recall<'a>(
        &'a self,
        keys: &'a [DedupKey],
        wanted: Wanted,
    ) -> BoxFuture<'a, Result<Vec<Option<Kept>>, Error>>;
    /// [`Maintain::purge`]
    fn dyn_purge(&self, limit: u32) -> BoxFuture<'_, Result<u64, Error>>;
    /// [`Maintain::forget`]
    fn dyn_forget<'a>(&'a self, key: &'a DedupKey) -> BoxFuture<'a, Result<Forgotten, Error>>;
    /// [`Maintain::get`]
    fn dyn_get<'a>(&'a self, key: &'a DedupKey) -> BoxFuture<'a, Result<Option<Entry>, Error>>;
    /// [`Maintain::count`]
    fn dyn_count(&self) -> BoxFuture<'_, Result<u64, Error>>;
    /// [`Maintain::close`]
    fn dyn_close(&self) -> BoxFuture<'_, ()>;
}

impl<A: LeaseAdapter + Maintain + Recall> DynAdapter for A {
    fn dyn_record<'a>(
        &'a self,
        keys: &'a [DedupKey],
        receipt: &'a Receipt,
    ) -> BoxFuture<'a, Result<Vec<Recorded>, Error>> {
        Box::pin(self.record(keys, receipt))
    }

    fn dyn_unrecord<'a>(
        &'a self,
        keys: &'a [DedupKey],
        receipt: &'a Receipt,
    ) -> BoxFuture<'a, Result<Vec<Released>, Error>> {
        Box::pin(self.unrecord(keys, receipt))
    }

    fn dyn_claim<'a>(
        &'a self,
        keys: &'a [DedupKey],
        receipt: &'a Receipt,
    ) -> BoxFuture<'a, Result<Vec<Claimed>, Error>> {
        Box::pin(self.claim(keys, receipt))
    }

    fn dyn_renew<'a>(
        &'a self,
        keys: &'a [DedupKey],
        receipt: &'a Receipt,
    ) -> BoxFuture<'a, Result<Vec<Renewed>, Error>> {
        Box::pin(self.renew(keys, receipt))
    }

    fn dyn_complete<'a>(
        &'a self,
        keys: &'a [DedupKey],
        receipt: &'a Receipt,
    ) -> BoxFuture<'a, Result<Vec<Completed>, Error>> {
        Box::pin(self.complete(keys, receipt))
    }

    fn dyn_release<'a>(
        &'a self,
        keys: &'a [DedupKey],
        receipt: &'a Receipt,
    ) -> BoxFuture<'a, Result<Vec<Released>, Error>> {
        Box::pin(self.release(keys, receipt))
    }

    fn dyn_recall<'a>(
        &'a self,
        keys: &'a [DedupKey],
        wanted: Wanted,
    ) -> BoxFuture<'a, Result<Vec<Option<Kept>>, Error>> {
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
    async fn record(&self, keys: &[DedupKey], receipt: &Receipt) -> Result<Vec<Recorded>, Error> {
        self.dyn_record(keys, receipt).await
    }

    async fn unrecord(&self, keys: &[DedupKey], receipt: &Receipt) -> Result<Vec<Released>, Error> {
        self.dyn_unrecord(keys, receipt).await
    }
}

impl LeaseAdapter for dyn DynAdapter {
    async fn claim(&self, keys: &[DedupKey], receipt: &Receipt) -> Result<Vec<Claimed>, Error> {
        self.dyn_claim(keys, receipt).await
    }

    async fn renew(&self, keys: &[DedupKey], receipt: &Receipt) -> Result<Vec<Renewed>, Error> {
        self.dyn_renew(keys, receipt).await
    }

    async fn complete(
        &self,
        keys: &[DedupKey],
        receipt: &Receipt,
    ) -> Result<Vec<Completed>, Error> {
        self.dyn_complete(keys, receipt).await
    }

    async fn release(&self, keys: &[DedupKey], receipt: &Receipt) -> Result<Vec<Released>, Error> {
        self.dyn_release(keys, receipt).await
    }
}

impl Recall for dyn DynAdapter {
    async fn recall(&self, keys: &[DedupKey], wanted: Wanted) -> Result<Vec<Option<Kept>>, Error> {
        self.dyn_recall(keys, wanted).await
    }
}

impl Maintain for dyn DynAdapter {
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
