//! The stores that the conformance suite runs on, in their default configuration. `tests/configurations` makes
//! its stores from these.

use std::any::Any;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::sqlite::{SqliteConnectOptions, SqliteConnection};
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, Executor, PgConnection};
use tempfile::TempDir;
use tower_dedup::adapter::contract::Completion;
use tower_dedup::adapter::{
    MemoryAdapter, PostgresAdapter, PostgresOptions, Purging, SqliteAdapter,
};
use tower_dedup::conformance::{
    HandlerTransaction, RemoteStore, SharedStore, Store, Transactional,
};
use tower_dedup::{BoxError, DedupKey};

use crate::support::postgres::Schema;
use crate::support::proxy::through;
use crate::support::time_travel::{milliseconds, shift_file, shift_schema};

pub(crate) struct Memory(pub(crate) Arc<MemoryAdapter>);

impl Store for Memory {
    type Adapter = MemoryAdapter;

    async fn create() -> Self {
        Self(Arc::new(MemoryAdapter::new()))
    }

    fn adapter(&self) -> Arc<MemoryAdapter> {
        Arc::clone(&self.0)
    }

    async fn advance(&self, by: Duration) {
        self.0.advance(by);
    }

    async fn set_back(&self, by: Duration) {
        self.0.set_back(by);
    }
}

/// A file in a folder of its own.
pub(crate) struct Sqlite {
    adapter: Arc<SqliteAdapter>,
    pub(crate) path: PathBuf,
    dir: TempDir,
}

pub(crate) fn url(path: &Path) -> String {
    format!("sqlite://{}", path.display())
}

pub(crate) async fn shift(path: &Path, by: i64) {
    let options = SqliteConnectOptions::new().filename(path).busy_timeout(Duration::from_secs(5));
    let mut connection = options.connect().await.unwrap();
    shift_file(&mut connection, by).await;
    connection.close().await.unwrap();
}

impl Store for Sqlite {
    type Adapter = SqliteAdapter;

    async fn create() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("dedup.db");
        let adapter = SqliteAdapter::connect(&url(&path)).await.unwrap();
        adapter.migrate().await.unwrap();
        Self { adapter: Arc::new(adapter), path, dir }
    }

    fn adapter(&self) -> Arc<SqliteAdapter> {
        Arc::clone(&self.adapter)
    }

    async fn advance(&self, by: Duration) {
        shift(&self.path, -milliseconds(by)).await;
    }

    async fn set_back(&self, by: Duration) {
        shift(&self.path, milliseconds(by)).await;
    }

    async fn corrupt(&self, key: &DedupKey) {
        let mut connection =
            SqliteConnectOptions::new().filename(&self.path).connect().await.unwrap();
        let sql = "UPDATE webhook_deliveries SET response_headers = 'x' WHERE id = ?1";
        sqlx::query(sql).bind(key.id()).execute(&mut connection).await.unwrap();
    }
}

/// A transaction of a handler, on a connection of its own.
struct Open<C>(C);

macro_rules! handler_transaction {
    ($connection:ty) => {
        impl HandlerTransaction for Open<$connection> {
            fn complete<'t>(
                &'t mut self,
                completion: &'t Completion,
            ) -> BoxFuture<'t, Result<(), BoxError>> {
                Box::pin(async move {
                    let sql = AssertSqlSafe(completion.sql().to_owned());
                    let completed = sqlx::query(sql).bind(completion.parameter().to_owned());
                    completed.execute(&mut self.0).await?;
                    Ok(())
                })
            }

            fn commit(mut self: Box<Self>) -> BoxFuture<'static, ()> {
                Box::pin(async move {
                    sqlx::query("COMMIT").execute(&mut self.0).await.unwrap();
                    self.0.close().await.unwrap();
                })
            }
        }
    };
}

handler_transaction!(SqliteConnection);
handler_transaction!(PgConnection);

impl Transactional for Sqlite {
    async fn transaction(&self) -> Box<dyn HandlerTransaction> {
        let options = SqliteConnectOptions::new().filename(&self.path);
        let mut connection = options.busy_timeout(Duration::from_secs(20)).connect().await.unwrap();
        connection.execute("BEGIN IMMEDIATE").await.unwrap();
        Box::new(Open(connection))
    }
}

impl SharedStore for Sqlite {
    fn address(&self) -> String {
        assert!(self.dir.path().exists());
        url(&self.path)
    }

    async fn attach(address: &str) -> Arc<SqliteAdapter> {
        Arc::new(SqliteAdapter::connect(address).await.unwrap())
    }
}

/// A schema, named by the options and not by the search path.
pub(crate) struct Postgres {
    adapter: Arc<PostgresAdapter>,
    schema: Schema,
}

pub(crate) async fn connect_in(schema: &Schema, options: PostgresOptions) -> PostgresAdapter {
    PostgresAdapter::connect_with(schema.database_url(), options).await.unwrap()
}

impl Postgres {
    /// `connect` makes an adapter with these options.
    pub(crate) async fn over(
        options: PostgresOptions,
        connect: impl AsyncFnOnce(&Schema, PostgresOptions) -> PostgresAdapter,
    ) -> Self {
        let schema = Schema::fresh();
        let options = options.schema(schema.name());
        let adapter = connect(&schema, options).await;
        adapter.migrate().await.unwrap();
        Self { adapter: Arc::new(adapter), schema }
    }

    async fn shift(&self, by: i64) {
        let mut connection = PgConnection::connect(self.schema.database_url()).await.unwrap();
        shift_schema(&mut connection, self.schema.name(), by).await;
    }
}

impl Store for Postgres {
    type Adapter = PostgresAdapter;

    async fn create() -> Self {
        Self::over(PostgresOptions::new(), connect_in).await
    }

    fn adapter(&self) -> Arc<PostgresAdapter> {
        Arc::clone(&self.adapter)
    }

    async fn advance(&self, by: Duration) {
        self.shift(-milliseconds(by)).await;
    }

    async fn set_back(&self, by: Duration) {
        self.shift(milliseconds(by)).await;
    }

    async fn hold(&self, key: &DedupKey) -> Box<dyn Any + Send> {
        let mut holder = PgConnection::connect(self.schema.database_url()).await.unwrap();
        let sql = format!(
            "BEGIN; UPDATE {}.webhook_deliveries SET version = version + 1 WHERE id = '{}'",
            self.schema.name(),
            key.id()
        );
        holder.execute(AssertSqlSafe(sql)).await.unwrap();
        Box::new(holder)
    }

    async fn corrupt(&self, key: &DedupKey) {
        let mut connection = PgConnection::connect(self.schema.database_url()).await.unwrap();
        let table = format!("{}.webhook_deliveries", self.schema.name());
        let sql = format!("UPDATE {table} SET response_headers = 'x' WHERE id = $1");
        sqlx::query(AssertSqlSafe(sql)).bind(key.id()).execute(&mut connection).await.unwrap();
    }
}

impl RemoteStore for Postgres {
    fn server(&self) -> (String, u16) {
        let options: PgConnectOptions = self.schema.database_url().parse().unwrap();
        (options.get_host().to_owned(), options.get_port())
    }

    async fn connect(&self, port: u16) -> Arc<PostgresAdapter> {
        let direct: PgConnectOptions = self.schema.database_url().parse().unwrap();
        let pool = PgPoolOptions::new().connect_lazy_with(through(port, direct));
        let options = PostgresOptions::new().purging(Purging::off());
        let options = options.schema(self.schema.name());
        // A statement may be late for longer than the case takes.
        let options = options.statement_timeout(Duration::from_secs(60));
        Arc::new(PostgresAdapter::with_options(pool, options))
    }
}

impl Transactional for Postgres {
    async fn transaction(&self) -> Box<dyn HandlerTransaction> {
        let mut connection = PgConnection::connect(self.schema.database_url()).await.unwrap();
        let sql = "BEGIN; CREATE TEMP TABLE effects (id text)";
        connection.execute(sql).await.unwrap();
        Box::new(Open(connection))
    }
}

impl SharedStore for Postgres {
    const PROCESSES: usize = 8;

    fn address(&self) -> String {
        format!("{} {}", self.schema.database_url(), self.schema.name())
    }

    async fn attach(address: &str) -> Arc<PostgresAdapter> {
        let (url, schema) = address.split_once(' ').unwrap();
        let url = format!("{url}?dedup_schema={schema}");
        Arc::new(PostgresAdapter::connect(&url).await.unwrap())
    }
}
