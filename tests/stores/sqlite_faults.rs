//! Faults of SQLite that raise no error: open transactions, rows that expire at once, futures that
//! are not polled, dropped tables.

use std::convert::Infallible;
use std::time::{Duration, Instant};

use http::{Request, Response, StatusCode};
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions};
use sqlx::{AssertSqlSafe, SqlitePool};
use tower::Layer;
use tower_dedup::adapter::contract::{ClaimReply, DedupAdapter};
use tower_dedup::adapter::inspect::MaintenanceAdapter;
use tower_dedup::adapter::{SqliteAdapter, SqliteOptions};
use tower_dedup::{DedupLayer, Delivery};

use super::sqlite::File;
use crate::support::{Body, FIRST, by_header, dedup_key, on_claim, request, send, terms};

const SHORT: Duration = Duration::from_millis(100);

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

fn answer(status: u16) -> Response<Body> {
    let mut response = Response::new(Body::default());
    *response.status_mut() = StatusCode::from_u16(status).unwrap();
    response
}

/// A pool of one connection: the next transaction of the handler needs it.
#[tokio::test]
async fn transaction_whose_commit_fails_or_outlives_its_delivery_leaves_the_connection_usable() {
    let file = File::new();
    let pool = file.pool(1).await;
    let run = |sql: &'static str, is_late: bool| {
        let handler = pool.clone();
        let handler = tower::service_fn(move |request: Request<Body>| {
            let pool = handler.clone();
            async move {
                let event: &Delivery = request.extensions().get().unwrap();
                let mut tx = event.begin(&pool).await.unwrap();
                sqlx::query(sql).execute(&mut *tx).await.unwrap();
                let status = if tx.commit().await.is_ok() { 200 } else { 500 };
                Ok::<_, Infallible>(answer(status))
            }
        });
        let options = SqliteOptions::new().write_lock_timeout(Duration::from_secs(20));
        let adapter = SqliteAdapter::with_options(pool.clone(), options);
        let layer = DedupLayer::transactional(by_header(), adapter);
        let layer = if is_late { layer.handler_timeout(SHORT) } else { layer };
        async move { send(&layer.layer(handler), request("a")).await.status().as_u16() }
    };
    // A deferred foreign key makes COMMIT fail. The handler's pool keeps its connection.
    for _ in 0..3 {
        assert_eq!(run("INSERT INTO orders VALUES (1, 99)", false).await, 500);
        assert_eq!(count(&pool, "orders").await, 0);
    }
    // The delivery ends before the statement that its handler has left, and so before the rollback.
    let long = "WITH RECURSIVE c (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c LIMIT 3000000) \
                INSERT INTO effects SELECT max(n) FROM c";
    assert_eq!(run(long, true).await, 504);
    assert_eq!(count(&pool, "effects").await, 0);
    assert_eq!(run("INSERT INTO effects VALUES ('a')", false).await, 200);
    assert_eq!(count(&pool, "effects").await, 1);
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
    assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
    drop((renewal, forgotten, purge));
}

#[tokio::test]
async fn dropped_table_is_an_error_until_it_is_made_again() {
    let file = File::new();
    let adapter = SqliteAdapter::with_options(file.pool(2).await, SqliteOptions::new());
    let key = dedup_key("a");
    assert_eq!(adapter.claim(&key, &on_claim(&terms())).await.unwrap(), FIRST);
    let drop_it = "DROP TABLE webhook_deliveries; DROP TABLE webhook_deliveries_schema";
    sqlx::raw_sql(drop_it).execute(&mut file.connection().await).await.unwrap();
    assert!(adapter.claim(&key, &on_claim(&terms())).await.is_err());
    adapter.purge(10).await.unwrap_err();
    adapter.migrate().await.unwrap();
    assert_eq!(adapter.claim(&key, &on_claim(&terms())).await.unwrap(), FIRST);
    let again = adapter.claim(&key, &on_claim(&terms())).await.unwrap();
    assert!(matches!(again, ClaimReply::Duplicate(_)), "{again:?}");
}
