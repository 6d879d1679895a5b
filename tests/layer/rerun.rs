//! Reruns that an operator allows, under every ledger; and the types of events.

use std::sync::Arc;

use futures_util::future::join_all;
use http::Request;
use tower::Layer;
use tower_dedup::adapter::{EntryState, MaintenanceAdapter, RerunOrder, RerunReply, SqliteAdapter};
use tower_dedup::testing::{Fault, StoreCall};
use tower_dedup::{DedupKey, DedupLayer, key, provider};

use crate::compare_payload::{answer, duplicate, ran};
use crate::support::ledgers::{AnyLayer, Operated};
use crate::support::log::Log;
use crate::support::{
    Body, Handler, by_header, dedup_key, faulty, request, result, send, sqlite_url, until,
};

fn order() -> RerunOrder {
    RerunOrder::new("ada", "the invoice was not sent").unwrap()
}

async fn allow(operator: &dyn MaintenanceAdapter, keys: &[DedupKey]) {
    let allowed = operator.allow_rerun(keys, &order()).await.unwrap();
    assert_eq!(allowed, vec![RerunReply::Allowed; keys.len()]);
}

async fn allowed_event_runs_once_more<S: Operated>(setup: S) {
    let (handler, operator) = (Handler::default(), setup.operator().await);
    let service = setup.layer(by_header()).await.wrap(handler.service());
    assert_eq!(answer!(&service, request("a")), ran());
    assert!(!handler.last().is_rerun());
    let first = handler.last().idempotency_key("charge");
    assert_eq!(answer!(&service, request("a")), duplicate());

    allow(&*operator, &[dedup_key("a")]).await;
    assert_eq!(answer!(&service, request("a")), ran());
    let delivery = handler.last();
    assert_eq!((delivery.is_rerun(), delivery.is_takeover(), delivery.attempt()), (true, false, 2));
    assert_eq!(delivery.idempotency_key("charge"), first);
    for _ in 0..2 {
        assert_eq!(answer!(&service, request("a")), duplicate());
    }
    assert_eq!(handler.runs(), 2);
    let entry = operator.get(&dedup_key("a")).await.unwrap().unwrap();
    assert!(matches!(entry.state, EntryState::Complete { .. }), "{entry:?}");
    assert_eq!(entry.rerun.map(|audit| audit.order), Some(order()));
}

/// Deliveries in two processes at the same moment.
async fn one_of_many_deliveries_is_the_rerun<S: Operated>(setup: S) {
    let (handler, operator) = (Handler::default(), setup.operator().await);
    let one = setup.layer(by_header()).await.wrap(handler.service());
    let other = setup.layer(by_header()).await.wrap(handler.service());
    for round in 1..=8 {
        let id = format!("{}", round % 2);
        if round > 2 {
            allow(&*operator, &[dedup_key(&id)]).await;
        }
        let answers = join_all(
            (0..8).map(|_| async { [answer!(&one, request(&id)), answer!(&other, request(&id))] }),
        );
        // A delivery that has waited for too long is in flight.
        for (status, _) in answers.await.into_iter().flatten() {
            assert!([200, 503].contains(&status), "{status}");
        }
        assert_eq!(handler.runs(), round);
        assert_eq!(handler.last().is_rerun(), round > 2);
    }
}

/// An event with two identities runs if both were allowed.
async fn both_identities_of_an_event_are_needed<S: Operated>(setup: S) {
    let (handler, operator) = (Handler::default(), setup.operator().await);
    let keys = by_header().content_identity();
    let layer = setup.layer(keys).await;
    let (handle, service) = (layer.handle(), layer.wrap(handler.service()));
    assert_eq!(answer!(&service, request("a")), ran());
    assert!(!handler.last().is_rerun());
    let second = DedupKey::new("test.body", &body_id()).unwrap();
    assert!(operator.get(&second).await.unwrap().is_some());

    for [one, other] in [[dedup_key("a"), second.clone()], [second, dedup_key("a")]] {
        allow(&*operator, std::slice::from_ref(&one)).await;
        assert_eq!(answer!(&service, request("a")), duplicate(), "{one:?}");
        // What the duplicate has claimed is released in the background, and may still run again.
        handle.drain().await;
        allow(&*operator, std::slice::from_ref(&other)).await;
        assert_eq!(answer!(&service, request("a")), ran());
        assert!(handler.last().is_rerun());
        assert_eq!(answer!(&service, request("a")), duplicate());
    }
    assert_eq!(handler.runs(), 3);
}

/// Returns the digest of the body of [`request`].
fn body_id() -> String {
    let (head, body) = Request::new("payload".into()).into_parts();
    let found = key::body_digest().namespace("n").extract(&key::RequestRef::new(&head, &body));
    let Ok(key::Extracted::Keys(keys)) = found else { panic!("a digest") };
    keys.first().id().to_owned()
}

async fn failed_rerun_runs_again<S: Operated>(setup: S) {
    let (handler, operator) = (Handler::default(), setup.operator().await);
    let service = setup.layer(by_header()).await.wrap(handler.service());
    assert_eq!(answer!(&service, request("a")), ran());
    allow(&*operator, &[dedup_key("a")]).await;
    let failing = handler.clone().then(500);
    assert_eq!(answer!(&service, request("a")).0, 500);
    drop(failing);
    assert!(handler.last().is_rerun());
    assert_eq!(answer!(&service, request("a")), ran());
    assert!(handler.last().is_rerun());
    assert_eq!(answer!(&service, request("a")), duplicate());
    assert_eq!(handler.runs(), 3);
}

async fn running_event_is_not_allowed_to_run_again<S: Operated>(setup: S) {
    let (handler, operator) = (Handler::default(), setup.operator().await);
    let service = setup.layer(by_header()).await.wrap(handler.service());
    for rerun in [false, true] {
        handler.hold();
        let operate = async {
            handler.running(1).await;
            let reply = operator.allow_rerun(&[dedup_key("a")], &order()).await;
            handler.release();
            reply
        };
        let deliver = async { answer!(&service, request("a")) };
        let (reply, answer) = futures_util::future::join(operate, deliver).await;
        // On SQLite, an open transaction holds the file.
        let is_held = |reply: &Vec<_>| *reply == [RerunReply::InFlight];
        assert!(reply.as_ref().map_or(S::HOLDS_THE_STORE, is_held), "{reply:?}");
        assert_eq!(answer, ran());
        assert_eq!(handler.last().is_rerun(), rerun);
        assert_eq!(answer!(&service, request("a")), duplicate());
        allow(&*operator, &[dedup_key("a")]).await;
    }
}

/// The type stands in the store, in the handler's `Delivery`, and in the delivery's record.
async fn type_of_an_event_is_stored<S: Operated>(setup: S) {
    let (handler, operator) = (Handler::default(), setup.operator().await);
    let service = setup.layer(provider::GITHUB.extractor()).await.wrap(handler.service());
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
    allowed_event_runs_once_more,
    one_of_many_deliveries_is_the_rerun,
    both_identities_of_an_event_are_needed,
    type_of_an_event_is_stored,
);

mod releasing {
    use super::{failed_rerun_runs_again, running_event_is_not_allowed_to_run_again};

    crate::on_ledgers!(
        [
            lease_sqlite = OnSqlite,
            lease_postgres = OnPostgres,
            transactional_sqlite = InSqlite,
            transactional_postgres = InPostgres,
        ],
        failed_rerun_runs_again,
        running_event_is_not_allowed_to_run_again,
    );
}

#[tokio::test]
async fn rerun_and_type_are_logged() {
    let (log, _guard) = Log::of_this_thread();
    let dir = tempfile::tempdir().unwrap();
    let adapter = SqliteAdapter::connect(&sqlite_url(dir.path())).await.unwrap();
    let typed = by_header().event_type(key::header("x-kind"));
    let service = DedupLayer::new(typed, adapter.clone()).layer(Handler::default().service());
    let deliver = || {
        let mut request = request("a");
        request.headers_mut().insert("x-kind", "order.paid".parse().unwrap());
        request
    };
    assert_eq!(answer!(&service, deliver()), ran());
    assert_eq!(log.last("delivery")["rerun"], "false");
    allow(&adapter, &[dedup_key("a")]).await;
    assert_eq!(answer!(&service, deliver()), ran());
    let record = log.beginning("rerun").pop().unwrap();
    assert_eq!((&*record["level"], &*record["attempt"]), ("INFO", "2"));
    assert_eq!(record["id"], dedup_key("a").log_id());
    let record = log.last("delivery");
    assert_eq!((&*record["rerun"], &*record["event_type"]), ("true", "order.paid"));
    assert_eq!(answer!(&service, deliver()), duplicate());
    assert_eq!(log.last("delivery")["event_type"], "order.paid");
    assert_eq!(log.beginning("rerun").len(), 1);
}

/// The handler has succeeded, and its completion has reached the store without a reply. The repeated
/// completion does not use up the rerun that was allowed meanwhile.
#[tokio::test]
async fn completion_that_is_repeated_does_not_use_up_a_rerun() {
    let dir = tempfile::tempdir().unwrap();
    let store = faulty(SqliteAdapter::connect(&sqlite_url(dir.path())).await.unwrap());
    let handler = Handler::default();
    let layer = DedupLayer::new(by_header(), Arc::clone(&store))
        .store_timeout(std::time::Duration::from_millis(200));
    let (handle, service) = (layer.handle(), layer.layer(handler.service()));
    store.set(StoreCall::Complete, Fault::LoseReply);
    assert_eq!(answer!(&service, request("a")), ran());
    until(|| store.calls(StoreCall::Complete) > 1).await;
    allow(&*store, &[dedup_key("a")]).await;
    // This process knows that the event has run.
    assert_eq!(answer!(&service, request("a")), duplicate());
    store.set(StoreCall::Complete, Fault::None);
    handle.drain().await;
    assert_eq!(answer!(&service, request("a")), ran());
    assert!(handler.last().is_rerun());
    assert_eq!(handler.runs(), 2);
}
