//! The case that no threads can stand in for: several processes on one store.

use std::process::Stdio;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, Command};

use super::driver::{FIRST, complete_at_once, key, leased};
use super::store::{SharedStore, runtime};
use crate::adapter::{Claimed, Completed, DedupAdapter};

const WORKER: &str = "TOWER_DEDUP_CONFORMANCE_ADDRESS";
const TASKS: usize = 4;
const KEYS: usize = 200;
/// Before what a worker has to say, among what the test harness says.
const MARK: &str = "conformance-worker:";

/// [`PROCESSES`](SharedStore::PROCESSES) processes of four tasks each claim, complete and record the same
/// keys: each has exactly one winner.
///
/// The worker processes are this very test, started again: `name` is its full path.
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
        let mut said = BufReader::new(out).lines();
        expect_line(&mut said, "ready").await;
        lines.push(said);
    }
    // All are connected: now let them race.
    for worker in &mut workers {
        worker.stdin.take().expect("a worker's input").write_all(b"go\n").await.expect("a start");
    }
    let (mut claims, mut records) = (vec![0; KEYS], vec![0; KEYS]);
    for said in &mut lines {
        add(&mut claims, &expect_line(said, "claims").await);
        add(&mut records, &expect_line(said, "records").await);
    }
    for worker in &mut workers {
        let status = tokio::time::timeout(Duration::from_secs(60), worker.wait()).await;
        assert!(status.expect("a worker ends").expect("its status").success());
    }
    assert!(claims.iter().all(|winners| *winners == 1), "claims won: {claims:?}");
    assert!(records.iter().all(|winners| *winners == 1), "records won: {records:?}");
}

fn add(sums: &mut [u32], line: &str) {
    let wins: Vec<u32> = line.split_whitespace().map(|n| n.parse().expect("a number")).collect();
    assert_eq!(wins.len(), sums.len());
    sums.iter_mut().zip(wins).for_each(|(sum, wins)| *sum += wins);
}

async fn expect_line<R: tokio::io::AsyncBufRead + Unpin>(
    said: &mut tokio::io::Lines<R>,
    what: &str,
) -> String {
    let mark = format!("{MARK}{what}");
    loop {
        let next = tokio::time::timeout(Duration::from_secs(120), said.next_line()).await;
        let line = next.expect("a worker says something").expect("its output");
        let line = line.unwrap_or_else(|| panic!("a worker ended before it said {what:?}"));
        // The test harness may have begun the line.
        if let Some((_, rest)) = line.split_once(&mark) {
            return rest.trim().to_owned();
        }
    }
}

#[expect(clippy::print_stdout, reason = "it is how a worker answers")]
async fn work<S: SharedStore>(address: &str) {
    let adapter = S::attach(address).await;
    println!("\n{MARK}ready");
    let mut line = String::new();
    BufReader::new(tokio::io::stdin()).read_line(&mut line).await.expect("a start");
    let tasks = (0..TASKS).map(|_| {
        let adapter = adapter.clone();
        tokio::spawn(async move {
            let (mut claims, mut records) = (vec![0_u32; KEYS], vec![0_u32; KEYS]);
            for round in 0..KEYS {
                let (claimed, mine) = ([key(&format!("claim-{round}"))], leased());
                let claim = adapter.claim(&claimed, &mine).await.expect("a claim");
                if let [Claimed::First { .. }] = claim[..] {
                    claims[round] += 1;
                    let done = adapter.complete(&claimed, &mine).await.expect("a completion");
                    assert_eq!(done, [Completed::Held]);
                }
                let recorded = [key(&format!("record-{round}"))];
                let record = adapter.claim(&recorded, &complete_at_once()).await.expect("a record");
                if record == [FIRST] {
                    records[round] += 1;
                }
            }
            (claims, records)
        })
    });
    let (mut claims, mut records) = (vec![0; KEYS], vec![0; KEYS]);
    for task in tasks.collect::<Vec<_>>() {
        let (won_claims, won_records) = task.await.expect("a task");
        claims.iter_mut().zip(won_claims).for_each(|(sum, won)| *sum += won);
        records.iter_mut().zip(won_records).for_each(|(sum, won)| *sum += won);
    }
    let text = |wins: &[u32]| wins.iter().map(|n| format!("{n} ")).collect::<String>();
    println!("\n{MARK}claims {}", text(&claims));
    println!("\n{MARK}records {}", text(&records));
}
