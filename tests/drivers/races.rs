//! Sessions that record the same keys at once: one `first` commits for each key.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::routing::post;
use sqlx::postgres::Postgres;
use sqlx::{AssertSqlSafe, PgPool};
use tokio::sync::Barrier;
use tokio::task::JoinHandle;
use tower::ServiceExt;
use tower_dedup::{DedupLayer, DedupTx, Delivery, key};

use super::{Database, record};

const SESSIONS: usize = 12;
const KEYS: usize = 40;

/// Records a key and pays in one transaction, until it is paid. A try whose number is divisible by 3 aborts if
/// `aborts`. Returns whether this session has paid.
async fn pay(pool: &PgPool, level: &str, id: &str, mut number: usize, aborts: bool) -> bool {
    loop {
        number += 1;
        let begin = AssertSqlSafe(format!("BEGIN ISOLATION LEVEL {level}"));
        let mut tx = pool.begin_with(begin).await.unwrap();
        match record(&mut tx, "shop", id).await {
            Ok(outcome) if outcome == "first" => {
                let paid = sqlx::query("INSERT INTO payments VALUES ($1)").bind(id);
                paid.execute(&mut *tx).await.unwrap();
                // Meanwhile the other sessions ask for the key.
                tokio::time::sleep(Duration::from_millis(2)).await;
                if aborts && number.is_multiple_of(3) {
                    tx.rollback().await.unwrap();
                } else if tx.commit().await.is_ok() {
                    return true;
                }
            }
            Ok(outcome) if outcome == "duplicate" => return false,
            Ok(outcome) => assert_eq!(outcome, "in_flight"),
            Err(error) => {
                let code = error.as_database_error().and_then(|error| error.code());
                assert_eq!(code.as_deref(), Some("40001"), "{error}");
            }
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Counts the looks at which a session waits for another's row, until it is aborted.
fn row_waits(pool: &PgPool) -> (Arc<AtomicUsize>, JoinHandle<()>) {
    const WAITS: &str = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() \
        AND wait_event_type = 'Lock' AND wait_event IN ('transactionid', 'tuple', 'spectoken')";
    let (pool, waits) = (pool.clone(), Arc::new(AtomicUsize::new(0)));
    let counted = Arc::clone(&waits);
    let looks = tokio::spawn(async move {
        loop {
            let found: i64 = sqlx::query_scalar(WAITS).fetch_one(&pool).await.unwrap();
            counted.fetch_add(usize::from(found > 0), Ordering::Relaxed);
        }
    });
    (waits, looks)
}

async fn one_session_pays(level: &'static str, aborts: bool) {
    let database = Database::fresh().await;
    let (waits, looks) = row_waits(&database.pool);
    let barrier = Arc::new(Barrier::new(SESSIONS));
    let sessions = (0..SESSIONS).map(|session| {
        let (pool, barrier) = (database.pool.clone(), Arc::clone(&barrier));
        tokio::spawn(async move {
            let mut paid = 0;
            for number in 0..KEYS {
                barrier.wait().await;
                paid += usize::from(pay(&pool, level, &number.to_string(), session, aborts).await);
            }
            paid
        })
    });
    let mut paid = 0;
    for session in sessions.collect::<Vec<_>>() {
        paid += session.await.unwrap();
    }
    looks.abort();
    assert_eq!(paid, KEYS);
    assert_eq!(waits.load(Ordering::Relaxed), 0, "a duplicate waits for no row");
    let mut payments = database.payments().await;
    payments.dedup();
    assert_eq!((payments.len(), database.payments().await.len()), (KEYS, KEYS));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_session_commits_each_key() {
    for level in ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"] {
        one_session_pays(level, false).await;
        one_session_pays(level, true).await;
    }
}

async fn in_transaction(delivery: Delivery, mut tx: DedupTx<Postgres>) -> StatusCode {
    let pay = sqlx::query("INSERT INTO payments VALUES ($1)").bind(delivery.id().to_owned());
    pay.execute(&mut *tx).await.map_or(StatusCode::INTERNAL_SERVER_ERROR, |_| StatusCode::OK)
}

/// The same keys, by the function and by a layer on the same table.
async fn beside(database: &Database, app: Router) -> BTreeMap<&'static str, usize> {
    let by_function = Arc::new(AtomicUsize::new(0));
    let barrier = Arc::new(Barrier::new(SESSIONS));
    let sessions = (0..SESSIONS).map(|session| {
        let (pool, barrier) = (database.pool.clone(), Arc::clone(&barrier));
        let (app, by_function) = (app.clone(), Arc::clone(&by_function));
        tokio::spawn(async move {
            for number in 0..KEYS {
                let id = format!("{number:02}");
                barrier.wait().await;
                if session % 2 == 0 {
                    let paid = pay(&pool, "READ COMMITTED", &id, session, true).await;
                    by_function.fetch_add(usize::from(paid), Ordering::Relaxed);
                    continue;
                }
                loop {
                    let request = Request::post("/").header("webhook-id", &id);
                    let request = request.body(Body::empty()).unwrap();
                    match app.clone().oneshot(request).await.unwrap().status().as_u16() {
                        200 => break,
                        status => assert_eq!(status, 503),
                    }
                }
            }
        })
    });
    for session in sessions.collect::<Vec<_>>() {
        session.await.unwrap();
    }
    let payments = database.payments().await;
    let expected: Vec<_> = (0..KEYS).map(|number| format!("{number:02}")).collect();
    assert_eq!(payments, expected);
    let by_function = by_function.load(Ordering::Relaxed);
    BTreeMap::from([("function", by_function), ("layer", KEYS - by_function)])
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn function_and_transactional_layer_share_keys() {
    let database = Database::fresh().await;
    let events = key::header("webhook-id").namespace("shop");
    let layer = DedupLayer::transactional(events, database.adapter());
    let app = Router::new().route("/", post(in_transaction).layer(layer));
    let by = beside(&database, app).await;
    assert!(by.values().all(|paid| *paid > 0), "no race: {by:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn function_and_lease_layer_share_keys() {
    let database = Database::fresh().await;
    let events = key::header("webhook-id").namespace("shop");
    let layer = DedupLayer::new(events, database.adapter());
    let pool = database.pool.clone();
    let handler = async move |delivery: Delivery| {
        let pay = sqlx::query("INSERT INTO payments VALUES ($1)").bind(delivery.id().to_owned());
        pay.execute(&pool).await.map_or(StatusCode::INTERNAL_SERVER_ERROR, |_| StatusCode::OK)
    };
    let app = Router::new().route("/", post(handler).layer(layer));
    let by = beside(&database, app).await;
    assert!(by.values().all(|paid| *paid > 0), "no race: {by:?}");
}
