//! [`SqliteAdapter`]: its constructors, and keys that a program records in its own transaction,
//! without a layer.

use std::sync::Arc;
use std::time::Duration;
use std::{fmt, slice};

use backon::{ExponentialBuilder, Retryable};
use sqlx::sqlite::{
    SqliteConnection, SqliteJournalMode, SqlitePool, SqlitePoolOptions, SqliteSynchronous,
};

use super::super::contract::{CallTerms, ClaimReply, Token, TransactionAdapter};
use super::super::sql::{Call, Kind, RowCall, SqlAdapter, SqlStore as _, claimed, usable};
use super::errors::{is_busy, store_error};
use super::options::SqliteOptions;
use super::session::SqliteSession;
use super::store::{SqliteStore, create};
use crate::error::{StoreError, StoreErrorKind};
use crate::key::DedupKey;

/// How long a statement waits for another process's lock. Less than the layer's default
/// `store_timeout`, so that a held file becomes an error and frees the connection.
const BUSY_TIMEOUT: Duration = Duration::from_secs(1);
const READERS: u32 = 4;
/// The WAL is checkpointed after this many pages (16 MiB). Writers stand still during a checkpoint.
/// With SQLite's default of 1,000 pages, that is a quarter of the time under load.
const CHECKPOINT: &str = "4000";
/// The first pause before opening the file is tried again. Each pause is twice as long. Processes
/// that open a new file at once all switch it to WAL mode, and the busy timeout does not cover that
/// switch.
const OPEN_DELAY: Duration = Duration::from_millis(50);
const OPEN_RETRIES: usize = 6;

/// Keeps keys in a SQLite file, for the processes of one machine.
///
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// # let dir = tempfile::tempdir().unwrap();
/// # let url = format!("sqlite://{}", dir.path().join("dedup.db").display());
/// use tower_dedup::adapter::SqliteAdapter;
/// use tower_dedup::{DedupLayer, provider};
///
/// let store = SqliteAdapter::connect(&url).await?; // "sqlite://dedup.db"
/// let dedup = DedupLayer::new(provider::STRIPE, store);
/// # let _ = dedup;
/// # Ok::<(), tower_dedup::StoreError>(())
/// # }).unwrap();
/// ```
///
/// A clone is another handle to the same connections and the same state.
///
#[doc = include_str!("../../docs/stores/sqlite.md")]
#[derive(Clone)]
pub struct SqliteAdapter(pub(super) Arc<SqliteStore>);

impl SqliteAdapter {
    /// Opens or creates the file that a `sqlite://` URL names, in WAL mode at
    /// `synchronous = FULL`, with one connection for writing and four for reading.
    ///
    /// The table is made by the first call that needs it, or by [`migrate`](Self::migrate). The
    /// URL's parameter `dedup_table` names the table: `sqlite://dedup.db?dedup_table=seen`.
    ///
    /// # Errors
    ///
    /// [`StoreErrorKind::Config`] for a URL that cannot be read or names no file (an in-memory
    /// database belongs to one connection; use [`MemoryAdapter`](super::super::MemoryAdapter)
    /// instead), [`StoreErrorKind::Unavailable`] if the file cannot be opened.
    pub async fn connect(url: &str) -> Result<Self, StoreError> {
        Self::connect_with(url, SqliteOptions::new()).await
    }

    /// Connects with these options. A name in the URL replaces that of the options.
    ///
    /// # Errors
    ///
    /// Those of [`connect`](Self::connect), and [`StoreErrorKind::Config`] for an invalid option.
    pub async fn connect_with(url: &str, options: SqliteOptions) -> Result<Self, StoreError> {
        let (options, connect) = options.read_url(url)?;
        options.check()?;
        let connect = connect.busy_timeout(BUSY_TIMEOUT);
        let writing = connect
            .clone()
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Full)
            .pragma("wal_autocheckpoint", CHECKPOINT);
        let pool = || SqlitePoolOptions::new().test_before_acquire(false);
        let retries = ExponentialBuilder::new()
            .with_min_delay(OPEN_DELAY)
            .with_max_times(OPEN_RETRIES)
            .with_jitter();
        // It stays open. When the last connection to a file closes, SQLite removes `-wal` and
        // `-shm`.
        let writer = || pool().max_connections(1).idle_timeout(None).max_lifetime(None);
        let writer = (|| writer().connect_with(writing.clone()))
            .retry(retries)
            .when(is_busy)
            .sleep(tokio::time::sleep)
            .await
            .map_err(|error| {
                StoreError::new(StoreErrorKind::Unavailable, "opening the SQLite file")
                    .with_source(error)
            })?;
        let readers = pool().max_connections(READERS).connect_lazy_with(connect);
        Ok(Self(Arc::new(SqliteStore::new(readers, writer, options, false))))
    }

    /// Returns an adapter over your own pool, on the file that your service already uses.
    ///
    /// The pool's settings stay as they are: see [Your own pool](#your-own-pool). Renewals need a
    /// connection, too. [`close`](crate::adapter::maintenance::MaintenanceAdapter::close) leaves
    /// the pool open.
    #[must_use]
    pub fn new(pool: SqlitePool) -> Self {
        Self::with_options(pool, SqliteOptions::new())
    }

    /// Returns an adapter over your own pool, with these options. An invalid option is the error
    /// ([`StoreErrorKind::Config`]) of every call.
    #[must_use]
    pub fn with_options(pool: SqlitePool, options: SqliteOptions) -> Self {
        Self(Arc::new(SqliteStore::new(pool.clone(), pool, options, true)))
    }

    /// Returns `true` if the file has the table of this version. Makes nothing.
    pub(crate) async fn has_table(&self) -> Result<bool, StoreError> {
        let found = usable(self)?.finds_schema().await;
        found.map_err(|error| store_error("preparing the SQLite schema", error))
    }

    /// Returns the statements that [`migrate`](Self::migrate) runs, for your own migrations.
    #[must_use]
    pub fn schema_sql(&self) -> Vec<String> {
        self.0.statements.create().into_iter().map(|sql| sql.to_string()).collect()
    }

    #[cfg(feature = "testing")]
    pub(crate) fn statements(&self) -> Vec<(&'static str, Arc<str>)> {
        self.0.statements.by_name()
    }

    /// Makes the schema, if it does not exist. Many processes may call it at once.
    ///
    /// # Errors
    ///
    /// [`StoreErrorKind::Refused`] if the schema may not be made here,
    /// [`StoreErrorKind::Unavailable`] if the file cannot be reached or written; the next call
    /// tries again.
    pub async fn migrate(&self) -> Result<(), StoreError> {
        usable(self)?.prepare().await
    }

    /// Claims a key in your own transaction: the key is complete when, and only if, the transaction
    /// commits.
    ///
    #[doc = include_str!("../../docs/stores/sqlite_record_in.md")]
    pub async fn record_in(
        &self,
        connection: &mut SqliteConnection,
        key: &DedupKey,
        retention: Duration,
    ) -> Result<ClaimReply, StoreError> {
        let store = usable(self)?;
        if !store.common().has_table() {
            // On this connection: another one would wait for its transaction, which holds the file.
            // Whether the schema stays is for that transaction to decide.
            create(&store.statements, connection).await?;
        }
        let terms = CallTerms::on_claim(Token::random(), retention);
        let call = Call::new(Kind::ClaimComplete, key, &terms, 0);
        let mut row = RowCall::new(&call);
        let mut session = SqliteSession::new(connection, &store.statements, None);
        let written = session.write(Kind::ClaimComplete, slice::from_mut(&mut row)).await;
        let fault = |error| store_error("claiming a key in a transaction", error);
        written.map_err(fault)?;
        claimed(row.reply)
    }
}

impl SqlAdapter for SqliteAdapter {
    type Store = SqliteStore;

    fn of(store: Arc<SqliteStore>) -> Self {
        Self(store)
    }

    fn store(&self) -> &Arc<SqliteStore> {
        &self.0
    }
}

impl TransactionAdapter for SqliteAdapter {}

impl fmt::Debug for SqliteAdapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut adapter = f.debug_struct("SqliteAdapter");
        adapter.field("options", &self.0.options).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::contract::{DedupAdapter, Fetch};
    use super::super::super::maintenance::PURGE_GRACE;
    use super::super::store::RESPONSE_READS;
    use super::super::write_lock::locks_of;
    use super::*;

    #[tokio::test]
    async fn new_key_is_claimed_while_duplicates_wait_for_their_responses() {
        let dir = tempfile::tempdir().unwrap();
        let url = format!("sqlite://{}", dir.path().join("dedup.db").display());
        let adapter = SqliteAdapter::connect(&url).await.unwrap();
        let key = |id: usize| DedupKey::new("n", &id.to_string()).unwrap();
        let fetch = Fetch::DigestAndResponse;
        let terms = || CallTerms::on_claim(Token::random(), PURGE_GRACE).with_fetch(fetch);
        for id in 0..80 {
            adapter.claim(&key(id), &terms()).await.unwrap();
        }
        let reads = adapter.0.response_reads.acquire_many(RESPONSE_READS).await.unwrap();
        let claim = |id: usize| {
            let (adapter, key, terms) = (adapter.clone(), key(id), terms());
            tokio::spawn(async move { adapter.claim(&key, &terms).await.unwrap() })
        };
        let duplicates: Vec<_> = (0..80).map(claim).collect();
        assert_eq!(claim(80).await.unwrap(), ClaimReply::first(1, false));
        assert!(duplicates.iter().all(|duplicate| !duplicate.is_finished()));
        drop(reads);
        for duplicate in duplicates {
            assert!(matches!(duplicate.await.unwrap(), ClaimReply::Duplicate(_)));
        }
    }

    /// Otherwise a purge writes beside a handler's transaction, where SQLite serves in no order.
    #[tokio::test]
    async fn write_holds_the_lock_to_its_end_whatever_it_takes_of_its_session() {
        let dir = tempfile::tempdir().unwrap();
        let url = format!("sqlite://{}", dir.path().join("keys.db").display());
        let adapter = SqliteAdapter::connect(&url).await.unwrap();
        let locks = locks_of(&adapter.0.pool().connect_options());
        let write = move |session: SqliteSession| async move {
            let _connection = session.connection;
            Ok(locks.writer.try_lock().is_err())
        };
        assert!(adapter.0.write_in_task(write).await.unwrap());
    }
}
