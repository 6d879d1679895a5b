//! A request without a key (a handshake, a missing key that passes through) has a transaction too, so one
//! handler serves deliveries and handshakes.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{FromRequestParts, Request};
use axum::http::StatusCode;
use axum::response::Response;
use axum::routing::post;
use sqlx::postgres::Postgres;
use tower::ServiceExt;
use tower_dedup::adapter::inspect::MaintenanceAdapter;
use tower_dedup::ledger::Transactional;
use tower_dedup::{DedupHandle, DedupLayer, DedupTx, KeyExtractor, TxHandle, TxUnavailable};

use super::fixture::{CONNECTIONS, Db, Pg, World, app, handle, on_both, send};
use crate::support::{answered, by_header, rows};

on_both!(
    one_handler_serves_deliveries_and_handshakes,
    failed_handshake_is_rolled_back,
    handshake_whose_handler_ends_its_transaction_is_500,
    handler_that_borrows_nothing_needs_no_store,
    transaction_is_opened_once_and_after_a_dropped_call_again,
    nested_layers_open_one_transaction,
);

fn keys() -> KeyExtractor {
    by_header().bypass_when(|request| request.headers().contains_key("ping"))
}

fn layer<D: Db>(db: &D) -> DedupLayer<Transactional<D::Database>> {
    DedupLayer::transactional(keys(), db.adapter()).store_timeout(Duration::from_secs(20))
}

async fn ping(app: &Router, script: &str) -> Response {
    let request = Request::post("/hook").header("ping", "1");
    app.clone().oneshot(request.body(Body::from(script.to_owned())).unwrap()).await.unwrap()
}

/// Waits until no transaction of a handshake is open: its rollback may still run.
async fn ends(handle: &DedupHandle) {
    tokio::time::timeout(Duration::from_secs(20), handle.drain()).await.unwrap();
}

async fn one_handler_serves_deliveries_and_handshakes<D: Db>() {
    let (db, world) = (D::create().await, World::default());
    let app = app::<D>(layer(&db), &world);
    assert_eq!(answered(&ping(&app, "insert").await), (200, None));
    assert_eq!(db.effects().await, ["ping"]);
    assert_eq!(rows(&db.adapter()).await, 0, "a handshake leaves no key");
    assert_eq!(answered(&send(&app, "a", "insert").await), (200, None));
    assert_eq!(answered(&send(&app, "a", "insert").await), (200, Some("duplicate")));
    assert_eq!(db.effects().await, ["a", "ping"]);
    // A handshake is never a duplicate.
    assert_eq!(answered(&ping(&app, "more").await), (200, None));
    assert_eq!(db.effects().await, ["a", "ping", "ping, more"]);
    assert_eq!(answered(&ping(&app, "500").await), (500, None));
    assert_eq!(world.runs(), 4);
}

async fn failed_handshake_is_rolled_back<D: Db>() {
    let (db, world) = (D::create().await, World::default());
    let layer = layer(&db);
    let (handle, app) = (layer.handle(), app::<D>(layer, &world));
    for _ in 0..2 * CONNECTIONS {
        assert_eq!(answered(&ping(&app, "insert 500").await), (500, None));
        assert_eq!(answered(&ping(&app, "insert rollback 404").await), (404, None));
        let panics = app.clone();
        let panicked = tokio::spawn(async move { ping(&panics, "insert panic").await }).await;
        assert!(panicked.unwrap_err().is_panic());
    }
    ends(&handle).await;
    assert!(db.effects().await.is_empty());
    assert_eq!(ping(&app, "insert").await.status(), 200);
    assert_eq!(db.effects().await, ["ping"]);
}

/// The same mistakes as in a delivery: never a 2xx for writes that are not committed.
async fn handshake_whose_handler_ends_its_transaction_is_500<D: Db>() {
    let (db, world) = (D::create().await, World::default());
    let app = app::<D>(layer(&db), &world);
    for script in ["rollback", "insert rollback", "insert rollback begin insert", "rollback begin"]
    {
        for _ in 0..2 * CONNECTIONS {
            let response = ping(&app, script).await;
            assert_eq!(answered(&response), (500, Some("uncommitted")), "{script}");
            assert!(db.effects().await.is_empty(), "{script}");
        }
    }
    for script in ["commit", "commit begin", "commit begin more"] {
        assert_eq!(answered(&ping(&app, script).await), (500, Some("uncommitted")), "{script}");
        assert!(db.effects().await.is_empty(), "{script}");
    }
    // Postgres: aborted. SQLite: the statement is undone, and the rest commits.
    let ignored = ping(&app, "insert broken").await;
    match (answered(&ignored), db.effects().await.is_empty()) {
        ((200, None), false) | ((500, Some("uncommitted")), true) => {}
        other => panic!("{other:?}"),
    }
    assert_eq!(send(&app, "a", "insert").await.status(), 200);
}

async fn handler_that_borrows_nothing_needs_no_store<D: Db>() {
    let db = D::create().await;
    let adapter = db.adapter();
    let layer = DedupLayer::transactional(keys(), adapter.clone());
    let optional = async |tx: Option<DedupTx<D::Database>>| tx.is_some().to_string();
    let app = Router::new()
        .route("/hook", post(async || "pong").layer(layer.clone()))
        .route("/tx", post(async |_: DedupTx<D::Database>| "pong").layer(layer.clone()))
        .route("/optional", post(optional).layer(layer));
    adapter.close().await;
    assert_eq!(ping(&app, "").await.status(), 200);
    // Whoever borrows gets 503, because the store failed. The layer's header is for its own answers.
    for path in ["/tx", "/optional"] {
        let request = Request::post(path).header("ping", "1").body(Body::empty()).unwrap();
        let response = app.clone().oneshot(request).await.unwrap();
        assert_eq!(answered(&response), (503, None), "{path}");
    }
}

async fn transaction_is_opened_once_and_after_a_dropped_call_again<D: Db>() {
    let db = D::create().await;
    let seen: Arc<std::sync::Mutex<Option<TxHandle<D::Database>>>> = Arc::default();
    let store = Arc::clone(&seen);
    let handler = move |request: Request| {
        let store = Arc::clone(&store);
        async move {
            let (mut head, _) = request.into_parts();
            let handle = head.extensions.get::<TxHandle<D::Database>>().unwrap().clone();
            let mut opening = Box::pin(handle.lend());
            assert!(futures_util::poll!(opening.as_mut()).is_pending());
            assert!(matches!(handle.lend().await, Err(TxUnavailable::Lent)));
            drop(opening);
            let tx = DedupTx::<D::Database>::from_request_parts(&mut head, &()).await;
            let mut tx = tx.unwrap();
            D::run(&mut tx, "INSERT INTO effects (id) VALUES ('x')".to_owned()).await.unwrap();
            drop(tx);
            // The same transaction.
            let mut again = handle.lend().await.unwrap();
            D::run(&mut again, "INSERT INTO effects (id) VALUES ('y')".to_owned()).await.unwrap();
            *store.lock().unwrap() = Some(handle);
            StatusCode::OK
        }
    };
    let app = Router::new().route("/hook", post(handler)).layer(layer(&db));
    assert_eq!(answered(&ping(&app, "").await), (200, None));
    assert_eq!(db.effects().await, ["x", "y"]);
    let handle = seen.lock().unwrap().take().unwrap();
    assert!(matches!(handle.lend().await, Err(TxUnavailable::Closed)));
}

/// With two transactions, the inner layer would wait for the outer one's permit and write lock.
async fn nested_layers_open_one_transaction<D: Db>() {
    let (db, world) = (D::create().await, World::default());
    let layer = layer(&db).max_running(1);
    let app = Router::new()
        .route("/hook", post(handle::<D>).layer(layer.clone()))
        .layer(layer)
        .with_state(world);
    assert_eq!(answered(&ping(&app, "insert").await), (200, None));
    assert_eq!(db.effects().await, ["ping"]);
}

/// The connection dies before COMMIT: a retry may succeed.
#[tokio::test]
async fn handshake_whose_commit_fails_is_503() {
    let db = Pg::create().await;
    let dies = async |mut tx: DedupTx<Postgres>| {
        let insert = "INSERT INTO effects (id) VALUES ('x')";
        sqlx::query(insert).execute(&mut *tx).await.unwrap();
        let dies = "SELECT pg_terminate_backend(pg_backend_pid())";
        sqlx::query(dies).execute(&mut *tx).await.unwrap_err();
    };
    let app = Router::new().route("/hook", post(dies)).layer(layer(&db));
    let response = ping(&app, "").await;
    assert_eq!(answered(&response), (503, Some("unavailable")));
    assert_eq!(response.headers()["retry-after"], "30");
    assert!(db.effects().await.is_empty());
}
