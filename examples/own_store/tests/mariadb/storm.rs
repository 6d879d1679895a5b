//! Processes that are killed with SIGKILL while their handlers run.
//!
//! The processes are this test binary, started again. Each is a receiver on a port of its own; its handler's effect is a
//! row in the database of the store.

use std::process::Stdio;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::post;
use futures_util::future::join_all;
use own_store::{MariaDbStore, Options};
use sqlx::AssertSqlSafe;
use sqlx::mysql::MySqlPool;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tower_dedup::{BoxError, DedupLayer, Delivery, key};
use tower_dedup_conformance::Store;

use crate::server::Database;

/// The URL of the store, for a receiver.
const URL: &str = "OWN_STORE_TEST_URL";
const LEDGER: &str = "OWN_STORE_TEST_LEDGER";
const MARK: &str = "receiver-listens-at:";
const LEASE: Duration = Duration::from_millis(700);
const RECEIVERS: usize = 3;
const SENDERS: usize = 32;
const EVENTS: usize = 2_000;
/// How often each event is delivered, besides its retries.
const COPIES: usize = 3;
const PAUSE: Duration = Duration::from_millis(400);

/// Not a test: the receiver, if this binary is started as one.
#[test]
fn receiver() {
    let Ok(url) = std::env::var(URL) else { return };
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(serve(&url));
}

async fn serve(url: &str) {
    let pool = MySqlPool::connect(url).await.unwrap();
    let store = MariaDbStore::connect(url, Options::default()).await.unwrap();
    let by_id = || key::header("webhook-id").namespace("storm");
    let app = match std::env::var(LEDGER).unwrap().as_str() {
        "arrival" => {
            Router::new().route("/", post(effect)).layer(DedupLayer::on_arrival(by_id(), store))
        }
        "transactional" => Router::new()
            .route("/", post(effect_in_a_transaction))
            .layer(DedupLayer::transactional(by_id(), store).lease(LEASE)),
        _ => Router::new()
            .route("/", post(effect))
            .layer(DedupLayer::new(by_id(), store).lease(LEASE)),
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    println!("\n{MARK}{}", listener.local_addr().unwrap());
    axum::serve(listener, app.with_state(pool)).await.unwrap();
}

const INSERT: &str = "INSERT INTO effects (id) VALUES (?)";

/// The effect, and some time in which the process may die.
async fn effect(State(pool): State<MySqlPool>, delivery: Delivery) -> StatusCode {
    match sqlx::query(INSERT).bind(delivery.id()).execute(&pool).await {
        Ok(_) => {
            tokio::time::sleep(Duration::from_millis(3)).await;
            StatusCode::OK
        }
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

async fn effect_in_a_transaction(State(pool): State<MySqlPool>, delivery: Delivery) -> StatusCode {
    let run = async {
        let completion = delivery.completion()?;
        let mut transaction = pool.begin().await?;
        sqlx::query(INSERT).bind(delivery.id()).execute(&mut *transaction).await?;
        tokio::time::sleep(Duration::from_millis(3)).await;
        let complete = sqlx::query(AssertSqlSafe(completion.sql().to_owned()));
        complete.bind(completion.parameter()).execute(&mut *transaction).await?;
        transaction.commit().await?;
        Ok::<_, BoxError>(())
    };
    if run.await.is_ok() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}

async fn start(url: &str, ledger: &str) -> (Child, String) {
    let mut receiver = Command::new(std::env::current_exe().unwrap())
        .args(["storm::receiver", "--exact", "--nocapture"])
        .envs([(URL, url), (LEDGER, ledger)])
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(receiver.stdout.take().unwrap()).lines();
    loop {
        let line = lines.next_line().await.unwrap().expect("the receiver starts");
        if let Some((_, address)) = line.split_once(MARK) {
            return (receiver, format!("http://{address}/"));
        }
    }
}

/// What became of the events.
#[derive(Debug)]
struct Storm {
    kills: usize,
    lost: usize,
    doubled: usize,
}

/// Delivers each event several times at once to processes that are killed one after the other, until each delivery is
/// acknowledged.
async fn storm(ledger: &'static str) -> Storm {
    let database = Database::create().await;
    database.execute("CREATE TABLE effects (id VARCHAR(64) NOT NULL, KEY (id))").await;
    let mut receivers = join_all((0..RECEIVERS).map(|_| start(&database.url, ledger))).await;
    let urls: Arc<Mutex<Vec<String>>> =
        Arc::new(Mutex::new(receivers.iter().map(|(_, url)| url.clone()).collect()));
    let next = Arc::new(AtomicUsize::new(0));
    let senders: Vec<_> = (0..SENDERS)
        .map(|sender| {
            let (urls, next) = (Arc::clone(&urls), Arc::clone(&next));
            tokio::spawn(async move {
                let client =
                    reqwest::Client::builder().timeout(Duration::from_secs(10)).build().unwrap();
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= EVENTS * COPIES {
                        return;
                    }
                    for attempt in 0.. {
                        // The copies of an event are delivered by senders beside each other, to different processes.
                        let url =
                            urls.lock().unwrap()[(number + sender + attempt) % RECEIVERS].clone();
                        let request =
                            client.post(url).header("webhook-id", (number / COPIES).to_string());
                        if request.send().await.is_ok_and(|response| response.status().is_success())
                        {
                            break;
                        }
                        tokio::time::sleep(Duration::from_millis(20)).await;
                    }
                }
            })
        })
        .collect();
    let mut kills = 0;
    let start_of_storm = Instant::now();
    while !senders.iter().all(tokio::task::JoinHandle::is_finished) {
        assert!(
            start_of_storm.elapsed() < Duration::from_secs(300),
            "the storm has no end: {kills} kills"
        );
        tokio::time::sleep(PAUSE).await;
        let victim = kills % RECEIVERS;
        // SIGKILL.
        receivers[victim].0.kill().await.unwrap();
        receivers[victim] = start(&database.url, ledger).await;
        urls.lock().unwrap()[victim].clone_from(&receivers[victim].1);
        kills += 1;
    }
    join_all(senders).await.into_iter().for_each(|sender| sender.unwrap());
    let counts: Vec<(String, i64)> = sqlx::query_as("SELECT id, COUNT(*) FROM effects GROUP BY id")
        .fetch_all(&mut database.connection().await)
        .await
        .unwrap();
    let doubled = counts.iter().filter(|(_, effects)| *effects > 1).count();
    let storm = Storm { kills, lost: EVENTS - counts.len(), doubled };
    println!(
        "{ledger}: {EVENTS} events, {COPIES} times each, in {:?}: {storm:?}",
        start_of_storm.elapsed()
    );
    assert!(kills > 2, "{storm:?}");
    storm
}

/// Under a lease nothing is lost. Twice runs what was killed between the effect and its completion.
#[tokio::test(flavor = "multi_thread")]
async fn lease_loses_nothing() {
    let storm = storm("lease").await;
    assert_eq!(storm.lost, 0, "{storm:?}");
    assert!(storm.doubled <= storm.kills * SENDERS, "{storm:?}");
}

/// On arrival nothing runs twice. Lost is what was killed between the claim and the effect.
#[tokio::test(flavor = "multi_thread")]
async fn on_arrival_doubles_nothing() {
    let storm = storm("arrival").await;
    assert_eq!(storm.doubled, 0, "{storm:?}");
    assert!(storm.lost <= storm.kills * SENDERS, "{storm:?}");
}

/// The effect is in the transaction that completes the event.
#[tokio::test(flavor = "multi_thread")]
async fn transactional_loses_and_doubles_nothing() {
    let storm = storm("transactional").await;
    assert_eq!((storm.lost, storm.doubled), (0, 0), "{storm:?}");
}
