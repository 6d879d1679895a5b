//! The transactional ledger on SQLite: one writer at a time, and transactions that SQLite ends.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::routing::post;
use futures_util::future::join_all;
use sqlx::Connection;
use tokio::sync::Semaphore;
use tower_dedup::DedupLayer;
use tower_dedup::adapter::Purging;
use tower_dedup::adapter::SqliteAdapter;
use tower_dedup::adapter::inspect::MaintenanceAdapter;

use super::fixture::{CONNECTIONS, Db, Lite, World, send, transactional};
use crate::support::{answered, by_header, dedup_key, result, rows};

/// In SQLite, a conflict ends the transaction, and only the failed statement reports it.
#[tokio::test]
async fn sqlite_insert_or_rollback_keeps_both_or_neither() {
    let (db, world) = (Lite::create().await, World::default());
    let app = transactional::<Lite>(db.adapter(), &world);
    assert_eq!(send(&app, "a", "insert").await.status(), 200);
    for _ in 0..2 * CONNECTIONS {
        // The script writes the key's own effect twice: the second write is the conflict.
        for script in
            ["insert or-rollback more", "insert or-rollback more 500", "insert or-rollback"]
        {
            let answer = send(&app, "b", script).await;
            assert_eq!(answer.status(), 500, "{script}");
            assert_eq!(db.adapter().get(&dedup_key("b")).await.unwrap(), None, "{script}");
            assert_eq!(db.effects().await, ["a"], "{script}");
        }
    }
    assert_eq!(send(&app, "b", "insert").await.status(), 200);
    assert_eq!(db.effects().await, ["a", "b"]);
}

/// After SQLite has ended a transaction, sqlx still counts it as open. The adapter resets the
/// connection.
#[tokio::test]
async fn sqlite_connection_after_an_ended_transaction_is_usable() {
    let (db, world) = (Lite::create().await, World::default());
    let app = transactional::<Lite>(db.adapter(), &world);
    for script in ["rollback", "rollback 500", "insert or-rollback", "insert or-rollback 500"] {
        assert_eq!(send(&app, "a", script).await.status(), 500);
    }
    let all = join_all((0..CONNECTIONS).map(|_| db.pool.acquire())).await;
    for connection in all {
        assert!(!connection.unwrap().is_in_transaction());
    }
}

/// SQLite has one writer per file. Still no caller in this process gets BUSY.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sqlite_transactions_leases_and_purges_share_a_file() {
    let (db, world) = (Lite::create().await, World::default());
    let one = transactional::<Lite>(db.adapter(), &world);
    // An adapter of its own, on the same file.
    let leases = SqliteAdapter::new(Lite::pool(&db.dir).await);
    let layer = DedupLayer::new(by_header(), leases.clone());
    let two = Router::new().route("/hook", post(async || "done")).layer(layer).with_state(());
    let often = Purging::new().every(Duration::from_millis(5));
    let purger = often.spawn(leases);
    let room = Arc::new(Semaphore::new(16));
    let all = (0..300).map(|id| {
        let (app, room) = (if id % 2 == 0 { &one } else { &two }.clone(), Arc::clone(&room));
        tokio::spawn(async move {
            let _place = room.acquire().await.unwrap();
            send(&app, &format!("event-{id}"), "insert").await
        })
    });
    for answer in join_all(all).await {
        let answer = answer.unwrap();
        assert_eq!(answer.status(), 200, "{:?}", result(&answer));
    }
    purger.stop().await;
    assert_eq!(db.effects().await.len(), 150);
    assert_eq!(rows(&db.adapter()).await, 300);
}

/// Deliveries that wait for a slow handler get 503 after `write_lock_timeout`.
#[tokio::test]
async fn sqlite_wait_for_the_file_is_bounded_in_time() {
    let (db, world) = (Lite::create().await, World::default());
    let adapter = db.waiting_for(Duration::from_millis(100));
    let app = transactional::<Lite>(adapter, &world);
    let slow = tokio::spawn({
        let app = app.clone();
        async move { send(&app, "slow", "insert wait").await }
    });
    world.waiting(1).await;
    let other = send(&app, "other", "insert").await;
    assert_eq!(answered(&other), (503, Some("unavailable")));
    world.go.notify_waiters();
    assert_eq!(slow.await.unwrap().status(), 200);
    assert_eq!(send(&app, "other", "insert").await.status(), 200);
}
