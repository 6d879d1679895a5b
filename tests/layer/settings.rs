//! Settings: invalid values are refused, and the bounds are shared.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Method, Request, StatusCode};
use http_body_util::Full;
use tokio::time::timeout;
use tower::Layer;
use tower_dedup::adapter::MemoryAdapter;
use tower_dedup::key::{Keys, RequestRef};
use tower_dedup::{
    DedupLayer, KeyExtractor, OnMismatch, OnUnavailable, Replay, key, provider, testing,
};

use support::{Handler, answered, by_header, request, result, send, until};

fn layer() -> DedupLayer {
    DedupLayer::new(by_header(), MemoryAdapter::new())
}

/// The text of an invalid layer's error, and of its panic.
fn refused(layer: &DedupLayer) -> String {
    let error = layer.clone().checked().unwrap_err().to_string();
    let apply = || drop(layer.layer(tower::service_fn(async |_: ()| Ok::<_, ()>(()))));
    let panic = catch_unwind(AssertUnwindSafe(apply)).unwrap_err();
    assert_eq!(panic.downcast_ref::<String>(), Some(&error));
    error
}

#[test]
fn layer_with_an_invalid_setting_is_an_error_when_checked_and_panics_when_applied() {
    let zero = Duration::ZERO;
    for (layer, setting, rule) in [
        (layer().methods([]), "methods", "at least one method, not []"),
        (layer().body_limit(0), "body_limit", "at least 1 byte, not 0"),
        (layer().body_timeout(zero), "body_timeout", "longer than zero, not 0ns"),
        (layer().retention(zero), "retention", "longer than zero, not 0ns"),
        (
            layer().retention(Duration::MAX),
            "retention",
            &format!("at most 1,000 years, not {:?}", Duration::MAX),
        ),
        (layer().retention(Duration::from_secs(59)), "retention", "at least the lease, not 59s"),
        (layer().lease(Duration::from_millis(99)), "lease", "at least 100 ms, not 99ms"),
        (
            layer().store_timeout(zero),
            "store_timeout",
            "longer than zero and at most 30 s, not 0ns",
        ),
        (
            layer().store_timeout(Duration::from_millis(30_001)),
            "store_timeout",
            "longer than zero and at most 30 s, not 30.001s",
        ),
        (layer().handler_timeout(zero), "handler_timeout", "longer than zero, not 0ns"),
        (layer().max_keys(0), "max_keys", "at least 1 key, not 0"),
        (layer().max_running(0), "max_running", "at least 1 delivery, not 0"),
    ] {
        assert_eq!(refused(&layer), format!("`{setting}` must be {rule}"));
    }
    for status in [StatusCode::CONTINUE, StatusCode::OK, StatusCode::NO_CONTENT] {
        let layer = layer().in_flight_status(status);
        let error = layer.clone().checked().unwrap_err().to_string();
        assert_eq!(
            error,
            format!("`in_flight_status` must be neither 1xx nor 2xx, not {}", status.as_u16())
        );
        refused(&layer);
    }
    // A duplicate is never an error to its sender.
    let api = DedupLayer::idempotency_key(key::header("x-tenant"), MemoryAdapter::new());
    for (layer, status) in [(layer(), 409), (layer(), 301), (api, 500)] {
        let layer = layer.duplicate_status(status.try_into().unwrap());
        assert_eq!(refused(&layer), format!("`duplicate_status` must be 2xx, not {status}"));
    }
    let no_pointer = || key::json("id");
    for layer in [
        DedupLayer::new(no_pointer().namespace("n"), MemoryAdapter::new()),
        layer().compare_payload(no_pointer(), OnMismatch::Refuse),
    ] {
        assert_eq!(refused(&layer), "`pointer` must be a JSON pointer (RFC 6901), not \"id\"");
    }
}

#[test]
fn layer_with_valid_settings_is_checked() {
    let layer = layer()
        .methods([Method::PUT])
        // A later value replaces an invalid one.
        .body_limit(0)
        .body_limit(1)
        .body_timeout(Duration::from_nanos(1))
        .retention(Duration::from_millis(100))
        .lease(Duration::from_millis(100))
        .store_timeout(Duration::from_nanos(1))
        .handler_timeout(Duration::MAX)
        .max_keys(1)
        .max_running(1)
        .max_waiting(0)
        .in_flight_status(StatusCode::TOO_MANY_REQUESTS)
        .duplicate_status(StatusCode::NO_CONTENT);
    assert!(layer.checked().is_ok());
}

/// The order of builder calls does not matter, nor the clone on which they are made.
#[tokio::test]
async fn bound_set_on_a_clone_binds_services_that_exist() {
    let handler = Handler::default();
    handler.hold();
    let layer = layer().wait(Duration::from_secs(60));
    let handle = layer.handle();
    // Two routes.
    let services = [(); 2].map(|()| layer.clone().layer(handler.service()));
    let deliver = |id: &'static str| {
        let service = services[usize::from(id != "a")].clone();
        tokio::spawn(async move { send(&service, request(id)).await })
    };
    let running = [deliver("a"), deliver("b")];
    handler.running(2).await;

    drop(layer.clone().max_running(1).max_waiting(0));
    assert_eq!(handle.running(), 2, "a smaller bound ends nothing");
    let refused = deliver("c").await.unwrap();
    assert_eq!(answered(&refused), (503, Some("unavailable")));

    drop(layer.clone().max_running(3));
    let refused = timeout(Duration::from_secs(20), deliver("a")).await.expect("it waits").unwrap();
    assert_eq!(result(&refused), Some("in-flight"));
    drop(layer.clone().max_waiting(1));
    let waiter = deliver("a");
    until(|| handle.waiting() == 1).await;

    handler.release();
    for delivery in running {
        assert_eq!(delivery.await.unwrap().status(), StatusCode::OK);
    }
    assert_eq!(result(&waiter.await.unwrap()), Some("duplicate"));
    assert_eq!((handle.running(), handle.waiting()), (0, 0));
}

/// The keys that the layer reads of a request without a body.
fn keys(layer: &DedupLayer, request: Request<()>) -> Option<Keys> {
    layer.settings().keys(&RequestRef::new(&request.into_parts().0, &Bytes::new()))
}

#[tokio::test]
async fn layer_outside_reads_the_settings() {
    let zeros = |bytes: usize| Full::<Bytes>::from(vec![0; bytes]);
    let preset = DedupLayer::new(provider::GITHUB, MemoryAdapter::new());
    let day = Duration::from_secs(86_400);
    let settings = preset.settings();
    assert_eq!(settings.namespace(), "github");
    let found = keys(&preset, testing::request(provider::GITHUB, "/", "a").map(drop));
    assert_eq!(found.unwrap().first().id(), "a");
    let panics = KeyExtractor::from_fn("a", |_| panic!("on purpose"));
    let two = by_header().alias("alias", key::header("x-alias"));
    let two = DedupLayer::new(two, MemoryAdapter::new()).max_keys(1);
    let mut with_alias = request("a").map(drop);
    with_alias.headers_mut().insert("x-alias", HeaderValue::from_static("b"));
    for (layer, request, has_keys) in [
        (&preset, Request::default(), false),
        (&DedupLayer::new(panics, MemoryAdapter::new()), Request::default(), false),
        (&two, request("a").map(drop), true),
        (&two, with_alias, false),
    ] {
        assert_eq!(keys(layer, request).is_some(), has_keys, "{:?}", layer.settings());
    }
    assert_eq!(settings.retention(), (30 * day).max(settings.retention_floor().unwrap()));
    assert!(settings.deduplicates(&Method::POST) && !settings.deduplicates(&Method::GET));
    assert!(settings.collect(zeros(25 << 20)).await.is_ok(), "GitHub sends 25 MB");
    assert_eq!(settings.result_header().unwrap(), "x-dedup-result");
    assert!(!settings.requires_verified() && !settings.replays() && !settings.is_of_clients());

    let own = layer()
        .methods([Method::GET])
        .retention(day)
        .body_limit(9)
        .on_unavailable(OnUnavailable::FailOpen)
        .replay(Replay::new())
        .require_verified()
        .result_header(None);
    let settings = own.settings();
    assert_eq!((settings.retention(), settings.retention_floor()), (day, None));
    assert!(settings.deduplicates(&Method::HEAD) && !settings.deduplicates(&Method::POST));
    assert_eq!(settings.collect(zeros(9)).await.unwrap().len(), 9);
    assert!(settings.collect(zeros(10)).await.is_err());
    assert_eq!(settings.on_unavailable(), OnUnavailable::FailOpen);
    assert!(settings.replays() && settings.requires_verified());
    assert_eq!(settings.result_header(), None);
    let clients = DedupLayer::idempotency_key(key::header("x-client"), MemoryAdapter::new());
    assert!(clients.settings().is_of_clients());
}
