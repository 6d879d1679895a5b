//! Multi-event deliveries under every ledger. New events run, and are completed or
//! released together. If another claim holds an event, the answer is 503. The body of a delivery tells the handler
//! its work.

use std::collections::HashSet;
use std::future::{Future, pending};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, join_all};
use http::{Request, Response};
use http_body_util::BodyExt;
use sqlx::{Connection, Pool};
use tower::util::BoxCloneSyncService;
use tower::{Layer, ServiceExt};
use tower_dedup::adapter::contract::{CallTerms, DedupAdapter, Token};
use tower_dedup::adapter::maintenance::{KeyState, MaintenanceAdapter};
use tower_dedup::{Delivery, ResponseBody};

use support::ledgers::{ArrivedIn, In, OnMemory, OnPostgres, Place, Setup, Shared};
use support::words::{Sql, by_word, insert, words};
use support::{Body, claim_all, dedup_key, result, rows, terms};

/// A bound for a busy machine.
const LATE: Duration = Duration::from_secs(20);

support::on_ledgers!(
    [
        memory_lease = OnMemory,
        memory_arrival = ArrivedInMemory,
        sqlite_transactional = InSqlite,
        postgres_lease = OnPostgres,
        postgres_transactional = InPostgres,
    ],
    handler_that_fails_half_way_releases_the_whole_delivery,
    list_whose_process_died_runs_whole_as_a_takeover,
    event_in_flight_under_another_claim_is_503_after_the_new_ones,
    overlapping_deliveries_race_and_every_event_takes_effect_once,
    maximum_of_events_runs_and_one_more_is_400,
);

type Answer = Result<Response<Body>, &'static str>;
type Service = BoxCloneSyncService<Request<Body>, Response<ResponseBody<Body>>, &'static str>;
type Runs = Arc<Mutex<Vec<Delivery>>>;

fn answer(status: u16) -> Answer {
    let mut response = Response::new(Body::default());
    *response.status_mut() = status.try_into().unwrap();
    Ok(response)
}

/// Returns the new events of a delivery, each once, with the way in which it ends.
async fn read(request: Request<Body>, runs: &Runs) -> (Delivery, Vec<(String, String)>) {
    let (head, body) = request.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    let delivery = head.extensions.get::<Delivery>().unwrap().clone();
    assert!(delivery.keys().all(|key| delivery.needs_run(key)));
    runs.lock().unwrap().push(delivery.clone());
    let (mut known, mut new) = (HashSet::new(), Vec::new());
    for (name, way) in words(std::str::from_utf8(&body).unwrap()) {
        if delivery.needs_run(&dedup_key(name)) && known.insert(name.to_owned()) {
            new.push((name.to_owned(), way.to_owned()));
        }
    }
    (delivery, new)
}

/// Ends the handler at an event that says so.
async fn ends(way: &str) -> Option<Answer> {
    match way {
        "500" | "abort" => Some(answer(500)),
        "error" => Some(Err("the handler was told to fail")),
        "panic" => panic!("the handler was told to panic"),
        "hang" => pending().await,
        _ => None,
    }
}

/// A handler that writes its effects outside the store, if no event fails.
async fn apart(request: Request<Body>, runs: Runs, effects: Arc<Mutex<Vec<String>>>) -> Answer {
    let (_, new) = read(request, &runs).await;
    for (_, way) in &new {
        if let Some(ended) = ends(way).await {
            return ended;
        }
    }
    if new.iter().any(|(_, way)| !way.is_empty()) {
        return answer(500);
    }
    effects.lock().unwrap().extend(new.into_iter().map(|(id, _)| id));
    answer(200)
}

/// A handler that writes its effects in a transaction that completes the delivery.
async fn within<DB: Sql>(request: Request<Body>, runs: Runs, pool: Pool<DB>) -> Answer {
    let (delivery, new) = read(request, &runs).await;
    let Ok(mut tx) = delivery.begin(&pool).await else { return answer(503) };
    DB::run(&mut tx, insert(new.iter().map(|(id, _)| &**id))).await.unwrap();
    for (_, way) in &new {
        let nonsense = || "SELECT nonsense".to_owned();
        match &**way {
            "abort" => drop(DB::run(&mut tx, nonsense()).await.unwrap_err()),
            // The drop of the savepoint rolls it back.
            "sql" => {
                let mut savepoint = tx.begin().await.unwrap();
                DB::run(&mut savepoint, nonsense()).await.unwrap_err();
            }
            _ => {}
        }
        if let Some(ended) = ends(way).await {
            return ended;
        }
    }
    if new.iter().any(|(_, way)| !way.is_empty()) {
        return answer(500);
    }
    answer(if tx.commit().await.is_ok() { 200 } else { 503 })
}

/// A receiver with two services, which stand for two processes.
struct Fixture {
    store: Arc<dyn MaintenanceAdapter>,
    services: Vec<Service>,
    effects: Box<dyn Fn() -> BoxFuture<'static, Vec<String>>>,
    runs: Runs,
    _setup: Box<dyn std::any::Any>,
}

/// A ledger over a fresh store, with a handler that writes effects as it should under this ledger.
trait Receives: Setup + 'static {
    const ON_ARRIVAL: bool = false;

    fn receiver(self) -> impl Future<Output = Fixture> {
        with_effects_apart(self)
    }
}

impl Receives for OnMemory {}
impl Receives for OnPostgres {}

impl<P: Place + 'static> Receives for ArrivedIn<P> {
    const ON_ARRIVAL: bool = true;
}

impl<P: Shared + 'static> Receives for In<P> {
    async fn receiver(self) -> Fixture {
        let pool = self.place().pool().clone();
        let create = "CREATE TABLE effects (id text)".to_owned();
        P::Database::run(&mut *pool.acquire().await.unwrap(), create).await.unwrap();
        let effects = pool.clone();
        let effects = move || {
            let pool = effects.clone();
            async move { P::Database::effects(&pool).await }.boxed()
        };
        received(self, effects, move |request, runs| within(request, runs, pool.clone())).await
    }
}

async fn with_effects_apart(setup: impl Setup + 'static) -> Fixture {
    let log = Arc::<Mutex<Vec<String>>>::default();
    let effects = Arc::clone(&log);
    let effects = move || {
        let mut all = effects.lock().unwrap().clone();
        all.sort_unstable();
        async move { all }.boxed()
    };
    received(setup, effects, move |request, runs| apart(request, runs, Arc::clone(&log))).await
}

async fn received<F: Future<Output = Answer> + Send + 'static>(
    setup: impl Setup + 'static,
    effects: impl Fn() -> BoxFuture<'static, Vec<String>> + 'static,
    handler: impl Fn(Request<Body>, Runs) -> F + Clone + Send + Sync + 'static,
) -> Fixture {
    let (runs, mut services) = (Runs::default(), Vec::new());
    for _ in 0..2 {
        let (runs, handler) = (Arc::clone(&runs), handler.clone());
        // A handler that hangs is dropped.
        let impatient = tower::service_fn(move |request: Request<Body>| {
            let patience = if request.headers().contains_key("impatient") { 300 } else { 60_000 };
            let handled = handler(request, Arc::clone(&runs));
            let handled = tokio::time::timeout(Duration::from_millis(patience), handled);
            async move { handled.await.unwrap_or_else(|_| answer(504)) }
        });
        let layer = setup.layer(by_word()).await.wait(Duration::ZERO);
        services.push(Service::new(layer.store_timeout(LATE).layer(impatient)));
    }
    let (store, effects) = (setup.operator().await, Box::new(effects));
    Fixture { store, services, effects, runs, _setup: Box::new(setup) }
}

/// Returns the status, and the result header if the layer has answered. 0 is a panic, 1 is an
/// error.
async fn send_to(service: &Service, words: &str) -> (u16, String) {
    let mut request = Request::post("/hook");
    if words.contains(":hang") {
        request = request.header("impatient", "");
    }
    let request = request.body(Body::from(words.to_owned())).unwrap();
    let answered = std::panic::AssertUnwindSafe(service.clone().oneshot(request));
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

fn ids(words: &str) -> Vec<String> {
    words.split_whitespace().map(str::to_owned).collect()
}

impl Fixture {
    async fn send(&self, words: &str) -> (u16, String) {
        send_to(&self.services[0], words).await
    }

    fn runs(&self) -> usize {
        self.runs.lock().unwrap().len()
    }

    fn last(&self) -> Delivery {
        self.runs.lock().unwrap().last().unwrap().clone()
    }

    /// Returns the events that the last run saw as new.
    fn news(&self) -> Vec<String> {
        self.last().keys().map(|key| key.id().to_owned()).collect()
    }

    async fn effects(&self) -> Vec<String> {
        (self.effects)().await
    }

    async fn state(&self, id: &str) -> Option<KeyState> {
        self.store.get(&dedup_key(id)).await.unwrap().map(|entry| entry.state)
    }

    async fn is_complete(&self, id: &str) -> bool {
        self.state(id).await == Some(KeyState::Complete)
    }
}

/// The handler goes on after the poison event and fails at its end, or it ends there: by its status, its error, its
/// panic, a drop, or an aborted transaction.
async fn handler_that_fails_half_way_releases_the_whole_delivery<S: Receives>(setup: S) {
    let fixture = setup.receiver().await;
    let goes_on = [("fail", 500), ("sql", 500)];
    let ends = [("500", 500), ("error", 1), ("panic", 0), ("hang", 504), ("abort", 500)];
    for (n, (way, status)) in goes_on.into_iter().chain(ends).enumerate() {
        let batch = |way: &str| format!("a{n} p{n}:{way} c{n}");
        assert_eq!(fixture.send(&batch(way)).await, own(status), "{way}");
        let is_complete = fixture.is_complete(&format!("a{n}")).await;
        assert_eq!(is_complete, S::ON_ARRIVAL, "{way}");
        let retried = fixture.send(&batch("")).await;
        if S::ON_ARRIVAL {
            assert_eq!(retried, layers(200, "duplicate"));
            assert!(fixture.effects().await.is_empty(), "lost, as documented");
            continue;
        }
        assert_eq!(retried, own(200), "{way}");
        assert_eq!(fixture.news(), ["a", "p", "c"].map(|id| format!("{id}{n}")));
        assert_eq!((fixture.last().attempt(), fixture.last().is_takeover()), (2, false));
        assert_eq!(fixture.send(&batch("")).await, layers(200, "duplicate"));
        assert_eq!(fixture.effects().await.len(), 3 * (n + 1), "{way}");
    }
    let all = fixture.effects().await;
    assert_eq!(all.iter().collect::<HashSet<_>>().len(), all.len(), "{all:?}");
}

async fn list_whose_process_died_runs_whole_as_a_takeover<S: Receives>(setup: S) {
    let fixture = setup.receiver().await;
    let dead = CallTerms::on_completion(Token::random(), terms().retention(), Duration::ZERO);
    claim_all(&*fixture.store, &["a", "b"].map(dedup_key), &dead).await.unwrap();
    assert_eq!(fixture.send("a b c").await, own(200));
    assert_eq!((fixture.news(), fixture.last().is_takeover()), (ids("a b c"), true));
    assert_eq!(fixture.send("a b c").await, layers(200, "duplicate"));
}

async fn event_in_flight_under_another_claim_is_503_after_the_new_ones<S: Receives>(setup: S) {
    let fixture = setup.receiver().await;
    let (one, two) = (terms(), terms());
    fixture.store.claim(&dedup_key("b"), &one).await.unwrap();
    fixture.store.claim(&dedup_key("d"), &two).await.unwrap();
    assert_eq!(fixture.send("a b c").await, layers(503, "in-flight"));
    assert_eq!((fixture.news(), fixture.effects().await), (ids("a c"), ids("a c")));
    assert!(fixture.is_complete("a").await && fixture.is_complete("c").await);
    // No event is new, so the handler does not run.
    assert_eq!(fixture.send("a b c d").await, layers(503, "in-flight"));
    assert_eq!(fixture.runs(), 1);
    // The other process completes one event and releases the other one.
    fixture.store.complete(&dedup_key("b"), &one).await.unwrap();
    fixture.store.release(&dedup_key("d"), &two).await.unwrap();
    assert_eq!(fixture.send("a b c").await, layers(200, "duplicate"));
    assert_eq!(fixture.send("a b c d").await, own(200));
    assert_eq!((fixture.news(), fixture.effects().await), (ids("d"), ids("a c d")));
}

/// Tasks on both processes send overlapping deliveries in every order; some handlers fail at an
/// event.
async fn overlapping_deliveries_race_and_every_event_takes_effect_once<S: Receives>(setup: S) {
    let fixture = setup.receiver().await;
    const EVENTS: usize = 24;
    for round in 0..4 {
        let deliver = |task: usize| {
            let mut left: Vec<usize> = (0..EVENTS).collect();
            let batch: Vec<String> = (0..8)
                .map(|_| left.swap_remove(rand::random_range(0..left.len())))
                .map(|event| format!("r{round}e{event}"))
                .collect();
            let fails = !S::ON_ARRIVAL;
            let service = fixture.services[task % 2].clone();
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
        let mut all = fixture.effects().await;
        all.retain(|id| id.starts_with(&prefix));
        assert_eq!(all, sent);
    }
}

async fn maximum_of_events_runs_and_one_more_is_400<S: Receives>(setup: S) {
    let fixture = setup.receiver().await;
    let batch = |count: usize| {
        let words: Vec<String> = (0..count).map(|n| format!("k{n}")).collect();
        words.join(" ")
    };
    assert_eq!(fixture.send(&batch(4_097)).await, layers(400, "invalid-key"));
    assert_eq!((rows(&fixture.store).await, fixture.runs()), (0, 0));
    // Second identities count as keys as well.
    assert_eq!(
        fixture.send(&format!("{} one=two", batch(4_095))).await,
        layers(400, "invalid-key")
    );
    assert_eq!(rows(&fixture.store).await, 0);
    assert_eq!(fixture.send(&batch(4_096)).await, own(200));
    assert_eq!(rows(&fixture.store).await, 4_096);
    assert_eq!(fixture.effects().await.len(), 4_096);
    assert_eq!(fixture.send(&batch(4_096)).await, layers(200, "duplicate"));
}
