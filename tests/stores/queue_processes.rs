//! Four processes share one Postgres, and the keys of their batches overlap. No deadlock occurs, and
//! each key has one holder at a time.
//!
//! 1. The server detects deadlocks before a statement's wait for a lock ends. Otherwise the adapter
//!    would split the batches and try again, and the test would not see the deadlock.
//! 2. Each key belongs to an epoch and ends complete. Until then every process claims, renews,
//!    releases and completes it, and claims it on arrival. No lease lapses during a test. So the
//!    attempts of a key show its holders: each attempt has one holder, and follows the release of
//!    the attempt before.

use std::collections::HashSet;
use std::future::Future;
use std::process::Stdio;
use std::time::Duration;

use futures_util::future::join_all;
use rand::seq::SliceRandom;
use sqlx::{Connection, PgConnection};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, Command};
use tower_dedup::adapter::PostgresAdapter;
use tower_dedup::adapter::contract::{
    CallTerms, ClaimReply, CompleteReply, DedupAdapter, RenewReply, Token,
};
use tower_dedup::{DedupKey, StoreError, StoreErrorKind};

use crate::support::postgres::Server;
use crate::support::{dedup_key, on_claim};

const PROCESSES: usize = 4;
const CALLERS: usize = 24;
const EPOCHS: usize = 20;
/// The number of keys in an epoch.
const KEYS: usize = 40;
const URL: &str = "TOWER_DEDUP_TEST_OVERLAP";
/// Marks the lines of a process among the output of the test harness.
const MARK: &str = "overlap:";
const HOUR: Duration = Duration::from_secs(3_600);
const LATE: Duration = Duration::from_secs(120);

fn terms() -> CallTerms {
    CallTerms::on_completion(Token::random(), HOUR, HOUR)
}

fn key(epoch: usize, number: usize) -> DedupKey {
    dedup_key(&format!("{epoch}-{number}"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn overlapping_batches_of_four_processes_do_not_deadlock() {
    let server = Server::start();
    let mut admin = PgConnection::connect(&server.url()).await.unwrap();
    for sql in [
        "ALTER SYSTEM SET deadlock_timeout = '1ms'",
        // The planner treats the table as large, so it reads rows in the order of the requested
        // keys.
        "ALTER SYSTEM SET enable_seqscan = off",
        "ALTER SYSTEM SET enable_hashjoin = off",
        "ALTER SYSTEM SET enable_mergejoin = off",
        "SELECT pg_reload_conf()",
    ] {
        sqlx::raw_sql(sql).execute(&mut admin).await.unwrap();
    }
    PostgresAdapter::connect(&server.url()).await.unwrap().migrate().await.unwrap();

    let mut processes: Vec<Child> = (0..PROCESSES).map(|_| start(&server.url())).collect();
    let mut said = Vec::new();
    for process in &mut processes {
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
        assert_eq!(next(&mut lines).await, "ready");
        said.push(lines);
    }
    // All processes are connected: now they race.
    for process in &mut processes {
        process.stdin.take().unwrap().write_all(b"go\n").await.unwrap();
    }
    let (mut granted, mut completed) = (HashSet::new(), HashSet::new());
    for lines in &mut said {
        loop {
            let line = next(lines).await;
            match line.split_once(' ') {
                Some(("granted", grant)) => {
                    assert!(granted.insert(grant.to_owned()), "granted twice: {grant}");
                }
                Some(("completed", key)) => {
                    assert!(completed.insert(key.to_owned()), "completed twice: {key}");
                }
                _ => break assert_eq!(line, "done"),
            }
        }
    }
    for process in &mut processes {
        let status = tokio::time::timeout(LATE, process.wait()).await;
        assert!(status.expect("the process ends").unwrap().success());
    }
    assert_eq!(completed.len(), EPOCHS * KEYS);
    // No attempt is missing. A granted attempt without a caller would leave a gap.
    for grant in &granted {
        let (key, attempt) = grant.split_once(' ').unwrap();
        let before = attempt.parse::<u32>().unwrap() - 1;
        assert!(before == 0 || granted.contains(&format!("{key} {before}")), "before {grant}");
    }
    // A session has reported its counts when it has ended.
    let others = "SELECT count(*) FROM pg_stat_activity \
                  WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()";
    let ended = async {
        while sqlx::query_scalar::<_, i64>(others).fetch_one(&mut admin).await.unwrap() > 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(LATE, ended).await.expect("their sessions end");
    let deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()";
    let deadlocks: i64 = sqlx::query_scalar(deadlocks).fetch_one(&mut admin).await.unwrap();
    assert_eq!(deadlocks, 0, "{}", server.log());
}

fn start(url: &str) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args([
            "queue_processes::one_of_the_processes",
            "--exact",
            "--nocapture",
            "--test-threads=1",
        ])
        .env(URL, url)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap()
}

/// Returns the next line of a process.
async fn next<R: tokio::io::AsyncBufRead + Unpin>(lines: &mut tokio::io::Lines<R>) -> String {
    loop {
        let line = tokio::time::timeout(LATE, lines.next_line()).await;
        let line = line.expect("every call gets a reply").unwrap();
        let line = line.expect("the process writes its last line");
        // The test harness may have begun the line.
        if let Some((_, said)) = line.split_once(MARK) {
            return said.to_owned();
        }
    }
}

/// Not a test: one of the processes, if this binary is started as one.
#[test]
fn one_of_the_processes() {
    let Ok(url) = std::env::var(URL) else { return };
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.unwrap().block_on(async {
        let adapter = PostgresAdapter::connect(&url).await.unwrap();
        println!("\n{MARK}ready");
        let mut line = String::new();
        BufReader::new(tokio::io::stdin()).read_line(&mut line).await.unwrap();
        let callers = (0..CALLERS).map(|caller| tokio::spawn(call(adapter.clone(), caller)));
        for said in join_all(callers.collect::<Vec<_>>()).await {
            for line in said.unwrap() {
                println!("\n{MARK}{line}");
            }
        }
        println!("\n{MARK}done");
    });
}

/// Calls until all keys are complete. Returns the attempts that this caller was granted, and the
/// keys that it completed.
async fn call(adapter: PostgresAdapter, caller: usize) -> Vec<String> {
    let mut said = Vec::new();
    for epoch in 0..EPOCHS {
        let mut open: Vec<DedupKey> = (0..KEYS).map(|number| key(epoch, number)).collect();
        for round in 0.. {
            if open.is_empty() {
                break;
            }
            open.shuffle(&mut rand::rng());
            let some = open[..rand::random_range(1..=open.len().min(KEYS / 2))].to_vec();
            let known = if (round + caller).is_multiple_of(8) {
                record(&adapter, &some, &mut said).await
            } else {
                claim(&adapter, some, &mut said).await
            };
            open.retain(|key| !known.contains(key));
        }
    }
    said
}

/// A call that waits too long for a row is refused: nothing has changed, and the call is made
/// again.
async fn again<T, F: Future<Output = Result<T, StoreError>>>(call: impl Fn() -> F) -> T {
    for _ in 0..100 {
        match call().await {
            Err(error) if error.kind() == StoreErrorKind::Refused => {}
            answer => return answer.unwrap(),
        }
    }
    panic!("the call is refused every time");
}

/// Makes the call for every key at the same time. Returns each key with its reply.
async fn all<'k, T, F: Future<Output = Result<T, StoreError>>>(
    keys: &'k [DedupKey],
    call: impl Fn(&'k DedupKey) -> F,
) -> Vec<(&'k DedupKey, T)> {
    let call = &call;
    join_all(keys.iter().map(async |key| (key, again(|| call(key)).await))).await
}

/// Returns the keys that are complete.
async fn record(
    adapter: &PostgresAdapter,
    some: &[DedupKey],
    said: &mut Vec<String>,
) -> Vec<DedupKey> {
    let mine = on_claim(&terms());
    let mut known = Vec::new();
    for (key, recorded) in all(some, |key| adapter.claim(key, &mine)).await {
        if matches!(recorded, ClaimReply::First { .. }) {
            said.push(format!("completed {}", key.id()));
        }
        if recorded != ClaimReply::InFlight {
            known.push(key.clone());
        }
    }
    known
}

/// The same under a lease. A claim is renewed and completed, or the first holders release it, so
/// that many keys are free at once. Renewals and completions also name keys of other callers, so
/// that batches without a common holder meet, too.
async fn claim(
    adapter: &PostgresAdapter,
    mut some: Vec<DedupKey>,
    said: &mut Vec<String>,
) -> Vec<DedupKey> {
    let mine = terms();
    let (mut done, mut failed, mut known) = (Vec::new(), Vec::new(), Vec::new());
    for (key, claimed) in all(&some, |key| adapter.claim(key, &mine)).await {
        match claimed {
            ClaimReply::First { attempt, takeover, .. } => {
                assert!(!takeover, "{} is taken over from a live holder", key.id());
                said.push(format!("granted {} {attempt}", key.id()));
                if attempt < 3 { &mut failed } else { &mut done }.push(key.clone());
            }
            ClaimReply::Duplicate(_) => known.push(key.clone()),
            _ => {}
        }
    }
    some.shuffle(&mut rand::rng());
    for (key, mut renewed) in all(&some, |key| adapter.renew(key, &mine)).await {
        // A statement of another process holds the row for a moment.
        while renewed == RenewReply::Locked {
            renewed = again(|| adapter.renew(key, &mine)).await;
        }
        let held = done.contains(key) || failed.contains(key);
        assert_eq!(renewed == RenewReply::Held, held, "{}: {renewed:?}", key.id());
    }
    said.extend(done.iter().map(|key| format!("completed {}", key.id())));
    known.extend_from_slice(&done);
    known.shuffle(&mut rand::rng());
    for (key, completed) in all(&known, |key| adapter.complete(key, &mine)).await {
        let expected =
            if done.contains(key) { CompleteReply::Held } else { CompleteReply::LeaseLost };
        assert_eq!(completed, expected, "{}", key.id());
    }
    failed.shuffle(&mut rand::rng());
    all(&failed, |key| adapter.release(key, &mine)).await;
    known
}
