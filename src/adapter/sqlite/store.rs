//! [`SqliteStore`]: the connections, the table, and the right to write.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use sqlx::pool::PoolConnection;
use sqlx::sqlite::{Sqlite, SqliteConnection, SqliteExecutor, SqlitePool};
use sqlx::{ConnectOptions, Connection, Row as _};
use tokio::sync::{Mutex, OwnedMutexGuard, Semaphore, oneshot};

use super::super::sql::call::Call;
use super::super::sql::options::check_open;
use super::super::sql::purge::PurgeTask;
use super::super::sql::queue::{BatchItem, Batcher};
use super::super::sql::row::Row;
use super::super::sql::statement::query;
use super::super::stored::Fetch;
use super::errors::{is_sql_error, store_error};
use super::options::SqliteOptions;
use super::session::Session;
use super::statements::{Statements, VERSION};
use super::write_lock::{FileLocks, locks_of};
use crate::error::{Error, ErrorKind};
use crate::key::DedupKey;
use crate::observe;

const PREPARING: &str = "preparing the SQLite schema";
/// How many of the reading connections the lookups of the queue use.
const LOOKUP_LANES: usize = 2;
/// How many callers read stored responses at the same time.
pub(super) const RESPONSE_READS: u32 = 2;

/// The state that all handles of an adapter share.
pub(super) struct SqliteStore {
    pub(super) readers: SqlitePool,
    pub(super) writer: SqlitePool,
    /// Whether the pool is the user's, whose settings are only checked.
    pub(super) user_pool: bool,
    pub(super) options: SqliteOptions,
    /// Serves writers in the order of arrival. SQLite's own lock does not.
    locks: Arc<FileLocks>,
    pub(super) statements: Statements,
    pub(super) lookups: Batcher<Lookup>,
    pub(super) calls: Batcher<Call>,
    pub(super) purge_task: PurgeTask,
    /// Leaves connections for lookups while other callers read large responses.
    pub(super) response_reads: Semaphore,
    /// Open from the first use on. When the last connection to a file closes, SQLite removes `-wal` and
    /// `-shm`, and the pools close idle connections.
    held: Mutex<Option<SqliteConnection>>,
    has_schema: AtomicBool,
    closed: AtomicBool,
}

/// The right to write to the file.
pub(super) type WriteGuard = OwnedMutexGuard<()>;

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
            statements: Statements::new(&options.table),
            lookups: Batcher::new(options.batching.lanes(LOOKUP_LANES)),
            calls: Batcher::new(options.batching.lanes(1)),
            purge_task: PurgeTask::new(options.purging),
            response_reads: Semaphore::new(RESPONSE_READS as usize),
            held: Mutex::default(),
            has_schema: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            readers,
            writer,
            user_pool,
            options,
        }
    }

    pub(super) fn pool(&self) -> &SqlitePool {
        &self.writer
    }

    /// The pool was closed. Nothing follows: the file is held until the last handle is dropped.
    pub(super) fn on_close(&self) {}

    /// Runs a call once the table exists; and once more if the table is gone, which is then made again.
    pub(super) async fn with_table<T, F>(self: &Arc<Self>, call: impl Fn() -> F) -> Result<T, Error>
    where
        F: Future<Output = Result<T, Error>>,
    {
        self.ready().await?;
        match call().await {
            // Boxed, because it is rare.
            Err(error) if Box::pin(self.had_no_table(&error)).await => {
                self.ready().await?;
                Box::pin(call()).await
            }
            reply => reply,
        }
    }

    async fn ready(self: &Arc<Self>) -> Result<(), Error> {
        check_open(self.closed.load(Ordering::Acquire), self.options.check())?;
        self.ensure_purge();
        if self.has_schema.load(Ordering::Acquire) {
            return Ok(());
        }
        Box::pin(self.make_schema()).await
    }

    pub(super) async fn migrate(self: &Arc<Self>) -> Result<(), Error> {
        check_open(self.closed.load(Ordering::Acquire), self.options.check())?;
        self.make_schema().await
    }

    async fn make_schema(self: &Arc<Self>) -> Result<(), Error> {
        let fault = |error| store_error(PREPARING, error);
        if !self.finds_schema().await.map_err(fault)? {
            self.write_in_task(|store| async move { store.create().await }).await?;
        }
        if self.user_pool {
            self.check_settings().await.map_err(fault)?;
        }
        self.hold_file().await?;
        self.has_schema.store(true, Ordering::Release);
        Ok(())
    }

    async fn hold_file(&self) -> Result<(), Error> {
        let fault = |error| store_error("holding the SQLite file open", error);
        let mut held = self.held.lock().await;
        if held.is_none() && !self.closed.load(Ordering::Acquire) {
            let mut connection = self.readers.connect_options().connect().await.map_err(fault)?;
            // A connection uses `-wal` and `-shm` from its first read on.
            self.has_tables(&mut connection).await.map_err(fault)?;
            *held = Some(connection);
        }
        Ok(())
    }

    /// If it is dropped or fails, the transaction rolls back and the next call tries again.
    async fn create(&self) -> Result<(), Error> {
        let fault = |error| store_error(PREPARING, error);
        // IMMEDIATE: two processes that both find no table take turns.
        let mut connection = acquire(&self.writer).await.map_err(fault)?;
        let mut tx = connection.begin_with("BEGIN IMMEDIATE").await.map_err(fault)?;
        self.create_in(&mut tx).await?;
        tx.commit().await.map_err(fault)
    }

    async fn create_in(&self, connection: &mut SqliteConnection) -> Result<(), Error> {
        for statement in self.statements.create() {
            let created = query(statement).execute(&mut *connection).await;
            created.map_err(|error| store_error(PREPARING, error))?;
        }
        Ok(())
    }

    /// Returns `true` if a call failed because the table was gone: dropped, or in a file that was
    /// restored without it. SQLite's code is that of any error in SQL, so the table is looked for.
    async fn had_no_table(&self, error: &Error) -> bool {
        if !is_sql_error(error) {
            return false;
        }
        let Ok(exists) = self.finds_schema().await else { return false };
        // If the table exists, another call that missed it has made it since.
        if !exists {
            self.forget_schema();
        }
        true
    }

    /// Makes the schema in a transaction of the user's, if it does not exist. Whether it stays is for
    /// that transaction to decide.
    pub(super) async fn ready_within(
        self: &Arc<Self>,
        connection: &mut SqliteConnection,
    ) -> Result<(), Error> {
        check_open(self.closed.load(Ordering::Acquire), self.options.check())?;
        self.ensure_purge();
        if self.has_schema.load(Ordering::Acquire) {
            return Ok(());
        }
        self.create_in(connection).await
    }

    /// Returns `true` if the table is gone, as a transaction of the user's sees it.
    pub(super) async fn lacks_table(&self, connection: &mut SqliteConnection) -> bool {
        let is_gone = matches!(self.has_tables(connection).await, Ok(false));
        if is_gone {
            self.forget_schema();
        }
        is_gone
    }

    async fn has_tables(&self, on: impl SqliteExecutor<'_>) -> Result<bool, sqlx::Error> {
        // Both tables and the index.
        Ok(query(&self.statements.tables).fetch_one(on).await?.try_get::<i64, _>(0)? == 3)
    }

    fn forget_schema(&self) {
        if self.has_schema.swap(false, Ordering::AcqRel) {
            observe::sqlite_table_is_gone(self.options.table.as_str());
        }
    }

    async fn finds_schema(&self) -> Result<bool, sqlx::Error> {
        if !self.has_tables(&self.readers).await? {
            return Ok(false);
        }
        let version = query(&self.statements.version).fetch_one(&self.readers).await?;
        Ok(version.try_get::<i64, _>(0)? >= VERSION)
    }

    async fn check_settings(&self) -> Result<(), sqlx::Error> {
        let synchronous: i64 =
            sqlx::query_scalar("PRAGMA synchronous").fetch_one(&self.writer).await?;
        let journal: String =
            sqlx::query_scalar("PRAGMA journal_mode").fetch_one(&self.writer).await?;
        if synchronous < 2 {
            observe::sqlite_is_not_durable(synchronous);
        }
        if !journal.eq_ignore_ascii_case("wal") {
            observe::sqlite_is_not_in_wal_mode(&journal);
        }
        Ok(())
    }

    /// Waits for the write lock, `write_lock_timeout` at most, and then returns an error of this kind. A caller that is
    /// dropped while it waits has changed nothing.
    pub(super) async fn write_lock(&self, kind: ErrorKind) -> Result<WriteGuard, Error> {
        let lock = Arc::clone(&self.locks.writer).lock_owned();
        let lock = tokio::time::timeout(self.options.write_lock_timeout, lock).await;
        lock.map_err(|_| Error::new(kind, "waiting for the write lock of the SQLite file"))
    }

    /// Runs `write` under the write lock, in a task of its own: a caller may leave its future unpolled,
    /// and every other caller would wait for the lock in that future.
    ///
    /// A caller that is dropped before it gets the lock has changed nothing, and changes nothing: a release by its
    /// token that follows needs the lock after it.
    pub(super) async fn write_in_task<T, F>(
        self: &Arc<Self>,
        write: impl FnOnce(Arc<Self>) -> F + Send + 'static,
    ) -> Result<T, Error>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, Error>> + Send,
    {
        let (mut reply, received) = oneshot::channel();
        let store = Arc::clone(self);
        tokio::spawn(async move {
            let guard = tokio::select! {
                biased;
                () = reply.closed() => return,
                guard = store.write_lock(ErrorKind::Refused) => guard,
            };
            let written = match guard {
                Ok(_guard) => write(store).await,
                Err(error) => Err(error),
            };
            // The caller may be gone.
            let _ = reply.send(written);
        });
        let ended = |_| Err(Error::new(ErrorKind::Unavailable, "writing: the runtime is ending"));
        received.await.unwrap_or_else(ended)
    }

    /// Reads rows on the connections that only read.
    pub(super) async fn read(
        &self,
        keys: &[&DedupKey],
        fetch: Fetch,
    ) -> Result<Vec<Option<Row>>, sqlx::Error> {
        let connection = &mut *acquire(&self.readers).await?;
        Session { connection, statements: &self.statements }.read(keys, fetch).await
    }

    pub(super) async fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.purge_task.stop();
        if !self.user_pool {
            self.readers.close().await;
            self.writer.close().await;
        }
        if let Some(held) = self.held.lock().await.take() {
            // The file is closed in any case.
            let _ = held.close().await;
        }
    }
}

/// Returns a connection of a pool. One that sqlx believes to be in a transaction is closed: a transaction of the user's
/// has ended without sqlx's knowledge, and the next one may be open still. Nobody would commit what is written in it, and
/// it does not see what others have written since.
pub(super) async fn acquire(pool: &SqlitePool) -> Result<PoolConnection<Sqlite>, sqlx::Error> {
    loop {
        let connection = pool.acquire().await?;
        if !connection.is_in_transaction() {
            return Ok(connection);
        }
        // The connection is closed in any case.
        let _ = connection.close().await;
    }
}
