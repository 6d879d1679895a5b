//! Four adapters share one Postgres, as four processes do, and the keys of their batches overlap. No deadlock occurs, and
//! each key has one holder at a time.
//!
//! 1. The server detects deadlocks before a statement's wait for a lock ends. Otherwise the adapter
//!    would split the batches and try again, and the test would not see the deadlock.
//! 2. Each key belongs to an epoch and ends complete. Until then every adapter claims, renews,
//!    releases and completes it, and claims it on arrival. No lease lapses during a test. So the
//!    attempts of a key show its holders: each attempt has one holder, and follows the release of
//!    the attempt before.

use std::collections::HashSet;
use std::future::Future;
use std::time::Duration;

use futures_util::future::join_all;
use rand::seq::SliceRandom;
use sqlx::{Connection, PgConnection};
use tower_dedup::adapter::PostgresAdapter;
use tower_dedup::adapter::contract::{
    CallTerms, ClaimReply, CompleteReply, DedupAdapter, RenewReply, Token,
};
use tower_dedup::{DedupKey, StoreError, StoreErrorKind};

use crate::support::cluster::{scalar, until_true};
use crate::support::postgres::Server;
use crate::support::{dedup_key, on_claim};

const ADAPTERS: usize = 4;
const CALLERS: usize = 24;
const EPOCHS: usize = 10;
/// The number of keys in an epoch.
const KEYS: usize = 40;
const HOUR: Duration = Duration::from_secs(3_600);

fn terms() -> CallTerms {
    CallTerms::on_completion(Token::random(), HOUR, HOUR)
}

fn key(epoch: usize, number: usize) -> DedupKey {
    dedup_key(&format!("{epoch}-{number}"))
}

/// What the callers were granted: a key and an attempt, or its completion.
#[derive(Default)]
struct Grants {
    attempts: HashSet<(DedupKey, u32)>,
    completed: HashSet<DedupKey>,
}

impl Grants {
    fn add(&mut self, other: Self) {
        for grant in other.attempts {
            assert!(!self.attempts.contains(&grant), "granted twice: {grant:?}");
            self.attempts.insert(grant);
        }
        for key in other.completed {
            assert!(!self.completed.contains(&key), "completed twice: {key:?}");
            self.completed.insert(key);
        }
    }
}

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
    let mut all = Grants::default();
    for grants in join_all(callers).await {
        all.add(grants.unwrap());
    }
    assert_eq!(all.completed.len(), EPOCHS * KEYS);
    // No attempt is missing. A granted attempt without a caller would leave a gap.
    for (key, attempt) in &all.attempts {
        let follows = *attempt == 1 || all.attempts.contains(&(key.clone(), attempt - 1));
        assert!(follows, "before attempt {attempt} of {key:?}");
    }
    // A session has reported its counts when it has ended.
    let ended = "SELECT count(*) = 0 FROM pg_stat_activity \
                 WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()";
    until_true(&mut admin, ended).await;
    let deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()";
    assert_eq!(scalar::<i64>(&mut admin, deadlocks).await, 0, "{}", server.log());
}

/// Calls until all keys are complete.
async fn call(adapter: PostgresAdapter, caller: usize) -> Grants {
    let mut grants = Grants::default();
    for epoch in 0..EPOCHS {
        let mut open: Vec<DedupKey> = (0..KEYS).map(|number| key(epoch, number)).collect();
        for round in 0.. {
            if open.is_empty() {
                break;
            }
            open.shuffle(&mut rand::rng());
            let some = open[..rand::random_range(1..=open.len().min(KEYS / 2))].to_vec();
            let known = if (round + caller).is_multiple_of(8) {
                record(&adapter, &some, &mut grants).await
            } else {
                claim(&adapter, some, &mut grants).await
            };
            open.retain(|key| !known.contains(key));
        }
    }
    grants
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
    grants: &mut Grants,
) -> Vec<DedupKey> {
    let mine = on_claim(&terms());
    let mut known = Vec::new();
    for (key, recorded) in all(some, |key| adapter.claim(key, &mine)).await {
        if matches!(recorded, ClaimReply::First { .. }) {
            grants.completed.insert(key.clone());
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
    grants: &mut Grants,
) -> Vec<DedupKey> {
    let mine = terms();
    let (mut done, mut failed, mut known) = (Vec::new(), Vec::new(), Vec::new());
    for (key, claimed) in all(&some, |key| adapter.claim(key, &mine)).await {
        match claimed {
            ClaimReply::First { attempt, takeover, .. } => {
                assert!(!takeover, "{} is taken over from a live holder", key.id());
                grants.attempts.insert((key.clone(), attempt));
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
    grants.completed.extend(done.iter().cloned());
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
