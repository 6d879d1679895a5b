//! Adapter calls beside an open transaction: `record_in`, `forget`, tables of two schemas.

use std::time::Duration;

use tower_dedup::adapter::contract::{CallTerms, ClaimReply, DedupAdapter, Token};
use tower_dedup::adapter::maintenance::{ForgetReply, MaintenanceAdapter};

use super::fixture::Db;
use support::places::{Postgres, Sqlite};
use support::{FIRST, dedup_key, rows};

#[tokio::test]
async fn record_in_postgres_transaction_commits_or_rolls_back_with_it() {
    let db = Db::<Postgres>::create().await;
    let (adapter, key, hour) = (db.adapter(), dedup_key("a"), Duration::from_secs(3_600));
    let (mut one, mut two) = (db.pool.begin().await.unwrap(), db.pool.begin().await.unwrap());
    assert_eq!(adapter.record_in(&mut one, &key, hour).await.unwrap(), FIRST);
    assert_eq!(adapter.record_in(&mut two, &key, hour).await.unwrap(), ClaimReply::InFlight);
    one.rollback().await.unwrap();
    // The key that was in flight was not written, and the transaction goes on.
    assert_eq!(adapter.record_in(&mut two, &key, hour).await.unwrap(), FIRST);
    two.commit().await.unwrap();
    let mut three = db.pool.begin().await.unwrap();
    let again = adapter.record_in(&mut three, &key, hour).await.unwrap();
    assert!(matches!(again, ClaimReply::Duplicate(_)), "{again:?}");
    three.rollback().await.unwrap();
    // A lease that has lapsed is taken over, a live lease is not.
    let lease = CallTerms::on_completion(Token::random(), hour, Duration::from_secs(60));
    adapter.claim(&dedup_key("b"), &lease).await.unwrap();
    let mut four = db.pool.begin().await.unwrap();
    let live = adapter.record_in(&mut four, &dedup_key("b"), hour).await.unwrap();
    assert_eq!(live, ClaimReply::InFlight);
    four.rollback().await.unwrap();
    db.advance(Duration::from_secs(61)).await;
    let mut five = db.pool.begin().await.unwrap();
    let lapsed = adapter.record_in(&mut five, &dedup_key("b"), hour).await.unwrap();
    assert_eq!(lapsed, ClaimReply::first(2, true));
    five.commit().await.unwrap();
    assert_eq!(rows(&adapter).await, 2);
}

#[tokio::test]
async fn record_in_sqlite_transaction_commits_or_rolls_back_with_it() {
    let db = Db::<Sqlite>::create().await;
    let (adapter, key, hour) = (db.adapter(), dedup_key("a"), Duration::from_secs(3_600));
    // The transaction may create the table; its rollback removes the table.
    let drop_it = "DROP TABLE webhook_deliveries; DROP TABLE webhook_deliveries_schema";
    sqlx::raw_sql(drop_it).execute(&db.pool).await.unwrap();
    let mut one = db.pool.begin_with("BEGIN IMMEDIATE").await.unwrap();
    assert_eq!(adapter.record_in(&mut one, &key, hour).await.unwrap(), FIRST);
    one.rollback().await.unwrap();
    let mut two = db.pool.begin_with("BEGIN IMMEDIATE").await.unwrap();
    assert_eq!(adapter.record_in(&mut two, &key, hour).await.unwrap(), FIRST);
    two.commit().await.unwrap();
    let mut three = db.pool.begin_with("BEGIN IMMEDIATE").await.unwrap();
    let again = adapter.record_in(&mut three, &key, hour).await.unwrap();
    assert!(matches!(again, ClaimReply::Duplicate(_)), "{again:?}");
    three.rollback().await.unwrap();
}

/// A forgotten event runs again with the COMMIT, and not by a rollback. An open transaction holds the key.
#[tokio::test]
async fn record_in_runs_an_event_again_once() {
    let (key, hour) = (dedup_key("a"), Duration::from_secs(3_600));
    let (pg, lite) = (Db::<Postgres>::create().await, Db::<Sqlite>::create().await);
    let (on_pg, on_lite) = (pg.adapter(), lite.adapter());
    let stores: [&dyn MaintenanceAdapter; 2] = [&on_pg, &on_lite];
    for store in stores {
        store.claim(&key, &CallTerms::on_claim(Token::random(), hour)).await.unwrap();
        assert_eq!(store.forget(&key).await.unwrap(), ForgetReply::Removed);
    }
    for commits in [false, true] {
        let mut tx = pg.pool.begin().await.unwrap();
        let claimed = on_pg.record_in(&mut tx, &key, hour).await.unwrap();
        assert_eq!(claimed, FIRST);
        // The row that others see is free.
        assert_eq!(on_pg.forget(&key).await.unwrap(), ForgetReply::Missing);
        if commits {
            tx.commit().await.unwrap();
        } else {
            tx.rollback().await.unwrap();
        }

        let mut tx = lite.pool.begin_with("BEGIN IMMEDIATE").await.unwrap();
        let claimed = on_lite.record_in(&mut tx, &key, hour).await.unwrap();
        assert_eq!(claimed, FIRST);
        if commits {
            tx.commit().await.unwrap();
        } else {
            tx.rollback().await.unwrap();
        }
    }
    for store in stores {
        let again = store.claim(&key, &CallTerms::on_claim(Token::random(), hour)).await.unwrap();
        assert!(matches!(again, ClaimReply::Duplicate(_)), "{again:?}");
    }
}
