//! Deliveries that meet on Postgres: duplicates of a slow delivery, claims beside a user's open
//! transaction, settings of a role, a role with few privileges.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use http::{Request, Response};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection, PgPool, Postgres, Transaction};
use tower::Layer;
use tower::util::BoxCloneSyncService;
use tower_dedup::adapter::{
    CallTerms, Claimed, Completed, DedupAdapter, EntryState, Forgotten, Identifier,
    MaintenanceAdapter, PostgresAdapter, PostgresOptions, Released, Renewed, Token,
    TransactionAdapter,
};
use tower_dedup::{DedupKey, DedupLayer, OnInFlight, ResponseBody};

use crate::support::effects::{
    Database, MINUTE, answer, apart, effect, lend, transactional, until_acknowledged, write,
    writes_and_waits,
};
use crate::support::postgres::Server;
use crate::support::{
    Body, FIRST, Handler, by_header, dedup_key, on_claim, request, result, send, terms, until,
};

/// 200 duplicates of a delivery that does not end, on five connections, and another process with
/// some of the duplicates: all other deliveries go on meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn duplicates_of_a_slow_delivery_delay_no_other_delivery() {
    let database = Database::fresh().await;
    let pool = database.pool(5);
    let held = Handler::default();
    held.hold();
    let slow = writes_and_waits(&held);
    let handler = tower::service_fn(move |request: Request<Body>| {
        let is_slow = request.headers()["webhook-id"] == "slow";
        let slow = slow.clone();
        async move {
            if is_slow {
                tower::ServiceExt::oneshot(slow, request).await
            } else {
                write(request).await
            }
        }
    });
    let layers = [(); 2].map(|()| {
        transactional(&pool).on_in_flight(OnInFlight::Wait(10 * MINUTE)).store_timeout(MINUTE)
    });
    let handles = layers.each_ref().map(DedupLayer::handle);
    let services = layers.map(|layer| layer.layer(handler.clone()));
    send(&services[0], request("the schema is there")).await;

    let deliver = |service: usize, id: String| {
        let service = services[service].clone();
        tokio::spawn(async move { send(&service, request(&id)).await.status() })
    };
    let duplicates: Vec<_> =
        (0..240).map(|copy| deliver(usize::from(copy % 6 == 0), "slow".to_owned())).collect();
    held.running(1).await;
    until(|| handles.iter().map(|handle| handle.waiting()).sum::<usize>() == 239).await;
    for service in 0..2 {
        let others = (0..50).map(|event| deliver(service, format!("{service}-{event}")));
        let others = join_all(others.collect::<Vec<_>>());
        for other in tokio::time::timeout(MINUTE, others)
            .await
            .expect("the other deliveries are not delayed")
        {
            assert_eq!(other.unwrap(), 200);
        }
    }
    assert_eq!(database.effects.of("slow").await, 0);
    held.release();
    for duplicate in join_all(duplicates).await {
        assert_eq!(duplicate.unwrap(), 200);
    }
    assert_eq!((held.runs(), database.effects.of("slow").await), (1, 1));
    database.until_nothing_is_open().await;
}

/// Inserts the row of a key without an adapter.
const INSERT: &str = "INSERT INTO webhook_deliveries \
    (key, namespace, id, attempts, takeover, first_seen_at, expires_at) SELECT \
    encode(substring(sha256(convert_to(E'test\\n' || $1, 'UTF8')) from 1 for 16), 'hex')::uuid, \
    'test', $1, 1, false, now(), now() + interval '1 day'";

/// Asserts that a claim does not wait for the open transaction that holds this key: the key is in
/// flight, and the other keys of a set are granted.
async fn is_in_flight(adapter: &PostgresAdapter, held: &DedupKey) {
    let soon = async {
        let one = std::slice::from_ref(held);
        assert_eq!(adapter.claim(one, &terms()).await.unwrap(), [Claimed::InFlight]);
        assert_eq!(adapter.claim(one, &on_claim(&terms())).await.unwrap(), [Claimed::InFlight]);
        // In the middle of a set, and so at different places in the order of rows.
        for _ in 0..3 {
            let mut keys: Vec<_> =
                (0..15).map(|_| dedup_key(&format!("{:016x}", rand::random::<u64>()))).collect();
            keys.push(held.clone());
            keys.sort_unstable();
            let claimed = adapter.claim(&keys, &terms()).await.unwrap();
            for (key, claimed) in keys.iter().zip(claimed) {
                let granted = Claimed::first(1, false);
                assert_eq!(claimed, if key == held { Claimed::InFlight } else { granted });
            }
        }
        let lease = DedupLayer::new(by_header(), adapter.clone()).store_timeout(MINUTE);
        let service = lease.on_in_flight(OnInFlight::Reject).layer(tower::service_fn(write));
        let answered = send(&service, request(held.id())).await;
        assert_eq!((answered.status().as_u16(), result(&answered)), (503, Some("in-flight")));
        adapter.get(held).await.unwrap();
        adapter.purge(100).await.unwrap();
    };
    tokio::time::timeout(MINUTE, soon).await.expect("the claim does not wait for the transaction");
}

#[tokio::test]
async fn claim_does_not_wait_for_a_transactional_delivery() {
    let database = Database::fresh().await;
    let held = Handler::default();
    let service = transactional(&database.pool(3)).layer(writes_and_waits(&held));
    let adapter = PostgresAdapter::new(database.pool(3));
    // A new row, and a row that was released.
    let claimed = terms();
    adapter.claim(&[dedup_key("released")], &claimed).await.unwrap();
    adapter.release(&[dedup_key("released")], &claimed).await.unwrap();
    for id in ["new", "released"] {
        held.hold();
        let delivery = tokio::spawn({
            let service = service.clone();
            async move { send(&service, request(id)).await.status() }
        });
        held.running(1).await;
        is_in_flight(&adapter, &dedup_key(id)).await;
        held.release();
        assert_eq!(delivery.await.unwrap(), 200);
        let claimed = adapter.claim(&[dedup_key(id)], &terms()).await.unwrap();
        assert!(matches!(claimed[..], [Claimed::Duplicate(_)]), "{claimed:?}");
    }
}

#[tokio::test]
async fn claim_does_not_wait_for_a_users_transaction() {
    let database = Database::fresh().await;
    let pool = database.pool(3);
    let adapter = PostgresAdapter::new(pool.clone());
    adapter.migrate().await.unwrap();
    let transactional = transactional(&pool).on_in_flight(OnInFlight::Reject);
    let transactional = transactional.store_timeout(MINUTE).layer(tower::service_fn(write));

    let mut theirs = database.effects.pool().begin().await.unwrap();
    sqlx::query(INSERT).bind("inserted").execute(&mut *theirs).await.unwrap();
    is_in_flight(&adapter, &dedup_key("inserted")).await;
    let twin = send(&transactional, request("inserted")).await;
    assert_eq!(result(&twin), Some("in-flight"));
    theirs.rollback().await.unwrap();
    assert_eq!(send(&transactional, request("inserted")).await.status(), 200);

    let claimed = terms();
    adapter.claim(&[dedup_key("locked")], &claimed).await.unwrap();
    adapter.release(&[dedup_key("locked")], &claimed).await.unwrap();
    let mut theirs = database.effects.pool().begin().await.unwrap();
    let lock = "SELECT FROM webhook_deliveries WHERE id IN ('locked', 'inserted') FOR UPDATE";
    assert_eq!(theirs.execute(lock).await.unwrap().rows_affected(), 2);
    is_in_flight(&adapter, &dedup_key("locked")).await;
    let twin = send(&transactional, request("locked")).await;
    assert_eq!(result(&twin), Some("in-flight"));
    // A complete row is not written again, so nothing asks for its lock.
    let complete = adapter.claim(&[dedup_key("inserted")], &terms()).await.unwrap();
    assert!(matches!(complete[..], [Claimed::Duplicate(_)]), "{complete:?}");
    assert_eq!(result(&send(&transactional, request("inserted")).await), Some("duplicate"));
    theirs.commit().await.unwrap();
    assert_eq!(send(&transactional, request("locked")).await.status(), 200);
}

/// Two schemas of one database, one for each tenant: a key that is in flight in one is free in the
/// other.
#[tokio::test]
async fn key_of_another_schema_is_another_key() {
    let (one, other) = (Database::fresh().await, Database::fresh().await);
    let held = Handler::default();
    held.hold();
    let slow = transactional(&one.pool(3)).layer(writes_and_waits(&held));
    let delivery = tokio::spawn(async move { send(&slow, request("a")).await.status() });
    held.running(1).await;
    let twin = transactional(&other.pool(3)).on_in_flight(OnInFlight::Reject);
    let twin = twin.store_timeout(MINUTE).layer(tower::service_fn(write));
    assert_eq!(send(&twin, request("a")).await.status(), 200);
    held.release();
    assert_eq!(delivery.await.unwrap(), 200);
}

async fn record_in(
    adapter: &PostgresAdapter,
    transaction: &mut Transaction<'static, Postgres>,
) -> Claimed {
    let key = dedup_key("a");
    let recorded = adapter.record_in(transaction, &key, MINUTE);
    let recorded = tokio::time::timeout(MINUTE, recorded);
    recorded.await.expect("the claim does not wait for the other transaction").unwrap()
}

#[tokio::test]
async fn duplicate_of_a_record_in_an_open_transaction_is_in_flight() {
    let database = Database::fresh().await;
    let pool = database.pool(3);
    let adapter = PostgresAdapter::new(pool.clone());
    adapter.migrate().await.unwrap();
    for commits in [false, true] {
        let (mut one, mut other) = (pool.begin().await.unwrap(), pool.begin().await.unwrap());
        assert_eq!(record_in(&adapter, &mut one).await, FIRST);
        assert_eq!(record_in(&adapter, &mut other).await, Claimed::InFlight);
        // Another table's keys are other keys.
        let options = PostgresOptions::new().table(Identifier::new("elsewhere").unwrap());
        let elsewhere = PostgresAdapter::with_options(pool.clone(), options);
        elsewhere.migrate().await.unwrap();
        assert_eq!(record_in(&elsewhere, &mut other).await, FIRST);
        is_in_flight(&adapter, &dedup_key("a")).await;
        if commits {
            one.commit().await.unwrap();
            let recorded = record_in(&adapter, &mut other).await;
            assert!(matches!(recorded, Claimed::Duplicate(_)), "{recorded:?}");
        } else {
            one.rollback().await.unwrap();
            assert_eq!(record_in(&adapter, &mut other).await, FIRST);
        }
        other.rollback().await.unwrap();
    }
    let entry = adapter.get(&dedup_key("a")).await.unwrap().unwrap();
    assert!(matches!(entry.state, EntryState::Complete { .. }), "{entry:?}");
}

/// All connections are inside transactions that record for the first time: the adapter asks for the
/// table on no other connection.
#[tokio::test]
async fn record_in_needs_no_other_connection() {
    let database = Database::fresh().await;
    PostgresAdapter::new(database.pool(1)).migrate().await.unwrap();
    let pool = database.pool(1);
    let adapter = PostgresAdapter::new(pool.clone());
    let mut transaction = pool.begin().await.unwrap();
    assert_eq!(record_in(&adapter, &mut transaction).await, FIRST);
    transaction.commit().await.unwrap();
}

/// Returns a pool whose sessions have these settings, as a role's sessions may have.
fn set(database: &Database, connections: u32, settings: &[(&str, &str)]) -> PgPool {
    let options = database.options().options(settings.iter().copied());
    database.pool_with(connections, options)
}

type Deduplicated = BoxCloneSyncService<Request<Body>, Response<ResponseBody<Body>>, Infallible>;

/// Forty events eight times each, at once, over two services, which stand for two processes.
async fn exactly_once(service: impl Fn(&Database) -> Deduplicated) {
    let database = Database::fresh().await;
    let services = [(); 2].map(|()| service(&database));
    let deliveries = (0..320).map(|copy: usize| {
        let (service, id) = (services[copy % 2].clone(), (copy / 8).to_string());
        tokio::spawn(async move { until_acknowledged(&service, &id).await })
    });
    for delivery in join_all(deliveries.collect::<Vec<_>>()).await {
        delivery.unwrap();
    }
    database.effects.assert_once((0..40).map(|event| event.to_string())).await;
    let complete = "SELECT count(completed_at) FROM webhook_deliveries";
    let complete = sqlx::query_scalar::<_, i64>(complete).fetch_one(database.effects.pool());
    assert_eq!(complete.await.unwrap(), 40);
    database.until_nothing_is_open().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_isolation_level_takes_effect_once() {
    for level in ["repeatable read", "serializable"] {
        let settings = [("default_transaction_isolation", level), ("synchronous_commit", "off")];
        exactly_once(|database| {
            let pool = set(database, 4, &settings);
            Deduplicated::new(transactional(&pool).layer(tower::service_fn(write)))
        })
        .await;
        exactly_once(|database| {
            let adapter = PostgresAdapter::new(set(database, 4, &settings));
            Deduplicated::new(DedupLayer::new(by_header(), adapter).layer(apart(database)))
        })
        .await;
    }
}

/// What is acknowledged waits for the disk, and for the disk of a synchronous standby, although the
/// role's commits do not. COMMIT itself reads the setting. A stronger setting stays, and the weaker
/// setting of claims is obeyed.
#[tokio::test]
async fn complete_key_is_committed_to_disk() {
    for (setting, found) in [
        ("off", "on"),
        ("local", "on"),
        ("remote_write", "on"),
        ("on", "on"),
        ("remote_apply", "remote_apply"),
    ] {
        let database = Database::fresh().await;
        let pool = set(&database, 3, &[("synchronous_commit", setting)]);
        let adapter = PostgresAdapter::new(pool.clone());
        adapter.migrate().await.unwrap();
        database
            .run(
                "CREATE TABLE commits (complete bool, setting text); \
                 CREATE FUNCTION look() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
                 INSERT INTO commits \
                 SELECT NEW.completed_at IS NOT NULL, current_setting('synchronous_commit'); \
                 RETURN NEW; END $$; \
                 CREATE CONSTRAINT TRIGGER look AFTER INSERT OR UPDATE ON webhook_deliveries \
                 INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION look()",
            )
            .await;
        // Even if the handler changes the setting of the role.
        let handler = tower::service_fn(move |request: Request<Body>| async move {
            let again = AssertSqlSafe(format!("SET synchronous_commit = {setting}"));
            lend(&request).execute(sqlx::raw_sql(again)).await.unwrap();
            write(request).await
        });
        until_acknowledged(&transactional(&pool).layer(handler), "transactional").await;
        let mut transaction = pool.begin().await.unwrap();
        let recorded = adapter.record_in(&mut transaction, &dedup_key("user's"), MINUTE).await;
        assert_eq!(recorded.unwrap(), FIRST);
        transaction.commit().await.unwrap();
        let service = DedupLayer::on_arrival(by_header(), adapter.clone());
        until_acknowledged(&service.layer(apart(&database)), "on arrival").await;
        let service = DedupLayer::new(by_header(), adapter.clone());
        until_acknowledged(&service.layer(apart(&database)), "lease").await;
        let commits = async || -> Vec<(bool, String)> {
            let all = sqlx::query_as("SELECT DISTINCT * FROM commits ORDER BY 1, 2");
            all.fetch_all(database.effects.pool()).await.unwrap()
        };
        assert_eq!(commits().await, [false, true].map(|complete| (complete, found.to_owned())));

        let options = PostgresOptions::new().asynchronous_claims(true);
        let asynchronous = PostgresAdapter::with_options(pool.clone(), options);
        let service = DedupLayer::new(by_header(), asynchronous);
        database.run("TRUNCATE commits").await;
        until_acknowledged(&service.layer(apart(&database)), "asynchronous").await;
        assert_eq!(commits().await, [(false, "off".to_owned()), (true, found.to_owned())]);
    }
}

async fn shows(connection: &mut PgConnection) -> String {
    sqlx::query_scalar("SHOW lock_timeout").fetch_one(connection).await.unwrap()
}

/// The user's settings bound the handler's waits; the limits of a claim do not apply there.
#[tokio::test]
async fn lock_timeout_of_the_user_applies_in_the_handler() {
    for setting in ["7s", "0"] {
        let database = Database::fresh().await;
        let pool = set(&database, 3, &[("lock_timeout", setting)]);
        let adapter = PostgresAdapter::new(pool.clone());
        let (found, mut finds) = tokio::sync::mpsc::unbounded_channel();
        let service =
            transactional(&pool).layer(tower::service_fn(move |request: Request<Body>| {
                let found = found.clone();
                async move {
                    found.send(shows(&mut lend(&request)).await).unwrap();
                    write(request).await
                }
            }));
        // A new row, a row that was released, a row that is taken over.
        for (id, lease) in [("released", MINUTE), ("lapsed", Duration::ZERO)] {
            let claimed = CallTerms::on_completion(Token::random(), MINUTE, lease);
            adapter.claim(&[dedup_key(id)], &claimed).await.unwrap();
            if lease == MINUTE {
                adapter.release(&[dedup_key(id)], &claimed).await.unwrap();
            }
        }
        for id in ["new", "released", "lapsed"] {
            until_acknowledged(&service, id).await;
            assert_eq!(finds.recv().await.unwrap(), setting, "{id}");
        }
        let mut one = pool.begin().await.unwrap();
        let mut other = pool.begin().await.unwrap();
        assert_eq!(record_in(&adapter, &mut one).await, FIRST);
        assert_eq!(record_in(&adapter, &mut other).await, Claimed::InFlight);
        assert_eq!([shows(&mut one).await, shows(&mut other).await], [setting; 2]);
        one.commit().await.unwrap();
        assert!(matches!(record_in(&adapter, &mut other).await, Claimed::Duplicate(_)));
        assert_eq!(shows(&mut other).await, setting);
        other.rollback().await.unwrap();
    }
}

/// A trigger skips the UPDATE, as if another claim had taken the row after it was read.
#[tokio::test]
async fn lock_timeout_of_the_user_is_restored_after_a_claim_that_finds_the_row_taken() {
    let database = Database::fresh().await;
    let pool = set(&database, 3, &[("lock_timeout", "7s")]);
    let adapter = PostgresAdapter::new(pool.clone());
    for id in ["event", "a"] {
        let claimed = CallTerms::on_completion(Token::random(), MINUTE, MINUTE);
        adapter.claim(&[dedup_key(id)], &claimed).await.unwrap();
        adapter.release(&[dedup_key(id)], &claimed).await.unwrap();
    }
    let skip = "CREATE FUNCTION skip() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
                RETURN NULL; END $$; CREATE TRIGGER skip BEFORE UPDATE ON webhook_deliveries \
                FOR EACH ROW EXECUTE FUNCTION skip()";
    database.run(skip).await;
    let mut users = pool.begin().await.unwrap();
    assert_eq!(record_in(&adapter, &mut users).await, Claimed::InFlight);
    assert_eq!(shows(&mut users).await, "7s");
    users.rollback().await.unwrap();

    // Another key of the delivery is granted, so its handler runs.
    let terms = CallTerms::on_completion(Token::random(), MINUTE, MINUTE);
    let opened = adapter.open(&[dedup_key("a"), dedup_key("b")], &terms).await.unwrap();
    assert_eq!(opened.replies, [Claimed::InFlight, FIRST]);
    let mut transaction = opened.transaction.unwrap();
    assert_eq!(shows(transaction.connection()).await, "7s");
    adapter.rollback(transaction).await.unwrap();
}

/// The server ends the session of a handler that is idle for too long: the answer is no success,
/// and the pool recovers.
#[tokio::test]
async fn session_ended_while_its_handler_is_idle_is_no_success() {
    let database = Database::fresh().await;
    PostgresAdapter::new(database.pool(1)).migrate().await.unwrap();
    let pool = set(&database, 2, &[("idle_in_transaction_session_timeout", "500ms")]);
    let held = Handler::default();
    let service = transactional(&pool).layer(writes_and_waits(&held));
    for id in ["a", "b", "c", "d"] {
        held.hold();
        let delivery = tokio::spawn({
            let service = service.clone();
            async move { send(&service, request(id)).await.status() }
        });
        held.running(1).await;
        database.until_nothing_is_open().await;
        held.release();
        let answered = delivery.await.unwrap();
        assert!(answered.is_server_error(), "{answered}");
        assert_eq!(database.effects_and_key(id).await, 0);
        until_acknowledged(&service, id).await;
        assert_eq!(database.effects_and_key(id).await, 1);
    }
}

/// A statement of the handler takes too long, whether the handler reports it or not; or the
/// completion takes too long.
#[tokio::test]
async fn statement_that_takes_too_long_is_no_success() {
    let database = Database::fresh().await;
    PostgresAdapter::new(database.pool(1)).migrate().await.unwrap();
    let pool = set(&database, 2, &[("statement_timeout", "1s")]);
    let slow = Arc::new(AtomicBool::new(true));
    let handler = tower::service_fn({
        let slow = Arc::clone(&slow);
        move |request: Request<Body>| {
            let slow = slow.load(Ordering::SeqCst);
            async move {
                let is_for = |id| slow && request.headers()["webhook-id"] == id;
                let (told, swallowed) = (is_for("told"), is_for("swallowed"));
                let mut tx = lend(&request);
                let mut written = effect(&mut tx, request.extensions().get().unwrap()).await;
                if told || swallowed {
                    let ended = sqlx::query("SELECT pg_sleep(600)").execute(&mut *tx).await;
                    assert!(ended.is_err());
                    written = written.and(if told { ended.map(drop) } else { Ok(()) });
                }
                Ok::<_, Infallible>(answer(written.is_ok()))
            }
        }
    });
    let service = transactional(&pool).store_timeout(MINUTE).layer(handler);
    for id in ["told", "swallowed", "completion"] {
        slow.store(true, Ordering::SeqCst);
        let gate = match id {
            "completion" => Some(database.gate("BEFORE UPDATE ON webhook_deliveries").await),
            _ => None,
        };
        let answered = send(&service, request(id)).await;
        let expected = match id {
            "told" => (500, None),
            "swallowed" => (500, Some("uncommitted")),
            _ => (503, Some("unavailable")),
        };
        assert_eq!((answered.status().as_u16(), result(&answered)), expected);
        assert_eq!(database.effects_and_key(id).await, 0);
        slow.store(false, Ordering::SeqCst);
        drop(gate);
        until_acknowledged(&service, id).await;
        assert_eq!(database.effects_and_key(id).await, 1);
        database.until_nothing_is_open().await;
    }
}

/// The handler's writes and the key are committed together. A handler that ends the transaction, or
/// begins another one, is no success, and its connection is clean afterwards.
#[tokio::test]
async fn handler_that_ends_its_transaction_is_no_success() {
    let database = Database::fresh().await;
    let pool = database.pool(2);
    let handler = tower::service_fn(async |request: Request<Body>| {
        let sql = request.headers()["webhook-id"].to_str().unwrap().to_owned();
        let mut tx = lend(&request);
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut *tx).await.unwrap();
        effect(&mut tx, request.extensions().get().unwrap()).await.unwrap();
        Ok::<_, Infallible>(answer(true))
    });
    let layer = transactional(&pool).on_in_flight(OnInFlight::Reject);
    let service = layer.layer(handler);
    for sql in [
        "ROLLBACK",
        "ROLLBACK AND CHAIN",
        "ROLLBACK; BEGIN",
        "COMMIT",
        "COMMIT AND CHAIN",
        "COMMIT; BEGIN",
    ] {
        let answered = send(&service, request(sql)).await;
        assert_eq!(result(&answered), Some("uncommitted"), "{sql}");
        database.until_nothing_is_open().await;
        let complete = "SELECT count(*) FROM webhook_deliveries WHERE completed_at IS NOT NULL";
        let complete = sqlx::query_scalar::<_, i64>(complete).fetch_one(database.effects.pool());
        assert_eq!(complete.await.unwrap(), 0, "{sql}");
        // The effect is there only if the handler committed it by itself, or wrote it without a
        // transaction.
        let expected = i64::from(matches!(sql, "ROLLBACK" | "COMMIT"));
        assert_eq!(database.effects.of(sql).await, expected, "{sql}");
    }
    for sql in ["SELECT 1", "SAVEPOINT mine", "SAVEPOINT mine; ROLLBACK TO mine"] {
        assert_eq!(send(&service, request(sql)).await.status(), 200, "{sql}");
        assert_eq!(database.effects_and_key(sql).await, 1, "{sql}");
        database.until_nothing_is_open().await;
    }
}

/// A handler leaks the guard of a savepoint, and sqlx counts one transaction too many. The
/// connection must not go back to the pool like that, because the next writes would never be
/// committed. The pool has one connection, and a caller waits for it all the time.
#[tokio::test]
async fn leaked_savepoint_leaves_no_connection_in_its_transaction() {
    for (status, broken) in [(200, false), (200, true), (500, false)] {
        let database = Database::fresh().await;
        let pool = database.pool(1);
        let adapter = PostgresAdapter::new(pool.clone());
        adapter.migrate().await.unwrap();
        let held = Handler::default();
        held.hold();
        let handler = tower::service_fn({
            let held = held.clone();
            move |request: Request<Body>| {
                let held = held.clone();
                async move {
                    let mut tx = lend(&request);
                    effect(&mut tx, request.extensions().get().unwrap()).await.unwrap();
                    std::mem::forget(tx.begin().await.unwrap());
                    if broken {
                        tx.execute("SELECT nonsense").await.unwrap_err();
                    }
                    held.run(request).await.unwrap();
                    Ok::<_, Infallible>(answer(status == 200))
                }
            }
        });
        let service = transactional(&pool).layer(handler);
        let delivery = tokio::spawn(async move { send(&service, request("leaks")).await.status() });
        held.running(1).await;
        let records = (0..5).map(|record| {
            let (adapter, keys) = (adapter.clone(), [dedup_key(&record.to_string())]);
            tokio::spawn(async move { adapter.claim(&keys, &on_claim(&terms())).await.unwrap() })
        });
        let records: Vec<_> = records.collect();
        tokio::task::yield_now().await;
        held.release();
        assert_eq!(delivery.await.unwrap(), 500);
        for record in records {
            assert_eq!(record.await.unwrap(), [FIRST]);
        }
        let complete = "SELECT count(completed_at) FROM webhook_deliveries";
        let complete = sqlx::query_scalar::<_, i64>(complete).fetch_one(database.effects.pool());
        assert_eq!(complete.await.unwrap(), 5, "status {status}, broken: {broken}");
        assert_eq!(database.effects.of("leaks").await, 0);
        database.until_nothing_is_open().await;
    }
}

/// Once the table exists, the four privileges on it are enough for everything.
#[tokio::test]
async fn role_needs_select_insert_update_and_delete_only() {
    let server = Server::start();
    let admin = PgPool::connect(&server.url()).await.unwrap();
    let place = || Identifier::new("keys").unwrap();
    PostgresAdapter::with_options(admin.clone(), PostgresOptions::new().schema(place()))
        .migrate()
        .await
        .unwrap();
    sqlx::raw_sql(
        "REVOKE ALL ON SCHEMA public FROM PUBLIC; REVOKE ALL ON DATABASE postgres FROM PUBLIC; \
         CREATE ROLE app LOGIN; GRANT CONNECT ON DATABASE postgres TO app; \
         GRANT USAGE ON SCHEMA keys TO app; GRANT SELECT, INSERT, UPDATE, DELETE \
         ON keys.webhook_deliveries, keys.webhook_deliveries_schema TO app",
    )
    .execute(&admin)
    .await
    .unwrap();
    let options: PgConnectOptions = server.url().parse().unwrap();
    let pool = PgPoolOptions::new().max_connections(3).connect_lazy_with(options.username("app"));
    let adapter =
        PostgresAdapter::with_options(pool.clone(), PostgresOptions::new().schema(place()));
    let refused = sqlx::query("CREATE TABLE keys.other ()").execute(&pool).await;
    assert!(refused.is_err(), "the role has too many privileges for this test");

    adapter.migrate().await.unwrap();
    let none = CallTerms::on_completion(Token::random(), MINUTE, Duration::ZERO);
    let ([a, b, c], mine) = (["a", "b", "c"].map(|id| [dedup_key(id)]), terms());
    assert_eq!(adapter.claim(&a, &on_claim(&mine)).await.unwrap(), [FIRST]);
    assert_eq!(adapter.release(&a, &on_claim(&mine)).await.unwrap(), [Released::Released]);
    assert_eq!(adapter.claim(&a, &mine).await.unwrap(), [FIRST]);
    assert_eq!(adapter.renew(&a, &mine).await.unwrap(), [Renewed::Held]);
    assert_eq!(adapter.forget(&a[0]).await.unwrap(), Forgotten::InFlight);
    assert_eq!(adapter.complete(&a, &mine).await.unwrap(), [Completed::Held]);
    assert_eq!(adapter.claim(&b, &none).await.unwrap(), [FIRST]);
    assert_eq!(adapter.claim(&b, &mine).await.unwrap(), [Claimed::first(2, true)]);
    assert_eq!(adapter.release(&b, &mine).await.unwrap(), [Released::Released]);
    assert_eq!(adapter.forget(&b[0]).await.unwrap(), Forgotten::Removed);
    let brief = CallTerms::on_claim(Token::random(), Duration::ZERO);
    assert_eq!(adapter.claim(&c, &on_claim(&brief)).await.unwrap(), [FIRST]);
    let aged = "UPDATE keys.webhook_deliveries SET expires_at = now() - interval '1 hour' \
        WHERE id = 'c'";
    sqlx::query(aged).execute(&admin).await.unwrap();
    assert_eq!(adapter.purge(10).await.unwrap(), 1);
    assert!(adapter.get(&a[0]).await.unwrap().is_some());
    assert_eq!(adapter.count().await.unwrap(), 1);
    let mut transaction = pool.begin().await.unwrap();
    let key = dedup_key("d");
    assert_eq!(adapter.record_in(&mut transaction, &key, MINUTE).await.unwrap(), FIRST);
    // A duplicate that claims a set of keys looks up which of them is held.
    let claimed = adapter.claim(&[b[0].clone(), key], &mine).await.unwrap();
    assert_eq!(claimed, [FIRST, Claimed::InFlight]);
    transaction.commit().await.unwrap();

    let handler = Handler::default().then(200).then(200).then(200).then(500);
    let services = [
        Deduplicated::new(DedupLayer::new(by_header(), adapter.clone()).layer(handler.service())),
        Deduplicated::new(
            DedupLayer::on_arrival(by_header(), adapter.clone()).layer(handler.service()),
        ),
        Deduplicated::new(
            DedupLayer::transactional(by_header(), adapter.clone()).layer(handler.service()),
        ),
    ];
    for (place, service) in services.iter().enumerate() {
        let id = place.to_string();
        assert_eq!(result(&send(service, request(&id)).await), None);
        assert_eq!(result(&send(service, request(&id)).await), Some("duplicate"));
    }
    assert_eq!(send(&services[2], request("fails")).await.status(), 500);
    // A session that a handler has broken is terminated.
    let spoils = tower::service_fn(async |request: Request<Body>| {
        lend(&request).execute("ROLLBACK").await.unwrap();
        Ok::<_, Infallible>(answer(true))
    });
    let service = DedupLayer::transactional(by_header(), adapter).layer(spoils);
    assert_eq!(result(&send(&service, request("spoilt")).await), Some("uncommitted"));
    assert_eq!(send(&services[2], request("spoilt")).await.status(), 200);
}
