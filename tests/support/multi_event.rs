//! Shared parts of multi-event tests: a receiver over any adapter and ledger. The body of a
//! delivery tells the handler its work.

use std::future::pending;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use http::{Request, Response};
use http_body_util::BodyExt;
use sqlx::postgres::{PgPoolOptions, Postgres};
use sqlx::sqlite::{Sqlite, SqliteConnectOptions, SqliteJournalMode, SqlitePool};
use sqlx::{AssertSqlSafe, Connection, PgPool, Pool};
use tower::util::BoxCloneSyncService;
use tower::{Layer, ServiceExt};
use tower_dedup::adapter::CompletionDatabase;
use tower_dedup::adapter::contract::Completion;
use tower_dedup::adapter::inspect::{KeyState, MaintenanceAdapter};
use tower_dedup::adapter::{
    MemoryAdapter, PostgresAdapter, SqliteAdapter, SqliteOptions, TransactionAdapter,
};
use tower_dedup::key::{Event, Extracted, Keys};
use tower_dedup::ledger::Ledger;
use tower_dedup::{
    DedupKey, DedupLayer, DedupTx, Delivery, KeyExtractor, OnInFlight, ResponseBody,
};

use crate::support::postgres::Schema;
use crate::support::{Body, dedup_key, result};

/// Expands each case on each receiver.
#[allow(unused_macros, reason = "every test takes a part of it")]
macro_rules! cases {
    ($($place:ident: $fixture:ident($kind:ident) = $cases:tt;)+) => {
        $(mod $place { $crate::support::multi_event::cases!(@ $fixture $kind $cases); })+
    };
    (@ $fixture:ident $kind:ident [$($case:ident),+ $(,)?]) => {
        $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $case() {
            use $crate::support::multi_event::{$fixture, Kind};
            super::$case($fixture(Kind::$kind).await).await;
        })+
    };
}

#[allow(unused_imports, reason = "every test takes a part of it")]
pub(crate) use cases;

pub(crate) const LATE: Duration = Duration::from_secs(20);

/// One event for every word of the body: `id`, or `id=second` for a second identity; `id:way` says
/// how the event ends.
pub(crate) fn by_word() -> KeyExtractor {
    KeyExtractor::from_fn("test", |request| {
        let body = std::str::from_utf8(request.body()).unwrap();
        let events = words(body).map(|(name, _)| {
            Ok(match name.split_once('=') {
                Some((id, second)) => Event::new(DedupKey::new("test", id)?)
                    .with_second_identity(DedupKey::new("test.second", second)?),
                None => Event::new(DedupKey::new("test", name)?),
            })
        });
        Ok(Keys::new(events.collect::<Result<_, _>>()?).map_or(Extracted::Missing, Extracted::Keys))
    })
}

pub(crate) fn words(body: &str) -> impl Iterator<Item = (&str, &str)> {
    body.split_whitespace().map(|word| word.split_once(':').unwrap_or((word, "")))
}

pub(crate) fn id(name: &str) -> &str {
    name.split('=').next().unwrap()
}

/// A database of the transactional ledger.
pub(crate) trait Sql: CompletionDatabase {
    fn run(
        connection: &mut Self::Connection,
        sql: String,
    ) -> BoxFuture<'_, Result<(), sqlx::Error>>;

    fn run_with<'c>(
        connection: &'c mut Self::Connection,
        completion: &'c Completion,
    ) -> BoxFuture<'c, Result<(), sqlx::Error>>;
}

macro_rules! sql {
    ($($database:ty),+) => {$(
        impl Sql for $database {
            fn run(
                connection: &mut Self::Connection,
                sql: String,
            ) -> BoxFuture<'_, Result<(), sqlx::Error>> {
                let query = sqlx::query(AssertSqlSafe(sql));
                Box::pin(async move { query.execute(connection).await.map(drop) })
            }

            fn run_with<'c>(
                connection: &'c mut Self::Connection,
                completion: &'c Completion,
            ) -> BoxFuture<'c, Result<(), sqlx::Error>> {
                let query = sqlx::query(AssertSqlSafe(completion.sql().to_owned()));
                let query = query.bind(completion.parameter().to_owned());
                Box::pin(async move { query.execute(connection).await.map(drop) })
            }
        }
    )+};
}

sql!(Postgres, Sqlite);

pub(crate) fn insert<'i>(ids: impl IntoIterator<Item = &'i str>) -> String {
    let rows: Vec<String> = ids.into_iter().map(|id| format!("('{id}')")).collect();
    format!("INSERT INTO effects (id) VALUES {}", rows.join(", "))
}

/// The effects of handlers.
#[derive(Clone)]
pub(crate) enum Effects {
    Log(Arc<Mutex<Vec<String>>>),
    Lite(SqlitePool),
    Pg(PgPool),
}

impl Effects {
    pub(crate) async fn all(&self) -> Vec<String> {
        const SELECT: &str = "SELECT id FROM effects";
        let mut all = match self {
            Self::Log(all) => all.lock().unwrap().clone(),
            Self::Lite(pool) => sqlx::query_scalar(SELECT).fetch_all(pool).await.unwrap(),
            Self::Pg(pool) => sqlx::query_scalar(SELECT).fetch_all(pool).await.unwrap(),
        };
        all.sort_unstable();
        all
    }
}

pub(crate) type Answer = Result<Response<Body>, &'static str>;
pub(crate) type Service =
    BoxCloneSyncService<Request<Body>, Response<ResponseBody<Body>>, &'static str>;
pub(crate) type Runs = Arc<Mutex<Vec<Delivery>>>;

pub(crate) fn answer(status: u16) -> Answer {
    let mut response = Response::new(Body::default());
    *response.status_mut() = status.try_into().unwrap();
    Ok(response)
}

pub(crate) async fn split(
    request: Request<Body>,
    runs: &Runs,
) -> (Delivery, http::request::Parts, String) {
    let (head, body) = request.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    let delivery = head.extensions.get::<Delivery>().unwrap().clone();
    assert!(delivery.keys().all(|key| delivery.needs_run(key)));
    runs.lock().unwrap().push(delivery.clone());
    (delivery, head, String::from_utf8(body.to_vec()).unwrap())
}

/// A handler that writes its effects outside the store, if no event fails.
pub(crate) async fn apart(
    request: Request<Body>,
    runs: Runs,
    effects: Arc<Mutex<Vec<String>>>,
) -> Answer {
    let (delivery, _, body) = split(request, &runs).await;
    let (mut failed, mut ran) = (false, Vec::new());
    for (name, way) in words(&body) {
        let key = dedup_key(id(name));
        // The delivery may name an event twice.
        if !delivery.needs_run(&key) || ran.contains(&id(name)) {
            continue;
        }
        match way {
            "fail" | "sql" => failed = true,
            "500" | "abort" => return answer(500),
            "error" => return Err("the handler was told to fail"),
            "panic" => panic!("the handler was told to panic"),
            "hang" => pending().await,
            _ => ran.push(id(name)),
        }
    }
    if failed {
        return answer(500);
    }
    effects.lock().unwrap().extend(ran.into_iter().map(str::to_owned));
    answer(200)
}

/// A handler that writes its effects in a transaction that completes the delivery, each event under a savepoint.
pub(crate) async fn within<DB: Sql>(request: Request<Body>, runs: Runs, pool: Pool<DB>) -> Answer {
    let (delivery, head, body) = split(request, &runs).await;
    let Ok(mut tx) = delivery.begin(&pool).await else { return answer(503) };
    if head.headers.contains_key("bulk") {
        DB::run(&mut tx, insert(delivery.keys().map(DedupKey::id))).await.unwrap();
        return answer(if tx.commit().await.is_ok() { 200 } else { 503 });
    }
    let (mut failed, mut ran) = (false, Vec::new());
    for (name, way) in words(&body) {
        let key = dedup_key(id(name));
        if !delivery.needs_run(&key) || ran.contains(&key) {
            continue;
        }
        ran.push(key);
        let mut savepoint = tx.begin().await.unwrap();
        DB::run(&mut savepoint, insert([id(name)])).await.unwrap();
        match way {
            // The drop rolls the savepoint back.
            "fail" => failed = true,
            "sql" => {
                DB::run(&mut savepoint, "SELECT nonsense".to_owned()).await.unwrap_err();
                failed = true;
            }
            _ => {
                savepoint.commit().await.unwrap();
                if !way.is_empty()
                    && let Some(answer) = misuse::<DB>(&mut tx, way).await
                {
                    return answer;
                }
            }
        }
    }
    if failed {
        return answer(500);
    }
    answer(if tx.commit().await.is_ok() { 200 } else { 503 })
}

/// Ends or breaks the transaction in a way that no savepoint rolls back.
pub(crate) async fn misuse<DB: Sql>(tx: &mut DedupTx<DB>, way: &str) -> Option<Answer> {
    let raw = |sql: &str| sql.to_owned();
    match way {
        "error" => return Some(Err("the handler was told to fail")),
        "panic" => panic!("the handler was told to panic"),
        "hang" => pending().await,
        "abort" => {
            DB::run(tx, raw("SELECT nonsense")).await.unwrap_err();
            return Some(answer(500));
        }
        "swallow" => drop(DB::run(tx, raw("SELECT nonsense")).await.unwrap_err()),
        "rollback" => DB::run(tx, raw("ROLLBACK")).await.unwrap_or_default(),
        "commit" => DB::run(tx, raw("COMMIT")).await.unwrap_or_default(),
        "begin" => DB::run(tx, raw("BEGIN")).await.unwrap_or_default(),
        "leak" => std::mem::forget(tx.begin().await.unwrap()),
        status => return Some(answer(status.parse().unwrap())),
    }
    None
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kind {
    Lease,
    Arrival,
    Transactional,
}

/// A receiver with two services, which stand for two processes.
pub(crate) struct Fixture {
    pub(crate) kind: Kind,
    pub(crate) store: Arc<dyn MaintenanceAdapter>,
    pub(crate) services: [Service; 2],
    pub(crate) effects: Effects,
    pub(crate) runs: Runs,
    _place: Box<dyn std::any::Any>,
}

/// Wraps a handler that is dropped when it takes too long.
pub(crate) fn service<L: Ledger, F>(
    layer: DedupLayer<L>,
    handler: impl Fn(Request<Body>) -> F + Clone + Send + Sync + 'static,
) -> Service
where
    F: Future<Output = Answer> + Send + 'static,
{
    let impatient = tower::service_fn(move |request: Request<Body>| {
        let patience = if request.headers().contains_key("impatient") { 300 } else { 60_000 };
        let handled = tokio::time::timeout(Duration::from_millis(patience), handler(request));
        async move { handled.await.unwrap_or_else(|_| answer(504)) }
    });
    let layer = layer.on_in_flight(OnInFlight::Reject).store_timeout(LATE);
    Service::new(layer.layer(impatient))
}

pub(crate) fn with_effects_apart(
    kind: Kind,
    stores: [Arc<dyn MaintenanceAdapter>; 2],
    place: impl std::any::Any,
) -> Fixture {
    let (runs, log) = (Runs::default(), Arc::<Mutex<Vec<String>>>::default());
    let services = stores.clone().map(|store| {
        let (runs, log) = (Arc::clone(&runs), Arc::clone(&log));
        let handler = move |request| apart(request, Arc::clone(&runs), Arc::clone(&log));
        match kind {
            Kind::Lease => service(DedupLayer::new(by_word(), store), handler),
            _ => service(DedupLayer::on_arrival(by_word(), store), handler),
        }
    });
    let [store, _] = stores;
    Fixture { kind, store, services, effects: Effects::Log(log), runs, _place: Box::new(place) }
}

pub(crate) async fn lite_pool(dir: &std::path::Path) -> SqlitePool {
    let options = SqliteConnectOptions::new()
        .filename(dir.join("app.db"))
        .create_if_missing(true)
        .journal_mode(SqliteJournalMode::Wal)
        .busy_timeout(LATE);
    sqlx::sqlite::SqlitePoolOptions::new().max_connections(3).connect_with(options).await.unwrap()
}

pub(crate) async fn lite() -> (tempfile::TempDir, [SqlitePool; 2]) {
    let dir = tempfile::tempdir().unwrap();
    let pools = [lite_pool(dir.path()).await, lite_pool(dir.path()).await];
    sqlx::query("CREATE TABLE effects (id text)").execute(&pools[0]).await.unwrap();
    (dir, pools)
}

pub(crate) async fn pg() -> (Schema, [PgPool; 2]) {
    let schema = Schema::fresh();
    let pool = || PgPoolOptions::new().max_connections(3).connect_lazy(&schema.url()).unwrap();
    let pools = [pool(), pool()];
    sqlx::query("CREATE TABLE effects (id text)").execute(&pools[0]).await.unwrap();
    (schema, pools)
}

pub(crate) fn lite_adapter(pool: SqlitePool) -> SqliteAdapter {
    SqliteAdapter::with_options(pool, SqliteOptions::new().write_lock_timeout(LATE))
}

pub(crate) async fn memory_under(kind: Kind) -> Fixture {
    let store: Arc<dyn MaintenanceAdapter> = Arc::new(MemoryAdapter::new());
    with_effects_apart(kind, [Arc::clone(&store), store], ())
}

pub(crate) async fn sqlite_under(kind: Kind) -> Fixture {
    let (dir, [one, other]) = lite().await;
    let effects = Effects::Lite(one.clone());
    let pools = [one.clone(), other.clone()];
    in_a_database(kind, effects, [one.clone(), one, other].map(lite_adapter), pools, dir)
}

pub(crate) async fn postgres_under(kind: Kind) -> Fixture {
    let (schema, [one, other]) = pg().await;
    let effects = Effects::Pg(one.clone());
    let pools = [one.clone(), other.clone()];
    in_a_database(kind, effects, [one.clone(), one, other].map(PostgresAdapter::new), pools, schema)
}

/// Makes a receiver from the adapter of an operator and those of two processes.
fn in_a_database<A, DB>(
    kind: Kind,
    effects: Effects,
    [operator, one, other]: [A; 3],
    [pool, other_pool]: [Pool<DB>; 2],
    place: impl std::any::Any,
) -> Fixture
where
    A: MaintenanceAdapter + TransactionAdapter,
    DB: Sql,
{
    if kind != Kind::Transactional {
        let stores = [one, other].map(|adapter| Arc::new(adapter) as Arc<dyn MaintenanceAdapter>);
        return with_effects_apart(kind, stores, place);
    }
    let runs = Runs::default();
    let services = [(one, pool), (other, other_pool)].map(|(adapter, pool)| {
        let runs = Arc::clone(&runs);
        let layer = DedupLayer::transactional(by_word(), adapter);
        service(layer, move |request| within(request, Arc::clone(&runs), pool.clone()))
    });
    Fixture { kind, store: Arc::new(operator), services, effects, runs, _place: Box::new(place) }
}

pub(crate) fn request(words: &str) -> Request<Body> {
    let mut request = Request::post("/hook");
    for flag in ["bulk", "impatient"] {
        if words.contains(&format!("{flag}!")) {
            request = request.header(flag, "");
        }
    }
    let words = words.replace("bulk!", "").replace("impatient!", "");
    request.body(Body::from(words)).unwrap()
}

/// Returns the status, and the result header if the layer has answered. 0 is a panic, 1 is an
/// error.
pub(crate) async fn send_to(service: &Service, words: &str) -> (u16, String) {
    let answered = std::panic::AssertUnwindSafe(service.clone().oneshot(request(words)));
    match answered.catch_unwind().await {
        Ok(Ok(response)) => {
            (response.status().as_u16(), result(&response).unwrap_or_default().to_owned())
        }
        Ok(Err(_)) => (1, String::new()),
        Err(_) => (0, String::new()),
    }
}

pub(crate) fn own(status: u16) -> (u16, String) {
    (status, String::new())
}

pub(crate) fn layers(status: u16, result: &str) -> (u16, String) {
    (status, result.to_owned())
}

impl Fixture {
    pub(crate) async fn send(&self, words: &str) -> (u16, String) {
        send_to(&self.services[0], words).await
    }

    pub(crate) fn runs(&self) -> usize {
        self.runs.lock().unwrap().len()
    }

    pub(crate) fn last(&self) -> Delivery {
        self.runs.lock().unwrap().last().unwrap().clone()
    }

    /// Returns the events that the last run saw as new.
    pub(crate) fn news(&self) -> Vec<String> {
        self.last().keys().map(|key| key.id().to_owned()).collect()
    }

    pub(crate) async fn state(&self, id: &str) -> Option<KeyState> {
        self.store.get(&dedup_key(id)).await.unwrap().map(|entry| entry.state)
    }

    pub(crate) async fn is_complete(&self, id: &str) -> bool {
        matches!(self.state(id).await, Some(KeyState::Complete))
    }
}

pub(crate) fn ids(words: &str) -> Vec<String> {
    words.split_whitespace().map(str::to_owned).collect()
}
