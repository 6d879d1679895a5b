//! Fresh stores, each for one test: those of the conformance suite in their default configuration, of the ledgers, and of
//! the model. `tests/configurations` makes its stores from these.

use std::any::Any;
use std::future::Future;
use std::marker::PhantomData;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use sqlx::postgres::{PgConnectOptions, PgPool, PgPoolOptions, Postgres as PostgresDatabase};
use sqlx::sqlite::{Sqlite as SqliteDatabase, SqliteConnectOptions, SqliteJournalMode, SqlitePool};
use sqlx::{Executor, Pool, Transaction};
use tempfile::TempDir;
use tower_dedup::adapter::contract::{Completion, TransactionAdapter};
use tower_dedup::adapter::maintenance::MaintenanceAdapter;
use tower_dedup::adapter::{
    MemoryAdapter, PostgresAdapter, PostgresOptions, Purging, RedisAdapter, RedisOptions,
    SqliteAdapter, SqliteOptions,
};
use tower_dedup::{BoxError, DedupKey};
use tower_dedup_conformance::{
    HandlerTransaction, RemoteStore, SharedStore, Store, TransactionalStore,
};

use super::postgres::Schema;
use super::proxy::through;
use super::redis::{
    self, Cluster, SentinelSet, command, connection, fresh_prefix, shared_database, with_prefix,
};
use super::sqlite_url;
use super::time_travel::{milliseconds, shift_file, shift_redis, shift_schema};
use super::words::Sql;

/// A bound for a busy machine.
const LATE: Duration = Duration::from_secs(20);

/// A store that several adapters share.
pub trait Place: Store<Adapter: MaintenanceAdapter + Sized> {
    /// Returns an adapter with connections of its own, as another process has.
    fn another(&self) -> impl Future<Output = Arc<Self::Adapter>> + Send;
}

/// A store in the database of the handlers' writes.
pub trait Shared: Place<Adapter: TransactionAdapter> {
    type Database: Sql;

    /// The constraint of a table `effects` by which each id has one row.
    const IS_UNIQUE: &str;

    /// Returns a pool of the handlers.
    fn pool(&self) -> &Pool<Self::Database>;
    /// Returns an adapter over a pool of the handlers, for a busy machine.
    fn over(&self, pool: Pool<Self::Database>) -> Self::Adapter;
}

pub struct Memory(pub Arc<MemoryAdapter>);

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

impl Place for Memory {
    async fn another(&self) -> Arc<MemoryAdapter> {
        self.adapter()
    }
}

impl<S: SharedStore<Adapter: MaintenanceAdapter + Sized>> Place for S {
    async fn another(&self) -> Arc<S::Adapter> {
        S::attach(&self.address()).await
    }
}

/// A file in a folder of its own.
pub struct Sqlite {
    adapter: Arc<SqliteAdapter>,
    pool: SqlitePool,
    dir: TempDir,
}

impl Sqlite {
    /// `pool` is another one on the file of the adapter, or the adapter's own.
    pub async fn with(adapter: SqliteAdapter, pool: SqlitePool, dir: TempDir) -> Self {
        adapter.migrate().await.unwrap();
        Self { adapter: Arc::new(adapter), pool, dir }
    }

    pub fn path(&self) -> PathBuf {
        self.dir.path().join("dedup.db")
    }
}

impl Store for Sqlite {
    type Adapter = SqliteAdapter;

    async fn create() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let adapter = SqliteAdapter::connect(&sqlite_url(dir.path())).await.unwrap();
        let options = SqliteConnectOptions::new().filename(dir.path().join("dedup.db"));
        let options = options.journal_mode(SqliteJournalMode::Wal).busy_timeout(LATE);
        Self::with(adapter, SqlitePool::connect_lazy_with(options), dir).await
    }

    fn adapter(&self) -> Arc<SqliteAdapter> {
        Arc::clone(&self.adapter)
    }

    async fn advance(&self, by: Duration) {
        shift_file(&self.pool, -milliseconds(by)).await;
    }

    async fn set_back(&self, by: Duration) {
        shift_file(&self.pool, milliseconds(by)).await;
    }

    async fn corrupt(&self, key: &DedupKey) {
        let sql = "UPDATE webhook_deliveries SET response_headers = 'x' WHERE id = ?1";
        sqlx::query(sql).bind(key.id()).execute(&self.pool).await.unwrap();
    }
}

impl Shared for Sqlite {
    type Database = SqliteDatabase;

    const IS_UNIQUE: &str = "UNIQUE (id)";

    fn pool(&self) -> &SqlitePool {
        &self.pool
    }

    fn over(&self, pool: SqlitePool) -> SqliteAdapter {
        SqliteAdapter::with_options(pool, SqliteOptions::new().write_lock_timeout(LATE))
    }
}

/// A transaction of a handler.
struct Open<D: Sql>(Transaction<'static, D>);

impl<D: Sql> HandlerTransaction for Open<D> {
    fn complete<'t>(
        &'t mut self,
        completion: &'t Completion,
    ) -> BoxFuture<'t, Result<(), BoxError>> {
        let (sql, parameter) = (completion.sql().to_owned(), completion.parameter().to_owned());
        Box::pin(async move { Ok(D::execute(&mut self.0, sql, Some(parameter)).await?) })
    }

    fn commit(self: Box<Self>) -> BoxFuture<'static, ()> {
        Box::pin(async move { self.0.commit().await.unwrap() })
    }
}

impl TransactionalStore for Sqlite {
    async fn transaction(&self) -> Box<dyn HandlerTransaction> {
        Box::new(Open(self.pool.begin_with("BEGIN IMMEDIATE").await.unwrap()))
    }
}

impl SharedStore for Sqlite {
    fn address(&self) -> String {
        sqlite_url(self.dir.path())
    }

    async fn attach(address: &str) -> Arc<SqliteAdapter> {
        let options = SqliteOptions::new().write_lock_timeout(LATE);
        Arc::new(SqliteAdapter::connect_with(address, options).await.unwrap())
    }
}

/// A schema, named by the options and not by the search path.
pub struct Postgres {
    adapter: Arc<PostgresAdapter>,
    /// Its search path is the schema.
    pool: PgPool,
    pub schema: Schema,
}

pub async fn connect_in(schema: &Schema, options: PostgresOptions) -> PostgresAdapter {
    PostgresAdapter::connect_with(schema.database_url(), options).await.unwrap()
}

impl Postgres {
    /// `connect` makes an adapter with these options.
    pub async fn with(
        options: PostgresOptions,
        connect: impl AsyncFnOnce(&Schema, PostgresOptions) -> PostgresAdapter,
    ) -> Self {
        let schema = Schema::fresh();
        let options = options.schema(schema.name());
        let adapter = connect(&schema, options).await;
        adapter.migrate().await.unwrap();
        let pool = PgPool::connect_lazy(&schema.url()).unwrap();
        Self { adapter: Arc::new(adapter), pool, schema }
    }
}

impl Store for Postgres {
    type Adapter = PostgresAdapter;

    async fn create() -> Self {
        Self::with(PostgresOptions::new(), connect_in).await
    }

    fn adapter(&self) -> Arc<PostgresAdapter> {
        Arc::clone(&self.adapter)
    }

    async fn advance(&self, by: Duration) {
        shift_schema(&self.pool, -milliseconds(by)).await;
    }

    async fn set_back(&self, by: Duration) {
        shift_schema(&self.pool, milliseconds(by)).await;
    }

    async fn hold(&self, key: &DedupKey) -> Box<dyn Any + Send> {
        let mut holder = self.pool.begin().await.unwrap();
        let sql = "UPDATE webhook_deliveries SET version = version + 1 WHERE id = $1";
        sqlx::query(sql).bind(key.id()).execute(&mut *holder).await.unwrap();
        Box::new(holder)
    }

    async fn corrupt(&self, key: &DedupKey) {
        let sql = "UPDATE webhook_deliveries SET response_headers = 'x' WHERE id = $1";
        sqlx::query(sql).bind(key.id()).execute(&self.pool).await.unwrap();
    }
}

impl Shared for Postgres {
    type Database = PostgresDatabase;

    /// It is checked at COMMIT.
    const IS_UNIQUE: &str = "UNIQUE (id) DEFERRABLE INITIALLY DEFERRED";

    fn pool(&self) -> &PgPool {
        &self.pool
    }

    fn over(&self, pool: PgPool) -> PostgresAdapter {
        let options = PostgresOptions::new().statement_timeout(LATE).schema(self.schema.name());
        PostgresAdapter::with_options(pool, options)
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

impl TransactionalStore for Postgres {
    async fn transaction(&self) -> Box<dyn HandlerTransaction> {
        let mut transaction = self.pool.begin().await.unwrap();
        let sql = "CREATE TEMP TABLE effects (id text) ON COMMIT DROP";
        transaction.execute(sql).await.unwrap();
        Box::new(Open(transaction))
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

/// The servers of a Redis store.
pub trait Topology: Send + Sync + 'static {
    /// Returns the URL for the adapter.
    fn url() -> String;

    /// Returns the URLs of the servers that have the keys of an adapter with this URL.
    fn primaries(url: &str) -> Vec<String>;

    fn options() -> RedisOptions {
        patient()
    }
}

/// The bounds are not under test here, and the machine may be busy.
fn patient() -> RedisOptions {
    let bound = Duration::from_secs(10);
    RedisOptions::new().call_timeout(2 * bound).response_timeout(bound).connect_timeout(bound)
}

pub struct OnServer;

impl Topology for OnServer {
    fn url() -> String {
        shared_database()
    }

    fn primaries(url: &str) -> Vec<String> {
        vec![url.to_owned()]
    }
}

pub struct OnSentinel;

impl Topology for OnSentinel {
    fn url() -> String {
        SentinelSet::shared().url()
    }

    fn primaries(_: &str) -> Vec<String> {
        vec![SentinelSet::shared().servers()[0].url()]
    }
}

pub struct OnCluster;

impl Topology for OnCluster {
    fn url() -> String {
        Cluster::shared().url()
    }

    fn primaries(_: &str) -> Vec<String> {
        Cluster::shared().nodes()[..3].iter().map(redis::Server::url).collect()
    }
}

/// Each write is on a replica too when the call returns.
pub struct OnReplicas;

impl Topology for OnReplicas {
    fn url() -> String {
        OnSentinel::url()
    }

    fn primaries(url: &str) -> Vec<String> {
        OnSentinel::primaries(url)
    }

    fn options() -> RedisOptions {
        patient().wait_replicas(1, Duration::from_secs(5))
    }
}

pub type Redis = On<OnServer>;
pub type RedisSentinel = On<OnSentinel>;
pub type RedisCluster = On<OnCluster>;
pub type RedisReplicated = On<OnReplicas>;

/// A prefix of its own on a topology.
pub struct On<T> {
    adapter: Arc<RedisAdapter>,
    url: String,
    pub prefix: String,
    topology: PhantomData<T>,
}

impl<T: Topology> On<T> {
    /// Opens a connection to each server that has keys of the store.
    pub fn connections(&self) -> impl Iterator<Item = ::redis::Connection> {
        T::primaries(&self.url).into_iter().map(|url| connection(&url).unwrap())
    }

    fn shift(&self, by: i64) {
        self.connections().for_each(|mut server| shift_redis(&mut server, &self.prefix, by));
    }
}

impl<T: Topology> Store for On<T> {
    type Adapter = RedisAdapter;

    async fn create() -> Self {
        let (url, prefix) = (T::url(), fresh_prefix());
        let with_prefix = with_prefix(&url, &prefix);
        let adapter = RedisAdapter::connect_with(&with_prefix, T::options()).await.unwrap();
        Self { adapter: Arc::new(adapter), url, prefix, topology: PhantomData }
    }

    fn adapter(&self) -> Arc<RedisAdapter> {
        Arc::clone(&self.adapter)
    }

    async fn advance(&self, by: Duration) {
        self.shift(-milliseconds(by));
    }

    async fn set_back(&self, by: Duration) {
        self.shift(milliseconds(by));
    }

    async fn corrupt(&self, key: &DedupKey) {
        let name = format!("{}:{}:{}", self.prefix, key.namespace(), key.id());
        for mut server in self.connections() {
            // The headers of `lua/prelude.lua`, of a row without a digest and an event type.
            command(&["SETRANGE", &name, "50", "x"]).exec(&mut server).unwrap();
        }
    }
}

impl RemoteStore for Redis {
    fn server(&self) -> (String, u16) {
        let url = redis::shared().trim_start_matches("redis://");
        let (host, port) = url.split('/').next().and_then(|url| url.rsplit_once(':')).unwrap();
        (host.to_owned(), port.parse().unwrap())
    }

    async fn connect(&self, port: u16) -> Arc<RedisAdapter> {
        let database = self.url.split('/').nth(3).unwrap_or_default();
        let url = with_prefix(&format!("redis://127.0.0.1:{port}/{database}"), &self.prefix);
        Arc::new(RedisAdapter::connect_with(&url, patient()).await.unwrap())
    }
}

impl<T: Topology> SharedStore for On<T> {
    const PROCESSES: usize = 8;

    fn address(&self) -> String {
        with_prefix(&self.url, &self.prefix)
    }

    async fn attach(address: &str) -> Arc<RedisAdapter> {
        Arc::new(RedisAdapter::connect_with(address, patient()).await.unwrap())
    }
}
