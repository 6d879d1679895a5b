//! What the answer and the record of a failed transaction say: what is wrong, and whether a retry may help.

use tower_dedup::DedupLayer;
use tower_dedup::ledger::Ledger;

use super::fixture::{Db, World, app, send, started};
use support::log::Log;
use support::places::{Postgres, Shared, Sqlite};
use support::{answered, by_header};

/// The text of the record of this kind of failure.
const FAILED: &str = "not committed: a transaction of a handler has failed";

/// Delivers the event with this script over a layer and the pool of this database. Returns the status and the record.
async fn failed<S: Shared>(
    db: &Db<S>,
    layer: DedupLayer<impl Ledger>,
    script: &str,
) -> (u16, String) {
    let (log, _guard) = Log::of_this_thread();
    let answer = send(&app(db, layer, &World::default()), "a", script).await;
    (answer.status().as_u16(), log.last(FAILED)["error"].clone())
}

fn assert_says((status, record): (u16, String), expected: u16, words: &[&str]) {
    assert_eq!(status, expected, "{record}");
    for word in words {
        assert!(record.contains(word), "{word:?} in {record:?}");
    }
    // A line of the server's source.
    assert!(!record.contains(" at line "), "{record}");
}

async fn each_error_says_what_is_wrong<S: Shared>() {
    let db = Db::<S>::create().await;
    let strict = || DedupLayer::transactional(by_header(), db.adapter());
    let words = ["in the handler's transaction: the database refused a statement"];
    assert_says(failed(&db, strict(), "begin nonsense commit").await, 500, &words);
    // As in another database that has the table.
    let words = ["an event has no row: the pool leads to another database than the store"];
    for script in ["begin insert lose-row commit", "begin insert lose-row complete commit"] {
        assert_says(failed(&db, strict(), script).await, 503, &words);
    }
    let words = ["on arrival, an event is complete before its handler runs"];
    let arrival = DedupLayer::on_arrival(by_header(), db.other_adapter().await);
    assert_says(failed(&db, arrival, "begin insert commit").await, 500, &words);
    assert!(db.effects().await.is_empty());
}

#[tokio::test]
async fn each_error_says_what_is_wrong_on_sqlite() {
    each_error_says_what_is_wrong::<Sqlite>().await;
}

#[tokio::test]
async fn each_error_says_what_is_wrong_on_postgres() {
    each_error_says_what_is_wrong::<Postgres>().await;
    let db = Db::<Postgres>::create().await;
    for (script, status, words) in [
        ("own-first", 500, "call `Completion::as_first_statement`"),
        ("begin insert reset-all commit", 500, "RESET ALL of the handler"),
        ("begin read-only insert commit", 503, "the session is read-only"),
    ] {
        let layer = DedupLayer::transactional(by_header(), db.adapter());
        assert_says(failed(&db, layer, script).await, status, &[words]);
    }
    assert!(db.effects().await.is_empty());
}

/// A transaction of this crate that the handler completes by a statement of its own is completed, and commits.
async fn completed_by_a_statement_commits<S: Shared>() {
    let (db, _, app) = started::<S>().await;
    assert_eq!(answered(&send(&app, "a", "begin insert complete-in commit").await), (200, None));
    assert_eq!(answered(&send(&app, "a", "500").await), (200, Some("duplicate")));
    assert_eq!(db.effects().await, ["a"]);
}

super::fixture::on_both!(completed_by_a_statement_commits);
