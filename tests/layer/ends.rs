//! `DeliveryEnd`: what a response says of the delivery's events to a layer outside that asks.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use http::{Method, Request, Response};
use tower::Layer;
use tower_dedup::adapter::SqliteAdapter;
use tower_dedup::ledger::Ledger;
use tower_dedup::testing::{Fault, StoreCall};
use tower_dedup::{DedupLayer, DeliveryEnd, Mode, OnMismatch, OnUnavailable, ReportEnd, key};

use support::words::by_word;
use support::{
    Body, Handler, answered, by_header, event, faulty_memory, memory, request, send, spawn_send,
    sqlite_url,
};

/// Sends the requests in turn, and returns what the last response says.
async fn end_of<L: Ledger>(
    layer: DedupLayer<L>,
    handler: Handler,
    requests: impl IntoIterator<Item = Request<Body>>,
) -> Option<DeliveryEnd> {
    let service = layer.layer(handler.service());
    let mut end = None;
    for mut request in requests {
        request.extensions_mut().insert(ReportEnd);
        end = send(&service, request).await.extensions().get().copied();
    }
    end
}

fn lease() -> DedupLayer {
    DedupLayer::new(by_header(), memory()).wait(Duration::ZERO)
}

fn failing() -> Handler {
    Handler::default().then(422)
}

#[tokio::test]
async fn end_says_what_the_ledger_knows() {
    use DeliveryEnd::{Complete, Mismatch, Released, Undecided};
    let done = Handler::default;
    let twice = || [request("a"), request("a")];
    let other_body = || [event("a", "one"), event("a", "other")];
    let compared = |policy| lease().compare_payload(key::body_digest(), policy);

    assert_eq!(end_of(lease(), done(), [request("a")]).await, Some(Complete));
    assert_eq!(end_of(lease(), done(), twice()).await, Some(Complete));
    assert_eq!(end_of(lease(), failing(), [request("a")]).await, Some(Released));
    assert_eq!(end_of(lease(), failing(), twice()).await, Some(Complete));
    let is_final = lease().success_when(|_| true);
    assert_eq!(end_of(is_final, failing(), [request("a")]).await, Some(Complete));

    let refuses = compared(OnMismatch::Refuse);
    assert_eq!(end_of(refuses, done(), other_body()).await, Some(Mismatch));
    let reports = compared(OnMismatch::Report);
    assert_eq!(end_of(reports, done(), other_body()).await, Some(Complete));

    // The key is complete, whatever the handler has done.
    let on_arrival = DedupLayer::on_arrival(by_header(), memory());
    assert_eq!(end_of(on_arrival, failing(), [request("a")]).await, Some(Complete));

    for mode in [Mode::Shadow, Mode::Off] {
        assert_eq!(end_of(lease().mode(mode), done(), twice()).await, Some(Undecided));
    }

    let get = || Request::get("/hook").body(Body::default()).unwrap();
    let without_key = || Request::post("/hook").body(Body::default()).unwrap();
    let long = event("a", "too long");
    assert_eq!(end_of(lease(), done(), [get()]).await, None);
    assert_eq!(end_of(lease(), done(), [without_key()]).await, None);
    assert_eq!(end_of(lease().body_limit(1), done(), [long]).await, None);
    assert_eq!(end_of(lease().require_verified(), done(), [request("a")]).await, None);
}

#[tokio::test(start_paused = true)]
async fn end_of_a_handler_that_hangs_is_a_release() {
    let handler = Handler::default();
    handler.hold();
    let layer = lease().handler_timeout(Duration::from_secs(1));
    // An answer of the layer's own has its end, whether the request asks or not.
    let response = send(&layer.layer(handler.service()), request("a")).await;
    assert_eq!(answered(&response), (504, Some("handler-timeout")));
    assert_eq!(response.extensions().get(), Some(&DeliveryEnd::Released));
    assert_eq!(end_of(layer, handler, [request("a")]).await, Some(DeliveryEnd::Released));
}

#[tokio::test]
async fn uncommitted_success_is_a_release() {
    let directory = tempfile::tempdir().unwrap();
    let adapter = SqliteAdapter::connect(&sqlite_url(directory.path())).await.unwrap();
    adapter.migrate().await.unwrap();
    let layer = DedupLayer::transactional(by_header(), adapter);
    let respond = async |_| Ok::<_, Infallible>(Response::new(Body::default()));
    let response = send(&layer.layer(tower::service_fn(respond)), request("a")).await;
    assert_eq!(answered(&response), (500, Some("uncommitted")));
    assert_eq!(response.extensions().get(), Some(&DeliveryEnd::Released));
}

#[tokio::test]
async fn what_is_elsewhere_or_unknown_is_in_flight() {
    let handler = Handler::default();
    handler.hold();
    let service = lease().layer(handler.service());
    let first = spawn_send(&service, request("a"));
    handler.running(1).await;
    let end = send(&service, request("a")).await.extensions().get().copied();
    assert_eq!(end, Some(DeliveryEnd::InFlight));
    handler.release();
    first.await.unwrap();

    let store = faulty_memory();
    store.set(StoreCall::Claim, Fault::Fail);
    let closed = DedupLayer::new(by_header(), Arc::clone(&store));
    let end = end_of(closed, Handler::default(), [request("b")]).await;
    assert_eq!(end, Some(DeliveryEnd::InFlight));
    let open = DedupLayer::new(by_header(), store).on_unavailable(OnUnavailable::FailOpen);
    let end = end_of(open, Handler::default(), [request("b")]).await;
    assert_eq!(end, Some(DeliveryEnd::Undecided));
}

#[tokio::test]
async fn failure_of_a_list_with_an_event_elsewhere_is_in_flight() {
    let handler = Handler::default();
    handler.hold();
    let layer = DedupLayer::new(by_word(), memory()).wait(Duration::ZERO);
    let first = spawn_send(&layer.layer(handler.service()), event("-", "a"));
    handler.running(1).await;
    let end = end_of(layer.clone(), failing(), [event("-", "a b")]).await;
    assert_eq!(end, Some(DeliveryEnd::InFlight));
    // The layer answers in the place of a 2xx that is no success.
    let layer = layer.success_when(|response| response.status == 200);
    let service = layer.layer(Handler::default().then(202).service());
    let response = send(&service, event("-", "a c")).await;
    assert_eq!(answered(&response), (503, Some("in-flight")));
    assert_eq!(response.extensions().get(), Some(&DeliveryEnd::InFlight));
    handler.release();
    first.await.unwrap();
}

#[tokio::test]
async fn end_of_an_inner_layer_does_not_reach_the_outer_one() {
    let inner = DedupLayer::new(key::header("x-inner").namespace("inner"), memory());
    let inner = inner.layer(Handler::default().service());
    let outer = |layer: DedupLayer| layer.inner_body::<Body>().layer(inner.clone());
    let mut request = request("a");
    request.headers_mut().insert("x-inner", "i".parse().unwrap());
    let sent = || {
        let mut copy = Request::new(Body::default());
        *copy.method_mut() = Method::POST;
        *copy.headers_mut() = request.headers().clone();
        copy.extensions_mut().insert(ReportEnd);
        copy
    };
    let end = send(&outer(lease().mode(Mode::Shadow)), sent()).await.extensions().get().copied();
    assert_eq!(end, Some(DeliveryEnd::Undecided));
    let get = outer(lease().methods([Method::GET]));
    let end = send(&get, sent()).await.extensions().get::<DeliveryEnd>().copied();
    assert_eq!(end, None, "the outer layer has decided nothing");
}

#[tokio::test]
async fn handlers_response_has_an_end_only_if_the_request_asks() {
    let service = lease().layer(Handler::default().service());
    let mut ends = Vec::new();
    for _ in ["first", "duplicate"] {
        ends.push(send(&service, request("a")).await.extensions().get().copied());
    }
    assert_eq!(ends, [None, Some(DeliveryEnd::Complete)]);
}
