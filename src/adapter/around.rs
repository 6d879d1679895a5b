//! [`Around`]: an adapter around another one. It forwards every method.

use std::fmt::Debug;
use std::sync::Arc;

use super::contract::{
    Abilities, CallTerms, ClaimReply, CompleteReply, Completion, DedupAdapter, RenewReply,
    StoreFuture,
};
use super::inspect::{Entry, ForgetReply, ListFilter, Listing, MaintenanceAdapter, Stats};
use crate::error::StoreError;
use crate::key::DedupKey;

/// A call that a wrapper sees.
#[derive(Clone, Copy)]
#[cfg_attr(
    not(feature = "conformance"),
    expect(dead_code, reason = "only the conformance suite shows all of it")
)]
pub(crate) enum Call<'a> {
    /// The name of a method of [`DedupAdapter`], and its arguments.
    Delivery(&'static str, &'a DedupKey, &'a CallTerms),
    Purge(u32),
    /// The name of a method of [`MaintenanceAdapter`], and its key.
    Operator(&'static str, &'a DedupKey),
    List(&'a ListFilter, Option<&'a str>, u32),
    Stats,
}

/// A wrapper of an adapter. [`adapter_around`] makes an adapter of it.
pub(crate) trait Around {
    type Inner: ?Sized;

    fn inner(&self) -> &Self::Inner;

    /// Makes a call.
    fn around<'a, T: Debug + Send + 'a>(
        &'a self,
        _: Call<'a>,
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
                keys: &[DedupKey],
                terms: &CallTerms,
            ) -> Result<Completion, StoreError> {
                self.inner().completion(keys, terms)
            }
        }

        /// Forwards every method.
        impl<A: MaintenanceAdapter $(+ ?$unsized)?> MaintenanceAdapter for $wrapper<A> {
            fn purge(&self, limit: u32) -> StoreFuture<'_, u64> {
                self.around(Call::Purge(limit), move |inner| inner.purge(limit))
            }

            fn forget<'a>(&'a self, key: &'a DedupKey) -> StoreFuture<'a, ForgetReply> {
                self.around(Call::Operator("forget", key), move |inner| inner.forget(key))
            }

            fn get<'a>(&'a self, key: &'a DedupKey) -> StoreFuture<'a, Option<Entry>> {
                self.around(Call::Operator("get", key), move |inner| inner.get(key))
            }

            fn list<'a>(
                &'a self,
                filter: &'a ListFilter,
                after: Option<&'a str>,
                limit: u32,
            ) -> StoreFuture<'a, Listing> {
                let call = Call::List(filter, after, limit);
                self.around(call, move |inner| inner.list(filter, after, limit))
            }

            fn stats(&self) -> StoreFuture<'_, Stats> {
                self.around(Call::Stats, |inner| inner.stats())
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
            let call = Call::Delivery(stringify!($method), key, terms);
            self.around(call, move |inner| inner.$method(key, terms))
        }
    )+};
}
#[cfg(any(feature = "conformance", feature = "testing"))]
pub(crate) use adapter_around;

impl<A: ?Sized> Around for Arc<A> {
    type Inner = A;

    fn inner(&self) -> &A {
        self
    }
}

adapter_around!(Arc: ?Sized);
