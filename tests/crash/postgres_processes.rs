//! Several processes on one Postgres table, under load: handlers fail, processes are killed, the
//! server is restarted. Every effect of a transactional delivery is there exactly once.
//!
//! The processes are this test binary, started again with a database in its environment. Each
//! process is a receiver on a port of its own; its handler's effect is one row beside the keys.

use std::collections::{BTreeMap, HashSet};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::error_handling::HandleError;
use axum::http::{Request, Response, StatusCode};
use axum::{RequestPartsExt, Router};
use http_body_util::BodyExt;
use sqlx::postgres::PgPoolOptions;
use sqlx::{PgPool, Postgres};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tower::Layer;
use tower_dedup::adapter::PostgresAdapter;
use tower_dedup::{DedupLayer, DedupTx, Delivery};
use tower_http::catch_panic::CatchPanicLayer;

use crate::support::effects::{Effects, effect};
use crate::support::postgres::{Schema, Server};
use crate::support::{Body, by_header};

const RECEIVER: &str = "TOWER_DEDUP_TEST_RECEIVER";
const MARK: &str = "receiver-listens-at:";
const TOLD_TO: &str = "the handler was told to panic";
/// The lease of the lease ledger: short, so that the events of a killed process do not wait for
/// long.
const LEASE: Duration = Duration::from_millis(700);

/// A run ends long before this bound. Only a test that hangs reaches it.
const FOR_EVER: Duration = Duration::from_secs(240);

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Transactional,
    Lease,
}

/// Not a test: the receiver, if this binary is started as one.
#[test]
fn receiver() {
    let Ok(what) = std::env::var(RECEIVER) else { return };
    let (kind, url) = what.split_once(' ').unwrap();
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if panic.payload_as_str() != Some(TOLD_TO) {
            print(panic);
        }
    }));
    // Ends with its parent, which may be killed too.
    std::thread::spawn(|| {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        std::process::exit(0);
    });
    let kind = if kind == "lease" { Kind::Lease } else { Kind::Transactional };
    tokio::runtime::Runtime::new().unwrap().block_on(serve(kind, url));
}

async fn serve(kind: Kind, url: &str) {
    // All tests of this file at once, on a machine of many cores, stay below the server's
    // `max_connections`.
    let pool = PgPoolOptions::new().max_connections(8).connect(url).await.unwrap();
    let adapter = PostgresAdapter::new(pool.clone());
    let app = match kind {
        Kind::Transactional => {
            let handler = tower::service_fn(|request| handle(request, None));
            let dedup = DedupLayer::transactional(by_header(), adapter).layer(handler);
            Router::new().route_service("/hook", HandleError::new(dedup, failed))
        }
        Kind::Lease => {
            let handler = tower::service_fn(move |request| handle(request, Some(pool.clone())));
            let dedup = DedupLayer::new(by_header(), adapter).lease(LEASE).layer(handler);
            Router::new().route_service("/hook", HandleError::new(dedup, failed))
        }
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    println!("\n{MARK}{}", listener.local_addr().unwrap());
    axum::serve(listener, app.layer(CatchPanicLayer::new())).await.unwrap();
}

async fn failed(error: &'static str) -> (StatusCode, &'static str) {
    (StatusCode::INTERNAL_SERVER_ERROR, error)
}

/// Writes the effect, in the delivery's transaction or on its own connection. Then waits, so that
/// the process may die. Then, one time in three, fails as the body says.
async fn handle(
    request: Request<Body>,
    apart: Option<PgPool>,
) -> Result<Response<Body>, &'static str> {
    let (mut parts, body) = request.into_parts();
    let body = body.collect().await.expect("infallible").to_bytes();
    let (way, ms) = std::str::from_utf8(&body).unwrap().split_once(' ').unwrap();
    let delivery: Delivery = parts.extract().await.unwrap();
    // Dropped at the end of the handler: a panic drops it while it unwinds.
    let mut tx: Option<DedupTx<Postgres>> = None;
    let written = match apart {
        None => effect(tx.insert(parts.extract().await.unwrap()), &delivery).await,
        Some(pool) => match pool.acquire().await {
            Ok(mut connection) => effect(&mut connection, &delivery).await,
            Err(error) => Err(error),
        },
    };
    tokio::time::sleep(Duration::from_millis(rand::random_range(0..=ms.parse().unwrap()))).await;
    let fails = rand::random_ratio(1, 3);
    let way =
        if way == "mixed" { ["500", "error", "panic"][rand::random_range(0..3)] } else { way };
    let mut response = Response::new(Body::default());
    match way {
        _ if written.is_err() => *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR,
        "500" if fails => *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR,
        "error" if fails => return Err("the handler was told to fail"),
        "panic" if fails => panic!("{TOLD_TO}"),
        _ => {}
    }
    Ok(response)
}

/// The receivers and their answers.
struct Receivers {
    kind: Kind,
    url: String,
    children: Mutex<Vec<Child>>,
    addresses: Mutex<Vec<String>>,
    client: reqwest::Client,
    /// How often each answer was given: the status, and the layer's result header, if there was
    /// one.
    answers: Mutex<BTreeMap<String, usize>>,
    acknowledged: AtomicUsize,
}

impl Receivers {
    async fn start(kind: Kind, url: &str, count: usize) -> Arc<Self> {
        let client = reqwest::Client::builder().timeout(Duration::from_secs(30)).build().unwrap();
        let receivers = Self {
            kind,
            url: url.to_owned(),
            children: Mutex::default(),
            addresses: Mutex::default(),
            client,
            answers: Mutex::default(),
            acknowledged: AtomicUsize::new(0),
        };
        // The processes start together and race to create the schema.
        for started in futures_util::future::join_all((0..count).map(|_| receivers.spawn())).await {
            receivers.children.lock().unwrap().push(started.0);
            receivers.addresses.lock().unwrap().push(started.1);
        }
        Arc::new(receivers)
    }

    async fn spawn(&self) -> (Child, String) {
        let kind = if self.kind == Kind::Lease { "lease" } else { "transactional" };
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["postgres_processes::receiver", "--exact", "--nocapture"])
            .env(RECEIVER, format!("{kind} {}", self.url))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        loop {
            let line = lines.next_line().await.unwrap().expect("the receiver starts");
            if let Some((_, address)) = line.split_once(MARK) {
                return (child, format!("http://{address}/hook"));
            }
        }
    }

    /// Kills one receiver with SIGKILL, and starts another one in its place.
    async fn kill_one(&self) {
        let place = rand::random_range(0..self.addresses.lock().unwrap().len());
        let mut victim = self.children.lock().unwrap().remove(place);
        self.addresses.lock().unwrap().remove(place);
        victim.kill().await.unwrap();
        let (child, address) = self.spawn().await;
        self.children.lock().unwrap().push(child);
        self.addresses.lock().unwrap().push(address);
    }

    /// Delivers to one of the receivers, again and again, until the event is acknowledged.
    async fn deliver(&self, id: &str, body: &str) {
        loop {
            let address = {
                let addresses = self.addresses.lock().unwrap();
                addresses[rand::random_range(0..addresses.len())].clone()
            };
            let request = self.client.post(address).header("webhook-id", id).body(body.to_owned());
            let (answer, done) = match request.send().await {
                Ok(answer) => {
                    let why = answer.headers().get("x-dedup-result");
                    let why = why.map_or("handler", |why| why.to_str().unwrap());
                    (format!("{} {why}", answer.status().as_u16()), answer.status().is_success())
                }
                Err(_) => ("none".to_owned(), false),
            };
            *self.answers.lock().unwrap().entry(answer).or_default() += 1;
            if done {
                self.acknowledged.fetch_add(1, Ordering::SeqCst);
                return;
            }
            tokio::time::sleep(Duration::from_millis(rand::random_range(5..50))).await;
        }
    }

    /// Delivers every event `copies` times at once, `width` events at a time.
    async fn storm(
        self: &Arc<Self>,
        events: impl IntoIterator<Item = (String, String)>,
        copies: usize,
        width: usize,
    ) {
        use futures_util::{StreamExt, future, stream};

        let all = stream::iter(events).for_each_concurrent(width, |(id, body)| async move {
            let copies = (0..copies).map(|_| {
                let (receivers, id, body) = (Arc::clone(self), id.clone(), body.clone());
                tokio::spawn(async move { receivers.deliver(&id, &body).await })
            });
            for delivered in future::join_all(copies).await {
                delivered.unwrap();
            }
        });
        tokio::time::timeout(FOR_EVER, all).await.expect("every event is acknowledged");
    }

    /// Waits until this many more events are acknowledged.
    async fn are_acknowledged(&self, more: usize) {
        let enough = self.acknowledged.load(Ordering::SeqCst) + more;
        while self.acknowledged.load(Ordering::SeqCst) < enough {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    fn answered(&self, what: &str) -> usize {
        let answers = self.answers.lock().unwrap();
        answers.iter().filter(|(answer, _)| answer.contains(what)).map(|(_, count)| count).sum()
    }

    /// Asserts that every answer is success, a failure of the handler, or a status after which
    /// senders retry.
    fn assert_answers(&self) {
        let answers = self.answers.lock().unwrap();
        let known: HashSet<_> = [
            "200 handler",
            "200 duplicate",
            "500 handler",
            "503 in-flight",
            "503 unavailable",
            "none",
        ]
        .into();
        assert!(answers.keys().all(|answer| known.contains(&**answer)), "{answers:?}");
    }
}

fn ids(count: usize) -> impl Iterator<Item = String> + Clone {
    (0..count).map(|event| format!("event-{event}"))
}

/// Asserts that every key of the database is complete.
async fn assert_complete(effects: &Effects, keys: usize) {
    let keys = i64::try_from(keys).unwrap();
    let (all, complete): (i64, i64) =
        sqlx::query_as("SELECT count(*), count(completed_at) FROM webhook_deliveries")
            .fetch_one(effects.pool())
            .await
            .unwrap();
    assert_eq!((all, complete), (keys, keys));
}

const EVENTS: usize = 500;
const COPIES: usize = 16;
const PROCESSES: usize = 4;

#[tokio::test]
async fn five_hundred_events_sent_16_times_to_four_processes_take_effect_once() {
    let schema = Schema::fresh();
    let effects = Effects::create(&schema.url()).await;
    let receivers = Receivers::start(Kind::Transactional, &schema.url(), PROCESSES).await;
    let events = ids(EVENTS).map(|id| (id, "never 0".to_owned()));
    receivers.storm(events, COPIES, 8).await;
    receivers.assert_answers();
    effects.assert_once(ids(EVENTS)).await;
    assert_complete(&effects, EVENTS).await;
}

#[tokio::test]
async fn events_whose_handlers_fail_one_time_in_three_take_effect_once() {
    let schema = Schema::fresh();
    let effects = Effects::create(&schema.url()).await;
    let receivers = Receivers::start(Kind::Transactional, &schema.url(), PROCESSES).await;
    let ways = ["500 0", "error 0", "panic 0", "mixed 0"].into_iter().cycle();
    let events = ids(EVENTS).zip(ways.map(str::to_owned));
    receivers.storm(events, COPIES, 8).await;
    receivers.assert_answers();
    effects.assert_once(ids(EVENTS)).await;
    assert_complete(&effects, EVENTS).await;
    let runs = effects.runs().await;
    assert!(runs > 600, "{runs} runs: too few have failed to show anything");
}

/// Delivers 300 events while one receiver after the other is killed. Returns how many were killed.
async fn storm_with_deaths(kind: Kind, url: &str) -> usize {
    let receivers = Receivers::start(kind, url, PROCESSES).await;
    let deaths = AtomicUsize::new(0);
    let killer = async {
        // A fixed number of rounds ends also if no delivery ends between two kills.
        for _ in 0..60 {
            tokio::time::sleep(Duration::from_millis(rand::random_range(20..200))).await;
            receivers.kill_one().await;
            deaths.fetch_add(1, Ordering::SeqCst);
        }
        std::future::pending::<()>().await;
    };
    let events = ids(300).map(|id| (id, "never 40".to_owned()));
    tokio::select! {
        () = receivers.storm(events, 6, 12) => {}
        () = killer => {}
    }
    receivers.assert_answers();
    let deaths = deaths.into_inner();
    assert!(deaths >= 5, "{deaths} deaths: too few to show anything");
    assert!(receivers.answered("none") > 0, "no delivery was interrupted");
    deaths
}

#[tokio::test]
async fn transactions_of_killed_processes_lose_and_double_nothing() {
    let schema = Schema::fresh();
    let effects = Effects::create(&schema.url()).await;
    storm_with_deaths(Kind::Transactional, &schema.url()).await;
    effects.assert_once(ids(300)).await;
    assert_complete(&effects, 300).await;
    assert!(effects.runs().await > 300, "no process died in a handler");
}

/// Under a lease no event is lost either, and every second run is a takeover. At most one run of
/// each event is no takeover. The first run that writes may be a takeover of a process that died
/// before its effect.
#[tokio::test]
async fn lease_doubles_an_event_only_after_a_death() {
    let schema = Schema::fresh();
    let effects = Effects::create(&schema.url()).await;
    let deaths = storm_with_deaths(Kind::Lease, &schema.url()).await;
    let mut all = effects.all().await;
    let mut doubled = 0;
    for id in ids(300) {
        let runs = all.remove(&id).unwrap_or_default();
        assert!(!runs.is_empty(), "{id} is lost");
        let first = runs.iter().filter(|takeover| !**takeover).count();
        assert!(first <= 1, "{id} ran twice without knowing: {runs:?}");
        doubled += runs.len() - 1;
    }
    assert!(all.is_empty(), "{all:?}");
    assert_complete(&effects, 300).await;
    // A death interrupts at most the handlers that run at once.
    assert!(doubled <= deaths * 12, "{doubled} runs were repeated by {deaths} deaths");
}

/// The server dies three times. Its `synchronous_commit` is off, so it loses unflushed writes. No
/// acknowledged event may be lost.
#[tokio::test]
async fn server_restarted_under_load_loses_and_doubles_nothing() {
    let server = Arc::new(Server::start());
    let url = server.url();
    let effects = Effects::create(&url).await;
    for sql in [
        "ALTER SYSTEM SET synchronous_commit = off",
        "ALTER SYSTEM SET wal_writer_delay = '10s'",
        "SELECT pg_reload_conf()",
    ] {
        sqlx::query(sql).execute(effects.pool()).await.unwrap();
    }
    // The adapter does not look again for a lost schema.
    PostgresAdapter::connect(&url).await.unwrap().migrate().await.unwrap();
    server.restart_immediately();
    assert_complete(&effects, 0).await;

    let receivers = Receivers::start(Kind::Transactional, &url, 2).await;
    let (sent, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
    let events = std::iter::from_fn(|| {
        let next = || (format!("event-{}", sent.fetch_add(1, Ordering::SeqCst)), "never 10".into());
        (!stop.load(Ordering::SeqCst)).then(next)
    });
    let restarts = async {
        for _ in 0..3 {
            receivers.are_acknowledged(200).await;
            let server = Arc::clone(&server);
            tokio::task::spawn_blocking(move || server.restart_immediately()).await.unwrap();
        }
        receivers.are_acknowledged(200).await;
        stop.store(true, Ordering::SeqCst);
    };
    tokio::join!(receivers.storm(events, 4, 8), restarts);
    let sent = sent.into_inner();
    receivers.assert_answers();
    assert!(receivers.answered("503 unavailable") > 0, "no delivery was 503 during a restart");
    assert_eq!(receivers.answered("none"), 0, "a receiver did not answer");
    effects.assert_once(ids(sent)).await;
    assert_complete(&effects, sent).await;
}
