//! Processes that are killed with SIGKILL while their handlers run, on SQLite. The soak does it under load, on every store.
//!
//! The processes are this test binary, started again with a folder in its environment. Each process
//! is a receiver on a port of its own; its handler's effect is one line in a file.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::post;
use axum::{Extension, Router};
use sqlx::SqlitePool;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tower_dedup::adapter::SqliteAdapter;
use tower_dedup::{CommitError, DedupLayer, Delivery};

use crate::support::{by_header, sqlite_url};

const DIR: &str = "TOWER_DEDUP_TEST_CRASH_DIR";
/// The name of the ledger.
const LEDGER: &str = "TOWER_DEDUP_TEST_CRASH_LEDGER";
const LEASE: Duration = Duration::from_millis(700);
const MARK: &str = "receiver-listens-at:";

/// Not a test: the receiver, if this binary is started as one.
#[test]
fn receiver() {
    let Ok(dir) = std::env::var(DIR) else { return };
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(serve(PathBuf::from(dir)));
}

async fn serve(dir: PathBuf) {
    let adapter = SqliteAdapter::connect(&sqlite_url(&dir)).await.unwrap();
    let route = Router::new().route("/hook", post(handle));
    let route = match std::env::var(LEDGER).as_deref() {
        Ok("arrival") => route.layer(DedupLayer::on_arrival(by_header(), adapter)),
        Ok("transactional") => {
            let pool = SqlitePool::connect(&sqlite_url(&dir)).await.unwrap();
            let written = Router::new().route("/hook", post(write)).layer(Extension(pool));
            written.layer(DedupLayer::transactional(by_header(), adapter).lease(LEASE))
        }
        _ => route.layer(DedupLayer::new(by_header(), adapter).lease(LEASE)),
    };
    let app = route.with_state(Arc::new(dir));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    println!("\n{MARK}{}", listener.local_addr().unwrap());
    axum::serve(listener, app).await.unwrap();
}

/// Writes the effect, waits so that the process may die, then succeeds.
async fn handle(State(dir): State<Arc<PathBuf>>, delivery: Delivery, body: String) -> StatusCode {
    let line = format!(
        "{} {} {}\n",
        delivery.id(),
        delivery.attempt(),
        if delivery.is_takeover() { "takeover" } else { "-" }
    );
    let file = OpenOptions::new().append(true).create(true).open(dir.join("effects"));
    file.unwrap().write_all(line.as_bytes()).unwrap();
    tokio::time::sleep(Duration::from_millis(body.parse().unwrap())).await;
    StatusCode::OK
}

/// The same, with an effect in a transaction that completes the delivery as well. The process dies before the COMMIT.
async fn write(
    dir: State<Arc<PathBuf>>,
    delivery: Delivery,
    Extension(pool): Extension<SqlitePool>,
    body: String,
) -> Result<StatusCode, CommitError> {
    let mut tx = delivery.begin(&pool).await?;
    sqlx::query("INSERT INTO written VALUES ($1)").bind(delivery.id()).execute(&mut *tx).await?;
    tx.complete().await?;
    let status = handle(dir, delivery, body).await;
    tx.commit().await?;
    Ok(status)
}

async fn start(dir: &Path, ledger: &str) -> (Child, String) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["sigkill::receiver", "--exact", "--nocapture"])
        .env(DIR, dir)
        .env(LEDGER, ledger)
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let address = loop {
        let line = lines.next_line().await.unwrap().expect("the receiver starts");
        if let Some((_, address)) = line.split_once(MARK) {
            break address.to_owned();
        }
    };
    (child, format!("http://{address}/hook"))
}

fn effects(dir: &Path) -> Vec<(String, u32, bool)> {
    let text = std::fs::read_to_string(dir.join("effects")).unwrap_or_default();
    text.lines()
        .map(|line| {
            let mut words = line.split(' ');
            let id = words.next().unwrap().to_owned();
            (id, words.next().unwrap().parse().unwrap(), words.next() == Some("takeover"))
        })
        .collect()
}

async fn deliver(client: &reqwest::Client, url: &str, id: &str, ms: u64) -> Option<u16> {
    let request = client.post(url).header("webhook-id", id).body(ms.to_string());
    request.send().await.ok().map(|answer| answer.status().as_u16())
}

/// Delivers the event `a` to a receiver, and kills the receiver in its handler.
async fn killed_in_its_handler(client: &reqwest::Client, dir: &Path, ledger: &str) {
    let (mut receiver, url) = start(dir, ledger).await;
    let client = client.clone();
    let cut = tokio::spawn(async move { deliver(&client, &url, "a", 60_000).await });
    while effects(dir).is_empty() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    receiver.kill().await.unwrap();
    assert_eq!(cut.await.unwrap(), None, "the connection was cut");
}

#[tokio::test]
async fn lease_retry_after_a_sigkill_runs_as_a_takeover() {
    taken_over_after_a_sigkill("lease", tempfile::tempdir().unwrap().path()).await;
}

/// The killed process has completed its event, and has not committed.
#[tokio::test]
async fn transaction_of_a_killed_process_leaves_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let url = format!("{}?mode=rwc", sqlite_url(dir.path()));
    let file = SqlitePool::connect(&url).await.unwrap();
    sqlx::query("CREATE TABLE written (id TEXT)").execute(&file).await.unwrap();
    taken_over_after_a_sigkill("transactional", dir.path()).await;
    let written = sqlx::query_scalar("SELECT count(*) FROM written");
    assert_eq!(written.fetch_one(&file).await.ok(), Some(1_i64));
}

/// The process dies while its handler runs. The retry gets 503 until the lease lapses, and then
/// runs as a takeover.
async fn taken_over_after_a_sigkill(ledger: &str, dir: &Path) {
    let client = reqwest::Client::new();
    killed_in_its_handler(&client, dir, ledger).await;

    let (_second, url) = start(dir, ledger).await;
    let mut statuses = Vec::new();
    loop {
        let status = deliver(&client, &url, "a", 0).await.unwrap();
        statuses.push(status);
        assert!(statuses.len() < 100, "{statuses:?}");
        if status == 200 {
            break;
        }
        assert_eq!(status, 503);
    }
    assert_eq!(effects(dir)[1..], [("a".to_owned(), 2, true)]);
    assert_eq!(deliver(&client, &url, "a", 0).await, Some(200));
    assert_eq!(effects(dir).len(), 2, "later deliveries are duplicates");
}

/// On arrival the key is complete before the handler runs, so a process that dies in the handler
/// loses the event.
#[tokio::test]
async fn on_arrival_sigkill_in_the_handler_loses_the_event() {
    let dir = tempfile::tempdir().unwrap();
    let client = reqwest::Client::new();
    killed_in_its_handler(&client, dir.path(), "arrival").await;

    let (_second, url) = start(dir.path(), "arrival").await;
    assert_eq!(deliver(&client, &url, "a", 0).await, Some(200));
    assert_eq!(effects(dir.path()).len(), 1, "the retry is a duplicate of a run that never ended");
}
