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
use futures_util::FutureExt;
use futures_util::future::{BoxFuture, join};
use sqlx::pool::PoolOptions;
use sqlx::{Connection, Pool};
use tokio::sync::Notify;
use tower::ServiceExt;
use tower_dedup::ledger::Ledger;
use tower_dedup::{CommitError, DedupLayer, DedupTx, Delivery, Disposition};

use support::places::Shared;
use support::words::Sql;
use support::{by_header, until};

/// A busy machine, or one whose disk is busy, is slow and not wrong.
const LATE: Duration = Duration::from_secs(20);

/// The number of connections of a pool: small, so that a lost connection fails the test.
pub(super) const CONNECTIONS: u32 = 3;

/// A store with a table of effects. Its adapter and the handlers share a pool.
pub(super) struct Db<S: Shared> {
    store: S,
    pub(super) pool: Pool<S::Database>,
}

impl<S: Shared> Db<S> {
    pub(super) async fn create() -> Self {
        let store = S::create().await;
        let pool = PoolOptions::new().max_connections(CONNECTIONS);
        let pool = pool.connect_lazy_with((*store.pool().connect_options()).clone());
        let create = format!("CREATE TABLE effects (id text, {})", S::IS_UNIQUE);
        S::Database::run(&mut *pool.acquire().await.unwrap(), create).await.unwrap();
        Self { store, pool }
    }

    pub(super) fn adapter(&self) -> S::Adapter {
        self.store.over(self.pool.clone())
    }

    /// Returns an adapter with connections of its own, as another process has.
    pub(super) async fn other_adapter(&self) -> Arc<S::Adapter> {
        self.store.another().await
    }

    /// Lets this much time pass for the keys.
    pub(super) async fn advance(&self, by: Duration) {
        self.store.advance(by).await;
    }

    pub(super) fn effects(&self) -> BoxFuture<'_, Vec<String>> {
        S::Database::effects(&self.pool)
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

    /// Delivers the event `a`. While its handler waits, does `other`.
    pub(super) async fn send_beside(
        &self,
        app: &Router,
        script: &str,
        other: impl AsyncFnOnce(),
    ) -> Response {
        let beside = async {
            self.waiting(1).await;
            other().await;
            self.go.notify_one();
        };
        join(send(app, "a", script), beside).await.0
    }

    pub(super) fn last(&self) -> Delivery {
        self.deliveries.lock().unwrap().pop().unwrap()
    }
}

/// Executes the words of the body in order. `begin` begins the transaction of the delivery, and the words after it run in
/// it. `commit` commits it.
pub(super) async fn handle<S: Shared>(
    State((world, pool)): State<(World, Pool<S::Database>)>,
    delivery: Delivery,
    script: String,
) -> Result<Response, CommitError> {
    let run = world.runs.fetch_add(1, Ordering::SeqCst);
    world.deliveries.lock().unwrap().push(delivery.clone());
    let id = delivery.id().to_owned();
    let insert = |word: &str| format!("{word} INTO effects (id) VALUES ('{id}')");
    let mut begun: Option<DedupTx<S::Database>> = None;
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
            ("insert", Some(tx)) => S::Database::run(tx, insert("INSERT")).await?,
            // A transaction of the handler's own, whose completion is written.
            ("own-drop" | "own-commit", _) => {
                let mut own = pool.begin().await?;
                S::Database::run(&mut own, insert("INSERT")).await?;
                delivery.complete_in(&mut *own).await?;
                if word == "own-commit" {
                    own.commit().await?;
                }
            }
            ("own-first", _) => delivery.complete_in(&mut *pool.begin().await?).await?,
            ("reset-all", Some(tx)) => S::Database::run(tx, "RESET ALL".to_owned()).await?,
            ("lose-row", Some(tx)) => {
                S::Database::run(tx, "DELETE FROM webhook_deliveries".to_owned()).await?;
            }
            ("nonsense", Some(tx)) => S::Database::run(tx, "SELECT nonsense".to_owned()).await?,
            ("read-only", Some(tx)) => {
                S::Database::run(tx, "SET TRANSACTION READ ONLY".to_owned()).await?;
            }
            ("take-completion", _) => drop(delivery.completion()?),
            ("complete-in", Some(tx)) => delivery.complete_in(&mut **tx).await?,
            // No constraint refuses a second one.
            ("insert-run", Some(tx)) => {
                S::Database::run(tx, insert("INSERT").replace("')", &format!(", {run}')"))).await?;
            }
            // Two transactions of one handler.
            ("other-commits", _) => {
                let mut other = delivery.begin(&pool).await?;
                S::Database::run(&mut other, insert("INSERT")).await?;
                other.commit().await?;
            }
            // The handler ignores an error.
            ("broken", Some(tx)) => {
                drop(S::Database::run(tx, "SELECT nonsense".to_owned()).await.unwrap_err());
            }
            // The conflict ends the whole transaction. Only the statement reports it.
            ("or-rollback", Some(tx)) => {
                drop(S::Database::run(tx, insert("INSERT OR ROLLBACK")).await.unwrap_err());
            }
            ("savepoints", Some(tx)) => {
                let mut released = tx.begin().await?;
                S::Database::run(&mut released, insert("INSERT")).await?;
                released.commit().await?;
                let mut dropped = tx.begin().await?;
                S::Database::run(&mut dropped, insert("INSERT").replace("')", ", dropped')"))
                    .await?;
                drop(dropped);
            }
            // As by a timeout, or in a `select!`.
            ("begin-dropped", Some(tx)) => drop(tx.begin().now_or_never()),
            ("in-savepoint", Some(tx)) => {
                let mut inner = tx.begin().await?;
                delivery.complete_in(&mut *inner).await?;
                inner.rollback().await?;
            }
            ("expire", Some(tx)) => {
                // The retention is shorter than the handler's run.
                let sql = "UPDATE webhook_deliveries SET expires_at = first_seen_at";
                S::Database::run(tx, sql.to_owned()).await?;
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
                S::Database::run(tx, sql).await.unwrap_or_default();
            }
            (status, _) => {
                let status = StatusCode::from_u16(status.parse().unwrap()).unwrap();
                return Ok(status.into_response());
            }
        }
    }
    Ok(StatusCode::OK.into_response())
}

pub(super) fn app<S: Shared>(db: &Db<S>, layer: DedupLayer<impl Ledger>, world: &World) -> Router {
    let layer = layer.store_timeout(LATE);
    let state = (world.clone(), db.pool.clone());
    Router::new().route("/hook", post(handle::<S>)).layer(layer).with_state(state)
}

/// Two layers around one handler.
pub(super) fn nested<S: Shared>(
    db: &Db<S>,
    inner: DedupLayer<impl Ledger>,
    outer: DedupLayer<impl Ledger>,
    world: &World,
) -> Router {
    app(db, inner, world).layer(outer.store_timeout(LATE))
}

pub(super) fn transactional<S: Shared>(db: &Db<S>, world: &World) -> Router {
    app(db, DedupLayer::transactional(by_header(), db.adapter()).lease(3 * LATE), world)
}

pub(super) async fn started<S: Shared>() -> (Db<S>, World, Router) {
    let (db, world) = (Db::create().await, World::default());
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
                super::$case::<support::places::Postgres>().await;
            })+
        }
        mod sqlite {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $case() {
                super::$case::<support::places::Sqlite>().await;
            })+
        }
    };
}

pub(super) use on_both;
