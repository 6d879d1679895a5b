//! How the table is found, and how it is made.

use std::sync::Arc;
use std::time::Duration;

use sqlx::Row as _;
use tokio::time::timeout;

use super::super::sql::statement::render;
use super::errors::store_error;
use super::options::may_be_plain_text;
use super::senders::{Sender, Work};
use super::statements::{PostgresStatements, TableName, Wait, literal, quoted};
use super::store::{PREPARING, PostgresStore};
use crate::error::{StoreError, StoreErrorKind};
use crate::observe;

/// The version of the schema that this code writes.
pub(super) const VERSION: i32 = 1;
/// For how long a migration may run.
const MAINTENANCE_TIMEOUT: Duration = Duration::from_secs(600);

impl PostgresStore {
    /// Finds the table, or makes it.
    pub(super) async fn migrate(self: &Arc<Self>) -> Result<(), StoreError> {
        let _turn = self.migration.lock().await;
        self.find_or_make(true, None).await
    }

    /// Finds the table. Makes it if it is missing and this is allowed. A migration waits for
    /// `lock_timeout` for another one.
    pub(super) async fn find_or_make(
        self: &Arc<Self>,
        may_make: bool,
        lock_timeout: Option<Duration>,
    ) -> Result<(), StoreError> {
        let fault = |error| store_error(PREPARING, error);
        let refused = |text| Err(StoreError::new(StoreErrorKind::Refused, text));
        let read = async |sql: &Arc<str>| {
            let read = self.fetch(PREPARING, (Work::Read, 1), sql, |query| query).await?;
            let row = read.map(|read| read.rows.into_iter().next());
            row.and_then(|row| row.ok_or(sqlx::Error::RowNotFound)).map_err(fault)
        };
        let found = read(&self.statements(Wait::Briefly).find).await?;
        let encoding: String = found.try_get("encoding").map_err(fault)?;
        // SQL_ASCII takes every byte. All other encodings lack characters that an id may have, and
        // would refuse its deliveries for ever.
        if !["UTF8", "SQL_ASCII"].contains(&&*encoding) {
            return Err(StoreError::new(
                StoreErrorKind::Config,
                "preparing the Postgres schema: the database's encoding is not UTF8",
            ));
        }
        let schema = found.try_get("schema").map_err(fault)?;
        let name = TableName { schema, ..TableName::of(&self.options) };
        let statements = PostgresStatements::by_wait(&name, &self.options);
        let exists: bool = found.try_get("there").map_err(fault)?;
        // A call skips this check, because a claim needs no index.
        if lock_timeout.is_none() && exists && !found.try_get("has_index").map_err(fault)? {
            return refused("preparing the Postgres schema: the table has no index on expires_at");
        }
        // Without the table, and without the right to make it, the server's error says so.
        let mut is_current = false;
        if exists || !may_make {
            let version = read(&statements[0].version).await?;
            is_current = version.try_get::<i32, _>(0).map_err(fault)? >= VERSION;
        }
        if !is_current && !may_make {
            return refused("the Postgres schema is of an older version");
        }
        if !is_current {
            // One message: if the call is dropped, the server still commits all of it or nothing.
            let sql = migration(create_sql(&name), lock_timeout);
            let bound = lock_timeout.map_or(MAINTENANCE_TIMEOUT, |wait| 2 * wait);
            let turn = self.connections.senders.permission(Sender::Other, Work::DurableWrite);
            let turn = timeout(self.options.statement_timeout, turn).await;
            let turn = turn.map_err(|_| StoreError::new(StoreErrorKind::Timeout, PREPARING))?;
            let work = (Work::DurableWrite, bound);
            self.connections.fetch(&turn, work, &sql.into(), None).await.map_err(fault)?;
            self.connections.senders.succeeded(Work::DurableWrite);
        }
        let options = self.connections.pool.connect_options();
        // A server that does not say so causes no warning, and no error.
        if !self.common.has_table()
            && may_be_plain_text(&options)
            && let Ok(row) = read(&statements[0].encrypted).await
            && matches!(row.try_get(0), Ok(false))
        {
            observe::records::not_encrypted(options.get_host());
        }
        self.set_statements(statements);
        self.common.set_has_table();
        Ok(())
    }
}

/// Returns the statements that make the schema.
pub(super) fn create_sql(name: &TableName) -> Vec<String> {
    let schema = name.schema.as_deref().map(quoted);
    let values = [
        ("table", &*name.quoted("")),
        ("version_table", &*name.quoted("_schema")),
        ("index", &*format!("\"{}_expires_at\"", name.table)),
        ("version", &*VERSION.to_string()),
        ("schema_literal", &*schema.as_deref().map(literal).unwrap_or_default()),
        ("schema", schema.as_deref().unwrap_or_default()),
    ];
    let create_schema = schema.is_some().then_some(include_str!("sql/create_schema.sql"));
    let tables = [
        include_str!("sql/create_table.sql"),
        include_str!("sql/create_index.sql"),
        include_str!("sql/create_version_table.sql"),
        include_str!("sql/create_version.sql"),
    ];
    create_schema.into_iter().chain(tables).map(|file| render(file, &values)).collect()
}

/// Returns the migration as one message: one implicit transaction, without a `BEGIN` that could
/// stay open. Without a `lock_timeout`, it waits for other migrations and for open transactions.
fn migration(statements: Vec<String>, lock_timeout: Option<Duration>) -> String {
    let wait = lock_timeout
        .map(|wait| format!("SELECT set_config('lock_timeout', '{}ms', true)", wait.as_millis()));
    let start = render(include_str!("sql/migration_start.sql"), &[]);
    let statements = wait.into_iter().chain([start]).chain(statements);
    statements.map(|statement| statement + ";\n").collect()
}
