//! Every ledger over every store.

use std::convert::Infallible;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use http::{Request, Response};
use tower::Service;
use tower_dedup::adapter::contract::TransactionAdapter;
use tower_dedup::adapter::maintenance::MaintenanceAdapter;
use tower_dedup::ledger::{Lease, Ledger, OnArrival, Transactional};
use tower_dedup::{DedupLayer, KeyExtractor, Replay};
use tower_dedup_conformance::Store;

use super::Body;
pub use super::places::{
    Memory as OnMemory, Place, Postgres as OnPostgres, Redis as OnRedis, Shared, Sqlite as OnSqlite,
};

/// A service that any layer can wrap.
pub trait Inner<B = Body>:
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
pub trait Replaying: Ledger + Sized {
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

/// A ledger over a fresh store. A store by itself is under a lease.
pub trait Setup: Sized {
    type Ledger: Ledger;
    type Place: Place;

    fn over(place: Self::Place) -> Self;
    fn place(&self) -> &Self::Place;
    /// Returns a layer over the same store, as another process has.
    fn layer(&self, key: KeyExtractor) -> impl Future<Output = DedupLayer<Self::Ledger>>;

    async fn create() -> Self {
        Self::over(<Self::Place as Store>::create().await)
    }

    /// Returns an adapter with connections of its own, as the command of an operator has.
    async fn operator(&self) -> Arc<dyn MaintenanceAdapter> {
        self.place().another().await
    }

    async fn age(&self, by: Duration) {
        self.place().advance(by).await;
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
        DedupLayer::new(key, self.another().await)
    }
}

/// Under `on_arrival`.
pub struct ArrivedIn<P>(P);

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
        DedupLayer::on_arrival(key, self.0.another().await)
    }
}

/// Under `transactional`.
pub struct In<P>(P);

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
        DedupLayer::transactional(key, self.0.another().await).lease(Duration::from_secs(60))
    }
}

pub type InSqlite = In<OnSqlite>;
pub type InPostgres = In<OnPostgres>;
pub type ArrivedInMemory = ArrivedIn<OnMemory>;
pub type ArrivedInSqlite = ArrivedIn<OnSqlite>;

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
                use $crate::ledgers::{Setup, $setup};
                super::$case($setup::create().await).await;
            })+
        }
    };
}
