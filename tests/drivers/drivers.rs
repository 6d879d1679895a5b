//! Handlers that complete their event in a transaction of their own driver, through the layer, on real servers. The guide
//! shows the functions `pay`. `tests/transactional` has those of sqlx.

mod diesel_async;
mod rusqlite;
mod sea_orm;
mod sqlx_0_8;
mod tokio_postgres;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ::diesel_async::{AsyncConnection, AsyncPgConnection};
use ::sea_orm::{ConnectionTrait, Database as SeaOrm, DatabaseConnection, Statement};
use ::tokio_postgres::{Client, NoTls};
use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::response::Response;
use axum::routing::post;
use sqlx::postgres::{PgPool, PgPoolOptions};
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePool};
use tokio::sync::{Mutex, Notify};
use tower::ServiceExt;
use tower_dedup::adapter::contract::TransactionAdapter;
use tower_dedup::adapter::maintenance::{KeyState, MaintenanceAdapter};
use tower_dedup::adapter::{PostgresAdapter, SqliteAdapter};
use tower_dedup::{BoxError, DedupKey, DedupLayer, Delivery, key};

use support::postgres::Schema;

/// How a handler pays.
#[derive(Clone)]
enum Driver {
    SeaOrm(DatabaseConnection),
    DieselAsync(Arc<Mutex<AsyncPgConnection>>),
    TokioPostgres(Arc<Mutex<Client>>),
    Sqlx8(::sqlx8::PgPool),
    Rusqlite(Arc<Mutex<::rusqlite::Connection>>),
}

const POSTGRES: [&str; 4] = ["sea-orm", "diesel-async", "tokio-postgres", "sqlx 0.8"];
const SQLITE: &str = "rusqlite";

impl Driver {
    async fn connect(name: &str, url: &str) -> Self {
        match name {
            "sea-orm" => Self::SeaOrm(SeaOrm::connect(url).await.unwrap()),
            "diesel-async" => Self::DieselAsync(Arc::new(Mutex::new(
                AsyncPgConnection::establish(url).await.unwrap(),
            ))),
            "tokio-postgres" => {
                let (client, connection) = ::tokio_postgres::connect(url, NoTls).await.unwrap();
                tokio::spawn(connection);
                Self::TokioPostgres(Arc::new(Mutex::new(client)))
            }
            "sqlx 0.8" => Self::Sqlx8(::sqlx8::PgPool::connect(url).await.unwrap()),
            SQLITE => {
                let connection = ::rusqlite::Connection::open(url).unwrap();
                connection.busy_timeout(Duration::from_secs(10)).unwrap();
                Self::Rusqlite(Arc::new(Mutex::new(connection)))
            }
            other => panic!("no driver {other}"),
        }
    }

    async fn pay(&self, event: &Delivery) -> Result<(), BoxError> {
        match self {
            Self::SeaOrm(db) => sea_orm::pay(db, event).await,
            Self::DieselAsync(connection) => {
                diesel_async::pay(&mut *connection.lock().await, event).await
            }
            Self::TokioPostgres(client) => {
                tokio_postgres::pay(&mut *client.lock().await, event).await
            }
            Self::Sqlx8(pool) => sqlx_0_8::pay(pool, event).await,
            Self::Rusqlite(connection) => rusqlite::pay(&mut *connection.lock().await, event),
        }
    }

    /// Executes the completion alone, as `&db` in place of `&tx` does.
    async fn complete_alone(&self, event: &Delivery) -> Result<(), BoxError> {
        let completion = event.completion()?;
        let (sql, parameter) = (completion.sql(), completion.parameter());
        match self {
            Self::SeaOrm(db) => {
                let values = vec![parameter.into()];
                let alone = Statement::from_sql_and_values(db.get_database_backend(), sql, values);
                db.execute_raw(alone).await?;
            }
            Self::DieselAsync(connection) => {
                use ::diesel_async::RunQueryDsl;

                let alone = diesel::sql_query(sql).bind::<diesel::sql_types::Text, _>(parameter);
                alone.execute(&mut *connection.lock().await).await?;
            }
            Self::TokioPostgres(client) => {
                client.lock().await.execute(sql, &[&parameter]).await?;
            }
            Self::Sqlx8(pool) => {
                ::sqlx8::query(sql).bind(parameter).execute(pool).await?;
            }
            Self::Rusqlite(_) => panic!("SQLite does not tell"),
        }
        Ok(())
    }
}

/// A database with a table of payments, which no constraint keeps from a second one.
enum Place {
    Postgres(Schema, PgPool),
    Sqlite(tempfile::TempDir, SqlitePool),
}

const CREATE: &str = "CREATE TABLE payments (id text)";
const PAID: &str = "SELECT id FROM payments ORDER BY id";
const LAPSE: &str = "UPDATE webhook_deliveries SET lease_until = first_seen_at";

impl Place {
    async fn of(driver: &str) -> Self {
        if driver == SQLITE {
            let dir = tempfile::tempdir().unwrap();
            let options = SqliteConnectOptions::new()
                .filename(dir.path().join("app.db"))
                .create_if_missing(true)
                .journal_mode(SqliteJournalMode::Wal)
                .busy_timeout(Duration::from_secs(10));
            let pool = SqlitePool::connect_with(options).await.unwrap();
            sqlx::query(CREATE).execute(&pool).await.unwrap();
            return Self::Sqlite(dir, pool);
        }
        let schema = Schema::alone();
        let pool =
            PgPoolOptions::new().max_connections(8).connect(schema.database_url()).await.unwrap();
        sqlx::query(CREATE).execute(&pool).await.unwrap();
        Self::Postgres(schema, pool)
    }

    fn url(&self) -> String {
        match self {
            Self::Postgres(schema, _) => schema.database_url().to_owned(),
            Self::Sqlite(dir, _) => dir.path().join("app.db").to_str().unwrap().to_owned(),
        }
    }

    async fn paid(&self) -> Vec<String> {
        match self {
            Self::Postgres(_, pool) => sqlx::query_scalar(PAID).fetch_all(pool).await.unwrap(),
            Self::Sqlite(_, pool) => sqlx::query_scalar(PAID).fetch_all(pool).await.unwrap(),
        }
    }

    async fn lapse(&self) {
        match self {
            Self::Postgres(_, pool) => drop(sqlx::query(LAPSE).execute(pool).await.unwrap()),
            Self::Sqlite(_, pool) => drop(sqlx::query(LAPSE).execute(pool).await.unwrap()),
        }
    }

    async fn state(&self, id: &str) -> Option<KeyState> {
        let key = DedupKey::new("shop", id).unwrap();
        let entry = match self {
            Self::Postgres(_, pool) => PostgresAdapter::new(pool.clone()).get(&key).await,
            Self::Sqlite(_, pool) => SqliteAdapter::new(pool.clone()).get(&key).await,
        };
        entry.unwrap().map(|entry| entry.state)
    }

    async fn app(&self, driver: Driver, world: &World) -> Router {
        match self {
            // A service on another driver has no pool of sqlx 0.9 for the keys.
            Self::Postgres(schema, _) => {
                let adapter = PostgresAdapter::connect(schema.database_url()).await.unwrap();
                app(adapter, driver, world)
            }
            Self::Sqlite(_, pool) => app(SqliteAdapter::new(pool.clone()), driver, world),
        }
    }
}

/// What a handler shares with its test.
#[derive(Clone, Default)]
struct World {
    waiting: Arc<AtomicUsize>,
    go: Arc<Notify>,
}

/// A receiver whose handler does the words of its body: `wait`, `pay`, `alone`, `fail`.
fn app(adapter: impl TransactionAdapter, driver: Driver, world: &World) -> Router {
    let world = world.clone();
    let handler = async move |event: Delivery, script: String| {
        for word in script.split_whitespace() {
            let done = match word {
                "wait" => {
                    let go = world.go.notified();
                    world.waiting.fetch_add(1, Ordering::SeqCst);
                    go.await;
                    Ok(())
                }
                "pay" => driver.pay(&event).await,
                "alone" => driver.complete_alone(&event).await,
                _ => Err("the handler was told to fail".into()),
            };
            if done.is_err() {
                return StatusCode::INTERNAL_SERVER_ERROR;
            }
        }
        StatusCode::OK
    };
    let layer = DedupLayer::transactional(key::header("webhook-id").namespace("shop"), adapter);
    // No renewal reaches it within a test.
    let layer = layer.lease(Duration::from_secs(3_600)).wait(Duration::ZERO);
    Router::new().route("/", post(handler)).layer(layer.store_timeout(Duration::from_secs(20)))
}

async fn send(app: &Router, id: &str, script: &str) -> (u16, Option<String>) {
    let request = Request::post("/").header("webhook-id", id);
    let request = request.body(Body::from(script.to_owned())).unwrap();
    let response: Response = app.clone().oneshot(request).await.unwrap();
    let result = response.headers().get("x-dedup-result").map(|it| it.to_str().unwrap().to_owned());
    (response.status().as_u16(), result)
}

fn duplicate() -> (u16, Option<String>) {
    (200, Some("duplicate".to_owned()))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_driver_commits_key_and_payment_once() {
    for name in POSTGRES.into_iter().chain([SQLITE]) {
        let place = Place::of(name).await;
        let driver = Driver::connect(name, &place.url()).await;
        let (app, world) = (place.app(driver.clone(), &World::default()).await, World::default());
        assert_eq!(send(&app, "a", "fail").await.0, 500, "{name}");
        assert_eq!(place.state("a").await, Some(KeyState::Released), "{name}");
        assert_eq!(send(&app, "a", "pay").await, (200, None), "{name}");
        assert_eq!(send(&app, "a", "pay").await, duplicate(), "{name}");
        // Success without a completion.
        assert_eq!(send(&app, "b", "").await, (500, Some("uncommitted".to_owned())), "{name}");
        assert_eq!(place.paid().await, ["a"], "{name}");
        // A late first run and its takeover: the second cannot commit.
        let late = place.app(driver.clone(), &world).await;
        let late = tokio::spawn(async move { send(&late, "c", "wait pay").await });
        while world.waiting.load(Ordering::SeqCst) == 0 {
            tokio::task::yield_now().await;
        }
        place.lapse().await;
        assert_eq!(send(&app, "c", "pay").await, (200, None), "{name}");
        world.go.notify_one();
        assert_ne!(late.await.unwrap(), (200, None), "{name}");
        assert_eq!(send(&app, "c", "pay").await, duplicate(), "{name}");
        assert_eq!(place.paid().await, ["a", "c"], "{name}");
    }
}

/// It would complete the event without the payment, and pass every ordinary test.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn completion_outside_of_the_transaction_is_refused_on_postgres() {
    for name in POSTGRES {
        let place = Place::of(name).await;
        let driver = Driver::connect(name, &place.url()).await;
        let app = place.app(driver, &World::default()).await;
        assert_eq!(send(&app, "a", "alone").await.0, 500, "{name}");
        assert_eq!(place.state("a").await, Some(KeyState::Released), "{name}");
        assert_eq!(send(&app, "a", "pay").await, (200, None), "{name}");
        assert_eq!(place.paid().await, ["a"], "{name}");
    }
}
