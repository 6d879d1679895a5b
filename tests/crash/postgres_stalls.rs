//! Locks, commits and pools that stall: calls fail in time, sessions do not pile up on the server, and
//! the next calls succeed.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use sqlx::postgres::PgPoolOptions;
use tokio::time::timeout;
use tower_dedup::adapter::contract::{CallTerms, DedupAdapter, RenewReply, Token};
use tower_dedup::adapter::inspect::MaintenanceAdapter;
use tower_dedup::adapter::{PostgresAdapter, PostgresOptions};

use super::postgres_silence::{
    Build, IN_TIME, STATEMENT_TIMEOUT, WARM, adapter, lease, on_arrival, sound, until,
};
use support::effects::{Database, MINUTE, until_acknowledged};
use support::{FIRST, dedup_key, request, send};

/// How soon a service recovers.
const SOON: Duration = Duration::from_secs(5);
/// At most so many sessions of an adapter are on a server that keeps those of abandoned statements: eight, as many as
/// there are connections, and the probe.
const MOST: i64 = 8 + 12 + 1;
/// The server does not notice that a client has gone, as while its statement waits for a standby.
const KEEPS_SESSIONS: &[(&str, &str)] = &[("client_connection_check_interval", "1h")];

/// A session locks the whole table, as `CREATE INDEX` without `CONCURRENTLY` or `ALTER TABLE` does.
/// Calls fail in time, sessions do not pile up on the server, and the next calls succeed soon after it has ended.
#[tokio::test]
async fn locked_table_piles_up_no_sessions() {
    let locked = [lease as Build, on_arrival]
        .into_iter()
        .flat_map(|build| ["SHARE", "ACCESS EXCLUSIVE"].map(|mode| locked_table(build, mode)));
    join_all(locked).await;
}

async fn locked_table(build: Build, mode: &str) {
    let database = Database::fresh().await;
    let pool = database.pool_set(4, KEEPS_SESSIONS);
    let adapter = adapter(&pool);
    adapter.migrate().await.unwrap();
    let (_, service) = build(&pool, adapter.clone(), sound(&database));
    until_acknowledged(&service, WARM).await;
    let mut locked = database.effects.pool().begin().await.unwrap();
    let lock = format!("LOCK TABLE webhook_deliveries IN {mode} MODE");
    sqlx::raw_sql(sqlx::AssertSqlSafe(lock)).execute(&mut *locked).await.unwrap();
    let (start, mut most) = (Instant::now(), 0);
    while start.elapsed() < 12 * STATEMENT_TIMEOUT {
        let crowd = (0..4).map(|number| {
            let (service, id) = (service.clone(), format!("{number}-{:?}", start.elapsed()));
            async move {
                let sent = Instant::now();
                assert_eq!(send(&service, request(&id)).await.status(), 503);
                assert!(sent.elapsed() < IN_TIME, "answered after {:?}", sent.elapsed());
            }
        });
        join_all(crowd).await;
        // A reply to a statement that only reads says nothing of those that write.
        let _ = timeout(STATEMENT_TIMEOUT / 10, adapter.get(&dedup_key(WARM))).await;
        most = most.max(database.sessions("true").await);
    }
    assert!(most <= MOST, "{most} sessions under {mode}");
    locked.rollback().await.unwrap();
    let unlocked = Instant::now();
    until_acknowledged(&service, "after").await;
    assert!(unlocked.elapsed() < SOON, "{:?} after {mode}", unlocked.elapsed());
    assert_eq!(database.effects.of("after").await, 1);
    database.until_no_transaction_is_open().await;
}

/// Their commits wait, as for a standby that is missing.
#[tokio::test]
async fn keys_that_are_forgotten_pile_up_no_sessions() {
    let database = Database::fresh().await;
    let adapter = adapter(&database.pool_set(1, KEEPS_SESSIONS));
    let claim = async |number: usize| {
        let terms = CallTerms::on_claim(Token::random(), MINUTE);
        adapter.claim(&dedup_key(&number.to_string()), &terms).await.unwrap();
    };
    join_all((0..100).map(claim)).await;
    let gate = database.gate("COMMIT AFTER UPDATE ON webhook_deliveries").await;
    let forgotten: Vec<_> = (0..100)
        .map(|number| {
            let (adapter, key) = (adapter.clone(), dedup_key(&number.to_string()));
            tokio::spawn(async move { adapter.forget(&key).await.is_ok() })
        })
        .collect();
    let (start, mut most) = (Instant::now(), 0);
    while start.elapsed() < 8 * STATEMENT_TIMEOUT {
        most = most.max(database.sessions("true").await);
        tokio::time::sleep(STATEMENT_TIMEOUT / 10).await;
    }
    assert!(most <= MOST, "{most} sessions");
    drop(gate);
    let opened = Instant::now();
    let forgotten = join_all(forgotten).await;
    assert!(opened.elapsed() < SOON, "{:?} after the gate has opened", opened.elapsed());
    // Those that were abandoned have failed.
    let failed = forgotten.iter().filter(|forgotten| !*forgotten.as_ref().unwrap()).count();
    assert!((1..20).contains(&failed), "{failed} have failed");
}

/// The lock of the table would keep the session of an abandoned statement for as long as it lasts. The server ends the
/// session, because its client has gone.
#[tokio::test]
async fn abandoned_statement_leaves_the_server_while_the_table_is_locked() {
    let database = Database::fresh().await;
    let adapter = adapter(&database.pool(4));
    let claim = async |id| {
        let terms = CallTerms::on_claim(Token::random(), MINUTE);
        adapter.claim(&dedup_key(id), &terms).await
    };
    claim(WARM).await.unwrap();
    let mut locked = database.effects.pool().begin().await.unwrap();
    let lock = sqlx::raw_sql("LOCK TABLE webhook_deliveries");
    lock.execute(&mut *locked).await.unwrap();
    assert!(claim("a").await.is_err());
    database.until_sessions("wait_event_type = 'Lock'", 0).await;
    locked.rollback().await.unwrap();
}

/// Of a service that completes its events in its own transactions, often no other statement waits for the disk: if
/// renewals and purges that succeed did not count, the adapter would send one statement at a time for ever, and a
/// connection that falls silent would keep it down.
#[tokio::test]
async fn abandoned_renewals_and_purges_are_over_once_one_succeeds() {
    join_all([true, false].map(async |renews| {
        let database = Database::fresh().await;
        let (proxy, pool) = database.proxied(2).await;
        let options = PostgresOptions::new().statement_timeout(Duration::from_millis(500));
        let adapter = PostgresAdapter::with_options(pool, options);
        let terms = || CallTerms::on_completion(Token::random(), MINUTE, MINUTE);
        let (held, complete, mine) = (dedup_key("held"), dedup_key("complete"), terms());
        assert_eq!(adapter.claim(&held, &mine).await.unwrap(), FIRST);
        adapter.claim(&complete, &CallTerms::on_claim(Token::random(), MINUTE)).await.unwrap();
        let expire = "UPDATE webhook_deliveries SET expires_at = now() - interval '2 h' WHERE id = 'complete'";
        database.run(expire).await;
        let mut locked = database.effects.pool().begin().await.unwrap();
        let lock = "LOCK TABLE webhook_deliveries";
        sqlx::raw_sql(lock).execute(&mut *locked).await.unwrap();
        // On a busy machine, a purge may be dropped before its statement is sent.
        for _ in 0..if renews { 8 } else { 16 } {
            if renews {
                assert!(adapter.renew(&held, &mine).await.is_err());
            } else {
                let purged = timeout(Duration::from_millis(100), adapter.purge(10)).await;
                assert!(purged.is_err());
            }
        }
        locked.rollback().await.unwrap();
        if renews {
            assert_eq!(adapter.renew(&held, &mine).await.unwrap(), RenewReply::Held);
        } else {
            assert_eq!(adapter.purge(10).await.unwrap(), 1);
        }
        proxy.silence();
        let silent = Instant::now();
        until(async || adapter.claim(&dedup_key("after"), &terms()).await.is_ok()).await;
        assert!(silent.elapsed() < Duration::from_secs(4), "{:?}, {renews}", silent.elapsed());
    }))
    .await;
}

/// The user's own migration makes the table in a transaction that stays open. Calls that find no table fail in
/// time and wait for one migration of theirs.
#[tokio::test]
async fn open_migration_piles_up_no_sessions() {
    let database = Database::fresh().await;
    let pool = database.pool(4);
    let adapter = adapter(&pool);
    let mut theirs = database.effects.pool().begin().await.unwrap();
    for statement in adapter.schema_sql() {
        sqlx::raw_sql(sqlx::AssertSqlSafe(statement)).execute(&mut *theirs).await.unwrap();
    }
    let (_, service) = lease(&pool, adapter, sound(&database));
    let (start, mut most) = (Instant::now(), 0);
    while start.elapsed() < 8 * STATEMENT_TIMEOUT {
        let crowd = (0..4).map(|number| {
            let (service, id) = (service.clone(), format!("{number}-{:?}", start.elapsed()));
            async move { assert_eq!(send(&service, request(&id)).await.status(), 503) }
        });
        join_all(crowd).await;
        most = most.max(database.sessions("true").await);
    }
    assert!(most <= 4 + 2, "{most} sessions");
    theirs.commit().await.unwrap();
    until_acknowledged(&service, "after").await;
    assert_eq!(database.effects.of("after").await, 1);
}

/// The COMMIT of the claim stalls for longer than its statement may take. No other session sees the
/// row yet. If the adapter took the row for absent, the event would be lost when the row appears.
#[tokio::test]
async fn on_arrival_claim_that_waits_in_its_commit_is_not_reported_absent() {
    let database = Database::fresh().await;
    let adapter = adapter(&database.pool(3));
    adapter.migrate().await.unwrap();
    let gate = database.gate("COMMIT AFTER INSERT ON webhook_deliveries").await;
    let (keys, mine) = (dedup_key("a"), CallTerms::on_claim(Token::random(), MINUTE));
    let recorded = timeout(2 * STATEMENT_TIMEOUT, adapter.claim(&keys, &mine));
    assert!(!matches!(recorded.await, Ok(Ok(_))), "the record cannot have ended");
    let start = Instant::now();
    while start.elapsed() < 3 * STATEMENT_TIMEOUT {
        let undone = adapter.release(&keys, &mine);
        let undone = timeout(STATEMENT_TIMEOUT, undone).await;
        assert!(!matches!(undone, Ok(Ok(_))), "{undone:?} after {:?}", start.elapsed());
    }
    drop(gate);
    // The row appears when the COMMIT of the claim ends.
    until(async || adapter.release(&keys, &mine).await.is_ok()).await;
    assert_eq!(adapter.claim(&keys, &mine).await.unwrap(), FIRST);
}

/// A pool that shares the permits of a smaller parent has no more workers than it has connections.
#[tokio::test]
async fn a_pool_with_a_parent_has_workers() {
    let database = Database::fresh().await;
    let parent = database.pool(2);
    let pool = PgPoolOptions::new().max_connections(1).parent(parent);
    let pool = pool.connect_lazy_with(database.options());
    let (_, service) = lease(&pool, adapter(&pool), sound(&database));
    until_acknowledged(&service, "a").await;
}
