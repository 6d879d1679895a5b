//! Handlers that ignore an error, end the transaction by raw SQL, or complete in a savepoint: on Postgres and on SQLite.

use futures_util::future::join_all;
use tower_dedup::DedupLayer;
use tower_dedup::adapter::maintenance::{KeyState, MaintenanceAdapter};

use super::fixture::{CONNECTIONS, Db, World, app, on_both, send, started};
use support::places::{Postgres, Shared, Sqlite};
use support::words::Sql;
use support::{answered, by_header, dedup_key, state, until};

on_both!(
    no_misuse_is_a_2xx_without_its_effect,
    handler_that_fails_after_its_own_commit_has_failed,
    savepoints_of_the_handler_work,
    raw_commit_never_leaves_a_complete_key,
    savepoint_whose_beginning_is_dropped_never_leaves_a_complete_key,
);

/// Each misuse many times: no connection is lost, and a completion that was refused costs no further attempt.
async fn no_misuse_is_a_2xx_without_its_effect<S: Shared>() {
    let (db, _, app) = started::<S>().await;
    let mut attempts = 0;
    for script in [
        "begin insert raw-rollback commit",
        "begin insert raw-rollback raw-begin commit",
        "begin insert complete raw-rollback commit",
        "begin insert complete complete-anyway raw-rollback commit",
        // Nothing to write was said before.
        "nothing begin insert drop",
        "nothing own-drop",
        "nothing take-completion",
    ] {
        for _ in 0..=CONNECTIONS {
            let answer = send(&app, "a", script).await;
            assert_ne!(answer.status(), 200, "{script}");
            assert!(db.effects().await.is_empty(), "{script}");
            let entry = db.adapter().get(&dedup_key("a")).await.unwrap().unwrap();
            attempts += 1;
            assert_eq!((entry.state, entry.attempts), (KeyState::Released, attempts), "{script}");
        }
    }
    assert_eq!(answered(&send(&app, "a", "begin insert commit").await), (200, None));
    assert_eq!(db.effects().await, ["a"]);
}

/// Its second transaction is refused, because its first one has completed the event.
async fn handler_that_fails_after_its_own_commit_has_failed<S: Shared>() {
    let (db, _, app) = started::<S>().await;
    assert_eq!(answered(&send(&app, "a", "begin insert commit begin commit").await), (503, None));
    assert_eq!(answered(&send(&app, "a", "").await), (200, Some("duplicate")));
    assert_eq!(db.effects().await, ["a"]);
}

async fn savepoints_of_the_handler_work<S: Shared>() {
    let (db, _, app) = started::<S>().await;
    assert_eq!(answered(&send(&app, "a", "begin savepoints commit").await), (200, None));
    assert_eq!(db.effects().await, ["a"]);
    // Completed in a savepoint that is rolled back: `commit` completes again.
    assert_eq!(answered(&send(&app, "b", "begin insert in-savepoint commit").await), (200, None));
    assert_eq!(db.effects().await, ["a", "b"]);
}

/// On Postgres an ignored error aborts the transaction; a COMMIT of it is no error.
#[tokio::test]
async fn postgres_error_that_the_handler_ignores_is_no_2xx() {
    let (db, _, app) = started::<Postgres>().await;
    for script in ["begin insert broken commit", "begin insert complete broken commit"] {
        let answer = send(&app, "a", script).await;
        assert_eq!(answered(&answer), (500, None), "{script}");
        assert!(db.effects().await.is_empty(), "{script}");
    }
}

/// The handler's raw COMMIT leaves its effect without the key: it is told, and the retry runs again.
async fn raw_commit_never_leaves_a_complete_key<S: Shared>() {
    for script in ["begin insert raw-commit commit", "begin insert raw-commit raw-begin commit"] {
        let (db, _, app) = started::<S>().await;
        assert_ne!(send(&app, "a", script).await.status(), 200);
        assert_eq!(state(&db.adapter(), "a").await, Some(KeyState::Released), "{script}");
    }
}

/// It ends the whole transaction, on SQLite unless its statement was faster, and what follows commits alone.
async fn savepoint_whose_beginning_is_dropped_never_leaves_a_complete_key<S: Shared>() {
    for script in
        ["begin begin-dropped insert commit", "begin complete begin-dropped insert commit"]
    {
        let (db, _, app) = started::<S>().await;
        let status = send(&app, "a", script).await.status();
        let ended = if status == 200 { KeyState::Complete } else { KeyState::Released };
        assert_eq!(state(&db.adapter(), "a").await, Some(ended), "{script}");
        assert_eq!(db.effects().await, ["a"], "{script}");
    }
}

/// `OR ROLLBACK` ends the whole transaction, and the statements after it would commit alone. The connections stay usable.
#[tokio::test]
async fn sqlite_insert_or_rollback_that_is_ignored_is_no_2xx() {
    let (db, _, app) = started::<Sqlite>().await;
    assert_eq!(send(&app, "a", "begin insert commit").await.status(), 200);
    db.adapter().forget(&dedup_key("a")).await.unwrap();
    for _ in 0..=CONNECTIONS {
        let answer = send(&app, "a", "begin or-rollback commit").await;
        assert_eq!(answered(&answer), (500, None));
        let answer = send(&app, "a", "begin or-rollback raw-begin commit").await;
        assert_eq!(answered(&answer), (500, None));
    }
    assert_eq!(answered(&send(&app, "b", "begin insert commit").await), (200, None));
    assert_eq!(db.effects().await, ["a", "b"]);
}

/// Somebody has left a transaction open on a connection of the pool, by a raw `BEGIN`. No event joins it: its connection is
/// closed, also while the pool is busy.
async fn transaction_that_was_left_open_is_closed<S: Shared>(statement: &str) {
    let (db, world) = (Db::<S>::create().await, World::default());
    // A batch of the adapter would write in the transaction.
    let layer = DedupLayer::transactional(by_header(), db.other_adapter().await);
    let app = app(&db, layer, &world);
    let mut expected = Vec::new();
    // The pool gives its idle connections in turn.
    for (is_busy, events) in [(false, 20), (true, 1), (true, 20)] {
        let mut all = all_connections(&db).await;
        for sql in ["BEGIN", statement] {
            // An error aborts the transaction on Postgres.
            drop(S::Database::run(&mut all[0], sql.to_owned()).await);
        }
        let busy = all.split_off(if is_busy { 1 } else { all.len() });
        let idle = usize::try_from(CONNECTIONS).unwrap() - busy.len();
        drop(all);
        until(|| db.pool.num_idle() == idle).await;
        let ids: Vec<_> = (0..events).map(|event| format!("{is_busy} {events} {event}")).collect();
        for answer in join_all(ids.iter().map(|id| send(&app, id, "begin insert commit"))).await {
            assert_eq!(answered(&answer), (200, None), "{is_busy} {events}");
        }
        expected.extend(ids);
        drop(busy);
        // sqlx gives a connection back in a task, so the search for it may come too early. The next event on it closes it.
        let mut round = 0;
        while !every_connection_commits(&db, &format!("{is_busy} {events} {round}")).await {
            round += 1;
            assert!(round < 20, "a connection stays in its transaction: {is_busy} {events}");
            let id = format!("{is_busy} {events} again {round}");
            assert_eq!(
                answered(&send(&app, &id, "begin insert commit").await),
                (200, None),
                "{id}"
            );
            expected.push(id);
        }
        expected.sort();
        let mut effects = db.effects().await;
        effects.retain(|id| !id.starts_with("probe"));
        assert_eq!(effects, expected);
    }
}

/// Returns whether no connection is in a transaction: what is written on each is committed.
async fn every_connection_commits<S: Shared>(db: &Db<S>, round: &str) -> bool {
    let mut probes = Vec::new();
    for (number, connection) in all_connections(db).await.iter_mut().enumerate() {
        let id = format!("probe {round} {number}");
        let insert = format!("INSERT INTO effects (id) VALUES ('{id}')");
        if S::Database::run(connection, insert).await.is_err() {
            return false;
        }
        probes.push(id);
    }
    let effects = db.effects().await;
    probes.iter().all(|probe| effects.contains(probe))
}

async fn all_connections<S: Shared>(db: &Db<S>) -> Vec<sqlx::pool::PoolConnection<S::Database>> {
    let all = join_all((0..CONNECTIONS).map(|_| db.pool.acquire())).await;
    all.into_iter().map(Result::unwrap).collect()
}

#[tokio::test]
async fn postgres_transaction_that_was_left_open_is_not_joined() {
    for statement in ["INSERT INTO effects (id) VALUES ('left open')", "SELECT nonsense"] {
        transaction_that_was_left_open_is_closed::<Postgres>(statement).await;
    }
}

/// Without a write: SQLite's own lock of the file would keep all others out.
#[tokio::test]
async fn sqlite_transaction_that_was_left_open_fails_no_event() {
    for statement in ["SELECT 1", "SELECT id FROM effects"] {
        transaction_that_was_left_open_is_closed::<Sqlite>(statement).await;
    }
}
