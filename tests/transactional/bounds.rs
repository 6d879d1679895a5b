//! A transactional delivery holds a connection, so it takes its permit first, and waits for it.

use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use sqlx::postgres::{PgPoolOptions, Postgres};
use sqlx::sqlite::{SqliteConnectOptions, SqlitePoolOptions};
use tokio::sync::Semaphore;
use tower::limit::GlobalConcurrencyLimitLayer;
use tower::{Layer, ServiceBuilder};
use tower_dedup::adapter::inspect::MaintenanceAdapter;
use tower_dedup::adapter::{PostgresAdapter, SqliteAdapter};
use tower_dedup::ledger::Transactional;
use tower_dedup::{DedupLayer, OnInFlight};

use crate::support::postgres::Schema;
use crate::support::{
    Handler, answered, by_header, polled, request, result, send, spawn_send, until,
};

async fn over_a_pool_of(connections: u32, schema: &Schema) -> DedupLayer<Transactional<Postgres>> {
    let pool = PgPoolOptions::new().max_connections(connections);
    let pool = pool.connect(&schema.url()).await.unwrap();
    let adapter = PostgresAdapter::new(pool);
    // Makes the table, which may take longer than a test's `store_timeout`.
    adapter.stats().await.unwrap();
    let layer = DedupLayer::transactional(by_header(), adapter);
    layer.store_timeout(Duration::from_secs(20))
}

/// Handlers never take the last two connections, and a burst is not refused.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn max_running_defaults_to_the_pool_less_two_and_the_rest_waits_for_a_permit() {
    let schema = Schema::fresh();
    let handler = Handler::default();
    handler.hold();
    let layer = over_a_pool_of(5, &schema).await;
    let (handle, service) = (layer.handle(), layer.layer(handler.service()));
    let deliveries: Vec<_> = (0..9)
        .map(|n: u32| {
            let service = service.clone();
            tokio::spawn(async move { send(&service, request(&n.to_string())).await.status() })
        })
        .collect();
    handler.running(3).await;
    assert_eq!((handle.running(), handler.runs()), (3, 3));
    handler.release();
    for delivery in deliveries {
        assert_eq!(delivery.await.unwrap(), StatusCode::OK);
    }
    assert_eq!((handle.running(), handler.runs()), (0, 9));
}

#[tokio::test]
async fn delivery_without_a_permit_within_store_timeout_is_503_and_claims_nothing() {
    let schema = Schema::fresh();
    let handler = Handler::default();
    handler.hold();
    let layer = over_a_pool_of(3, &schema).await.store_timeout(Duration::from_secs(1));
    let (handle, service) = (layer.handle(), layer.layer(handler.service()));
    let first = spawn_send(&service, request("a"));
    handler.running(1).await;
    let second = send(&service, request("b")).await;
    assert_eq!(answered(&second), (503, Some("unavailable")));
    assert_eq!(second.headers()["retry-after"], "30");
    handler.release();
    assert_eq!(first.await.unwrap(), StatusCode::OK);
    handle.drain().await;
    assert_eq!(result(&send(&service, request("b")).await), None, "nothing was claimed");
    assert_eq!(handler.runs(), 2);
}

/// If a client hangs up while its delivery waits for a permit, the delivery leaves the queue. The
/// permit is not lost.
#[tokio::test]
async fn delivery_dropped_while_it_waits_for_a_permit_leaves_nothing_behind() {
    let schema = Schema::fresh();
    let handler = Handler::default();
    handler.hold();
    let layer = over_a_pool_of(3, &schema).await;
    let (handle, service) = (layer.handle(), layer.layer(handler.service()));
    let first = spawn_send(&service, request("a"));
    handler.running(1).await;
    assert!(polled(send(&service, request("b")), 1, false).await.is_none());
    handler.release();
    assert_eq!(first.await.unwrap(), StatusCode::OK);
    handle.drain().await;
    assert_eq!((handle.running(), handler.runs()), (0, 1));
    assert_eq!(result(&send(&service, request("b")).await), None);
}

/// A drain that ended too early would let a handler begin while the user closes the pool.
#[tokio::test]
async fn delivery_that_waits_for_a_permit_is_counted_bounded_and_drained() {
    let schema = Schema::fresh();
    let handler = Handler::default();
    handler.hold();
    let layer = over_a_pool_of(3, &schema).await.max_waiting(1);
    let layer = layer.store_timeout(Duration::from_secs(30));
    let (handle, service) = (layer.handle(), layer.layer(handler.service()));
    let deliver = |id| spawn_send(&service, request(id));
    let first = deliver("a");
    handler.running(1).await;
    let second = deliver("b");
    until(|| handle.waiting() == 1).await;
    assert_eq!(send(&service, request("c")).await.status(), 503);
    handler.release();
    handle.drain().await;
    assert_eq!((handle.running(), handle.waiting(), handler.runs()), (0, 0, 2));
    assert_eq!((first.await.unwrap(), second.await.unwrap()), (StatusCode::OK, StatusCode::OK));
}

/// Other deliveries may hold permits and wait for a place of the limit. So a delivery that waits
/// for a permit must hold no place.
#[tokio::test]
async fn delivery_that_waits_for_a_permit_holds_no_place_in_an_inner_limit() {
    let schema = Schema::fresh();
    let handler = Handler::default();
    handler.hold();
    let layer = over_a_pool_of(3, &schema).await;
    let places = Arc::new(Semaphore::new(2));
    let limit = GlobalConcurrencyLimitLayer::with_semaphore(Arc::clone(&places));
    let service = ServiceBuilder::new().layer(layer).layer(limit).service(handler.service());
    let deliver = |id| spawn_send(&service, request(id));
    let first = deliver("a");
    handler.running(1).await;
    let mut waits = Box::pin(send(&service, request("b")));
    assert!(futures_util::poll!(waits.as_mut()).is_pending());
    assert_eq!(places.available_permits(), 1);
    handler.release();
    assert_eq!(first.await.unwrap(), StatusCode::OK);
    assert_eq!(waits.await.status(), StatusCode::OK);
    assert_eq!(places.available_permits(), 2);
}

#[tokio::test]
async fn bound_of_sqlite_is_the_layers_own_and_a_delivery_waits_for_it_as_well() {
    let dir = tempfile::tempdir().unwrap();
    let options =
        SqliteConnectOptions::new().filename(dir.path().join("app.db")).create_if_missing(true);
    let pool = SqlitePoolOptions::new().connect_with(options).await.unwrap();
    let handler = Handler::default();
    handler.hold();
    let layer = DedupLayer::transactional(by_header(), SqliteAdapter::new(pool))
        .store_timeout(Duration::from_secs(20))
        .on_in_flight(OnInFlight::Reject)
        .max_running(1);
    let (handle, service) = (layer.handle(), layer.layer(handler.service()));
    let deliver = |id| spawn_send(&service, request(id));
    let first = deliver("a");
    handler.running(1).await;
    let second = deliver("b");
    tokio::task::yield_now().await;
    assert_eq!(handle.running(), 1);
    handler.release();
    assert_eq!((first.await.unwrap(), second.await.unwrap()), (StatusCode::OK, StatusCode::OK));
    until(|| handle.running() == 0).await;
    assert_eq!(handler.runs(), 2);
}
