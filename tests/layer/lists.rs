//! The calls that a ledger makes for the keys of a list, and what it keeps of the list.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, StatusCode};
use http_body_util::Full;
use sqlx::sqlite::{SqliteConnectOptions, SqlitePoolOptions};
use tower::{Layer, ServiceExt};
use tower_dedup::adapter::contract::DedupAdapter;
use tower_dedup::adapter::maintenance::{KeyState, MaintenanceAdapter};
use tower_dedup::adapter::{MemoryAdapter, SqliteAdapter, SqliteOptions};
use tower_dedup::internals::with_sqlite_bounds;
use tower_dedup::testing::{Fault, StoreCall};
use tower_dedup::{DedupLayer, OnMismatch, OnUnavailable, StoreError, StoreErrorKind, key};

use crate::hooked::{BEFORE, Hooked};
use support::words::by_word;
use support::{Body, Handler, answered, dedup_key, faulty, result, send, sqlite_url, terms, until};

const EVENTS: usize = 40;

fn list(events: usize) -> Request<Body> {
    words((0..events).map(|number| format!("event-{number} ")).collect::<String>())
}

/// A request with an event for each of these words.
pub(crate) fn words(words: impl Into<Body>) -> Request<Body> {
    Request::post("/").body(words.into()).unwrap()
}

/// Otherwise the leases of the other events lapse, and they run again.
#[tokio::test(start_paused = true)]
async fn key_that_cannot_be_completed_delays_no_other_key_of_its_list() {
    // Away when the list is completed. Then it refuses to complete one of its keys.
    let completions = AtomicUsize::new(0);
    let store = Hooked::default().on(BEFORE, StoreCall::Complete, move |key, _| {
        let fault = match completions.fetch_add(1, Ordering::SeqCst) {
            0..EVENTS => Some(StoreErrorKind::Unavailable),
            _ => (key.id() == "event-3").then_some(StoreErrorKind::Refused),
        };
        let fault = fault.map(|kind| StoreError::new(kind, "completing keys"));
        async { fault.map_or(Ok(()), Err) }
    });
    let (store, handler) = (Arc::new(store), Handler::default());
    let service = DedupLayer::new(by_word(), Arc::clone(&store)).layer(handler.service());
    assert_eq!(send(&service, list(EVENTS)).await.status(), 200);
    tokio::time::sleep(Duration::from_secs(10)).await;
    for number in 0..EVENTS {
        let entry = store.store.get(&dedup_key(&format!("event-{number}"))).await.unwrap();
        let is_complete = matches!(entry.unwrap().state, KeyState::Complete);
        assert_eq!(is_complete, number != 3, "{number}");
    }
}

/// So a SQL store sends them as one batch.
#[tokio::test(start_paused = true)]
async fn calls_of_a_list_are_made_at_once() {
    let slow = |_: &_, _: &_| async {
        tokio::time::sleep(Duration::from_millis(500)).await;
        Ok(())
    };
    let store =
        Hooked::default().on(BEFORE, StoreCall::Claim, slow).on(BEFORE, StoreCall::Complete, slow);
    let service = DedupLayer::new(by_word(), store).layer(Handler::default().service());
    let started = tokio::time::Instant::now();
    assert_eq!(answered(&send(&service, list(EVENTS)).await), (200, None));
    assert_eq!(started.elapsed(), Duration::from_secs(1));
}

#[tokio::test]
async fn list_that_is_longer_than_the_queue_waits_for_room() {
    let dir = tempfile::tempdir().unwrap();
    let options = with_sqlite_bounds(SqliteOptions::new(), 1_024, 50);
    let store = SqliteAdapter::connect_with(&sqlite_url(dir.path()), options).await.unwrap();
    let handler = Handler::default();
    let service = DedupLayer::new(by_word(), store).layer(handler.service());
    assert_eq!(result(&send(&service, list(200)).await), None);
    assert_eq!(handler.last().keys().count(), 200);
    assert_eq!(result(&send(&service, list(200)).await), Some("duplicate"));
}

/// It would be asked again and again until the bound.
#[tokio::test(start_paused = true)]
async fn store_that_refuses_every_call_of_a_list_is_asked_once_for_each() {
    let claims = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&claims);
    let store = Hooked::default().on(BEFORE, StoreCall::Claim, move |_, _| {
        counted.fetch_add(1, Ordering::SeqCst);
        async { Err(StoreError::new(StoreErrorKind::Overloaded, "claiming keys")) }
    });
    let service = DedupLayer::new(by_word(), store).layer(Handler::default().service());
    assert_eq!(send(&service, list(EVENTS)).await.status(), 503);
    assert_eq!(claims.load(Ordering::SeqCst), EVENTS);
}

/// Otherwise `a` would run again.
#[tokio::test]
async fn list_with_an_event_of_another_delivery_never_runs_unprotected() {
    let store = Hooked::default().on(BEFORE, StoreCall::Claim, |key, _| {
        let is_away = key.id() == "b";
        let fault = is_away.then(|| StoreError::new(StoreErrorKind::Unavailable, "claiming keys"));
        async { fault.map_or(Ok(()), Err) }
    });
    let handler = Handler::default();
    let layer = DedupLayer::new(by_word(), store).on_unavailable(OnUnavailable::FailOpen);
    let service = layer.layer(handler.service());
    assert_eq!(answered(&send(&service, words("a")).await), (200, None));
    assert_eq!(answered(&send(&service, words("a b")).await), (503, Some("unavailable")));
    assert_eq!(handler.runs(), 1);
}

/// Past its bound, a release on arrival could meet a delivery that takes the event for handled.
#[tokio::test(start_paused = true)]
async fn background_write_of_a_list_ends_soon_after_its_bound() {
    let store = faulty(MemoryAdapter::new());
    store.set(StoreCall::Release, Fault::Hang);
    let layer = DedupLayer::new(by_word(), Arc::clone(&store)).max_keys(640);
    let layer = layer.store_timeout(Duration::from_secs(30));
    let service = layer.layer(Handler::default().then(500).service());
    assert_eq!(send(&service, list(640)).await.status(), 500);
    tokio::time::sleep(Duration::from_secs(1_200)).await;
    // All at once before the answer; then 16 keys each 30 s, for 10 min.
    assert_eq!(store.calls(StoreCall::Release), 640 + 20 * 16);
}

/// After a 2xx, the event in flight would not come again.
#[tokio::test]
async fn response_that_is_no_success_is_no_2xx_while_another_event_is_in_flight() {
    for (status, answer) in
        [(202, (503, Some("in-flight"))), (404, (404, None)), (200, (503, Some("in-flight")))]
    {
        let store = Arc::new(MemoryAdapter::new());
        store.claim(&dedup_key("b"), &terms()).await.unwrap();
        let handler = Handler::default().then(status);
        let layer = DedupLayer::new(by_word(), Arc::clone(&store))
            .wait(Duration::ZERO)
            .success_when(|response| response.status == 200);
        let response = send(&layer.layer(handler.service()), words("a b")).await;
        assert_eq!((answered(&response), handler.runs()), (answer, 1), "{status}");
        let state = store.get(&dedup_key("a")).await.unwrap().unwrap().state;
        assert_eq!(matches!(state, KeyState::Complete), status == 200, "{state:?}");
    }
}

/// A statement claims `b`, which has no row. The next one, which claims `a`, finds the disk full.
#[tokio::test]
async fn key_that_sqlite_has_claimed_before_a_refusal_is_released() {
    let dir = tempfile::tempdir().unwrap();
    let options =
        SqliteConnectOptions::new().filename(dir.path().join("app.db")).create_if_missing(true);
    let options = options.pragma("max_page_count", "100");
    let pool = SqlitePoolOptions::new().max_connections(1).connect_with(options).await.unwrap();
    let store = SqliteAdapter::new(pool.clone());
    let (key, earlier) = (dedup_key("a"), terms());
    store.claim(&key, &earlier).await.unwrap();
    store.release(&key, &earlier).await.unwrap();
    let trigger = "
        CREATE TABLE filler (bytes BLOB);
        CREATE TRIGGER fills AFTER UPDATE ON webhook_deliveries WHEN NEW.token IS NOT NULL BEGIN
            INSERT INTO filler VALUES (zeroblob(1000000));
        END;";
    sqlx::raw_sql(trigger).execute(&pool).await.unwrap();
    let handler = Handler::default();
    let layer = DedupLayer::new(by_word(), store.clone());
    let handle = layer.handle();
    let response = send(&layer.layer(handler.service()), words("a b")).await;
    assert_eq!((answered(&response), handler.runs()), ((503, Some("unavailable")), 0));
    handle.drain().await;
    let state = store.get(&dedup_key("b")).await.unwrap().unwrap().state;
    assert!(matches!(state, KeyState::Released), "{state:?}");
}

/// Thousands of completions may be pending for minutes. They must not hold the bodies in memory.
#[tokio::test]
async fn body_of_a_multi_event_delivery_is_dropped_while_its_completion_is_pending() {
    struct Owner(#[expect(dead_code, reason = "it is counted")] Arc<()>);
    impl AsRef<[u8]> for Owner {
        fn as_ref(&self) -> &[u8] {
            br#"{"events":[{"id":1},{"id":2}]}"#
        }
    }
    let (store, handler) = (faulty(MemoryAdapter::new()), Handler::default());
    let events = key::each("/events", key::json("/id")).namespace("acme");
    store.set_all(Fault::Fail);
    for fingerprint in [false, true] {
        let dedup = DedupLayer::new(events.clone(), Arc::clone(&store));
        let dedup = dedup.on_unavailable(OnUnavailable::FailOpen);
        let dedup = if fingerprint {
            dedup.compare_payload(key::body_digest(), OnMismatch::Refuse)
        } else {
            dedup
        };
        let handle = dedup.handle();
        let owners = Arc::new(());
        let body = Bytes::from_owner(Owner(Arc::clone(&owners)));
        let request = Request::post("/").body(Full::new(body)).unwrap();
        let response = dedup.layer(handler.service()).oneshot(request).await.unwrap();
        assert_eq!((response.status(), handle.pending_writes()), (StatusCode::OK, 1));
        drop(response);
        until(|| Arc::strong_count(&owners) == 1).await;
        assert_eq!(handle.pending_writes(), 1);
    }
}
