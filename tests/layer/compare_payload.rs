//! One id with two payloads: compared, counted, and refused by choice; on every ledger and store.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, StatusCode};
use sqlx::postgres::PgPoolOptions;
use tower::Layer;
use tower_dedup::adapter::{
    CallTerms, DedupAdapter, EntryState, Fetch, MaintenanceAdapter, MemoryAdapter, PostgresAdapter,
    Token,
};
use tower_dedup::key::{self, DedupKey, Event, Extracted, KeyExtractor, Keys};
use tower_dedup::{DedupLayer, OnMismatch, Replay, provider};

use crate::support::ledgers::{AnyLayer, Setup};
use crate::support::postgres::Schema;
use crate::support::{
    Body, Fault, Faulty, Handler, Op, by_header, dedup_key, result, send, stored_data,
};

fn event(id: &str, body: &'static str) -> Request<Body> {
    Request::post("/hook").header("webhook-id", id).body(Body::from(body)).unwrap()
}

/// The status and the result header of the answer.
macro_rules! answer {
    ($service:expr, $request:expr) => {{
        let answer = send($service, $request).await;
        (answer.status().as_u16(), result(&answer).map(str::to_owned))
    }};
}

fn ran() -> (u16, Option<String>) {
    (200, None)
}

fn duplicate() -> (u16, Option<String>) {
    (200, Some("duplicate".to_owned()))
}

fn refused() -> (u16, Option<String>) {
    (422, Some("mismatch".to_owned()))
}

async fn another_payload_is_refused_by_choice<S: Setup>(setup: S) {
    let handler = Handler::default();
    let layer =
        setup.layer(by_header()).await.compare_payload(key::body_digest(), OnMismatch::Refuse);
    let service = layer.wrap(handler.service());
    assert_eq!(answer!(&service, event("a", "one")), ran());
    assert_eq!(answer!(&service, event("a", "two")), refused());
    assert_eq!(answer!(&service, event("a", "one")), duplicate());
    // Another process compares as well.
    let other = setup
        .layer(by_header())
        .await
        .compare_payload(key::body_digest(), OnMismatch::Refuse)
        .wrap(handler.service());
    assert_eq!(answer!(&other, event("a", "two")), refused());
    assert_eq!(answer!(&other, event("a", "one")), duplicate());
    assert_eq!(answer!(&other, event("b", "two")), ran());
    assert_eq!(handler.runs(), 2);
}

async fn another_payload_is_reported_and_acknowledged<S: Setup>(setup: S) {
    let handler = Handler::default();
    let service = setup
        .layer(by_header())
        .await
        .compare_payload(key::body_digest(), OnMismatch::Report)
        .wrap(handler.service());
    assert_eq!(answer!(&service, event("a", "one")), ran());
    assert_eq!(answer!(&service, event("a", "two")), duplicate());
    assert_eq!(handler.runs(), 1);
}

/// In a batch each event is compared by its own bytes, wherever it is batched.
async fn elements_of_a_batch_are_compared_one_by_one<S: Setup>(setup: S) {
    let handler = Handler::default();
    let service = setup
        .layer(by_word())
        .await
        .compare_payload(key::body_digest(), OnMismatch::Refuse)
        .wrap(handler.service());
    assert_eq!(answer!(&service, words("a=1 b=1 c=1")), ran());
    assert_eq!(answer!(&service, words("c=1 a=1")), duplicate());
    assert_eq!(answer!(&service, words("b=1")), duplicate());
    assert_eq!(answer!(&service, words("a=2 b=1")), refused());
    assert_eq!(handler.runs(), 1);
    // What is new runs before the rest is refused, and is complete then.
    assert_eq!(answer!(&service, words("d=1 a=2")), refused());
    assert_eq!(handler.runs(), 2);
    let new: Vec<String> = handler.last().keys().map(|key| key.id().to_owned()).collect();
    assert_eq!(new, ["d"]);
    assert_eq!(answer!(&service, words("d=1")), duplicate());
    assert_eq!(answer!(&service, words("d=2")), refused());
    assert_eq!(handler.runs(), 2);
}

/// What comes under a known key with somebody else's second identity uses that identity not up: its
/// own event still runs.
async fn a_second_identity_under_which_nothing_was_handled_stays_free<S: Setup>(setup: S) {
    let handler = Handler::default();
    let keys = by_header().second_identity("body", key::body_digest());
    let service = setup.layer(keys).await.wrap(handler.service());
    assert_eq!(answer!(&service, event("k1", "one")), ran());
    assert_eq!(answer!(&service, event("k1", "two")), duplicate());
    assert_eq!(answer!(&service, event("k2", "two")), ran());
    // The other way round it was handled, under another key.
    assert_eq!(answer!(&service, event("k3", "one")), duplicate());
    assert_eq!(answer!(&service, event("k3", "three")), duplicate());
    assert_eq!(handler.runs(), 2);
}

crate::on_ledgers!(
    [
        lease_memory = OnMemory,
        lease_sqlite = OnSqlite,
        lease_postgres = OnPostgres,
        arrival_memory = ArrivedInMemory,
        arrival_sqlite = ArrivedInSqlite,
        arrival_postgres = ArrivedInPostgres,
        transactional_sqlite = InSqlite,
        transactional_postgres = InPostgres,
    ],
    another_payload_is_refused_by_choice,
    another_payload_is_reported_and_acknowledged,
    elements_of_a_batch_are_compared_one_by_one,
    a_second_identity_under_which_nothing_was_handled_stays_free,
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
    .unwrap()
}

fn words(words: &'static str) -> Request<Body> {
    Request::post("/hook").body(Body::from(words)).unwrap()
}

#[tokio::test]
async fn what_a_failed_handler_was_given_is_not_compared() {
    let handler = Handler::default().then(500);
    let service = DedupLayer::new(by_header(), MemoryAdapter::new())
        .compare_payload(key::body_digest(), OnMismatch::Refuse)
        .layer(handler.service());
    assert_eq!(answer!(&service, event("a", "one")), (500, None));
    assert_eq!(answer!(&service, event("a", "two")), ran());
    assert_eq!(answer!(&service, event("a", "one")), refused());
}

/// Chosen values instead of the whole body, for senders that count their attempts in it.
#[tokio::test]
async fn only_what_is_named_is_compared() {
    let handler = Handler::default();
    let amount = key::json("/amount").and(key::json("/currency").optional());
    let service = DedupLayer::new(by_header(), MemoryAdapter::new())
        .compare_payload(amount, OnMismatch::Refuse)
        .layer(handler.service());
    assert_eq!(answer!(&service, event("a", r#"{"amount":5,"attempt":1}"#)), ran());
    assert_eq!(answer!(&service, event("a", r#"{"attempt":2,"amount":5}"#)), duplicate());
    assert_eq!(answer!(&service, event("a", r#"{"amount":6,"attempt":3}"#)), refused());
    // Without the value there is nothing to compare; with a broken one, nothing to trust.
    assert_eq!(answer!(&service, event("a", r#"{"attempt":4}"#)), duplicate());
    assert_eq!(answer!(&service, event("b", r#"{"amount":{}}"#)).0, 400);
    assert_eq!(answer!(&service, event("b", r#"{"other":1}"#)), ran());
    assert_eq!(answer!(&service, event("b", r#"{"amount":7}"#)), duplicate());
    assert_eq!(handler.runs(), 2);
}

/// Keys from before the option was switched on carry no fingerprint.
#[tokio::test]
async fn a_key_without_a_fingerprint_is_not_compared() {
    let (adapter, handler) = (Arc::new(MemoryAdapter::new()), Handler::default());
    let plain = DedupLayer::new(by_header(), Arc::clone(&adapter)).layer(handler.service());
    assert_eq!(answer!(&plain, event("a", "one")), ran());
    let compared = DedupLayer::new(by_header(), adapter)
        .compare_payload(key::body_digest(), OnMismatch::Refuse)
        .layer(handler.service());
    assert_eq!(answer!(&compared, event("a", "two")), duplicate());
}

/// Two events of one change differ in their bodies, of course.
#[tokio::test]
async fn a_second_identity_is_not_compared() {
    let handler = Handler::default();
    let keys = by_header().second_identity("change", key::json("/object"));
    let adapter = Arc::new(MemoryAdapter::new());
    let service = DedupLayer::new(keys, Arc::clone(&adapter))
        .compare_payload(key::body_digest(), OnMismatch::Refuse)
        .layer(handler.service());
    assert_eq!(answer!(&service, event("evt_1", r#"{"object":"in_1","n":1}"#)), ran());
    assert_eq!(answer!(&service, event("evt_2", r#"{"object":"in_1","n":2}"#)), duplicate());
    // The twin is known now under its own id, with its own payload.
    assert_eq!(answer!(&service, event("evt_2", r#"{"object":"in_1","n":2}"#)), duplicate());
    assert_eq!(answer!(&service, event("evt_2", r#"{"object":"in_1","n":3}"#)), refused());
    assert_eq!(handler.runs(), 1);
}

/// A store that does not return stored data leaves no event of the delivery claimed, complete or
/// acknowledged.
#[tokio::test]
async fn store_that_does_not_return_stored_data_releases_the_new_events() {
    for fault in [Fault::Fail, Fault::Hang, Fault::LoseReply, Fault::DoAndFail] {
        let (store, handler) = (Faulty::new(MemoryAdapter::new()), Handler::default());
        let known = CallTerms::on_claim(Token::random(), Duration::from_secs(60));
        store.complete(&[dedup_key("known")], &known).await.unwrap();
        store.set(Op::Fetch, fault);
        let bound = Duration::from_millis(50);
        let lease = DedupLayer::new(by_word(), Arc::clone(&store))
            .compare_payload(key::body_digest(), OnMismatch::Refuse)
            .store_timeout(bound);
        let handle = lease.handle();
        let service = lease.layer(handler.service());
        assert_eq!(answer!(&service, words("known=1 new=1")).0, 503, "{fault:?}");
        handle.drain().await;
        let entry = store.get(&dedup_key("new")).await.unwrap();
        if matches!(fault, Fault::LoseReply | Fault::DoAndFail) {
            assert_eq!(entry.unwrap().state, EntryState::Released, "{fault:?}");
        } else {
            assert_eq!(entry, None, "{fault:?}");
        }

        let arrival = DedupLayer::on_arrival(by_word(), Arc::clone(&store))
            .compare_payload(key::body_digest(), OnMismatch::Refuse)
            .store_timeout(bound);
        let handle = arrival.handle();
        let service = arrival.layer(handler.service());
        assert_eq!(answer!(&service, words("known=1 fresh=1")).0, 503, "{fault:?}");
        handle.drain().await;
        assert_eq!(store.get(&dedup_key("fresh")).await.unwrap(), None, "{fault:?}");
        assert_eq!(handler.runs(), 0);
        store.set(Op::Fetch, Fault::None);
        assert_eq!(answer!(&service, words("known=1 fresh=1")), ran());
    }
}

/// Responses are large, and a request may carry thousands of keys: they are asked for only where one
/// of them is the answer.
#[tokio::test]
async fn responses_are_asked_for_only_where_one_is_replayed() {
    let store = Faulty::new(MemoryAdapter::new());
    let handler = Handler::default();
    let lease = DedupLayer::new(by_word(), Arc::clone(&store))
        .compare_payload(key::body_digest(), OnMismatch::Refuse)
        .layer(handler.service());
    for (body, answer) in [("a=1", ran()), ("a=1", duplicate()), ("a=2", refused())] {
        assert_eq!(answer!(&lease, words(body)), answer, "{body}");
    }
    assert_eq!(answer!(&lease, words("a=1 b=1")), ran());
    assert_eq!(answer!(&lease, words("a=1 b=1")), duplicate());
    assert_eq!(store.fetched(), [Fetch::Digest; 5]);

    let arrival = DedupLayer::on_arrival(by_word(), Arc::clone(&store))
        .compare_payload(key::body_digest(), OnMismatch::Refuse)
        .layer(handler.service());
    assert_eq!(answer!(&arrival, words("a=1")), duplicate());
    assert_eq!(answer!(&arrival, words("a=1 c=1")), ran());
    assert_eq!(store.fetched(), [Fetch::Digest; 2]);

    // A response that is replayed is that to one event: a batch has none.
    let replaying = DedupLayer::new(by_word(), Arc::clone(&store))
        .replay(Replay::new())
        .layer(handler.service());
    assert_eq!(answer!(&replaying, words("a=1")), duplicate());
    assert_eq!(store.fetched(), [Fetch::DigestAndResponse]);
    assert_eq!(answer!(&replaying, words("a=1 b=1")), duplicate());
    assert_eq!(store.fetched(), [Fetch::Digest]);
}

/// The caller of a worker may go away between the claim and what follows.
#[tokio::test]
async fn delivery_dropped_while_it_reads_stored_data_leaves_nothing_behind() {
    use tower_dedup::ledger::Ledger;
    use tower_dedup::ledger::internals::{self, BeginContext};
    let store = Faulty::new(MemoryAdapter::new());
    let known = CallTerms::on_claim(Token::random(), Duration::from_secs(60));
    store.complete(&[dedup_key("known")], &known).await.unwrap();
    store.set(Op::Fetch, Fault::LoseReply);
    let keys =
        |new| Keys::new(["known", new].map(|id| Event::new(dedup_key(id))).to_vec()).unwrap();
    let minute = Duration::from_secs(60);
    let context = || BeginContext::new(minute, minute, minute).with_fetch(Fetch::Digest);
    let lease = internals::lease(Arc::clone(&store)).unwrap();
    let claimed = keys("claimed");
    let terms = context();
    let begun = tokio::time::timeout(Duration::from_millis(50), lease.begin(&claimed, &terms));
    assert!(begun.await.is_err());
    lease.drain().await;
    let entry = store.get(&dedup_key("claimed")).await.unwrap();
    assert_eq!(entry.unwrap().state, EntryState::Released);

    let arrival = internals::on_arrival(Arc::clone(&store));
    let recorded = keys("recorded");
    let terms = context();
    let begun = tokio::time::timeout(Duration::from_millis(50), arrival.begin(&recorded, &terms));
    assert!(begun.await.is_err());
    arrival.drain().await;
    assert_eq!(store.get(&dedup_key("recorded")).await.unwrap(), None);
}

/// Who waits for a second connection with a transaction in hand may wait for another that does the
/// same: what is kept is asked for before.
#[tokio::test]
async fn a_transaction_asks_for_no_second_connection() {
    let schema = Schema::fresh();
    let pool = PgPoolOptions::new().max_connections(1).connect(&schema.url()).await.unwrap();
    let handler = Handler::default();
    let service = DedupLayer::transactional(by_word(), PostgresAdapter::new(pool))
        .compare_payload(key::body_digest(), OnMismatch::Refuse)
        .layer(handler.service());
    assert_eq!(answer!(&service, words("a=1")), ran());
    assert_eq!(answer!(&service, words("a=1 b=1")), ran());
    assert_eq!(answer!(&service, words("a=2 b=1 c=1")), refused());
    assert_eq!(answer!(&service, words("c=1")), duplicate());
    assert_eq!(handler.runs(), 3);

    // One event of two identities, of which one is complete.
    let pool = PgPoolOptions::new().max_connections(1).connect(&schema.url()).await.unwrap();
    let keys = by_header().second_identity("change", key::json("/object"));
    let service = DedupLayer::transactional(keys, PostgresAdapter::new(pool))
        .compare_payload(key::body_digest(), OnMismatch::Refuse)
        .layer(handler.service());
    assert_eq!(answer!(&service, event("evt_1", r#"{"object":"in_1","n":1}"#)), ran());
    assert_eq!(answer!(&service, event("evt_2", r#"{"object":"in_1","n":2}"#)), duplicate());
    assert_eq!(answer!(&service, event("evt_2", r#"{"object":"in_1","n":3}"#)), refused());
    assert_eq!(handler.runs(), 4);
}

/// A sender that counts its attempts in each event: its preset says that they are not compared,
/// in a batch of one as in any other.
#[tokio::test]
async fn elements_without_bytes_of_their_own_are_not_compared() {
    let handler = Handler::default();
    let service = DedupLayer::new(provider::HUBSPOT, MemoryAdapter::new())
        .compare_payload(key::body_digest(), OnMismatch::Refuse)
        .layer(handler.service());
    let batch = |attempt: u32| {
        let body = format!(
            r#"[{{"portalId":1,"appId":2,"subscriptionId":3,"eventId":4,"attemptNumber":{attempt}}}]"#
        );
        Request::post("/hook").body(Body::from(body)).unwrap()
    };
    assert_eq!(answer!(&service, batch(0)), ran());
    assert_eq!(answer!(&service, batch(1)), duplicate());
    assert_eq!(handler.runs(), 1);
}

/// A mismatch that is only reported is answered as any duplicate: with the response that was kept.
#[tokio::test]
async fn a_reported_mismatch_replays() {
    use http_body_util::BodyExt;
    let (adapter, handler) = (Arc::new(MemoryAdapter::new()), Handler::default());
    let service = DedupLayer::new(by_header(), Arc::clone(&adapter))
        .compare_payload(key::body_digest(), OnMismatch::Report)
        .replay(Replay::new())
        .layer(handler.service());
    assert_eq!(answer!(&service, event("a", "one")), ran());
    let answer = send(&service, event("a", "two")).await;
    assert_eq!(answer.status(), StatusCode::OK);
    assert_eq!(result(&answer), Some("duplicate"));
    let body: Bytes = answer.into_body().collect().await.unwrap().to_bytes();
    assert_eq!(body, "handled");
    // What is stored is the digest that anybody can compute.
    let stored = stored_data(&*adapter, &dedup_key("a")).await.unwrap();
    let hex: String =
        stored.payload_sha256.unwrap().iter().map(|byte| format!("{byte:02x}")).collect();
    // `printf one | sha256sum`
    assert_eq!(hex, "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed");
}
