//! How an operator lets an event run again, under every ledger; and the types of events.

use http::Request;
use tower::Layer;
use tower_dedup::adapter::maintenance::{ForgetReply, KeyState, MaintenanceAdapter};
use tower_dedup::{DedupKey, key, provider};

use crate::compare_payload::{DUPLICATE, RAN};
use support::ledgers::Setup;
use support::{Body, Handler, answered, by_header, dedup_key, request, send, state};

async fn forget(operator: &dyn MaintenanceAdapter, key: &DedupKey) {
    assert_eq!(operator.forget(key).await.unwrap(), ForgetReply::Removed, "{key:?}");
}

async fn forgotten_event_runs_once_more<S: Setup>(setup: S) {
    let (handler, operator) = (Handler::default(), setup.operator().await);
    let service = setup.layer(by_header()).await.layer(handler.service());
    assert_eq!(answered(&send(&service, request("a")).await), RAN);
    let first = handler.last().idempotency_key("charge");
    assert_eq!(answered(&send(&service, request("a")).await), DUPLICATE);

    forget(&*operator, &dedup_key("a")).await;
    assert_eq!(answered(&send(&service, request("a")).await), RAN);
    assert_eq!(handler.last().idempotency_key("charge"), first);
    for _ in 0..2 {
        assert_eq!(answered(&send(&service, request("a")).await), DUPLICATE);
    }
    assert_eq!(handler.runs(), 2);
    assert_eq!(state(&operator, "a").await, Some(KeyState::Complete));
}

/// The second identity is complete for this very key. So the key alone decides.
async fn forgotten_key_is_enough_for_an_event_with_two_identities<S: Setup>(setup: S) {
    let (handler, operator) = (Handler::default(), setup.operator().await);
    let keys = by_header().content_identity();
    let layer = setup.layer(keys).await;
    let (handle, service) = (layer.handle(), layer.layer(handler.service()));
    assert_eq!(answered(&send(&service, request("a")).await), RAN);
    let second = DedupKey::new("test.body", &body_id()).unwrap();
    assert!(operator.get(&second).await.unwrap().is_some());

    for _ in 0..2 {
        forget(&*operator, &dedup_key("a")).await;
        // The same body under another id.
        assert_eq!(answered(&send(&service, request("b")).await), DUPLICATE);
        assert_eq!(answered(&send(&service, request("a")).await), RAN);
        assert_eq!(answered(&send(&service, request("a")).await), DUPLICATE);
    }
    forget(&*operator, &second).await;
    assert_eq!(answered(&send(&service, request("a")).await), DUPLICATE, "the key decides");
    assert_eq!(handle.pending_writes(), 0);
    forget(&*operator, &dedup_key("a")).await;
    assert_eq!(answered(&send(&service, request("a")).await), RAN);
    assert_eq!(answered(&send(&service, request("b")).await), DUPLICATE);
    assert_eq!(handler.runs(), 4);
}

/// Returns the digest of the body of [`request`].
fn body_id() -> String {
    let (head, body) = Request::new("payload".into()).into_parts();
    let found = key::body_digest().namespace("n").extract(&key::RequestRef::new(&head, &body));
    let Ok(key::Extracted::Keys(keys)) = found else { panic!("a digest") };
    keys.first().id().to_owned()
}

/// The type stands in the store, in the handler's `Delivery`, and in the delivery's record.
async fn type_of_an_event_is_stored<S: Setup>(setup: S) {
    let (handler, operator) = (Handler::default(), setup.operator().await);
    let service = setup.layer(provider::GITHUB.extractor()).await.layer(handler.service());
    let deliver = |id: &str, event: Option<&str>| {
        let mut request = Request::post("/hook").header("x-github-delivery", id);
        if let Some(event) = event {
            request = request.header("x-github-event", event);
        }
        request.body(Body::from("{}")).unwrap()
    };
    let long = "x".repeat(101);
    for (id, sent, expected) in [
        ("a", Some("pull_request"), Some("pull_request")),
        ("b", None, None),
        ("c", Some(&*long), None),
        ("d", Some("a\tb"), None),
        ("e", Some(&long[1..]), Some(&long[1..])),
    ] {
        assert_eq!(answered(&send(&service, deliver(id, sent)).await), RAN, "{id}");
        assert_eq!(handler.last().event_type(), expected, "{id}");
        let entry = operator.get(&DedupKey::new("github", id).unwrap()).await.unwrap().unwrap();
        assert_eq!(entry.event_type.as_deref(), expected, "{id}");
        assert_eq!(answered(&send(&service, deliver(id, sent)).await), DUPLICATE);
    }
}

support::on_ledgers!(
    [lease_sqlite = OnSqlite, transactional_sqlite = InSqlite, transactional_postgres = InPostgres,],
    forgotten_event_runs_once_more,
    forgotten_key_is_enough_for_an_event_with_two_identities,
    type_of_an_event_is_stored,
);

mod with_one_identity {
    use super::{forgotten_event_runs_once_more, type_of_an_event_is_stored};

    support::on_ledgers!(
        [arrival_sqlite = ArrivedInSqlite],
        forgotten_event_runs_once_more,
        type_of_an_event_is_stored,
    );
}
