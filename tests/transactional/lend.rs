//! Extractors, an inner retry layer and a route without a delivery borrow the transaction.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{FromRequestParts, Request};
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use sqlx::sqlite::Sqlite;
use tower::ServiceExt;
use tower_dedup::{DedupLayer, DedupTx, TxHandle, TxUnavailable};

use super::fixture::{Db, Lite, World, handle, on_both, send};
use crate::support::{answered, by_header, result};

on_both!(
    transaction_is_lent_to_one_extractor_at_a_time,
    retry_layer_inside_has_no_transaction_for_its_second_attempt,
);

async fn transaction_is_lent_to_one_extractor_at_a_time<D: Db>() {
    let (db, world) = (D::create().await, World::default());
    let stored: Arc<std::sync::Mutex<Option<TxHandle<D::Database>>>> = Arc::default();
    let store = Arc::clone(&stored);
    let greedy = move |request: Request| {
        let store = Arc::clone(&store);
        async move {
            let (mut head, _) = request.into_parts();
            let first = DedupTx::<D::Database>::from_request_parts(&mut head, &()).await.unwrap();
            let second = DedupTx::<D::Database>::from_request_parts(&mut head, &()).await;
            assert_eq!(second.unwrap_err().status(), 500);
            let handle = head.extensions.get::<TxHandle<D::Database>>().unwrap().clone();
            assert!(matches!(handle.lend().await, Err(TxUnavailable::Lent)));
            drop(first);
            // After its drop, the transaction can be lent again.
            let mut again = handle.lend().await.unwrap();
            D::run(&mut again, "INSERT INTO effects (id) VALUES ('x')".to_owned()).await.unwrap();
            drop(again);
            // Of two copies of the request, the one that borrowed first may borrow again.
            let copy = head.extensions.clone();
            let copied = copy.get::<TxHandle<D::Database>>().unwrap().lend().await;
            assert!(matches!(copied, Err(TxUnavailable::Copied)));
            let first = head.extensions.get::<TxHandle<D::Database>>().unwrap();
            assert!(first.lend().await.is_ok());
            *store.lock().unwrap() = Some(handle);
            StatusCode::OK
        }
    };
    let layer = DedupLayer::transactional(by_header(), db.adapter());
    let app = Router::new().route("/hook", post(greedy)).layer(layer).with_state(());
    assert_eq!(send(&app, "a", "").await.status(), 200);
    assert_eq!(db.effects().await, ["x"]);
    let handle = stored.lock().unwrap().take().unwrap();
    assert!(matches!(handle.lend().await, Err(TxUnavailable::Closed)));
    // A route without the layer has no transaction; the extractor's rejection says so.
    let bare = Router::new().route("/hook", post(handle_bare::<D>)).with_state(world);
    assert_eq!(send(&bare, "a", "").await.status(), 500);
}

async fn handle_bare<D: Db>(_: DedupTx<D::Database>) {}

/// Runs the inner service once for each line of the body, until it succeeds.
pub(super) async fn retry_by_line(request: Request, next: Next) -> Response {
    let (head, body) = request.into_parts();
    let script = to_bytes(body, 1 << 20).await.unwrap();
    let mut response = StatusCode::IM_A_TEAPOT.into_response();
    for line in std::str::from_utf8(&script).unwrap().lines() {
        let again = Request::from_parts(head.clone(), Body::from(line.to_owned()));
        response = next.clone().run(again).await;
        if response.status().is_success() {
            break;
        }
    }
    response
}

/// Otherwise both attempts would write in one transaction.
async fn retry_layer_inside_has_no_transaction_for_its_second_attempt<D: Db>() {
    let (db, world) = (D::create().await, World::default());
    let layer = DedupLayer::transactional(by_header(), db.adapter());
    let layer = layer.store_timeout(Duration::from_secs(20));
    let app = Router::new()
        .route("/hook", post(handle::<D>).layer(from_fn(retry_by_line)))
        .layer(layer)
        .with_state(world.clone());
    let refused = send(&app, "a", "more 500\ninsert").await;
    assert_eq!(answered(&refused), (500, None));
    assert_eq!((db.effects().await, world.runs()), (vec![], 1));
    // A retry comes with the sender's next delivery.
    assert_eq!(send(&app, "a", "insert\ninsert").await.status(), 200);
    assert_eq!(db.effects().await, ["a"]);
    assert_eq!(result(&send(&app, "a", "insert").await), Some("duplicate"));
}

/// A route that also receives requests without a delivery, and an adapter in an `Arc`.
#[tokio::test]
async fn optional_transaction_is_absent_without_a_delivery() {
    let db = Lite::create().await;
    let handler = async |tx: Option<DedupTx<Sqlite>>| tx.is_some().to_string();
    let layer = DedupLayer::transactional(by_header(), Arc::new(db.adapter()));
    let app = Router::new().route("/hook", post(handler).get(handler)).layer(layer).with_state(());
    let answers = |request: Request| {
        let app = app.clone();
        async move {
            let body = app.oneshot(request).await.unwrap().into_body();
            to_bytes(body, 100).await.unwrap()
        }
    };
    let get = Request::get("/hook").body(Body::empty()).unwrap();
    assert_eq!(answers(get).await, "false");
    let post = Request::post("/hook").header("webhook-id", "a").body(Body::empty()).unwrap();
    assert_eq!(answers(post).await, "true");
}
