//! Faults of SQLite that raise no error: open transactions, rows that expire at once, futures that
//! are not polled, dropped tables.

use std::time::{Duration, Instant};

use sqlx::SqlitePool;
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions};
use tower_dedup::adapter::contract::{ClaimReply, DedupAdapter};
use tower_dedup::adapter::maintenance::MaintenanceAdapter;
use tower_dedup::adapter::{SqliteAdapter, SqliteOptions};

use super::sqlite::File;
use support::{FIRST, dedup_key, on_claim, terms};

impl File {
    /// A pool of the user, on a file with a table of the user.
    async fn pool(&self, connections: u32) -> SqlitePool {
        let options = SqliteConnectOptions::new()
            .filename(self.path())
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .busy_timeout(Duration::from_millis(100));
        let pool = SqlitePoolOptions::new().max_connections(connections);
        let pool = pool.connect_with(options).await.unwrap();
        sqlx::query("CREATE TABLE effects (id TEXT)").execute(&pool).await.unwrap();
        pool
    }
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
