//! The transactional ledger, on Postgres and on SQLite: the key and the handler's writes commit
//! together, or neither commits.

use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::routing::post;
use futures_util::future::join_all;
use tower::ServiceExt;
use tower_dedup::adapter::inspect::{KeyState, MaintenanceAdapter};
use tower_dedup::{
    DedupLayer, DedupTx, Deduplicator, ErrorKind, OnInFlight, RunContext, RunError, RunOutcome,
    TxUnavailable,
};

use super::fixture::{CONNECTIONS, Db, World, app, on_both, send, transactional};
use crate::support::{answered, by_header, dedup_key, result};

on_both!(
    the_key_and_the_effect_commit_together,
    a_failed_handler_leaves_neither_key_nor_effect,
    a_completion_after_its_retention_is_remembered_for_another,
    concurrent_duplicates_run_once,
    duplicate_in_another_process_is_answered_at_once,
    commit_that_fails_is_no_2xx,
    deduplicator_commits_the_work_with_its_key,
    handler_past_its_timeout_is_rolled_back_before_the_answer,
);

async fn the_key_and_the_effect_commit_together<D: Db>() {
    let (db, world) = (D::create().await, World::default());
    let app = transactional::<D>(db.adapter(), &world);
    assert_eq!(send(&app, "a", "insert").await.status(), 200);
    let again = send(&app, "a", "insert").await;
    assert_eq!(answered(&again), (200, Some("duplicate")));
    assert_eq!(db.effects().await, ["a"]);
    let entry = db.adapter().get(&dedup_key("a")).await.unwrap().unwrap();
    assert!(matches!(entry.state, KeyState::Complete), "{entry:?}");
    assert_eq!((entry.attempts, entry.takeover, world.runs()), (1, false, 1));
}

async fn a_failed_handler_leaves_neither_key_nor_effect<D: Db>() {
    let (db, world) = (D::create().await, World::default());
    let app = transactional::<D>(db.adapter(), &world);
    for script in ["insert 500", "insert 400", "insert 302"] {
        let failed = send(&app, "a", script).await;
        assert_ne!(failed.status(), 200);
        assert_eq!(result(&failed), None, "the answer is the handler's own");
    }
    let panicked = tokio::spawn({
        let app = app.clone();
        async move { send(&app, "a", "insert panic").await }
    });
    assert!(panicked.await.unwrap_err().is_panic());
    assert_eq!(db.adapter().get(&dedup_key("a")).await.unwrap(), None);
    assert!(db.effects().await.is_empty());
    assert_eq!(send(&app, "a", "insert").await.status(), 200);
    assert!(!world.last().is_takeover());
    assert_eq!((db.effects().await, world.runs()), (vec!["a".to_owned()], 5));
}

/// The handler is dropped and its transaction rolled back before the answer. No connection is lost.
async fn handler_past_its_timeout_is_rolled_back_before_the_answer<D: Db>() {
    let (db, world) = (D::create().await, World::default());
    let layer = DedupLayer::transactional(by_header(), db.adapter());
    let app = app::<D>(layer.handler_timeout(Duration::from_millis(300)), &world);
    for _ in 0..=CONNECTIONS {
        let late = send(&app, "a", "insert wait").await;
        assert_eq!(answered(&late), (504, Some("handler-timeout")));
        assert_eq!(db.adapter().get(&dedup_key("a")).await.unwrap(), None);
        assert!(db.effects().await.is_empty());
    }
    assert_eq!(send(&app, "a", "insert").await.status(), 200);
    assert_eq!((db.effects().await, world.last().is_takeover()), (vec!["a".to_owned()], false));
}

async fn a_completion_after_its_retention_is_remembered_for_another<D: Db>() {
    let (db, world) = (D::create().await, World::default());
    let app = transactional::<D>(db.adapter(), &world);
    assert_eq!(send(&app, "a", "insert expire").await.status(), 200);
    let again = send(&app, "a", "insert").await;
    assert_eq!(answered(&again), (200, Some("duplicate")));
    let entry = db.adapter().get(&dedup_key("a")).await.unwrap().unwrap();
    let remembered = entry.expires_at.duration_since(entry.first_seen_at).unwrap();
    assert!(remembered > Duration::from_secs(86_400), "{remembered:?}");
    assert_eq!((db.effects().await.len(), world.runs()), (1, 1));
}

async fn concurrent_duplicates_run_once<D: Db>() {
    const EVENTS: usize = 12;
    let (db, world) = (D::create().await, World::default());
    let layer = DedupLayer::transactional(by_header(), db.adapter());
    let app = app::<D>(layer.on_in_flight(OnInFlight::Wait(Duration::from_secs(20))), &world);
    // Of each event, one runs and eight wait.
    let all = (0..EVENTS * 9).map(|delivery| {
        let app = app.clone();
        tokio::spawn(async move { send(&app, &(delivery % EVENTS).to_string(), "insert").await })
    });
    for answer in join_all(all).await {
        let answer = answer.unwrap();
        // A pool of three may be too small for this many at once; no other failure is allowed.
        let (status, result) = (answer.status().as_u16(), result(&answer));
        assert!(status == 200 || (status, result) == (503, Some("unavailable")), "{answer:?}");
    }
    let retried = (0..EVENTS).map(|id| {
        let app = app.clone();
        async move { send(&app, &id.to_string(), "insert").await }
    });
    for answer in join_all(retried).await {
        assert_eq!(answer.status(), 200);
    }
    assert_eq!((db.effects().await.len(), world.runs()), (EVENTS, EVENTS));
}

/// The duplicate of an uncommitted key does not occupy a connection while it waits.
async fn duplicate_in_another_process_is_answered_at_once<D: Db>() {
    let (db, world) = (D::create().await, World::default());
    let first = transactional::<D>(db.adapter(), &world);
    let other = db.other_adapter().await;
    let layer = DedupLayer::transactional(by_header(), other.clone());
    let second = app::<D>(layer.on_in_flight(OnInFlight::Reject), &world);
    let running = tokio::spawn({
        let first = first.clone();
        async move { send(&first, "a", "insert wait").await }
    });
    world.waiting(1).await;
    let start = Instant::now();
    for _ in 0..2 * CONNECTIONS {
        assert_eq!(send(&second, "a", "insert").await.status(), 503);
    }
    assert!(
        start.elapsed() < Duration::from_secs(10),
        "the duplicate does not wait for the handler"
    );
    world.go.notify_waiters();
    assert_eq!(running.await.unwrap().status(), 200);
    assert_eq!(result(&send(&second, "a", "insert").await), Some("duplicate"));
    assert_eq!((db.effects().await, world.runs()), (vec!["a".to_owned()], 1));
}

/// The constraint fails at COMMIT on Postgres, at once on SQLite.
async fn commit_that_fails_is_no_2xx<D: Db>() {
    let (db, world) = (D::create().await, World::default());
    let app = transactional::<D>(db.adapter(), &world);
    assert_eq!(send(&app, "a", "insert").await.status(), 200);
    let conflict = |id: &str| {
        let request = Request::post("/hook").header("webhook-id", id).body(Body::from("a"));
        let handler = async |mut tx: DedupTx<D::Database>, taken: String| {
            let sql = format!("INSERT INTO effects (id) VALUES ('{taken}')");
            match D::run(&mut tx, sql).await {
                Ok(()) => StatusCode::OK,
                Err(_) => StatusCode::INTERNAL_SERVER_ERROR,
            }
        };
        let layer = DedupLayer::transactional(by_header(), db.adapter());
        let app = Router::new().route("/hook", post(handler)).layer(layer).with_state(());
        app.oneshot(request.unwrap())
    };
    assert_eq!(conflict("b").await.unwrap().status(), 500);
    assert_eq!(db.adapter().get(&dedup_key("b")).await.unwrap(), None);
    assert_eq!(db.effects().await, ["a"]);
    assert_eq!(send(&app, "b", "insert").await.status(), 200);
}

async fn deduplicator_commits_the_work_with_its_key<D: Db>() {
    let db = D::create().await;
    let worker = Deduplicator::transactional(db.adapter());
    let key = dedup_key("a");
    let insert = async |work: RunContext| {
        let mut tx = work.transaction::<D::Database>().await.unwrap();
        D::run(&mut tx, "INSERT INTO effects (id) VALUES ('a')".to_owned()).await.unwrap();
        tx
    };
    let failed = worker.run(&key, async |work| {
        drop(insert(work).await);
        Err::<(), _>("no")
    });
    assert!(matches!(failed.await, Err(RunError::Handler("no"))));
    assert!(db.effects().await.is_empty());
    // The server or the file has ended the transaction, so it cannot be committed.
    let held = worker.run(&key, async |work| Ok::<_, &str>(insert(work).await)).await;
    match held {
        Err(RunError::Store(error)) => assert_eq!(error.kind(), ErrorKind::Transaction),
        other => panic!("{other:?}"),
    }
    let first = async {
        loop {
            let ran = worker.run(&key, async |work| {
                drop(insert(work).await);
                Ok::<_, &str>(())
            });
            match ran.await.unwrap() {
                RunOutcome::First(()) => break,
                // The rollback of the held transaction still runs.
                RunOutcome::InFlight => tokio::task::yield_now().await,
                other => panic!("{other:?}"),
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(20), first).await.expect("a first run");
    let again = worker.run(&key, async |_| Ok::<_, &str>(())).await.unwrap();
    assert!(matches!(again, RunOutcome::Duplicate(_)), "{again:?}");
    assert_eq!(db.effects().await, ["a"]);
    let leased = Deduplicator::new(db.adapter());
    let other = dedup_key("b");
    let absent = leased.run(&other, async |work| {
        Err::<(), _>(work.transaction::<D::Database>().await.unwrap_err())
    });
    assert!(matches!(absent.await, Err(RunError::Handler(TxUnavailable::Absent))));
}
