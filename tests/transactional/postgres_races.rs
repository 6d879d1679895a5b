//! Deliveries that meet on Postgres: duplicates of a slow delivery, claims beside a user's open
//! transaction, every isolation level, and transactions that the database refuses.

use std::convert::Infallible;
use std::time::Duration;

use futures_util::future::join_all;
use http::{Request, Response, StatusCode};
use sqlx::{AssertSqlSafe, Executor, Postgres, Transaction};
use tower::Layer;
use tower::util::BoxCloneSyncService;
use tower_dedup::adapter::contract::{ClaimReply, DedupAdapter};
use tower_dedup::adapter::inspect::{ForgetReply, KeyState, MaintenanceAdapter};
use tower_dedup::adapter::{Identifier, PostgresAdapter, PostgresOptions};
use tower_dedup::{DedupKey, DedupLayer, Delivery, OnInFlight, ResponseBody};

use crate::support::effects::{
    Database, MINUTE, answer, apart, effect, lend, transactional, until_acknowledged, write,
    writes_and_waits,
};
use crate::support::{
    Body, FIRST, Handler, answered, by_header, claim_all, dedup_key, on_claim, request, result,
    send, terms, until,
};

pub(super) type Deduplicated =
    BoxCloneSyncService<Request<Body>, Response<ResponseBody<Body>>, Infallible>;

/// Two layers over five connections get 240 copies of a delivery that does not end. All other
/// deliveries run to their ends.
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
        transactional(&pool).on_in_flight(OnInFlight::Wait(10 * MINUTE)).store_timeout(MINUTE / 2)
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
    // Eight wait for the event in each layer, and the others are answered.
    until(|| duplicates.iter().filter(|it| !it.is_finished()).count() == 1 + 2 * 8).await;
    assert_eq!(handles.iter().map(|handle| handle.waiting()).sum::<usize>(), 2 * 8);
    // A duplicate that waited in the database would keep its connection.
    // Other tests use other tables of the same database.
    let waiting = "SELECT query FROM pg_stat_activity JOIN pg_locks USING (pid) \
        WHERE wait_event = 'transactionid' AND relation = 'webhook_deliveries'::regclass";
    for _ in 0..50 {
        let waiting = sqlx::query_scalar::<_, String>(waiting).fetch_all(database.effects.pool());
        assert_eq!(waiting.await.unwrap(), [""; 0]);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
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
    let duplicates = join_all(duplicates).await.into_iter().map(Result::unwrap);
    let (ended, refused): (Vec<_>, Vec<_>) = duplicates.partition(|status| *status == 200);
    assert_eq!((ended.len(), refused), (1 + 2 * 8, vec![StatusCode::SERVICE_UNAVAILABLE; 223]));
    assert_eq!((held.runs(), database.effects.of("slow").await), (1, 1));
    database.until_no_transaction_is_open().await;
}

/// Inserts the row of a key without an adapter.
const INSERT: &str = "INSERT INTO webhook_deliveries \
    (key, namespace, id, attempts, takeover, first_seen_at, expires_at) SELECT \
    encode(substring(sha256(convert_to(E'test\\n' || $1, 'UTF8')) from 1 for 16), 'hex')::uuid, \
    'test', $1, 1, false, now(), now() + interval '1 day'";

/// Asserts that a claim does not wait for the open transaction that holds this key. The key is in
/// flight, and the other keys of a batch are granted.
async fn is_in_flight(adapter: &PostgresAdapter, held: &DedupKey) {
    let soon = async {
        assert_eq!(adapter.claim(held, &terms()).await.unwrap(), ClaimReply::InFlight);
        assert_eq!(adapter.claim(held, &on_claim(&terms())).await.unwrap(), ClaimReply::InFlight);
        // The held key is one of 16, at different places in the order of rows.
        for _ in 0..3 {
            let mut keys: Vec<_> =
                (0..15).map(|_| dedup_key(&format!("{:016x}", rand::random::<u64>()))).collect();
            keys.push(held.clone());
            let claimed = claim_all(adapter, &keys, &terms()).await.unwrap();
            for (key, claimed) in keys.iter().zip(claimed) {
                let granted = ClaimReply::first(1, false);
                assert_eq!(claimed, if key == held { ClaimReply::InFlight } else { granted });
            }
        }
        let lease = DedupLayer::new(by_header(), adapter.clone()).store_timeout(MINUTE / 2);
        let service = lease.on_in_flight(OnInFlight::Reject).layer(tower::service_fn(write));
        let response = send(&service, request(held.id())).await;
        assert_eq!(answered(&response), (503, Some("in-flight")));
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
    adapter.claim(&dedup_key("released"), &claimed).await.unwrap();
    adapter.release(&dedup_key("released"), &claimed).await.unwrap();
    for id in ["new", "released"] {
        held.hold();
        // A busy machine may answer 503 first.
        let sender = service.clone();
        let delivery = tokio::spawn(async move { until_acknowledged(&sender, id).await });
        held.running(1).await;
        is_in_flight(&adapter, &dedup_key(id)).await;
        held.release();
        delivery.await.unwrap();
        let claimed = adapter.claim(&dedup_key(id), &terms()).await.unwrap();
        assert!(matches!(claimed, ClaimReply::Duplicate(_)), "{claimed:?}");
    }
}

#[tokio::test]
async fn claim_does_not_wait_for_a_users_transaction() {
    let database = Database::fresh().await;
    let pool = database.pool(3);
    let adapter = PostgresAdapter::new(pool.clone());
    adapter.migrate().await.unwrap();
    let transactional = transactional(&pool).on_in_flight(OnInFlight::Reject);
    let transactional = transactional.store_timeout(MINUTE / 2).layer(tower::service_fn(write));

    let mut theirs = database.effects.pool().begin().await.unwrap();
    sqlx::query(INSERT).bind("inserted").execute(&mut *theirs).await.unwrap();
    is_in_flight(&adapter, &dedup_key("inserted")).await;
    let twin = send(&transactional, request("inserted")).await;
    assert_eq!(result(&twin), Some("in-flight"));
    theirs.rollback().await.unwrap();
    assert_eq!(send(&transactional, request("inserted")).await.status(), 200);

    let claimed = terms();
    adapter.claim(&dedup_key("locked"), &claimed).await.unwrap();
    adapter.release(&dedup_key("locked"), &claimed).await.unwrap();
    let mut theirs = database.effects.pool().begin().await.unwrap();
    let lock = "SELECT FROM webhook_deliveries WHERE id IN ('locked', 'inserted') FOR UPDATE";
    assert_eq!(theirs.execute(lock).await.unwrap().rows_affected(), 2);
    is_in_flight(&adapter, &dedup_key("locked")).await;
    assert_eq!(adapter.forget(&dedup_key("locked")).await.unwrap(), ForgetReply::InFlight);
    let twin = send(&transactional, request("locked")).await;
    assert_eq!(result(&twin), Some("in-flight"));
    // A complete row is not written again, so nothing asks for its lock.
    let complete = adapter.claim(&dedup_key("inserted"), &terms()).await.unwrap();
    assert!(matches!(complete, ClaimReply::Duplicate(_)), "{complete:?}");
    assert_eq!(result(&send(&transactional, request("inserted")).await), Some("duplicate"));
    theirs.commit().await.unwrap();
    assert_eq!(send(&transactional, request("locked")).await.status(), 200);
}

/// Two schemas of one database, one for each tenant: a key that is in flight in one is free in the
/// other.
#[tokio::test]
async fn key_of_another_schema_is_another_key() {
    let one = Database::fresh().await;
    let other = Database::of(one.other_schema()).await;
    let held = Handler::default();
    held.hold();
    let slow = transactional(&one.pool(3)).layer(writes_and_waits(&held));
    let delivery = tokio::spawn(async move { send(&slow, request("a")).await.status() });
    held.running(1).await;
    let twin = transactional(&other.pool(3)).on_in_flight(OnInFlight::Reject);
    let twin = twin.store_timeout(MINUTE / 2).layer(tower::service_fn(write));
    assert_eq!(send(&twin, request("a")).await.status(), 200);
    held.release();
    assert_eq!(delivery.await.unwrap(), 200);
}

pub(super) async fn record_in(
    adapter: &PostgresAdapter,
    transaction: &mut Transaction<'static, Postgres>,
) -> ClaimReply {
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
        assert_eq!(record_in(&adapter, &mut other).await, ClaimReply::InFlight);
        // Keys of another table are other keys.
        let options = PostgresOptions::new().table(Identifier::new("other_table").unwrap());
        let other_table = PostgresAdapter::with_options(pool.clone(), options);
        other_table.migrate().await.unwrap();
        assert_eq!(record_in(&other_table, &mut other).await, FIRST);
        is_in_flight(&adapter, &dedup_key("a")).await;
        if commits {
            one.commit().await.unwrap();
            let recorded = record_in(&adapter, &mut other).await;
            assert!(matches!(recorded, ClaimReply::Duplicate(_)), "{recorded:?}");
        } else {
            one.rollback().await.unwrap();
            assert_eq!(record_in(&adapter, &mut other).await, FIRST);
        }
        other.rollback().await.unwrap();
    }
    let entry = adapter.get(&dedup_key("a")).await.unwrap().unwrap();
    assert!(matches!(entry.state, KeyState::Complete), "{entry:?}");
}

/// All connections are inside transactions whose first call is `record_in`. The adapter looks for
/// its table on no other connection.
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

/// Rows in which the transactions of handlers conflict.
const TALLY: &str = "CREATE TABLE tally (number int PRIMARY KEY, n int); \
    INSERT INTO tally VALUES (0, 0), (1, 0), (2, 0)";

/// A handler that also reads all tallies and adds to one of them. The database refuses some of the transactions.
async fn write_and_count(request: Request<Body>) -> Result<Response<Body>, Infallible> {
    let mut tx = lend(&request).await;
    let delivery: &Delivery = request.extensions().get().unwrap();
    let number = delivery.id().parse::<i32>().unwrap() % 3;
    let count =
        format!("SELECT sum(n) FROM tally; UPDATE tally SET n = n + 1 WHERE number = {number}");
    let counted = tx.execute(sqlx::raw_sql(AssertSqlSafe(count))).await;
    Ok(answer(counted.is_ok() && effect(&mut tx, delivery).await.is_ok()))
}

/// Two services stand for two processes. Each of forty events is delivered eight times at once.
async fn exactly_once(service: impl Fn(&Database) -> Deduplicated) -> Database {
    let database = Database::fresh().await;
    database.run(TALLY).await;
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
    database.until_no_transaction_is_open().await;
    database
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_isolation_level_takes_effect_once() {
    for level in ["repeatable read", "serializable"] {
        let settings = [("default_transaction_isolation", level), ("synchronous_commit", "off")];
        let database = exactly_once(|database| {
            let pool = database.pool_set(4, &settings);
            Deduplicated::new(transactional(&pool).layer(tower::service_fn(write_and_count)))
        })
        .await;
        let counted = sqlx::query_scalar::<_, i64>("SELECT sum(n) FROM tally");
        assert_eq!(counted.fetch_one(database.effects.pool()).await.unwrap(), 40, "at {level}");
        exactly_once(|database| {
            let adapter = PostgresAdapter::new(database.pool_set(4, &settings));
            Deduplicated::new(DedupLayer::new(by_header(), adapter).layer(apart(database)))
        })
        .await;
    }
}

/// Another transaction came first (40001): nothing is committed, although the handler has succeeded.
#[tokio::test]
async fn commit_that_the_database_refuses_is_503_and_the_retry_runs() {
    let database = Database::fresh().await;
    database.run(TALLY).await;
    let pool = database.pool_set(2, &[("default_transaction_isolation", "serializable")]);
    let rival = pool.clone();
    let service = transactional(&pool).layer(tower::service_fn(move |request: Request<Body>| {
        let rival = rival.clone();
        async move {
            let mut tx = lend(&request).await;
            tx.execute("SELECT n FROM tally WHERE number = 1").await.unwrap();
            tx.execute("UPDATE tally SET n = 1 WHERE number = 0").await.unwrap();
            let delivery: &Delivery = request.extensions().get().unwrap();
            effect(&mut tx, delivery).await.unwrap();
            // Each of the two transactions reads a row that the other one writes.
            let mut theirs = rival.begin().await.unwrap();
            let n: i32 = sqlx::query_scalar("SELECT n FROM tally WHERE number = 0")
                .fetch_one(&mut *theirs)
                .await
                .unwrap();
            if n == 0 {
                theirs.execute("UPDATE tally SET n = 1 WHERE number = 1").await.unwrap();
            }
            theirs.commit().await.unwrap();
            Ok::<_, Infallible>(answer(true))
        }
    }));
    let refused = send(&service, request("a")).await;
    assert_eq!(answered(&refused), (503, Some("unavailable")));
    assert_eq!(database.effects_and_key("a").await, 0);
    database.run("UPDATE tally SET n = 2 WHERE number = 0").await;
    assert_eq!(answered(&send(&service, request("a")).await), (200, None));
    assert_eq!(database.effects_and_key("a").await, 1);
}
