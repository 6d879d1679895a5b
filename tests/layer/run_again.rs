//! How an operator lets an event run again, under every ledger; and the types of events.

use futures_util::future::join_all;
use http::Request;
use tower::Layer;
use tower_dedup::adapter::SqliteAdapter;
use tower_dedup::adapter::inspect::{ForgetReply, KeyState, MaintenanceAdapter};
use tower_dedup::{DedupKey, DedupLayer, key, provider};

use crate::compare_payload::{answer, duplicate, ran};
use crate::support::ledgers::Setup;
use crate::support::log::Log;
use crate::support::{Body, Handler, by_header, dedup_key, request, result, send, sqlite_url};

async fn forget(operator: &dyn MaintenanceAdapter, key: &DedupKey) {
    assert_eq!(operator.forget(key).await.unwrap(), ForgetReply::Removed, "{key:?}");
}

async fn forgotten_event_runs_once_more<S: Setup>(setup: S) {
    let (handler, operator) = (Handler::default(), setup.operator().await);
    let service = setup.layer(by_header()).await.layer(handler.service());
    assert_eq!(answer!(&service, request("a")), ran());
    let first = handler.last().idempotency_key("charge");
    assert_eq!(answer!(&service, request("a")), duplicate());

    forget(&*operator, &dedup_key("a")).await;
    assert_eq!(answer!(&service, request("a")), ran());
    assert_eq!(handler.last().idempotency_key("charge"), first);
    for _ in 0..2 {
        assert_eq!(answer!(&service, request("a")), duplicate());
    }
    assert_eq!(handler.runs(), 2);
    let entry = operator.get(&dedup_key("a")).await.unwrap().unwrap();
    assert!(matches!(entry.state, KeyState::Complete), "{entry:?}");
}

/// Deliveries in two processes at the same moment.
async fn one_of_many_deliveries_runs_again<S: Setup>(setup: S) {
    let (handler, operator) = (Handler::default(), setup.operator().await);
    let one = setup.layer(by_header()).await.layer(handler.service());
    let other = setup.layer(by_header()).await.layer(handler.service());
    for round in 1..=8 {
        let id = format!("{}", round % 2);
        if round > 2 {
            forget(&*operator, &dedup_key(&id)).await;
        }
        let answers = join_all(
            (0..8).map(|_| async { [answer!(&one, request(&id)), answer!(&other, request(&id))] }),
        );
        // A delivery that has waited for too long is in flight.
        for (status, _) in answers.await.into_iter().flatten() {
            assert!([200, 503].contains(&status), "{status}");
        }
        assert_eq!(handler.runs(), round);
    }
}

/// The second identity is complete for this very key. So the key alone decides.
async fn forgotten_key_is_enough_for_an_event_with_two_identities<S: Setup>(setup: S) {
    let (handler, operator) = (Handler::default(), setup.operator().await);
    let keys = by_header().content_identity();
    let layer = setup.layer(keys).await;
    let (handle, service) = (layer.handle(), layer.layer(handler.service()));
    assert_eq!(answer!(&service, request("a")), ran());
    let second = DedupKey::new("test.body", &body_id()).unwrap();
    assert!(operator.get(&second).await.unwrap().is_some());

    for _ in 0..2 {
        forget(&*operator, &dedup_key("a")).await;
        // The same body under another id.
        assert_eq!(answer!(&service, request("b")), duplicate());
        assert_eq!(answer!(&service, request("a")), ran());
        assert_eq!(answer!(&service, request("a")), duplicate());
    }
    forget(&*operator, &second).await;
    assert_eq!(answer!(&service, request("a")), duplicate(), "the key decides");
    assert_eq!(handle.pending_writes(), 0);
    forget(&*operator, &dedup_key("a")).await;
    assert_eq!(answer!(&service, request("a")), ran());
    assert_eq!(answer!(&service, request("b")), duplicate());
    assert_eq!(handler.runs(), 4);
}

/// Returns the digest of the body of [`request`].
fn body_id() -> String {
    let (head, body) = Request::new("payload".into()).into_parts();
    let found = key::body_digest().namespace("n").extract(&key::RequestRef::new(&head, &body));
    let Ok(key::Extracted::Keys(keys)) = found else { panic!("a digest") };
    keys.first().id().to_owned()
}

async fn running_event_is_not_forgotten<S: Setup>(setup: S) {
    let (handler, operator) = (Handler::default(), setup.operator().await);
    let service = setup.layer(by_header()).await.layer(handler.service());
    for _ in 0..2 {
        handler.hold();
        let operate = async {
            handler.running(1).await;
            let reply = operator.forget(&dedup_key("a")).await;
            handler.release();
            reply
        };
        let deliver = async { answer!(&service, request("a")) };
        let (reply, answer) = futures_util::future::join(operate, deliver).await;
        assert_eq!(reply.unwrap(), ForgetReply::InFlight);
        assert_eq!(answer, ran());
        assert_eq!(answer!(&service, request("a")), duplicate());
        forget(&*operator, &dedup_key("a")).await;
    }
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
        assert_eq!(answer!(&service, deliver(id, sent)), ran(), "{id}");
        assert_eq!(handler.last().event_type(), expected, "{id}");
        let entry = operator.get(&DedupKey::new("github", id).unwrap()).await.unwrap().unwrap();
        assert_eq!(entry.event_type.as_deref(), expected, "{id}");
        assert_eq!(answer!(&service, deliver(id, sent)), duplicate());
    }
}

crate::on_ledgers!(
    [
        lease_sqlite = OnSqlite,
        lease_postgres = OnPostgres,
        transactional_sqlite = InSqlite,
        transactional_postgres = InPostgres,
        arrival_sqlite = ArrivedInSqlite,
        arrival_postgres = ArrivedInPostgres,
    ],
    forgotten_event_runs_once_more,
    one_of_many_deliveries_runs_again,
    type_of_an_event_is_stored,
);

mod releasing {
    use super::{
        forgotten_key_is_enough_for_an_event_with_two_identities, running_event_is_not_forgotten,
    };

    crate::on_ledgers!(
        [
            lease_sqlite = OnSqlite,
            lease_postgres = OnPostgres,
            transactional_sqlite = InSqlite,
            transactional_postgres = InPostgres,
        ],
        running_event_is_not_forgotten,
        forgotten_key_is_enough_for_an_event_with_two_identities,
    );
}

#[tokio::test]
async fn type_is_logged() {
    let (log, _guard) = Log::of_this_thread();
    let dir = tempfile::tempdir().unwrap();
    let adapter = SqliteAdapter::connect(&sqlite_url(dir.path())).await.unwrap();
    let typed = by_header().event_type(key::header("x-kind"));
    let service = DedupLayer::new(typed, adapter).layer(Handler::default().service());
    for expected in [ran(), duplicate()] {
        let mut request = request("a");
        request.headers_mut().insert("x-kind", "order.paid".parse().unwrap());
        assert_eq!(answer!(&service, request), expected);
        assert_eq!(log.last("delivery")["event_type"], "order.paid");
    }
}
