//! Shadow, off, and requests without an event: the transaction is the handler's alone. Two layers around one handler.

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::routing::post;
use tower::ServiceExt;
use tower_dedup::adapter::MemoryAdapter;
use tower_dedup::adapter::maintenance::{KeyState, MaintenanceAdapter};
use tower_dedup::{DedupLayer, Delivery, KeyExtractor, Mode, OnMissingKey, key};

use super::fixture::{Db, World, app, nested, on_both, send};
use support::places::Shared;
use support::{answered, by_header, dedup_key, result, state};

on_both!(
    in_shadow_the_layer_completes_and_every_run_commits,
    request_without_a_key_is_demanded_nothing,
    shadow_inside_a_layer_leaves_its_transaction_alone,
    layer_inside_a_transactional_one_with_another_key_runs_nothing,
    outer_layer_with_the_same_key_demands_the_commit_of_the_inner_one,
);

/// Layers whose keys are of this test's header, and of another namespace.
fn other_key() -> KeyExtractor {
    key::header("webhook-id").namespace("other")
}

/// The second key is tried in shadow first: the handler sees the delivery that it has seen before, and completes it.
async fn shadow_inside_a_layer_leaves_its_transaction_alone<S: Shared>() {
    let (db, world) = (Db::<S>::create().await, World::default());
    let shadow = || DedupLayer::new(other_key(), MemoryAdapter::new()).mode(Mode::Shadow);
    let strict = DedupLayer::transactional(by_header(), db.adapter());
    let leased = DedupLayer::new(by_header(), db.adapter());
    for (id, app) in [
        ("a", nested(&db, shadow(), strict.clone(), &world)),
        ("b", nested(&db, shadow(), leased, &world)),
        ("c", nested(&db, strict.clone(), shadow(), &world)),
        (
            "d",
            nested(
                &db,
                DedupLayer::transactional(other_key(), db.adapter()).mode(Mode::Shadow),
                strict,
                &world,
            ),
        ),
    ] {
        let dropped = send(&app, id, "begin insert drop").await;
        assert_eq!(answered(&dropped), (500, Some("uncommitted")), "{id}");
        assert_eq!(answered(&send(&app, id, "begin insert commit").await), (200, None), "{id}");
        let last = world.last();
        assert_eq!((last.key().namespace(), last.attempt()), ("test", 2));
        assert_eq!(result(&send(&app, id, "begin insert commit").await), Some("duplicate"), "{id}");
    }
    assert_eq!(db.effects().await, ["a", "b", "c", "d"]);
}

/// Its handler would complete the events of the inner layer, and never those of the outer one.
async fn layer_inside_a_transactional_one_with_another_key_runs_nothing<S: Shared>() {
    let (db, world) = (Db::<S>::create().await, World::default());
    let outer = DedupLayer::transactional(by_header(), db.adapter());
    for app in [
        nested(&db, DedupLayer::new(other_key(), MemoryAdapter::new()), outer.clone(), &world),
        nested(
            &db,
            DedupLayer::on_arrival(other_key(), MemoryAdapter::new()),
            outer.clone(),
            &world,
        ),
        nested(&db, DedupLayer::transactional(other_key(), db.adapter()), outer, &world),
    ] {
        for _ in 0..2 {
            let answer = send(&app, "a", "begin insert commit").await;
            assert_eq!(answered(&answer), (500, Some("uncommitted")));
        }
        assert_eq!(state(&db.adapter(), "a").await, Some(KeyState::Released));
    }
    assert_eq!((db.effects().await.len(), world.runs()), (0, 0));
}

/// The outer layer runs the event, and the inner one lets it through.
async fn outer_layer_with_the_same_key_demands_the_commit_of_the_inner_one<S: Shared>() {
    let (db, world) = (Db::<S>::create().await, World::default());
    let strict = || DedupLayer::transactional(by_header(), db.adapter());
    let app = nested(&db, strict(), DedupLayer::new(by_header(), db.adapter()), &world);
    for script in ["200", "begin insert drop"] {
        let answer = send(&app, "a", script).await;
        assert_eq!(answered(&answer), (500, Some("uncommitted")), "{script}");
    }
    assert_eq!(answered(&send(&app, "a", "begin insert commit").await), (200, None));
    assert_eq!(answered(&send(&app, "b", "nothing").await), (200, None));
    assert_eq!(db.effects().await, ["a"]);
    // A store that completes no events in a transaction.
    let app = nested(&db, strict(), DedupLayer::new(by_header(), MemoryAdapter::new()), &world);
    assert_eq!(answered(&send(&app, "c", "200").await), (500, Some("uncommitted")));
}

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
