//! [`Around`]: an adapter around another one. It forwards every method.

use std::sync::Arc;

use super::contract::{
    Abilities, CallTerms, ClaimReply, CompleteReply, Completion, DedupAdapter, RenewReply,
    StoreFuture,
};
use super::maintenance::{Entry, ForgetReply, ListFilter, Listing, MaintenanceAdapter, Stats};
use crate::error::StoreError;
use crate::key::DedupKey;

/// A wrapper of an adapter. [`adapter_around`] makes an adapter of it.
pub(crate) trait Around {
    type Inner: ?Sized;

    fn inner(&self) -> &Self::Inner;

    /// Makes a call of a delivery: the name of a method of [`DedupAdapter`], and its terms.
    fn around<'a, T: Send + 'a>(
        &'a self,
        _method: &'static str,
        _terms: &'a CallTerms,
        make: impl FnOnce(&'a Self::Inner) -> StoreFuture<'a, T> + Send + 'a,
    ) -> StoreFuture<'a, T> {
        make(self.inner())
    }
}

/// Implements both traits of an adapter for a wrapper, by its [`Around`].
macro_rules! adapter_around {
    ($wrapper:ident $(: ?$unsized:ident)?) => {
        /// Forwards every method.
        impl<A: DedupAdapter $(+ ?$unsized)?> DedupAdapter for $wrapper<A> {
            fn abilities(&self) -> Abilities {
                self.inner().abilities()
            }

            adapter_around!(@ claim ClaimReply, release (), renew RenewReply, complete CompleteReply, is_complete bool);

            fn completion(
                &self,
                keys: &[(&DedupKey, &CallTerms)],
            ) -> Result<Completion, StoreError> {
                self.inner().completion(keys)
            }
        }

        /// Forwards every method.
        impl<A: MaintenanceAdapter $(+ ?$unsized)?> MaintenanceAdapter for $wrapper<A> {
            fn purge(&self, limit: u32) -> StoreFuture<'_, u64> {
                self.inner().purge(limit)
            }

            fn forget<'a>(&'a self, key: &'a DedupKey) -> StoreFuture<'a, ForgetReply> {
                self.inner().forget(key)
            }

            fn get<'a>(&'a self, key: &'a DedupKey) -> StoreFuture<'a, Option<Entry>> {
                self.inner().get(key)
            }

            fn get_many<'a>(&'a self, keys: &'a [DedupKey]) -> StoreFuture<'a, Vec<Option<Entry>>> {
                self.inner().get_many(keys)
            }

            fn list<'a>(
                &'a self,
                filter: &'a ListFilter,
                after: Option<&'a str>,
                limit: u32,
            ) -> StoreFuture<'a, Listing> {
                self.inner().list(filter, after, limit)
            }

            fn stats(&self) -> StoreFuture<'_, Stats> {
                self.inner().stats()
            }

            fn close(&self) -> futures_util::future::BoxFuture<'_, ()> {
                self.inner().close()
            }
        }
    };
    (@ $($method:ident $reply:ty),+) => {$(
        fn $method<'a>(
            &'a self,
            key: &'a DedupKey,
            terms: &'a CallTerms,
        ) -> StoreFuture<'a, $reply> {
            self.around(stringify!($method), terms, move |inner| inner.$method(key, terms))
        }
    )+};
}
#[cfg(feature = "testing")]
pub(crate) use adapter_around;

impl<A: ?Sized> Around for Arc<A> {
    type Inner = A;

    fn inner(&self) -> &A {
        self
    }
}

adapter_around!(Arc: ?Sized);
