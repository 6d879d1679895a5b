//! [`PostgresAdapter`]: its calls and its maintenance.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use sqlx::postgres::{PgPool, PgPoolOptions, Postgres};
use sqlx::{ConnectOptions, Connection};
use tokio::time::timeout;

use super::super::contract::{Abilities, DedupAdapter, StoreFuture};
use super::super::inspect::{Entry, ForgetReply, ListFilter, Listing, MaintenanceAdapter, Stats};
use super::super::replies::{ClaimReply, CompleteReply, RenewReply};
use super::super::sql::adapter::sql_adapter;
use super::super::sql::call::{Kind, RowReply, missing_reply};
use super::super::sql::responses::{READING_RESPONSE, add_response};
use super::super::terms::CallTerms;
use super::super::transaction::{OpenTransaction, Opened, Sealed, TransactionAdapter};
use super::errors::{store_error, timed_out};
use super::options::PostgresOptions;
use super::params::key_hash;
use super::schema::create_sql;
use super::statements::record_function;
use super::store::PostgresStore;
use crate::error::Error;
use crate::key::DedupKey;

const CONNECTIONS: u32 = 10;
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(5);
/// How many connections of a pool handlers leave to everybody else by default.
const SPARE_CONNECTIONS: u32 = 2;

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
/// A clone is another handle to the same connections and the same state.
///
#[doc = include_str!("../../docs/stores/postgres.md")]
#[derive(Clone)]
pub struct PostgresAdapter(pub(super) Arc<PostgresStore>);

impl PostgresAdapter {
    /// Connects to the database that a `postgres://` URL names, with up to ten connections.
    ///
    /// The URL's parameters `dedup_table` and `dedup_schema` name the table and its schema:
    /// `postgres://app@localhost/app?dedup_table=seen&dedup_schema=webhooks`. `sslmode` chooses
    /// [TLS](#tls), with the feature `tls-rustls`, `tls-rustls-aws-lc-rs` or `tls-native-tls`; it needs and installs no
    /// cryptographic provider of the process. The URL names one host: see [Failover](#failover).
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`](crate::ErrorKind::Config), with a [`ConfigError`] as its source, for a
    /// URL that cannot be read, and for a URL that names several hosts or has
    /// `target_session_attrs` or `load_balance_hosts`.
    /// [`ErrorKind::Unavailable`](crate::ErrorKind::Unavailable) if the database cannot be
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
    /// [Batches](PostgresOptions::batching) have connections of their own, with the pool's hooks and connect options,
    /// which are closed with the pool. So claims of the other ledgers, purges and `forget` take no connection of yours;
    /// transactions, the other calls of operators and stored responses do. [`close`](MaintenanceAdapter::close) leaves
    /// the pool open. For the size of the pool, see [Connections](crate::guide::production#connections).
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

    /// The version of the table that [`migrate`](Self::migrate) makes, as its version table stores it.
    pub(crate) const SCHEMA_VERSION: i32 = super::schema::VERSION;

    /// Returns the statements that [`migrate`](Self::migrate) runs, for your own migrations.
    #[must_use]
    pub fn schema_sql(&self) -> Vec<String> {
        let options = &self.0.options;
        let function = options.makes_function.then(|| record_function(&options.name));
        create_sql(&options.name).into_iter().chain(function).collect()
    }

    async fn claim_once(&self, key: &DedupKey, terms: &CallTerms) -> Result<ClaimReply, Error> {
        let claimed = self.call(Kind::claim(terms), key, terms, RowReply::claimed).await?;
        // Boxed, because most calls read nothing.
        let read = || {
            Box::pin(async {
                let read = self.0.read_key(key_hash(key), terms.fetch()).await;
                read.map_err(|error| store_error(READING_RESPONSE, error))
            })
        };
        add_response(terms, claimed, read).await
    }
}

sql_adapter!(PostgresAdapter, PostgresStore, Postgres, {
    fn default_max_running(&self) -> Option<usize> {
        let connections = self.0.pool().options().get_max_connections();
        usize::try_from(connections.saturating_sub(SPARE_CONNECTIONS).max(1)).ok()
    }
});

#[cfg(test)]
mod tests {
    use super::super::super::sql::statement::check_golden;
    use super::super::schema::{TableName, migration};
    use super::super::statements::{Statements, TAG, Wait, tagged};
    use super::*;

    #[test]
    fn golden() {
        let name = TableName::default();
        let options = PostgresOptions::new();
        let [statements, passing, _] = Statements::by_wait(&name, &options);
        let durable = Statements::new(&name, &options.durable_claims(true), Wait::Briefly);
        let (find, migration) = (tagged(&name.find()), migration(create_sql(&name), None));
        let named = TableName { schema: Some("webhooks".to_owned()), ..name };
        let (create, function) = (create_sql(&named), record_function(&TableName::default()));
        let mut all = statements.all();
        assert!(all.iter().all(|(_, text)| text.starts_with(TAG)), "the server's log names each");
        let differs = |(one, other): &(_, (_, &str))| {
            let (_, text): (&str, &str) = *one;
            text != other.1
        };
        let passing = all.iter().copied().zip(passing.all()).filter(differs);
        let passing: Vec<_> = passing.map(|(_, passing)| passing).collect();
        all.extend(passing);
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
