//! A database with a table of effects, on Postgres and on SQLite, and a handler that executes the
//! words of its request body.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use futures_util::future::BoxFuture;
use sqlx::postgres::{PgPoolOptions, Postgres};
use sqlx::sqlite::{Sqlite, SqliteConnectOptions, SqliteJournalMode, SqlitePool};
use sqlx::{Connection, Database, PgPool, Pool};
use tokio::sync::Notify;
use tower::ServiceExt;
use tower_dedup::adapter::inspect::MaintenanceAdapter;
use tower_dedup::adapter::{
    PostgresAdapter, PostgresOptions, SqliteAdapter, SqliteOptions, TransactionAdapter,
};
use tower_dedup::{CommitError, DedupLayer, DedupTx, Delivery, Disposition};

use crate::support::postgres::Schema;
use crate::support::words::Sql;
use crate::support::{by_header, until};

/// A database with a table of effects.
pub(super) trait Db: Send + Sync + 'static {
    type Database: Sql;
    type Adapter: MaintenanceAdapter + TransactionAdapter + Clone;

    fn create() -> impl Future<Output = Self> + Send;
    fn pool(&self) -> &Pool<Self::Database>;
    fn adapter(&self) -> Self::Adapter;
    /// Returns an adapter with connections of its own, as another process has.
    fn other_adapter(&self) -> impl Future<Output = Self::Adapter> + Send;
    /// Lets this much time pass for the keys.
    fn advance(&self, by: Duration) -> impl Future<Output = ()> + Send;

    fn run(
        connection: &mut <Self::Database as Database>::Connection,
        sql: String,
    ) -> BoxFuture<'_, Result<(), sqlx::Error>> {
        Self::Database::run(connection, sql)
    }

    fn effects(&self) -> BoxFuture<'_, Vec<String>> {
        Self::Database::effects(self.pool())
    }
}

/// A busy machine, or one whose disk is busy, is slow and not wrong.
const LATE: Duration = Duration::from_secs(20);

/// The number of connections of a pool: small, so that a lost connection fails the test.
pub(super) const CONNECTIONS: u32 = 3;

pub(super) struct Pg {
    pub(super) pool: PgPool,
    pub(super) schema: Schema,
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

    fn pool(&self) -> &PgPool {
        &self.pool
    }

    fn adapter(&self) -> PostgresAdapter {
        let options = PostgresOptions::new().statement_timeout(LATE);
        PostgresAdapter::with_options(self.pool.clone(), options)
    }

    async fn other_adapter(&self) -> PostgresAdapter {
        let pool = PgPoolOptions::new().max_connections(CONNECTIONS);
        PostgresAdapter::new(pool.connect(&self.schema.url()).await.unwrap())
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
    async fn connect(dir: &tempfile::TempDir) -> SqlitePool {
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
        let pool = Self::connect(&dir).await;
        let create = "CREATE TABLE effects (id text UNIQUE)";
        sqlx::query(create).execute(&pool).await.unwrap();
        Self { pool, dir }
    }

    fn pool(&self) -> &SqlitePool {
        &self.pool
    }

    fn adapter(&self) -> SqliteAdapter {
        self.waiting_for(LATE)
    }

    async fn other_adapter(&self) -> SqliteAdapter {
        SqliteAdapter::with_options(
            Self::connect(&self.dir).await,
            SqliteOptions::new().write_lock_timeout(Duration::from_millis(300)),
        )
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

/// Executes the words of the body in order. `begin` begins the transaction of the delivery, and the words after it run in
/// it. `commit` commits it.
pub(super) async fn handle<D: Db>(
    State((world, pool)): State<(World, Pool<D::Database>)>,
    delivery: Delivery,
    script: String,
) -> Result<Response, CommitError> {
    let run = world.runs.fetch_add(1, Ordering::SeqCst);
    world.deliveries.lock().unwrap().push(delivery.clone());
    let id = delivery.id().to_owned();
    let insert = |word: &str| format!("{word} INTO effects (id) VALUES ('{id}')");
    let mut begun: Option<DedupTx<D::Database>> = None;
    for word in script.split_whitespace() {
        match (word, &mut begun) {
            ("begin", begun) => *begun = Some(delivery.begin(&pool).await?),
            ("commit", begun) => begun.take().unwrap().commit().await?,
            ("drop", begun) => drop(begun.take()),
            ("rollback", begun) => begun.take().unwrap().rollback().await?,
            ("nothing", _) => delivery.nothing_to_write(),
            ("complete", Some(tx)) => tx.complete().await?,
            // The handler ignores a refusal.
            ("complete-anyway", Some(tx)) => drop(tx.complete().await),
            ("insert", Some(tx)) => D::run(tx, insert("INSERT")).await?,
            // No constraint refuses a second one.
            ("insert-run", Some(tx)) => {
                D::run(tx, insert("INSERT").replace("')", &format!(", {run}')"))).await?;
            }
            // Two transactions of one handler.
            ("other-commits", _) => {
                let mut other = delivery.begin(&pool).await?;
                D::run(&mut other, insert("INSERT")).await?;
                other.commit().await?;
            }
            // The handler ignores an error.
            ("broken", Some(tx)) => {
                drop(D::run(tx, "SELECT nonsense".to_owned()).await.unwrap_err());
            }
            // The conflict ends the whole transaction. Only the statement reports it.
            ("or-rollback", Some(tx)) => {
                drop(D::run(tx, insert("INSERT OR ROLLBACK")).await.unwrap_err());
            }
            ("savepoints", Some(tx)) => {
                let mut released = tx.begin().await?;
                D::run(&mut released, insert("INSERT")).await?;
                released.commit().await?;
                let mut dropped = tx.begin().await?;
                D::run(&mut dropped, insert("INSERT").replace("')", ", dropped')")).await?;
                drop(dropped);
            }
            ("in-savepoint", Some(tx)) => {
                let mut inner = tx.begin().await?;
                delivery.complete_in(&mut *inner).await?;
                inner.rollback().await?;
            }
            ("expire", Some(tx)) => {
                // The retention is shorter than the handler's run.
                let sql = "UPDATE webhook_deliveries SET expires_at = first_seen_at";
                D::run(tx, sql.to_owned()).await?;
            }
            ("wait", _) => {
                let go = world.go.notified();
                world.waiting.fetch_add(1, Ordering::SeqCst);
                go.await;
                world.waiting.fetch_sub(1, Ordering::SeqCst);
            }
            ("panic", _) => panic!("the handler was told to panic"),
            ("complete-disposition", _) => {
                let mut response = Response::new(Body::empty());
                response.extensions_mut().insert(Disposition::Complete);
                return Ok(response);
            }
            (raw @ ("raw-commit" | "raw-rollback" | "raw-begin"), Some(tx)) => {
                let sql = raw.trim_start_matches("raw-").to_uppercase();
                D::run(tx, sql).await.unwrap_or_default();
            }
            (status, _) => {
                let status = StatusCode::from_u16(status.parse().unwrap()).unwrap();
                return Ok(status.into_response());
            }
        }
    }
    Ok(StatusCode::OK.into_response())
}

pub(super) fn app<D: Db>(
    db: &D,
    layer: DedupLayer<impl tower_dedup::ledger::Ledger>,
    world: &World,
) -> Router {
    let layer = layer.store_timeout(LATE);
    let state = (world.clone(), db.pool().clone());
    Router::new().route("/hook", post(handle::<D>)).layer(layer).with_state(state)
}

pub(super) fn transactional<D: Db>(db: &D, world: &World) -> Router {
    app(db, DedupLayer::transactional(by_header(), db.adapter()).lease(3 * LATE), world)
}

pub(super) async fn started<D: Db>() -> (D, World, Router) {
    let (db, world) = (D::create().await, World::default());
    let app = transactional(&db, &world);
    (db, world, app)
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
