//! A database with a table of effects, on Postgres and on SQLite, and a handler that executes the
//! words of its request body.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use axum::routing::post;
use futures_util::future::BoxFuture;
use sqlx::postgres::{PgPoolOptions, Postgres};
use sqlx::sqlite::{Sqlite, SqliteConnectOptions, SqliteJournalMode, SqlitePool};
use sqlx::{Connection, Database, PgPool};
use tokio::sync::Notify;
use tower::ServiceExt;
use tower_dedup::adapter::inspect::MaintenanceAdapter;
use tower_dedup::adapter::{PostgresAdapter, SqliteAdapter, SqliteOptions, TransactionAdapter};
use tower_dedup::{DedupLayer, DedupTx, Delivery};

use crate::support::multi_event::Sql;
use crate::support::postgres::Schema;
use crate::support::{by_header, until};

/// A database with a table of effects.
pub(super) trait Db: Send + Sync + 'static {
    type Database: Sql;
    type Adapter: MaintenanceAdapter + TransactionAdapter<Database = Self::Database> + Clone;

    fn create() -> impl Future<Output = Self> + Send;
    fn adapter(&self) -> Self::Adapter;
    /// Returns an adapter with connections of its own, as another process has.
    fn other_adapter(&self) -> impl Future<Output = Self::Adapter> + Send;
    fn effects(&self) -> impl Future<Output = Vec<String>> + Send;
    /// Lets this much time pass for the keys.
    fn advance(&self, by: Duration) -> impl Future<Output = ()> + Send;

    fn run(
        connection: &mut <Self::Database as Database>::Connection,
        sql: String,
    ) -> BoxFuture<'_, Result<(), sqlx::Error>> {
        Self::Database::run(connection, sql)
    }
}

/// The number of connections of a pool: small, so that a lost connection fails the test.
pub(super) const CONNECTIONS: u32 = 3;

pub(super) struct Pg {
    pub(super) pool: PgPool,
    pub(super) schema: Schema,
}

impl Pg {
    async fn pool(&self) -> PgPool {
        let pool = PgPoolOptions::new().max_connections(CONNECTIONS);
        pool.connect(&self.schema.url()).await.unwrap()
    }
}

impl Db for Pg {
    type Database = Postgres;
    type Adapter = PostgresAdapter;

    async fn create() -> Self {
        let schema = Schema::fresh();
        let pool = PgPoolOptions::new().max_connections(CONNECTIONS);
        let pool = pool.connect(&schema.url()).await.unwrap();
        // The constraint is checked at COMMIT.
        let create = "CREATE TABLE effects (id text, UNIQUE (id) DEFERRABLE INITIALLY DEFERRED)";
        sqlx::query(create).execute(&pool).await.unwrap();
        Self { pool, schema }
    }

    fn adapter(&self) -> PostgresAdapter {
        PostgresAdapter::new(self.pool.clone())
    }

    async fn other_adapter(&self) -> PostgresAdapter {
        PostgresAdapter::new(self.pool().await)
    }

    async fn effects(&self) -> Vec<String> {
        sqlx::query_scalar("SELECT id FROM effects ORDER BY id")
            .fetch_all(&self.pool)
            .await
            .unwrap()
    }

    async fn advance(&self, by: Duration) {
        let sql = "UPDATE webhook_deliveries SET lease_until = lease_until - $1 * interval '1 s'";
        sqlx::query(sql).bind(by.as_secs_f64()).execute(&self.pool).await.unwrap();
    }
}

pub(super) struct Lite {
    pub(super) pool: SqlitePool,
    pub(super) dir: tempfile::TempDir,
}

impl Lite {
    pub(super) async fn pool(dir: &tempfile::TempDir) -> SqlitePool {
        let options = SqliteConnectOptions::new()
            .filename(dir.path().join("app.db"))
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .busy_timeout(Duration::from_secs(1));
        let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(CONNECTIONS);
        pool.connect_with(options).await.unwrap()
    }

    /// An adapter that waits this long for the write lock.
    pub(super) fn waiting_for(&self, timeout: Duration) -> SqliteAdapter {
        let options = SqliteOptions::new().write_lock_timeout(timeout);
        SqliteAdapter::with_options(self.pool.clone(), options)
    }
}

impl Db for Lite {
    type Database = Sqlite;
    type Adapter = SqliteAdapter;

    async fn create() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let pool = Self::pool(&dir).await;
        let create = "CREATE TABLE effects (id text UNIQUE)";
        sqlx::query(create).execute(&pool).await.unwrap();
        Self { pool, dir }
    }

    fn adapter(&self) -> SqliteAdapter {
        self.waiting_for(Duration::from_secs(20))
    }

    async fn other_adapter(&self) -> SqliteAdapter {
        SqliteAdapter::with_options(
            Self::pool(&self.dir).await,
            SqliteOptions::new().write_lock_timeout(Duration::from_millis(300)),
        )
    }

    async fn effects(&self) -> Vec<String> {
        sqlx::query_scalar("SELECT id FROM effects ORDER BY id")
            .fetch_all(&self.pool)
            .await
            .unwrap()
    }

    async fn advance(&self, by: Duration) {
        let sql = "UPDATE webhook_deliveries SET lease_until = lease_until - ?1";
        let by = i64::try_from(by.as_millis()).unwrap();
        sqlx::query(sql).bind(by).execute(&self.pool).await.unwrap();
    }
}

/// The state that a handler shares with its test.
#[derive(Clone, Default)]
pub(super) struct World {
    pub(super) runs: Arc<AtomicUsize>,
    pub(super) waiting: Arc<AtomicUsize>,
    pub(super) go: Arc<Notify>,
    pub(super) deliveries: Arc<std::sync::Mutex<Vec<Delivery>>>,
}

impl World {
    pub(super) fn runs(&self) -> usize {
        self.runs.load(Ordering::SeqCst)
    }

    pub(super) async fn waiting(&self, handlers: usize) {
        until(|| self.waiting.load(Ordering::SeqCst) == handlers).await;
    }

    pub(super) fn last(&self) -> Delivery {
        self.deliveries.lock().unwrap().pop().unwrap()
    }
}

/// Executes the words of the body in order. A request without a key has the id `ping`.
pub(super) async fn handle<D: Db>(
    State(world): State<World>,
    delivery: Option<Delivery>,
    mut tx: DedupTx<D::Database>,
    script: String,
) -> StatusCode {
    world.runs.fetch_add(1, Ordering::SeqCst);
    let id = delivery.as_ref().map_or("ping", Delivery::id).to_owned();
    world.deliveries.lock().unwrap().extend(delivery);
    let insert = || format!("INSERT INTO effects (id) VALUES ('{id}')");
    for word in script.split_whitespace() {
        match word {
            "insert" => D::run(&mut tx, insert()).await.unwrap(),
            // The handler ignores an error.
            "broken" => D::run(&mut tx, "SELECT nonsense".to_owned()).await.unwrap_err().drop(),
            "commit" => D::run(&mut tx, "COMMIT".to_owned()).await.unwrap_or_default(),
            "rollback" => D::run(&mut tx, "ROLLBACK".to_owned()).await.unwrap_or_default(),
            "begin" => D::run(&mut tx, "BEGIN".to_owned()).await.unwrap_or_default(),
            // The conflict ends the whole transaction. Only the statement reports it.
            "or-rollback" => {
                let sql = insert().replace("INSERT", "INSERT OR ROLLBACK");
                D::run(&mut tx, sql).await.unwrap_err().drop();
            }
            // Runs outside a transaction, if the transaction has ended.
            "more" => {
                let sql = format!("INSERT INTO effects (id) VALUES ('{id}, more')");
                D::run(&mut tx, sql).await.unwrap_or_default();
            }
            "savepoints" => {
                let mut released = tx.begin().await.unwrap();
                D::run(&mut released, insert()).await.unwrap();
                released.commit().await.unwrap();
                let mut dropped = tx.begin().await.unwrap();
                D::run(&mut dropped, insert().replace("')", ", dropped')")).await.unwrap();
                drop(dropped);
            }
            "expire" => {
                // The retention is shorter than the handler's run.
                let sql = "UPDATE webhook_deliveries SET expires_at = first_seen_at";
                D::run(&mut tx, sql.to_owned()).await.unwrap();
            }
            "leak" => std::mem::forget(tx.begin().await.unwrap()),
            "wait" => {
                let go = world.go.notified();
                world.waiting.fetch_add(1, Ordering::SeqCst);
                go.await;
                world.waiting.fetch_sub(1, Ordering::SeqCst);
            }
            "keep" => {
                let world = world.clone();
                tokio::spawn(async move {
                    let go = world.go.notified();
                    world.waiting.fetch_add(1, Ordering::SeqCst);
                    go.await;
                    drop(tx);
                    world.waiting.fetch_sub(1, Ordering::SeqCst);
                });
                return StatusCode::OK;
            }
            "panic" => panic!("the handler was told to panic"),
            status => return StatusCode::from_u16(status.parse().unwrap()).unwrap(),
        }
    }
    StatusCode::OK
}

trait Dropped {
    fn drop(self);
}

impl Dropped for sqlx::Error {
    fn drop(self) {}
}

pub(super) fn app<D: Db>(
    layer: DedupLayer<impl tower_dedup::ledger::Ledger>,
    world: &World,
) -> Router {
    // A busy machine must not cause a 503.
    let layer = layer.store_timeout(Duration::from_secs(20));
    Router::new().route("/hook", post(handle::<D>)).layer(layer).with_state(world.clone())
}

pub(super) fn transactional<D: Db>(adapter: D::Adapter, world: &World) -> Router {
    app::<D>(DedupLayer::transactional(by_header(), adapter), world)
}

pub(super) async fn send(app: &Router, id: &str, script: &str) -> Response {
    let request = Request::post("/hook").header("webhook-id", id);
    let request = request.body(Body::from(script.to_owned())).unwrap();
    app.clone().oneshot(request).await.unwrap()
}

/// Expands the cases for both databases.
macro_rules! on_both {
    ($($case:ident),+ $(,)?) => {
        mod postgres {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $case() {
                super::$case::<$crate::fixture::Pg>().await;
            })+
        }
        mod sqlite {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $case() {
                super::$case::<$crate::fixture::Lite>().await;
            })+
        }
    };
}

pub(super) use on_both;
