//! A test's own database can be dropped after the test: no connection of the adapter is left in it.

use std::process::Command;
use std::time::{Duration, Instant};

use axum::Router;
use axum::routing::post;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, Executor, PgConnection, PgPool};
use tokio::net::TcpListener;
use tower_dedup::adapter::PostgresAdapter;
use tower_dedup::adapter::contract::DedupAdapter;
use tower_dedup::adapter::inspect::MaintenanceAdapter;
use tower_dedup::{DedupLayer, provider, testing};

use crate::support::postgres::{fresh_name, shared};
use crate::support::{dedup_key, terms};

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
                crate::support::until(|| runtime.metrics().num_alive_tasks() <= 1).await;
                pool.close().await;
            }
        }
        Database::assert_droppable(&name).await;
    }
}

/// `#[sqlx::test]` prints an error if it cannot drop its database, and passes.
#[tokio::test]
async fn sqlx_test_drops_its_databases() {
    let Database { name, pool } = Database::create().await;
    let tests = concat!(module_path!(), "::in_sqlx_test::").split_once("::").unwrap().1;
    let output = Command::new(std::env::current_exe().unwrap())
        .args([tests, "--ignored", "--nocapture"])
        .env("DATABASE_URL", pool.connect_options().to_url_lossy().as_str())
        .output()
        .unwrap();
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    assert!(output.status.success() && text.contains("2 passed"), "{text}");
    assert!(!text.contains("failed to delete") && !text.contains("held onto"), "{text}");
    let left = sqlx::query_scalar::<_, i64>("SELECT count(*) FROM _sqlx_test.databases");
    assert_eq!(left.fetch_one(&pool).await.unwrap(), 0);
    pool.close().await;
    Database::assert_droppable(&name).await;
}

mod in_sqlx_test {
    use axum::extract::State;
    use tower_dedup::{CommitError, Delivery};

    use super::*;

    async fn on_stripe(State(pool): State<PgPool>, event: Delivery) -> Result<(), CommitError> {
        let mut tx = event.begin(&pool).await?;
        sqlx::query("INSERT INTO payments VALUES ('evt_1')").execute(&mut *tx).await?;
        tx.commit().await
    }

    fn app(pool: &PgPool) -> Router {
        let dedup = DedupLayer::transactional(provider::STRIPE, PostgresAdapter::new(pool.clone()));
        Router::new().route("/stripe", post(on_stripe).layer(dedup)).with_state(pool.clone())
    }

    #[ignore = "sqlx_test_drops_its_databases runs it"]
    #[sqlx::test]
    async fn redelivered_payment_is_stored_once(pool: PgPool) -> sqlx::Result<()> {
        pool.execute("CREATE TABLE payments (event_id text)").await?;
        let event = testing::request(provider::STRIPE, "/stripe", "evt_1");
        let responses = testing::redeliver(app(&pool), event, 3).await;
        assert_eq!((responses.handled(), responses.duplicates()), (1, 2));
        let payments = sqlx::query_scalar("SELECT count(*) FROM payments");
        assert_eq!(payments.fetch_one(&pool).await.ok(), Some(1_i64));
        Ok(())
    }

    /// A server that the test has started is not told of the test's end.
    #[ignore = "sqlx_test_drops_its_databases runs it"]
    #[sqlx::test]
    async fn server_outlives_its_test(pool: PgPool) -> sqlx::Result<()> {
        let adapter = PostgresAdapter::new(pool.clone());
        use_workers(&adapter).await;
        let dedup = DedupLayer::new(provider::STRIPE, adapter);
        let app = Router::new().route("/stripe", post(async || "done").layer(dedup));
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        tokio::spawn(async { axum::serve(listener, app).await });
        Ok(())
    }
}
