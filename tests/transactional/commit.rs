//! The transactional ledger, on Postgres and on SQLite: the key and the handler's writes commit
//! together, or neither commits.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::routing::post;
use futures_util::FutureExt;
use futures_util::future::join_all;
use tower::ServiceExt;
use tower_dedup::adapter::contract::{CallTerms, DedupAdapter, Token};
use tower_dedup::adapter::maintenance::{ForgetReply, KeyState, MaintenanceAdapter};
use tower_dedup::testing::{Fault, FaultyAdapter, StoreCall};
use tower_dedup::{
    DedupKey, DedupLayer, Deduplicator, Delivery, OnUnavailable, RunError, RunOutcome,
};

use super::fixture::{CONNECTIONS, Db, World, app, on_both, send, started, transactional};
use support::places::Shared;
use support::words::{Sql, by_word, insert};
use support::{answered, by_header, dedup_key, result, state, terms};

on_both!(
    key_and_effect_commit_together,
    failed_handler_leaves_no_effect_and_a_released_key,
    success_without_a_completion_is_uncommitted_and_runs_again,
    success_that_the_store_cannot_confirm_is_503_and_runs_again,
    commit_is_followed_by_no_call,
    lease_that_a_commit_has_ended_is_not_lost,
    begun_transaction_without_a_commit_is_uncommitted_under_a_lease,
    unprotected_run_commits_its_effects_alone,
    completion_after_its_retention_is_remembered_for_another,
    event_of_a_running_handler_is_in_flight_for_all,
    late_first_run_and_its_takeover_commit_once,
    commit_that_the_database_refuses_is_no_2xx,
    committed_and_then_failed_is_complete,
    deduplicator_commits_the_work_with_its_key,
    event_completed_meanwhile_refuses_all,
);

async fn key_and_effect_commit_together<S: Shared>() {
    let (db, world, app) = started::<S>().await;
    assert_eq!(send(&app, "a", "begin insert commit").await.status(), 200);
    let again = send(&app, "a", "begin insert commit").await;
    assert_eq!(answered(&again), (200, Some("duplicate")));
    assert_eq!(db.effects().await, ["a"]);
    let entry = db.adapter().get(&dedup_key("a")).await.unwrap().unwrap();
    assert!(matches!(entry.state, KeyState::Complete), "{entry:?}");
    assert_eq!((entry.attempts, entry.takeover, world.runs()), (1, false, 1));
}

async fn failed_handler_leaves_no_effect_and_a_released_key<S: Shared>() {
    let (db, world, app) = started::<S>().await;
    for script in ["begin insert rollback 500", "begin insert 400", "begin insert 302", "500"] {
        let failed = send(&app, "a", script).await;
        assert_ne!(failed.status(), 200);
        assert_eq!(result(&failed), None, "the answer is the handler's own");
        assert_eq!(state(&db.adapter(), "a").await, Some(KeyState::Released));
    }
    let panicked = tokio::spawn({
        let app = app.clone();
        async move { send(&app, "a", "begin insert panic").await }
    });
    assert!(panicked.await.unwrap_err().is_panic());
    assert!(db.effects().await.is_empty());
    assert_eq!(send(&app, "a", "begin insert commit").await.status(), 200);
    let last = world.last();
    assert_eq!((last.is_takeover(), last.attempt()), (false, 6));
    assert_eq!((db.effects().await, world.runs()), (vec!["a".to_owned()], 6));
}

/// Whatever the handler did instead of a commit, and whatever its answer says.
async fn success_without_a_completion_is_uncommitted_and_runs_again<S: Shared>() {
    let (db, _, app) = started::<S>().await;
    for script in [
        "200",
        "begin insert drop",
        "begin insert complete drop",
        "begin insert complete-disposition",
    ] {
        let answer = send(&app, "a", script).await;
        assert_eq!(answered(&answer), (500, Some("uncommitted")), "{script}");
        assert_eq!(state(&db.adapter(), "a").await, Some(KeyState::Released), "{script}");
        assert!(db.effects().await.is_empty(), "{script}");
    }
    assert_eq!(send(&app, "a", "begin insert commit").await.status(), 200);
    assert_eq!(db.effects().await, ["a"]);
}

/// Also where the layer demands no commit of a handler that begins nothing.
async fn begun_transaction_without_a_commit_is_uncommitted_under_a_lease<S: Shared>() {
    let (db, world) = (Db::<S>::create().await, World::default());
    let app = app(&db, DedupLayer::new(by_header(), db.adapter()), &world);
    for script in [
        "begin insert drop",
        "begin insert complete drop",
        "begin insert drop complete-disposition",
        "nothing begin insert drop",
        "own-drop",
        "nothing own-drop",
        "take-completion",
    ] {
        let answer = send(&app, "a", script).await;
        assert_eq!(answered(&answer), (500, Some("uncommitted")), "{script}");
        assert_eq!(state(&db.adapter(), "a").await, Some(KeyState::Released), "{script}");
        assert!(db.effects().await.is_empty(), "{script}");
    }
    for (id, script) in [
        ("a", "begin insert commit"),
        ("b", "begin insert drop begin insert commit"),
        ("c", "begin insert rollback"),
        ("d", "begin insert drop nothing"),
        ("e", "own-commit"),
        ("f", "take-completion begin insert commit"),
        ("g", "200"),
    ] {
        assert_eq!(answered(&send(&app, id, script).await), (200, None), "{script}");
        assert_eq!(answered(&send(&app, id, script).await), (200, Some("duplicate")), "{script}");
    }
    assert_eq!(db.effects().await, ["a", "b", "e", "f"]);
    let worker = Deduplicator::new(db.adapter());
    let dropped = worker.run(dedup_key("w"), async |event| {
        drop(event.begin(&db.pool).await.unwrap());
        Ok::<_, &str>(())
    });
    match dropped.await {
        Err(RunError::Uncommitted) => {}
        other => panic!("{other:?}"),
    }
}

/// Another driver may have completed the event, or not.
async fn success_that_the_store_cannot_confirm_is_503_and_runs_again<S: Shared>() {
    let (db, world, app) = started::<S>().await;
    let answer = world.send_beside(&app, "wait", async || db.pool.close().await).await;
    assert_eq!(answered(&answer), (503, Some("unavailable")));
    db.advance(Duration::from_secs(3_600)).await;
    let layer = DedupLayer::transactional(by_header(), db.other_adapter().await);
    let retry = send(&super::fixture::app(&db, layer, &world), "a", "nothing").await;
    assert_eq!((answered(&retry), world.runs()), ((200, None), 2));
}

async fn commit_is_followed_by_no_call<S: Shared>() {
    let (db, world) = (Db::<S>::create().await, World::default());
    let layer = DedupLayer::transactional(by_header(), db.adapter());
    let (app, handle) = (app(&db, layer.clone(), &world), layer.handle());
    let answer =
        world.send_beside(&app, "begin insert commit wait", async || db.pool.close().await).await;
    assert_eq!(answered(&answer), (200, None));
    assert_eq!(handle.pending_writes(), 0);
}

async fn lease_that_a_commit_has_ended_is_not_lost<S: Shared>() {
    let (db, world) = (Db::<S>::create().await, World::default());
    let layer = DedupLayer::transactional(by_header(), db.adapter()).lease(Duration::from_secs(6));
    let app = app(&db, layer, &world);
    // A lease is renewed after a third.
    let renewed = async || tokio::time::sleep(Duration::from_millis(2_500)).await;
    let answer = world.send_beside(&app, "begin insert commit wait", renewed).await;
    assert_eq!(answered(&answer), (200, None));
    assert!(!world.last().lease_lost());
}

async fn unprotected_run_commits_its_effects_alone<S: Shared>() {
    let (db, world) = (Db::<S>::create().await, World::default());
    let store = FaultyAdapter::new(db.adapter());
    store.set(StoreCall::Claim, Fault::Fail);
    let layer = DedupLayer::new(by_header(), store).on_unavailable(OnUnavailable::FailOpen);
    let app = app(&db, layer, &world);
    for (id, script) in [("a", "begin insert commit"), ("b", "begin insert complete commit")] {
        assert_eq!(answered(&send(&app, id, script).await), (200, None), "{script}");
        assert!(world.last().is_unprotected());
    }
    assert_eq!(answered(&send(&app, "c", "begin insert drop").await), (500, Some("uncommitted")));
    assert_eq!(db.effects().await, ["a", "b"]);
}

async fn completion_after_its_retention_is_remembered_for_another<S: Shared>() {
    let (db, world, app) = started::<S>().await;
    assert_eq!(send(&app, "a", "begin insert expire commit").await.status(), 200);
    let again = send(&app, "a", "begin insert commit").await;
    assert_eq!(answered(&again), (200, Some("duplicate")));
    let entry = db.adapter().get(&dedup_key("a")).await.unwrap().unwrap();
    let remembered = entry.expires_at.duration_since(entry.first_seen_at).unwrap();
    assert!(remembered > Duration::from_secs(86_400), "{remembered:?}");
    assert_eq!((db.effects().await.len(), world.runs()), (1, 1));
}

/// For a duplicate in this process and in another one, for `get`, `list` and `forget`. A handler that thinks holds no
/// connection: more of them than the pool has connections run at once.
async fn event_of_a_running_handler_is_in_flight_for_all<S: Shared>() {
    let (db, world) = (Db::<S>::create().await, World::default());
    let first = transactional(&db, &world);
    let other = db.other_adapter().await;
    let layer = DedupLayer::transactional(by_header(), other.clone());
    let second = app(&db, layer.wait(Duration::ZERO), &world);
    let handlers = 2 * usize::try_from(CONNECTIONS).unwrap();
    let running: Vec<_> = (0..handlers)
        .map(|id| {
            let first = first.clone();
            tokio::spawn(
                async move { send(&first, &id.to_string(), "wait begin insert commit").await },
            )
        })
        .collect();
    world.waiting(handlers).await;
    let in_flight = send(&second, "0", "begin insert commit").await;
    assert_eq!(answered(&in_flight), (503, Some("in-flight")));
    assert_eq!(other.forget(&dedup_key("0")).await.unwrap(), ForgetReply::InFlight);
    let entry = other.get(&dedup_key("0")).await.unwrap().unwrap();
    assert_eq!((entry.state, entry.attempts), (KeyState::InFlight, 1));
    let listed = other.list(&Default::default(), None, 100).await.unwrap();
    assert_eq!(listed.keys.len(), handlers);
    world.go.notify_waiters();
    for answer in join_all(running).await {
        assert_eq!(answer.unwrap().status(), 200);
    }
    assert_eq!(result(&send(&second, "0", "500").await), Some("duplicate"));
    assert_eq!((db.effects().await.len(), world.runs()), (handlers, handlers));
}

/// The lease of the first run lapses, the retry runs, and both try to commit: the second is refused, and its answer is
/// that of a duplicate, because the event is complete.
async fn late_first_run_and_its_takeover_commit_once<S: Shared>() {
    for first_wins in [true, false] {
        let (db, world) = (Db::<S>::create().await, World::default());
        let held = app(&db, lost_lease(&db), &world);
        let late = tokio::spawn({
            let held = held.clone();
            async move { send(&held, "a", "wait begin insert-run commit").await }
        });
        world.waiting(1).await;
        db.advance(Duration::from_secs(3_601)).await;
        let takeover = app(&db, DedupLayer::transactional(by_header(), db.adapter()), &world);
        if first_wins {
            let second =
                tokio::spawn(
                    async move { send(&takeover, "a", "wait begin insert-run commit").await },
                );
            world.waiting(2).await;
            // The other keeps waiting until it is woken.
            world.go.notify_one();
            let (one, two) = tokio::join!(late, async {
                while db.effects().await.is_empty() {
                    tokio::task::yield_now().await;
                }
                world.go.notify_waiters();
                second.await
            });
            let answers = [one.unwrap(), two.unwrap()];
            let mut results = answers.each_ref().map(answered);
            results.sort_unstable();
            assert_eq!(results, [(200, None), (200, Some("duplicate"))]);
        } else {
            let ran = send(&takeover, "a", "begin insert-run commit").await;
            assert_eq!((answered(&ran), world.last().is_takeover()), ((200, None), true));
            world.go.notify_waiters();
            assert_eq!(answered(&late.await.unwrap()), (200, Some("duplicate")));
        }
        assert_eq!((db.effects().await.len(), world.runs()), (1, 2));
    }
}

/// A lease that no renewal reaches.
fn lost_lease<S: Shared>(db: &Db<S>) -> DedupLayer<tower_dedup::ledger::Transactional> {
    DedupLayer::transactional(by_header(), db.adapter()).lease(Duration::from_secs(3_600))
}

/// The constraint fails at COMMIT on Postgres, at once on SQLite. It is no fault of a moment: the answer is 500.
async fn commit_that_the_database_refuses_is_no_2xx<S: Shared>() {
    let (db, _, app) = started::<S>().await;
    assert_eq!(send(&app, "a", "begin insert commit").await.status(), 200);
    assert_eq!(db.adapter().forget(&dedup_key("a")).await.unwrap(), ForgetReply::Removed);
    let refused = send(&app, "a", "begin insert commit").await;
    assert_eq!(answered(&refused), (500, None));
    assert_eq!(state(&db.adapter(), "a").await, Some(KeyState::Released));
    assert_eq!(db.effects().await, ["a"]);
}

async fn committed_and_then_failed_is_complete<S: Shared>() {
    let (db, _, app) = started::<S>().await;
    assert_eq!(answered(&send(&app, "a", "begin insert commit 500").await), (500, None));
    assert_eq!(answered(&send(&app, "a", "500").await), (200, Some("duplicate")));
    let panicked = tokio::spawn({
        let app = app.clone();
        async move { send(&app, "b", "begin insert commit panic").await }
    });
    assert!(panicked.await.unwrap_err().is_panic());
    assert_eq!(answered(&send(&app, "b", "500").await), (200, Some("duplicate")));
    assert_eq!(db.effects().await, ["a", "b"]);
}

async fn deduplicator_commits_the_work_with_its_key<S: Shared>() {
    let db = Db::<S>::create().await;
    let worker = Deduplicator::transactional(db.adapter());
    let key = dedup_key("a");
    let insert = async |event: &Delivery| {
        let mut tx = event.begin(&db.pool).await.unwrap();
        S::Database::run(&mut tx, "INSERT INTO effects (id) VALUES ('a')".to_owned())
            .await
            .unwrap();
        tx
    };
    // A run that comes too late is a duplicate of the one that has committed.
    let first = worker.run(&key, async |event| {
        let terms = CallTerms::on_completion(Token::random(), 60 * SECOND, 60 * SECOND);
        db.adapter().complete(&key, &terms).await.unwrap();
        insert(&event).await.commit().await
    });
    assert!(matches!(first.await.unwrap(), RunOutcome::Duplicate(_)));
    assert!(db.effects().await.is_empty());
    let other = dedup_key("b");
    let ran = worker.run(&other, async |event| insert(&event).await.commit().await);
    assert_eq!(ran.await.unwrap(), RunOutcome::First(()));
    let again = worker.run(&other, async |_| Ok::<_, &str>(())).await.unwrap();
    assert!(matches!(again, RunOutcome::Duplicate(_)), "{again:?}");
    assert_eq!(db.effects().await, ["a"]);
    // A refusal does not hide a panic.
    let panics = dedup_key("c");
    let panics = worker.run(&panics, async |event| {
        let terms = CallTerms::on_completion(Token::random(), 60 * SECOND, 60 * SECOND);
        db.adapter().complete(&panics, &terms).await.unwrap();
        event.begin(&db.pool).await.unwrap().commit().await.unwrap();
        Ok::<_, &str>(())
    });
    let panicked = std::panic::AssertUnwindSafe(panics).catch_unwind().await;
    assert!(panicked.is_err());
}

const SECOND: Duration = Duration::from_secs(1);

/// Of a list. A late run elsewhere completes one of the events while the handler runs. Nothing of this run counts, and the retry runs
/// the others.
async fn event_completed_meanwhile_refuses_all<S: Shared>() {
    let db = Db::<S>::create().await;
    let (store, pool) = (Arc::new(db.adapter()), db.pool.clone());
    let handler = async move |event: Delivery| {
        for key in event.keys().filter(|key| ["x", "panic"].contains(&key.id())) {
            store.complete(key, &terms()).await.unwrap();
        }
        let mut tx = event.begin(&pool).await?;
        S::Database::run(&mut tx, insert(event.keys().map(DedupKey::id))).await?;
        let committed = tx.commit().await;
        assert_ne!(event.id(), "panic");
        committed
    };
    let layer = DedupLayer::transactional(by_word(), db.adapter());
    let app: Router = Router::new().route("/hook", post(handler)).layer(layer);
    let deliver = |ids| app.clone().oneshot(Request::post("/hook").body(Body::from(ids)).unwrap());
    assert_eq!(answered(&deliver("a x b").await.unwrap()), (503, None));
    assert!(db.effects().await.is_empty());
    assert_eq!(answered(&deliver("a x b").await.unwrap()), (200, None));
    assert!(tokio::spawn(deliver("panic")).await.unwrap_err().is_panic());
    assert_eq!(db.effects().await, ["a", "b"]);
}
