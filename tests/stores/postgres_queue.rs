//! Batches on Postgres: row locks of duplicates, and lock timeouts of batches over slow commits.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use sqlx::postgres::PgPoolOptions;
use tower_dedup::DedupKey;
use tower_dedup::adapter::contract::{ClaimReply, CompleteReply, DedupAdapter};
use tower_dedup::adapter::{Batching, PostgresAdapter, PostgresOptions};

use crate::support::effects::{AT_A_GATE, Database};
use crate::support::postgres::Server;
use crate::support::{FIRST, claim_all, dedup_key, on_claim, terms};

fn key(of: &str, id: usize) -> DedupKey {
    dedup_key(&format!("{of}-{id}"))
}

/// Duplicates, new claims and completions go in one batch. Too few keys are duplicates for the
/// adapter to read rows first.
#[tokio::test]
async fn duplicate_beside_completions_neither_writes_nor_locks() {
    const DUPLICATES: usize = 10;
    const OTHERS: usize = 30;
    let database = Database::fresh().await;
    let adapter = PostgresAdapter::with_options(
        database.pool(2),
        PostgresOptions::new().batching(Batching::new().lanes(1)),
    );
    let mine = terms();
    for id in 0..DUPLICATES {
        let recorded = adapter.claim(&key("known", id), &on_claim(&terms())).await.unwrap();
        assert_eq!(recorded, FIRST);
    }
    let held: Vec<_> = (0..OTHERS).map(|id| key("held", id)).collect();
    claim_all(&adapter, &held, &mine).await.unwrap();

    // One claim blocks the only lane, so the other calls form one batch.
    let gate = database.gate("BEFORE INSERT ON webhook_deliveries").await;
    let first = tokio::spawn({
        let adapter = adapter.clone();
        async move { adapter.claim(&key("first", 0), &terms()).await }
    });
    database.until_sessions(AT_A_GATE, 1).await;
    let claims = |of: &'static str, count: usize| {
        let adapter = adapter.clone();
        let claims = (0..count).map(move |id| {
            let adapter = adapter.clone();
            tokio::spawn(async move { adapter.claim(&key(of, id), &terms()).await.unwrap() })
        });
        join_all(claims.collect::<Vec<_>>())
    };
    let completions = (0..OTHERS).map(|id| {
        let (adapter, mine) = (adapter.clone(), mine.clone());
        tokio::spawn(async move { adapter.complete(&key("held", id), &mine).await.unwrap() })
    });
    let completions = join_all(completions.collect::<Vec<_>>());
    let (duplicates, new) = (claims("known", DUPLICATES), claims("new", OTHERS));
    // The runtime has one thread, so the yields let every task queue its call.
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    drop(gate);
    assert_eq!(first.await.unwrap().unwrap(), ClaimReply::first(1, false));
    for completed in completions.await {
        assert_eq!(completed.unwrap(), CompleteReply::Held);
    }
    for claimed in new.await {
        assert_eq!(claimed.unwrap(), ClaimReply::first(1, false));
    }
    for claimed in duplicates.await {
        let claimed = claimed.unwrap();
        assert!(matches!(claimed, ClaimReply::Duplicate(_)), "{claimed:?}");
    }
    let count = async |such: &str| -> i64 {
        let sql = format!("SELECT count(*) FROM webhook_deliveries WHERE {such}");
        let count = sqlx::query_scalar(sqlx::AssertSqlSafe(sql));
        count.fetch_one(database.effects.pool()).await.unwrap()
    };
    // A lock sets `xmax`, as a write does.
    assert_eq!(count("id LIKE 'known-%' AND xmax <> '0'").await, 0);
}

/// Two adapters get copies of the same events, and each COMMIT takes 60 ms. A batch waits for row
/// locks of the other batch until `lock_timeout`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batches_over_slow_commits_are_rarely_rolled_back() {
    const CALLERS: usize = 32;
    const ROUNDS: usize = 24;
    const ATTEMPTS: usize = 3;
    let server = Server::start();
    let pool = PgPoolOptions::new().max_connections(2).connect(&server.url()).await.unwrap();
    let processes = [(); 2].map(|()| PostgresAdapter::new(pool.clone()));
    processes[0].migrate().await.unwrap();
    for sql in [
        "ALTER SYSTEM SET fsync = on",
        "ALTER SYSTEM SET commit_siblings = 0",
        "ALTER SYSTEM SET commit_delay = 60000",
        "SELECT pg_reload_conf()",
    ] {
        sqlx::query(sql).execute(&pool).await.unwrap();
    }
    let rolled_back = || server.log().matches("due to lock timeout").count();
    let mut longest = Duration::ZERO;
    let mut counts = Vec::new();
    // Rollbacks of the first third, in which the server takes up its settings.
    let mut before = 0;
    for round in 0..ATTEMPTS * ROUNDS {
        if round % ROUNDS == ROUNDS / 3 {
            before = rolled_back();
        }
        let start = Instant::now();
        let copies = processes.iter().flat_map(|process| {
            (0..CALLERS).map(move |id| {
                let process = process.clone();
                tokio::spawn(async move {
                    process.claim(&key(&format!("{round}"), id), &terms()).await.unwrap()
                })
            })
        });
        let mut first = 0;
        for claimed in join_all(copies.collect::<Vec<_>>()).await {
            first += usize::from(claimed.unwrap() == ClaimReply::first(1, false));
        }
        assert_eq!(first, CALLERS);
        longest = longest.max(start.elapsed());
        if round % ROUNDS == ROUNDS - 1 {
            counts.push(rolled_back() - before);
            println!("{counts:?} rolled back, longest round {longest:?}");
            // If `lock_timeout` were shorter than a COMMIT, more than one batch a round would be rolled
            // back in every attempt. A busy machine may spoil one attempt.
            if counts.last().is_some_and(|count| *count <= 6) {
                return;
            }
        }
    }
    panic!("{counts:?} batches were rolled back");
}
