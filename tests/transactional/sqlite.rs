//! Handlers that wait for the one writer of an SQLite file.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use futures_util::{StreamExt, stream};
use sqlx::SqlitePool;
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions};
use tower_dedup::adapter::SqliteAdapter;
use tower_dedup::adapter::contract::{CallTerms, DedupAdapter, Token};
use tower_dedup::adapter::maintenance::KeyState;
use tower_dedup::{CommitError, CommitErrorKind, Deduplicator, Delivery, RunError, RunOutcome};

use super::fixture::Db;
use support::places::Sqlite;
use support::{dedup_key, state, until};

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

/// A handler and a batch of the adapter wait for the connection and the lock in one order. Otherwise each has what the
/// other waits for, until a timeout.
#[tokio::test]
async fn events_go_on_while_the_pool_has_a_free_connection() {
    const LATE: Duration = Duration::from_secs(20);
    for (connections, held) in [(1, 0), (2, 0), (2, 1), (10, 9)] {
        let file = File::new();
        let pool =
            file.pool(SqlitePoolOptions::new().max_connections(connections).acquire_timeout(LATE));
        let worker = Deduplicator::transactional(SqliteAdapter::new(pool.clone()));
        let worker = worker.store_timeout(LATE);
        SqliteAdapter::new(pool.clone()).migrate().await.unwrap();
        sqlx::query("CREATE TABLE effects (id TEXT)").execute(&pool).await.unwrap();
        let _held = join_all((0..held).map(|_| pool.acquire())).await;
        let ran = stream::iter(0..100).map(|number| {
            let (worker, pool) = (&worker, &pool);
            async move {
                let commits = async |event: Delivery| write(pool, &event).await;
                worker.run(&dedup_key(&format!("{number}")), commits).await
            }
        });
        let at = Instant::now();
        let ran: Vec<_> = ran.buffer_unordered(20).collect().await;
        let failed = ran.iter().filter(|ran| !matches!(ran, Ok(RunOutcome::First(())))).count();
        let case = format!("{held} of {connections} held: {:?}", at.elapsed());
        assert_eq!(failed, 0, "{case}, {:?}", ran.iter().find(|ran| ran.is_err()));
    }
}

/// `complete_in` outside of the handler's transaction, or after an ignored error has ended it, would complete alone.
#[tokio::test]
async fn completion_outside_of_a_transaction_is_refused() {
    let file = File::new();
    let adapter = SqliteAdapter::connect(&file.url()).await.unwrap();
    adapter.migrate().await.unwrap();
    let pool = file.pool(SqlitePoolOptions::new().max_connections(1));
    let create = "CREATE TABLE effects (id TEXT); CREATE TABLE audit (text TEXT)";
    sqlx::raw_sql(create).execute(&pool).await.unwrap();
    let worker = Deduplicator::transactional(adapter.clone());
    let keys = ["outside", "ended"].map(dedup_key);
    let outside =
        worker.run(&keys[0], async |event| event.complete_in(&mut *pool.acquire().await?).await);
    let outside = outside.await;
    // A full disk ends the transaction, and not only the statement.
    let pages: i64 = sqlx::query_scalar("PRAGMA page_count").fetch_one(&pool).await.unwrap();
    let limit = sqlx::AssertSqlSafe(format!("PRAGMA max_page_count = {pages}"));
    sqlx::query(limit).execute(&pool).await.unwrap();
    let ended = worker.run(&keys[1], async |event| {
        let mut tx = pool.begin().await?;
        sqlx::query("INSERT INTO effects VALUES ('ended')").execute(&mut *tx).await?;
        let audit = sqlx::query("INSERT INTO audit VALUES (hex(zeroblob(100000)))");
        let full = audit.execute(&mut *tx).await.unwrap_err();
        assert_eq!(full.as_database_error().unwrap().code().as_deref(), Some("13"));
        event.complete_in(&mut *tx).await?;
        Ok::<_, CommitError>(tx.commit().await?)
    });
    for (id, ran) in [("outside", outside), ("ended", ended.await)] {
        let Err(RunError::Handler(error)) = ran else { panic!("{id}: {ran:?}") };
        assert_eq!(error.kind(), CommitErrorKind::TransactionEnded, "{id}");
        let source = std::error::Error::source(&error).unwrap().to_string();
        assert!(source.contains("no transaction is open"), "{id}: {source}");
        assert_eq!(state(&adapter, id).await, Some(KeyState::Released), "{id}");
    }
    // In a transaction it completes, and the connection is as before.
    let within = worker.run(&keys[1], async |event| {
        let mut tx = pool.begin().await?;
        sqlx::query("INSERT INTO effects VALUES ('ended')").execute(&mut *tx).await?;
        event.complete_in(&mut *tx).await?;
        Ok::<_, CommitError>(tx.commit().await?)
    });
    assert_eq!(within.await.unwrap(), RunOutcome::First(()));
    let effects = sqlx::query_scalar("SELECT id FROM effects").fetch_all(&pool);
    let effects: Vec<String> = effects.await.unwrap();
    assert_eq!(effects, ["ended"]);
}

/// A file in a folder of its own.
struct File(tempfile::TempDir);

impl File {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn url(&self) -> String {
        format!("sqlite://{}?mode=rwc", self.0.path().join("app.db").display())
    }

    fn pool(&self, options: SqlitePoolOptions) -> SqlitePool {
        let connect = self.url().parse::<SqliteConnectOptions>().unwrap();
        options.connect_lazy_with(connect.journal_mode(SqliteJournalMode::Wal))
    }
}

async fn write(pool: &SqlitePool, event: &Delivery) -> Result<(), CommitError> {
    let mut tx = event.begin(pool).await?;
    let insert = sqlx::query("INSERT INTO effects VALUES (?1)").bind(event.id());
    insert.execute(&mut *tx).await?;
    tx.commit().await
}
