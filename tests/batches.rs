//! Deliveries of several events, on every adapter and under every ledger: what is new runs, what
//! was done is not repeated, and what runs elsewhere makes the answer 503.

mod support;

use std::collections::HashSet;
use std::future::pending;
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, join_all};
use http::{Request, Response};
use http_body_util::BodyExt;
use sqlx::postgres::{PgPoolOptions, Postgres};
use sqlx::sqlite::{Sqlite, SqliteConnectOptions, SqliteJournalMode, SqlitePool};
use sqlx::{AssertSqlSafe, Connection, Database, PgPool};
use support::postgres::Schema;
use support::proxy::{Cut, Proxy};
use support::{Body, Faulty, Op, dedup_key, polled, result};
use tokio::io::{AsyncBufReadExt, BufReader};
use tower::util::BoxCloneSyncService;
use tower::{Layer, ServiceExt};
use tower_dedup::adapter::{
    DynAdapter, EntryState, LeaseAdapter, Maintain, MemoryAdapter, PostgresAdapter, Receipt,
    SqliteAdapter, Token, TransactionAdapter,
};
use tower_dedup::key::{Element, Extracted, KeyExtractor, Keys};
use tower_dedup::ledger::{
    Begin, BeginContext, Claim, Ledger, Outcome, TransactionClaim, TransactionLedger, TxHandle,
};
use tower_dedup::{DedupKey, DedupLayer, DedupTx, Delivery, ErrorKind, OnInFlight, ResponseBody};

const LATE: Duration = Duration::from_secs(20);

/// One event for every word of the body: `id`, or `id=second` for a second identity; `id:way` says
/// how it ends.
fn by_word() -> KeyExtractor {
    KeyExtractor::from_fn("test", |request| {
        let body = std::str::from_utf8(request.body()).unwrap();
        let elements = words(body).map(|(name, _)| {
            Ok(match name.split_once('=') {
                Some((id, second)) => Element::new(DedupKey::new("test", id)?)
                    .with_second_identity(DedupKey::new("test.second", second)?),
                None => Element::new(DedupKey::new("test", name)?),
            })
        });
        Ok(Keys::new(elements.collect::<Result<_, _>>()?)
            .map_or(Extracted::Missing, Extracted::Keys))
    })
    .unwrap()
}

fn words(body: &str) -> impl Iterator<Item = (&str, &str)> {
    body.split_whitespace().map(|word| word.split_once(':').unwrap_or((word, "")))
}

fn id(name: &str) -> &str {
    name.split('=').next().unwrap()
}

/// A database of the transactional ledger.
trait Sql: Database {
    fn run(
        connection: &mut Self::Connection,
        sql: String,
    ) -> BoxFuture<'_, Result<(), sqlx::Error>>;
}

impl Sql for Postgres {
    fn run(
        connection: &mut sqlx::PgConnection,
        sql: String,
    ) -> BoxFuture<'_, Result<(), sqlx::Error>> {
        Box::pin(async move { sqlx::query(AssertSqlSafe(sql)).execute(connection).await.map(drop) })
    }
}

impl Sql for Sqlite {
    fn run(
        connection: &mut sqlx::SqliteConnection,
        sql: String,
    ) -> BoxFuture<'_, Result<(), sqlx::Error>> {
        Box::pin(async move { sqlx::query(AssertSqlSafe(sql)).execute(connection).await.map(drop) })
    }
}

fn insert<'i>(ids: impl IntoIterator<Item = &'i str>) -> String {
    let rows: Vec<String> = ids.into_iter().map(|id| format!("('{id}')")).collect();
    format!("INSERT INTO effects (id) VALUES {}", rows.join(", "))
}

/// What handlers did.
#[derive(Clone)]
enum Effects {
    Log(Arc<Mutex<Vec<String>>>),
    Lite(SqlitePool),
    Pg(PgPool),
}

impl Effects {
    async fn all(&self) -> Vec<String> {
        const SELECT: &str = "SELECT id FROM effects";
        let mut all = match self {
            Self::Log(all) => all.lock().unwrap().clone(),
            Self::Lite(pool) => sqlx::query_scalar(SELECT).fetch_all(pool).await.unwrap(),
            Self::Pg(pool) => sqlx::query_scalar(SELECT).fetch_all(pool).await.unwrap(),
        };
        all.sort_unstable();
        all
    }

    async fn run(&self, sql: &str) {
        let sql = AssertSqlSafe(sql.to_owned());
        match self {
            Self::Log(_) => unreachable!("no database"),
            Self::Lite(pool) => drop(sqlx::query(sql).execute(pool).await.unwrap()),
            Self::Pg(pool) => drop(sqlx::query(sql).execute(pool).await.unwrap()),
        }
    }
}

type Answer = Result<Response<Body>, &'static str>;
type Service = BoxCloneSyncService<Request<Body>, Response<ResponseBody<Body>>, &'static str>;
type Runs = Arc<Mutex<Vec<Delivery>>>;

fn answer(status: u16) -> Answer {
    let mut response = Response::new(Body::default());
    *response.status_mut() = status.try_into().unwrap();
    Ok(response)
}

async fn split(request: Request<Body>, runs: &Runs) -> (Delivery, http::request::Parts, String) {
    let (head, body) = request.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    let delivery = head.extensions.get::<Delivery>().unwrap().clone();
    assert!(delivery.keys().all(|key| delivery.is_new(key)));
    runs.lock().unwrap().push(delivery.clone());
    (delivery, head, String::from_utf8(body.to_vec()).unwrap())
}

/// A handler whose effects are somewhere else: an event that fails has none.
async fn apart(request: Request<Body>, runs: Runs, effects: Arc<Mutex<Vec<String>>>) -> Answer {
    let (delivery, head, body) = split(request, &runs).await;
    let mut failed = false;
    for (name, way) in words(&body) {
        let key = dedup_key(id(name));
        if !delivery.is_new(&key) {
            continue;
        }
        match way {
            "fail" | "sql" => failed = true,
            "500" | "abort" => return answer(500),
            "error" => return Err("the handler was told to fail"),
            "panic" => panic!("the handler was told to panic"),
            "hang" => pending().await,
            _ => {
                effects.lock().unwrap().push(id(name).to_owned());
                if !head.headers.contains_key("bulk") {
                    assert!(delivery.done(&key));
                }
            }
        }
    }
    answer(if failed { 500 } else { 200 })
}

/// A handler whose effects are in the delivery's transaction, each event under a savepoint.
async fn within<DB: Sql>(request: Request<Body>, runs: Runs) -> Answer {
    let (delivery, head, body) = split(request, &runs).await;
    let mut tx = head.extensions.get::<TxHandle<DB>>().unwrap().lend().unwrap();
    if head.headers.contains_key("bulk") {
        DB::run(&mut tx, insert(delivery.keys().map(DedupKey::id))).await.unwrap();
        return answer(200);
    }
    let mut failed = false;
    for (name, way) in words(&body) {
        let key = dedup_key(id(name));
        assert!(!delivery.done(&key), "only the transaction can keep it");
        if !delivery.is_new(&key) {
            continue;
        }
        let mut savepoint = tx.begin().await.unwrap();
        DB::run(&mut savepoint, insert([id(name)])).await.unwrap();
        match way {
            // Dropped: rolled back.
            "fail" => failed = true,
            "sql" => {
                DB::run(&mut savepoint, "SELECT nonsense".to_owned()).await.unwrap_err();
                failed = true;
            }
            _ => {
                savepoint.commit().await.unwrap();
                match way {
                    "" => assert!(tx.done(&key).await.unwrap()),
                    "undone" => {}
                    way => {
                        if let Some(answer) = misuse::<DB>(&mut tx, way).await {
                            return answer;
                        }
                    }
                }
            }
        }
    }
    answer(if failed { 500 } else { 200 })
}

/// What no savepoint rolls back.
async fn misuse<DB: Sql>(tx: &mut DedupTx<DB>, way: &str) -> Option<Answer> {
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
enum Kind {
    Lease,
    Arrival,
    Transactional,
}

/// A receiver, in two processes as it were.
struct Rig {
    kind: Kind,
    store: Arc<dyn DynAdapter>,
    services: [Service; 2],
    effects: Effects,
    runs: Runs,
    /// For another process.
    place: String,
    _place: Box<dyn std::any::Any>,
}

/// A handler that is dropped when it takes too long.
fn service<L: Ledger, F>(
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

fn with_effects_apart(
    kind: Kind,
    stores: [Arc<dyn DynAdapter>; 2],
    place: impl std::any::Any,
) -> Rig {
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
    Rig {
        kind,
        store,
        services,
        effects: Effects::Log(log),
        runs,
        place: String::new(),
        _place: Box::new(place),
    }
}

async fn lite_pool(dir: &std::path::Path) -> SqlitePool {
    let options = SqliteConnectOptions::new()
        .filename(dir.join("app.db"))
        .create_if_missing(true)
        .journal_mode(SqliteJournalMode::Wal)
        .busy_timeout(LATE);
    sqlx::sqlite::SqlitePoolOptions::new().max_connections(3).connect_with(options).await.unwrap()
}

async fn lite() -> (tempfile::TempDir, [SqlitePool; 2]) {
    let dir = tempfile::tempdir().unwrap();
    let pools = [lite_pool(dir.path()).await, lite_pool(dir.path()).await];
    sqlx::query("CREATE TABLE effects (id text)").execute(&pools[0]).await.unwrap();
    (dir, pools)
}

async fn pg() -> (Schema, [PgPool; 2]) {
    let schema = Schema::fresh();
    let pool = || PgPoolOptions::new().max_connections(3).connect_lazy(&schema.url()).unwrap();
    let pools = [pool(), pool()];
    sqlx::query("CREATE TABLE effects (id text)").execute(&pools[0]).await.unwrap();
    (schema, pools)
}

fn lite_adapter(pool: SqlitePool) -> SqliteAdapter {
    SqliteAdapter::new(pool).gate_timeout(LATE)
}

async fn memory_under(kind: Kind) -> Rig {
    let store: Arc<dyn DynAdapter> = Arc::new(MemoryAdapter::new());
    with_effects_apart(kind, [Arc::clone(&store), store], ())
}

async fn sqlite_under(kind: Kind) -> Rig {
    let (dir, pools) = lite().await;
    if kind != Kind::Transactional {
        let stores = pools.map(|pool| Arc::new(lite_adapter(pool)) as Arc<dyn DynAdapter>);
        return with_effects_apart(kind, stores, dir);
    }
    let (runs, effects) = (Runs::default(), Effects::Lite(pools[0].clone()));
    let store = Arc::new(lite_adapter(pools[0].clone()));
    let services = pools.map(|pool| {
        let runs = Arc::clone(&runs);
        let layer = DedupLayer::transactional(by_word(), lite_adapter(pool));
        service(layer, move |request| within::<Sqlite>(request, Arc::clone(&runs)))
    });
    let place = dir.path().to_str().unwrap().to_owned();
    Rig { kind, store, services, effects, runs, place, _place: Box::new(dir) }
}

async fn postgres_under(kind: Kind) -> Rig {
    let (schema, pools) = pg().await;
    if kind != Kind::Transactional {
        let stores = pools.map(|pool| Arc::new(PostgresAdapter::new(pool)) as Arc<dyn DynAdapter>);
        return with_effects_apart(kind, stores, schema);
    }
    let (runs, effects) = (Runs::default(), Effects::Pg(pools[0].clone()));
    let store = Arc::new(PostgresAdapter::new(pools[0].clone()));
    let services = pools.map(|pool| {
        let runs = Arc::clone(&runs);
        let layer = DedupLayer::transactional(by_word(), PostgresAdapter::new(pool));
        service(layer, move |request| within::<Postgres>(request, Arc::clone(&runs)))
    });
    Rig { kind, store, services, effects, runs, place: schema.url(), _place: Box::new(schema) }
}

fn request(words: &str) -> Request<Body> {
    let mut request = Request::post("/hook");
    for flag in ["bulk", "impatient"] {
        if words.contains(&format!("{flag}!")) {
            request = request.header(flag, "");
        }
    }
    let words = words.replace("bulk!", "").replace("impatient!", "");
    request.body(Body::from(words)).unwrap()
}

/// The status, and why if it is the layer's: 0 is a panic, 1 is an error.
async fn send_to(service: &Service, words: &str) -> (u16, String) {
    let answered = std::panic::AssertUnwindSafe(service.clone().oneshot(request(words)));
    match answered.catch_unwind().await {
        Ok(Ok(response)) => {
            (response.status().as_u16(), result(&response).unwrap_or_default().to_owned())
        }
        Ok(Err(_)) => (1, String::new()),
        Err(_) => (0, String::new()),
    }
}

fn own(status: u16) -> (u16, String) {
    (status, String::new())
}

fn layers(status: u16, result: &str) -> (u16, String) {
    (status, result.to_owned())
}

impl Rig {
    async fn send(&self, words: &str) -> (u16, String) {
        send_to(&self.services[0], words).await
    }

    fn runs(&self) -> usize {
        self.runs.lock().unwrap().len()
    }

    fn last(&self) -> Delivery {
        self.runs.lock().unwrap().last().unwrap().clone()
    }

    /// What the last run was told to be new.
    fn new(&self) -> Vec<String> {
        self.last().keys().map(|key| key.id().to_owned()).collect()
    }

    /// As a sender does.
    async fn send_until_done(&self, words: &str) {
        let done = async {
            while self.send(words).await != own(200) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(LATE, done).await.expect("an end");
    }

    async fn state(&self, id: &str) -> Option<EntryState> {
        self.store.get(&dedup_key(id)).await.unwrap().map(|entry| entry.state)
    }

    async fn is_complete(&self, id: &str) -> bool {
        matches!(self.state(id).await, Some(EntryState::Complete { .. }))
    }
}

macro_rules! cases {
    ($($place:ident: $rig:ident($kind:ident) = $cases:tt;)+) => {
        $(mod $place { cases!(@ $rig $kind $cases); })+
    };
    (@ $rig:ident $kind:ident [$($case:ident),+ $(,)?]) => {
        $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $case() {
            super::$case(super::$rig(super::Kind::$kind).await).await;
        })+
    };
}

macro_rules! under_every_ledger {
    ($($case:ident),+ $(,)?) => {
        cases! {
            memory_lease: memory_under(Lease) = [$($case),+];
            memory_arrival: memory_under(Arrival) = [$($case),+];
            sqlite_lease: sqlite_under(Lease) = [$($case),+];
            sqlite_arrival: sqlite_under(Arrival) = [$($case),+];
            sqlite_transactional: sqlite_under(Transactional) = [$($case),+];
            postgres_lease: postgres_under(Lease) = [$($case),+];
            postgres_arrival: postgres_under(Arrival) = [$($case),+];
            postgres_transactional: postgres_under(Transactional) = [$($case),+];
        }
    };
}

under_every_ledger!(
    what_is_new_runs_and_nothing_else,
    a_poison_event_does_not_repeat_the_others,
    a_handler_that_fails_half_way_does_not_repeat_what_is_done,
    an_event_in_flight_elsewhere_is_503_after_the_new_ones,
    retries_in_other_batches_process_only_what_is_new,
    overlapping_batches_race_and_every_event_takes_effect_once,
    second_identities_of_a_batch,
    as_many_as_may_be_and_one_more,
);

async fn what_is_new_runs_and_nothing_else(rig: Rig) {
    assert_eq!(rig.send("a b c").await, own(200));
    assert_eq!(rig.new(), ["a", "b", "c"]);
    assert_eq!(rig.send("c d b d e").await, own(200));
    assert_eq!(rig.new(), ["d", "e"]);
    let delivery = rig.last();
    assert!(delivery.is_done(&dedup_key("d")) && !delivery.is_new(&dedup_key("c")));
    assert_eq!(delivery.key(), Some(&dedup_key("d")));
    assert_eq!(rig.send("e a").await, layers(200, "duplicate"));
    assert_eq!(rig.send("  ").await, layers(400, "invalid-key"));
    assert_eq!((rig.effects.all().await, rig.runs()), (ids("a b c d e"), 2));
    // Many, which are looked up otherwise.
    let many: Vec<String> = (0..40).map(|n| format!("n{n:02}")).collect();
    assert_eq!(rig.send(&format!("e {}", many.join(" "))).await, own(200));
    assert_eq!(rig.new(), many);
    assert!(!rig.last().done(&dedup_key("e")));
}

fn ids(words: &str) -> Vec<String> {
    words.split_whitespace().map(str::to_owned).collect()
}

/// The handler goes on after it, and says so in the end.
async fn a_poison_event_does_not_repeat_the_others(rig: Rig) {
    for (way, poison) in [("fail", "p"), ("sql", "q")] {
        let (before, after) = (format!("a{poison}"), format!("z{poison}"));
        let batch = |way: &str| format!("{before} {poison}:{way} {after}");
        assert_eq!(rig.send(&batch(way)).await, own(500));
        assert!(rig.is_complete(&before).await && rig.is_complete(&after).await);
        if rig.kind == Kind::Arrival {
            assert_eq!(rig.send(&batch("")).await, layers(200, "duplicate"));
            assert!(!rig.effects.all().await.contains(&poison.to_owned()), "lost, as documented");
            continue;
        }
        for _ in 0..2 {
            assert_eq!(rig.send(&batch(way)).await, own(500));
            assert_eq!(rig.new(), [poison]);
        }
        assert_eq!(rig.send(&batch("")).await, own(200));
        assert_eq!((rig.new(), rig.last().takeover()), (ids(poison), false));
        assert_eq!(rig.send(&batch("")).await, layers(200, "duplicate"));
        let all = rig.effects.all().await;
        for once in [&before, poison, &after] {
            assert_eq!(all.iter().filter(|id| *id == once).count(), 1, "{once}");
        }
    }
}

/// It ends at the poison event: by its status, its error, its panic, dropped, or in a transaction
/// that is aborted.
async fn a_handler_that_fails_half_way_does_not_repeat_what_is_done(rig: Rig) {
    let ways = [("500", 500), ("error", 1), ("panic", 0), ("hang", 504), ("abort", 500)];
    for (n, (way, status)) in ways.into_iter().enumerate() {
        let batch = |way: &str| {
            format!("a{n} b{n} p{n}:{way} c{n} {}", if way == "hang" { "impatient!" } else { "" })
        };
        assert_eq!(rig.send(&batch(way)).await, own(status), "{way}");
        assert!(rig.is_complete(&format!("a{n}")).await && rig.is_complete(&format!("b{n}")).await);
        let retried = rig.send(&batch("")).await;
        if rig.kind == Kind::Arrival {
            assert_eq!(retried, layers(200, "duplicate"));
            assert_eq!(rig.effects.all().await.len(), 2 * (n + 1));
            continue;
        }
        assert_eq!(retried, own(200), "{way}");
        assert_eq!(rig.new(), [format!("p{n}"), format!("c{n}")]);
        // A lease counts what it has begun; a transaction leaves nothing behind.
        let attempt = if rig.kind == Kind::Lease { 2 } else { 1 };
        assert_eq!((rig.last().attempt(), rig.last().takeover()), (attempt, false));
        assert_eq!(rig.send(&batch("")).await, layers(200, "duplicate"));
        assert_eq!(rig.effects.all().await.len(), 4 * (n + 1), "{way}");
    }
    let all = rig.effects.all().await;
    assert_eq!(all.iter().collect::<HashSet<_>>().len(), all.len(), "{all:?}");
}

fn receipt() -> Receipt {
    Receipt::new(Token::random(), Duration::from_secs(3_600)).with_lease(Duration::from_secs(60))
}

async fn an_event_in_flight_elsewhere_is_503_after_the_new_ones(rig: Rig) {
    let (one, two) = (receipt(), receipt());
    rig.store.claim(&[dedup_key("b")], &one).await.unwrap();
    rig.store.claim(&[dedup_key("d")], &two).await.unwrap();
    assert_eq!(rig.send("a b c").await, layers(503, "in-flight"));
    assert_eq!((rig.new(), rig.effects.all().await), (ids("a c"), ids("a c")));
    assert!(rig.is_complete("a").await && rig.is_complete("c").await);
    // Nothing is new: nothing runs.
    assert_eq!(rig.send("a b c d").await, layers(503, "in-flight"));
    assert_eq!(rig.runs(), 1);
    // There it succeeds, and there it fails.
    rig.store.complete(&[dedup_key("b")], &one).await.unwrap();
    rig.store.release(&[dedup_key("d")], &two).await.unwrap();
    assert_eq!(rig.send("a b c").await, layers(200, "duplicate"));
    assert_eq!(rig.send("a b c d").await, own(200));
    assert_eq!((rig.new(), rig.effects.all().await), (ids("d"), ids("a c d")));
}

/// Trap 35, many times over.
async fn retries_in_other_batches_process_only_what_is_new(rig: Rig) {
    const EVENTS: usize = 30;
    for _ in 0..40 {
        let mut batch: Vec<usize> =
            (0..rand::random_range(1..8)).map(|_| rand::random_range(0..EVENTS)).collect();
        batch.dedup();
        let done: HashSet<String> = rig.effects.all().await.into_iter().collect();
        let runs = rig.runs();
        let words: Vec<String> = batch
            .iter()
            .map(|event| {
                let fails = rig.kind != Kind::Arrival && rand::random_ratio(1, 4);
                format!("e{event:02}{}", if fails { ":fail" } else { "" })
            })
            .collect();
        let (status, _) = rig.send(&words.join(" ")).await;
        assert!(status == 200 || status == 500, "{status}");
        if rig.runs() > runs {
            assert!(rig.new().iter().all(|id| !done.contains(id)), "{:?} {done:?}", rig.new());
        }
    }
    let all: Vec<String> = (0..EVENTS).map(|event| format!("e{event:02}")).collect();
    assert_eq!(rig.send(&all.join(" ")).await.0, 200);
    assert_eq!(rig.effects.all().await, all);
}

/// Tasks on both processes, with batches in every order; some fail over an event now and then.
async fn overlapping_batches_race_and_every_event_takes_effect_once(rig: Rig) {
    const EVENTS: usize = 24;
    for round in 0..4 {
        let deliver = |task: usize| {
            let mut left: Vec<usize> = (0..EVENTS).collect();
            let batch: Vec<String> = (0..8)
                .map(|_| left.swap_remove(rand::random_range(0..left.len())))
                .map(|event| format!("r{round}e{event}"))
                .collect();
            let fails = rig.kind != Kind::Arrival;
            let service = rig.services[task % 2].clone();
            tokio::spawn(async move {
                for attempt in 0.. {
                    let poison = rand::random_range(0..batch.len());
                    let words = batch.iter().enumerate().map(|(place, id)| {
                        let fails = fails && attempt < 2 && place == poison;
                        format!("{id}{}", if fails { ":fail" } else { "" })
                    });
                    let (status, why) =
                        send_to(&service, &words.collect::<Vec<_>>().join(" ")).await;
                    match (status, &*why) {
                        (200, _) => return batch,
                        (500, "") | (503, "in-flight") => {}
                        other => panic!("{other:?}"),
                    }
                    tokio::time::sleep(Duration::from_millis(rand::random_range(1..20))).await;
                }
                unreachable!()
            })
        };
        let tasks = join_all((0..8).map(deliver));
        let batches =
            tokio::time::timeout(Duration::from_secs(60), tasks).await.expect("no deadlock");
        let mut sent: Vec<String> = batches
            .into_iter()
            .flat_map(Result::unwrap)
            .collect::<HashSet<_>>()
            .into_iter()
            .collect();
        sent.sort_unstable();
        let prefix = format!("r{round}e");
        let mut all = rig.effects.all().await;
        all.retain(|id| id.starts_with(&prefix));
        assert_eq!(all, sent);
    }
}

async fn second_identities_of_a_batch(rig: Rig) {
    // The second of them reports what the first does.
    assert_eq!(rig.send("a=x b=x c=y").await, own(200));
    assert_eq!(rig.new(), ["a", "c"]);
    assert_eq!(rig.send("d=x e=y").await, layers(200, "duplicate"));
    assert_eq!(rig.send("d e f=z").await, own(200));
    assert_eq!(rig.new(), ["f"]);
    // One elsewhere, under its second identity: the others run, and it afterwards.
    let (second, elsewhere) = ([DedupKey::new("test.second", "w").unwrap()], receipt());
    rig.store.claim(&second, &elsewhere).await.unwrap();
    assert_eq!(rig.send("g=w h=v").await, layers(503, "in-flight"));
    assert_eq!(rig.new(), ["h"]);
    rig.store.release(&second, &elsewhere).await.unwrap();
    // What was granted of it may be given back in the background.
    let given_back = async { while rig.is_complete("g").await {} };
    tokio::time::timeout(LATE, given_back).await.expect("given back");
    assert_eq!(rig.send("g=w h=v").await, own(200));
    assert_eq!(rig.new(), ["g"]);
    assert_eq!(rig.effects.all().await, ids("a c f g h"));
    if rig.kind == Kind::Arrival {
        return;
    }
    // A poison event is free under both its identities, and what is done is done under both.
    assert_eq!(rig.send("i=s p=t:fail").await, own(500));
    assert_eq!(rig.send("j=s").await, layers(200, "duplicate"));
    assert_eq!(rig.send("q=t").await, own(200));
    assert_eq!(rig.send("p=t").await, layers(200, "duplicate"));
    assert_eq!(rig.effects.all().await, ids("a c f g h i q"));
}

async fn as_many_as_may_be_and_one_more(rig: Rig) {
    let batch = |count: usize| {
        let words: Vec<String> = (0..count).map(|n| format!("k{n}")).collect();
        format!("bulk! {}", words.join(" "))
    };
    assert_eq!(rig.send(&batch(4_097)).await, layers(400, "invalid-key"));
    assert_eq!((rig.store.count().await.unwrap(), rig.runs()), (0, 0));
    // Second identities count as well.
    assert_eq!(rig.send(&format!("{} one=two", batch(4_095))).await, layers(400, "invalid-key"));
    assert_eq!(rig.store.count().await.unwrap(), 0);
    assert_eq!(rig.send(&batch(4_096)).await, own(200));
    assert_eq!(rig.store.count().await.unwrap(), 4_096);
    assert_eq!(rig.effects.all().await.len(), 4_096);
    assert_eq!(rig.send(&batch(4_096)).await, layers(200, "duplicate"));
}

macro_rules! in_a_transaction {
    ($($case:ident),+ $(,)?) => {
        cases! {
            sqlite: sqlite_under(Transactional) = [$($case),+];
            postgres: postgres_under(Transactional) = [$($case),+];
        }
    };
}

in_a_transaction!(
    what_is_not_done_is_left_as_a_rollback_leaves_it,
    what_is_not_marked_is_not_kept,
    a_transaction_that_its_handler_breaks_keeps_what_was_done_before,
    a_transaction_that_its_handler_ends_keeps_nothing,
    a_savepoint_that_is_leaked_is_found_whatever_is_done,
    a_commit_that_fails_keeps_nothing_and_the_retry_finds_out,
    misuse_costs_no_connection,
    a_call_that_is_cut_off_keeps_both_or_neither,
    a_claim_that_is_dropped_keeps_what_is_done,
    a_transaction_that_is_kept_is_rolled_back_all_of_it,
    a_process_that_is_killed_leaves_nothing_of_what_was_done,
);

/// Free at once; no attempt more; and a takeover is still to be told of.
async fn what_is_not_done_is_left_as_a_rollback_leaves_it(rig: Rig) {
    let (mine, dead) = (receipt(), receipt().with_lease(Duration::ZERO));
    for _ in 0..2 {
        rig.store.claim(&[dedup_key("released")], &mine).await.unwrap();
        rig.store.release(&[dedup_key("released")], &mine).await.unwrap();
    }
    rig.store.claim(&[dedup_key("lapsed")], &dead).await.unwrap();
    let entry = async |id| rig.store.get(&dedup_key(id)).await.unwrap();
    for _ in 0..2 {
        assert_eq!(rig.send("done0 fresh:fail released:fail lapsed:fail").await, own(500));
        assert_eq!((rig.last().attempt(), rig.last().takeover()), (3, true));
        assert_eq!(entry("fresh").await, None);
        let released = entry("released").await.unwrap();
        assert_eq!((released.state, released.attempts), (EntryState::Released, 2));
        let lapsed = entry("lapsed").await.unwrap();
        assert!(matches!(lapsed.state, EntryState::InFlight { .. }), "{lapsed:?}");
        assert_eq!(lapsed.attempts, 1);
    }
    assert_eq!(rig.send("lapsed fresh").await, own(200));
    assert_eq!((rig.last().attempt(), rig.last().takeover()), (2, true));
    assert_eq!(rig.send("released done0").await, own(200));
    assert_eq!((rig.last().attempt(), rig.last().takeover()), (3, false));
    assert_eq!(rig.effects.all().await, ids("done0 fresh lapsed released"));
}

/// What was written after the last mark is rolled back, whoever wrote it; what was written before
/// it is kept with it.
async fn what_is_not_marked_is_not_kept(rig: Rig) {
    assert_eq!(rig.send("a:undone b:undone c:500").await, own(500));
    assert!(rig.effects.all().await.is_empty());
    assert_eq!(rig.send("a b c:undone d:500").await, own(500));
    assert_eq!((rig.new(), rig.effects.all().await), (ids("a b c d"), ids("a b")));
    assert!(!rig.last().is_done(&dedup_key("c")) && rig.last().is_done(&dedup_key("b")));
    assert_eq!(rig.send("a b c:undone d").await, own(200));
    assert_eq!((rig.new(), rig.effects.all().await), (ids("c d"), ids("a b c d")));
    assert_eq!(rig.send("c").await, layers(200, "duplicate"));
}

/// An error that is swallowed aborts a transaction of Postgres, and the handler knows nothing of
/// it; on SQLite it undoes its own statement only.
async fn a_transaction_that_its_handler_breaks_keeps_what_was_done_before(rig: Rig) {
    let aborts = matches!(rig.effects, Effects::Pg(_));
    let answered = rig.send("a b c:swallow").await;
    if !aborts {
        assert_eq!((answered, rig.effects.all().await), (own(200), ids("a b c")));
        return;
    }
    assert_eq!((answered, rig.effects.all().await), (layers(500, "uncommitted"), ids("a b")));
    assert_eq!(rig.send("a b c").await, own(200));
    assert_eq!((rig.new(), rig.effects.all().await), (ids("c"), ids("a b c")));
}

/// A raw COMMIT on Postgres is out of our hands but for the keys, which are not complete.
async fn a_transaction_that_its_handler_ends_keeps_nothing(rig: Rig) {
    for words in ["a x:rollback y:begin z:500", "a x:rollback", "a x:rollback y:500"] {
        let status = rig.send(words).await.0;
        assert!(status == 500 || status == 0, "{words}: {status}");
        assert!(rig.effects.all().await.is_empty(), "{words}");
        assert_eq!(rig.state("a").await, None, "{words}");
    }
    for words in ["a x:commit", "b w:commit y:500"] {
        let status = rig.send(words).await.0;
        assert!(status == 500 || status == 0, "{words}: {status}");
        assert!(!rig.is_complete("a").await && !rig.is_complete("b").await);
    }
}

async fn a_savepoint_that_is_leaked_is_found_whatever_is_done(rig: Rig) {
    for words in ["x:leak a", "a x:leak", "a x:leak b", "x:leak a b", "a b x:leak c d"] {
        for _ in 0..4 {
            assert_eq!(rig.send(words).await, layers(500, "uncommitted"), "{words}");
            assert!(rig.effects.all().await.is_empty(), "{words}");
        }
        assert_eq!(rig.send(&format!("{words} z:500")).await, own(500));
        assert!(rig.effects.all().await.is_empty(), "{words}");
        assert_eq!(rig.store.count().await.unwrap(), 0, "{words}");
    }
    // Those that are rolled back and those that are released are none.
    assert_eq!(rig.send("a f:fail b g:sql h:sql c").await, own(500));
    assert_eq!(rig.send("d f:undone e").await, own(200));
    assert_eq!(rig.effects.all().await, ids("a b c d e f"));
}

/// The answer is the handler's failure anyway.
async fn a_commit_that_fails_keeps_nothing_and_the_retry_finds_out(rig: Rig) {
    let (bad, good) = match rig.effects {
        Effects::Pg(_) => (
            "ALTER TABLE effects ADD UNIQUE (id) DEFERRABLE INITIALLY DEFERRED",
            "ALTER TABLE effects DROP CONSTRAINT effects_id_key",
        ),
        // What the last statement before COMMIT does not survive.
        _ => (
            "CREATE TRIGGER refuses BEFORE UPDATE OF completed_at ON webhook_deliveries \
             BEGIN SELECT RAISE(ROLLBACK, 'no'); END",
            "DROP TRIGGER refuses",
        ),
    };
    rig.store.count().await.unwrap();
    rig.effects.run("INSERT INTO effects VALUES ('a')").await;
    rig.effects.run(bad).await;
    assert_eq!(rig.send("a b p:fail").await, own(500));
    assert_eq!(rig.effects.all().await, ids("a"));
    assert_eq!(rig.store.count().await.unwrap(), 0);
    rig.effects.run(good).await;
    // Postgres tells of the error before it lets go of the locks.
    rig.send_until_done("a b p").await;
    assert_eq!((rig.new(), rig.effects.all().await), (ids("a b p"), ids("a a b p")));
}

async fn misuse_costs_no_connection(rig: Rig) {
    for round in 0..6 {
        for (n, ways) in
            ["leak", "rollback", "hang", "abort", "panic", "swallow"].iter().enumerate()
        {
            let impatient = if *ways == "hang" { "impatient!" } else { "" };
            rig.send(&format!("{round}a{n} {round}b{n}:{ways} {impatient}")).await;
        }
        assert_eq!(rig.send(&format!("{round}")).await, own(200), "after {round} rounds");
    }
    // All of the pool's connections are there, and none is in a transaction.
    for answer in join_all(["x", "y", "z"].map(|id| rig.send(id))).await {
        assert_eq!(answer, own(200));
    }
}

/// A delivery at the ledger's own interface.
struct Held<A: TransactionAdapter> {
    claim: TransactionClaim<A>,
    tx: DedupTx<A::Database>,
}

impl<A: TransactionAdapter<Database: Sql>> Held<A> {
    async fn of(ledger: &TransactionLedger<A>, ids: &[&str]) -> Self {
        let keys = ids.iter().map(|id| Element::new(dedup_key(id))).collect();
        let context = BeginContext::new(LATE, LATE, LATE);
        let begun = ledger.begin(&Keys::new(keys).unwrap(), &context).await;
        let Ok(Begin::First { claim, .. }) = begun else { panic!("{begun:?}") };
        let mut extensions = http::Extensions::new();
        claim.attach(&mut extensions);
        let tx = extensions.get::<TxHandle<A::Database>>().unwrap().lend().unwrap();
        Self { claim, tx }
    }

    async fn effect(&mut self, id: &str) {
        A::Database::run(&mut self.tx, insert([id])).await.unwrap();
    }

    async fn done(&mut self, id: &str) -> bool {
        self.tx.done(&dedup_key(id)).await.unwrap()
    }
}

/// Expands for the ledger of either database.
macro_rules! with_ledger {
    ($rig:ident, $case:ident $(, $more:expr)*) => {
        match &$rig.effects {
            Effects::Pg(pool) => {
                let ledger = TransactionLedger::new(PostgresAdapter::new(pool.clone()));
                $case(&$rig, &ledger $(, $more)*).await
            }
            Effects::Lite(pool) => {
                let ledger = TransactionLedger::new(lite_adapter(pool.clone()));
                $case(&$rig, &ledger $(, $more)*).await
            }
            Effects::Log(_) => unreachable!("no database"),
        }
    };
}

/// `done` is dropped at each of its awaits, and the handler fails at once, goes on, or succeeds.
async fn a_call_that_is_cut_off_keeps_both_or_neither(rig: Rig) {
    let mut cut = 0;
    for polls in 1..6 {
        for again in [false, true] {
            for end in ["fails", "goes on", "succeeds"] {
                cut += usize::from(with_ledger!(rig, cut_off, polls, again, end));
            }
        }
    }
    assert!(cut > 0, "it was never cut off");
}

async fn cut_off<A: TransactionAdapter<Database: Sql>>(
    rig: &Rig,
    ledger: &TransactionLedger<A>,
    polls: usize,
    again: bool,
    end: &str,
) -> bool {
    let case = format!("{polls}{again}{}", end.replace(' ', ""));
    let names = ["a", "b", "c"].map(|id| format!("{id}{case}"));
    let [a, b, c] = names.each_ref().map(String::as_str);
    let mut held = Held::of(ledger, &[a, b, c]).await;
    held.effect(a).await;
    assert!(held.done(a).await);
    held.effect(b).await;
    let cut = polled(held.tx.done(&dedup_key(b)), polls, again).await.is_none();
    held.effect(c).await;
    if end == "goes on" {
        assert!(held.done(c).await);
        // Of nobody, and after the last mark.
        held.effect("nobody").await;
    }
    drop(held.tx);
    if end == "succeeds" {
        held.claim.commit(&Outcome::new(http::StatusCode::OK)).await.unwrap();
    } else {
        held.claim.rollback().await.unwrap();
    }
    let effects = rig.effects.all().await;
    for id in [a, b, c] {
        let times = effects.iter().filter(|effect| *effect == id).count();
        assert_eq!(times, usize::from(rig.is_complete(id).await), "{id}");
    }
    let must = match end {
        "succeeds" => vec![a, b, c],
        // What was asked for and is under a later mark is done with that.
        "goes on" if !cut => vec![a, b, c],
        "fails" if !cut => vec![a, b],
        _ => vec![],
    };
    assert!(must.iter().all(|id| effects.iter().any(|effect| effect == id)), "{case}");
    // Marks of Postgres are set as one.
    let kept = effects.iter().filter(|effect| effect.ends_with(&case)).count();
    assert!(kept >= 1 || matches!(rig.effects, Effects::Lite(_)), "{case}");
    assert_eq!(rig.send(&names.join(" ")).await.0, 200, "{case}");
    let mut effects = rig.effects.all().await;
    effects.retain(|effect| effect.ends_with(&case) || effect == "nobody");
    assert_eq!(effects, names, "{case}");
    cut
}

async fn a_claim_that_is_dropped_keeps_what_is_done(rig: Rig) {
    with_ledger!(rig, dropped);
    // Its end is a task of its own.
    rig.send_until_done("a b").await;
    assert_eq!((rig.new(), rig.effects.all().await), (ids("b"), ids("a b")));
}

async fn dropped<A: TransactionAdapter<Database: Sql>>(_: &Rig, ledger: &TransactionLedger<A>) {
    let mut held = Held::of(ledger, &["a", "b"]).await;
    held.effect("a").await;
    assert!(held.done("a").await && !held.done("not of this delivery").await);
    held.effect("b").await;
    drop(held.tx);
    drop(held.claim);
}

async fn a_transaction_that_is_kept_is_rolled_back_all_of_it(rig: Rig) {
    with_ledger!(rig, kept);
    rig.send_until_done("a b").await;
    assert_eq!((rig.new(), rig.effects.all().await), (ids("a b"), ids("a b")));
}

async fn kept<A: TransactionAdapter<Database: Sql>>(_: &Rig, ledger: &TransactionLedger<A>) {
    let Held { claim, tx } = {
        let mut held = Held::of(ledger, &["a", "b"]).await;
        held.effect("a").await;
        assert!(held.done("a").await);
        held
    };
    let mut tx = tx;
    claim.rollback().await.unwrap();
    let late = tx.done(&dedup_key("b")).await.unwrap_err();
    assert_eq!(late.kind(), ErrorKind::Transaction);
}

const PLACE: &str = "TOWER_DEDUP_TEST_BATCH";
const HALF: &str = "half-way";

/// Not a test: a delivery that is half-way, when it is started as one.
#[test]
fn half_way() {
    let Ok(place) = std::env::var(PLACE) else { return };
    tokio::runtime::Runtime::new().unwrap().block_on(async {
        match place.strip_prefix("postgres:") {
            Some(_) => {
                let pool = PgPool::connect(&place).await.unwrap();
                stop_half_way(TransactionLedger::new(PostgresAdapter::new(pool))).await;
            }
            None => {
                let pool = lite_pool(place.as_ref()).await;
                stop_half_way(TransactionLedger::new(lite_adapter(pool))).await;
            }
        }
    });
}

async fn stop_half_way<A: TransactionAdapter<Database: Sql>>(ledger: TransactionLedger<A>) {
    let mut held = Held::of(&ledger, &["a", "b", "c"]).await;
    for id in ["a", "b"] {
        held.effect(id).await;
        assert!(held.done(id).await);
    }
    held.effect("c").await;
    println!("\n{HALF}");
    pending().await
}

/// `kill -9`: what is done is durable when the delivery has ended, and not before.
async fn a_process_that_is_killed_leaves_nothing_of_what_was_done(rig: Rig) {
    rig.store.count().await.unwrap();
    let mut child = tokio::process::Command::new(std::env::current_exe().unwrap())
        .args(["half_way", "--exact", "--nocapture"])
        .env(PLACE, &rig.place)
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    while lines.next_line().await.unwrap().expect("it comes half-way") != HALF {}
    child.kill().await.unwrap();
    assert!(rig.effects.all().await.is_empty());
    for id in ["a", "b", "c"] {
        assert_eq!(rig.state(id).await, None, "{id}");
    }
    // The server has to notice.
    rig.send_until_done("a b c").await;
    assert_eq!((rig.new(), rig.effects.all().await), (ids("a b c"), ids("a b c")));
}

cases! {
    calls_memory_lease: memory_under(Lease) = [a_batch_is_one_call];
    calls_memory_arrival: memory_under(Arrival) = [a_batch_is_one_call];
    calls_sqlite_lease: sqlite_under(Lease) = [a_batch_is_one_call];
    calls_sqlite_arrival: sqlite_under(Arrival) = [a_batch_is_one_call];
    calls_postgres_lease: postgres_under(Lease) = [a_batch_is_one_call];
    calls_postgres_arrival: postgres_under(Arrival) = [a_batch_is_one_call];
}

fn hundred(name: &str) -> String {
    (0..100).map(|n| format!("{name}{n} ")).collect()
}

async fn a_batch_is_one_call(rig: Rig) {
    let (store, runs, log) = (Faulty::new(Arc::clone(&rig.store)), Runs::default(), Arc::default());
    let handler = move |request| apart(request, Arc::clone(&runs), Arc::clone(&log));
    let service = match rig.kind {
        Kind::Lease => service(DedupLayer::new(by_word(), Arc::clone(&store)), handler),
        _ => service(DedupLayer::on_arrival(by_word(), Arc::clone(&store)), handler),
    };
    assert_eq!(send_to(&service, &hundred("k")).await, own(200));
    let calls = [Op::Record, Op::Claim, Op::Complete, Op::Release].map(|op| store.calls(op));
    assert_eq!(calls, if rig.kind == Kind::Lease { [0, 1, 1, 0] } else { [1, 0, 0, 0] });
    assert_eq!(rig.store.count().await.unwrap(), 100);
}

/// A hundred new events cost as many messages to the server as one does.
#[tokio::test]
async fn a_batch_is_as_many_round_trips_as_one_event() {
    let (schema, _pools) = pg().await;
    let proxy = Proxy::start(&schema.url().parse().unwrap()).await;
    // One connection, which knows every statement after the first deliveries.
    let pool = PgPoolOptions::new().max_connections(1).test_before_acquire(false);
    let pool = pool.connect_lazy_with(proxy.options(schema.url().parse().unwrap()));
    let (adapter, runs, log) = (PostgresAdapter::new(pool), Runs::default(), Arc::default());
    let apart = {
        let runs = Arc::clone(&runs);
        move |request| apart(request, Arc::clone(&runs), Arc::clone(&log))
    };
    let within = move |request| within::<Postgres>(request, Arc::clone(&runs));
    // The claim and the completion; the record; the look, BEGIN, the claim, the effects in one
    // statement that is prepared first, the completion, COMMIT.
    for (service, messages) in [
        (service(DedupLayer::new(by_word(), adapter.clone()), apart.clone()), 2),
        (service(DedupLayer::on_arrival(by_word(), adapter.clone()), apart), 1),
        (service(DedupLayer::transactional(by_word(), adapter), within), 7),
    ] {
        assert_eq!(send_to(&service, &format!("bulk! warm{messages}")).await, own(200));
        for words in ["one".to_owned(), hundred("k")] {
            let words = words
                .replace('k', &format!("k{messages}-"))
                .replace("one", &format!("one{messages}"));
            proxy.set(usize::MAX, Cut::Lost);
            assert_eq!(send_to(&service, &format!("bulk! {words}")).await, own(200));
            assert_eq!(proxy.messages(), messages, "{words}");
        }
    }
}
