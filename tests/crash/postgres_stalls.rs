//! Locks, commits and pools that stall: calls fail in time, sessions do not pile up on the server, and
//! the next calls succeed.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use sqlx::postgres::PgPoolOptions;
use sqlx::{Postgres, Transaction};
use tokio::time::timeout;
use tower_dedup::adapter::contract::{CallTerms, ClaimReply, DedupAdapter, RenewReply, Token};
use tower_dedup::adapter::maintenance::{ForgetReply, ListFilter, MaintenanceAdapter};
use tower_dedup::adapter::{PostgresAdapter, PostgresOptions};
use tower_dedup::{StoreError, StoreErrorKind};

use super::postgres_silence::{
    Build, IN_TIME, STATEMENT_TIMEOUT, WARM, adapter, adapter_with, lease, on_arrival, sound,
    without_a_transaction,
};
use support::effects::{Database, Gate, MINUTE, until_acknowledged};
use support::proxy::{through, to_postgres};
use support::{FIRST, dedup_key, request, send, until_async};

/// How soon a service recovers.
const SOON: Duration = Duration::from_secs(5);
/// At most so many sessions of an adapter are on a server that keeps those of abandoned statements: eight, as many as
/// there are connections, four that read, the two probes, and those that look for them.
const MOST: i64 = 8 + 12 + 4 + 2 + 2;
/// The server does not notice that a client has gone, as while its statement waits for a standby.
const KEEPS_SESSIONS: &[(&str, &str)] = &[("client_connection_check_interval", "1h")];
/// The server does not show the statements of its sessions.
const BLIND: (&str, &str) = ("track_activities", "off");

/// What statements of the adapter wait for.
enum Stall {
    Lock { _transaction: Transaction<'static, Postgres> },
    Commit { _gate: Gate },
}

impl Stall {
    /// `COMMIT` stalls commits of new keys, as a standby that is missing; any other word locks the table in this mode.
    async fn begin(database: &Database, word: &str) -> Self {
        if word == "COMMIT" {
            let _gate = database.gate("COMMIT AFTER INSERT OR UPDATE ON webhook_deliveries").await;
            return Self::Commit { _gate };
        }
        let mut transaction = database.effects.pool().begin().await.unwrap();
        let lock = format!("LOCK TABLE webhook_deliveries IN {word} MODE");
        sqlx::raw_sql(sqlx::AssertSqlSafe(lock)).execute(&mut *transaction).await.unwrap();
        Self::Lock { _transaction: transaction }
    }
}

/// A session locks the whole table, as `CREATE INDEX` without `CONCURRENTLY` or `ALTER TABLE` does, or a standby is missing.
/// Calls fail in time, sessions do not pile up on the server, and the next calls succeed soon after it has ended.
#[tokio::test]
async fn locked_table_piles_up_no_sessions() {
    let all = [lease as Build, on_arrival].into_iter().flat_map(|build| {
        ["SHARE", "ACCESS EXCLUSIVE", "COMMIT"].map(|word| stalled(build, word, KEEPS_SESSIONS))
    });
    // The adapter cannot ask the server for the probe.
    let blind = [KEEPS_SESSIONS, &[BLIND]].concat();
    let blind = stalled(lease, "ACCESS EXCLUSIVE", &blind);
    tokio::join!(join_all(all), blind);
}

async fn stalled(build: Build, word: &str, settings: &[(&str, &str)]) {
    let database = Database::fresh().await;
    let pool = database.pool_set(4, settings);
    // The server is asked for the probe as often.
    let adapter = adapter_with(&pool, STATEMENT_TIMEOUT / 3);
    adapter.migrate().await.unwrap();
    let (_, service) = build(&pool, adapter.clone(), sound(&database));
    until_acknowledged(&service, WARM).await;
    let stall = Stall::begin(&database, word).await;
    let (start, mut most, mut half, mut stuck) = (Instant::now(), 0, 0, 0);
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
        // Once few statements are sent, a write that stalls delays no duplicate.
        if word == "COMMIT" && start.elapsed() > 6 * STATEMENT_TIMEOUT {
            let known = timeout(SOON, until_acknowledged(&service, WARM));
            known.await.expect("an answer to the duplicate");
        }
        most = most.max(database.sessions("true").await);
        stuck = database.sessions("wait_event_type = 'Lock' OR wait_event = 'PgSleep'").await;
        if start.elapsed() < 6 * STATEMENT_TIMEOUT {
            half = stuck;
        }
    }
    assert!(most <= MOST, "{most} sessions under {word}");
    // The probes that the server runs are not abandoned soon.
    assert!(stuck <= half + 5, "{half} stuck sessions, then {stuck}, under {word}");
    drop(stall);
    let unlocked = Instant::now();
    until_acknowledged(&service, "after").await;
    assert!(unlocked.elapsed() < SOON, "{:?} after {word}", unlocked.elapsed());
    assert_eq!(database.effects.of("after").await, 1);
    database.until_no_transaction_is_open().await;
}

/// A failover ends a lock while a probe waits that has a minute: the old connections carry no bytes, and new ones lead to
/// a healthy server. Or the lock lasts on. With the default timeouts, for each ledger; the handlers need no pool.
#[tokio::test]
async fn service_recovers_within_10_s_if_a_lock_ends_by_silent_connections() {
    let ledgers = [(lease as Build, true), (on_arrival, false), (without_a_transaction, true)];
    join_all(ledgers.map(async |(build, ends_at_once)| {
        let database = Database::fresh().await;
        let proxy = to_postgres(&database.options()).await;
        let options = through(proxy.port(), database.options());
        let pool = database.pool_with(4, options.options(KEEPS_SESSIONS.iter().copied()));
        let (_, service) = build(&pool, PostgresAdapter::new(pool.clone()), sound(&database));
        until_acknowledged(&service, WARM).await;
        let stall = Stall::begin(&database, "ACCESS EXCLUSIVE").await;
        let (start, mut most) = (Instant::now(), 0);
        while start.elapsed() < Duration::from_secs(20) {
            let crowd = (0..4).map(|number| {
                let (service, id) = (service.clone(), format!("{number}-{:?}", start.elapsed()));
                async move { assert_eq!(send(&service, request(&id)).await.status(), 503) }
            });
            join_all(crowd).await;
            most = most.max(database.sessions("true").await);
        }
        assert!(most <= MOST, "{most} sessions");
        proxy.silence();
        if !ends_at_once {
            tokio::time::sleep(SOON).await;
        }
        drop(stall);
        let ended = Instant::now();
        until_acknowledged(&service, "after").await;
        assert!(ended.elapsed() < Duration::from_secs(10), "after {:?}", ended.elapsed());
        assert_eq!(database.effects.of("after").await, 1);
    }))
    .await;
}

/// A program of an operator has no bound of its own. A standby that is missing delays no read.
#[tokio::test]
async fn calls_of_operators_end_in_time_while_statements_are_abandoned() {
    let bound = 2 * STATEMENT_TIMEOUT / 3;
    join_all(["ACCESS EXCLUSIVE", "COMMIT"].map(async |word| {
        let database = Database::fresh().await;
        let adapter = adapter_with(&database.pool_set(4, KEEPS_SESSIONS), bound);
        let (warm, terms) = (dedup_key(WARM), || CallTerms::on_claim(Token::random(), MINUTE));
        adapter.claim(&warm, &terms()).await.unwrap();
        let stall = Stall::begin(&database, word).await;
        // The last of them is the probe, whose caller goes.
        for new in 0..9 {
            let (key, terms) = (dedup_key(&new.to_string()), terms());
            let claimed = timeout(2 * bound, adapter.claim(&key, &terms)).await;
            assert!(!matches!(claimed, Ok(Ok(_))), "{word}: {claimed:?}");
        }
        // Statements over many rows have six times as long.
        let within = |times: u32| times * bound + Duration::from_secs(2);
        let (expected, start) = (word == "COMMIT", Instant::now());
        let mut most = 0;
        while start.elapsed() < 8 * bound {
            let (filter, again) = (ListFilter::default(), terms());
            let forgets = join_all((0..50).map(|_| adapter.forget(&warm)));
            let (get, forgotten, duplicate, list, stats, purge) = tokio::join!(
                timeout(within(1), adapter.get(&warm)),
                timeout(within(2), forgets),
                timeout(within(1), adapter.claim(&warm, &again)),
                timeout(within(6), adapter.list(&filter, None, 10)),
                timeout(within(6), adapter.stats()),
                timeout(within(6), adapter.purge(10)),
            );
            let replied = |error: Option<StoreError>| {
                let is_late = |error: &StoreError| error.kind() == StoreErrorKind::Timeout;
                assert!(error.as_ref().is_none_or(is_late), "{word}: {error:?}");
                error.is_none()
            };
            let read = [
                replied(get.expect("a reply to `get`").err()),
                replied(list.expect("a reply to `list`").err()),
                replied(stats.expect("a reply to `stats`").err()),
            ];
            assert_eq!(read, [expected; 3], "{word}");
            // The caller of a claim has a bound.
            let is_known = matches!(duplicate, Ok(Ok(ClaimReply::Duplicate(_))));
            assert_eq!(is_known, expected, "{word}: {duplicate:?}");
            for forgotten in forgotten.expect("a reply to `forget`") {
                // A forget that was abandoned may hold the row.
                assert!(!matches!(forgotten, Ok(ForgetReply::Removed)), "{word}");
                replied(forgotten.err());
            }
            // A purge that deletes nothing waits for no standby, only for its turn.
            replied(purge.expect("a reply to `purge`").err());
            most = most.max(database.sessions("true").await);
        }
        assert!(most <= MOST, "{most} sessions under {word}");
        drop(stall);
        let ended = Instant::now();
        until_async(async || adapter.purge(10).await.is_ok()).await;
        assert!(ended.elapsed() < SOON, "{:?} after {word}", ended.elapsed());
    }))
    .await;
}

/// No delivery sends anything. A call that was abandoned in its turn would leave one more session each time.
#[tokio::test]
async fn calls_of_operators_alone_pile_up_no_sessions() {
    let database = Database::fresh().await;
    let adapter = adapter_with(&database.pool_set(4, KEEPS_SESSIONS), STATEMENT_TIMEOUT / 3);
    adapter.migrate().await.unwrap();
    let warm = dedup_key(WARM);
    let stall = Stall::begin(&database, "ACCESS EXCLUSIVE").await;
    for _ in 0..20 {
        let gets = join_all((0..4).map(|_| adapter.get(&warm))).await;
        assert!(gets.iter().all(Result::is_err));
    }
    let stuck = database.sessions("state = 'active'").await;
    assert!(stuck <= 8 + 4 + 2, "{stuck} sessions");
    drop(stall);
    let ended = Instant::now();
    until_async(async || adapter.get(&warm).await.is_ok()).await;
    assert!(ended.elapsed() < SOON, "{:?}", ended.elapsed());
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
    let (start, mut most) = (Instant::now(), 0);
    while start.elapsed() < 8 * STATEMENT_TIMEOUT {
        let forgotten = (0..100).map(async |number| {
            let forgotten = adapter.forget(&dedup_key(&number.to_string())).await;
            assert!(!matches!(forgotten, Ok(ForgetReply::Removed)));
        });
        let looked = async {
            tokio::time::sleep(STATEMENT_TIMEOUT / 2).await;
            most = most.max(database.sessions("true").await);
        };
        tokio::join!(join_all(forgotten), looked);
    }
    assert!(most <= MOST, "{most} sessions");
    drop(gate);
    let opened = Instant::now();
    until_async(async || adapter.forget(&dedup_key("0")).await.is_ok()).await;
    assert!(opened.elapsed() < SOON, "{:?} after the gate has opened", opened.elapsed());
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
        let proxy = to_postgres(&database.options()).await;
        // The adapter cannot ask the server for the probe, so the probe waits for its bound.
        let blind = through(proxy.port(), database.options()).options([BLIND]);
        let pool = database.pool_with(2, blind);
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
                let renewed = timeout(IN_TIME, adapter.renew(&held, &mine)).await;
                assert!(renewed.expect("an end").is_err());
            } else {
                let purged = timeout(Duration::from_millis(100), adapter.purge(10)).await;
                assert!(purged.is_err());
            }
        }
        locked.rollback().await.unwrap();
        if renews {
            assert_eq!(adapter.renew(&held, &mine).await.unwrap(), RenewReply::Held);
        } else {
            // The probe before it goes on without its caller.
            adapter.purge(10).await.unwrap();
            let rows = sqlx::query_scalar("SELECT count(*) FROM webhook_deliveries");
            let rows: i64 = rows.fetch_one(database.effects.pool()).await.unwrap();
            assert_eq!(rows, 1);
        }
        proxy.silence();
        let silent = Instant::now();
        // A claim would read first.
        if renews {
            until_async(async || adapter.renew(&held, &mine).await.is_ok()).await;
        } else {
            until_async(async || adapter.purge(10).await.is_ok()).await;
        }
        assert!(silent.elapsed() < Duration::from_secs(5), "{:?}, {renews}", silent.elapsed());
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
    until_async(async || adapter.release(&keys, &mine).await.is_ok()).await;
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
