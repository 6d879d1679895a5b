//! [`PostgresStore`]: its connections, and where the table is.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use sqlx::postgres::{PgPool, PgRow};
use sqlx::{AssertSqlSafe, Row as _};

use super::super::sql::call::Kind;
use super::super::sql::store::Common;
use super::connections::{Connections, Fetched};
use super::errors::{is_timed_out, store_error};
use super::options::{PostgresOptions, may_be_plain_text};
use super::params::Bind;
use super::schema::{TableName, VERSION, create_sql, migration};
use super::statements::{ByWait, Statements, Wait, tagged};
use crate::error::{StoreError, StoreErrorKind};
use crate::observe;

/// How long a migration waits on the server for another one.
pub(super) const MIGRATION_WAIT: Duration = Duration::from_secs(5);
/// For how long a migration may run.
const MAINTENANCE_TIMEOUT: Duration = Duration::from_secs(600);

/// For how long batches pass over rows that open transactions hold, after one has waited for such a row.
const PASS_OVER_FOR: Duration = Duration::from_secs(10);

/// The state that all handles of an adapter share.
pub(in crate::adapter) struct PostgresStore {
    pub(super) options: PostgresOptions,
    /// Whether the pool is the user's.
    pub(super) user_pool: bool,
    pub(super) connections: Connections,
    find: Arc<str>,
    /// Names the schema after the table is found: a `search_path` that changes later names no other
    /// table.
    statements: RwLock<ByWait>,
    pub(super) common: Common,
    /// Whether claims read before they insert: while at least half of their keys are known. An insertion shows without
    /// extra cost whether a key is new; the row of a known key takes a second statement.
    pub(super) read_first: AtomicBool,
    /// When a batch last waited for a row that an open transaction holds.
    met_held: Mutex<Option<Instant>>,
    /// Whether it is known if the connections are encrypted.
    has_checked_encryption: AtomicBool,
}

/// Where the table is, or is to be.
struct FoundTable {
    name: TableName,
    statements: ByWait,
    /// Whether it exists, with its version.
    exists: bool,
    /// Whether it has an index on `expires_at`.
    has_index: bool,
}

impl PostgresStore {
    pub(super) fn new(pool: PgPool, options: PostgresOptions, user_pool: bool) -> Self {
        let (bounds, name) = (options.sql.bounds, TableName::of(&options));
        Self {
            connections: Connections::new(pool, bounds.workers),
            find: tagged(&name.find()),
            statements: RwLock::new(Statements::by_wait(&name, &options)),
            common: Common::new(&options.sql, bounds, options.check()),
            read_first: AtomicBool::new(false),
            met_held: Mutex::default(),
            has_checked_encryption: AtomicBool::new(false),
            options,
            user_pool,
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

    /// Finds the table, or makes it.
    pub(super) async fn migrate(&self) -> Result<(), StoreError> {
        self.find_or_make(true, None).await
    }

    /// Finds the table. Makes it if it is missing and this is allowed. A migration waits for `lock_timeout`
    /// for another one.
    pub(super) async fn find_or_make(
        &self,
        may_make: bool,
        lock_timeout: Option<Duration>,
    ) -> Result<(), StoreError> {
        let fault = |error| store_error("preparing the Postgres schema", error);
        // One call, because each abandoned migration may leave a session on the server.
        let mut place = self.connections.migration.place().await;
        if lock_timeout.is_some() && self.common.has_table() {
            return Ok(());
        }
        let found = self.fetch(1, &self.find, &|query| query).await.map_err(fault)?;
        let found = found.first().ok_or(sqlx::Error::RowNotFound).map_err(fault)?;
        let found = self.found(found)?;
        // Not for a call: a claim needs no index.
        if lock_timeout.is_none() && found.exists && !found.has_index {
            return Err(StoreError::new(
                StoreErrorKind::Refused,
                "preparing the Postgres schema: the table has no index on expires_at",
            ));
        }
        // Without the table, and without the right to make it, the server's error says so.
        let is_current = (found.exists || !may_make)
            && self.version(&found.statements[0]).await.map_err(fault)? >= VERSION;
        if !is_current && !may_make {
            return Err(StoreError::new(
                StoreErrorKind::Refused,
                "the Postgres schema is of an older version",
            ));
        }
        if !is_current {
            let sql = create_sql(&found.name);
            let mut session = self.connections.get().await.map_err(fault)?;
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
        let options = self.connections.pool.connect_options();
        if !may_be_plain_text(&options) || self.has_checked_encryption.load(Ordering::Relaxed) {
            return;
        }
        let rows = self.fetch(1, &statements.encrypted, &|query| query).await;
        let Ok(rows) = rows else { return };
        let is_plain = matches!(rows.first().map(|row| row.try_get(0)), Some(Ok(false)));
        if !self.has_checked_encryption.swap(true, Ordering::Relaxed) && is_plain {
            observe::not_encrypted(options.get_host());
        }
    }

    fn set_statements(&self, statements: &ByWait) {
        *self.statements.write().unwrap_or_else(PoisonError::into_inner) = statements.clone();
        self.common.set_has_table();
    }

    /// Reads the row of [`TableName::find`].
    fn found(&self, row: &PgRow) -> Result<FoundTable, StoreError> {
        let fault = |error| store_error("looking for the Postgres schema", error);
        let encoding: String = row.try_get("encoding").map_err(fault)?;
        // SQL_ASCII takes every byte. All other encodings lack characters that an id may have, and
        // would refuse its deliveries for ever.
        if !["UTF8", "SQL_ASCII"].contains(&&*encoding) {
            return Err(StoreError::new(
                StoreErrorKind::Config,
                "preparing the Postgres schema: the database's encoding is not UTF8",
            ));
        }
        let schema = row.try_get("schema").map_err(fault)?;
        let name = TableName { schema, ..TableName::of(&self.options) };
        Ok(FoundTable {
            statements: Statements::by_wait(&name, &self.options),
            name,
            exists: row.try_get("there").map_err(fault)?,
            has_index: row.try_get("has_index").map_err(fault)?,
        })
    }

    async fn version(&self, statements: &Statements) -> Result<i32, sqlx::Error> {
        let version = self.fetch(1, &statements.version, &|query| query).await?;
        version.first().map_or(Ok(0), |row| row.try_get(0))
    }

    /// Runs one statement beside the batches, for as many times the usual bound. It is its own transaction. Returns its
    /// rows.
    pub(super) async fn fetch(
        &self,
        times: u32,
        sql: &Arc<str>,
        bind: Bind<'_>,
    ) -> Result<Vec<PgRow>, sqlx::Error> {
        Ok(self.fetch_once(times, sql, bind).await?.rows)
    }

    /// The same, for a statement that may not be repeated after a lost reply.
    pub(super) async fn fetch_once(
        &self,
        times: u32,
        sql: &Arc<str>,
        bind: Bind<'_>,
    ) -> Result<Fetched, sqlx::Error> {
        let mut place = self.connections.others.place().await;
        // Dropped here, the server may still run the statement.
        place.is_lost = true;
        let bound = self.options.statement_timeout.saturating_mul(times);
        let fetched = self.connections.fetch(bound, sql, bind).await;
        place.is_lost = fetched.as_ref().is_err_and(is_timed_out);
        if fetched.is_ok() {
            self.connections.others.has_ended(place.kind);
        }
        fetched
    }
}
