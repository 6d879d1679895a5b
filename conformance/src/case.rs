//! [`Case`]: the store of a case, without its type. So each case is compiled once, for all stores.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use tower_dedup::DedupKey;

use super::store::{HandlerTransaction, Maintained, RemoteStore, Store, Transactional};
use super::trace::{Adapter, Trace, Traced};

/// A store without its type. A case calls only what the stores of its ability have.
pub(super) trait AnyStore: Send + Sync {
    fn adapter(&self) -> Adapter;
    fn advance(&self, by: Duration) -> BoxFuture<'_, ()>;
    fn set_back(&self, by: Duration) -> BoxFuture<'_, ()>;
    fn hold<'a>(&'a self, key: &'a DedupKey) -> BoxFuture<'a, Box<dyn Any + Send>>;
    fn corrupt<'a>(&'a self, key: &'a DedupKey) -> BoxFuture<'a, ()>;

    fn transaction(&self) -> BoxFuture<'_, Box<dyn HandlerTransaction>> {
        panic!("only the cases of `completion` make this call")
    }

    fn server(&self) -> (String, u16) {
        panic!("only the cases of `fence` make this call")
    }

    fn connect(&self, port: u16) -> BoxFuture<'_, Adapter> {
        panic!("only the cases of `fence` make this call, with {port}")
    }
}

/// Declares a wrapper of the stores with this bound.
macro_rules! wrapper {
    ($(#[$doc:meta])+ $name:ident: $bound:ident, $adapter:ident $($more:tt)*) => {
        $(#[$doc])+
        pub(super) struct $name<S>(S);

        impl<S: $bound> $name<S> {
            pub(super) fn of(store: S) -> Box<dyn AnyStore> {
                Box::new(Self(store))
            }
        }

        impl<S: $bound> AnyStore for $name<S> {
            fn adapter(&self) -> Adapter {
                // The adapter may be unsized, and a pointer to it is an adapter, too.
                Adapter::$adapter(Arc::new(self.0.adapter()))
            }

            fn advance(&self, by: Duration) -> BoxFuture<'_, ()> {
                Box::pin(self.0.advance(by))
            }

            fn set_back(&self, by: Duration) -> BoxFuture<'_, ()> {
                Box::pin(self.0.set_back(by))
            }

            fn hold<'a>(&'a self, key: &'a DedupKey) -> BoxFuture<'a, Box<dyn Any + Send>> {
                Box::pin(self.0.hold(key))
            }

            fn corrupt<'a>(&'a self, key: &'a DedupKey) -> BoxFuture<'a, ()> {
                Box::pin(self.0.corrupt(key))
            }

            $($more)*
        }
    };
}

wrapper! {
    /// A store of which only the calls of deliveries are known.
    Claiming: Store, Claiming
}

wrapper! {
    /// A store that can be inspected and purged.
    Maintaining: Maintained, Maintained
}

wrapper! {
    /// A store in which a handler's transaction completes events.
    Transacting: Transactional, Claiming

    fn transaction(&self) -> BoxFuture<'_, Box<dyn HandlerTransaction>> {
        Box::pin(self.0.transaction())
    }
}

wrapper! {
    /// A store behind a network.
    Remote: RemoteStore, Maintained

    fn server(&self) -> (String, u16) {
        self.0.server()
    }

    fn connect(&self, port: u16) -> BoxFuture<'_, Adapter> {
        Box::pin(async move { Adapter::Maintained(Arc::new(self.0.connect(port).await)) })
    }
}

/// The store of one case, which notes the calls.
pub(super) struct Case {
    store: Box<dyn AnyStore>,
    trace: Arc<Trace>,
}

impl Case {
    pub(super) fn new(store: Box<dyn AnyStore>, trace: Arc<Trace>) -> Self {
        Self { store, trace }
    }

    pub(super) fn adapter(&self) -> Arc<Traced> {
        Traced::new(self.store.adapter(), &self.trace)
    }

    pub(super) async fn advance(&self, by: Duration) {
        self.trace.begin(format!("(time passes: {by:?})"));
        self.store.advance(by).await;
    }

    pub(super) async fn set_back(&self, by: Duration) {
        self.trace.begin(format!("(the clock is set back: {by:?})"));
        self.store.set_back(by).await;
    }

    pub(super) async fn hold(&self, key: &DedupKey) -> Box<dyn Any + Send> {
        self.trace.begin(format!("(a transaction holds {})", key.id()));
        self.store.hold(key).await
    }

    pub(super) async fn corrupt(&self, key: &DedupKey) {
        self.trace.begin(format!("(the response of {} is corrupted)", key.id()));
        self.store.corrupt(key).await;
    }

    pub(super) async fn transaction(&self) -> Box<dyn HandlerTransaction> {
        self.store.transaction().await
    }

    pub(super) fn server(&self) -> (String, u16) {
        self.store.server()
    }

    pub(super) async fn connect(&self, port: u16) -> Arc<Traced> {
        Traced::new(self.store.connect(port).await, &self.trace)
    }
}
