//! A request without a key is a delivery that claims nothing: the bounds and the way of every delivery.

use std::time::Duration;

use http::Request;
use tower::{Layer, ServiceExt};
use tower_dedup::adapter::maintenance::MaintenanceAdapter;
use tower_dedup::ledger::Ledger;
use tower_dedup::{DedupLayer, KeyExtractor};

use crate::faults::drained;
use support::log::Log;
use support::{Body, Handler, answered, by_header, memory, request, send};

fn keys() -> KeyExtractor {
    by_header().bypass_when(|request| request.headers().contains_key("ping"))
}

fn ping() -> Request<Body> {
    Request::post("/hook").header("ping", "1").body(Body::default()).unwrap()
}

#[tokio::test]
async fn request_without_a_key_has_a_permit_and_outlives_its_client() {
    let store = memory();
    has_a_permit_and_outlives_its_client(DedupLayer::new(keys(), store.clone())).await;
    has_a_permit_and_outlives_its_client(DedupLayer::on_arrival(keys(), store.clone())).await;
    assert_eq!(store.stats().await.unwrap().rows, 0, "there is nothing to claim");
}

async fn has_a_permit_and_outlives_its_client<L: Ledger>(layer: DedupLayer<L>) {
    let (layer, handler) = (layer.max_running(1), Handler::default());
    let (handle, service) = (layer.handle(), layer.layer(handler.service()));
    handler.hold();
    let client = tokio::spawn({
        let service = service.clone();
        async move { send(&service, ping()).await.status() }
    });
    handler.running(1).await;
    assert_eq!(handle.running(), 1);
    assert_eq!(answered(&send(&service, ping()).await), (503, Some("unavailable")));
    assert_eq!(answered(&send(&service, request("a")).await), (503, Some("unavailable")));
    client.abort();
    assert!(client.await.unwrap_err().is_cancelled());
    assert_eq!(handle.running(), 1, "the handler runs without its client");
    handler.release();
    drained(&handle).await;
    handler.running(0).await;
    assert_eq!((handle.running(), handler.runs()), (0, 1));
    assert_eq!(answered(&send(&service, ping()).await), (200, None));
}

#[tokio::test(start_paused = true)]
async fn handler_of_a_request_without_a_key_has_its_timeout() {
    let (log, _collecting) = Log::of_this_thread();
    let handler = Handler::default();
    let layer = DedupLayer::new(keys(), memory()).handler_timeout(Duration::from_millis(20));
    let service = layer.layer(handler.service());
    handler.hold();
    assert_eq!(answered(&send(&service, ping()).await), (504, Some("handler-timeout")));
    let record = log.last("delivery");
    assert_eq!((&*record["outcome"], &*record["status"]), ("handler_timeout", "504"));
}

#[tokio::test]
async fn response_error_and_panic_without_a_key_reach_the_caller() {
    let (log, _collecting) = Log::of_this_thread();
    let handler = Handler::default().then(404).then(1).then(0);
    let service = DedupLayer::new(keys(), memory()).layer(handler.fallible());
    let oneshot = || service.clone().oneshot(ping());
    assert_eq!(answered(&oneshot().await.unwrap()), (404, None));
    let record = log.last("delivery");
    assert_eq!((&*record["outcome"], &*record["status"]), ("bypass", "404"));
    assert!(!record.contains_key("id") && record["keys"] == "0", "{record:?}");
    assert_eq!(oneshot().await.unwrap_err(), "the handler was told to fail");
    assert_eq!(log.last("delivery")["outcome"], "bypass");
    let panicked = tokio::spawn(oneshot()).await.unwrap_err();
    assert_eq!(panicked.into_panic().downcast_ref(), Some(&"the handler was told to panic"));
    assert_eq!(log.last("delivery")["outcome"], "panicked");
}

/// With two permits for one request, the inner layer would refuse it.
#[tokio::test]
async fn nested_layers_take_one_permit_for_a_request_without_a_key() {
    let (log, _collecting) = Log::of_this_thread();
    let handler = Handler::default();
    let layer = DedupLayer::new(keys(), memory()).max_running(1);
    let service = layer.layer(layer.layer(handler.service()));
    assert_eq!(answered(&send(&service, ping()).await), (200, None));
    assert_eq!(handler.runs(), 1);
    let outcomes: Vec<_> = log.all("delivery").iter().map(|r| r["outcome"].clone()).collect();
    assert_eq!(outcomes, ["bypass", "bypass"]);
}
