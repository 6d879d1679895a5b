//! Faults of SQLite that raise no error: open transactions, rows that expire at once, futures that
//! are not polled, dropped tables.

use std::convert::Infallible;
use std::slice;
use std::time::{Duration, Instant};

use http::{Request, Response, StatusCode};
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions};
use sqlx::{AssertSqlSafe, Connection, Sqlite, SqlitePool};
use tower::Layer;
use tower_dedup::TxHandle;
use tower_dedup::adapter::contract::{ClaimReply, DedupAdapter};
use tower_dedup::adapter::inspect::MaintenanceAdapter;
use tower_dedup::adapter::{SqliteAdapter, SqliteOptions, TransactionAdapter};
use tower_dedup::{DedupLayer, DedupTx};

use super::sqlite::File;
use crate::support::{Body, FIRST, by_header, dedup_key, on_claim, request, result, send, terms};

const HOUR: Duration = Duration::from_secs(3_600);

impl File {
    /// A pool of the user, on a file with a table of the user.
    async fn pool(&self, connections: u32) -> SqlitePool {
        let options = SqliteConnectOptions::new()
            .filename(self.path())
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .foreign_keys(true)
            .busy_timeout(Duration::from_millis(100));
        let pool = SqlitePoolOptions::new().max_connections(connections);
        let pool = pool.connect_with(options).await.unwrap();
        let tables = "CREATE TABLE IF NOT EXISTS effects (id TEXT); \
            CREATE TABLE IF NOT EXISTS orders (id INTEGER PRIMARY KEY, \
            after INTEGER REFERENCES orders (id) DEFERRABLE INITIALLY DEFERRED)";
        sqlx::raw_sql(tables).execute(&pool).await.unwrap();
        pool
    }
}

async fn count(pool: &SqlitePool, table: &str) -> i64 {
    let sql = AssertSqlSafe(format!("SELECT count(*) FROM {table}"));
    sqlx::query_scalar(sql).fetch_one(pool).await.unwrap()
}

async fn lend(request: &Request<Body>) -> DedupTx<Sqlite> {
    request.extensions().get::<TxHandle<Sqlite>>().unwrap().lend().await.unwrap()
}

fn answer(status: u16) -> Result<Response<Body>, Infallible> {
    let mut response = Response::new(Body::default());
    *response.status_mut() = StatusCode::from_u16(status).unwrap();
    Ok(response)
}

/// The handler's write makes COMMIT fail. The store has not failed.
async fn violates(request: Request<Body>) -> Result<Response<Body>, Infallible> {
    let mut tx = lend(&request).await;
    sqlx::query("INSERT INTO orders VALUES (1, 99)").execute(&mut *tx).await.unwrap();
    answer(200)
}

#[tokio::test]
async fn deferred_foreign_key_violated_at_commit_is_500_uncommitted() {
    let file = File::new();
    let pool = file.pool(2).await;
    let service = DedupLayer::transactional(by_header(), SqliteAdapter::new(pool.clone()))
        .layer(tower::service_fn(violates));
    for _ in 0..3 {
        let refused = send(&service, request("a")).await;
        let shown = (refused.status().as_u16(), result(&refused));
        assert_eq!(shown, (500, Some("uncommitted")));
    }
    assert_eq!(count(&pool, "orders").await, 0);
    assert_eq!(count(&pool, "webhook_deliveries").await, 0);
}

/// The delivery ends before the statement that its handler has left, and so before the rollback.
#[tokio::test]
async fn connection_of_a_rollback_that_outlives_its_delivery_is_usable() {
    let file = File::new();
    let pool = file.pool(1).await;
    let long = tower::service_fn(async |request: Request<Body>| {
        let count = "WITH RECURSIVE c (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c LIMIT 3000000) \
            INSERT INTO effects SELECT max(n) FROM c";
        sqlx::query(count).execute(&mut *lend(&request).await).await.unwrap();
        answer(200)
    });
    let (short, patient) = (Duration::from_millis(100), Duration::from_secs(20));
    let options = SqliteOptions::new().write_lock_timeout(patient);
    let adapter = SqliteAdapter::with_options(pool.clone(), options);
    adapter.migrate().await.unwrap();
    let layer = DedupLayer::transactional(by_header(), adapter);
    let service = layer.store_timeout(short).handler_timeout(short).layer(long);
    assert_eq!(send(&service, request("a")).await.status(), 504);
    let began = pool.begin_with("BEGIN IMMEDIATE").await;
    began.expect("a connection without a transaction").rollback().await.unwrap();
    assert_eq!(count(&pool, "effects").await, 0);
}

/// SQLite has rolled back, as after a COMMIT on a full disk. Here the handler's own hook does so.
#[tokio::test]
async fn connection_of_a_commit_that_became_a_rollback_is_usable() {
    let file = File::new();
    let pool = file.pool(1).await;
    let layer = DedupLayer::transactional(by_header(), SqliteAdapter::new(pool.clone()));
    let service = layer.layer(tower::service_fn(async |request: Request<Body>| {
        lend(&request).await.lock_handle().await.unwrap().set_commit_hook(|| false);
        answer(200)
    }));
    let refused = send(&service, request("a")).await;
    assert_eq!((refused.status().as_u16(), result(&refused)), (500, Some("uncommitted")));
    let began = pool.begin_with("BEGIN IMMEDIATE").await;
    began.expect("a connection without a transaction").rollback().await.unwrap();
}

/// SQLite ends a transaction of the user, and sqlx does not know it. The next transaction is not rolled back then.
async fn leak_a_transaction(pool: &SqlitePool, statement: &'static str) {
    let mut ended = pool.begin().await.unwrap();
    sqlx::query("ROLLBACK").execute(&mut *ended).await.unwrap();
    drop(ended);
    let mut leaked = pool.begin().await.unwrap();
    sqlx::query(statement).fetch_all(&mut *leaked).await.unwrap();
}

#[tokio::test]
async fn call_beside_a_transaction_that_the_user_has_leaked_is_committed() {
    let file = File::new();
    let pool = file.pool(1).await;
    let adapter = SqliteAdapter::new(pool.clone());
    let (key, terms) = (dedup_key("a"), on_claim(&terms()));
    adapter.migrate().await.unwrap();
    leak_a_transaction(&pool, "INSERT INTO effects VALUES ('a')").await;
    assert_eq!(adapter.claim(&key, &terms).await.unwrap(), FIRST);
    let written = file.connect().await.get(&key).await.unwrap();
    assert!(written.is_some(), "an acknowledged claim was not committed");
}

/// The transaction still sees a key that another process has released.
#[tokio::test]
async fn key_that_only_a_leaked_transaction_sees_is_no_duplicate() {
    let file = File::new();
    let pool = file.pool(1).await;
    let (adapter, other) = (SqliteAdapter::new(pool.clone()), file.connect().await);
    let (key, released) = (dedup_key("a"), on_claim(&terms()));
    adapter.claim(&key, &released).await.unwrap();
    leak_a_transaction(&pool, "SELECT * FROM webhook_deliveries").await;
    other.release(&key, &released).await.unwrap();
    assert_eq!(adapter.claim(&key, &on_claim(&terms())).await.unwrap(), FIRST);
}

/// Polls a call once, and then never again. The yields let its task take the file.
async fn left_unpolled<F: Future>(call: F) -> std::pin::Pin<Box<F>> {
    let mut call = Box::pin(call);
    let polled = futures_util::poll!(call.as_mut());
    assert!(polled.is_pending(), "the call completed at once");
    for _ in 0..3 {
        tokio::task::yield_now().await;
    }
    call
}

#[tokio::test]
async fn unpolled_call_delays_no_other_call() {
    let file = File::new();
    let adapter = file.connect().await;
    adapter.migrate().await.unwrap();
    let other = file.connect().await;
    other.migrate().await.unwrap();
    let (key, mine) = (dedup_key("a"), terms());
    let renewal = left_unpolled(adapter.renew(&key, &mine)).await;
    let forgotten = left_unpolled(adapter.forget(&key)).await;
    let purge = left_unpolled(adapter.purge(10)).await;
    let started = Instant::now();
    let claimed = other.claim(&dedup_key("b"), &terms()).await.unwrap();
    assert_eq!(claimed, ClaimReply::first(1, false));
    let opened = other.open(&[dedup_key("c")], &terms()).await.unwrap();
    other.rollback(opened.transaction.unwrap()).await.unwrap();
    assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
    drop((renewal, forgotten, purge));
}

#[tokio::test]
async fn dropped_table_is_created_again_by_the_call_that_misses_it() {
    let file = File::new();
    let adapter = SqliteAdapter::with_options(file.pool(2).await, SqliteOptions::new());
    let key = dedup_key("a");
    let drop_it = "DROP TABLE webhook_deliveries; DROP TABLE webhook_deliveries_schema";
    assert_eq!(adapter.claim(&key, &on_claim(&terms())).await.unwrap(), FIRST);
    let mut other = file.connection().await;
    sqlx::raw_sql(drop_it).execute(&mut other).await.unwrap();
    assert_eq!(adapter.claim(&key, &on_claim(&terms())).await.unwrap(), FIRST);
    sqlx::raw_sql(drop_it).execute(&mut other).await.unwrap();
    let claimed = adapter.claim(&key, &terms()).await.unwrap();
    assert_eq!(claimed, ClaimReply::first(1, false));
    sqlx::raw_sql(drop_it).execute(&mut other).await.unwrap();
    assert_eq!(adapter.purge(10).await.unwrap(), 0);
    sqlx::raw_sql(drop_it).execute(&mut other).await.unwrap();
    let open = adapter.open(slice::from_ref(&key), &terms()).await.unwrap().transaction.unwrap();
    adapter.commit(open, slice::from_ref(&key), &terms()).await.unwrap_err();
    sqlx::raw_sql(drop_it).execute(&mut other).await.unwrap();
    assert_eq!(adapter.get(&key).await.unwrap(), None);
    sqlx::raw_sql(drop_it).execute(&mut other).await.unwrap();
    let mut tx = other.begin_with("BEGIN IMMEDIATE").await.unwrap();
    let first = adapter.record_in(&mut tx, &key, HOUR).await.unwrap();
    assert_eq!(first, FIRST);
    tx.commit().await.unwrap();
    let again = adapter.claim(&key, &on_claim(&terms())).await.unwrap();
    assert!(matches!(again, ClaimReply::Duplicate(_)), "{again:?}");
}
