//! [`PostgresStore`]: its connections, and where the table is.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use sqlx::Row as _;
use sqlx::postgres::{PgPool, PgRow};

use super::super::sql::store::Common;
use super::abandoned::{Permission, Sender, Work};
use super::connections::{Connections, Fetched};
use super::errors::store_error;
use super::options::{PostgresOptions, may_be_plain_text};
use super::params::Bind;
use super::schema::{TableName, VERSION, create_sql, migration};
use super::statements::{ByWait, Statements, Wait, tagged};
use crate::error::{StoreError, StoreErrorKind};
use crate::observe;

const PREPARING: &str = "preparing the Postgres schema";
/// How long a migration waits on the server for another one.
const MIGRATION_WAIT: Duration = Duration::from_secs(5);
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
    /// extra cost whether a key is new; the row of a known key takes a second statement, and with it a duplicate costs
    /// the server two to three times the CPU.
    pub(super) read_first: AtomicBool,
    /// When a batch last waited for a row that an open transaction holds.
    met_held: Mutex<Option<Instant>>,
    /// Whether it is known if the connections are encrypted.
    has_checked_encryption: AtomicBool,
    /// Held by the call that looks for the table, or makes it.
    migration: Arc<tokio::sync::Mutex<()>>,
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
            connections: Connections::new(pool, bounds.workers, options.statement_timeout),
            find: tagged(&name.find()),
            statements: RwLock::new(Statements::by_wait(&name, &options)),
            common: Common::new(&options.sql, bounds, options.check()),
            read_first: AtomicBool::new(false),
            met_held: Mutex::default(),
            has_checked_encryption: AtomicBool::new(false),
            migration: Arc::default(),
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
        let _turn = self.migration.lock().await;
        self.find_or_make(true, None).await
    }

    /// Finds the table for a call, or makes it if this is allowed. For one call at a time, and in a task of its own: a
    /// migration that was dropped would leave a session on the server.
    pub(super) async fn prepare_once(self: &Arc<Self>) -> Result<(), StoreError> {
        let turn = Arc::clone(&self.migration).lock_owned().await;
        if self.common.has_table() {
            return Ok(());
        }
        let store = Arc::clone(self);
        let prepare = async move {
            let _turn = turn;
            store.find_or_make(store.options.makes_table, Some(MIGRATION_WAIT)).await
        };
        let prepared = tokio::spawn(prepare).await;
        prepared.unwrap_or_else(|_| Err(StoreError::new(StoreErrorKind::Unavailable, PREPARING)))
    }

    /// Finds the table. Makes it if it is missing and this is allowed. A migration waits for `lock_timeout`
    /// for another one.
    async fn find_or_make(
        &self,
        may_make: bool,
        lock_timeout: Option<Duration>,
    ) -> Result<(), StoreError> {
        let fault = |error| store_error(PREPARING, error);
        let permission = &self.connections.senders.permission(Sender::Other).await;
        let found = self.read_row(permission, &self.find).await.map_err(fault)?;
        let found = self.found(&found.ok_or(sqlx::Error::RowNotFound).map_err(fault)?)?;
        // Not for a call: a claim needs no index.
        if lock_timeout.is_none() && found.exists && !found.has_index {
            return Err(StoreError::new(
                StoreErrorKind::Refused,
                "preparing the Postgres schema: the table has no index on expires_at",
            ));
        }
        // Without the table, and without the right to make it, the server's error says so.
        let is_current = (found.exists || !may_make)
            && self.version(permission, &found.statements[0]).await.map_err(fault)? >= VERSION;
        if !is_current && !may_make {
            return Err(StoreError::new(
                StoreErrorKind::Refused,
                "the Postgres schema is of an older version",
            ));
        }
        if !is_current {
            // One message: if the call is dropped, the server still commits all of it or nothing.
            let sql = migration(create_sql(&found.name), lock_timeout);
            let bound = lock_timeout.map_or(MAINTENANCE_TIMEOUT, |wait| 2 * wait);
            self.connections.run(permission, bound, sql).await.map_err(fault)?;
        }
        self.warn_of_plain_text(permission, &found.statements[0]).await;
        self.set_statements(&found.statements);
        Ok(())
    }

    /// Warns once if a connection to another host is not encrypted. A server that does not say so causes
    /// no warning, and no error.
    async fn warn_of_plain_text(&self, permission: &Permission, statements: &Statements) {
        let options = self.connections.pool.connect_options();
        if !may_be_plain_text(&options) || self.has_checked_encryption.load(Ordering::Relaxed) {
            return;
        }
        let row = self.read_row(permission, &statements.encrypted).await;
        let Ok(row) = row else { return };
        let is_plain = matches!(row.map(|row| row.try_get(0)), Some(Ok(false)));
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

    async fn version(
        &self,
        permission: &Permission,
        statements: &Statements,
    ) -> Result<i32, sqlx::Error> {
        let version = self.read_row(permission, &statements.version).await?;
        version.map_or(Ok(0), |row| row.try_get(0))
    }

    /// Reads the first row of a statement without parameters.
    async fn read_row(
        &self,
        permission: &Permission,
        sql: &Arc<str>,
    ) -> Result<Option<PgRow>, sqlx::Error> {
        let read = self.connections.fetch(permission, (Work::Read, 1), sql, &|query| query).await?;
        Ok(read.rows.into_iter().next())
    }

    /// Runs one statement beside the batches, for as many times the usual bound. It is its own transaction.
    pub(super) async fn fetch(
        &self,
        work: (Work, u32),
        sql: &Arc<str>,
        bind: Bind<'_>,
    ) -> Result<Fetched, sqlx::Error> {
        let permission = self.connections.senders.permission(Sender::Other).await;
        self.connections.fetch(&permission, work, sql, bind).await
    }
}
