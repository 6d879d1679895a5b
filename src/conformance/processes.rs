//! Several processes race on one store.

use std::process::Stdio;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, Command};

use super::driver::{complete_at_once, key, leased};
use super::store::{SharedStore, runtime};
use crate::adapter::contract::{ClaimReply, CompleteReply, DedupAdapter, Permanence};

const WORKER: &str = "TOWER_DEDUP_CONFORMANCE_ADDRESS";
const TASKS: usize = 4;
const KEYS: usize = 200;
/// Marks a line of a worker among the lines of the test harness.
const MARK: &str = "conformance-worker:";

/// Starts [`PROCESSES`](SharedStore::PROCESSES) processes of four tasks each, which claim the same keys
/// under a lease and complete at once. Asserts that each key has exactly one winner.
///
/// A worker process is the same test, started again: `name` is the full path of the test.
#[doc(hidden)]
pub fn processes_race_for_keys<S: SharedStore>(name: &str) {
    runtime().block_on(async {
        match std::env::var(WORKER) {
            Ok(address) => work::<S>(&address).await,
            Err(_) => lead::<S>(name).await,
        }
    });
}

async fn lead<S: SharedStore>(name: &str) {
    let store = S::create().await;
    let address = store.address();
    let test = name.split_once("::").map_or(name, |(_crate, test)| test);
    let program = std::env::current_exe().expect("the path of this test");
    let mut workers: Vec<Child> = (0..S::PROCESSES)
        .map(|_| {
            Command::new(&program)
                .args([test, "--exact", "--nocapture", "--test-threads=1"])
                .env(WORKER, &address)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .kill_on_drop(true)
                .spawn()
                .expect("a worker process")
        })
        .collect();
    let mut lines = Vec::new();
    for worker in &mut workers {
        let out = worker.stdout.take().expect("a worker's output");
        let mut output = BufReader::new(out).lines();
        expect_line(&mut output, "ready").await;
        lines.push(output);
    }
    // Only now, because all workers must be connected.
    for worker in &mut workers {
        worker.stdin.take().expect("a worker's input").write_all(b"go\n").await.expect("a start");
    }
    let mut won = Vec::new();
    for output in &mut lines {
        won.extend(expect_line(output, "won").await.split_whitespace().map(str::to_owned));
    }
    for worker in &mut workers {
        let status = tokio::time::timeout(Duration::from_secs(60), worker.wait()).await;
        assert!(status.expect("a worker ends").expect("its status").success());
    }
    let mut keys: Vec<String> = (0..KEYS).flat_map(ids).collect();
    keys.sort();
    won.sort();
    assert_eq!(won, keys, "each key has one winner");
}

/// Returns the id of a key under a lease, and that of a key that is complete at once.
fn ids(round: usize) -> [String; 2] {
    [format!("leased-{round}"), format!("complete-{round}")]
}

async fn expect_line<R: tokio::io::AsyncBufRead + Unpin>(
    output: &mut tokio::io::Lines<R>,
    what: &str,
) -> String {
    let mark = format!("{MARK}{what}");
    loop {
        let next = tokio::time::timeout(Duration::from_secs(120), output.next_line()).await;
        let line = next.expect("a line of a worker in time").expect("its output");
        let line = line.unwrap_or_else(|| panic!("a worker ended before the line {what:?}"));
        // The test harness may have written the start of the line.
        if let Some((_, rest)) = line.split_once(&mark) {
            return rest.trim().to_owned();
        }
    }
}

#[expect(clippy::print_stdout, reason = "a worker writes its results to its output")]
async fn work<S: SharedStore>(address: &str) {
    let adapter = S::attach(address).await;
    println!("\n{MARK}ready");
    let mut line = String::new();
    BufReader::new(tokio::io::stdin()).read_line(&mut line).await.expect("a start");
    let tasks = (0..TASKS).map(|_| {
        let adapter = adapter.clone();
        tokio::spawn(async move {
            let mut won = Vec::new();
            for round in 0..KEYS {
                for (id, mine) in ids(round).into_iter().zip([leased(), complete_at_once()]) {
                    let claimed = adapter.claim(&key(&id), &mine).await.expect("a claim");
                    if !matches!(claimed, ClaimReply::First { .. }) {
                        continue;
                    }
                    if mine.permanence() != Permanence::OnClaim {
                        let done = adapter.complete(&key(&id), &mine).await.expect("a completion");
                        assert_eq!(done, CompleteReply::Held);
                    }
                    won.push(id);
                }
            }
            won
        })
    });
    let mut won = Vec::new();
    for task in tasks.collect::<Vec<_>>() {
        won.extend(task.await.expect("a task"));
    }
    println!("\n{MARK}won {}", won.join(" "));
}
