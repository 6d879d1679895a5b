//! Stores that are empty when a schedule begins, and whose time can be moved.

use std::sync::Arc;
use std::time::Duration;

use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, PgConnection, SqliteConnection};
use tempfile::TempDir;
use tower_dedup::adapter::inspect::MaintenanceAdapter;
use tower_dedup::adapter::{
    MemoryAdapter, PostgresAdapter, PostgresOptions, Purging, RedisAdapter, SqliteAdapter,
    SqliteOptions,
};
use tower_dedup::internals::{with_postgres_bounds, with_sqlite_bounds};

use super::support::postgres::Schema;
use super::support::redis::{command, connection, fresh_prefix, keys_of, shared, with_prefix};
use super::support::time_travel::{age_file, age_schema, milliseconds, shift_redis};

pub(crate) trait Backend {
    type Adapter: MaintenanceAdapter;

    /// `true` if other callers may see a call as more than one step.
    const IN_SEVERAL_STATEMENTS: bool = true;

    /// Deletes everything.
    async fn empty(&mut self);

    /// Returns adapters on the same store, one for each process that the backend stands for.
    fn adapters(&self) -> Vec<Arc<Self::Adapter>>;

    async fn advance(&mut self, by: Duration);
}

pub(crate) struct Memory {
    capacity: usize,
    adapter: Arc<MemoryAdapter>,
}

impl Memory {
    /// The capacity decides the number of shards.
    pub(crate) fn new(capacity: usize) -> Self {
        Self { capacity, adapter: Arc::new(MemoryAdapter::with_capacity(capacity)) }
    }
}

impl Backend for Memory {
    type Adapter = MemoryAdapter;

    const IN_SEVERAL_STATEMENTS: bool = false;

    async fn empty(&mut self) {
        *self = Self::new(self.capacity);
    }

    fn adapters(&self) -> Vec<Arc<MemoryAdapter>> {
        vec![Arc::clone(&self.adapter)]
    }

    async fn advance(&mut self, by: Duration) {
        self.adapter.advance(by);
    }
}

/// How many calls a batch of each adapter of a backend takes: two adapters with large and with small batches.
pub(crate) const BATCHES: [usize; 2] = [1_024, 3];
/// How many calls may wait.
const WAITING: usize = 16_384;

pub(crate) struct File {
    adapters: Vec<Arc<SqliteAdapter>>,
    connection: SqliteConnection,
    _dir: TempDir,
}

impl File {
    pub(crate) async fn new(batches: impl IntoIterator<Item = usize>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("dedup.db");
        let mut adapters = Vec::new();
        for batch in batches {
            let url = format!("sqlite://{}", path.display());
            let options = SqliteOptions::new().purging(Purging::off());
            let options = with_sqlite_bounds(options, batch, WAITING);
            let adapter = SqliteAdapter::connect_with(&url, options).await.unwrap();
            adapter.migrate().await.unwrap();
            adapters.push(Arc::new(adapter));
        }
        let options = SqliteConnectOptions::new().filename(path);
        let connection = options.busy_timeout(Duration::from_secs(5)).connect().await.unwrap();
        Self { adapters, connection, _dir: dir }
    }
}

impl Backend for File {
    type Adapter = SqliteAdapter;

    async fn empty(&mut self) {
        let delete = sqlx::query("DELETE FROM webhook_deliveries");
        delete.execute(&mut self.connection).await.unwrap();
    }

    fn adapters(&self) -> Vec<Arc<SqliteAdapter>> {
        self.adapters.clone()
    }

    async fn advance(&mut self, by: Duration) {
        age_file(&mut self.connection, by).await;
    }
}

pub(crate) struct Server {
    adapters: Vec<Arc<PostgresAdapter>>,
    connection: PgConnection,
    schema: Schema,
}

impl Server {
    pub(crate) async fn new(batches: impl IntoIterator<Item = usize>) -> Self {
        let schema = Schema::fresh();
        let mut adapters = Vec::new();
        for batch in batches {
            let options = PostgresOptions::new().connections(3).purging(Purging::off());
            let options = with_postgres_bounds(options, batch, WAITING);
            let adapter = PostgresAdapter::connect_with(&schema.url(), options).await.unwrap();
            adapter.migrate().await.unwrap();
            adapters.push(Arc::new(adapter));
        }
        let connection = PgConnection::connect(&schema.url()).await.unwrap();
        Self { adapters, connection, schema }
    }
}

impl Backend for Server {
    type Adapter = PostgresAdapter;

    async fn empty(&mut self) {
        let delete = format!("DELETE FROM {}.webhook_deliveries", self.schema.name());
        sqlx::query(AssertSqlSafe(delete)).execute(&mut self.connection).await.unwrap();
    }

    fn adapters(&self) -> Vec<Arc<PostgresAdapter>> {
        self.adapters.clone()
    }

    async fn advance(&mut self, by: Duration) {
        age_schema(&mut self.connection, self.schema.name(), by).await;
    }
}

pub(crate) struct Redis {
    adapters: Vec<Arc<RedisAdapter>>,
    connection: redis::Connection,
    prefix: String,
}

impl Redis {
    pub(crate) async fn new() -> Self {
        let prefix = fresh_prefix();
        let mut adapters = Vec::new();
        for _ in 0..2 {
            let adapter = RedisAdapter::connect(&with_prefix(shared(), &prefix)).await.unwrap();
            adapters.push(Arc::new(adapter));
        }
        Self { adapters, connection: connection(shared()).unwrap(), prefix }
    }
}

impl Backend for Redis {
    type Adapter = RedisAdapter;

    /// One script decides each reply.
    const IN_SEVERAL_STATEMENTS: bool = false;

    async fn empty(&mut self) {
        for key in keys_of(&mut self.connection, &self.prefix).unwrap() {
            command(&["DEL"]).arg(key).exec(&mut self.connection).unwrap();
        }
    }

    fn adapters(&self) -> Vec<Arc<RedisAdapter>> {
        self.adapters.clone()
    }

    async fn advance(&mut self, by: Duration) {
        shift_redis(&mut self.connection, &self.prefix, -milliseconds(by));
    }
}
