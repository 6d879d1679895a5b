//! One id with two payloads: compared, counted, and refused by choice; under every ledger.

use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use http::{Request, StatusCode};
use sha2::Digest;
use tower::Layer;
use tower_dedup::adapter::MemoryAdapter;
use tower_dedup::adapter::contract::{CallTerms, DedupAdapter, Fetch, Token};
use tower_dedup::adapter::maintenance::{KeyState, MaintenanceAdapter};
use tower_dedup::key::{self, Event, Extracted, Keys};
use tower_dedup::testing::{Fault, StoreCall};
use tower_dedup::{
    DedupKey, DedupLayer, Deduplicator, KeyExtractor, Mode, OnMismatch, OnUnavailable, Replay,
    provider,
};
use tracing::Subscriber;
use tracing_subscriber::layer::{Context, SubscriberExt};

use crate::faults::either;
use crate::hooked::{BEFORE, Hooked};
use crate::lists::words;
use support::ledgers::Setup;
use support::log::{Fields, Log};
use support::{Body, Handler, answered, by_header, dedup_key, event, faulty, result, send};

const DAY: Duration = Duration::from_secs(86_400);

/// The status and the result header of an answer: of the handler, or of the layer.
type Answer = (u16, Option<&'static str>);

pub(crate) const RAN: Answer = (200, None);
pub(crate) const DUPLICATE: Answer = (200, Some("duplicate"));
const REFUSED: Answer = (422, Some("mismatch"));

async fn other_payload_is_422_with_refuse<S: Setup>(setup: S) {
    let handler = Handler::default();
    let layer =
        setup.layer(by_header()).await.compare_payload(key::body_digest(), OnMismatch::Refuse);
    let service = layer.layer(handler.service());
    assert_eq!(answered(&send(&service, event("a", "one")).await), RAN);
    assert_eq!(answered(&send(&service, event("a", "two")).await), REFUSED);
    assert_eq!(answered(&send(&service, event("a", "one")).await), DUPLICATE);
    // Another process compares as well.
    let other = setup
        .layer(by_header())
        .await
        .compare_payload(key::body_digest(), OnMismatch::Refuse)
        .layer(handler.service());
    assert_eq!(answered(&send(&other, event("a", "two")).await), REFUSED);
    assert_eq!(answered(&send(&other, event("a", "one")).await), DUPLICATE);
    assert_eq!(answered(&send(&other, event("b", "two")).await), RAN);
    assert_eq!(handler.runs(), 2);
}

/// In a multi-event delivery each event is compared by its own bytes, whatever delivery carries it.
async fn events_of_one_delivery_are_compared_one_by_one<S: Setup>(setup: S) {
    let handler = Handler::default();
    let service = setup
        .layer(by_word())
        .await
        .compare_payload(key::body_digest(), OnMismatch::Refuse)
        .layer(handler.service());
    assert_eq!(answered(&send(&service, words("a=1 b=1 c=1")).await), RAN);
    assert_eq!(answered(&send(&service, words("c=1 a=1")).await), DUPLICATE);
    assert_eq!(answered(&send(&service, words("b=1")).await), DUPLICATE);
    assert_eq!(answered(&send(&service, words("a=2 b=1")).await), REFUSED);
    assert_eq!(handler.runs(), 1);
    // The new event runs before the rest is refused, and is complete afterwards.
    assert_eq!(answered(&send(&service, words("d=1 a=2")).await), REFUSED);
    assert_eq!(handler.runs(), 2);
    let new: Vec<String> = handler.last().keys().map(|key| key.id().to_owned()).collect();
    assert_eq!(new, ["d"]);
    assert_eq!(answered(&send(&service, words("d=1")).await), DUPLICATE);
    assert_eq!(answered(&send(&service, words("d=2")).await), REFUSED);
    assert_eq!(handler.runs(), 2);
    // The second event of a key is a duplicate of the first, whatever its payload.
    assert_eq!(answered(&send(&service, words("e=1 e=2")).await), RAN);
    assert_eq!(answered(&send(&service, words("e=1 e=2")).await), DUPLICATE);
    assert_eq!(answered(&send(&service, words("e=2")).await), REFUSED);
    assert_eq!(handler.runs(), 3);
}

/// The record of the mismatch comes before the handler of the new event.
async fn subscriber_that_panics_loses_no_event<S: Setup>(setup: S) {
    struct Panics;

    impl<S: Subscriber> tracing_subscriber::Layer<S> for Panics {
        fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
            let mut fields = BTreeMap::new();
            event.record(&mut Fields(&mut fields));
            assert!(!fields["message"].starts_with("payload mismatch"), "on purpose");
        }
    }

    let (handler, layer) = (Handler::default(), setup.layer(by_word()).await);
    let layer = layer.compare_payload(key::body_digest(), OnMismatch::Refuse);
    let service = layer.layer(handler.service());
    assert_eq!(answered(&send(&service, words("a=1")).await), RAN);
    support::log::ask_all_subscribers();
    let panics = tracing::subscriber::set_default(tracing_subscriber::registry().with(Panics));
    let sent = AssertUnwindSafe(send(&service, words("d=1 a=2"))).catch_unwind().await;
    drop(panics);
    drop(sent);
    // The retry finds it free, or complete.
    send(&service, words("d=1")).await;
    assert_eq!(handler.runs(), 2);
}

support::on_ledgers!(
    [
        lease_memory = OnMemory,
        arrival_memory = ArrivedInMemory,
        transactional_sqlite = InSqlite,
        transactional_postgres = InPostgres,
    ],
    other_payload_is_422_with_refuse,
    events_of_one_delivery_are_compared_one_by_one,
    subscriber_that_panics_loses_no_event,
);

/// One event for every `id=payload` of the body.
fn by_word() -> KeyExtractor {
    KeyExtractor::from_fn("test", |request| {
        let body = request.body();
        let text = std::str::from_utf8(body).unwrap();
        let events = text.split_whitespace().map(|word| {
            let (id, payload) = word.split_once('=').unwrap();
            let payload = body.slice_ref(payload.as_bytes());
            Ok(Event::new(DedupKey::new("test", id)?).with_payload(payload))
        });
        Ok(Keys::new(events.collect::<Result<_, _>>()?).map_or(Extracted::Missing, Extracted::Keys))
    })
}

/// Without `compare_payload`, the record has the digest of the whole body.
#[tokio::test]
async fn record_in_shadow_has_the_digest_of_the_first_events_payload() {
    let (log, _guard) = Log::of_this_thread();
    let layer = DedupLayer::new(by_word(), MemoryAdapter::new()).mode(Mode::Shadow);
    let compares = layer.clone().compare_payload(key::body_digest(), OnMismatch::Report);
    for (layer, payload) in [(layer, "c=1 a=2"), (compares, "1")] {
        send(&layer.layer(Handler::default().service()), words("c=1 a=2")).await;
        let digest = sha2::Sha256::digest(payload);
        let start: String = digest[..8].iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(log.last("delivery")["payload"], start, "of {payload}");
    }
}

/// Chosen values instead of the whole body, for senders that count their attempts in the body. A value that was never
/// present is equal to itself, whatever the part.
#[tokio::test]
async fn only_the_named_parts_are_compared() {
    let amount = || key::json("/amount");
    let named = [r#"{"amount":5,"n":1}"#, r#"{"n":2,"amount":5}"#, r#"{"amount":6,"n":3}"#];
    let absent = ["{}", r#"{"amount":null}"#, r#"{"amount":7}"#];
    // Otherwise a request that leaves a value out would pass for the one with it.
    let [euros, amount_only, currency_only] =
        [r#"{"amount":5,"currency":"eur"}"#, r#"{"amount":5}"#, r#"{"currency":"eur"}"#];
    let both = || amount().and(key::json("/currency"));
    let blank = [r#"{"amount":""}"#, r#"{"amount":" "}"#, r#"{"amount":7}"#];
    for (part, bodies) in [
        (amount().and(key::json("/currency").optional()), named),
        (amount(), absent),
        (key::header("x-none").or(amount()), absent),
        (amount(), blank),
        (both(), blank),
        (both(), [euros, r#"{"currency":"eur","amount":5}"#, amount_only]),
        (both(), [currency_only, r#"{"currency":"eur","amount":null}"#, "{}"]),
        (both(), ["{}", r#"{"amount":null,"other":1}"#, currency_only]),
        (both(), [amount_only, amount_only, euros]),
    ] {
        let handler = Handler::default();
        let service = DedupLayer::new(by_header(), MemoryAdapter::new())
            .compare_payload(part, OnMismatch::Refuse)
            .layer(handler.service());
        for (body, expected) in bodies.into_iter().zip([RAN, DUPLICATE, REFUSED]) {
            assert_eq!(answered(&send(&service, event("a", body)).await), expected, "{body}");
        }
        // A malformed value cannot be trusted.
        assert_eq!(answered(&send(&service, event("b", r#"{"amount":{}}"#)).await).0, 400);
        assert_eq!(handler.runs(), 1);
    }
}

/// Keys that were stored before the option was switched on have no digest.
#[tokio::test]
async fn key_without_a_stored_digest_is_not_compared() {
    let (adapter, handler) = (Arc::new(MemoryAdapter::new()), Handler::default());
    let plain = DedupLayer::new(by_header(), Arc::clone(&adapter)).layer(handler.service());
    assert_eq!(answered(&send(&plain, event("a", "one")).await), RAN);
    let compared = DedupLayer::new(by_header(), adapter)
        .compare_payload(key::body_digest(), OnMismatch::Refuse)
        .layer(handler.service());
    assert_eq!(answered(&send(&compared, event("a", "two")).await), DUPLICATE);
}

/// If a store does not return stored data, no event of the delivery stays claimed, complete or acknowledged.
#[tokio::test(start_paused = true)]
async fn store_that_does_not_return_stored_data_releases_the_new_events() {
    for fault in [Fault::Fail, Fault::Hang, Fault::LoseReply, Fault::ExecuteAndFail] {
        for on_arrival in [false, true] {
            let (store, handler) = (faulty(MemoryAdapter::new()), Handler::default());
            let known = CallTerms::on_claim(Token::random(), DAY);
            store.complete(&dedup_key("known"), &known).await.unwrap();
            store.set(StoreCall::Fetch, fault);
            let (digest, refuse) = (key::body_digest(), OnMismatch::Refuse);
            let layer = either!(
                on_arrival,
                by_word(),
                store,
                |layer| layer.compare_payload(digest, refuse),
                handler
            );
            let (service, handle) = layer;
            assert_eq!(answered(&send(&service, words("known=1 new=1")).await).0, 503, "{fault:?}");
            handle.drain().await;
            let state = store.get(&dedup_key("new")).await.unwrap().map(|entry| entry.state);
            let is_executed = matches!(fault, Fault::LoseReply | Fault::ExecuteAndFail);
            // On arrival, a released key is new.
            let released = (is_executed && !on_arrival).then_some(KeyState::Released);
            assert_eq!((state, handler.runs()), (released, 0), "{fault:?} {on_arrival}");
            store.set(StoreCall::Fetch, Fault::None);
            assert_eq!(answered(&send(&service, words("known=1 new=1")).await), RAN);
        }
    }
}

/// The store did reply: the event may be a duplicate, so a layer that fails open does not run it.
#[tokio::test(start_paused = true)]
async fn unreadable_stored_data_is_503_even_if_the_layer_fails_open() {
    for on_arrival in [false, true] {
        let (store, handler) = (faulty(MemoryAdapter::new()), Handler::default());
        let known = CallTerms::on_claim(Token::random(), DAY);
        store.complete(&dedup_key("known"), &known).await.unwrap();
        let (digest, open) = (key::body_digest(), OnUnavailable::FailOpen);
        let (service, _) = either!(
            on_arrival,
            by_word(),
            store,
            |layer| layer.compare_payload(digest, OnMismatch::Refuse).on_unavailable(open),
            handler
        );
        for (fault, status, runs) in [(Fault::ExecuteAndFail, 503, 0), (Fault::Fail, 200, 1)] {
            store.set(StoreCall::Fetch, fault);
            assert_eq!(answered(&send(&service, words("known=1")).await).0, status);
            assert_eq!(handler.runs(), runs, "{on_arrival}");
        }
    }
}

/// Responses are large, and a request may carry thousands of keys: a claim reads them only if one
/// of them is the answer.
#[tokio::test]
async fn responses_are_read_only_for_replay() {
    let fetched = Arc::<Mutex<Vec<Fetch>>>::default();
    let noted = Arc::clone(&fetched);
    let store = Arc::new(Hooked::default().on(BEFORE, StoreCall::Claim, move |_, terms| {
        noted.lock().unwrap().push(terms.fetch());
        async { Ok(()) }
    }));
    let fetched = || std::mem::take(&mut *fetched.lock().unwrap());
    let handler = Handler::default();
    let lease = DedupLayer::new(by_word(), Arc::clone(&store))
        .compare_payload(key::body_digest(), OnMismatch::Refuse)
        .layer(handler.service());
    for (body, answer) in [("a=1", RAN), ("a=1", DUPLICATE), ("a=2", REFUSED)] {
        assert_eq!(answered(&send(&lease, words(body)).await), answer, "{body}");
    }
    assert_eq!(answered(&send(&lease, words("a=1 b=1")).await), RAN);
    assert_eq!(answered(&send(&lease, words("a=1 b=1")).await), DUPLICATE);
    assert_eq!(fetched(), [Fetch::Digest; 7]);

    let arrival = DedupLayer::on_arrival(by_word(), Arc::clone(&store))
        .compare_payload(key::body_digest(), OnMismatch::Refuse)
        .layer(handler.service());
    assert_eq!(answered(&send(&arrival, words("a=1")).await), DUPLICATE);
    assert_eq!(answered(&send(&arrival, words("a=1 c=1")).await), RAN);
    assert_eq!(fetched(), [Fetch::Digest; 3]);

    // Only the response to a single event is replayed; a multi-event delivery has none.
    let replaying = DedupLayer::new(by_word(), Arc::clone(&store))
        .replay(Replay::new())
        .layer(handler.service());
    assert_eq!(answered(&send(&replaying, words("a=1")).await), DUPLICATE);
    assert_eq!(fetched(), [Fetch::DigestAndResponse]);
    assert_eq!(answered(&send(&replaying, words("a=1 b=1")).await), DUPLICATE);
    assert_eq!(fetched(), [Fetch::Digest; 2]);
}

/// The caller of a `Deduplicator` may drop the future while the store replies.
#[tokio::test(start_paused = true)]
async fn run_dropped_while_it_reads_stored_data_leaves_nothing_behind() {
    let store = faulty(MemoryAdapter::new());
    let known = CallTerms::on_claim(Token::random(), DAY);
    store.complete(&dedup_key("known"), &known).await.unwrap();
    store.set(StoreCall::Fetch, Fault::LoseReply);
    let dedup = Deduplicator::new(Arc::clone(&store));
    let event = Event::new(dedup_key("known")).with_alias(dedup_key("claimed"));
    let run = dedup.run(event.with_payload("a".into()), async |_| Ok::<_, ()>(()));
    assert!(tokio::time::timeout(Duration::from_millis(50), run).await.is_err());
    assert_eq!(store.calls(StoreCall::Fetch), 1);
    dedup.drain().await;
    let entry = store.get(&dedup_key("claimed")).await.unwrap();
    assert_eq!(entry.unwrap().state, KeyState::Released);
}

/// If a sender counts or marks attempts inside each event, its preset disables the comparison. That holds
/// for an array of one item, too.
#[tokio::test]
async fn events_without_a_payload_of_their_own_are_not_compared() {
    const HUBSPOT: &str =
        r#"[{"portalId":1,"appId":2,"subscriptionId":3,"eventId":4,"attemptNumber":0}]"#;
    const LINE: &str =
        r#"{"events":[{"webhookEventId":"1","deliveryContext":{"isRedelivery":false}}]}"#;
    for (preset, first, again) in [
        (provider::HUBSPOT, HUBSPOT, HUBSPOT.replace(":0", ":1")),
        (provider::LINE, LINE, LINE.replace("false", "true")),
    ] {
        let handler = Handler::default();
        let service = DedupLayer::new(preset, MemoryAdapter::new())
            .compare_payload(key::body_digest(), OnMismatch::Refuse)
            .layer(handler.service());
        let post = |body: &str| Request::post("/hook").body(Body::from(body.to_owned())).unwrap();
        assert_eq!(answered(&send(&service, post(first)).await), RAN, "{preset:?}");
        assert_eq!(answered(&send(&service, post(&again)).await), DUPLICATE, "{preset:?}");
        assert_eq!(handler.runs(), 1, "{preset:?}");
    }
}

/// A mismatch that is only reported is answered like any duplicate, with the stored response.
#[tokio::test]
async fn reported_mismatch_replays_the_response() {
    use http_body_util::BodyExt;
    let handler = Handler::default();
    let service = DedupLayer::new(by_header(), MemoryAdapter::new())
        .compare_payload(key::body_digest(), OnMismatch::Report)
        .replay(Replay::new())
        .layer(handler.service());
    assert_eq!(answered(&send(&service, event("a", "one")).await), RAN);
    let answer = send(&service, event("a", "two")).await;
    assert_eq!(answer.status(), StatusCode::OK);
    assert_eq!(result(&answer), Some("duplicate"));
    let body: Bytes = answer.into_body().collect().await.unwrap().to_bytes();
    assert_eq!(body, "handled");
}
