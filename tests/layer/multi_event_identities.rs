//! Multi-event deliveries, and events with two identities.

use std::sync::Arc;
use std::time::Duration;

use http::Request;
use tower::Layer;
use tower_dedup::adapter::contract::{CallTerms, DedupAdapter, Token};
use tower_dedup::adapter::inspect::{KeyState, MaintenanceAdapter};
use tower_dedup::key::{DedupKey, Event};
use tower_dedup::{DedupLayer, Delivery, OnInFlight};

use crate::support::multi_event::by_word;
use crate::support::{Body, Handler, dedup_key, memory, result, send};

fn events(words: &str) -> Request<Body> {
    Request::post("/hook").body(Body::from(words.to_owned())).unwrap()
}

fn ids(delivery: &Delivery) -> Vec<&str> {
    delivery.keys().map(DedupKey::id).collect()
}

/// The first run charges, then fails. The same event under its other id is the second attempt.
#[tokio::test]
async fn idempotency_key_of_an_event_under_its_other_id_is_the_same() {
    let handler = Handler::default().then(500);
    let service = DedupLayer::new(by_word(), memory()).layer(handler.service());
    assert_eq!(send(&service, events("evt_1=order")).await.status(), 500);
    let first = handler.last();
    assert_eq!(send(&service, events("evt_2=order")).await.status(), 200);
    let second = handler.last();
    assert_eq!((first.attempt(), second.attempt()), (1, 2));
    assert_eq!(first.idempotency_key("charge"), second.idempotency_key("charge"));
    assert_eq!(
        first.idempotency_key_of(&dedup_key("evt_1"), "charge"),
        second.idempotency_key_of(&dedup_key("evt_2"), "charge")
    );
}

#[tokio::test]
async fn idempotency_key_of_a_multi_event_delivery_is_the_same_when_a_part_runs_again() {
    let handler = Handler::default().then(500);
    let service = DedupLayer::new(by_word(), memory()).layer(handler.service());
    assert_eq!(send(&service, events("a b")).await.status(), 500);
    let first = handler.last();
    assert_eq!(send(&service, events("a")).await.status(), 200);
    assert_eq!(send(&service, events("a b")).await.status(), 200);
    assert_eq!(ids(&handler.last()), ["b"]);
    assert_eq!(first.idempotency_key("mail"), handler.last().idempotency_key("mail"));
    assert_ne!(first.idempotency_key("mail"), first.idempotency_key_of(&dedup_key("b"), "mail"));
}

/// A delivery that waits holds nothing: the second identity is free before the answer.
#[tokio::test]
async fn second_identity_is_released_before_the_answer_if_the_key_is_not_claimed() {
    let (adapter, handler) = (memory(), Handler::default());
    let service = DedupLayer::new(by_word(), Arc::clone(&adapter))
        .on_in_flight(OnInFlight::Reject)
        .layer(handler.service());
    let other =
        CallTerms::on_completion(Token::random(), Duration::from_secs(60), Duration::from_secs(60));
    adapter.claim(&dedup_key("g"), &other).await.unwrap();
    let second = DedupKey::new("test.second", "w").unwrap();
    for expected in ["in-flight", "duplicate"] {
        assert_eq!(result(&send(&service, events("g=w")).await), Some(expected));
        let entry = adapter.get(&second).await.unwrap().unwrap();
        assert_eq!(entry.state, KeyState::Released, "{expected}");
        adapter.complete(&dedup_key("g"), &other).await.unwrap();
    }
    // So another event with this second identity runs.
    assert_eq!(send(&service, events("h=w")).await.status(), 200);
    assert_eq!(handler.runs(), 1);
}

/// An operator forgets the key. The second identity is complete for this key only.
#[tokio::test]
async fn forgotten_event_runs_again_and_its_twin_stays_a_duplicate() {
    let (adapter, handler) = (memory(), Handler::default());
    let service = DedupLayer::new(by_word(), Arc::clone(&adapter)).layer(handler.service());
    send(&service, events("evt_1=x evt_2")).await;
    for runs in 2..4 {
        adapter.forget(&dedup_key("evt_1")).await.unwrap();
        assert_eq!(result(&send(&service, events("evt_3=x")).await), Some("duplicate"));
        assert_eq!(send(&service, events("evt_2 evt_1=x")).await.status(), 200);
        assert_eq!((ids(&handler.last()), handler.runs()), (vec!["evt_1"], runs));
        assert!(!handler.last().lease_lost());
        for twin in ["evt_1=x", "evt_3=x"] {
            assert_eq!(result(&send(&service, events(twin)).await), Some("duplicate"));
        }
    }
}

/// Many tasks send the same identities in many orders. No task deadlocks, and each change runs
/// once.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn deliveries_that_share_one_identity_run_once_in_every_order() {
    let handler = Handler::default();
    let service = DedupLayer::new(by_word(), memory()).layer(handler.service());
    for round in 0..50 {
        let tasks = (0..16).map(|n| {
            let service = service.clone();
            let (a, b) =
                (format!("a{round}-{}=x{round}", n % 4), format!("b{round}-{}=y{round}", n % 3));
            let words = if n % 2 == 0 { format!("{a} {b}") } else { format!("{b} {a}") };
            tokio::spawn(async move { send(&service, events(&words)).await.status() })
        });
        for task in tasks.collect::<Vec<_>>() {
            let status = task.await.unwrap();
            assert!(status == 200 || status == 503, "{status}");
        }
    }
    let mut runs = std::collections::HashMap::new();
    for delivery in handler.deliveries() {
        for key in delivery.keys() {
            // The idempotency key derives from the second identity, so it stands for that identity
            // here.
            *runs.entry(delivery.idempotency_key_of(key, "run")).or_insert(0) += 1;
        }
    }
    assert_eq!(runs.len(), 100);
    assert!(runs.values().all(|runs| *runs == 1), "{runs:?}");
}

/// A second identity equal to the first is none, and a closure's single event can have one.
#[tokio::test]
async fn second_identity_of_a_closure_makes_a_duplicate() {
    let (adapter, handler) = (memory(), Handler::default());
    let same = DedupLayer::new(by_word(), Arc::clone(&adapter)).layer(handler.service());
    let key = dedup_key("a");
    let event = Event::new(key.clone()).with_second_identity(key);
    assert_eq!(event.second_identity(), None);
    send(&same, events("a")).await;
    assert!(!handler.last().lease_lost());

    let extractor = by_word().content_identity();
    let service = DedupLayer::new(extractor, memory()).layer(handler.service());
    let keys = |words: &str| {
        let mut request = events(words);
        request.headers_mut().insert("x", "y".parse().unwrap());
        request
    };
    send(&service, keys("evt_1")).await;
    let with_second = handler.last();
    assert_eq!(result(&send(&service, keys("evt_1")).await), Some("duplicate"));
    let plain = DedupLayer::new(by_word(), memory()).layer(handler.service());
    send(&plain, keys("evt_1")).await;
    let without = handler.last();
    assert_eq!(with_second.key(), without.key());
    let derived = |delivery: &Delivery| delivery.idempotency_key_of(delivery.key(), "run");
    assert_eq!(derived(&with_second), derived(&without), "a body is no name of an event");
}
