//! The stores under test, and the runtime that a case runs on.

use std::any::Any;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use tower_dedup::adapter::contract::{Completion, DedupAdapter};
use tower_dedup::adapter::maintenance::MaintenanceAdapter;
use tower_dedup::{BoxError, DedupKey};

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
    /// Only the cases of `held_rows` call it. By default it panics: the transactions of the store hold no single row.
    fn hold(&self, key: &DedupKey) -> impl Future<Output = Box<dyn Any + Send>> + Send {
        let id = key.id().to_owned();
        async move { panic!("no transaction can hold the row of {id} alone") }
    }

    /// Makes the stored response of this complete key unreadable, as a fault or an older program may leave it.
    /// Only the cases of `corrupt_data` call it. By default it panics.
    fn corrupt(&self, key: &DedupKey) -> impl Future<Output = ()> + Send {
        let id = key.id().to_owned();
        async move { panic!("the test cannot write the row of {id}") }
    }
}

/// A store that its adapters reach over TCP, for the ability `fence`: the suite puts a proxy in front of its server, and
/// holds messages back.
pub trait RemoteStore: Store<Adapter: MaintenanceAdapter> {
    /// Returns the host and the port of the server.
    fn server(&self) -> (String, u16);

    /// Connects another adapter to this store, by this port of `127.0.0.1` in place of the server's. Without TLS, and
    /// with bounds of its calls of 10 s or more: the suite holds a message for as long as a few calls take.
    fn connect(&self, port: u16) -> impl Future<Output = Arc<Self::Adapter>> + Send;
}

/// A store with [`completion`](tower_dedup::adapter::contract::Abilities::completion).
pub trait TransactionalStore: Store {
    /// Begins a transaction in the database of the store, and writes something in it.
    fn transaction(&self) -> impl Future<Output = Box<dyn HandlerTransaction>> + Send;
}

/// A transaction as a handler has one. Dropped, it is rolled back.
pub trait HandlerTransaction: Send {
    /// Executes the statement of a completion with its parameter.
    ///
    /// # Errors
    ///
    /// The errors of the database.
    fn complete<'t>(
        &'t mut self,
        completion: &'t Completion,
    ) -> BoxFuture<'t, Result<(), BoxError>>;

    /// Commits.
    fn commit(self: Box<Self>) -> BoxFuture<'static, ()>;
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
pub trait Maintained: Store<Adapter: MaintenanceAdapter> {}

impl<S: Store<Adapter: MaintenanceAdapter>> Maintained for S {}

pub(super) fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(4)
        .enable_all()
        .build()
        .unwrap_or_else(|error| panic!("no runtime: {error}"))
}
