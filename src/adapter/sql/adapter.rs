//! The contracts of a SQL adapter, which is a handle to a store.

/// Implements the contracts for an adapter over the `Arc` of its store. `$more` are the methods of [`TransactionAdapter`](super::super::transaction::TransactionAdapter) that have a default.
macro_rules! sql_adapter {
    ($adapter:ident, $store:ident, $database:ident, { $($more:item)* }) => {
        impl std::fmt::Debug for $adapter {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                let mut adapter = f.debug_struct(stringify!($adapter));
                adapter.field("options", &self.0.options).finish_non_exhaustive()
            }
        }

        impl $adapter {
            /// Makes the schema, if it does not exist. Many processes may call it at once.
            ///
            /// # Errors
            ///
            /// [`ErrorKind::Refused`](crate::ErrorKind::Refused) if the schema may not be made here,
            /// [`ErrorKind::Unavailable`](crate::ErrorKind::Unavailable) if the database cannot be reached or written;
            /// the next call tries again.
            pub async fn migrate(&self) -> Result<(), Error> {
                self.0.migrate().await
            }

            async fn call<T>(
                &self,
                kind: Kind,
                key: &DedupKey,
                terms: &CallTerms,
                pick: fn(RowReply) -> Option<T>,
            ) -> Result<T, Error> {
                pick(self.0.submit(kind, key, terms).await?).ok_or_else(missing_reply)
            }
        }

        impl $store {
            /// Purges in the background from now on.
            pub(super) fn ensure_purge(self: &Arc<Self>) {
                self.purge_task.ensure(self, self.pool(), $adapter, Self::on_close);
            }
        }

        impl DedupAdapter for $adapter {
            fn abilities(&self) -> Abilities {
                Abilities { leases: true, stored_data: true, inspection: true, ..Abilities::default() }
            }

            fn claim<'a>(
                &'a self,
                key: &'a DedupKey,
                terms: &'a CallTerms,
            ) -> StoreFuture<'a, ClaimReply> {
                Box::pin(self.0.with_table(move || self.claim_once(key, terms)))
            }

            fn release<'a>(
                &'a self,
                key: &'a DedupKey,
                terms: &'a CallTerms,
            ) -> StoreFuture<'a, ()> {
                let call = || self.call(Kind::release(terms), key, terms, RowReply::released);
                Box::pin(self.0.with_table(call))
            }

            fn renew<'a>(
                &'a self,
                key: &'a DedupKey,
                terms: &'a CallTerms,
            ) -> StoreFuture<'a, RenewReply> {
                let call = || self.call(Kind::Renew, key, terms, RowReply::renewed);
                Box::pin(self.0.with_table(call))
            }

            fn complete<'a>(
                &'a self,
                key: &'a DedupKey,
                terms: &'a CallTerms,
            ) -> StoreFuture<'a, CompleteReply> {
                let call = || self.call(Kind::Complete, key, terms, RowReply::completed);
                Box::pin(self.0.with_table(call))
            }
        }

        impl MaintenanceAdapter for $adapter {
            fn purge(&self, limit: u32) -> StoreFuture<'_, u64> {
                Box::pin(self.0.with_table(move || self.0.purge(limit)))
            }

            fn forget<'a>(&'a self, key: &'a DedupKey) -> StoreFuture<'a, ForgetReply> {
                Box::pin(self.0.with_table(|| self.0.forget(key)))
            }

            fn get<'a>(&'a self, key: &'a DedupKey) -> StoreFuture<'a, Option<Entry>> {
                Box::pin(self.0.with_table(|| self.0.get(key)))
            }

            fn list<'a>(
                &'a self,
                filter: &'a ListFilter,
                after: Option<&'a str>,
                limit: u32,
            ) -> StoreFuture<'a, Listing> {
                Box::pin(self.0.with_table(move || self.0.list(filter, after, limit)))
            }

            fn stats(&self) -> StoreFuture<'_, Stats> {
                Box::pin(self.0.with_table(|| self.0.stats()))
            }

            /// A pool of the user's stays open: it is the user's to close.
            fn close(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
                Box::pin(self.0.close())
            }
        }

        impl Sealed for $adapter {}

        impl TransactionAdapter for $adapter {
            type Database = $database;

            fn open<'a>(
                &'a self,
                keys: &'a [DedupKey],
                terms: &'a CallTerms,
            ) -> StoreFuture<'a, Opened<$database>> {
                Box::pin(self.0.with_table(move || self.0.open(keys, terms)))
            }

            fn release_in<'a>(
                &'a self,
                transaction: &'a mut OpenTransaction<$database>,
                keys: &'a [DedupKey],
                terms: &'a CallTerms,
            ) -> StoreFuture<'a, ()> {
                Box::pin(self.0.release_in(transaction.connection(), keys, terms))
            }

            fn commit<'a>(
                &'a self,
                transaction: OpenTransaction<$database>,
                keys: &'a [DedupKey],
                terms: &'a CallTerms,
            ) -> StoreFuture<'a, ()> {
                Box::pin(self.0.commit(transaction, keys, terms))
            }

            fn rollback(&self, transaction: OpenTransaction<$database>) -> StoreFuture<'_, ()> {
                Box::pin(self.0.rollback(transaction))
            }

            $($more)*
        }
    };
}

pub(in crate::adapter) use sql_adapter;
