//! Shadow, off, and requests without an event: the transaction is the handler's alone.

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::routing::post;
use tower::ServiceExt;
use tower_dedup::adapter::inspect::{KeyState, MaintenanceAdapter};
use tower_dedup::{DedupLayer, Delivery, Mode, OnMissingKey};

use super::fixture::{Db, World, app, on_both, send};
use support::places::Shared;
use support::{answered, by_header, dedup_key, state};

on_both!(
    in_shadow_the_layer_completes_and_every_run_commits,
    off_records_nothing,
    request_without_a_key_is_demanded_nothing
);

async fn in_shadow_the_layer_completes_and_every_run_commits<S: Shared>() {
    let (db, world) = (Db::<S>::create().await, World::default());
    let app =
        app(&db, DedupLayer::transactional(by_header(), db.adapter()).mode(Mode::Shadow), &world);
    for script in ["begin insert-run commit", "begin insert-run complete commit", "200"] {
        assert_eq!(answered(&send(&app, "a", script).await), (200, None), "{script}");
    }
    assert_eq!((db.effects().await.len(), world.runs()), (2, 3));
    assert_eq!(state(&db.adapter(), "a").await, Some(KeyState::Complete));
    // A failed run leaves its event for the retry, and its effect is rolled back.
    assert_eq!(send(&app, "b", "begin insert-run 500").await.status(), 500);
    let entry = db.adapter().get(&dedup_key("b")).await.unwrap().unwrap();
    assert_eq!((entry.state, db.effects().await.len()), (KeyState::Released, 2));
}

async fn off_records_nothing<S: Shared>() {
    let (db, world) = (Db::<S>::create().await, World::default());
    let app =
        app(&db, DedupLayer::transactional(by_header(), db.adapter()).mode(Mode::Off), &world);
    for _ in 0..2 {
        assert_eq!(answered(&send(&app, "a", "begin insert-run commit").await), (200, None));
    }
    assert_eq!(db.adapter().get(&dedup_key("a")).await.unwrap(), None);
    assert_eq!((db.effects().await.len(), world.runs()), (2, 2));
}

async fn request_without_a_key_is_demanded_nothing<S: Shared>() {
    let db = Db::<S>::create().await;
    let layer = DedupLayer::transactional(by_header(), db.adapter());
    let layer = layer.on_missing_key(OnMissingKey::PassThrough);
    let handler = async |State(()): State<()>, event: Option<Delivery>| match event {
        Some(_) => StatusCode::IM_A_TEAPOT,
        None => StatusCode::OK,
    };
    let app = Router::new().route("/hook", post(handler)).layer(layer).with_state(());
    let bare = Request::post("/hook").body(Body::empty()).unwrap();
    assert_eq!(answered(&app.oneshot(bare).await.unwrap()), (200, None));
}
