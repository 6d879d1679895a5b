//! A body that was handled, sent again under the id of another event: by whoever reads deliveries and cannot
//! sign. The sender's signature does not cover the id.

use http::{HeaderValue, Request};
use tower::Layer;
use tower_dedup::adapter::maintenance::MaintenanceAdapter;
use tower_dedup::key::{self, Event, Extracted};
use tower_dedup::{DedupKey, DedupLayer, KeyExtractor, OnMismatch};

use support::ledgers::Setup;
use support::log::Log;
use support::{Body, Handler, answered, dedup_key, event, memory, result, send};

fn by_header_and_body() -> KeyExtractor {
    key::header("webhook-id").namespace("test").content_identity()
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

/// A body that was not handled uses up the id under which it is sent. The event of that id is refused then, so that
/// its sender, and whoever reads the log, learns of it.
async fn event_whose_id_another_body_used_up_is_refused<S: Setup>(setup: S) {
    let handler = Handler::default().then(500);
    let layer = setup.layer(by_header_and_body()).await;
    let layer = layer.compare_payload(key::body_digest(), OnMismatch::Refuse);
    let service = layer.layer(handler.service());
    assert_eq!(send(&service, event("id-1", "real")).await.status(), 500);
    assert_eq!(answered(&send(&service, event("id-1", "other")).await), (200, None));
    let retry = send(&service, event("id-1", "real")).await;
    assert_eq!(answered(&retry), (422, Some("mismatch")));
    // The real body stays free.
    assert_eq!(answered(&send(&service, event("id-2", "real")).await), (200, None));
}

/// A layer that compares no payloads has the digest too: in the record, and for a layer that compares.
async fn key_keeps_the_digest_of_its_content<S: Setup>(setup: S) {
    let handler = Handler::default();
    let plain = setup.layer(by_header_and_body()).await.layer(handler.service());
    assert_eq!(answered(&send(&plain, event("id-1", "one")).await), (200, None));
    let entry = setup.operator().await.get(&dedup_key("id-1")).await.unwrap().unwrap();
    // `printf one | sha256sum`
    let sha256 = "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed";
    let stored = entry.stored.unwrap().payload_sha256.unwrap();
    assert_eq!(stored.iter().map(|byte| format!("{byte:02x}")).collect::<String>(), sha256);
    let compared = setup.layer(by_header_and_body()).await;
    let compared = compared.compare_payload(key::body_digest(), OnMismatch::Refuse);
    let compared = compared.layer(handler.service());
    assert_eq!(answered(&send(&compared, event("id-1", "two")).await), (422, Some("mismatch")));
    let same = send(&compared, event("id-1", "one")).await;
    assert_eq!(answered(&same), (200, Some("duplicate")));
    assert_eq!(handler.runs(), 1);
}

support::on_ledgers!(
    [
        lease_on_memory = OnMemory,
        transactional_in_sqlite = InSqlite,
        transactional_in_postgres = InPostgres,
    ],
    replayed_body_does_not_acknowledge_the_event_of_its_id,
    replayed_body_does_not_acknowledge_an_event_whose_run_failed,
    event_whose_id_another_body_used_up_is_refused,
    key_keeps_the_digest_of_its_content,
);

/// A retry is no warning. A body or an id that comes again with another one may be an attack, and the operator learns by
/// which identity it was a duplicate, to look it up and forget it.
#[tokio::test]
async fn duplicate_by_one_of_two_identities_is_logged() {
    let with_alias = || {
        let keys = key::header("webhook-id").namespace("test");
        keys.alias("change", key::header("x-change"))
    };
    // `printf old | sha256sum`
    let old = "body_cba06b5736faf67e54b07b561eae94395e774c517a7d910a54369e1263ccfbd4";
    let (mismatch, body, alias) = ("payload mismatch", "same body", "same event");
    for (keys, first, second, message, level, by) in [
        (by_header_and_body(), event("id-1", "old"), event("id-1", "new"), mismatch, "WARN", None),
        (
            by_header_and_body(),
            event("id-1", "old"),
            event("id-2", "old"),
            body,
            "WARN",
            Some(("test.body", old)),
        ),
        // Another name of the event is the sender's own.
        (
            with_alias(),
            event("id-1", ""),
            event("id-2", ""),
            alias,
            "INFO",
            Some(("test.change", "in-1")),
        ),
    ] {
        let (log, _guard) = Log::of_this_thread();
        let service = DedupLayer::new(keys, memory()).layer(Handler::default().service());
        for (request, records) in [(&first, 0), (&first, 0), (&second, 1), (&second, 2)] {
            let mut request = request.clone();
            request.headers_mut().insert("x-change", HeaderValue::from_static("in-1"));
            send(&service, request).await;
            let logged = log.beginning(message);
            assert_eq!(logged.len(), records, "{message}");
            let outcome = &log.last("delivery")["outcome"];
            assert_eq!(outcome == "mismatch", records > 0 && message == mismatch);
            for record in logged {
                assert_eq!((&*record["level"], &*record["id"]), (level, id_of(&second)));
                if let Some((namespace, id)) = by {
                    assert_eq!((&*record["by_namespace"], &*record["by_id"]), (namespace, id));
                }
            }
        }
    }
}

fn id_of(event: &Request<Body>) -> &str {
    event.headers()["webhook-id"].to_str().unwrap()
}

/// Whoever replays a body can leave its id out.
#[tokio::test]
async fn replayed_body_without_an_id_is_a_duplicate_by_its_body() {
    let handler = Handler::default();
    let keys = key::header("webhook-id").or(key::body_digest()).namespace("test");
    let service = DedupLayer::new(keys.content_identity(), memory()).layer(handler.service());
    let without_id = |body| Request::post("/hook").body(Body::from(body)).unwrap();
    assert_eq!(answered(&send(&service, event("id-1", "old")).await), (200, None));
    assert_eq!(result(&send(&service, without_id("old")).await), Some("duplicate"));
    assert_eq!(answered(&send(&service, without_id("new")).await), (200, None));
    assert_eq!(result(&send(&service, without_id("new")).await), Some("duplicate"));
    assert_eq!(result(&send(&service, event("id-2", "new")).await), Some("duplicate"));
    assert_eq!(handler.runs(), 2);
}

/// A closure names the bytes that count, such as those without a counter of attempts.
#[tokio::test]
async fn compared_payload_of_an_event_counts_and_not_its_content() {
    let keys = KeyExtractor::from_fn("test", |request| {
        let event = Event::new(DedupKey::new("test", "id-1")?);
        Ok(Extracted::Keys(event.with_payload(request.body().slice(..1)).into()))
    });
    let layer = DedupLayer::new(keys.content_identity(), memory());
    let layer = layer.compare_payload(key::body_digest(), OnMismatch::Refuse);
    let service = layer.layer(Handler::default().service());
    for (body, expected) in [
        ("a, attempt 1", (200, None)),
        ("a, attempt 2", (200, Some("duplicate"))),
        ("b, attempt 3", (422, Some("mismatch"))),
    ] {
        assert_eq!(answered(&send(&service, event("", body)).await), expected, "{body}");
    }
}

/// Both digests stand in one column.
#[test]
fn content_identity_compares_the_whole_body_or_nothing() {
    let layer = || DedupLayer::new(by_header_and_body(), memory());
    let compares = |part| layer().compare_payload(part, OnMismatch::Report).checked();
    assert!(compares(key::body_digest()).is_ok());
    let rule = "`compare_payload` must be `key::body_digest()` under a `content_identity`";
    for part in [
        key::json("/amount"),
        key::body_digest().optional(),
        key::header("x-shop").and(key::body_digest()),
    ] {
        let fault = format!("{rule}, not {part:?}");
        assert_eq!(compares(part).unwrap_err().to_string(), fault);
    }
    let alias = key::header("webhook-id").namespace("test").alias("n", key::json("/n"));
    let layer = DedupLayer::new(alias, memory());
    assert!(layer.compare_payload(key::json("/n"), OnMismatch::Report).checked().is_ok());
}
