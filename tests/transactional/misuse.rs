//! Handlers that ignore an error, end the transaction, leak a savepoint, or hold the transaction
//! after their answer: on Postgres and on SQLite.

use std::time::Duration;

use tower_dedup::adapter::inspect::{KeyState, MaintenanceAdapter};
use tower_dedup::{DedupLayer, OnInFlight};

use super::fixture::{CONNECTIONS, Db, World, app, on_both, send, transactional};
use crate::support::{answered, by_header, dedup_key, result};

on_both!(
    error_that_the_handler_ignores_is_never_a_2xx_without_the_effect,
    raw_rollback_is_500_and_nothing_is_committed,
    raw_commit_never_leaves_a_complete_key,
    a_failed_handler_that_leaks_a_savepoint_leaves_no_transaction_open,
    transaction_held_beyond_the_answer_is_500_and_rolled_back,
);

/// On Postgres the error has aborted the transaction, and COMMIT would return Ok. On SQLite the
/// transaction goes on, and the commit is real.
async fn error_that_the_handler_ignores_is_never_a_2xx_without_the_effect<D: Db>() {
    let (db, world) = (D::create().await, World::default());
    let app = transactional::<D>(db.adapter(), &world);
    let answer = send(&app, "a", "insert broken").await;
    let complete = db.adapter().get(&dedup_key("a")).await.unwrap().is_some();
    let effect = !db.effects().await.is_empty();
    match (answer.status().as_u16(), result(&answer)) {
        (200, None) => assert!(complete && effect),
        (500, Some("uncommitted")) => assert!(!complete && !effect),
        other => panic!("{other:?}"),
    }
    assert_eq!(send(&app, "a", "insert").await.status(), 200);
    assert_eq!(db.effects().await, ["a"]);
}

async fn raw_rollback_is_500_and_nothing_is_committed<D: Db>() {
    let (db, world) = (D::create().await, World::default());
    let app = transactional::<D>(db.adapter(), &world);
    for script in ["insert rollback", "insert rollback begin insert", "insert rollback begin"] {
        let answer = send(&app, "a", script).await;
        assert_eq!(answered(&answer), (500, Some("uncommitted")));
        assert_eq!(db.adapter().get(&dedup_key("a")).await.unwrap(), None, "{script}");
        assert!(db.effects().await.is_empty(), "{script}");
    }
    // The same, and the handler fails as well: the answer is the handler's.
    assert_eq!(send(&app, "a", "insert rollback 503").await.status(), 503);
    assert_eq!(send(&app, "a", "insert").await.status(), 200);
    assert_eq!(db.effects().await, ["a"]);
}

/// The layer cannot undo a handler's raw COMMIT, but the key is not complete. No delivery gets 200,
/// and the retry runs.
async fn raw_commit_never_leaves_a_complete_key<D: Db>() {
    for script in ["insert commit", "insert commit begin more", "insert commit 500"] {
        let (db, world) = (D::create().await, World::default());
        let layer = DedupLayer::transactional(by_header(), db.adapter());
        let app = app::<D>(layer.on_in_flight(OnInFlight::Reject), &world);
        let answer = send(&app, "a", script).await;
        assert_eq!(answer.status(), 500, "{script}: {answer:?}");
        let entry = db.adapter().get(&dedup_key("a")).await.unwrap();
        if let Some(entry) = entry {
            assert!(matches!(entry.state, KeyState::InFlight), "{entry:?}");
            assert_eq!(db.effects().await, ["a"]);
            assert_eq!(send(&app, "a", "").await.status(), 503, "its lease is live");
            db.advance(Duration::from_secs(61)).await;
            assert_eq!(send(&app, "a", "").await.status(), 200);
            let delivery = world.last();
            assert_eq!((delivery.is_takeover(), delivery.attempt()), (true, 2));
        } else {
            // The commit became a rollback.
            assert!(db.effects().await.is_empty());
            assert_eq!(send(&app, "a", "insert").await.status(), 200);
        }
        assert_eq!(db.effects().await, ["a"], "{script}");
    }
}

async fn a_failed_handler_that_leaks_a_savepoint_leaves_no_transaction_open<D: Db>() {
    let (db, world) = (D::create().await, World::default());
    let app = transactional::<D>(db.adapter(), &world);
    for script in ["leak insert 500", "leak leak insert 500", "savepoints leak 400"] {
        for _ in 0..CONNECTIONS {
            assert_ne!(send(&app, "a", script).await.status(), 200);
        }
        // Another process can write at once.
        let other = transactional::<D>(db.other_adapter().await, &World::default());
        assert_eq!(send(&other, script, "insert").await.status(), 200);
    }
    let mut effects = db.effects().await;
    effects.sort();
    assert_eq!(effects, ["leak insert 500", "leak leak insert 500", "savepoints leak 400"]);
    assert_eq!(send(&app, "a", "insert").await.status(), 200);
}

/// A task holds the transaction after the handler has answered.
async fn transaction_held_beyond_the_answer_is_500_and_rolled_back<D: Db>() {
    let (db, world) = (D::create().await, World::default());
    let app = transactional::<D>(db.adapter(), &world);
    let answer = send(&app, "a", "insert keep").await;
    assert_eq!(answered(&answer), (500, Some("uncommitted")));
    world.waiting(1).await;
    assert!(db.effects().await.is_empty());
    world.go.notify_waiters();
    world.waiting(0).await;
    let retried = async {
        // The rollback may still run.
        while send(&app, "a", "insert").await.status() != 200 {}
    };
    tokio::time::timeout(Duration::from_secs(20), retried).await.expect("the key is free");
    assert_eq!(db.effects().await, ["a"]);
}
