//! Events with two identities. Of the deliveries of one event one runs: in several processes at once, under every ledger.

use std::collections::HashMap;
use std::future::ready;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use http::{Request, StatusCode};
use tower::Layer;
use tower_dedup::adapter::contract::{CallTerms, DedupAdapter, Fetch, Token};
use tower_dedup::adapter::maintenance::{KeyState, MaintenanceAdapter};
use tower_dedup::key::{self, Event, Extracted};
use tower_dedup::testing::StoreCall;
use tower_dedup::{DedupKey, DedupLayer, Delivery, KeyExtractor};

use crate::hooked::{BEFORE, Hooked, NO_STORED_DATA};
use crate::lists::words;
use support::ledgers::Setup;
use support::words::by_word;
use support::{Body, Handler, by_header, dedup_key, memory, result, send, terms};

const ROUNDS: usize = 30;
/// A task of each process sends each id.
const PROCESSES: usize = 2;

fn by_id_and_change() -> KeyExtractor {
    let change = key::header("x-change");
    key::header("webhook-id").namespace("test").alias("change", change)
}

fn event(id: &str, change: &str) -> Request<Body> {
    let request = Request::post("/hook").header("webhook-id", id).header("x-change", change);
    request.body(Body::from("payload")).unwrap()
}

#[tokio::test]
async fn store_of_keys_only_is_asked_for_no_data() {
    for is_bare in [true, false] {
        let check = move |_: &DedupKey, terms: &CallTerms| {
            let is_with_data = terms.stored_data().is_some();
            assert_eq!(is_with_data || terms.fetch() != Fetch::Nothing, !is_bare);
            ready(Ok(()))
        };
        let store = Hooked::default().on(BEFORE, StoreCall::Claim, check);
        let mut store = store.on(BEFORE, StoreCall::Complete, check);
        store.lacks = is_bare.then_some(NO_STORED_DATA);
        let store = Arc::new(store);
        let deliver = async |key: KeyExtractor, id| {
            let service = DedupLayer::new(key, Arc::clone(&store));
            let sent = send(&service.layer(Handler::default().service()), event(id, "1")).await;
            result(&sent).map(str::to_owned)
        };
        assert_eq!(deliver(by_id_and_change(), "a").await, None);
        assert_eq!(deliver(by_id_and_change(), "b").await.as_deref(), Some("duplicate"));
    }
}

/// Two ids report each change. Layers with connections of their own are processes that share nothing else. Of two
/// changes in three a row has expired: that of its second identity, or that of a key.
async fn one_of_racing_deliveries_runs<S: Setup>(setup: S) {
    let operator = setup.operator().await;
    // Makes the table.
    let service = setup.layer(by_id_and_change()).await.layer(Handler::default().service());
    send(&service, event("other", "other")).await;
    for round in (0..ROUNDS).filter(|round| round % 3 < 2) {
        let name = [("test.change", format!("change-{round}")), ("test", format!("{round}-0"))];
        let (namespace, id) = &name[round % 3];
        let keys = DedupKey::new(namespace, id).unwrap();
        let terms = CallTerms::on_claim(Token::random(), Duration::from_secs(60));
        operator.claim(&keys, &terms).await.unwrap();
    }
    setup.age(Duration::from_secs(61)).await;
    let handler = Handler::default();
    let mut services = Vec::new();
    for _ in 0..PROCESSES {
        let layer = setup.layer(by_id_and_change()).await;
        services.push((layer.handle(), layer.layer(handler.service())));
    }
    for round in 0..ROUNDS {
        let change = format!("change-{round}");
        let tasks = (0..8).map(|task| {
            let (_, service) = &services[task % PROCESSES];
            let request = event(&format!("{round}-{}", task / PROCESSES % 2), &change);
            async move { send(service, request).await.status() }
        });
        for status in join_all(tasks).await {
            // A delivery that has waited for too long is in flight.
            assert!([StatusCode::OK, StatusCode::SERVICE_UNAVAILABLE].contains(&status));
        }
        for id in [format!("{round}-0"), format!("{round}-1")] {
            for (_, service) in &services {
                assert_eq!(result(&send(service, event(&id, &change)).await), Some("duplicate"));
            }
        }
    }
    let mut runs = HashMap::new();
    for delivery in handler.deliveries() {
        let round = delivery.id().split_once('-').unwrap().0.to_owned();
        *runs.entry(round).or_insert(0) += 1;
    }
    assert!(runs.len() == ROUNDS && runs.values().all(|runs| *runs == 1), "{runs:?}");
    for (handle, _) in services {
        handle.drain().await;
    }
}

support::on_ledgers!(
    [
        lease_memory = OnMemory,
        lease_sqlite = OnSqlite,
        lease_postgres = OnPostgres,
        transactional_sqlite = InSqlite,
        transactional_postgres = InPostgres,
        lease_redis = OnRedis,
    ],
    one_of_racing_deliveries_runs,
);

/// The guide's way to change a key: while both kinds of process run, the new key has the old one as its second identity.
#[tokio::test]
async fn changed_key_is_a_duplicate_for_old_and_new_processes() {
    let (store, handler) = (memory(), Handler::default());
    let new = KeyExtractor::from_fn("test-2", |request| {
        let id = request.headers()["webhook-id"].to_str().unwrap();
        let event = Event::new(DedupKey::new("test-2", &format!("new-{id}"))?);
        Ok(Extracted::Keys(event.with_alias(dedup_key(id)).into()))
    });
    let [old, new] = [by_header(), new]
        .map(|keys| DedupLayer::new(keys, Arc::clone(&store)).layer(handler.service()));
    for (id, first, second) in [("1", &old, &new), ("2", &new, &old)] {
        assert_eq!(result(&send(first, event(id, "")).await), None);
        assert_eq!(result(&send(second, event(id, "")).await), Some("duplicate"));
    }
}

/// The first run charges, then fails. Whatever part of the delivery runs next, and under which id, charges again.
#[tokio::test]
async fn idempotency_key_is_the_same_for_each_attempt() {
    let key = |delivery: &Delivery, id| delivery.idempotency_key_of(&dedup_key(id), "charge");
    for (first, second, again) in
        [("evt_1=order", "", "evt_2=order"), ("evt_1 evt_2", "evt_1", "evt_1 evt_2")]
    {
        let handler = Handler::default().then(500);
        let service = DedupLayer::new(by_word(), memory()).layer(handler.service());
        assert_eq!(send(&service, words(first)).await.status(), 500);
        let first = handler.last();
        if !second.is_empty() {
            assert_eq!(send(&service, words(second)).await.status(), 200);
        }
        assert_eq!(send(&service, words(again)).await.status(), 200);
        let last = handler.last();
        assert_eq!((last.key(), first.attempt(), last.attempt()), (&dedup_key("evt_2"), 1, 2));
        assert_eq!(first.idempotency_key("charge"), last.idempotency_key("charge"));
        let (of_first, of_last) = (key(&first, "evt_1"), key(&last, "evt_2"));
        assert_eq!(of_first == of_last, second.is_empty(), "one event under two ids");
    }
}

/// A delivery that waits holds nothing: the second identity is free before the answer.
#[tokio::test]
async fn second_identity_is_released_before_the_answer_if_the_key_is_not_claimed() {
    let (adapter, handler) = (memory(), Handler::default());
    let service = DedupLayer::new(by_word(), Arc::clone(&adapter))
        .wait(Duration::ZERO)
        .layer(handler.service());
    let other = terms();
    adapter.claim(&dedup_key("g"), &other).await.unwrap();
    let second = DedupKey::new("test.second", "w").unwrap();
    for expected in ["in-flight", "duplicate"] {
        assert_eq!(result(&send(&service, words("g=w")).await), Some(expected));
        let entry = adapter.get(&second).await.unwrap().unwrap();
        assert_eq!(entry.state, KeyState::Released, "{expected}");
        adapter.complete(&dedup_key("g"), &other).await.unwrap();
    }
    // So another event with this second identity runs.
    assert_eq!(send(&service, words("h=w")).await.status(), 200);
    assert_eq!(handler.runs(), 1);
}
