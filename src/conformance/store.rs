//! The stores under test, and the runtime that a case runs on.

use std::any::Any;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use crate::adapter::contract::DedupAdapter;
use crate::adapter::inspect::MaintenanceAdapter;
use crate::key::DedupKey;

/// A store under test.
pub trait Store: Sized + Send + Sync + 'static {
    /// The adapter under test. A `dyn` adapter is one too.
    type Adapter: DedupAdapter + ?Sized;

    /// Makes a fresh, empty store. Its `Drop` removes its files, tables and servers.
    fn create() -> impl Future<Output = Self> + Send;

    /// Returns a handle to the store.
    fn adapter(&self) -> Arc<Self::Adapter>;

    /// Lets this much time pass in the store: moves its clock forward, or the stored times back.
    /// Sleeps only if there is no other way.
    fn advance(&self, by: Duration) -> impl Future<Output = ()> + Send;

    /// Sets the store's clock back by this much, or moves the stored times forward.
    fn set_back(&self, by: Duration) -> impl Future<Output = ()> + Send;

    /// Holds the row of this key, as an open transaction does that has written it, until the returned value is dropped.
    /// Only [`held_row_conformance_suite!`](crate::held_row_conformance_suite) calls it. By default it panics: the
    /// transactions of the store hold no single row.
    fn hold(&self, key: &DedupKey) -> impl Future<Output = Box<dyn Any + Send>> + Send {
        let id = key.id().to_owned();
        async move { panic!("no transaction can hold the row of {id} alone") }
    }
}

/// A store that several processes share.
pub trait SharedStore: Store {
    /// How many processes race for one store.
    const PROCESSES: usize = 2;

    /// Returns what another process needs to [`attach`](Self::attach).
    fn address(&self) -> String;

    /// Attaches to the store at this address, in another process.
    fn attach(address: &str) -> impl Future<Output = Arc<Self::Adapter>> + Send;
}

/// A store whose adapter can be inspected and purged.
pub(super) trait Maintained: Store<Adapter: MaintenanceAdapter> {}

impl<S: Store<Adapter: MaintenanceAdapter>> Maintained for S {}

pub(super) fn run<S: Store, F: Future<Output = ()>>(case: impl FnOnce(S) -> F) {
    runtime().block_on(async { case(S::create().await).await });
}

pub(super) fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(4)
        .enable_all()
        .build()
        .unwrap_or_else(|error| panic!("no runtime: {error}"))
}
