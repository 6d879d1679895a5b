//! [`PostgresAdapter`]: its constructors, and keys that a program records in its own transaction,
//! without a layer.

use std::sync::Arc;
use std::time::Duration;
use std::{fmt, slice};

use sqlx::postgres::{PgConnection, PgPool, PgPoolOptions};
use sqlx::{ConnectOptions, Connection};
use tokio::time::timeout;

use super::super::contract::{CallTerms, ClaimReply, Token, TransactionAdapter};
use super::super::sql::{Call, Kind, RowCall, SqlAdapter, claimed, ready, usable};
use super::errors::{is_locked, store_error, timed_out};
use super::options::PostgresOptions;
use super::params::key_hash;
use super::schema::create_sql;
use super::statements::{TableName, Wait};
use super::store::{Link, PostgresSession, PostgresStore};
use crate::error::StoreError;
use crate::key::DedupKey;

const CONNECTIONS: u32 = 10;
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(5);

/// Keeps keys in a table of a Postgres database, for all processes of a service.
///
/// ```no_run
/// # async fn example() -> Result<(), tower_dedup::StoreError> {
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
    /// [TLS](#tls), with the feature `tls-rustls`, `tls-rustls-aws-lc-rs` or `tls-native-tls`; it
    /// needs and installs no cryptographic provider of the process. The URL names one host: see
    /// [Failover](#failover).
    ///
    /// # Errors
    ///
    /// [`StoreErrorKind::Config`](crate::StoreErrorKind::Config), with a [`ConfigError`] as its
    /// source, for a URL that cannot be read, and for a URL that names several hosts or has
    /// `target_session_attrs` or `load_balance_hosts`.
    /// [`StoreErrorKind::Unavailable`](crate::StoreErrorKind::Unavailable) if the database cannot
    /// be reached within 5 s.
    ///
    /// [`ConfigError`]: crate::ConfigError
    pub async fn connect(url: &str) -> Result<Self, StoreError> {
        Self::connect_with(url, PostgresOptions::new()).await
    }

    /// Connects with these options. Names in the URL replace those of the options.
    ///
    /// # Errors
    ///
    /// Those of [`connect`](Self::connect), and
    /// [`StoreErrorKind::Config`](crate::StoreErrorKind::Config) for an invalid option.
    pub async fn connect_with(url: &str, options: PostgresOptions) -> Result<Self, StoreError> {
        let (options, connect) = options.read_url(url)?;
        options.check()?;
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

    /// Returns an adapter over your own pool, on the database that your service already uses.
    ///
    /// The adapter has [connections](PostgresOptions::connections) of its own, with the pool's
    /// hooks and connect options, which are closed with the pool. So only transactions of handlers
    /// take a connection of your pool.
    /// [`close`](crate::adapter::maintenance::MaintenanceAdapter::close) leaves the pool open. For
    /// the size of the pool, see [Connections](crate::guide::production#connections).
    #[must_use]
    pub fn new(pool: PgPool) -> Self {
        Self::with_options(pool, PostgresOptions::new())
    }

    /// Returns an adapter over your own pool, with these options. An invalid option is the error
    /// ([`StoreErrorKind::Config`](crate::StoreErrorKind::Config)) of every call.
    #[must_use]
    pub fn with_options(pool: PgPool, options: PostgresOptions) -> Self {
        Self(Arc::new(PostgresStore::new(pool, options, true)))
    }

    /// Returns the statements that [`migrate`](Self::migrate) runs, for your own migrations.
    #[must_use]
    pub fn schema_sql(&self) -> Vec<String> {
        create_sql(&TableName::of(&self.0.options))
    }

    #[cfg(feature = "testing")]
    pub(crate) fn statements(&self) -> Vec<(&'static str, Arc<str>)> {
        self.0.statements(Wait::Briefly).by_name()
    }

    /// Makes the schema, if it does not exist. Many processes may call it at once.
    ///
    /// # Errors
    ///
    /// [`StoreErrorKind::Refused`](crate::StoreErrorKind::Refused) if the schema may not be made
    /// here, [`StoreErrorKind::Unavailable`](crate::StoreErrorKind::Unavailable) if the database
    /// cannot be reached or written; the next call tries again.
    pub async fn migrate(&self) -> Result<(), StoreError> {
        usable(self)?.migrate().await
    }

    /// Claims a key in your own transaction: the key is complete when, and only if, the transaction
    /// commits.
    ///
    #[doc = include_str!("../../docs/stores/postgres_record_in.md")]
    pub async fn record_in(
        &self,
        connection: &mut PgConnection,
        key: &DedupKey,
        retention: Duration,
    ) -> Result<ClaimReply, StoreError> {
        let store = Arc::clone(ready(self).await?);
        let terms = CallTerms::on_claim(Token::random(), retention);
        let call = Call::new(Kind::ClaimComplete, key, &terms, key_hash(key));
        // This caller waits.
        let _caller = Arc::clone(&call);
        let mut row = RowCall::new(&call);
        let claim = async {
            // A wait that is too long must not abort the user's transaction.
            let mut savepoint = connection.begin().await?;
            let timeout = "SELECT pg_catalog.current_setting('lock_timeout')";
            let timeout: String = sqlx::query_scalar(timeout).fetch_one(&mut *savepoint).await?;
            let mut session =
                PostgresSession::new(store, Link::Within(&mut savepoint), Wait::Briefly);
            match session.run(Kind::ClaimComplete, slice::from_mut(&mut row), false).await {
                // Without a reply, the key is in flight.
                Err(error) if is_locked(&error) => return savepoint.rollback().await,
                ran => ran?,
            }
            // The claim has set its own.
            let set_back = sqlx::query("SELECT pg_catalog.set_config('lock_timeout', $1, true)");
            set_back.bind(timeout).execute(&mut *savepoint).await?;
            savepoint.commit().await
        };
        let claim = claim.await;
        claim.map_err(|error| store_error("claiming a key in a transaction", error))?;
        claimed(row.reply)
    }
}

impl SqlAdapter for PostgresAdapter {
    type Store = PostgresStore;

    fn of(store: Arc<PostgresStore>) -> Self {
        Self(store)
    }

    fn store(&self) -> &Arc<PostgresStore> {
        &self.0
    }
}

impl TransactionAdapter for PostgresAdapter {}

impl fmt::Debug for PostgresAdapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut adapter = f.debug_struct("PostgresAdapter");
        adapter.field("options", &self.0.options).finish_non_exhaustive()
    }
}
