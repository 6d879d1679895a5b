//! The calls that a ledger makes for the keys of a list.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tower::Layer;
use tower_dedup::adapter::contract::{
    Abilities, CallTerms, ClaimReply, CompleteReply, DedupAdapter, RenewReply, StoreFuture,
};
use tower_dedup::adapter::inspect::{KeyState, MaintenanceAdapter};
use tower_dedup::adapter::{Batching, MemoryAdapter, SqliteAdapter, SqliteOptions};
use tower_dedup::{DedupKey, DedupLayer, Error, ErrorKind};

use crate::support::multi_event::by_word;
use crate::support::{Body, Handler, dedup_key, result, send, sqlite_url};

const EVENTS: usize = 40;

fn list(events: usize) -> http::Request<Body> {
    let events = (0..events).map(|number| format!("event-{number} ")).collect::<String>();
    http::Request::post("/").body(Body::from(events)).unwrap()
}

/// A store that is away when a list is completed, and then refuses to complete one of its keys.
#[derive(Default)]
struct RefusesOne {
    inner: MemoryAdapter,
    completions: AtomicUsize,
}

impl DedupAdapter for RefusesOne {
    fn abilities(&self) -> Abilities {
        self.inner.abilities()
    }

    fn claim<'a>(&'a self, key: &'a DedupKey, terms: &'a CallTerms) -> StoreFuture<'a, ClaimReply> {
        self.inner.claim(key, terms)
    }

    fn release<'a>(&'a self, key: &'a DedupKey, terms: &'a CallTerms) -> StoreFuture<'a, ()> {
        self.inner.release(key, terms)
    }

    fn renew<'a>(&'a self, key: &'a DedupKey, terms: &'a CallTerms) -> StoreFuture<'a, RenewReply> {
        self.inner.renew(key, terms)
    }

    fn complete<'a>(
        &'a self,
        key: &'a DedupKey,
        terms: &'a CallTerms,
    ) -> StoreFuture<'a, CompleteReply> {
        let fault = match self.completions.fetch_add(1, Ordering::SeqCst) {
            0..EVENTS => Some(ErrorKind::Unavailable),
            _ => (key.id() == "event-3").then_some(ErrorKind::Refused),
        };
        match fault {
            Some(kind) => Box::pin(async move { Err(Error::new(kind, "completing keys")) }),
            None => self.inner.complete(key, terms),
        }
    }
}

/// Otherwise the leases of the other events lapse, and they run again.
#[tokio::test(start_paused = true)]
async fn key_that_cannot_be_completed_delays_no_other_key_of_its_list() {
    let (store, handler) = (Arc::new(RefusesOne::default()), Handler::default());
    let service = DedupLayer::new(by_word(), Arc::clone(&store)).layer(handler.service());
    assert_eq!(send(&service, list(EVENTS)).await.status(), 200);
    tokio::time::sleep(Duration::from_secs(10)).await;
    for number in 0..EVENTS {
        let entry = store.inner.get(&dedup_key(&format!("event-{number}"))).await.unwrap();
        let is_complete = matches!(entry.unwrap().state, KeyState::Complete);
        assert_eq!(is_complete, number != 3, "{number}");
    }
}

#[tokio::test]
async fn list_that_is_longer_than_the_queue_waits_for_room() {
    let dir = tempfile::tempdir().unwrap();
    let options = SqliteOptions::new().batching(Batching::new().max_queued_keys(50));
    let store = SqliteAdapter::connect_with(&sqlite_url(dir.path()), options).await.unwrap();
    let handler = Handler::default();
    let service = DedupLayer::new(by_word(), store).layer(handler.service());
    assert_eq!(result(&send(&service, list(200)).await), None);
    assert_eq!(handler.last().keys().count(), 200);
    assert_eq!(result(&send(&service, list(200)).await), Some("duplicate"));
}
