//! The published conformance suite, on every adapter.

use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqliteSynchronous};
use sqlx::{ConnectOptions, Connection, PgConnection, SqlitePool};
use tempfile::TempDir;
use tower_dedup::DedupKey;
use tower_dedup::adapter::{
    Batching, CallTerms, Claimed, DedupAdapter, Identifier, MaintenanceAdapter, MemoryAdapter,
    PostgresAdapter, PostgresOptions, Released, SqliteAdapter, SqliteOptions, StoreFuture,
};
use tower_dedup::conformance::{SharedStore, Store};

use super::redis_stores::{Redis, RedisCluster, RedisReplicated, RedisSentinel};
use crate::support::postgres::{Schema, create_partitions};
use crate::support::time_travel::{milliseconds, shift_file, shift_schema};

struct Memory(Arc<MemoryAdapter>);

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

/// Another number of shards, so that sets spread in another way.
struct FewShards(Memory);

impl Store for FewShards {
    type Adapter = MemoryAdapter;

    async fn create() -> Self {
        Self(Memory(Arc::new(MemoryAdapter::with_capacity(3 * 2_000))))
    }

    fn adapter(&self) -> Arc<MemoryAdapter> {
        self.0.adapter()
    }

    async fn advance(&self, by: Duration) {
        self.0.advance(by).await;
    }

    async fn set_back(&self, by: Duration) {
        self.0.set_back(by).await;
    }
}

/// A file in a folder of its own.
struct Sqlite {
    adapter: Arc<SqliteAdapter>,
    path: PathBuf,
    dir: TempDir,
}

fn url(path: &std::path::Path) -> String {
    format!("sqlite://{}", path.display())
}

async fn shift(path: &std::path::Path, by: i64) {
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

/// A pool of the user, with several connections.
struct UsersPool {
    adapter: Arc<SqliteAdapter>,
    path: PathBuf,
    _dir: TempDir,
}

impl Store for UsersPool {
    type Adapter = SqliteAdapter;

    async fn create() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("app.db");
        let options = SqliteConnectOptions::new()
            .filename(&path)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Normal)
            .busy_timeout(Duration::from_secs(1));
        let pool = SqlitePool::connect_with(options).await.unwrap();
        let adapter = SqliteAdapter::new(pool);
        // `shift` needs the table.
        adapter.migrate().await.unwrap();
        Self { adapter: Arc::new(adapter), path, _dir: dir }
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
}

/// An adapter without its type.
struct Boxed(Sqlite, Arc<dyn MaintenanceAdapter>);

impl Store for Boxed {
    type Adapter = dyn MaintenanceAdapter;

    async fn create() -> Self {
        let store = Sqlite::create().await;
        let adapter = tower_dedup::adapter::connect(&url(&store.path)).await.unwrap();
        Self(store, adapter)
    }

    fn adapter(&self) -> Arc<Self::Adapter> {
        Arc::clone(&self.1)
    }

    async fn advance(&self, by: Duration) {
        self.0.advance(by).await;
    }

    async fn set_back(&self, by: Duration) {
        self.0.set_back(by).await;
    }
}

/// A schema, named by the options and not by the search path.
struct Postgres {
    adapter: Arc<PostgresAdapter>,
    schema: Schema,
}

async fn connect_in(schema: &Schema, options: PostgresOptions) -> PostgresAdapter {
    PostgresAdapter::connect_with(schema.database_url(), options).await.unwrap()
}

impl Postgres {
    /// `connect` makes an adapter with these options.
    async fn over(
        options: PostgresOptions,
        connect: impl AsyncFnOnce(&Schema, PostgresOptions) -> PostgresAdapter,
    ) -> Self {
        let schema = Schema::fresh();
        let options = options.schema(Identifier::new(schema.name()).unwrap());
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

/// A pool whose transactions are serializable by default, as a role or a database may define. Its
/// commits do not wait for the disk.
struct Serializable(Postgres);

impl Store for Serializable {
    type Adapter = PostgresAdapter;

    async fn create() -> Self {
        let connect = async |schema: &Schema, options| {
            let to = PgConnectOptions::from_str(schema.database_url()).unwrap().options([
                ("default_transaction_isolation", "serializable"),
                ("synchronous_commit", "off"),
            ]);
            let pool = PgPoolOptions::new().max_connections(8).connect_with(to).await.unwrap();
            PostgresAdapter::with_options(pool, options)
        };
        let options = PostgresOptions::new().asynchronous_claims(true);
        Self(Postgres::over(options, connect).await)
    }

    fn adapter(&self) -> Arc<PostgresAdapter> {
        self.0.adapter()
    }

    async fn advance(&self, by: Duration) {
        self.0.advance(by).await;
    }

    async fn set_back(&self, by: Duration) {
        self.0.set_back(by).await;
    }
}

/// Every call is a statement of its own.
struct Unbatched(Postgres);

impl Store for Unbatched {
    type Adapter = PostgresAdapter;

    async fn create() -> Self {
        let options = PostgresOptions::new().batching(Batching::off());
        Self(Postgres::over(options, connect_in).await)
    }

    fn adapter(&self) -> Arc<PostgresAdapter> {
        self.0.adapter()
    }

    async fn advance(&self, by: Duration) {
        self.0.advance(by).await;
    }

    async fn set_back(&self, by: Duration) {
        self.0.set_back(by).await;
    }
}

/// A table that is partitioned by hash of the key. It exists before the adapter.
struct Partitioned(Postgres);

impl Store for Partitioned {
    type Adapter = PostgresAdapter;

    async fn create() -> Self {
        let connect = async |schema: &Schema, options: PostgresOptions| {
            let adapter = connect_in(schema, options).await;
            let mut connection = PgConnection::connect(schema.database_url()).await.unwrap();
            create_partitions(&mut connection, &adapter.schema_sql(), 4).await;
            adapter
        };
        Self(Postgres::over(PostgresOptions::new(), connect).await)
    }

    fn adapter(&self) -> Arc<PostgresAdapter> {
        self.0.adapter()
    }

    async fn advance(&self, by: Duration) {
        self.0.advance(by).await;
    }

    async fn set_back(&self, by: Duration) {
        self.0.set_back(by).await;
    }
}

impl SharedStore for Partitioned {
    const PROCESSES: usize = 8;

    fn address(&self) -> String {
        self.0.address()
    }

    async fn attach(address: &str) -> Arc<PostgresAdapter> {
        Postgres::attach(address).await
    }
}

/// Every call on a file is a statement of its own.
struct UnbatchedFile(Sqlite, Arc<SqliteAdapter>);

impl Store for UnbatchedFile {
    type Adapter = SqliteAdapter;

    async fn create() -> Self {
        let store = Sqlite::create().await;
        let options = SqliteOptions::new().batching(Batching::off());
        let adapter = SqliteAdapter::connect_with(&url(&store.path), options).await.unwrap();
        Self(store, Arc::new(adapter))
    }

    fn adapter(&self) -> Arc<SqliteAdapter> {
        Arc::clone(&self.1)
    }

    async fn advance(&self, by: Duration) {
        self.0.advance(by).await;
    }

    async fn set_back(&self, by: Duration) {
        self.0.set_back(by).await;
    }
}

/// A store with the required methods only.
struct Plain(MemoryAdapter);

impl DedupAdapter for Plain {
    fn claim<'a>(
        &'a self,
        keys: &'a [DedupKey],
        terms: &'a CallTerms,
    ) -> StoreFuture<'a, Vec<Claimed>> {
        Box::pin(async move {
            self.abilities().check(terms)?;
            self.0.claim(keys, terms).await
        })
    }

    fn release<'a>(
        &'a self,
        keys: &'a [DedupKey],
        terms: &'a CallTerms,
    ) -> StoreFuture<'a, Vec<Released>> {
        self.0.release(keys, terms)
    }
}

struct PlainStore(Arc<Plain>);

impl Store for PlainStore {
    type Adapter = Plain;

    async fn create() -> Self {
        Self(Arc::new(Plain(MemoryAdapter::new())))
    }

    fn adapter(&self) -> Arc<Plain> {
        Arc::clone(&self.0)
    }

    async fn advance(&self, by: Duration) {
        self.0.0.advance(by);
    }

    async fn set_back(&self, by: Duration) {
        self.0.0.set_back(by);
    }
}

/// Expands every macro for an adapter with all abilities.
macro_rules! everything {
    ($($name:ident = $store:ident),+ $(,)?) => {$(
        mod $name {
            tower_dedup::conformance_suite!(super::$store);
            tower_dedup::lease_conformance_suite!(super::$store);
            tower_dedup::stored_data_conformance_suite!(super::$store);
            tower_dedup::maintenance_conformance_suite!(super::$store);
        }
    )+};
}

everything!(
    memory = Memory,
    memory_few_shards = FewShards,
    sqlite = Sqlite,
    sqlite_users_pool = UsersPool,
    postgres = Postgres,
    postgres_serializable = Serializable,
    postgres_unbatched = Unbatched,
    postgres_partitioned = Partitioned,
    sqlite_unbatched = UnbatchedFile,
    boxed = Boxed,
    redis = Redis,
    redis_sentinel = RedisSentinel,
    redis_cluster = RedisCluster,
    redis_replicated = RedisReplicated,
);

/// Expands the macro for an adapter with the ability `inspection`.
macro_rules! inspection {
    ($($name:ident = $store:ident),+ $(,)?) => {
        mod inspection {$(
            mod $name {
                tower_dedup::inspection_conformance_suite!(super::super::$store);
            }
        )+}
    };
}

inspection!(
    sqlite = Sqlite,
    sqlite_users_pool = UsersPool,
    postgres = Postgres,
    postgres_serializable = Serializable,
    postgres_unbatched = Unbatched,
    postgres_partitioned = Partitioned,
    sqlite_unbatched = UnbatchedFile,
    boxed = Boxed,
    redis = Redis,
    redis_sentinel = RedisSentinel,
    redis_cluster = RedisCluster,
    redis_replicated = RedisReplicated,
);

mod plain {
    tower_dedup::conformance_suite!(super::PlainStore);
    tower_dedup::refusal_conformance_suite!(super::PlainStore);
}

mod sqlite_processes {
    tower_dedup::process_conformance_suite!(super::Sqlite);
}

mod postgres_partitioned_processes {
    tower_dedup::process_conformance_suite!(super::Partitioned);
}

mod postgres_processes {
    tower_dedup::process_conformance_suite!(super::Postgres);
}

mod redis_processes {
    tower_dedup::process_conformance_suite!(super::Redis);
}

mod redis_sentinel_processes {
    tower_dedup::process_conformance_suite!(super::RedisSentinel);
}

mod redis_cluster_processes {
    tower_dedup::process_conformance_suite!(super::RedisCluster);
}
