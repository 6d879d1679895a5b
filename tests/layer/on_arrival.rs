//! The on-arrival ledger never sends a claim that it could not release, and releases every key of a claim.

use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::Semaphore;
use tower::{Layer, ServiceExt};
use tower_dedup::adapter::MemoryAdapter;
use tower_dedup::adapter::contract::{Abilities, CallTerms, ClaimReply, DedupAdapter, StoreFuture};
use tower_dedup::adapter::inspect::MaintenanceAdapter;
use tower_dedup::key::{self, Event, Extracted};
use tower_dedup::testing::{Fault, StoreCall};
use tower_dedup::{DedupKey, DedupLayer, KeyExtractor, OnInFlight, OnUnavailable};

use crate::support::multi_event::by_word;
use crate::support::{
    Body, Handler, answered, by_header, dedup_key, faulty, memory, request, result, rows, send,
    until,
};

/// The number of claims that may wait for their reply, or for their release, at once.
const SLOTS: usize = 16_384;

/// If the reply of a claim is lost, and there is no room to release the claim, then the retry is a duplicate of a
/// run that never happened.
#[tokio::test(start_paused = true)]
async fn claim_without_room_for_its_release_is_503_and_is_not_sent() {
    let (store, handler) = (faulty(MemoryAdapter::new()), Handler::default());
    let layer = DedupLayer::on_arrival(by_header(), Arc::clone(&store)).max_running(SLOTS + 1);
    let (handle, service) = (layer.handle(), layer.layer(handler.service()));
    store.set(StoreCall::Claim, Fault::LoseReply);
    store.set(StoreCall::Release, Fault::Fail);
    let start = |id: String| {
        let service = service.clone();
        tokio::spawn(async move { send(&service, request(&id)).await.status() })
    };
    let deliveries: Vec<_> = (0..SLOTS).map(|number| start(number.to_string())).collect();
    for delivery in deliveries {
        assert_eq!(delivery.await.unwrap(), 503);
    }
    assert_eq!(handle.pending_writes(), SLOTS);
    assert_eq!(start("a".to_owned()).await.unwrap(), 503);
    assert!(store.get(&dedup_key("a")).await.unwrap().is_none(), "the claim was sent");

    store.set_all(Fault::None);
    handle.drain().await;
    assert_eq!(result(&send(&service, request("a")).await), None);
    assert_eq!(handler.runs(), 1);
}

/// The same without a store that replies: the handler of a layer that fails open runs all the same.
#[tokio::test(start_paused = true)]
async fn layer_that_fails_open_runs_without_room_for_a_release() {
    let (store, handler) = (faulty(MemoryAdapter::new()), Handler::default());
    let layer = DedupLayer::on_arrival(by_header(), Arc::clone(&store)).max_running(SLOTS + 1);
    let layer = layer.on_unavailable(OnUnavailable::FailOpen);
    let (handle, service) = (layer.handle(), layer.layer(handler.service()));
    store.set(StoreCall::Claim, Fault::Fail);
    for number in 0..SLOTS + 10 {
        let answered = send(&service, request(&number.to_string())).await;
        assert_eq!((answered.status().as_u16(), handler.runs()), (200, number + 1));
        assert!(handler.last().is_unprotected());
    }
    assert_eq!(handle.pending_writes(), SLOTS);
    store.set_all(Fault::None);
    handle.drain().await;
}

/// A store that loses the replies of the first hundred claims. It releases one key after the other, and needs
/// 100 ms for each.
#[derive(Default)]
struct LosesFirstClaims {
    store: MemoryAdapter,
    claims: AtomicUsize,
    releases: tokio::sync::Mutex<()>,
}

impl DedupAdapter for LosesFirstClaims {
    fn abilities(&self) -> Abilities {
        self.store.abilities()
    }

    fn claim<'a>(&'a self, key: &'a DedupKey, terms: &'a CallTerms) -> StoreFuture<'a, ClaimReply> {
        Box::pin(async {
            let claimed = self.store.claim(key, terms).await;
            if self.claims.fetch_add(1, Ordering::SeqCst) < 100 { pending().await } else { claimed }
        })
    }

    fn release<'a>(&'a self, key: &'a DedupKey, terms: &'a CallTerms) -> StoreFuture<'a, ()> {
        Box::pin(async {
            let _turn = self.releases.lock().await;
            tokio::time::sleep(Duration::from_millis(100)).await;
            self.store.release(key, terms).await
        })
    }
}

#[tokio::test(start_paused = true)]
async fn every_key_of_a_delivery_is_released_by_a_store_that_is_slow() {
    let handler = Handler::default();
    let slow = LosesFirstClaims::default();
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
    for keys in [by_header().content_identity(), by_header().second_identity("n", key::json("/n"))]
    {
        let refused = DedupLayer::on_arrival(keys, Arc::clone(&store)).checked().unwrap_err();
        assert_eq!(refused.to_string(), rule);
    }
    // Of a closure, only the delivery tells.
    let keys = KeyExtractor::from_fn("test", |_| {
        let event = Event::new(dedup_key("a")).with_second_identity(dedup_key("b"));
        Ok(Extracted::Keys(event.into()))
    });
    let layer = DedupLayer::on_arrival(keys, Arc::clone(&store));
    let service = layer.on_unavailable(OnUnavailable::FailOpen).layer(handler.service());
    let answer = send(&service, request("a")).await;
    assert_eq!(answered(&answer), (503, Some("unavailable")));
    assert_eq!((rows(&store).await, handler.runs()), (0, 0));
}

/// A store whose replies to claims, and whose releases, wait for a permit.
struct Gated {
    inner: MemoryAdapter,
    claimed: AtomicUsize,
    replies: Semaphore,
    releases: Semaphore,
}

impl DedupAdapter for Gated {
    fn claim<'a>(&'a self, key: &'a DedupKey, terms: &'a CallTerms) -> StoreFuture<'a, ClaimReply> {
        Box::pin(async move {
            let reply = self.inner.claim(key, terms).await;
            self.claimed.fetch_add(1, Ordering::SeqCst);
            self.replies.acquire().await.unwrap().forget();
            reply
        })
    }

    fn release<'a>(&'a self, key: &'a DedupKey, terms: &'a CallTerms) -> StoreFuture<'a, ()> {
        Box::pin(async move {
            self.releases.acquire().await.unwrap().forget();
            self.inner.release(key, terms).await
        })
    }
}

/// The retry reads the key as complete, and gets the reply after the release. Its event has not run.
#[tokio::test]
async fn key_that_is_released_before_the_reply_is_never_a_duplicate() {
    let (replies, releases) = (Semaphore::new(0), Semaphore::new(0));
    let store =
        Gated { inner: MemoryAdapter::new(), claimed: AtomicUsize::new(0), replies, releases };
    let (store, handler) = (Arc::new(store), Handler::default());
    let layer = DedupLayer::on_arrival(by_header(), Arc::clone(&store));
    let layer = layer.on_in_flight(OnInFlight::Reject);
    let (handle, patient) = (layer.handle(), layer.clone().layer(handler.service()));
    let hasty = layer.store_timeout(Duration::from_millis(20)).layer(handler.service());
    assert_eq!(answered(&send(&hasty, request("a")).await), (503, Some("unavailable")));
    let retry = tokio::spawn(patient.clone().oneshot(request("a")));
    until(|| store.claimed.load(Ordering::SeqCst) == 2).await;
    store.releases.add_permits(1);
    until(|| handle.pending_writes() == 0).await;
    store.replies.add_permits(2);
    let answer = retry.await.unwrap().unwrap();
    assert_eq!(answered(&answer), (503, Some("in-flight")));
    assert_eq!(answered(&send(&patient, request("a")).await), (200, None));
    assert_eq!(handler.runs(), 1);
}
