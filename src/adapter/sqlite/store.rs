//! [`SqliteStore`]: the connections, the table, and the right to write.

use std::future::Future;
use std::sync::Arc;

use sqlx::sqlite::{Sqlite, SqliteConnection, SqlitePool};
use sqlx::{Connection, Row as _};
use tokio::sync::Semaphore;

use super::super::contract::{CallTerms, ClaimReply, Completion, Fetch};
use super::super::sql::statement::query;
use super::super::sql::{
    BatchExecutor, BatchItem, Batcher, Bounds, Common, READING_RESPONSE, Row, SqlStore, in_task,
    without_response,
};
use super::super::transaction::acquire;
use super::completion::completion;
use super::errors::store_error;
use super::options::SqliteOptions;
use super::session::SqliteSession;
use super::statements::{SqliteStatements, VERSION};
use super::write_lock::{FileLocks, locked, locks_of};
use crate::error::{StoreError, StoreErrorKind};
use crate::key::DedupKey;
use crate::observe;

const PREPARING: &str = "preparing the SQLite schema";
/// How many of the reading connections the lookups of the queue use.
const LOOKUP_WORKERS: usize = 2;
/// How many callers read stored responses at the same time.
pub(super) const RESPONSE_READS: u32 = 2;

/// The state that all handles of an adapter share.
pub(crate) struct SqliteStore {
    pub(super) readers: SqlitePool,
    pub(super) writer: SqlitePool,
    /// Whether the pool is the user's, whose settings are only checked.
    pub(super) user_pool: bool,
    pub(super) options: SqliteOptions,
    /// Serves writers in the order of arrival. SQLite's own lock does not.
    locks: Arc<FileLocks>,
    pub(super) statements: Arc<SqliteStatements>,
    pub(super) lookups: Batcher<Lookup>,
    common: Common,
    /// Leaves connections for lookups while other callers read large responses.
    pub(super) response_reads: Semaphore,
}

/// One caller's question for a row.
pub(super) type Lookup = (DedupKey, Fetch);

impl BatchItem for Lookup {
    type Reply = Option<Row>;

    fn can_join(&self, (_, fetch): &Self) -> bool {
        self.1 == *fetch
    }

    fn is_bounded(&self) -> bool {
        true
    }
}

impl SqliteStore {
    pub(super) fn new(
        readers: SqlitePool,
        writer: SqlitePool,
        options: SqliteOptions,
        user_pool: bool,
    ) -> Self {
        Self {
            locks: locks_of(&writer.connect_options()),
            statements: Arc::new(SqliteStatements::new(&options.sql.table)),
            lookups: Batcher::new(Bounds { workers: LOOKUP_WORKERS, ..options.sql.bounds }),
            // SQLite has one writer.
            common: Common::new(
                &options.sql,
                Bounds { workers: 1, ..options.sql.bounds },
                options.check(),
            ),
            response_reads: Semaphore::new(RESPONSE_READS as usize),
            readers,
            writer,
            user_pool,
            options,
        }
    }

    pub(super) async fn finds_schema(&self) -> Result<bool, sqlx::Error> {
        let tables = query(&self.statements.tables).fetch_one(&self.readers).await?;
        // Both tables and the index.
        if tables.try_get::<i64, _>(0)? != 3 {
            return Ok(false);
        }
        let version = query(&self.statements.version).fetch_one(&self.readers).await?;
        Ok(version.try_get::<i64, _>(0)? >= VERSION)
    }

    async fn check_settings(&self) -> Result<(), sqlx::Error> {
        let settings =
            "SELECT synchronous, journal_mode FROM pragma_synchronous, pragma_journal_mode";
        let (synchronous, journal): (i64, String) =
            sqlx::query_as(settings).fetch_one(&self.writer).await?;
        if synchronous < 2 {
            observe::records::sqlite_is_not_durable(synchronous);
        }
        if !journal.eq_ignore_ascii_case("wal") {
            observe::records::sqlite_is_not_in_wal_mode(&journal);
        }
        Ok(())
    }

    /// Runs `write` under the write lock. A release that follows a dropped caller needs the lock
    /// after it.
    pub(super) async fn write_in_task<T, F>(
        self: &Arc<Self>,
        write: impl FnOnce(SqliteSession) -> F + Send + 'static,
    ) -> Result<T, StoreError>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, StoreError>> + Send,
    {
        let store = Arc::clone(self);
        let session = async move { store.session(false).await };
        let ended =
            || StoreError::new(StoreErrorKind::Unavailable, "writing: the runtime is ending");
        let write = move |mut session: SqliteSession| async move {
            // Held here: the future of a closure keeps no more of the session than it names.
            let _lock = session.lock.take();
            write(session).await
        };
        in_task(session, write).await.unwrap_or_else(|| Err(ended()))
    }

    /// Closes the connections; a pool of the user's stays open.
    pub(super) async fn close(&self) {
        self.common.stop();
        if !self.user_pool {
            self.readers.close().await;
            self.writer.close().await;
        }
    }

    /// Reads rows on the connections that only read.
    pub(super) async fn read(
        &self,
        keys: &[&DedupKey],
        fetch: Fetch,
    ) -> Result<Vec<Option<Row>>, sqlx::Error> {
        let connection = acquire(&self.readers).await?;
        SqliteSession::new(connection, &self.statements, None).read(keys, fetch).await
    }
}

impl BatchExecutor<Lookup> for SqliteStore {
    type SendGuard = ();

    async fn send_guard(self: &Arc<Self>) -> Result<(), StoreError> {
        Ok(())
    }

    async fn execute(
        self: &Arc<Self>,
        (): (),
        batch: Vec<Lookup>,
    ) -> Vec<Result<Option<Row>, StoreError>> {
        let fetch = batch.first().map_or(Fetch::Nothing, |(_, fetch)| *fetch);
        let keys: Vec<&DedupKey> = batch.iter().map(|(key, _)| key).collect();
        match self.read(&keys, fetch).await {
            Ok(rows) => rows.into_iter().map(Ok).collect(),
            Err(error) => vec![Err(store_error("looking up keys", error)); batch.len()],
        }
    }
}

impl SqlStore for SqliteStore {
    type Database = Sqlite;
    type Session = SqliteSession;

    fn common(&self) -> &Common {
        &self.common
    }

    fn pool(&self) -> &SqlitePool {
        &self.writer
    }

    async fn prepare(self: &Arc<Self>) -> Result<(), StoreError> {
        let fault = |error| store_error(PREPARING, error);
        if !self.finds_schema().await.map_err(fault)? {
            // If it is dropped or fails, the transaction rolls back and the next call tries again.
            let create = move |mut session: SqliteSession| async move {
                // IMMEDIATE: two processes that both find no table take turns.
                let tx = session.connection.begin_with("BEGIN IMMEDIATE").await;
                let mut tx = tx.map_err(fault)?;
                create(&session.statements, &mut tx).await?;
                tx.commit().await.map_err(fault)
            };
            self.write_in_task(create).await?;
        }
        if self.user_pool {
            self.check_settings().await.map_err(fault)?;
        }
        self.common.set_has_table();
        Ok(())
    }

    /// The order of the keys is enough.
    fn hash(_: &DedupKey) -> u128 {
        0
    }

    /// A batch has the lock before it takes its calls: a write is executed only for a caller that
    /// still waits, and a release that follows needs the lock too. So it is a fence. The same with
    /// a second batch beside a late one.
    ///
    /// The connection comes first, as for the transaction of a handler: in two orders, a batch and
    /// a handler would each wait for what the other has.
    async fn session(self: &Arc<Self>, _: bool) -> Result<SqliteSession, StoreError> {
        let connection = acquire(&self.writer).await;
        let connection = connection.map_err(|error| store_error("opening a connection", error))?;
        // After an error nothing was sent to the file.
        let (bound, refused) = (self.options.write_lock_timeout, StoreErrorKind::Refused);
        let lock = locked(&self.locks.writer, bound, refused).await?;
        Ok(SqliteSession::new(connection, &self.statements, Some(lock)))
    }

    /// A duplicate is not written, and waits for no writer.
    async fn look_up(
        self: &Arc<Self>,
        key: &DedupKey,
        terms: &CallTerms,
    ) -> Result<Option<ClaimReply>, StoreError> {
        let lookup = (key.clone(), without_response(terms.fetch()));
        let row = self.lookups.submit(self, lookup).await?;
        Ok(row.map(|row| row.claimed(terms)).transpose()?.flatten())
    }

    async fn read_response(self: &Arc<Self>, key: &DedupKey) -> Result<Option<Row>, StoreError> {
        let _permit = self.response_reads.acquire().await;
        let read = self.read(&[key], Fetch::DigestAndResponse).await;
        let rows = read.map_err(|error| store_error(READING_RESPONSE, error))?;
        Ok(rows.into_iter().flatten().next())
    }

    fn completion(&self, keys: &[(&DedupKey, &CallTerms)]) -> Completion {
        completion(&self.statements, self.options.write_lock_timeout, keys)
    }
}

/// Makes the schema.
pub(super) async fn create(
    statements: &SqliteStatements,
    connection: &mut SqliteConnection,
) -> Result<(), StoreError> {
    for statement in statements.create() {
        let created = query(statement).execute(&mut *connection).await;
        created.map_err(|error| store_error(PREPARING, error))?;
    }
    Ok(())
}
