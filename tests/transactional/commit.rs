//! The transactional ledger, on Postgres and on SQLite: the key and the handler's writes commit
//! together, whatever the handler does.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{FromRequestParts, Request, State};
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use futures_util::future::{BoxFuture, join_all};
use sqlx::postgres::{PgPoolOptions, Postgres};
use sqlx::sqlite::{Sqlite, SqliteConnectOptions, SqliteJournalMode, SqlitePool};
use sqlx::{AssertSqlSafe, Connection, Database, PgPool};
use tokio::sync::{Notify, Semaphore};
use tower::ServiceExt;
use tower_dedup::adapter::{
    CallTerms, Claimed, DedupAdapter, EntryState, Forgotten, MaintenanceAdapter, PostgresAdapter,
    SqliteAdapter, SqliteOptions, Token, TransactionAdapter,
};
use tower_dedup::key::{Event, Extracted, KeyExtractor, Keys};
use tower_dedup::{
    DedupKey, DedupLayer, DedupTx, Deduplicator, Delivery, ErrorKind, OnInFlight, Purger,
    RunContext, RunError, RunOutcome,
};
use tower_dedup::{TxHandle, TxUnavailable};

use crate::support::postgres::Schema;
use crate::support::{FIRST, by_header, dedup_key, result, until};

/// A database with a table of effects.
trait Db: Send + Sync + 'static {
    type Database: Database;
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
    ) -> BoxFuture<'_, Result<(), sqlx::Error>>;
}

/// The number of connections of a pool: few, so that the test notices a connection that is lost.
const CONNECTIONS: u32 = 3;

struct Pg {
    pool: PgPool,
    schema: Schema,
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

    fn run(
        connection: &mut sqlx::PgConnection,
        sql: String,
    ) -> BoxFuture<'_, Result<(), sqlx::Error>> {
        Box::pin(async move { sqlx::query(AssertSqlSafe(sql)).execute(connection).await.map(drop) })
    }
}

struct Lite {
    pool: SqlitePool,
    dir: tempfile::TempDir,
}

impl Lite {
    async fn pool(dir: &tempfile::TempDir) -> SqlitePool {
        let options = SqliteConnectOptions::new()
            .filename(dir.path().join("app.db"))
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .busy_timeout(Duration::from_secs(1));
        let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(CONNECTIONS);
        pool.connect_with(options).await.unwrap()
    }

    /// An adapter that waits this long for the write lock.
    fn waiting_for(&self, timeout: Duration) -> SqliteAdapter {
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

    fn run(
        connection: &mut sqlx::SqliteConnection,
        sql: String,
    ) -> BoxFuture<'_, Result<(), sqlx::Error>> {
        Box::pin(async move { sqlx::query(AssertSqlSafe(sql)).execute(connection).await.map(drop) })
    }
}

/// What a handler shares with its test.
#[derive(Clone, Default)]
struct World {
    runs: Arc<AtomicUsize>,
    waiting: Arc<AtomicUsize>,
    go: Arc<Notify>,
    deliveries: Arc<std::sync::Mutex<Vec<Delivery>>>,
}

impl World {
    fn runs(&self) -> usize {
        self.runs.load(Ordering::SeqCst)
    }

    async fn waiting(&self, handlers: usize) {
        until(|| self.waiting.load(Ordering::SeqCst) == handlers).await;
    }

    fn last(&self) -> Delivery {
        self.deliveries.lock().unwrap().pop().unwrap()
    }
}

/// Executes the words of the body in order.
async fn handle<D: Db>(
    State(world): State<World>,
    delivery: Delivery,
    mut tx: DedupTx<D::Database>,
    script: String,
) -> StatusCode {
    world.runs.fetch_add(1, Ordering::SeqCst);
    world.deliveries.lock().unwrap().push(delivery.clone());
    let id = delivery.id().to_owned();
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
                let mut kept = tx.begin().await.unwrap();
                D::run(&mut kept, insert()).await.unwrap();
                kept.commit().await.unwrap();
                let mut dropped = tx.begin().await.unwrap();
                D::run(&mut dropped, insert().replace("')", ", dropped')")).await.unwrap();
                drop(dropped);
            }
            "expire" => {
                // As after a retention that is shorter than the handler's run.
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

fn app<D: Db>(layer: DedupLayer<impl tower_dedup::ledger::Ledger>, world: &World) -> Router {
    // The test is not about deliveries that are late on a busy machine.
    let layer = layer.store_timeout(Duration::from_secs(20));
    Router::new().route("/hook", post(handle::<D>)).layer(layer).with_state(world.clone())
}

fn transactional<D: Db>(adapter: D::Adapter, world: &World) -> Router {
    app::<D>(DedupLayer::transactional(by_header(), adapter), world)
}

async fn send(app: &Router, id: &str, script: &str) -> Response {
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
                super::$case::<super::Pg>().await;
            })+
        }
        mod sqlite {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $case() {
                super::$case::<super::Lite>().await;
            })+
        }
    };
}

on_both!(
    the_key_and_the_effect_commit_together,
    a_failed_handler_leaves_neither_key_nor_effect,
    savepoint_of_the_handler_rolls_back_its_part_only,
    error_that_the_handler_ignores_is_never_a_2xx_without_the_effect,
    raw_rollback_is_500_and_nothing_is_kept,
    raw_commit_never_leaves_a_complete_key,
    leaked_savepoint_is_500,
    a_failed_handler_that_leaks_a_savepoint_leaves_no_transaction_open,
    a_completion_after_its_retention_is_remembered_for_another,
    transaction_kept_beyond_the_answer_is_500_and_rolled_back,
    misuse_of_the_transaction_costs_no_connection,
    concurrent_duplicates_run_once,
    duplicate_in_another_process_is_answered_at_once,
    multi_event_delivery_commits_its_new_events,
    second_identities_commit_with_the_first,
    transaction_respects_leases_on_the_same_table,
    transaction_is_lent_to_one_extractor_at_a_time,
    commit_that_fails_is_no_2xx,
    deduplicator_commits_the_work_with_its_key,
    retry_layer_inside_has_no_transaction_for_its_second_attempt,
    handler_past_its_timeout_is_rolled_back_before_the_answer,
);

async fn the_key_and_the_effect_commit_together<D: Db>() {
    let (db, world) = (D::create().await, World::default());
    let app = transactional::<D>(db.adapter(), &world);
    assert_eq!(send(&app, "a", "insert").await.status(), 200);
    let again = send(&app, "a", "insert").await;
    assert_eq!((again.status().as_u16(), result(&again)), (200, Some("duplicate")));
    assert_eq!(db.effects().await, ["a"]);
    let entry = db.adapter().get(&dedup_key("a")).await.unwrap().unwrap();
    assert!(matches!(entry.state, EntryState::Complete { .. }), "{entry:?}");
    assert_eq!((entry.attempts, entry.takeover, world.runs()), (1, false, 1));
}

async fn a_failed_handler_leaves_neither_key_nor_effect<D: Db>() {
    let (db, world) = (D::create().await, World::default());
    let app = transactional::<D>(db.adapter(), &world);
    for script in ["insert 500", "insert 400", "insert 302"] {
        let failed = send(&app, "a", script).await;
        assert_ne!(failed.status(), 200);
        assert_eq!(result(&failed), None, "the answer is the handler's own");
    }
    let panicked = tokio::spawn({
        let app = app.clone();
        async move { send(&app, "a", "insert panic").await }
    });
    assert!(panicked.await.unwrap_err().is_panic());
    assert_eq!(db.adapter().get(&dedup_key("a")).await.unwrap(), None);
    assert!(db.effects().await.is_empty());
    assert_eq!(send(&app, "a", "insert").await.status(), 200);
    assert!(!world.last().is_takeover());
    assert_eq!((db.effects().await, world.runs()), (vec!["a".to_owned()], 5));
}

/// The handler and its transaction are gone before the claim is settled: nothing is left to whoever
/// lets go of it, and no connection is lost.
async fn handler_past_its_timeout_is_rolled_back_before_the_answer<D: Db>() {
    let (db, world) = (D::create().await, World::default());
    let layer = DedupLayer::transactional(by_header(), db.adapter());
    let app = app::<D>(layer.handler_timeout(Duration::from_millis(300)), &world);
    for _ in 0..=CONNECTIONS {
        let late = send(&app, "a", "insert wait").await;
        assert_eq!((late.status().as_u16(), result(&late)), (504, Some("handler-timeout")));
        assert_eq!(db.adapter().get(&dedup_key("a")).await.unwrap(), None);
        assert!(db.effects().await.is_empty());
    }
    assert_eq!(send(&app, "a", "insert").await.status(), 200);
    assert_eq!((db.effects().await, world.last().is_takeover()), (vec!["a".to_owned()], false));
}

async fn savepoint_of_the_handler_rolls_back_its_part_only<D: Db>() {
    let (db, world) = (D::create().await, World::default());
    let app = transactional::<D>(db.adapter(), &world);
    assert_eq!(send(&app, "a", "savepoints").await.status(), 200);
    assert_eq!(db.effects().await, ["a"]);
    assert_eq!(send(&app, "b", "savepoints 500").await.status(), 500);
    assert_eq!(db.effects().await, ["a"]);
}

/// On Postgres the error has aborted the transaction, and COMMIT would return Ok. On SQLite the
/// transaction goes on, and the commit is real.
async fn error_that_the_handler_ignores_is_never_a_2xx_without_the_effect<D: Db>() {
    let (db, world) = (D::create().await, World::default());
    let app = transactional::<D>(db.adapter(), &world);
    let answer = send(&app, "a", "insert broken").await;
    let complete = db.adapter().get(&dedup_key("a")).await.unwrap().is_some();
    let effect = !db.effects().await.is_empty();
    match (answer.status().as_u16(), result(&answer)) {
        (200, None) => assert!(complete && effect),
        (500, Some("uncommitted")) => assert!(!complete && !effect),
        other => panic!("{other:?}"),
    }
    assert_eq!(send(&app, "a", "insert").await.status(), 200);
    assert_eq!(db.effects().await, ["a"]);
}

async fn raw_rollback_is_500_and_nothing_is_kept<D: Db>() {
    let (db, world) = (D::create().await, World::default());
    let app = transactional::<D>(db.adapter(), &world);
    for script in ["insert rollback", "insert rollback begin insert", "insert rollback begin"] {
        let answer = send(&app, "a", script).await;
        assert_eq!((answer.status().as_u16(), result(&answer)), (500, Some("uncommitted")));
        assert_eq!(db.adapter().get(&dedup_key("a")).await.unwrap(), None, "{script}");
        assert!(db.effects().await.is_empty(), "{script}");
    }
    // The same, and the handler fails as well: the answer is the handler's.
    assert_eq!(send(&app, "a", "insert rollback 503").await.status(), 503);
    assert_eq!(send(&app, "a", "insert").await.status(), 200);
    assert_eq!(db.effects().await, ["a"]);
}

/// The layer cannot undo what a handler commits by itself, but the key is not complete: no delivery
/// gets 200, and the retry runs.
async fn raw_commit_never_leaves_a_complete_key<D: Db>() {
    for script in ["insert commit", "insert commit begin more", "insert commit 500"] {
        let (db, world) = (D::create().await, World::default());
        let layer = DedupLayer::transactional(by_header(), db.adapter());
        let app = app::<D>(layer.on_in_flight(OnInFlight::Reject), &world);
        let answer = send(&app, "a", script).await;
        assert_eq!(answer.status(), 500, "{script}: {answer:?}");
        let entry = db.adapter().get(&dedup_key("a")).await.unwrap();
        if let Some(entry) = entry {
            assert!(matches!(entry.state, EntryState::InFlight { .. }), "{entry:?}");
            assert_eq!(db.effects().await, ["a"]);
            assert_eq!(send(&app, "a", "").await.status(), 503, "its lease is live");
            db.advance(Duration::from_secs(61)).await;
            assert_eq!(send(&app, "a", "").await.status(), 200);
            let delivery = world.last();
            assert_eq!((delivery.is_takeover(), delivery.attempt()), (true, 2));
        } else {
            // The commit became a rollback.
            assert!(db.effects().await.is_empty());
            assert_eq!(send(&app, "a", "insert").await.status(), 200);
        }
        assert_eq!(db.effects().await, ["a"], "{script}");
    }
}

async fn leaked_savepoint_is_500<D: Db>() {
    let (db, world) = (D::create().await, World::default());
    let app = transactional::<D>(db.adapter(), &world);
    for _ in 0..2 * CONNECTIONS {
        let answer = send(&app, "a", "leak insert").await;
        assert_eq!((answer.status().as_u16(), result(&answer)), (500, Some("uncommitted")));
    }
    assert!(db.effects().await.is_empty());
    assert_eq!(send(&app, "a", "insert").await.status(), 200);
    assert_eq!(db.effects().await, ["a"]);
}

async fn a_failed_handler_that_leaks_a_savepoint_leaves_no_transaction_open<D: Db>() {
    let (db, world) = (D::create().await, World::default());
    let app = transactional::<D>(db.adapter(), &world);
    for script in ["leak insert 500", "leak leak insert 500", "savepoints leak 400"] {
        for _ in 0..CONNECTIONS {
            assert_ne!(send(&app, "a", script).await.status(), 200);
        }
        // Another process can write at once.
        let other = transactional::<D>(db.other_adapter().await, &World::default());
        assert_eq!(send(&other, script, "insert").await.status(), 200);
    }
    let mut effects = db.effects().await;
    effects.sort();
    assert_eq!(effects, ["leak insert 500", "leak leak insert 500", "savepoints leak 400"]);
    assert_eq!(send(&app, "a", "insert").await.status(), 200);
}

async fn a_completion_after_its_retention_is_remembered_for_another<D: Db>() {
    let (db, world) = (D::create().await, World::default());
    let app = transactional::<D>(db.adapter(), &world);
    assert_eq!(send(&app, "a", "insert expire").await.status(), 200);
    let again = send(&app, "a", "insert").await;
    assert_eq!((again.status().as_u16(), result(&again)), (200, Some("duplicate")));
    let entry = db.adapter().get(&dedup_key("a")).await.unwrap().unwrap();
    let remembered = entry.expires_at.duration_since(entry.first_seen_at).unwrap();
    assert!(remembered > Duration::from_secs(86_400), "{remembered:?}");
    assert_eq!((db.effects().await.len(), world.runs()), (1, 1));
}

/// A task keeps the transaction after the handler has answered.
async fn transaction_kept_beyond_the_answer_is_500_and_rolled_back<D: Db>() {
    let (db, world) = (D::create().await, World::default());
    let app = transactional::<D>(db.adapter(), &world);
    let answer = send(&app, "a", "insert keep").await;
    assert_eq!((answer.status().as_u16(), result(&answer)), (500, Some("uncommitted")));
    world.waiting(1).await;
    assert!(db.effects().await.is_empty());
    world.go.notify_waiters();
    world.waiting(0).await;
    let retried = async {
        // The rollback takes a moment.
        while send(&app, "a", "insert").await.status() != 200 {}
    };
    tokio::time::timeout(Duration::from_secs(20), retried).await.expect("the key is free");
    assert_eq!(db.effects().await, ["a"]);
}

async fn misuse_of_the_transaction_costs_no_connection<D: Db>() {
    let (db, world) = (D::create().await, World::default());
    let app = transactional::<D>(db.adapter(), &world);
    let scripts = [
        "insert rollback",
        "insert broken 500",
        "insert rollback begin",
        "rollback 500",
        "insert 500",
    ];
    for round in 0..3 * CONNECTIONS {
        for (place, script) in scripts.iter().enumerate() {
            send(&app, &format!("{round}-{place}"), script).await;
        }
        let answer = send(&app, &format!("{round}"), "insert").await;
        assert_eq!(answer.status(), 200, "after {round} rounds");
    }
    assert_eq!(db.effects().await.len(), 3 * CONNECTIONS as usize);
    // All connections of the pool work, and none is inside a transaction.
    let all = (0..CONNECTIONS).map(|id| send(&app, ["x", "y", "z"][id as usize], "insert"));
    for answer in join_all(all).await {
        assert_eq!(answer.status(), 200);
    }
}

async fn concurrent_duplicates_run_once<D: Db>() {
    const EVENTS: usize = 12;
    let (db, world) = (D::create().await, World::default());
    let layer = DedupLayer::transactional(by_header(), db.adapter());
    let app = app::<D>(layer.on_in_flight(OnInFlight::Wait(Duration::from_secs(20))), &world);
    let all = (0..EVENTS * 16).map(|delivery| {
        let app = app.clone();
        tokio::spawn(async move { send(&app, &(delivery % EVENTS).to_string(), "insert").await })
    });
    for answer in join_all(all).await {
        let answer = answer.unwrap();
        // A pool of three may be too small for this many at once; no other failure is allowed.
        let (status, result) = (answer.status().as_u16(), result(&answer));
        assert!(status == 200 || (status, result) == (503, Some("unavailable")), "{answer:?}");
    }
    let retried = (0..EVENTS).map(|id| {
        let app = app.clone();
        async move { send(&app, &id.to_string(), "insert").await }
    });
    for answer in join_all(retried).await {
        assert_eq!(answer.status(), 200);
    }
    assert_eq!((db.effects().await.len(), world.runs()), (EVENTS, EVENTS));
}

/// The duplicate of an uncommitted key does not occupy a connection while it waits.
async fn duplicate_in_another_process_is_answered_at_once<D: Db>() {
    let (db, world) = (D::create().await, World::default());
    let first = transactional::<D>(db.adapter(), &world);
    let other = db.other_adapter().await;
    let layer = DedupLayer::transactional(by_header(), other.clone());
    let second = app::<D>(layer.on_in_flight(OnInFlight::Reject), &world);
    let running = tokio::spawn({
        let first = first.clone();
        async move { send(&first, "a", "insert wait").await }
    });
    world.waiting(1).await;
    let start = Instant::now();
    for _ in 0..2 * CONNECTIONS {
        assert_eq!(send(&second, "a", "insert").await.status(), 503);
    }
    assert!(
        start.elapsed() < Duration::from_secs(10),
        "the duplicate does not wait for the handler"
    );
    world.go.notify_waiters();
    assert_eq!(running.await.unwrap().status(), 200);
    assert_eq!(result(&send(&second, "a", "insert").await), Some("duplicate"));
    assert_eq!((db.effects().await, world.runs()), (vec!["a".to_owned()], 1));
}

/// One event for every word of a header; `id=second` gives the event a second identity.
fn by_words() -> KeyExtractor {
    KeyExtractor::from_fn("test", |request| {
        let words = request.headers()["events"].to_str().unwrap();
        let events = words.split_whitespace().map(|word| {
            Ok(match word.split_once('=') {
                Some((id, second)) => Event::new(DedupKey::new("test", id)?)
                    .with_second_identity(DedupKey::new("test.second", second)?),
                None => Event::new(DedupKey::new("test", word)?),
            })
        });
        Ok(Keys::new(events.collect::<Result<_, _>>()?).map_or(Extracted::Missing, Extracted::Keys))
    })
    .unwrap()
}

async fn send_batch(app: &Router, events: &str, script: &str) -> Response {
    let request = Request::post("/hook").header("events", events);
    let request = request.body(Body::from(script.to_owned())).unwrap();
    app.clone().oneshot(request).await.unwrap()
}

fn ids(delivery: &Delivery) -> Vec<&str> {
    delivery.keys().map(DedupKey::id).collect()
}

async fn multi_event_delivery_commits_its_new_events<D: Db>() {
    let (db, world) = (D::create().await, World::default());
    let layer = DedupLayer::transactional(by_words(), db.adapter());
    let app = app::<D>(layer.on_in_flight(OnInFlight::Reject), &world);
    assert_eq!(send_batch(&app, "a b", "insert").await.status(), 200);
    assert_eq!(send_batch(&app, "b c d", "insert 500").await.status(), 500);
    assert_eq!(ids(&world.last()), ["c", "d"]);
    assert_eq!(send_batch(&app, "d b c", "insert").await.status(), 200);
    assert_eq!(ids(&world.last()), ["d", "c"]);
    assert_eq!(result(&send_batch(&app, "a d", "insert").await), Some("duplicate"));
    // Another process leases one of the keys: the rest commits, and the answer is 503.
    let lease =
        CallTerms::on_completion(Token::random(), Duration::from_secs(60), Duration::from_secs(60));
    db.adapter().claim(&[dedup_key("e")], &lease).await.unwrap();
    let partial = send_batch(&app, "e f", "insert").await;
    assert_eq!((partial.status().as_u16(), result(&partial)), (503, Some("in-flight")));
    assert_eq!(ids(&world.last()), ["f"]);
    db.adapter().release(&[dedup_key("e")], &lease).await.unwrap();
    assert_eq!(send_batch(&app, "e f", "insert").await.status(), 200);
    assert_eq!(ids(&world.last()), ["e"]);
    assert_eq!(db.effects().await, ["a", "d", "e", "f"]);
}

async fn second_identities_commit_with_the_first<D: Db>() {
    let (db, world) = (D::create().await, World::default());
    let layer = DedupLayer::transactional(by_words(), db.adapter());
    let app = app::<D>(layer.on_in_flight(OnInFlight::Reject), &world);
    assert_eq!(send_batch(&app, "a=x", "insert").await.status(), 200);
    // The same event under another id: it stays complete under both identities.
    assert_eq!(result(&send_batch(&app, "b=x", "insert").await), Some("duplicate"));
    assert_eq!(result(&send_batch(&app, "b=y", "insert").await), Some("duplicate"));
    // The event runs elsewhere under its second identity: the claim is released.
    let second = DedupKey::new("test.second", "z").unwrap();
    let lease =
        CallTerms::on_completion(Token::random(), Duration::from_secs(60), Duration::from_secs(60));
    db.adapter().claim(std::slice::from_ref(&second), &lease).await.unwrap();
    assert_eq!(result(&send_batch(&app, "c=z", "insert").await), Some("in-flight"));
    let partial = send_batch(&app, "c=z d", "insert").await;
    assert_eq!((partial.status().as_u16(), ids(&world.last())), (503, vec!["d"]));
    db.adapter().release(&[second], &lease).await.unwrap();
    assert_eq!(send_batch(&app, "c=z", "insert").await.status(), 200);
    assert!(!world.last().is_takeover());
    assert_eq!(db.effects().await, ["a", "c", "d"]);
}

async fn transaction_respects_leases_on_the_same_table<D: Db>() {
    let (db, world) = (D::create().await, World::default());
    let layer = DedupLayer::transactional(by_header(), db.adapter());
    let app = app::<D>(layer.on_in_flight(OnInFlight::Reject), &world);
    let lease = || {
        CallTerms::on_completion(
            Token::random(),
            Duration::from_secs(3_600),
            Duration::from_secs(60),
        )
    };
    let (live, released) = ([dedup_key("live")], [dedup_key("released")]);
    db.adapter().claim(&live, &lease()).await.unwrap();
    let mine = lease();
    db.adapter().claim(&released, &mine).await.unwrap();
    db.adapter().release(&released, &mine).await.unwrap();
    assert_eq!(result(&send(&app, "live", "insert").await), Some("in-flight"));
    assert_eq!(send(&app, "released", "insert").await.status(), 200);
    let delivery = world.last();
    assert_eq!((delivery.attempt(), delivery.is_takeover()), (2, false));
    // A takeover that fails leaves everything as it was.
    db.advance(Duration::from_secs(61)).await;
    assert_eq!(send(&app, "live", "insert 500").await.status(), 500);
    let delivery = world.last();
    assert_eq!((delivery.attempt(), delivery.is_takeover()), (2, true));
    assert_eq!(send(&app, "live", "insert").await.status(), 200);
    let delivery = world.last();
    assert_eq!((delivery.attempt(), delivery.is_takeover()), (2, true));
    assert_eq!(db.effects().await, ["live", "released"]);
}

async fn transaction_is_lent_to_one_extractor_at_a_time<D: Db>() {
    let (db, world) = (D::create().await, World::default());
    let kept: Arc<std::sync::Mutex<Option<TxHandle<D::Database>>>> = Arc::default();
    let keep = Arc::clone(&kept);
    let greedy = move |request: Request| {
        let keep = Arc::clone(&keep);
        async move {
            let (mut head, _) = request.into_parts();
            let first = DedupTx::<D::Database>::from_request_parts(&mut head, &()).await.unwrap();
            let second = DedupTx::<D::Database>::from_request_parts(&mut head, &()).await;
            assert_eq!(second.unwrap_err().status(), 500);
            let handle = head.extensions.get::<TxHandle<D::Database>>().unwrap().clone();
            assert_eq!(handle.lend().unwrap_err(), TxUnavailable::Lent);
            drop(first);
            // After its drop, the transaction can be lent again.
            let mut again = handle.lend().unwrap();
            D::run(&mut again, "INSERT INTO effects (id) VALUES ('x')".to_owned()).await.unwrap();
            *keep.lock().unwrap() = Some(handle);
            StatusCode::OK
        }
    };
    let layer = DedupLayer::transactional(by_header(), db.adapter());
    let app = Router::new().route("/hook", post(greedy)).layer(layer).with_state(());
    assert_eq!(send(&app, "a", "").await.status(), 200);
    assert_eq!(db.effects().await, ["x"]);
    let handle = kept.lock().unwrap().take().unwrap();
    assert_eq!(handle.lend().unwrap_err(), TxUnavailable::Closed);
    // A route without the layer has no transaction; the extractor's rejection says so.
    let bare = Router::new().route("/hook", post(handle_bare::<D>)).with_state(world);
    assert_eq!(send(&bare, "a", "").await.status(), 500);
}

async fn handle_bare<D: Db>(_: DedupTx<D::Database>) {}

/// Runs the inner service once for each line of the body, until it succeeds.
async fn retry_by_line(request: Request, next: Next) -> Response {
    let (head, body) = request.into_parts();
    let script = to_bytes(body, 1 << 20).await.unwrap();
    let mut response = StatusCode::IM_A_TEAPOT.into_response();
    for line in std::str::from_utf8(&script).unwrap().lines() {
        let again = Request::from_parts(head.clone(), Body::from(line.to_owned()));
        response = next.clone().run(again).await;
        if response.status().is_success() {
            break;
        }
    }
    response
}

/// Both attempts would write in one transaction.
async fn retry_layer_inside_has_no_transaction_for_its_second_attempt<D: Db>() {
    let (db, world) = (D::create().await, World::default());
    let layer = DedupLayer::transactional(by_header(), db.adapter());
    let layer = layer.store_timeout(Duration::from_secs(20));
    let app = Router::new()
        .route("/hook", post(handle::<D>).layer(from_fn(retry_by_line)))
        .layer(layer)
        .with_state(world.clone());
    let refused = send(&app, "a", "more 500\ninsert").await;
    assert_eq!((refused.status().as_u16(), result(&refused)), (500, None));
    assert_eq!((db.effects().await, world.runs()), (vec![], 1));
    // A retry comes with the sender's next delivery.
    assert_eq!(send(&app, "a", "insert\ninsert").await.status(), 200);
    assert_eq!(db.effects().await, ["a"]);
    assert_eq!(result(&send(&app, "a", "insert").await), Some("duplicate"));
}

/// The constraint fails at COMMIT on Postgres, at once on SQLite.
async fn commit_that_fails_is_no_2xx<D: Db>() {
    let (db, world) = (D::create().await, World::default());
    let app = transactional::<D>(db.adapter(), &world);
    assert_eq!(send(&app, "a", "insert").await.status(), 200);
    let conflict = |id: &str| {
        let request = Request::post("/hook").header("webhook-id", id).body(Body::from("a"));
        let handler = async |mut tx: DedupTx<D::Database>, taken: String| {
            let sql = format!("INSERT INTO effects (id) VALUES ('{taken}')");
            match D::run(&mut tx, sql).await {
                Ok(()) => StatusCode::OK,
                Err(_) => StatusCode::INTERNAL_SERVER_ERROR,
            }
        };
        let layer = DedupLayer::transactional(by_header(), db.adapter());
        let app = Router::new().route("/hook", post(handler)).layer(layer).with_state(());
        app.oneshot(request.unwrap())
    };
    assert_eq!(conflict("b").await.unwrap().status(), 500);
    assert_eq!(db.adapter().get(&dedup_key("b")).await.unwrap(), None);
    assert_eq!(db.effects().await, ["a"]);
    assert_eq!(send(&app, "b", "insert").await.status(), 200);
}

async fn deduplicator_commits_the_work_with_its_key<D: Db>() {
    let db = D::create().await;
    let worker = Deduplicator::transactional(db.adapter());
    let key = dedup_key("a");
    let insert = async |work: RunContext| {
        let mut tx = work.transaction::<D::Database>().unwrap();
        D::run(&mut tx, "INSERT INTO effects (id) VALUES ('a')".to_owned()).await.unwrap();
        tx
    };
    let failed = worker.run(&key, async |work| {
        drop(insert(work).await);
        Err::<(), _>("no")
    });
    assert!(matches!(failed.await, Err(RunError::Handler("no"))));
    assert!(db.effects().await.is_empty());
    // After the server or the file has ended it, the transaction cannot be committed.
    let kept = worker.run(&key, async |work| Ok::<_, &str>(insert(work).await)).await;
    match kept {
        Err(RunError::Store(error)) => assert_eq!(error.kind(), ErrorKind::Transaction),
        other => panic!("{other:?}"),
    }
    let first = async {
        loop {
            let ran = worker.run(&key, async |work| {
                drop(insert(work).await);
                Ok::<_, &str>(())
            });
            match ran.await.unwrap() {
                RunOutcome::First(()) => break,
                // The rollback of the kept transaction is still running.
                RunOutcome::InFlight => tokio::task::yield_now().await,
                other => panic!("{other:?}"),
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(20), first).await.expect("a first run");
    let again = worker.run(&key, async |_| Ok::<_, &str>(())).await.unwrap();
    assert!(matches!(again, RunOutcome::Duplicate(_)), "{again:?}");
    assert_eq!(db.effects().await, ["a"]);
    let leased = Deduplicator::new(db.adapter());
    let other = dedup_key("b");
    let absent = leased
        .run(&other, async |work| Err::<(), _>(work.transaction::<D::Database>().unwrap_err()));
    assert!(matches!(absent.await, Err(RunError::Handler(TxUnavailable::Absent))));
}

/// Another schema's table of the same name is another table.
#[tokio::test]
async fn tables_of_one_name_in_two_schemas_do_not_share_keys() {
    let (one, two, world) = (Pg::create().await, Pg::create().await, World::default());
    let first = transactional::<Pg>(one.adapter(), &world);
    let running = tokio::spawn(async move { send(&first, "a", "insert wait").await });
    world.waiting(1).await;
    let second = transactional::<Pg>(two.adapter(), &world);
    assert_eq!(send(&second, "a", "insert").await.status(), 200);
    world.go.notify_waiters();
    assert_eq!(running.await.unwrap().status(), 200);
}

#[tokio::test]
async fn record_in_postgres_transaction_commits_or_rolls_back_with_it() {
    let db = Pg::create().await;
    let (adapter, key, hour) = (db.adapter(), dedup_key("a"), Duration::from_secs(3_600));
    let (mut one, mut two) = (db.pool.begin().await.unwrap(), db.pool.begin().await.unwrap());
    assert_eq!(adapter.record_in(&mut one, &key, hour).await.unwrap(), FIRST);
    assert_eq!(adapter.record_in(&mut two, &key, hour).await.unwrap(), Claimed::InFlight);
    one.rollback().await.unwrap();
    // The key that was in flight was not written, and the transaction goes on.
    assert_eq!(adapter.record_in(&mut two, &key, hour).await.unwrap(), FIRST);
    two.commit().await.unwrap();
    let mut three = db.pool.begin().await.unwrap();
    let again = adapter.record_in(&mut three, &key, hour).await.unwrap();
    assert!(matches!(again, Claimed::Duplicate(_)), "{again:?}");
    three.rollback().await.unwrap();
    // A lease that has lapsed is taken over, a live lease is not.
    let lease = CallTerms::on_completion(Token::random(), hour, Duration::from_secs(60));
    adapter.claim(&[dedup_key("b")], &lease).await.unwrap();
    let mut four = db.pool.begin().await.unwrap();
    let live = adapter.record_in(&mut four, &dedup_key("b"), hour).await.unwrap();
    assert_eq!(live, Claimed::InFlight);
    four.rollback().await.unwrap();
    db.advance(Duration::from_secs(61)).await;
    let mut five = db.pool.begin().await.unwrap();
    let lapsed = adapter.record_in(&mut five, &dedup_key("b"), hour).await.unwrap();
    assert_eq!(lapsed, Claimed::first(2, true));
    five.commit().await.unwrap();
    assert_eq!(adapter.count().await.unwrap(), 2);
}

#[tokio::test]
async fn record_in_sqlite_transaction_commits_or_rolls_back_with_it() {
    let db = Lite::create().await;
    let (adapter, key, hour) = (db.adapter(), dedup_key("a"), Duration::from_secs(3_600));
    // The transaction may create the table; its rollback removes the table.
    let mut one = db.pool.begin_with("BEGIN IMMEDIATE").await.unwrap();
    assert_eq!(adapter.record_in(&mut one, &key, hour).await.unwrap(), FIRST);
    one.rollback().await.unwrap();
    let mut two = db.pool.begin_with("BEGIN IMMEDIATE").await.unwrap();
    assert_eq!(adapter.record_in(&mut two, &key, hour).await.unwrap(), FIRST);
    two.commit().await.unwrap();
    let mut three = db.pool.begin_with("BEGIN IMMEDIATE").await.unwrap();
    let again = adapter.record_in(&mut three, &key, hour).await.unwrap();
    assert!(matches!(again, Claimed::Duplicate(_)), "{again:?}");
    three.rollback().await.unwrap();
}

/// SQLite: a conflict ends the transaction without the handler's knowledge.
#[tokio::test]
async fn sqlite_insert_or_rollback_keeps_both_or_neither() {
    let (db, world) = (Lite::create().await, World::default());
    let app = transactional::<Lite>(db.adapter(), &world);
    assert_eq!(send(&app, "a", "insert").await.status(), 200);
    for _ in 0..2 * CONNECTIONS {
        // The script writes the key's own effect twice: the second write is the conflict.
        for script in
            ["insert or-rollback more", "insert or-rollback more 500", "insert or-rollback"]
        {
            let answer = send(&app, "b", script).await;
            assert_eq!(answer.status(), 500, "{script}");
            assert_eq!(db.adapter().get(&dedup_key("b")).await.unwrap(), None, "{script}");
            assert_eq!(db.effects().await, ["a"], "{script}");
        }
    }
    assert_eq!(send(&app, "b", "insert").await.status(), 200);
    assert_eq!(db.effects().await, ["a", "b"]);
}

/// `forget` refuses an event that runs, although no other session sees its row yet. A handler that
/// asks `forget` for a key of its own transaction is refused in time.
#[tokio::test]
async fn forget_of_a_key_in_an_open_transaction_is_refused() {
    let (db, world) = (Pg::create().await, World::default());
    let app = transactional::<Pg>(db.adapter(), &world);
    let running = tokio::spawn(async move { send(&app, "a", "insert wait").await });
    world.waiting(1).await;
    assert_eq!(db.adapter().forget(&dedup_key("a")).await.unwrap(), Forgotten::InFlight);
    assert_eq!(db.adapter().forget(&dedup_key("b")).await.unwrap(), Forgotten::Missing);
    world.go.notify_waiters();
    assert_eq!(running.await.unwrap().status(), 200);
    assert_eq!(db.adapter().forget(&dedup_key("a")).await.unwrap(), Forgotten::Removed);

    let (db, world) = (Lite::create().await, World::default());
    let adapter = db.waiting_for(Duration::from_millis(100));
    let app = transactional::<Lite>(adapter.clone(), &world);
    let running = tokio::spawn(async move { send(&app, "a", "insert wait").await });
    world.waiting(1).await;
    let refused = adapter.forget(&dedup_key("a")).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Refused);
    world.go.notify_waiters();
    assert_eq!(running.await.unwrap().status(), 200);
}

/// A route that also receives requests without a delivery, and an adapter in an `Arc`.
#[tokio::test]
async fn optional_transaction_is_absent_without_a_delivery() {
    let db = Lite::create().await;
    let handler = async |tx: Option<DedupTx<Sqlite>>| tx.is_some().to_string();
    let layer = DedupLayer::transactional(by_header(), Arc::new(db.adapter()));
    let app = Router::new().route("/hook", post(handler).get(handler)).layer(layer).with_state(());
    let answers = |request: Request| {
        let app = app.clone();
        async move {
            let body = app.oneshot(request).await.unwrap().into_body();
            to_bytes(body, 100).await.unwrap()
        }
    };
    let get = Request::get("/hook").body(Body::empty()).unwrap();
    assert_eq!(answers(get).await, "false");
    let post = Request::post("/hook").header("webhook-id", "a").body(Body::empty()).unwrap();
    assert_eq!(answers(post).await, "true");
}

/// SQLite: after a transaction that SQLite has ended, sqlx believes that the connection is still
/// inside it. The adapter resets the connection.
#[tokio::test]
async fn sqlite_connection_after_an_ended_transaction_is_usable() {
    let (db, world) = (Lite::create().await, World::default());
    let app = transactional::<Lite>(db.adapter(), &world);
    for script in ["rollback", "rollback 500", "insert or-rollback", "insert or-rollback 500"] {
        assert_eq!(send(&app, "a", script).await.status(), 500);
    }
    let all = join_all((0..CONNECTIONS).map(|_| db.pool.acquire())).await;
    for connection in all {
        assert!(!connection.unwrap().is_in_transaction());
    }
}

/// SQLite: one writer at a time in the file, and still no caller in this process gets BUSY.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sqlite_transactions_leases_and_purges_share_a_file() {
    let (db, world) = (Lite::create().await, World::default());
    let one = transactional::<Lite>(db.adapter(), &world);
    // An adapter of its own, on the same file.
    let leases = SqliteAdapter::new(Lite::pool(&db.dir).await);
    let layer = DedupLayer::new(by_header(), leases.clone());
    let two = Router::new().route("/hook", post(async || "done")).layer(layer).with_state(());
    let purger = Purger::new(leases).every(Duration::from_millis(5)).spawn();
    let room = Arc::new(Semaphore::new(16));
    let all = (0..300).map(|id| {
        let (app, room) = (if id % 2 == 0 { &one } else { &two }.clone(), Arc::clone(&room));
        tokio::spawn(async move {
            let _place = room.acquire().await.unwrap();
            send(&app, &format!("event-{id}"), "insert").await
        })
    });
    for answer in join_all(all).await {
        let answer = answer.unwrap();
        assert_eq!(answer.status(), 200, "{:?}", result(&answer));
    }
    purger.stop().await;
    assert_eq!(db.effects().await.len(), 150);
    assert_eq!(db.adapter().count().await.unwrap(), 300);
}

/// SQLite: deliveries that wait for a slow handler get a 503 after a bounded time.
#[tokio::test]
async fn sqlite_wait_for_the_file_is_bounded_in_time() {
    let (db, world) = (Lite::create().await, World::default());
    let adapter = db.waiting_for(Duration::from_millis(100));
    let app = transactional::<Lite>(adapter, &world);
    let slow = tokio::spawn({
        let app = app.clone();
        async move { send(&app, "slow", "insert wait").await }
    });
    world.waiting(1).await;
    let other = send(&app, "other", "insert").await;
    assert_eq!((other.status().as_u16(), result(&other)), (503, Some("unavailable")));
    world.go.notify_waiters();
    assert_eq!(slow.await.unwrap().status(), 200);
    assert_eq!(send(&app, "other", "insert").await.status(), 200);
}
