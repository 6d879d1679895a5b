//! The on-arrival ledger never sends a claim that it could not release, and releases every key of a claim.

use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::Semaphore;
use tower::{Layer, ServiceExt};
use tower_dedup::adapter::MemoryAdapter;
use tower_dedup::adapter::maintenance::MaintenanceAdapter;
use tower_dedup::key::{self, Event, Extracted};
use tower_dedup::testing::{Fault, StoreCall};
use tower_dedup::{DedupLayer, KeyExtractor, OnUnavailable};

use crate::hooked::{AFTER, BEFORE, Hooked};
use support::words::by_word;
use support::{
    Body, Handler, answered, by_header, dedup_key, faulty, memory, request, result, rows, send,
    spawn_send, until,
};

/// The number of claims that may wait for their reply, or for their release, at once.
const SLOTS: usize = 16_384;

/// If the reply of a claim is lost, and there is no room to release the claim, then the retry is a duplicate of a
/// run that never happened. The handler of a layer that fails open runs all the same.
#[tokio::test(start_paused = true)]
async fn claim_without_room_for_its_release_is_not_sent_and_is_503_unless_the_layer_fails_open() {
    let (store, handler) = (faulty(MemoryAdapter::new()), Handler::default());
    let layer = DedupLayer::on_arrival(by_header(), Arc::clone(&store)).max_running(2 * SLOTS);
    let (handle, closed) = (layer.handle(), layer.clone().layer(handler.service()));
    store.set(StoreCall::Claim, Fault::LoseReply);
    store.set(StoreCall::Release, Fault::Fail);
    let deliveries: Vec<_> =
        (0..SLOTS).map(|id| spawn_send(&closed, request(&id.to_string()))).collect();
    for delivery in deliveries {
        assert_eq!(delivery.await.unwrap(), 503);
    }
    assert_eq!(handle.pending_writes(), SLOTS);
    let claims = store.calls(StoreCall::Claim);
    let open = layer.on_unavailable(OnUnavailable::FailOpen).layer(handler.service());
    for (service, status, runs) in [(&closed, 503, 0), (&open, 200, 1)] {
        assert_eq!(send(service, request("a")).await.status(), status);
        assert_eq!((store.calls(StoreCall::Claim), handle.pending_writes()), (claims, SLOTS));
        assert!(store.get(&dedup_key("a")).await.unwrap().is_none(), "the claim was sent");
        assert_eq!(handler.runs(), runs);
    }
    assert!(handler.last().is_unprotected());

    store.set_all(Fault::None);
    handle.drain().await;
    assert_eq!(result(&send(&closed, request("a")).await), None);
    assert!(!handler.last().is_unprotected());
}

/// A store that loses the replies of the first hundred claims. It releases one key after the other, and needs
/// 100 ms for each.
#[tokio::test(start_paused = true)]
async fn every_key_of_a_delivery_is_released_by_a_store_that_is_slow() {
    let handler = Handler::default();
    let (claims, turn) = (AtomicUsize::new(0), Arc::new(Semaphore::new(1)));
    let slow = Hooked::default()
        .on(AFTER, StoreCall::Claim, move |_, _| {
            let is_lost = claims.fetch_add(1, Ordering::SeqCst) < 100;
            async move { if is_lost { pending().await } else { Ok(()) } }
        })
        .on(BEFORE, StoreCall::Release, move |_, _| {
            let turn = Arc::clone(&turn);
            async move {
                let _turn = turn.acquire().await;
                tokio::time::sleep(Duration::from_millis(100)).await;
                Ok(())
            }
        });
    let layer = DedupLayer::on_arrival(by_word(), slow).store_timeout(Duration::from_secs(2));
    let (handle, service) = (layer.handle(), layer.layer(handler.service()));
    let events = (0..100).map(|number| format!("event-{number} ")).collect::<String>();
    let deliver = || http::Request::post("/").body(Body::from(events.clone())).unwrap();
    assert_eq!(send(&service, deliver()).await.status(), 503);
    let drained = tokio::time::timeout(Duration::from_secs(60), handle.drain());
    drained.await.expect("every key is released");
    assert_eq!(result(&send(&service, deliver()).await), None);
    assert_eq!(handler.last().keys().count(), 100);
}

/// It would be complete before the key is claimed: other processes would acknowledge an event that may not run.
#[tokio::test]
async fn second_identity_on_arrival_is_refused() {
    let (store, handler) = (memory(), Handler::default());
    let rule = "one identity of an event on arrival, and not a second one";
    for keys in [by_header().content_identity(), by_header().alias("n", key::json("/n"))] {
        let refused = DedupLayer::on_arrival(keys, Arc::clone(&store)).checked().unwrap_err();
        assert_eq!(refused.to_string(), rule);
    }
    // Of a closure, only the delivery tells.
    let keys = KeyExtractor::from_fn("test", |_| {
        let event = Event::new(dedup_key("a")).with_alias(dedup_key("b"));
        Ok(Extracted::Keys(event.into()))
    });
    let layer = DedupLayer::on_arrival(keys, Arc::clone(&store));
    let service = layer.on_unavailable(OnUnavailable::FailOpen).layer(handler.service());
    let answer = send(&service, request("a")).await;
    assert_eq!(answered(&answer), (503, Some("unavailable")));
    assert_eq!((rows(&store).await, handler.runs()), (0, 0));
}

/// The retry reads the key as complete, and gets the reply after the release. Its event has not run.
#[tokio::test(start_paused = true)]
async fn key_that_is_released_before_the_reply_is_never_a_duplicate() {
    let claimed = Arc::new(AtomicUsize::new(0));
    let [replies, releases] = [(); 2].map(|()| Arc::new(Semaphore::new(0)));
    let wait = |permits: &Arc<Semaphore>| {
        let permits = Arc::clone(permits);
        move || {
            let permits = Arc::clone(&permits);
            async move {
                permits.acquire().await.unwrap().forget();
                Ok(())
            }
        }
    };
    let (count, reply, release) = (Arc::clone(&claimed), wait(&replies), wait(&releases));
    let store = Hooked::default()
        .on(AFTER, StoreCall::Claim, move |_, _| {
            count.fetch_add(1, Ordering::SeqCst);
            reply()
        })
        .on(BEFORE, StoreCall::Release, move |_, _| release());
    let (store, handler) = (Arc::new(store), Handler::default());
    let layer = DedupLayer::on_arrival(by_header(), Arc::clone(&store));
    let layer = layer.wait(Duration::ZERO);
    let (handle, patient) = (layer.handle(), layer.clone().layer(handler.service()));
    let hasty = layer.store_timeout(Duration::from_millis(20)).layer(handler.service());
    assert_eq!(answered(&send(&hasty, request("a")).await), (503, Some("unavailable")));
    let retry = tokio::spawn(patient.clone().oneshot(request("a")));
    until(|| claimed.load(Ordering::SeqCst) == 2).await;
    releases.add_permits(1);
    until(|| handle.pending_writes() == 0).await;
    replies.add_permits(2);
    let answer = retry.await.unwrap().unwrap();
    assert_eq!(answered(&answer), (503, Some("in-flight")));
    assert_eq!(answered(&send(&patient, request("a")).await), (200, None));
    assert_eq!(handler.runs(), 1);
}

/// The store has executed the first claim, and its reply is lost: another delivery of this process waits until the claim is
/// released, and then runs. The store takes times in whole milliseconds, so a row may seem older than its claim.
#[tokio::test(start_paused = true)]
async fn duplicate_beside_a_claim_without_reply_waits_for_it() {
    for (at, later) in [(0, 500_000), (900, 200)] {
        let claims = Arc::new(AtomicUsize::new(0));
        let claimed = Arc::clone(&claims);
        let store = Hooked::default().on(AFTER, StoreCall::Claim, move |_, _| {
            let is_lost = claimed.fetch_add(1, Ordering::SeqCst) == 0;
            async move { if is_lost { pending().await } else { Ok(()) } }
        });
        let (store, handler) = (Arc::new(store), Handler::default());
        let layer = DedupLayer::on_arrival(by_header(), Arc::clone(&store));
        let (handle, service) = (layer.handle(), layer.layer(handler.service()));
        tokio::time::advance(Duration::from_micros(at)).await;
        let first = spawn_send(&service, request("a"));
        while claims.load(Ordering::SeqCst) == 0 {
            tokio::task::yield_now().await;
        }
        tokio::time::advance(Duration::from_micros(later)).await;
        let second = send(&service, request("a")).await;
        assert_eq!(first.await.unwrap(), 503);
        assert_eq!(answered(&second), (200, None));
        handle.drain().await;
        assert_eq!(answered(&send(&service, request("a")).await), (200, Some("duplicate")));
        assert_eq!(handler.runs(), 1);
    }
}
