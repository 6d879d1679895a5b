//! Several processes race on one store.

use std::process::Stdio;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, Command};

use super::driver::{LEASE, SLACK, complete_at_once, key, leased};
use super::store::{SharedStore, runtime};
use crate::adapter::contract::{ClaimReply, CompleteReply, DedupAdapter, Permanence, StoreFuture};
use crate::error::StoreErrorKind;

const WORKER: &str = "TOWER_DEDUP_CONFORMANCE_ADDRESS";
/// What the worker does that is killed, and the id of its key.
const HOLD: &str = "hold";
const TASKS: usize = 4;
const KEYS: usize = 200;
/// Marks a line of a worker among the lines of the test harness.
const MARK: &str = "conformance-worker:";

/// Starts [`PROCESSES`](SharedStore::PROCESSES) processes of four tasks each, which claim the same keys
/// under a lease and complete at once. Asserts that each key has exactly one winner. One process more is killed while it
/// holds a lease, and its key is taken over.
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
    let mut workers: Vec<Child> = (0..=S::PROCESSES)
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
    let (mut killed, mut output) = workers.pop().zip(lines.pop()).expect("the last worker");
    start(&mut killed, HOLD).await;
    expect_line(&mut output, "held").await;
    killed.kill().await.expect("SIGKILL");
    store.advance(LEASE + SLACK).await;
    let claimed = store.adapter().claim(&key(HOLD), &leased()).await.expect("a claim");
    assert_eq!(
        claimed,
        ClaimReply::first(2, true),
        "after a process that held the lease was killed"
    );
    // Only now, because all workers must be connected.
    for worker in &mut workers {
        start(worker, "go").await;
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

/// Returns the reply to a call. A store may refuse the call, which is then sent again: on a busy machine, another process
/// may keep a file locked for longer than a call waits.
async fn executed<'a, T>(call: impl Fn() -> StoreFuture<'a, T>) -> T {
    for _ in 0..60 {
        match call().await {
            Err(error) if error.kind() == StoreErrorKind::Refused => {}
            reply => return reply.expect("a reply"),
        }
    }
    panic!("the store refuses a call sixty times");
}

/// Tells a worker what to do.
async fn start(worker: &mut Child, what: &str) {
    let mut input = worker.stdin.take().expect("a worker's input");
    input.write_all(format!("{what}\n").as_bytes()).await.expect("a start");
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
    if line.trim() == HOLD {
        adapter.claim(&key(HOLD), &leased()).await.expect("a claim");
        println!("\n{MARK}held");
        return std::future::pending().await;
    }
    let tasks = (0..TASKS).map(|_| {
        let adapter = adapter.clone();
        tokio::spawn(async move {
            let mut won = Vec::new();
            for round in 0..KEYS {
                for (id, mine) in ids(round).into_iter().zip([leased(), complete_at_once()]) {
                    let key = key(&id);
                    let claimed = executed(|| adapter.claim(&key, &mine)).await;
                    if !matches!(claimed, ClaimReply::First { .. }) {
                        continue;
                    }
                    if mine.permanence() != Permanence::OnClaim {
                        let done = executed(|| adapter.complete(&key, &mine)).await;
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
