//! Adapter calls beside an open transaction: `record_in`, `forget`, tables of two schemas.

use std::time::Duration;

use tower_dedup::ErrorKind;
use tower_dedup::adapter::contract::{CallTerms, ClaimReply, DedupAdapter, Token};
use tower_dedup::adapter::inspect::{ForgetReply, KeyState, MaintenanceAdapter};

use super::fixture::{Db, Lite, Pg, World, send, transactional};
use crate::support::{FIRST, dedup_key, rows};

#[tokio::test]
async fn record_in_takes_over_a_lapsed_lease_and_no_live_one() {
    let db = Pg::create().await;
    let (adapter, hour) = (db.adapter(), Duration::from_secs(3_600));
    let lease = CallTerms::on_completion(Token::random(), hour, Duration::from_secs(60));
    adapter.claim(&dedup_key("b"), &lease).await.unwrap();
    let mut early = db.pool.begin().await.unwrap();
    let live = adapter.record_in(&mut early, &dedup_key("b"), hour).await.unwrap();
    assert_eq!(live, ClaimReply::InFlight);
    early.rollback().await.unwrap();
    db.advance(Duration::from_secs(61)).await;
    let mut late = db.pool.begin().await.unwrap();
    let lapsed = adapter.record_in(&mut late, &dedup_key("b"), hour).await.unwrap();
    assert_eq!(lapsed, ClaimReply::first(2, true));
    late.commit().await.unwrap();
    assert_eq!(rows(&adapter).await, 1);
}

/// `forget` refuses an event that runs, and `get` shows it, although no other session sees its row yet. A handler that
/// calls `forget` for a key of its own transaction gets `Refused` in time.
#[tokio::test]
async fn key_in_an_open_transaction_is_in_flight_for_operators() {
    let (db, world) = (Pg::create().await, World::default());
    let app = transactional::<Pg>(db.adapter(), &world);
    let running = tokio::spawn(async move { send(&app, "a", "insert wait").await });
    world.waiting(1).await;
    assert_eq!(db.adapter().forget(&dedup_key("a")).await.unwrap(), ForgetReply::InFlight);
    assert_eq!(db.adapter().forget(&dedup_key("b")).await.unwrap(), ForgetReply::Missing);
    let entry = db.adapter().get(&dedup_key("a")).await.unwrap().unwrap();
    assert_eq!((entry.state, entry.lease_until), (KeyState::InFlight, None));
    assert_eq!(db.adapter().get(&dedup_key("b")).await.unwrap(), None);
    world.go.notify_waiters();
    assert_eq!(running.await.unwrap().status(), 200);
    assert_eq!(db.adapter().forget(&dedup_key("a")).await.unwrap(), ForgetReply::Removed);

    let (db, world) = (Lite::create().await, World::default());
    let adapter = db.waiting_for(Duration::from_millis(100));
    let app = transactional::<Lite>(adapter.clone(), &world);
    let running = tokio::spawn(async move { send(&app, "a", "insert wait").await });
    world.waiting(1).await;
    let refused = adapter.forget(&dedup_key("a")).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Refused);
    world.go.notify_waiters();
    assert_eq!(running.await.unwrap().status(), 200);
}

/// A forgotten event runs again with the COMMIT, and not by a rollback. An open transaction holds the key.
#[tokio::test]
async fn record_in_runs_an_event_again_once() {
    let (key, hour) = (dedup_key("a"), Duration::from_secs(3_600));
    let (pg, lite) = (Pg::create().await, Lite::create().await);
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
        assert_eq!(on_pg.forget(&key).await.unwrap(), ForgetReply::InFlight);
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
