//! Deliveries of several events: they complete in one COMMIT, or none does. `tests/layer/multi_event` has the rest.

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::routing::post;
use tower::ServiceExt;
use tower_dedup::adapter::contract::DedupAdapter;
use tower_dedup::{DedupKey, DedupLayer, Delivery};

use super::fixture::{Db, on_both};
use crate::support::words::{by_word, insert};
use crate::support::{answered, dedup_key, terms};

on_both!(event_completed_meanwhile_refuses_all);

/// A late run elsewhere completes one of the events while the handler runs. Nothing of this run counts, and the retry runs
/// the others.
async fn event_completed_meanwhile_refuses_all<D: Db>() {
    let db = D::create().await;
    let (store, pool) = (db.adapter(), db.pool().clone());
    let handler = async move |event: Delivery| {
        if event.keys().any(|key| key.id() == "x") {
            store.complete(&dedup_key("x"), &terms()).await.unwrap();
        }
        let mut tx = event.begin(&pool).await?;
        D::run(&mut tx, insert(event.keys().map(DedupKey::id))).await?;
        tx.commit().await
    };
    let layer = DedupLayer::transactional(by_word(), db.adapter());
    let app: Router = Router::new().route("/hook", post(handler)).layer(layer);
    let deliver = || app.clone().oneshot(Request::post("/hook").body(Body::from("a x b")).unwrap());
    assert_eq!(answered(&deliver().await.unwrap()), (503, None));
    assert!(db.effects().await.is_empty());
    assert_eq!(answered(&deliver().await.unwrap()), (200, None));
    assert_eq!(db.effects().await, ["a", "b"]);
}
