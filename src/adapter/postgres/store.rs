//! [`PostgresStore`]: the state that all handles of an adapter share.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use sqlx::postgres::{PgPool, PgRow};

use super::super::contract::Fetch;
use super::super::sql::Common;
use super::abandoned::{Sender, Work};
use super::connections::{Connections, Fetched};
use super::options::PostgresOptions;
use super::params::{Bind, Bound, Uuid, key_hash};
use super::statements::{Statements, TableName, Wait};
use crate::key::DedupKey;

/// For how long batches pass over rows that open transactions hold, after one has waited for such a row.
const PASS_OVER_FOR: Duration = Duration::from_secs(10);

/// The state that all handles of an adapter share.
pub(crate) struct PostgresStore {
    pub(super) options: PostgresOptions,
    pub(super) connections: Connections,
    pub(super) common: Common,
    /// Whether the pool is the user's.
    user_pool: bool,
    /// Held by the call that looks for the table, or makes it.
    pub(super) migration: Arc<tokio::sync::Mutex<()>>,
    /// By [`Wait`]. They name the schema after the table is found: a `search_path` that changes later names no other
    /// table.
    statements: RwLock<[Arc<Statements>; 3]>,
    /// Whether claims read before they insert: while at least half of their keys are known. An insertion shows without
    /// extra cost whether a key is new; the row of a known key takes a second statement, and with it a duplicate costs
    /// the server two to three times the CPU.
    pub(super) known: AtomicBool,
    /// When a batch last waited for a row that an open transaction holds.
    held: Mutex<Option<Instant>>,
}

impl PostgresStore {
    pub(super) fn new(pool: PgPool, options: PostgresOptions, user_pool: bool) -> Self {
        let bounds = options.sql.bounds;
        Self {
            connections: Connections::new(pool, bounds.workers, options.statement_timeout),
            common: Common::new(&options.sql, bounds, options.check()),
            user_pool,
            migration: Arc::default(),
            statements: RwLock::new(Statements::by_wait(&TableName::of(&options), &options)),
            known: AtomicBool::new(false),
            held: Mutex::default(),
            options,
        }
    }

    pub(super) fn statements(&self, wait: Wait) -> Arc<Statements> {
        let statements = self.statements.read().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(&statements[wait as usize])
    }

    pub(super) fn set_statements(&self, statements: [Arc<Statements>; 3]) {
        *self.statements.write().unwrap_or_else(PoisonError::into_inner) = statements;
    }

    /// Returns how a batch meets a row that an open transaction holds.
    pub(super) fn wait(&self) -> Wait {
        let held = *self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let is_recent = held.is_some_and(|held| held.elapsed() < PASS_OVER_FOR);
        if is_recent { Wait::PassOver } else { Wait::Briefly }
    }

    /// Notes that a batch has waited for a row.
    pub(super) fn note_held(&self) {
        *self.held.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// Runs one statement beside the batches, within so many times the usual bound. It is its own transaction.
    pub(super) async fn fetch(
        &self,
        (work, times): (Work, u32),
        sql: impl Fn(&Statements) -> &Arc<str>,
        bind: Bind<'_>,
    ) -> Result<Fetched, sqlx::Error> {
        let permission = self.connections.senders.permission(Sender::Other).await;
        let statements = self.statements(Wait::Briefly);
        let bound = self.options.statement_timeout.saturating_mul(times);
        self.connections.fetch(&permission, (work, bound), sql(&statements), Some(bind)).await
    }

    /// Reads a row: on a primary, unless it may be `anywhere`.
    pub(super) async fn read_key(
        &self,
        key: &DedupKey,
        fetch: Fetch,
        anywhere: bool,
    ) -> Result<Option<PgRow>, sqlx::Error> {
        let keys = [Uuid(key_hash(key))];
        let bind = |query: Bound| query.bind(&keys[..]).bind(anywhere);
        let read = self.fetch((Work::Read, 1), |all| all.read(fetch), &bind).await?;
        Ok(read.rows.into_iter().next())
    }

    /// Closes the connections; a pool of the user's stays open.
    pub(super) async fn close(&self) {
        self.common.stop();
        self.connections.close().await;
        if !self.user_pool {
            self.connections.pool.close().await;
        }
    }
}
