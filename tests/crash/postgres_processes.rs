//! Several processes on one Postgres table, under load: handlers fail, processes are killed or frozen, the
//! server is restarted, connections break or fall silent. Every effect of a transactional delivery is there
//! exactly once.
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
use rand::seq::SliceRandom;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{ConnectOptions, PgPool, Postgres};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tower::Layer;
use tower_dedup::adapter::PostgresAdapter;
use tower_dedup::{DedupLayer, DedupTx, Delivery};
use tower_http::catch_panic::CatchPanicLayer;

use crate::support::effects::{Effects, answer, effect};
use crate::support::postgres::{Schema, Server};
use crate::support::proxy::{Cut, through, to_postgres};
use crate::support::{Body, by_header};

const RECEIVER: &str = "TOWER_DEDUP_TEST_RECEIVER";
const MARK: &str = "receiver-listens-at:";
const TOLD_TO: &str = "the handler was told to panic";
/// Short, so that the events of a killed process do not wait for long.
const LEASE: Duration = Duration::from_millis(700);
/// Longer than a handler thinks. Only a silent connection reaches it.
const HANDLER_TIMEOUT: Duration = Duration::from_secs(1);

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
    let pool = PgPoolOptions::new().max_connections(8).acquire_timeout(HANDLER_TIMEOUT);
    let pool = pool.connect_lazy(url).unwrap();
    let adapter = PostgresAdapter::new(pool.clone());
    let handler = tower::service_fn(move |request| handle(request, kind, pool.clone()));
    let app = match kind {
        Kind::Transactional => {
            let layer = DedupLayer::transactional(by_header(), adapter).lease(LEASE);
            let dedup = layer.handler_timeout(HANDLER_TIMEOUT).layer(handler);
            Router::new().route_service("/hook", HandleError::new(dedup, failed))
        }
        Kind::Lease => {
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

/// Writes the effect, in a transaction that completes the delivery or on its own connection. Then waits, so that the
/// process may die. Then, one time in three, fails as the body says.
async fn handle(
    request: Request<Body>,
    kind: Kind,
    pool: PgPool,
) -> Result<Response<Body>, &'static str> {
    let (mut parts, body) = request.into_parts();
    let body = body.collect().await.expect("infallible").to_bytes();
    let (way, ms) = std::str::from_utf8(&body).unwrap().split_once(' ').unwrap();
    let delivery: Delivery = parts.extract().await.unwrap();
    // Dropped at the end of the handler: a panic drops it while it unwinds.
    let mut tx: Option<DedupTx<Postgres>> = None;
    let written = match kind {
        Kind::Transactional => match delivery.begin(&pool).await {
            Ok(begun) => effect(tx.insert(begun), &delivery).await.is_ok(),
            Err(_) => false,
        },
        Kind::Lease => match pool.acquire().await {
            Ok(mut connection) => effect(&mut connection, &delivery).await.is_ok(),
            Err(_) => false,
        },
    };
    tokio::time::sleep(Duration::from_millis(rand::random_range(0..=ms.parse().unwrap()))).await;
    let fails = rand::random_ratio(1, 3);
    let way =
        if way == "mixed" { ["500", "error", "panic"][rand::random_range(0..3)] } else { way };
    let succeeds = match (way, tx) {
        _ if !written => false,
        ("500", _) if fails => false,
        ("error", _) if fails => return Err("the handler was told to fail"),
        ("panic", _) if fails => panic!("{TOLD_TO}"),
        // The completion or the COMMIT has been sent, and its reply is lost.
        ("lost", Some(tx)) if fails => {
            let soon = Duration::from_micros(rand::random_range(0..3_000));
            matches!(tokio::time::timeout(soon, tx.commit()).await, Ok(Ok(())))
        }
        (_, Some(tx)) => tx.commit().await.is_ok(),
        (_, None) => true,
    };
    Ok(answer(succeeds))
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
                let address = format!("http://{address}/hook");
                // The test harness of the child ends it if it cannot print.
                tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
                return (child, address);
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

    /// Freezes one receiver for longer than its leases, which lapse: its handlers go on afterwards.
    async fn freeze_one(&self) {
        let pid = {
            let children = self.children.lock().unwrap();
            children[rand::random_range(0..children.len())].id().unwrap().to_string()
        };
        for signal in ["-STOP", "-CONT"] {
            let sent = Command::new("kill").args([signal, &pid]).status().await.unwrap();
            assert!(sent.success(), "{signal}");
            tokio::time::sleep(if signal == "-STOP" { LEASE * 2 } else { Duration::ZERO }).await;
        }
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
            "504 handler-timeout",
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
    let events = ids(200).zip(ways.map(str::to_owned));
    receivers.storm(events, COPIES, 8).await;
    receivers.assert_answers();
    effects.assert_once(ids(200)).await;
    assert_complete(&effects, 200).await;
    let runs = effects.runs().await;
    assert!(runs > 240, "{runs} runs: too few have failed to show anything");
}

/// Delivers 300 events while one receiver after the other is killed. Returns how many were killed.
async fn storm_with_deaths(url: &str) -> usize {
    let receivers = Receivers::start(Kind::Lease, url, PROCESSES).await;
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

/// Under a lease no event is lost either, and every further run is a takeover, or follows a claim that was one: its
/// reply was lost, so it was released without a run, and only the attempt tells it.
#[tokio::test]
async fn lease_doubles_an_event_only_after_a_death() {
    let schema = Schema::fresh();
    let effects = Effects::create(&schema.url()).await;
    let deaths = storm_with_deaths(&schema.url()).await;
    let mut all = effects.all().await;
    let mut doubled = 0;
    for id in ids(300) {
        let runs = all.remove(&id).unwrap_or_default();
        assert!(!runs.is_empty(), "{id} is lost");
        for pair in runs.windows(2) {
            let [(before, _), (attempt, takeover)] = [pair[0], pair[1]];
            assert!(takeover || attempt > before + 1, "{id} ran twice without knowing: {runs:?}");
        }
        doubled += runs.len() - 1;
    }
    assert!(all.is_empty(), "{all:?}");
    assert_complete(&effects, 300).await;
    // A death interrupts at most the handlers that run at once.
    assert!(doubled <= deaths * 12, "{doubled} runs were repeated by {deaths} deaths");
}

/// A fault of the storm.
#[derive(Clone, Copy)]
enum Fault {
    Kill,
    Freeze,
    Restart,
    /// All connections of all receivers fall silent.
    Silence,
    /// One of the next messages, which may be a COMMIT, breaks its connection.
    Cut(Cut),
}

/// Every fault under load: SIGKILL in handlers, processes that are frozen for longer than their leases and then go on,
/// server restarts that lose unflushed writes, connections that break or fall silent at any message, commits whose
/// replies are lost. Nothing is lost, and nothing doubled.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transactional_under_every_fault_loses_and_doubles_nothing() {
    let server = Arc::new(Server::start());
    let effects = Effects::create(&server.url()).await;
    for sql in [
        "ALTER SYSTEM SET synchronous_commit = off",
        "ALTER SYSTEM SET wal_writer_delay = '10s'",
        "SELECT pg_reload_conf()",
    ] {
        sqlx::query(sql).execute(effects.pool()).await.unwrap();
    }
    // The adapter does not look again for a lost schema.
    PostgresAdapter::connect(&server.url()).await.unwrap().migrate().await.unwrap();
    server.restart_immediately();

    let options: PgConnectOptions = server.url().parse().unwrap();
    let proxy = to_postgres(&options).await;
    let url = through(proxy.port(), options).to_url_lossy().to_string();
    let receivers = Receivers::start(Kind::Transactional, &url, PROCESSES).await;
    let (sent, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
    let mut ways = ["lost 60", "never 60", "mixed 60"].into_iter().cycle();
    let events = std::iter::from_fn(|| {
        let id = || format!("event-{}", sent.fetch_add(1, Ordering::SeqCst));
        (!stop.load(Ordering::SeqCst)).then(|| (id(), ways.next().unwrap().to_owned()))
    });
    let cuts = [Cut::Lost, Cut::Unanswered, Cut::Abandoned, Cut::Silent, Cut::SilentUnanswered];
    let mut faults: Vec<_> = [Fault::Kill, Fault::Freeze, Fault::Silence].repeat(3);
    faults
        .extend([Fault::Restart; 2].into_iter().chain(cuts.repeat(3).into_iter().map(Fault::Cut)));
    faults.shuffle(&mut rand::rng());
    let mut sprung = 0;
    let chaos = async {
        receivers.are_acknowledged(20).await;
        for fault in faults {
            match fault {
                Fault::Kill => receivers.kill_one().await,
                Fault::Freeze => receivers.freeze_one().await,
                Fault::Silence => proxy.silence(),
                Fault::Cut(cut) => {
                    proxy.set(rand::random_range(0..40), cut);
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    sprung += usize::from(proxy.sprung().is_some());
                }
                Fault::Restart => {
                    let server = Arc::clone(&server);
                    tokio::task::spawn_blocking(move || server.restart_immediately())
                        .await
                        .unwrap();
                }
            }
            receivers.are_acknowledged(5).await;
        }
        stop.store(true, Ordering::SeqCst);
    };
    tokio::join!(receivers.storm(events, 3, 16), chaos);
    let sent = sent.into_inner();
    receivers.assert_answers();
    effects.assert_once(ids(sent)).await;
    assert_complete(&effects, sent).await;
    let has_died = receivers.answers.lock().unwrap().contains_key("none");
    assert!(has_died, "no receiver died with a delivery");
    assert!(sprung > 5, "{sprung} connections broke");
    let runs = effects.runs().await;
    assert!(runs > i64::try_from(sent).unwrap(), "{runs} runs of {sent} events: none was repeated");
}
