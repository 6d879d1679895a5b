//! Four adapters share one Postgres, as four processes do, and the keys of their batches overlap: no deadlock occurs. The
//! conformance suite and `tests/model` check that each key has one holder at a time.
//!
//! The server detects deadlocks before a statement's wait for a lock ends. Otherwise the adapter would split the batches
//! and try again, and the test would not see the deadlock.

use std::future::Future;
use std::time::Duration;

use futures_util::future::join_all;
use rand::seq::SliceRandom;
use sqlx::{Connection, PgConnection};
use tower_dedup::adapter::PostgresAdapter;
use tower_dedup::adapter::contract::{CallTerms, ClaimReply, DedupAdapter, Token};
use tower_dedup::{DedupKey, StoreError, StoreErrorKind};

use support::cluster::{scalar, until_true};
use support::postgres::Server;
use support::{dedup_key, on_claim};

const ADAPTERS: usize = 4;
const CALLERS: usize = 24;
const EPOCHS: usize = 10;
/// The number of keys in an epoch.
const KEYS: usize = 40;
const HOUR: Duration = Duration::from_secs(3_600);

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn overlapping_batches_of_four_adapters_do_not_deadlock() {
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
    let mut callers = Vec::new();
    for _ in 0..ADAPTERS {
        let adapter = PostgresAdapter::connect(&server.url()).await.unwrap();
        callers.extend((0..CALLERS).map(|caller| tokio::spawn(call(adapter.clone(), caller))));
    }
    for caller in callers {
        caller.await.unwrap();
    }
    // A session has reported its counts when it has ended.
    let ended = "SELECT count(*) = 0 FROM pg_stat_activity \
                 WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()";
    until_true(&mut admin, ended).await;
    let deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()";
    assert_eq!(scalar::<i64>(&mut admin, deadlocks).await, 0, "{}", server.log());
}

/// Calls until all keys are complete, one epoch of keys after the other. Every eighth round claims on arrival.
async fn call(adapter: PostgresAdapter, caller: usize) {
    for epoch in 0..EPOCHS {
        let mut open: Vec<_> = (0..KEYS).map(|id| dedup_key(&format!("{epoch}-{id}"))).collect();
        for round in 0.. {
            if open.is_empty() {
                break;
            }
            open.shuffle(&mut rand::rng());
            let some = open[..rand::random_range(1..=open.len().min(KEYS / 2))].to_vec();
            let at_once = (round + caller).is_multiple_of(8);
            let known = claim(&adapter, some, at_once).await;
            open.retain(|key| !known.contains(key));
        }
    }
}

/// Claims keys. Under a lease, then renews and completes them, but the first holders release theirs, so that many keys are
/// free at once. Renewals and completions also name keys of other callers, so that batches without a common holder meet,
/// too. Returns the keys that are complete.
async fn claim(adapter: &PostgresAdapter, mut some: Vec<DedupKey>, at_once: bool) -> Vec<DedupKey> {
    let leased = CallTerms::on_completion(Token::random(), HOUR, HOUR);
    let mine = if at_once { on_claim(&leased) } else { leased };
    let (mut known, mut failed) = (Vec::new(), Vec::new());
    for (key, claimed) in all(&some, |key| adapter.claim(key, &mine)).await {
        match claimed {
            ClaimReply::First { attempt, .. } if !at_once && attempt < 3 => {
                failed.push(key.clone());
            }
            ClaimReply::InFlight => {}
            _ => known.push(key.clone()),
        }
    }
    if !at_once {
        some.shuffle(&mut rand::rng());
        all(&some, |key| adapter.renew(key, &mine)).await;
        known.shuffle(&mut rand::rng());
        all(&known, |key| adapter.complete(key, &mine)).await;
        failed.shuffle(&mut rand::rng());
        all(&failed, |key| adapter.release(key, &mine)).await;
    }
    known
}

/// Makes the call for every key at the same time. Returns each key with its reply. A call that waits too long for a row is
/// refused: nothing has changed, and the call is made again.
async fn all<'k, T, F: Future<Output = Result<T, StoreError>>>(
    keys: &'k [DedupKey],
    call: impl Fn(&'k DedupKey) -> F,
) -> Vec<(&'k DedupKey, T)> {
    join_all(keys.iter().map(async |key| {
        for _ in 0..100 {
            match call(key).await {
                Err(error) if error.kind() == StoreErrorKind::Refused => {}
                answer => return (key, answer.unwrap()),
            }
        }
        panic!("the call is refused every time");
    }))
    .await
}
