//! A test's own database can be dropped after the test: no connection of the adapter is left in it.

use std::time::{Duration, Instant};

use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection, PgPool};
use tower_dedup::adapter::PostgresAdapter;
use tower_dedup::adapter::contract::DedupAdapter;
use tower_dedup::adapter::maintenance::MaintenanceAdapter;

use support::postgres::{fresh_name, shared};
use support::{dedup_key, terms};

/// PostgreSQL itself waits up to 5 s for sessions that are about to end.
const SOON: Duration = Duration::from_secs(8);

/// A database, and a pool to it as `#[sqlx::test]` makes it.
struct Database {
    name: String,
    pool: PgPool,
}

impl Database {
    async fn create() -> Self {
        let name = fresh_name();
        let mut server = PgConnection::connect(shared()).await.unwrap();
        server.execute(AssertSqlSafe(format!("CREATE DATABASE {name}"))).await.unwrap();
        let options: PgConnectOptions = shared().parse().unwrap();
        let pool =
            PgPoolOptions::new().max_connections(5).connect_lazy_with(options.database(&name));
        Self { name, pool }
    }

    /// Drops the database without force.
    async fn assert_droppable(name: &str) {
        let (started, sql) = (Instant::now(), format!("DROP DATABASE {name}"));
        let mut server = PgConnection::connect(shared()).await.unwrap();
        server.execute(AssertSqlSafe(sql)).await.expect("a database without sessions");
        assert!(started.elapsed() < SOON, "{:?}", started.elapsed());
    }
}

/// Makes calls at the same time, so that all workers get a connection.
async fn use_workers(adapter: &PostgresAdapter) {
    let calls = (0..64).map(|id| {
        let adapter = adapter.clone();
        tokio::spawn(async move {
            let key = dedup_key(&format!("evt_{id}"));
            adapter.claim(&key, &terms()).await.unwrap()
        })
    });
    for call in calls.collect::<Vec<_>>() {
        call.await.unwrap();
    }
}

async fn sessions(name: &str) -> i64 {
    let mut server = PgConnection::connect(shared()).await.unwrap();
    let count = sqlx::query_scalar("SELECT count(*) FROM pg_stat_activity WHERE datname = $1");
    count.bind(name).fetch_one(&mut server).await.unwrap()
}

/// `#[sqlx::test]` closes the pool of a test, and nothing else: a server may still use the adapter.
#[tokio::test]
async fn end_of_the_pool_or_the_adapter_leaves_no_connection() {
    for end in ["pool closed", "both closed", "both dropped", "adapter dropped, then pool closed"] {
        let Database { name, pool } = Database::create().await;
        let adapter = PostgresAdapter::new(pool.clone());
        use_workers(&adapter).await;
        let in_use = sessions(&name).await;
        assert!(in_use > i64::from(pool.size()), "{in_use} sessions: no worker has a connection");
        match end {
            "pool closed" => {
                pool.close().await;
                assert!(adapter.claim(&dedup_key("late"), &terms()).await.is_err());
            }
            "both closed" => {
                adapter.close().await;
                pool.close().await;
            }
            "both dropped" => drop((adapter, pool)),
            _ => {
                drop(adapter);
                // Nothing of the adapter waits for the end of the pool.
                let runtime = tokio::runtime::Handle::current();
                support::until(|| runtime.metrics().num_alive_tasks() <= 1).await;
                pool.close().await;
            }
        }
        Database::assert_droppable(&name).await;
    }
}
