//! [`PostgresAdapter`]: its calls and its maintenance.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use sqlx::postgres::{PgPool, PgPoolOptions};
use sqlx::{ConnectOptions, Connection};
use tokio::time::timeout;

use super::super::contract::{Abilities, DedupAdapter, StoreFuture};
use super::super::inspect::{
    Cursor, Entry, ForgetReply, ListFilter, Listing, MaintenanceAdapter, Stats,
};
use super::super::replies::{ClaimReply, CompleteReply, RenewReply};
use super::super::sql::call::{Call, Kind, RowReply, Rows, reply};
use super::super::sql::responses::{READING_RESPONSE, add_response};
use super::super::terms::CallTerms;
use super::errors::{store_error, timed_out};
use super::function::record_function;
use super::options::PostgresOptions;
use super::params::key_hash;
use super::schema::create_sql;
use super::store::PostgresStore;
use crate::error::Error;
use crate::key::DedupKey;

const CONNECTIONS: u32 = 10;
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(5);

/// Keeps keys in a table of a Postgres database, for all processes of a service.
///
/// ```no_run
/// # async fn example() -> Result<(), tower_dedup::Error> {
/// use tower_dedup::adapter::PostgresAdapter;
/// use tower_dedup::{DedupLayer, provider};
///
/// let store = PostgresAdapter::connect("postgres://app@localhost/app").await?;
/// let dedup = DedupLayer::transactional(provider::STRIPE, store);
/// # let _ = dedup;
/// # Ok(())
/// # }
/// ```
///
/// # Guarantees
///
/// 1. A complete key is on disk, and on the disk of a synchronous standby where there is one, whatever
///    `synchronous_commit` a role has. A [failover](crate::adapter::PostgresAdapter#failover) to an asynchronous standby
///    can lose it. After a failover, a server in recovery answers no claim.
/// 2. A duplicate writes nothing: no WAL, no wait for a disk. A stored response is read by one more statement, on
///    a connection of the pool.
/// 3. A key that an open transaction holds is in flight after 100 ms (`lock_timeout`, set for the statement only).
///    So no call waits with a connection for a handler to end.
/// 4. Calls that arrive while a statement is in progress are sent [together](crate::adapter::Batching), over connections
///    beside the pool ([connections](crate::guide::production#connections)).
/// 5. The clock is Postgres's.
/// 6. The first call makes the schema, or [`migrate`](Self::migrate), safely from many processes at once; a failed
///    migration is tried again by the next call. Where the table exists, a role with SELECT, INSERT, UPDATE and
///    DELETE is enough. Statements name the table with its schema. If the table is dropped, the next call looks
///    for it again.
///
/// A clone is another handle to the same connections and the same state.
///
#[doc = include_str!("../../docs/stores/postgres.md")]
#[derive(Clone)]
pub struct PostgresAdapter(pub(super) Arc<PostgresStore>);

impl PostgresAdapter {
    /// Connects to the database that a `postgres://` URL names, with up to ten connections.
    ///
    /// The table is made by the first call that needs it, or by [`migrate`](Self::migrate). The URL's
    /// parameters `dedup_table` and `dedup_schema` name the table and its schema:
    /// `postgres://app@localhost/app?dedup_table=seen&dedup_schema=webhooks`. `sslmode` chooses
    /// TLS, with the feature `tls-rustls`, `tls-rustls-aws-lc-rs` or `tls-native-tls`. Without one,
    /// the default `sslmode=prefer` connects in plain text. TLS here needs and installs no cryptographic
    /// provider of the process.
    ///
    /// The URL names one host. Where a standby may take over, that is an address which leads to the
    /// primary: see [Failover](crate::adapter::PostgresAdapter#failover).
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`](crate::ErrorKind::Config), with a [`ConfigError`] as its source, for a
    /// URL that cannot be read, and for a URL that names several hosts or has
    /// `target_session_attrs` or `load_balance_hosts`, because `sqlx` would not choose between
    /// servers. [`ErrorKind::Unavailable`](crate::ErrorKind::Unavailable) if the database cannot be
    /// reached within 5 s.
    ///
    /// [`ConfigError`]: crate::ConfigError
    pub async fn connect(url: &str) -> Result<Self, Error> {
        Self::connect_with(url, PostgresOptions::new()).await
    }

    /// Connects with these options. Names in the URL replace those of the options.
    ///
    /// # Errors
    ///
    /// Those of [`connect`](Self::connect), and [`ErrorKind::Config`](crate::ErrorKind::Config) for an invalid option.
    pub async fn connect_with(url: &str, options: PostgresOptions) -> Result<Self, Error> {
        options.check()?;
        let (options, connect) = options.read_url(url)?;
        // The pool would try until its time is up, and not say what was wrong.
        let first = timeout(ACQUIRE_TIMEOUT, connect.connect()).await;
        let first = first.unwrap_or_else(|_| Err(timed_out()));
        let first = first.map_err(|error| store_error("connecting to Postgres", error))?;
        let pool = PgPoolOptions::new()
            .max_connections(CONNECTIONS)
            .acquire_timeout(ACQUIRE_TIMEOUT)
            .connect_lazy_with(connect);
        drop(timeout(ACQUIRE_TIMEOUT, first.close()).await);
        Ok(Self(Arc::new(PostgresStore::new(pool, options, false))))
    }

    /// Returns an adapter over a pool of yours, on the database that your service uses anyway.
    ///
    /// Beside the pool, the adapter opens connections of its own for [batches](crate::adapter::Batching): one for
    /// each that is sent at the same time, 2 by default, and up to 4 while batches take longer than 500 ms. They
    /// have the pool's hooks and connect options, and are closed with the pool. So claims of the other
    /// ledgers take no connection of yours; transactions, maintenance and stored responses do.
    ///
    /// [`close`](MaintenanceAdapter::close) leaves the pool open. For the size of the pool, see
    /// [Connections](crate::guide::production#connections).
    #[must_use]
    pub fn new(pool: PgPool) -> Self {
        Self::with_options(pool, PostgresOptions::new())
    }

    /// Returns an adapter over a pool of yours, with these options. An invalid option is the error
    /// ([`ErrorKind::Config`](crate::ErrorKind::Config)) of every call.
    #[must_use]
    pub fn with_options(pool: PgPool, options: PostgresOptions) -> Self {
        Self(Arc::new(PostgresStore::new(pool, options, true)))
    }

    /// Makes the schema, if it does not exist. Many processes may call it at once.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Refused`](crate::ErrorKind::Refused) if the role may not create the schema,
    /// [`ErrorKind::Unavailable`](crate::ErrorKind::Unavailable) if the database cannot be reached;
    /// the next call tries again.
    pub async fn migrate(&self) -> Result<(), Error> {
        self.0.migrate().await
    }

    /// The version of the table that [`migrate`](Self::migrate) makes, as its version table stores it.
    pub(crate) const SCHEMA_VERSION: i32 = super::schema::VERSION;

    /// Returns the statements that [`migrate`](Self::migrate) runs, for your own migrations.
    #[must_use]
    pub fn schema_sql(&self) -> Vec<String> {
        let options = &self.0.options;
        let function = options.makes_function.then(|| record_function(&options.name));
        create_sql(&options.name).into_iter().chain(function).collect()
    }

    async fn call<T>(
        &self,
        kind: Kind,
        key: &DedupKey,
        terms: &CallTerms,
        pick: fn(RowReply) -> Option<T>,
    ) -> Result<T, Error> {
        let store = &self.0;
        let call = || store.batcher.submit(store, Call::new(kind, key, terms, key_hash));
        reply(store.with_table(call).await?, pick)
    }
}

impl fmt::Debug for PostgresAdapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresAdapter").field("options", &self.0.options).finish_non_exhaustive()
    }
}

impl DedupAdapter for PostgresAdapter {
    fn abilities(&self) -> Abilities {
        Abilities { leases: true, stored_data: true, inspection: true, ..Abilities::new() }
    }

    fn claim<'a>(&'a self, key: &'a DedupKey, terms: &'a CallTerms) -> StoreFuture<'a, ClaimReply> {
        Box::pin(async move {
            let claimed = self.call(Kind::claim(terms), key, terms, RowReply::claimed).await?;
            // Boxed, because most calls read nothing.
            let read = || {
                Box::pin(async {
                    let rows = Rows::of_call(std::slice::from_ref(key), terms, key_hash);
                    let read = self.0.read(&rows, terms.fetch()).await;
                    Ok(read.map_err(|error| store_error(READING_RESPONSE, error))?.0)
                })
            };
            add_response(terms, claimed, read).await
        })
    }

    fn release<'a>(&'a self, key: &'a DedupKey, terms: &'a CallTerms) -> StoreFuture<'a, ()> {
        Box::pin(self.call(Kind::release(terms), key, terms, RowReply::released))
    }

    fn renew<'a>(&'a self, key: &'a DedupKey, terms: &'a CallTerms) -> StoreFuture<'a, RenewReply> {
        Box::pin(self.call(Kind::Renew, key, terms, RowReply::renewed))
    }

    fn complete<'a>(
        &'a self,
        key: &'a DedupKey,
        terms: &'a CallTerms,
    ) -> StoreFuture<'a, CompleteReply> {
        Box::pin(self.call(Kind::Complete, key, terms, RowReply::completed))
    }
}

impl PostgresStore {
    /// Purges in the background from now on.
    pub(super) fn ensure_purge(self: &Arc<Self>) {
        self.purge_task.ensure(self, &self.connections.pool, PostgresAdapter);
    }
}

impl MaintenanceAdapter for PostgresAdapter {
    fn purge(&self, limit: u32) -> StoreFuture<'_, u64> {
        let store = &self.0;
        Box::pin(store.with_table(move || store.purge(limit)))
    }

    fn forget<'a>(&'a self, key: &'a DedupKey) -> StoreFuture<'a, ForgetReply> {
        let store = &self.0;
        Box::pin(store.with_table(move || store.forget(key)))
    }

    fn get<'a>(&'a self, key: &'a DedupKey) -> StoreFuture<'a, Option<Entry>> {
        Box::pin(self.0.with_table(move || self.0.get(key)))
    }

    fn list<'a>(
        &'a self,
        filter: &'a ListFilter,
        after: Option<&'a Cursor>,
        limit: u32,
    ) -> StoreFuture<'a, Listing> {
        let store = &self.0;
        Box::pin(store.with_table(move || store.list(filter, after, limit)))
    }

    fn stats(&self) -> StoreFuture<'_, Stats> {
        Box::pin(self.0.with_table(|| self.0.stats()))
    }

    /// Closes the lanes' connections. A pool of the user's stays open: it is the user's to close.
    fn close(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(async move {
            self.0.purge_task.stop();
            self.0.connections.close().await;
            if !self.0.user_pool {
                self.0.connections.pool.close().await;
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::sql::statement::check_golden;
    use super::super::schema::{TableName, migration};
    use super::super::statements::{Statements, tagged};
    use super::*;

    #[test]
    fn golden() {
        let name = TableName::default();
        let statements = Statements::new(&name, false);
        let durable = Statements::new(&name, true);
        let (find, migration) = (tagged(&name.find()), migration(create_sql(&name), None));
        let named = TableName { schema: Some("webhooks".to_owned()), ..name };
        let (create, function) = (create_sql(&named), record_function(&TableName::default()));
        let mut all = statements.all();
        all.extend([
            ("claim_insert, durable", &*durable.claim_insert),
            ("find", &*find),
            ("migration", &*migration),
            ("create_schema", &*create[0]),
            ("record_function", &*function),
        ]);
        check_golden("src/adapter/postgres/sql/golden.txt", &all);
    }
}
