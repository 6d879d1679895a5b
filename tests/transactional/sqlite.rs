//! Handlers that wait for the one writer of an SQLite file.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use sqlx::sqlite::{SqliteConnectOptions, SqlitePoolOptions};
use tower_dedup::adapter::SqliteAdapter;
use tower_dedup::adapter::contract::{CallTerms, DedupAdapter, Token};
use tower_dedup::{CommitError, Deduplicator, Delivery, RunError, RunOutcome};

use super::fixture::Db;
use support::places::Sqlite;
use support::{dedup_key, until};

const HANDLERS: usize = 20;
const WRITES_FOR: Duration = Duration::from_millis(100);

/// Twenty transactions wait for one another for two seconds. A claim of another event waits for one of them, and the pool
/// has free connections, because a handler takes its connection when its turn has come.
#[tokio::test]
async fn handlers_that_wait_hold_up_neither_claims_nor_the_pool() {
    let db = Db::<Sqlite>::create().await;
    let (adapter, began) = (db.adapter(), AtomicUsize::new(0));
    let worker = Deduplicator::transactional(db.adapter());
    let keys: Vec<_> = (0..HANDLERS).map(|number| dedup_key(&format!("a{number}"))).collect();
    let handlers = join_all(keys.iter().map(|key| {
        worker.run(key, async |event| {
            began.fetch_add(1, Ordering::SeqCst);
            let mut tx = event.begin(&db.pool).await?;
            let insert = sqlx::query("INSERT INTO effects (id) VALUES (?1)").bind(event.id());
            insert.execute(&mut *tx).await?;
            tokio::time::sleep(WRITES_FOR).await;
            tx.commit().await?;
            Ok::<_, CommitError>(())
        })
    }));
    let others = async {
        until(|| began.load(Ordering::SeqCst) == HANDLERS).await;
        let at = Instant::now();
        let terms = CallTerms::on_completion(Token::random(), 600 * WRITES_FOR, 600 * WRITES_FOR);
        let read = sqlx::query("SELECT id FROM effects").fetch_all(&db.pool);
        let other = dedup_key("other");
        let (claimed, read) = tokio::join!(adapter.claim(&other, &terms), read);
        claimed.unwrap();
        read.unwrap();
        at.elapsed()
    };
    let (ran, waited) = tokio::join!(handlers, others);
    ran.into_iter().for_each(|ran| drop(ran.unwrap()));
    assert_eq!(db.effects().await.len(), HANDLERS);
    assert!(waited < WRITES_FOR * 10, "{waited:?}");
}

/// The pool of the handlers is not that of the store, and busy. Events that need no transaction of it run.
#[tokio::test]
async fn handler_that_waits_for_its_pool_holds_up_no_other_event() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("app.db");
    let store = SqliteAdapter::connect(&format!("sqlite://{}", file.display())).await.unwrap();
    store.migrate().await.unwrap();
    let pool = SqlitePoolOptions::new().max_connections(1);
    let pool = pool.connect_with(SqliteConnectOptions::new().filename(&file)).await.unwrap();
    let report = pool.acquire().await.unwrap();
    let worker = Deduplicator::transactional(store).handler_timeout(20 * WRITES_FOR);
    let keys = ["a", "b", "c"].map(dedup_key);
    let commits = async |event: Delivery| event.begin(&pool).await?.commit().await;
    let waits = worker.run(&keys[0], commits);
    let others = async {
        tokio::time::sleep(WRITES_FOR).await;
        let nothing = |event: Delivery| {
            event.nothing_to_write();
            async { Ok::<_, CommitError>(()) }
        };
        let at = Instant::now();
        assert_eq!(worker.run(&keys[1], nothing).await.unwrap(), RunOutcome::First(()));
        assert!(at.elapsed() < 10 * WRITES_FOR, "{:?}", at.elapsed());
    };
    let (waited, ()) = tokio::join!(waits, others);
    assert!(matches!(waited, Err(RunError::TimedOut)), "{waited:?}");
    // Dropped, it waits no more.
    drop(report);
    for key in [&keys[0], &keys[2]] {
        assert_eq!(worker.run(key, commits).await.unwrap(), RunOutcome::First(()));
    }
}
