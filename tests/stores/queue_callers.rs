//! Calls that wait for a batch: dropped callers, and callers beside a batch that waits.
//!
//! "At once" means that one task makes all calls before any is sent. The workers are tasks of the
//! same thread.

use std::pin::pin;
use std::time::Duration;

use futures_util::future::{Either, join, join_all, select};
use sqlx::postgres::PgPoolOptions;
use tower_dedup::StoreErrorKind;
use tower_dedup::adapter::contract::{ClaimReply, DedupAdapter, RenewReply};
use tower_dedup::adapter::inspect::MaintenanceAdapter;

use super::queue::{few_on_sqlite, postgres, sqlite_with};
use crate::support::postgres::Schema;
use crate::support::{dedup_key, polled, terms};

#[tokio::test]
async fn dropped_caller_is_not_sent_on_sqlite() {
    let dir = tempfile::tempdir().unwrap();
    let adapter = sqlite_with(&dir, few_on_sqlite()).await;
    for round in 0..20 {
        let gone: Vec<_> = (0..4).map(|at| dedup_key(&format!("gone-{round}-{at}"))).collect();
        for key in &gone {
            assert!(polled(adapter.renew(key, &terms()), 1, false).await.is_none());
        }
        let stays = dedup_key(&format!("stays-{round}"));
        assert_eq!(adapter.renew(&stays, &terms()).await.unwrap(), RenewReply::Held);
        for key in &gone {
            assert_eq!(adapter.get(key).await.unwrap(), None, "{}", key.id());
        }
    }
}

/// Dropped callers take no room from waiting callers.
#[tokio::test]
async fn dropped_caller_takes_no_room_on_sqlite() {
    let dir = tempfile::tempdir().unwrap();
    let adapter = sqlite_with(&dir, few_on_sqlite()).await;
    for round in 0..20 {
        for at in 0..8 {
            let gone = dedup_key(&format!("gone-{round}-{at}"));
            assert!(polled(adapter.claim(&gone, &terms()), 1, false).await.is_none());
        }
        let stay: Vec<_> = (0..8).map(|at| dedup_key(&format!("stays-{round}-{at}"))).collect();
        let (mine, late) = (terms(), dedup_key(&format!("late-{round}")));
        let all = join_all(stay.iter().map(|key| adapter.claim(key, &mine)));
        let (claimed, refused) = join(all, adapter.claim(&late, &mine)).await;
        for claimed in claimed {
            assert_eq!(claimed.unwrap(), ClaimReply::first(1, false));
        }
        assert_eq!(refused.unwrap_err().kind(), StoreErrorKind::Overloaded);
    }
}

/// A batch waits for a row that an open transaction has inserted. Calls that gather during the wait go in the
/// second worker. The batch waits as long as a statement may wait for a row, so a slow machine may
/// need several attempts.
#[tokio::test]
async fn callers_do_not_wait_for_the_batch_before_theirs() {
    let schema = Schema::fresh();
    let adapter = postgres(&schema).await;
    let held = dedup_key("held");
    let pool = PgPoolOptions::new().max_connections(1).connect_lazy(&schema.url()).unwrap();
    let mut theirs = pool.begin().await.unwrap();
    let recorded = adapter.record_in(&mut theirs, &held, Duration::from_secs(60)).await;
    assert_eq!(recorded.unwrap(), ClaimReply::first(1, false));
    for round in 0..50 {
        let mine = terms();
        let keys: Vec<_> = (0..40).map(|at| dedup_key(&format!("{round}-{at}"))).collect();
        let waits = pin!(adapter.renew(&held, &mine));
        let many = join_all(keys.iter().map(|key| adapter.claim(key, &mine)));
        match select(waits, pin!(many)).await {
            Either::Right((claimed, waits)) => {
                let first = |claimed: &ClaimReply| *claimed == ClaimReply::first(1, false);
                assert!(claimed.iter().all(|claimed| claimed.as_ref().is_ok_and(first)));
                assert_eq!(waits.await.unwrap_err().kind(), StoreErrorKind::Refused);
                return;
            }
            Either::Left((waited, many)) => {
                assert_eq!(waited.unwrap_err().kind(), StoreErrorKind::Refused);
                many.await;
            }
        }
    }
    panic!("the callers waited every time");
}
