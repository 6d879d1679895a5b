//! A body that was handled, sent again under the id of another event: by whoever reads deliveries and cannot
//! sign. The sender's signature does not cover the id.

use http::Request;
use tower::Layer;
use tower_dedup::key::{self, KeyExtractor};
use tower_dedup::{DedupLayer, OnMissingKey};

use crate::support::ledgers::{OnMemory, Setup};
use crate::support::log::Log;
use crate::support::{Body, Handler, answered, memory, result, send};

fn by_header_and_body() -> KeyExtractor {
    key::header("webhook-id").namespace("test").content_identity()
}

fn event(id: &str, body: &'static str) -> Request<Body> {
    Request::post("/hook").header("webhook-id", id).body(Body::from(body)).unwrap()
}

async fn replayed_body_does_not_acknowledge_the_event_of_its_id<S: Setup>(setup: S) {
    let handler = Handler::default();
    let service = setup.layer(by_header_and_body()).await.layer(handler.service());
    assert_eq!(send(&service, event("id-1", "old")).await.status(), 200);
    assert_eq!(result(&send(&service, event("id-2", "old")).await), Some("duplicate"));
    // Nor does a known id use up the body of another event.
    assert_eq!(result(&send(&service, event("id-1", "new")).await), Some("duplicate"));
    // Another process, to which the release of the first one is of no help.
    let other = setup.layer(by_header_and_body()).await.layer(handler.service());
    let real = send(&other, event("id-2", "new")).await;
    assert_eq!(answered(&real), (200, None));
    assert_eq!(handler.runs(), 2);
    assert_eq!(result(&send(&other, event("id-2", "new")).await), Some("duplicate"));
}

async fn replayed_body_does_not_acknowledge_an_event_whose_run_failed<S: Setup>(setup: S) {
    let handler = Handler::default().then(500);
    let service = setup.layer(by_header_and_body()).await.layer(handler.service());
    assert_eq!(send(&service, event("id-2", "new")).await.status(), 500);
    assert_eq!(send(&service, event("id-1", "old")).await.status(), 200);
    assert_eq!(result(&send(&service, event("id-2", "old")).await), Some("duplicate"));
    let retry = send(&service, event("id-2", "new")).await;
    assert_eq!(answered(&retry), (200, None));
    assert_eq!(handler.runs(), 3);
}

crate::on_ledgers!(
    [
        lease_on_memory = OnMemory,
        lease_on_sqlite = OnSqlite,
        lease_on_postgres = OnPostgres,
        transactional_in_sqlite = InSqlite,
        transactional_in_postgres = InPostgres,
    ],
    replayed_body_does_not_acknowledge_the_event_of_its_id,
    replayed_body_does_not_acknowledge_an_event_whose_run_failed,
);

mod arrived {
    use super::replayed_body_does_not_acknowledge_the_event_of_its_id;

    crate::on_ledgers!(
        [
            on_arrival_in_memory = ArrivedInMemory,
            on_arrival_in_sqlite = ArrivedInSqlite,
            on_arrival_in_postgres = ArrivedInPostgres,
        ],
        replayed_body_does_not_acknowledge_the_event_of_its_id,
    );
}

/// The sender counts its attempts in the body.
#[tokio::test]
async fn idempotency_key_is_the_same_for_each_attempt_whatever_the_body() {
    let handler = Handler::default().then(500);
    let service =
        OnMemory::create().await.layer(by_header_and_body()).await.layer(handler.service());
    assert_eq!(send(&service, event("id-1", r#"{"attempt": 1}"#)).await.status(), 500);
    let first = handler.last().idempotency_key("charge");
    assert_eq!(send(&service, event("id-1", r#"{"attempt": 2}"#)).await.status(), 200);
    assert_eq!(handler.last().idempotency_key("charge"), first);
}

#[tokio::test]
async fn replayed_body_is_logged_as_a_warning_and_a_retry_is_not() {
    let (log, _guard) = Log::of_this_thread();
    let handler = Handler::default();
    let lease = DedupLayer::new(by_header_and_body(), memory()).layer(handler.service());
    let arrival = DedupLayer::on_arrival(by_header_and_body(), memory()).layer(handler.service());
    for (id, warnings) in [("id-1", 0), ("id-1", 0), ("id-2", 1)] {
        send(&lease, event(id, "old")).await;
        assert_eq!(log.beginning("same body").len(), warnings, "{id}");
        send(&arrival, event(id, "old")).await;
        assert_eq!(log.beginning("same body").len(), 2 * warnings, "{id}");
    }
}

/// Whoever replays a body can leave its id out.
#[tokio::test]
async fn replayed_body_without_an_id_is_a_duplicate_by_its_body() {
    let handler = Handler::default();
    let layer = DedupLayer::new(by_header_and_body(), memory());
    let service = layer.on_missing_key(OnMissingKey::BodyDigest).layer(handler.service());
    let without_id = |body| Request::post("/hook").body(Body::from(body)).unwrap();
    assert_eq!(answered(&send(&service, event("id-1", "old")).await), (200, None));
    assert_eq!(result(&send(&service, without_id("old")).await), Some("duplicate"));
    assert_eq!(answered(&send(&service, without_id("new")).await), (200, None));
    assert_eq!(result(&send(&service, without_id("new")).await), Some("duplicate"));
    assert_eq!(result(&send(&service, event("id-2", "new")).await), Some("duplicate"));
    assert_eq!(handler.runs(), 2);
}

#[test]
fn digest_of_the_body_is_no_alias() {
    let part = key::header("x-shop").and(key::body_digest().optional());
    let key = key::header("webhook-id").namespace("test").second_identity("body", part);
    let refused = key.checked().unwrap_err().to_string();
    assert_eq!(refused, "a digest of the body is a `content_identity`");
}
