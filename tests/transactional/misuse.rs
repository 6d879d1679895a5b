//! Handlers that ignore an error, end the transaction by raw SQL, or complete in a savepoint: on Postgres and on SQLite.

use tower_dedup::adapter::inspect::{KeyState, MaintenanceAdapter};

use super::fixture::{CONNECTIONS, on_both, send, started};
use support::places::{Postgres, Shared, Sqlite};
use support::{answered, dedup_key, state};

on_both!(
    no_misuse_is_a_2xx_without_its_effect,
    handler_that_fails_after_its_own_commit_has_failed,
    savepoints_of_the_handler_work,
    raw_commit_never_leaves_a_complete_key,
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
