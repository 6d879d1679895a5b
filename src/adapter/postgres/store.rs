//! [`PostgresStore`]: the state that all handles of an adapter share.

use std::sync::Arc;
use std::time::Duration;

use sqlx::postgres::{PgPool, PgRow, Postgres};

use super::super::contract::{CallTerms, Completion, Fetch};
use super::super::sql::{Common, READING_RESPONSE, Row, SqlStore};
use super::abandoned::{Sender, Work};
use super::completion::completion;
use super::connections::Connections;
use super::errors::store_error;
use super::options::PostgresOptions;
use super::params::{Bound, Uuid, key_hash, read_row};
use super::schema::{PREPARING, Table};
use super::session::{Link, Met, Session};
use super::statements::{Statements, Wait};
use crate::error::{StoreError, StoreErrorKind};
use crate::key::DedupKey;

/// How long a migration that a call makes waits on the server for another one.
const MIGRATION_WAIT: Duration = Duration::from_secs(5);

/// The state that all handles of an adapter share.
pub(crate) struct PostgresStore {
    pub(super) connections: Arc<Connections>,
    pub(super) table: Table,
    met: Arc<Met>,
    common: Common,
    /// Whether the pool is the user's.
    user_pool: bool,
    /// Held by the call that looks for the table, or makes it.
    migration: Arc<tokio::sync::Mutex<()>>,
}

impl PostgresStore {
    pub(super) fn new(pool: PgPool, options: PostgresOptions, user_pool: bool) -> Self {
        let bounds = options.sql.bounds;
        let connections = Connections::new(pool, bounds.workers, options.statement_timeout);
        Self {
            connections: Arc::new(connections),
            common: Common::new(&options.sql, bounds, options.check()),
            table: Table::new(options),
            met: Arc::default(),
            user_pool,
            migration: Arc::default(),
        }
    }

    pub(super) fn statements(&self) -> Arc<Statements> {
        Arc::clone(&self.table.statements()[0])
    }

    /// Returns a session over this link.
    pub(super) fn session_over<'c>(&self, link: Link<'c>, wait: Wait) -> Session<'c> {
        Session {
            connections: Arc::clone(&self.connections),
            met: Arc::clone(&self.met),
            statements: self.table.statements(),
            link,
            wait,
            known: 0,
            lost_reply: false,
        }
    }

    /// Finds the table, or makes it.
    pub(super) async fn migrate(&self) -> Result<(), StoreError> {
        let _turn = self.migration.lock().await;
        self.find_or_make(true, None).await
    }

    async fn find_or_make(&self, make: bool, wait: Option<Duration>) -> Result<(), StoreError> {
        self.table.find_or_make(&self.connections, make, wait).await?;
        if !self.common.has_table() {
            self.table.warn_of_plain_text(&self.connections).await;
        }
        self.common.set_has_table();
        Ok(())
    }

    /// Reads a row: on a primary, unless it may be `anywhere`.
    pub(super) async fn read_key(
        &self,
        key: &DedupKey,
        fetch: Fetch,
        anywhere: bool,
    ) -> Result<Option<PgRow>, sqlx::Error> {
        let (statements, keys) = (self.statements(), [Uuid::from(key_hash(key))]);
        let bind = |query: Bound| query.bind(&keys[..]).bind(anywhere);
        let sql = statements.read(fetch);
        let rows = self.connections.fetch_beside((Work::Read, 1), sql, &bind).await?.rows;
        Ok(rows.into_iter().next())
    }

    /// Closes the connections; a pool of the user's stays open.
    pub(super) async fn close(&self) {
        self.common.stop();
        self.connections.close().await;
        if !self.user_pool {
            self.pool().close().await;
        }
    }
}

impl SqlStore for PostgresStore {
    type Database = Postgres;
    type Session = Session<'static>;

    fn common(&self) -> &Common {
        &self.common
    }

    fn pool(&self) -> &PgPool {
        &self.connections.pool
    }

    fn is_closed(&self) -> bool {
        self.connections.is_closed()
    }

    fn on_pool_closed(&self) {
        self.connections.close_idle();
    }

    /// For one call at a time, and in a task of its own: a migration that was dropped would leave a session on the
    /// server.
    async fn prepare(self: &Arc<Self>) -> Result<(), StoreError> {
        let turn = Arc::clone(&self.migration).lock_owned().await;
        if self.common.has_table() {
            return Ok(());
        }
        let store = Arc::clone(self);
        let prepare = async move {
            let _turn = turn;
            store.find_or_make(store.table.options.makes_table, Some(MIGRATION_WAIT)).await
        };
        let prepared = tokio::spawn(prepare).await;
        prepared.unwrap_or_else(|_| Err(StoreError::new(StoreErrorKind::Unavailable, PREPARING)))
    }

    fn hash(key: &DedupKey) -> u128 {
        key_hash(key)
    }

    async fn session(self: &Arc<Self>, alone: bool) -> Result<Session<'static>, StoreError> {
        let sender = if alone { Sender::Alone } else { Sender::Batch };
        let permission = self.connections.senders.permission(sender).await;
        let wait = if alone { Wait::Long } else { self.met.wait() };
        Ok(self.session_over(Link::Own(permission), wait))
    }

    async fn read_response(&self, key: &DedupKey) -> Result<Option<Row>, StoreError> {
        let fetch = Fetch::DigestAndResponse;
        let row = self.read_key(key, fetch, false).await;
        let row = row.map_err(|error| store_error(READING_RESPONSE, error))?;
        Ok(row.map(|row| read_row(&row, fetch)))
    }

    fn completion(&self, keys: &[DedupKey], terms: &CallTerms, mark: Option<&str>) -> Completion {
        completion(&self.statements(), keys, terms, mark)
    }
}
