//! The locks of large transactional deliveries: each delivery takes few, and a duplicate is in
//! flight nevertheless.

use std::slice;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use futures_util::join;
use sqlx::PgPool;
use sqlx::postgres::{PgPoolOptions, Postgres};
use tower_dedup::adapter::contract::{ClaimReply, DedupAdapter};
use tower_dedup::adapter::inspect::{ForgetReply, MaintenanceAdapter};
use tower_dedup::adapter::{PostgresAdapter, PostgresOptions, TransactionAdapter};
use tower_dedup::internals::OpenTransaction;
use tower_dedup::{DedupKey, ErrorKind};

use crate::support::effects::Database;
use crate::support::postgres::Server;
use crate::support::{FIRST, claim_all, dedup_key, on_claim, sorted_keys, terms};

/// The default maximum of keys in one delivery.
const MOST: usize = 4_096;

async fn open(adapter: &PostgresAdapter, keys: &[DedupKey]) -> OpenTransaction<Postgres> {
    let opened = adapter.open(keys, &terms()).await.unwrap();
    assert!(opened.replies.iter().all(|answer| *answer == ClaimReply::first(1, false)));
    opened.transaction.unwrap()
}

async fn advisory_locks(pool: &PgPool) -> i64 {
    let count = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'";
    sqlx::query_scalar(count).fetch_one(pool).await.unwrap()
}

/// The server's lock table has room for 64 locks a connection, as by default.
#[tokio::test]
async fn open_deliveries_of_the_maximum_of_keys_leave_the_lock_table_to_others() {
    const OPEN: usize = 8;
    let server = Server::start();
    let pool = PgPoolOptions::new().max_connections(12).connect(&server.url()).await.unwrap();
    let adapter = PostgresAdapter::new(pool.clone());
    let mut transactions = Vec::new();
    for delivery in 0..OPEN {
        let keys = sorted_keys(&format!("{delivery}"), MOST);
        transactions.push(open(&adapter, &keys).await);
        // Every key of a duplicate is in flight, and the duplicate holds no lock.
        let copy = adapter.open(&keys, &terms()).await.unwrap();
        assert!(copy.transaction.is_none());
        assert!(copy.replies.iter().all(|answer| *answer == ClaimReply::InFlight), "{delivery}");
    }
    let locks = advisory_locks(&pool).await;
    assert!(locks <= 64 * i64::try_from(OPEN).unwrap(), "{locks} locks");
    for transaction in transactions {
        adapter.rollback(transaction).await.unwrap();
    }
    assert_eq!(advisory_locks(&pool).await, 0);
}

/// At both ends of the set and in the middle: some of these keys have a lock of their own.
#[tokio::test]
async fn single_key_of_a_large_open_delivery_is_in_flight() {
    let database = Database::fresh().await;
    let adapter = PostgresAdapter::with_options(database.pool(3), PostgresOptions::new());
    let all = sorted_keys("large", 300);
    let transaction = open(&adapter, &all).await;
    for place in [0, 1, 62, 63, 64, 150, 299] {
        let opened = adapter.open(&all[place..=place], &terms()).await.unwrap();
        assert_eq!(opened.replies, [ClaimReply::InFlight], "{place}");
        assert!(opened.transaction.is_none());
        assert_eq!(adapter.claim(&all[place], &terms()).await.unwrap(), ClaimReply::InFlight);
    }
    adapter.rollback(transaction).await.unwrap();
    let opened = adapter.open(&all, &terms()).await.unwrap();
    assert!(opened.replies.iter().all(|answer| *answer == ClaimReply::first(1, false)));
    adapter.rollback(opened.transaction.unwrap()).await.unwrap();
}

/// A key that may be free is never reported as in flight, because a layer may acknowledge a
/// delivery that is in flight.
#[tokio::test]
async fn free_key_beside_one_of_a_large_open_delivery_is_not_reported_in_flight() {
    let database = Database::fresh().await;
    let adapter = PostgresAdapter::new(database.pool(3));
    let all = sorted_keys("large", 300);
    let transaction = open(&adapter, &all).await;
    for place in [0, 299] {
        let mut mixed = vec![all[place].clone(), dedup_key("a-free"), dedup_key("z-free")];
        mixed.sort();
        match adapter.open(&mixed, &terms()).await {
            Ok(opened) => {
                for (key, answer) in mixed.iter().zip(opened.replies) {
                    let free = *key != all[place];
                    assert_eq!(answer != ClaimReply::InFlight, free, "{place}");
                }
                adapter.rollback(opened.transaction.unwrap()).await.unwrap();
            }
            Err(error) => assert_eq!(error.kind(), ErrorKind::Refused, "{place}"),
        }
    }
    adapter.rollback(transaction).await.unwrap();
}

/// An operator who looks at a key, or forgets it, delays no delivery and no other operator.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn operators_hold_no_lock_of_a_free_key() {
    let database = Database::fresh().await;
    let adapter = PostgresAdapter::new(database.pool(4));
    let key = dedup_key("a");
    let is_over = AtomicBool::new(false);
    let look = async {
        while !is_over.load(Ordering::Relaxed) {
            adapter.get(&key).await.unwrap();
        }
    };
    let deliver = async {
        for _ in 0..300 {
            assert_eq!(adapter.forget(&key).await.unwrap(), ForgetReply::Missing);
            let opened = adapter.open(slice::from_ref(&key), &terms()).await.unwrap();
            assert_eq!(opened.replies, [ClaimReply::first(1, false)]);
            adapter.rollback(opened.transaction.unwrap()).await.unwrap();
        }
        is_over.store(true, Ordering::Relaxed);
    };
    join!(look, deliver);
}

/// The lease ledger uses the same table, and does not look for each of thousands of locked rows.
#[tokio::test]
async fn claim_of_a_large_open_delivery_ends_in_time() {
    let database = Database::fresh().await;
    let adapter = PostgresAdapter::new(database.pool(3));
    let all = sorted_keys("large", MOST);
    let transaction = open(&adapter, &all).await;
    let mine = terms();
    let soon = Duration::from_secs(20);
    // After the time to split a batch is over, the remaining keys are an error: they may be free.
    let claims = join_all(all.iter().map(|key| adapter.claim(key, &mine)));
    let claimed = tokio::time::timeout(soon, claims).await.expect("an end");
    let is_held = |reply: &Result<ClaimReply, _>| !matches!(reply, Ok(claimed) if *claimed != ClaimReply::InFlight);
    assert!(claimed.iter().all(is_held));
    // Callers that come later are served.
    let other = adapter.claim(&dedup_key("other"), &terms()).await.unwrap();
    assert_eq!(other, ClaimReply::first(1, false));
    adapter.rollback(transaction).await.unwrap();
}

/// A batch that meets the key is sent again in parts.
#[tokio::test]
async fn on_arrival_claim_beside_a_locked_key_is_first() {
    let database = Database::fresh().await;
    let adapter = PostgresAdapter::new(database.pool(3));
    let all = sorted_keys("held", 2);
    let transaction = open(&adapter, &all[..1]).await;
    let recorded = claim_all(&adapter, &all, &on_claim(&terms())).await.unwrap();
    assert_eq!(recorded, [ClaimReply::InFlight, FIRST]);
    adapter.rollback(transaction).await.unwrap();
}
