//! Every ledger over every store.

use std::convert::Infallible;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use http::{Request, Response};
use sqlx::postgres::PgConnection;
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{ConnectOptions, Connection};
use tower::Service;
use tower_dedup::adapter::inspect::MaintenanceAdapter;
use tower_dedup::adapter::{MemoryAdapter, PostgresAdapter, RedisAdapter, SqliteAdapter};
use tower_dedup::key::KeyPart;
use tower_dedup::ledger::{Lease, OnArrival, Transactional};
use tower_dedup::{
    DedupHandle, DedupLayer, KeyExtractor, OnInFlight, OnMismatch, Replay, ResponseBody,
};

use super::postgres::Schema;
use super::redis::{self, fresh_prefix, with_prefix};
use super::time_travel::{age_file, age_schema, milliseconds, shift_redis};
use super::{Body, sqlite_url};

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

/// A deduplicated service.
pub(crate) trait Outer:
    Service<
        Request<Body>,
        Response = Response<ResponseBody<Body>>,
        Error = Infallible,
        Future: Send,
    > + Clone
    + Send
    + 'static
{
}

impl<S> Outer for S where
    S: Service<
            Request<Body>,
            Response = Response<ResponseBody<Body>>,
            Error = Infallible,
            Future: Send,
        > + Clone
        + Send
        + 'static
{
}

/// A layer under any ledger.
pub(crate) trait AnyLayer: Sized {
    fn compare_payload(self, part: KeyPart, on_mismatch: OnMismatch) -> Self;
    fn on_in_flight(self, policy: OnInFlight) -> Self;
    fn retention(self, retention: Duration) -> Self;
    fn handle(&self) -> DedupHandle;
    fn wrap<S: Inner>(&self, inner: S) -> impl Outer;
}

/// A layer whose ledger stores responses.
pub(crate) trait Replaying: AnyLayer {
    fn replay(self, replay: Replay) -> Self;
}

macro_rules! any_layer {
    ($($ledger:ty),+) => {$(
        impl AnyLayer for DedupLayer<$ledger> {
            fn compare_payload(self, part: KeyPart, on_mismatch: OnMismatch) -> Self {
                self.compare_payload(part, on_mismatch)
            }

            fn on_in_flight(self, policy: OnInFlight) -> Self {
                self.on_in_flight(policy)
            }

            fn retention(self, retention: Duration) -> Self {
                self.retention(retention)
            }

            fn handle(&self) -> DedupHandle {
                self.handle()
            }

            fn wrap<S: Inner>(&self, inner: S) -> impl Outer {
                tower::Layer::layer(self, inner)
            }
        }
    )+};
}

any_layer!(Lease, OnArrival, Transactional<sqlx::Sqlite>, Transactional<sqlx::Postgres>);

macro_rules! replaying {
    ($($ledger:ty),+) => {$(
        impl Replaying for DedupLayer<$ledger> {
            fn replay(self, replay: Replay) -> Self {
                self.replay(replay)
            }
        }
    )+};
}

replaying!(Lease, Transactional<sqlx::Sqlite>, Transactional<sqlx::Postgres>);

/// A ledger over a fresh store.
pub(crate) trait Setup: Sized {
    type Layer: AnyLayer;

    fn create() -> impl Future<Output = Self>;
    /// Returns a layer over the same store, as another process has.
    fn layer(&self, key: KeyExtractor) -> impl Future<Output = Self::Layer>;
}

/// A ledger over a store that operators see into.
pub(crate) trait Operated: Setup {
    /// Whether a running delivery holds the whole store against operators.
    const HOLDS_THE_STORE: bool = false;

    /// Returns an adapter with connections of its own, as the command of an operator has.
    fn operator(&self) -> impl Future<Output = Arc<dyn MaintenanceAdapter>>;

    /// Moves the times of all rows back.
    fn age(&self, by: Duration) -> impl Future<Output = ()>;
}

macro_rules! operated {
    ($($setup:ty: |$this:ident| $store:expr, $holds:literal;)+) => {$(
        impl Operated for $setup {
            const HOLDS_THE_STORE: bool = $holds;

            async fn operator(&self) -> Arc<dyn MaintenanceAdapter> {
                let $this = self;
                Arc::new($store.adapter().await)
            }

            async fn age(&self, by: Duration) {
                let $this = self;
                $store.age_rows(by).await;
            }
        }
    )+};
}

operated!(
    OnSqlite: |setup| setup, false;
    OnPostgres: |setup| setup, false;
    InSqlite: |setup| setup.0, true;
    InPostgres: |setup| setup.0, false;
    ArrivedInSqlite: |setup| setup.0, false;
    ArrivedInPostgres: |setup| setup.0, false;
    OnRedis: |setup| setup, false;
    ArrivedInRedis: |setup| setup.0, false;
);

pub(crate) struct OnMemory(Arc<MemoryAdapter>);

impl Setup for OnMemory {
    type Layer = DedupLayer;

    async fn create() -> Self {
        Self(Arc::new(MemoryAdapter::new()))
    }

    async fn layer(&self, key: KeyExtractor) -> Self::Layer {
        DedupLayer::new(key, Arc::clone(&self.0))
    }
}

pub(crate) struct OnSqlite(tempfile::TempDir);

impl OnSqlite {
    async fn adapter(&self) -> SqliteAdapter {
        SqliteAdapter::connect(&sqlite_url(self.0.path())).await.unwrap()
    }

    async fn age_rows(&self, by: Duration) {
        let options = SqliteConnectOptions::new().filename(self.0.path().join("dedup.db"));
        age_file(&mut options.connect().await.unwrap(), by).await;
    }
}

impl Setup for OnSqlite {
    type Layer = DedupLayer;

    async fn create() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    async fn layer(&self, key: KeyExtractor) -> Self::Layer {
        DedupLayer::new(key, self.adapter().await)
    }
}

pub(crate) struct InSqlite(OnSqlite);

impl Setup for InSqlite {
    type Layer = DedupLayer<Transactional<sqlx::Sqlite>>;

    async fn create() -> Self {
        Self(OnSqlite::create().await)
    }

    async fn layer(&self, key: KeyExtractor) -> Self::Layer {
        DedupLayer::transactional(key, self.0.adapter().await)
    }
}

pub(crate) struct OnPostgres(Schema);

impl OnPostgres {
    async fn adapter(&self) -> PostgresAdapter {
        PostgresAdapter::connect(&self.0.url()).await.unwrap()
    }

    async fn age_rows(&self, by: Duration) {
        let mut connection = PgConnection::connect(&self.0.url()).await.unwrap();
        age_schema(&mut connection, self.0.name(), by).await;
    }
}

impl Setup for OnPostgres {
    type Layer = DedupLayer;

    async fn create() -> Self {
        Self(Schema::fresh())
    }

    async fn layer(&self, key: KeyExtractor) -> Self::Layer {
        DedupLayer::new(key, self.adapter().await)
    }
}

pub(crate) struct InPostgres(OnPostgres);

impl Setup for InPostgres {
    type Layer = DedupLayer<Transactional<sqlx::Postgres>>;

    async fn create() -> Self {
        Self(OnPostgres::create().await)
    }

    async fn layer(&self, key: KeyExtractor) -> Self::Layer {
        DedupLayer::transactional(key, self.0.adapter().await)
    }
}

/// A prefix of the shared server.
pub(crate) struct OnRedis(String);

impl OnRedis {
    async fn adapter(&self) -> RedisAdapter {
        RedisAdapter::connect(&with_prefix(redis::shared(), &self.0)).await.unwrap()
    }

    async fn age_rows(&self, by: Duration) {
        let mut connection = redis::connection(redis::shared()).unwrap();
        shift_redis(&mut connection, &self.0, -milliseconds(by));
    }
}

impl Setup for OnRedis {
    type Layer = DedupLayer;

    async fn create() -> Self {
        Self(fresh_prefix())
    }

    async fn layer(&self, key: KeyExtractor) -> Self::Layer {
        DedupLayer::new(key, self.adapter().await)
    }
}

/// Under `on_arrival`.
pub(crate) struct ArrivedIn<S>(S);

impl Setup for ArrivedIn<OnMemory> {
    type Layer = DedupLayer<OnArrival>;

    async fn create() -> Self {
        Self(OnMemory::create().await)
    }

    async fn layer(&self, key: KeyExtractor) -> Self::Layer {
        DedupLayer::on_arrival(key, Arc::clone(&self.0.0))
    }
}

impl Setup for ArrivedIn<OnSqlite> {
    type Layer = DedupLayer<OnArrival>;

    async fn create() -> Self {
        Self(OnSqlite::create().await)
    }

    async fn layer(&self, key: KeyExtractor) -> Self::Layer {
        DedupLayer::on_arrival(key, self.0.adapter().await)
    }
}

impl Setup for ArrivedIn<OnPostgres> {
    type Layer = DedupLayer<OnArrival>;

    async fn create() -> Self {
        Self(OnPostgres::create().await)
    }

    async fn layer(&self, key: KeyExtractor) -> Self::Layer {
        DedupLayer::on_arrival(key, self.0.adapter().await)
    }
}

impl Setup for ArrivedIn<OnRedis> {
    type Layer = DedupLayer<OnArrival>;

    async fn create() -> Self {
        Self(OnRedis::create().await)
    }

    async fn layer(&self, key: KeyExtractor) -> Self::Layer {
        DedupLayer::on_arrival(key, self.0.adapter().await)
    }
}

pub(crate) type ArrivedInMemory = ArrivedIn<OnMemory>;
pub(crate) type ArrivedInSqlite = ArrivedIn<OnSqlite>;
pub(crate) type ArrivedInPostgres = ArrivedIn<OnPostgres>;
pub(crate) type ArrivedInRedis = ArrivedIn<OnRedis>;

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
