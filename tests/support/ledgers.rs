//! Every ledger over every store.

use std::convert::Infallible;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use http::{Request, Response};
use sqlx::postgres::{PgConnection, PgPool, Postgres};
use sqlx::sqlite::{Sqlite, SqliteConnectOptions, SqliteJournalMode, SqlitePool};
use sqlx::{ConnectOptions, Connection, Pool};
use tower::Service;
use tower_dedup::adapter::inspect::MaintenanceAdapter;
use tower_dedup::adapter::{
    MemoryAdapter, PostgresAdapter, RedisAdapter, SqliteAdapter, SqliteOptions, TransactionAdapter,
};
use tower_dedup::ledger::{Lease, Ledger, OnArrival, Transactional};
use tower_dedup::{DedupLayer, KeyExtractor, Replay};

use super::postgres::Schema;
use super::redis::{self, fresh_prefix, with_prefix};
use super::time_travel::{age_file, age_schema, milliseconds, shift_redis};
use super::words::Sql;
use super::{Body, sqlite_url};

/// A bound for a busy machine.
const LATE: Duration = Duration::from_secs(20);

/// A service that any layer can wrap.
pub(crate) trait Inner<B = Body>:
    Service<Request<B>, Response = Response<Body>, Error = Infallible, Future: Send>
    + Clone
    + Send
    + Sync
    + 'static
{
}

impl<S, B> Inner<B> for S where
    S: Service<Request<B>, Response = Response<Body>, Error = Infallible, Future: Send>
        + Clone
        + Send
        + Sync
        + 'static
{
}

/// A ledger that stores responses.
pub(crate) trait Replaying: Ledger + Sized {
    fn replaying(layer: DedupLayer<Self>) -> DedupLayer<Self>;
}

macro_rules! replaying {
    ($($ledger:ty),+) => {$(
        impl Replaying for $ledger {
            fn replaying(layer: DedupLayer<Self>) -> DedupLayer<Self> {
                layer.replay(Replay::new())
            }
        }
    )+};
}

replaying!(Lease, Transactional);

/// A fresh store of a test.
pub(crate) trait Place: Sized {
    type Adapter: MaintenanceAdapter;

    fn fresh() -> impl Future<Output = Self>;
    /// Returns an adapter with connections of its own, as another process has.
    fn adapter(&self) -> impl Future<Output = Self::Adapter>;
    /// Moves the times of all rows back.
    fn age_rows(&self, by: Duration) -> impl Future<Output = ()>;
}

pub(crate) struct OnMemory(Arc<MemoryAdapter>);

impl Place for OnMemory {
    type Adapter = Arc<MemoryAdapter>;

    async fn fresh() -> Self {
        Self(Arc::new(MemoryAdapter::new()))
    }

    async fn adapter(&self) -> Self::Adapter {
        Arc::clone(&self.0)
    }

    async fn age_rows(&self, by: Duration) {
        self.0.advance(by);
    }
}

pub(crate) struct OnSqlite(tempfile::TempDir);

impl Place for OnSqlite {
    type Adapter = SqliteAdapter;

    async fn fresh() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    /// Returns an adapter that waits for the file for as long as a busy machine needs.
    async fn adapter(&self) -> SqliteAdapter {
        let options = SqliteOptions::new().write_lock_timeout(LATE);
        SqliteAdapter::connect_with(&sqlite_url(self.0.path()), options).await.unwrap()
    }

    async fn age_rows(&self, by: Duration) {
        let options = SqliteConnectOptions::new().filename(self.0.path().join("dedup.db"));
        age_file(&mut options.connect().await.unwrap(), by).await;
    }
}

pub(crate) struct OnPostgres(Schema);

impl Place for OnPostgres {
    type Adapter = PostgresAdapter;

    async fn fresh() -> Self {
        Self(Schema::fresh())
    }

    async fn adapter(&self) -> PostgresAdapter {
        PostgresAdapter::connect(&self.0.url()).await.unwrap()
    }

    async fn age_rows(&self, by: Duration) {
        let mut connection = PgConnection::connect(&self.0.url()).await.unwrap();
        age_schema(&mut connection, self.0.name(), by).await;
    }
}

/// A prefix of the shared server.
pub(crate) struct OnRedis(String);

impl Place for OnRedis {
    type Adapter = RedisAdapter;

    async fn fresh() -> Self {
        Self(fresh_prefix())
    }

    async fn adapter(&self) -> RedisAdapter {
        RedisAdapter::connect(&with_prefix(redis::shared(), &self.0)).await.unwrap()
    }

    async fn age_rows(&self, by: Duration) {
        let mut connection = redis::connection(redis::shared()).unwrap();
        shift_redis(&mut connection, &self.0, -milliseconds(by));
    }
}

/// A store in the database of the handlers' writes.
pub(crate) trait Shared: Place<Adapter: TransactionAdapter> {
    type Database: Sql;

    /// Returns a pool of the handlers.
    fn pool(&self) -> impl Future<Output = Pool<Self::Database>>;
}

impl Shared for OnSqlite {
    type Database = Sqlite;

    async fn pool(&self) -> SqlitePool {
        let options = SqliteConnectOptions::new().filename(self.0.path().join("dedup.db"));
        let options = options.create_if_missing(true).journal_mode(SqliteJournalMode::Wal);
        SqlitePool::connect_with(options.busy_timeout(LATE)).await.unwrap()
    }
}

impl Shared for OnPostgres {
    type Database = Postgres;

    async fn pool(&self) -> PgPool {
        PgPool::connect(&self.0.url()).await.unwrap()
    }
}

/// A ledger over a fresh store. A store by itself is under a lease.
pub(crate) trait Setup: Sized {
    type Ledger: Ledger;
    type Place: Place;

    fn over(place: Self::Place) -> Self;
    fn place(&self) -> &Self::Place;
    /// Returns a layer over the same store, as another process has.
    fn layer(&self, key: KeyExtractor) -> impl Future<Output = DedupLayer<Self::Ledger>>;

    async fn create() -> Self {
        Self::over(Self::Place::fresh().await)
    }

    /// Returns an adapter with connections of its own, as the command of an operator has.
    async fn operator(&self) -> Arc<dyn MaintenanceAdapter> {
        Arc::new(self.place().adapter().await)
    }

    async fn age(&self, by: Duration) {
        self.place().age_rows(by).await;
    }
}

impl<P: Place> Setup for P {
    type Ledger = Lease;
    type Place = P;

    fn over(place: P) -> Self {
        place
    }

    fn place(&self) -> &P {
        self
    }

    async fn layer(&self, key: KeyExtractor) -> DedupLayer {
        DedupLayer::new(key, self.adapter().await)
    }
}

/// Under `on_arrival`.
pub(crate) struct ArrivedIn<P>(P);

impl<P: Place> Setup for ArrivedIn<P> {
    type Ledger = OnArrival;
    type Place = P;

    fn over(place: P) -> Self {
        Self(place)
    }

    fn place(&self) -> &P {
        &self.0
    }

    async fn layer(&self, key: KeyExtractor) -> DedupLayer<OnArrival> {
        DedupLayer::on_arrival(key, self.0.adapter().await)
    }
}

/// Under `transactional`.
pub(crate) struct In<P>(P);

impl<P: Place<Adapter: TransactionAdapter>> Setup for In<P> {
    type Ledger = Transactional;
    type Place = P;

    fn over(place: P) -> Self {
        Self(place)
    }

    fn place(&self) -> &P {
        &self.0
    }

    async fn layer(&self, key: KeyExtractor) -> DedupLayer<Self::Ledger> {
        // A reply after the lease is a 503: a busy machine claims 4,096 keys for longer than 10 s.
        DedupLayer::transactional(key, self.0.adapter().await).lease(Duration::from_secs(60))
    }
}

pub(crate) type InSqlite = In<OnSqlite>;
pub(crate) type InPostgres = In<OnPostgres>;
pub(crate) type ArrivedInMemory = ArrivedIn<OnMemory>;
pub(crate) type ArrivedInSqlite = ArrivedIn<OnSqlite>;
pub(crate) type ArrivedInPostgres = ArrivedIn<OnPostgres>;

/// One `#[tokio::test]` for every ledger and case, named after both.
#[macro_export]
macro_rules! on_ledgers {
    ([$($name:ident = $setup:ident),+ $(,)?], $($case:ident),+ $(,)?) => {
        $crate::on_ledgers!(@ [$($name $setup)+] [$($case)+]);
    };
    (@ [$($name:ident $setup:ident)+] $cases:tt) => {
        $($crate::on_ledgers!(@one $name $setup $cases);)+
    };
    (@one $name:ident $setup:ident [$($case:ident)+]) => {
        mod $name {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $case() {
                use $crate::support::ledgers::{Setup, $setup};
                super::$case($setup::create().await).await;
            })+
        }
    };
}
