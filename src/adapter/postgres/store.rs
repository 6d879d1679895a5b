//! [`PostgresStore`]: how a statement is run, and where the table is.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use backon::{BackoffBuilder, ExponentialBuilder};
use sqlx::postgres::{PgConnection, PgPool, PgRow};
use sqlx::{AssertSqlSafe, Row as _};

use super::super::sql::call::{Call, Kind};
use super::super::sql::options::check_open;
use super::super::sql::purge::PurgeTask;
use super::super::sql::queue::Batcher;
use super::super::sql::statement::query;
use super::connections::{BoundedConnection, Connections, Places, Source};
use super::errors::{
    is_broken, is_conflict, is_gone, is_read_only, is_timed_out, is_without_table, store_error,
};
use super::options::{PostgresOptions, may_be_plain_text};
use super::params::Bind;
use super::schema::{TableName, VERSION, create_sql, migration};
use super::statements::{ByWait, Replanner, Statements, Wait, record_function, tagged};
use crate::error::{Error, ErrorKind};
use crate::observe;

/// How long a migration waits on the server for another one.
const MIGRATION_WAIT: Duration = Duration::from_secs(5);
/// For how long a migration may run.
const MAINTENANCE_TIMEOUT: Duration = Duration::from_secs(600);

/// For how long batches pass over rows that open transactions hold, after one has waited for such a row.
const PASS_OVER_FOR: Duration = Duration::from_secs(10);

/// How often a statement is repeated that conflicted with another, or whose connection was gone.
const REPEATS: usize = 6;

/// The state that all handles of an adapter share.
pub(super) struct PostgresStore {
    pub(super) options: PostgresOptions,
    /// Whether the pool is the user's.
    pub(super) user_pool: bool,
    pub(super) connections: Connections,
    find: Arc<str>,
    /// Names the schema after the table is found: a `search_path` that changes later names no other
    /// table.
    statements: RwLock<ByWait>,
    pub(super) calls: Batcher<Call>,
    pub(super) replanner: Replanner,
    /// Whether claims read before they insert: while at least half of their keys are known. An insertion shows without
    /// extra cost whether a key is new; the row of a known key takes a second statement.
    pub(super) read_first: AtomicBool,
    /// When a batch last waited for a row that an open transaction holds.
    met_held: Mutex<Option<Instant>>,
    pub(super) transactions: Places,
    pub(super) purge_task: PurgeTask,
    /// Whether it is known if the connections are encrypted.
    has_checked_encryption: AtomicBool,
    has_schema: AtomicBool,
}

/// The rows that a statement returned.
pub(super) struct Fetched<'s> {
    pub(super) rows: Vec<PgRow>,
    /// The connection that returned them. It returns to its source when it is dropped.
    pub(super) connection: BoundedConnection<'s>,
    /// An earlier try of the statement lost its reply: the rows may show what that try wrote.
    pub(super) lost_reply: bool,
}

/// Where the table is, or is to be.
struct FoundTable {
    name: TableName,
    statements: ByWait,
    /// Whether it exists, with its version.
    exists: bool,
    /// Whether it has an index on `expires_at`.
    has_index: bool,
    /// Whether other sessions find the same table. A transaction that has written may have made the table, and one may
    /// have a `search_path` of its own.
    is_everybodys: bool,
}

impl PostgresStore {
    pub(super) fn new(pool: PgPool, options: PostgresOptions, user_pool: bool) -> Self {
        let lanes = options.batching.lanes;
        let connections = pool.options().get_max_connections();
        let transactions = Places::new(usize::try_from(connections).unwrap_or(usize::MAX));
        Self {
            connections: Connections::new(pool, lanes),
            find: tagged(&options.name.find()),
            statements: RwLock::new(Statements::by_wait(&options.name, &options)),
            calls: Batcher::new(options.batching),
            replanner: Replanner::default(),
            read_first: AtomicBool::new(false),
            met_held: Mutex::default(),
            transactions,
            purge_task: PurgeTask::new(options.purging),
            has_checked_encryption: AtomicBool::new(false),
            has_schema: AtomicBool::new(false),
            options,
            user_pool,
        }
    }

    pub(super) fn pool(&self) -> &PgPool {
        &self.connections.pool
    }

    /// The pool was closed.
    pub(super) fn on_close(&self) {
        self.connections.close_idle();
    }

    /// Closes the connections, those of a pool of the user's excepted.
    pub(super) async fn close(&self) {
        self.purge_task.stop();
        self.connections.close().await;
        if !self.user_pool {
            self.pool().close().await;
        }
    }

    /// Returns the statements that were last made.
    pub(super) fn statements(&self) -> Arc<Statements> {
        Arc::clone(&self.statements_by_wait()[Wait::Briefly as usize])
    }

    pub(super) fn statements_by_wait(&self) -> ByWait {
        self.statements.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns how a batch meets a row that an open transaction holds.
    pub(super) fn wait(&self) -> Wait {
        let met = *self.met_held.lock().unwrap_or_else(PoisonError::into_inner);
        let is_recent = met.is_some_and(|met| met.elapsed() < PASS_OVER_FOR);
        if is_recent { Wait::PassOver } else { Wait::Briefly }
    }

    /// Notes that a batch has met a row that an open transaction holds.
    pub(super) fn note_held(&self) {
        *self.met_held.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// Runs a call once the table is found; and once more if the table is gone, which is then looked
    /// for again.
    pub(super) async fn with_table<T, F>(self: &Arc<Self>, call: impl Fn() -> F) -> Result<T, Error>
    where
        F: Future<Output = Result<T, Error>>,
    {
        let statements = self.ready().await?;
        match call().await {
            Err(error) if self.note_missing_table(&error, &statements) => {
                self.ready().await?;
                // Boxed, because it is rare, and each call of a list is a future of its own.
                Box::pin(call()).await
            }
            reply => reply,
        }
    }

    /// Finds or makes the table, and returns statements with its schema.
    async fn ready(self: &Arc<Self>) -> Result<Arc<Statements>, Error> {
        check_open(self.connections.is_closed(), self.options.check())?;
        self.ensure_purge();
        if !self.has_schema.load(Ordering::Acquire) {
            Box::pin(self.prepare(self.options.makes_table, Some(MIGRATION_WAIT))).await?;
        }
        Ok(self.statements())
    }

    /// Returns `true` if a statement found the table gone, as after a restore. The next call then looks for
    /// the table again.
    pub(super) fn note_missing_table(&self, error: &Error, statements: &Arc<Statements>) -> bool {
        let gone = is_without_table(error);
        // Unless another call has found the table since.
        if gone && Arc::ptr_eq(statements, &self.statements()) {
            self.has_schema.store(false, Ordering::Release);
        }
        gone
    }

    /// Finds the table on a connection of the user's, because all connections of the pool may be in
    /// such transactions. Makes it, on another connection, if there is none.
    pub(super) async fn ready_within(
        self: &Arc<Self>,
        connection: &mut PgConnection,
    ) -> Result<Arc<Statements>, Error> {
        check_open(self.connections.is_closed(), self.options.check())?;
        self.ensure_purge();
        if self.has_schema.load(Ordering::Acquire) {
            return Ok(self.statements());
        }
        let fault = |error| store_error("looking for the Postgres schema", error);
        let found = query(&self.find).fetch_one(&mut *connection).await.map_err(fault)?;
        let found = self.found(&found)?;
        let is_current = found.exists && {
            let version = query(&found.statements[0].version).fetch_one(connection).await;
            version.and_then(|row| row.try_get::<i32, _>(0)).map_err(fault)? >= VERSION
        };
        if !is_current {
            self.prepare(self.options.makes_table, Some(MIGRATION_WAIT)).await?;
            return Ok(self.statements());
        }
        if found.is_everybodys {
            self.set_statements(&found.statements);
        }
        let [statements, ..] = found.statements;
        Ok(statements)
    }

    /// Finds the table, or makes it.
    pub(super) async fn migrate(&self) -> Result<(), Error> {
        self.prepare(true, None).await
    }

    /// Finds the table. Makes it if it is missing and this is allowed. A migration waits for `lock_timeout`
    /// for another one.
    async fn prepare(&self, may_make: bool, lock_timeout: Option<Duration>) -> Result<(), Error> {
        let fault = |error| store_error("preparing the Postgres schema", error);
        // One call, because each abandoned migration may leave a session on the server.
        let mut place = self.connections.migration.place().await;
        if lock_timeout.is_some() && self.has_schema.load(Ordering::Acquire) {
            return Ok(());
        }
        let found = self.fetch(&self.find, &|query| query).await.map_err(fault)?;
        let found = found.first().ok_or(sqlx::Error::RowNotFound).map_err(fault)?;
        let found = self.found(found)?;
        // Not for a call: a claim needs no index.
        if lock_timeout.is_none() && found.exists && !found.has_index {
            return Err(Error::new(
                ErrorKind::Refused,
                "preparing the Postgres schema: the table has no index on expires_at",
            ));
        }
        // Without the table, and without the right to make it, the server's error says so.
        let is_current = (found.exists || !may_make)
            && self.version(&found.statements[0]).await.map_err(fault)? >= VERSION;
        if !is_current && !may_make {
            return Err(Error::new(
                ErrorKind::Refused,
                "the Postgres schema is of an older version",
            ));
        }
        let mut sql = if is_current { Vec::new() } else { create_sql(&found.name) };
        // Not by a call: its role may lack the right.
        if may_make && lock_timeout.is_none() && self.options.makes_function {
            sql.push(record_function(&found.name));
        }
        if !sql.is_empty() {
            let mut session = self.connections.get(Source::Lane).await.map_err(fault)?;
            // One message: if the call is dropped, the server still commits all of it or nothing.
            let sql = AssertSqlSafe(migration(sql, lock_timeout));
            let migrate = |connection| sqlx::raw_sql(sql).execute(connection);
            place.is_lost = true;
            let migrated = session.run(MAINTENANCE_TIMEOUT, migrate).await;
            place.is_lost = migrated.as_ref().is_err_and(is_timed_out);
            if !place.is_lost {
                self.connections.migration.has_ended(Kind::Claim);
            }
            migrated.map_err(fault)?;
        }
        self.warn_of_plain_text(&found.statements[0]).await;
        self.set_statements(&found.statements);
        Ok(())
    }

    /// Warns once if a connection to another host is not encrypted. A server that does not say so causes
    /// no warning, and no error.
    async fn warn_of_plain_text(&self, statements: &Statements) {
        let options = self.pool().connect_options();
        if !may_be_plain_text(&options) || self.has_checked_encryption.load(Ordering::Relaxed) {
            return;
        }
        let Ok(rows) = self.fetch(&statements.encrypted, &|query| query).await else { return };
        let is_plain = matches!(rows.first().map(|row| row.try_get(0)), Some(Ok(false)));
        if !self.has_checked_encryption.swap(true, Ordering::Relaxed) && is_plain {
            observe::not_encrypted(options.get_host());
        }
    }

    fn set_statements(&self, statements: &ByWait) {
        *self.statements.write().unwrap_or_else(PoisonError::into_inner) = statements.clone();
        self.has_schema.store(true, Ordering::Release);
    }

    /// Reads the row of [`TableName::find`].
    fn found(&self, row: &PgRow) -> Result<FoundTable, Error> {
        let fault = |error| store_error("looking for the Postgres schema", error);
        let encoding: String = row.try_get("encoding").map_err(fault)?;
        // SQL_ASCII takes every byte. All other encodings lack characters that an id may have, and
        // would refuse its deliveries for ever.
        if !["UTF8", "SQL_ASCII"].contains(&&*encoding) {
            return Err(Error::new(
                ErrorKind::Config,
                "preparing the Postgres schema: the database's encoding is not UTF8",
            ));
        }
        let schema = row.try_get("schema").map_err(fault)?;
        let name = TableName { schema, ..self.options.name.clone() };
        Ok(FoundTable {
            statements: Statements::by_wait(&name, &self.options),
            name,
            exists: row.try_get("there").map_err(fault)?,
            has_index: row.try_get("has_index").map_err(fault)?,
            is_everybodys: row.try_get("is_everybodys").map_err(fault)?,
        })
    }

    async fn version(&self, statements: &Statements) -> Result<i32, sqlx::Error> {
        let version = self.fetch(&statements.version, &|query| query).await?;
        version.first().map_or(Ok(0), |row| row.try_get(0))
    }

    /// Runs one statement, which is its own transaction, on the pool. Returns its rows.
    pub(super) async fn fetch(
        &self,
        sql: &Arc<str>,
        bind: Bind<'_>,
    ) -> Result<Vec<PgRow>, sqlx::Error> {
        let bound = self.options.statement_timeout;
        Ok(self.fetch_on(Source::Pool, bound, sql, bind).await?.rows)
    }

    /// Runs one statement on a connection of this source, within `bound`. Returns its rows.
    ///
    /// The statement is repeated after a conflict, and if its connection turns out to be gone: a
    /// statement that is repeated with its token has the same result. A repetition may be refused
    /// because the server still runs the statement whose reply was lost: the outcome is unknown then.
    /// A statement that has used up its time is not repeated, because its caller has stopped waiting.
    pub(super) async fn fetch_on(
        &self,
        source: Source,
        bound: Duration,
        sql: &Arc<str>,
        bind: Bind<'_>,
    ) -> Result<Fetched<'_>, sqlx::Error> {
        let sql = &self.replanner.text(sql);
        let mut pauses = repeats();
        let mut lost = None;
        loop {
            let mut session = match self.connections.get(source).await {
                Ok(session) => session,
                Err(error) => return Err(lost.unwrap_or(error)),
            };
            let fetch = |connection| async {
                let rows = bind(query(sql)).fetch_all(connection).await?;
                if rows.first().is_some_and(is_from_a_standby) {
                    return Err(sqlx::Error::Protocol("the server is a standby".to_owned()));
                }
                Ok(rows)
            };
            let error = match session.run(bound, fetch).await {
                Ok(rows) => {
                    let lost_reply = lost.is_some();
                    return Ok(Fetched { rows, connection: session, lost_reply });
                }
                Err(error) => error,
            };
            if is_read_only(&error) || matches!(error, sqlx::Error::Protocol(_)) {
                // All connections may lead to the same server.
                self.connections.test_idle();
            }
            if is_timed_out(&error) {
                return Err(error);
            }
            drop(session);
            match pauses.next() {
                Some(pause) if is_gone(&error) || is_conflict(&error) => {
                    tokio::time::sleep(pause).await;
                }
                _ => return Err(lost.unwrap_or(error)),
            }
            if is_broken(&error) {
                lost = Some(error);
            }
        }
    }
}

/// Returns the pauses between the repetitions of a statement or a transaction.
pub(super) fn repeats() -> impl Iterator<Item = Duration> + Send {
    ExponentialBuilder::new()
        .with_min_delay(Duration::from_millis(1))
        .with_max_delay(Duration::from_millis(50))
        .with_jitter()
        .with_max_times(REPEATS)
        .build()
}

/// Returns `true` for a row from a server that only follows another.
fn is_from_a_standby(row: &PgRow) -> bool {
    row.try_get("standby").unwrap_or(false)
}
