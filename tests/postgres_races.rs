//! Deliveries that meet on Postgres: duplicates of a slow one, claims and somebody's open
//! transaction, settings of a role that make it harder, a role that may do little.

mod support;

use std::time::Duration;

use futures_util::future::join_all;
use http::Request;
use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, Executor, PgPool, Postgres, Transaction};
use support::effects::{
    AT_A_GATE, Boxed, Database, MINUTE, answer, apart, effect, lend, transactional,
    until_acknowledged, write, writes_and_waits,
};
use support::postgres::Server;
use support::{Body, Handler, by_header, dedup_key, request, result, send, until};
use tower::Layer;
use tower_dedup::adapter::{
    Claimed, Completed, DedupAdapter, EntryState, Forgotten, Identifier, LeaseAdapter, Maintain,
    PostgresAdapter, Receipt, Recorded, Released, Renewed, Token,
};
use tower_dedup::{DedupKey, DedupLayer, ErrorKind, OnInFlight};

/// 200 duplicates of a delivery that does not end, five connections, and another process that has
/// some of the duplicates too: everything else goes on meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn duplicates_of_a_slow_delivery_hold_nobody_up() {
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
        for other in tokio::time::timeout(MINUTE, others).await.expect("they are not held up") {
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

fn receipt() -> Receipt {
    Receipt::new(Token::random(), MINUTE).with_lease(MINUTE)
}

/// The row of a key, as somebody writes it who uses no adapter.
const INSERT: &str = "INSERT INTO webhook_deliveries \
    (key, namespace, id, attempts, takeover, first_seen_at, expires_at) SELECT \
    encode(substring(sha256(convert_to(E'test\\n' || $1, 'UTF8')) from 1 for 16), 'hex')::uuid, \
    'test', $1, 1, false, now(), now() + interval '1 day'";

/// Nobody who claims or records waits for the transaction that holds this key, which does not end
/// by itself: it is in flight, and the other keys of a set are granted.
async fn is_in_flight(adapter: &PostgresAdapter, held: &DedupKey) {
    let soon = async {
        let one = std::slice::from_ref(held);
        assert_eq!(adapter.claim(one, &receipt()).await.unwrap(), [Claimed::InFlight]);
        assert_eq!(adapter.record(one, &receipt()).await.unwrap(), [Recorded::InFlight]);
        // In the middle of a set, and so early and so late in the order of rows.
        for _ in 0..3 {
            let mut keys: Vec<_> =
                (0..15).map(|_| dedup_key(&format!("{:016x}", rand::random::<u64>()))).collect();
            keys.push(held.clone());
            keys.sort_unstable();
            let claimed = adapter.claim(&keys, &receipt()).await.unwrap();
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
    tokio::time::timeout(MINUTE, soon).await.expect("nobody waits for the transaction");
}

#[tokio::test]
async fn a_claim_does_not_wait_for_a_transactional_delivery() {
    let database = Database::fresh().await;
    let held = Handler::default();
    let service = transactional(&database.pool(3)).layer(writes_and_waits(&held));
    let adapter = PostgresAdapter::new(database.pool(3));
    // A new row, and one that is there, released.
    let claimed = receipt();
    adapter.claim(&[dedup_key("seized")], &claimed).await.unwrap();
    adapter.release(&[dedup_key("seized")], &claimed).await.unwrap();
    for id in ["new", "seized"] {
        held.hold();
        let delivery = tokio::spawn({
            let service = service.clone();
            async move { send(&service, request(id)).await.status() }
        });
        held.running(1).await;
        is_in_flight(&adapter, &dedup_key(id)).await;
        held.release();
        assert_eq!(delivery.await.unwrap(), 200);
        let claimed = adapter.claim(&[dedup_key(id)], &receipt()).await.unwrap();
        assert!(matches!(claimed[..], [Claimed::Duplicate(_)]), "{claimed:?}");
    }
}

#[tokio::test]
async fn a_claim_does_not_wait_for_a_users_transaction() {
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

    let claimed = receipt();
    adapter.claim(&[dedup_key("locked")], &claimed).await.unwrap();
    adapter.release(&[dedup_key("locked")], &claimed).await.unwrap();
    let mut theirs = database.effects.pool().begin().await.unwrap();
    let lock = "SELECT FROM webhook_deliveries WHERE id IN ('locked', 'inserted') FOR UPDATE";
    assert_eq!(theirs.execute(lock).await.unwrap().rows_affected(), 2);
    is_in_flight(&adapter, &dedup_key("locked")).await;
    let twin = send(&transactional, request("locked")).await;
    assert_eq!(result(&twin), Some("in-flight"));
    // What is complete is not written again, so nobody asks for its lock.
    let complete = adapter.claim(&[dedup_key("inserted")], &receipt()).await.unwrap();
    assert!(matches!(complete[..], [Claimed::Duplicate(_)]), "{complete:?}");
    assert_eq!(result(&send(&transactional, request("inserted")).await), Some("duplicate"));
    theirs.commit().await.unwrap();
    assert_eq!(send(&transactional, request("locked")).await.status(), 200);
}

/// Two schemas of one database, as tenants have them: what runs for one is not in flight for the
/// other.
#[tokio::test]
async fn a_key_of_another_schema_is_another_key() {
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
) -> Recorded {
    let key = dedup_key("a");
    let recorded = adapter.record_in(transaction, &key, MINUTE);
    let recorded = tokio::time::timeout(MINUTE, recorded);
    recorded.await.expect("nobody waits for the other transaction").unwrap()
}

#[tokio::test]
async fn a_twin_of_a_record_in_an_open_transaction_is_in_flight() {
    let database = Database::fresh().await;
    let pool = database.pool(3);
    let adapter = PostgresAdapter::new(pool.clone());
    adapter.migrate().await.unwrap();
    for commits in [false, true] {
        let (mut one, mut other) = (pool.begin().await.unwrap(), pool.begin().await.unwrap());
        assert_eq!(record_in(&adapter, &mut one).await, Recorded::First);
        assert_eq!(record_in(&adapter, &mut other).await, Recorded::InFlight);
        // Another table's keys are other keys.
        let elsewhere = adapter.clone().table(Identifier::new("elsewhere").unwrap());
        elsewhere.migrate().await.unwrap();
        assert_eq!(record_in(&elsewhere, &mut other).await, Recorded::First);
        is_in_flight(&adapter, &dedup_key("a")).await;
        if commits {
            one.commit().await.unwrap();
            let recorded = record_in(&adapter, &mut other).await;
            assert!(matches!(recorded, Recorded::Duplicate(_)), "{recorded:?}");
        } else {
            one.rollback().await.unwrap();
            assert_eq!(record_in(&adapter, &mut other).await, Recorded::First);
        }
        other.rollback().await.unwrap();
    }
    let entry = adapter.get(&dedup_key("a")).await.unwrap().unwrap();
    assert!(matches!(entry.state, EntryState::Complete { .. }), "{entry:?}");
}

/// All connections are in transactions that record for the first time: whether the table is there
/// is not asked on yet another connection.
#[tokio::test]
async fn recording_in_a_transaction_needs_no_other_connection() {
    let database = Database::fresh().await;
    PostgresAdapter::new(database.pool(1)).migrate().await.unwrap();
    let pool = database.pool(1);
    let adapter = PostgresAdapter::new(pool.clone());
    let mut transaction = pool.begin().await.unwrap();
    assert_eq!(record_in(&adapter, &mut transaction).await, Recorded::First);
    transaction.commit().await.unwrap();
}
