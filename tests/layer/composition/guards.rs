//! Compile-time guards: `Send`, `Sync`, `Clone`, `Debug` and dyn-compatibility of public types.

use std::convert::Infallible;
use std::sync::Arc;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use tower::util::{BoxCloneService, BoxCloneSyncService};
use tower_dedup::adapter::contract::DedupAdapter;
use tower_dedup::adapter::maintenance::MaintenanceAdapter;
use tower_dedup::adapter::{MemoryAdapter, SqliteAdapter};
use tower_dedup::key::KeyPart;
use tower_dedup::ledger::{Lease, OnArrival};
use tower_dedup::{
    ConfigError, Dedup, DedupAnswer, DedupHandle, DedupKey, DedupLayer, Delivery, KeyError,
    KeyExtractor, ResponseBody, ResponseFuture, StoreError, Verified,
};

fn is_send<T: Send + 'static>() {}
fn is_shared<T: Send + Sync + ?Sized + 'static>() {}
fn is_cloned<T: Clone + Send + Sync + 'static>() {}
fn is_error<T: std::error::Error + Send + Sync + 'static>() {}
fn is_adapter<T: DedupAdapter + ?Sized>() {}
fn is_maintained<T: MaintenanceAdapter>() {}

/// A body that is `Send` and not `Sync`, as axum's body is.
type Unsync = axum::body::Body;

type Erased = Lease;

/// `Clone` and `Send`, and not `Sync`.
type Inner = BoxCloneService<Request<Full<Bytes>>, Response<Unsync>, Infallible>;
type SyncInner = BoxCloneSyncService<Request<Full<Bytes>>, Response<Unsync>, Infallible>;

#[test]
fn types_are_as_shareable_as_promised() {
    is_cloned::<DedupLayer<Erased>>();
    is_cloned::<DedupLayer<OnArrival>>();
    is_cloned::<DedupLayer<OnArrival, Unsync>>();
    is_cloned::<Dedup<SyncInner, Erased>>();
    is_cloned::<Dedup<SyncInner, Erased, Unsync>>();
    is_send::<Dedup<Inner, Erased>>();
    is_send::<ResponseFuture<Inner, Erased, Full<Bytes>, Unsync, Full<Bytes>>>();
    is_send::<ResponseFuture<Inner, Erased, Full<Bytes>, hyper::body::Incoming, Full<Bytes>>>();
    is_send::<ResponseBody<Unsync>>();
    is_shared::<ResponseBody<Full<Bytes>>>();
    is_cloned::<DedupHandle>();
    is_cloned::<Delivery>();
    is_cloned::<DedupKey>();
    is_cloned::<KeyExtractor>();
    is_cloned::<KeyPart>();
    is_cloned::<DedupAnswer>();
    is_cloned::<Verified>();
    is_shared::<MemoryAdapter>();
    is_shared::<SqliteAdapter>();
    is_error::<StoreError>();
    is_error::<KeyError>();
    is_error::<ConfigError>();
}

#[test]
fn erased_adapter_is_an_adapter() {
    is_shared::<dyn MaintenanceAdapter>();
    is_adapter::<Arc<dyn MaintenanceAdapter>>();
    is_maintained::<Arc<dyn MaintenanceAdapter>>();
    is_adapter::<dyn MaintenanceAdapter>();
    is_adapter::<Arc<Arc<MemoryAdapter>>>();
    let _: fn(MemoryAdapter) -> Arc<dyn MaintenanceAdapter> = |adapter| Arc::new(adapter);
    let _: fn(SqliteAdapter) -> Box<dyn MaintenanceAdapter> = |adapter| Box::new(adapter);
    let _: fn(Arc<dyn MaintenanceAdapter>) -> Arc<dyn DedupAdapter> = |adapter| adapter;
}
