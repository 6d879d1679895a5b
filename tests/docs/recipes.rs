//! The recipes of the guide, on Postgres and on SQLite: the same SQL, and the same outcome.

use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::routing::post;
use sqlx::postgres::PgPoolOptions;
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode};
use sqlx::{PgPool, SqlitePool};
use tower::ServiceExt;
use tower_dedup::adapter::{PostgresAdapter, SqliteAdapter, SqliteOptions};
use tower_dedup::{CommitError, DedupLayer, Delivery};

use support::postgres::Schema;
use support::{by_header, result};

const RECIPES: &str = include_str!("../../src/docs/recipes.md");

/// Changes a row if the event is newer than every event that was applied.
const NEWER: &str = "INSERT INTO newest (account, number) VALUES ($1, $2) \
    ON CONFLICT (account) DO UPDATE SET number = excluded.number \
    WHERE newest.number < excluded.number";
const APPLY: &str = "INSERT INTO balances (account, balance) VALUES ($1, $2) \
    ON CONFLICT (account) DO UPDATE SET balance = excluded.balance";
const CONVERGING: &str =
    "INSERT INTO entries (event, amount) VALUES ($1, $2) ON CONFLICT (event) DO NOTHING";

const TABLES: [&str; 3] = [
    "CREATE TABLE newest (account TEXT PRIMARY KEY, number BIGINT NOT NULL)",
    "CREATE TABLE balances (account TEXT PRIMARY KEY, balance BIGINT NOT NULL)",
    "CREATE TABLE entries (event TEXT PRIMARY KEY, amount BIGINT NOT NULL)",
];

/// The SQL above is the guide's.
#[test]
fn guide_has_the_sql_of_the_recipes() {
    let words = |text: &str| {
        let words = text.split_whitespace().filter(|word| *word != "\\");
        words.collect::<Vec<_>>().join(" ")
    };
    for sql in [NEWER, APPLY, CONVERGING] {
        assert!(words(RECIPES).contains(&words(sql)), "{sql}");
    }
}

async fn send(app: &Router, id: &str, body: impl Into<String>) -> (u16, Option<String>) {
    let request = Request::post("/").header("webhook-id", id).body(Body::from(body.into()));
    let answer = app.clone().oneshot(request.unwrap()).await.unwrap();
    (answer.status().as_u16(), result(&answer).map(str::to_owned))
}

async fn postgres() -> (PgPool, PostgresAdapter, Schema) {
    let schema = Schema::fresh();
    let pool = PgPoolOptions::new().max_connections(8).connect(&schema.url()).await.unwrap();
    (pool.clone(), PostgresAdapter::new(pool), schema)
}

async fn sqlite() -> (SqlitePool, SqliteAdapter, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let options = SqliteConnectOptions::new()
        .filename(dir.path().join("app.db"))
        .create_if_missing(true)
        .journal_mode(SqliteJournalMode::Wal);
    let pool = SqlitePool::connect_with(options).await.unwrap();
    let adapter = SqliteAdapter::with_options(
        pool.clone(),
        SqliteOptions::new().write_lock_timeout(Duration::from_secs(20)),
    );
    (pool, adapter, dir)
}

macro_rules! recipes {
    ($database:ident, $pool:ty) => {
        mod $database {
            use super::*;

            /// `account number balance`, and whether the handler fails after the write.
            async fn in_order(
                State(pool): State<$pool>,
                delivery: Delivery,
                event: String,
            ) -> Result<StatusCode, CommitError> {
                let mut tx = delivery.begin(&pool).await?;
                let words: Vec<&str> = event.split(' ').collect();
                let (number, balance): (i64, i64) =
                    (words[1].parse().unwrap(), words[2].parse().unwrap());
                let newer = sqlx::query(NEWER).bind(words[0]).bind(number);
                if newer.execute(&mut *tx).await?.rows_affected() > 0 {
                    let apply = sqlx::query(APPLY).bind(words[0]).bind(balance);
                    apply.execute(&mut *tx).await?;
                }
                if words.len() > 3 {
                    return Ok(StatusCode::INTERNAL_SERVER_ERROR);
                }
                tx.commit().await?;
                Ok(StatusCode::OK)
            }

            async fn balance(pool: &$pool) -> i64 {
                let balance = sqlx::query_scalar("SELECT balance FROM balances");
                balance.fetch_one(pool).await.unwrap()
            }

            async fn set_up(pool: &$pool) {
                for table in TABLES {
                    sqlx::query(table).execute(pool).await.unwrap();
                }
            }

            #[tokio::test]
            async fn stale_event_changes_nothing_and_is_200() {
                let (pool, adapter, _kept) = super::$database().await;
                set_up(&pool).await;
                let layer = DedupLayer::transactional(by_header(), adapter);
                let app = Router::new().route("/", post(in_order)).layer(layer);
                let app: Router = app.with_state(pool.clone());
                // The number of the failed run was rolled back, so the retry is not stale.
                assert_eq!(send(&app, "e2", "ada 2 70 fail").await, (500, None));
                assert_eq!(send(&app, "e2", "ada 2 70").await, (200, None));
                assert_eq!(balance(&pool).await, 70);
                assert_eq!(send(&app, "e1", "ada 1 100").await, (200, None));
                assert_eq!(send(&app, "e2b", "ada 2 71").await, (200, None));
                assert_eq!(balance(&pool).await, 70);
                assert_eq!(send(&app, "e3", "ada 3 50").await, (200, None));
                assert_eq!(balance(&pool).await, 50);
            }

            #[tokio::test]
            async fn write_that_converges_may_run_twice() {
                let (pool, _adapter, _kept) = super::$database().await;
                set_up(&pool).await;
                for rows in [1, 0] {
                    let insert = sqlx::query(CONVERGING).bind("a").bind(10_i64);
                    assert_eq!(insert.execute(&pool).await.unwrap().rows_affected(), rows);
                }
            }
        }
    };
}

recipes!(postgres, PgPool);
recipes!(sqlite, SqlitePool);
