//! One sender, several routes: one layer around all of them, one layer around each, and the same
//! layer twice.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{MatchedPath, Request};
use axum::routing::{MethodRouter, post};
use tower::ServiceExt;
use tower_dedup::adapter::maintenance::MaintenanceAdapter;
use tower_dedup::ledger::Ledger;
use tower_dedup::{
    CommitError, DedupLayer, Delivery, OnMissingKey, StoreError, StoreErrorKind, key, provider,
    testing,
};

use crate::compare_payload::{DUPLICATE, RAN};
use support::log::Log;
use support::{Handler, answered, memory as store, result};

/// Collects the log records of this thread while `run` runs.
fn logged(run: impl AsyncFnOnce()) -> Log {
    let (log, _guard) = Log::of_this_thread();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(run());
    log
}

/// Returns the levels of the records whose message starts like this.
fn levels(log: &Log, message: &str) -> Vec<String> {
    log.beginning(message).into_iter().map(|record| record["level"].clone()).collect()
}

const OTHER_PATH: &str = "handled on another path";
const NESTED: &str = "nested layers";

fn route(handler: &Handler) -> MethodRouter {
    axum::routing::post_service(handler.service())
}

async fn deliver(app: &Router, path: &str, id: &str) -> axum::response::Response {
    let body = Body::from(format!(r#"{{"id": "{id}"}}"#));
    app.clone().oneshot(Request::post(path).body(body).unwrap()).await.unwrap()
}

#[test]
fn layers_of_one_namespace_on_two_routes_warn_that_the_second_has_not_run() {
    let log = logged(async || {
        let (runs, store) = (Handler::default(), store());
        let route = || route(&runs).layer(DedupLayer::new(provider::STRIPE, Arc::clone(&store)));
        let app = Router::new().route("/two-layers/billing", route());
        let app = app.route("/two-layers/tax", route());
        for id in ["two_layers_1", "two_layers_2"] {
            assert_eq!(answered(&deliver(&app, "/two-layers/billing", id).await), RAN);
            assert_eq!(answered(&deliver(&app, "/two-layers/tax", id).await), DUPLICATE);
        }
        assert_eq!(runs.runs(), 2);
    });
    // Twice within a minute, reported once.
    assert_eq!(levels(&log, OTHER_PATH), ["ERROR"]);
}

#[test]
fn one_layer_with_the_route_in_its_namespace_runs_both_handlers() {
    let log = logged(async || {
        let (billing, tenants) = (Handler::default(), Handler::default());
        let keys = provider::STRIPE.extractor().namespace_by(|request| {
            Some(request.extensions().get::<MatchedPath>()?.as_str().to_owned())
        });
        let inner = Router::new().route("/{tenant}", route(&tenants));
        let app = Router::new()
            .route("/matched/billing", route(&billing))
            .nest("/matched/tenants", inner)
            .layer(DedupLayer::new(keys, store()));
        for path in ["/matched/billing", "/matched/tenants/a"] {
            assert_eq!(answered(&deliver(&app, path, "matched").await), RAN);
            assert_eq!(answered(&deliver(&app, path, "matched").await), DUPLICATE);
        }
        // One route, one handler: one namespace.
        assert_eq!(answered(&deliver(&app, "/matched/tenants/b", "matched").await), DUPLICATE);
        assert_eq!((billing.runs(), tenants.runs()), (1, 1));
    });
    assert_eq!(levels(&log, OTHER_PATH), ["ERROR"], "of the other tenant");
}

async fn twice<L: Ledger>(layer: DedupLayer<L>) {
    let runs = Handler::default();
    let api = Router::new().route("/hook", route(&runs)).layer(layer.clone());
    let app = Router::new().nest("/api", api).layer(layer);
    for id in ["twice_1", "twice_2"] {
        assert_eq!(answered(&deliver(&app, "/api/hook", id).await), RAN);
        assert_eq!(answered(&deliver(&app, "/api/hook", id).await), DUPLICATE);
    }
    assert_eq!(runs.runs(), 2);
}

#[test]
fn layer_applied_twice_runs_its_handler_and_warns_once() {
    let log = logged(async || twice(DedupLayer::on_arrival(provider::STRIPE, store())).await);
    assert_eq!(levels(&log, NESTED), ["WARN"]);
    let log = logged(async || twice(DedupLayer::new(provider::STRIPE, store())).await);
    assert_eq!(levels(&log, NESTED), ["WARN"]);
}

#[test]
fn setting_below_what_the_sender_needs_warns_once() {
    const DAY: Duration = Duration::from_secs(86_400);
    const FLOOR: Duration = provider::ADYEN.retention_floor();
    assert!(FLOOR > 30 * DAY, "above the default");
    type Set = fn(DedupLayer) -> DedupLayer;
    let rows: [(_, Set, _); 7] = [
        (provider::ADYEN, |layer| layer, ""),
        (provider::ADYEN, |layer| layer.retention(FLOOR), ""),
        (provider::ADYEN, |layer| layer.retention(FLOOR - DAY), "the retention is shorter than"),
        (provider::GITHUB, |layer| layer, ""),
        (provider::GITHUB, |layer| layer.body_limit(25 << 20), ""),
        (provider::GITHUB, |layer| layer.body_limit(10), "the body limit is smaller than"),
        (provider::STRIPE, |layer| layer.body_limit(10), ""),
    ];
    for (preset, set, warning) in rows {
        let log = logged(async || drop(set(DedupLayer::new(preset, store()))));
        assert_eq!(log.count(), usize::from(!warning.is_empty()), "{preset:?}");
        assert_eq!(levels(&log, warning), vec!["WARN"; log.count()], "{preset:?}: {warning}");
    }
}

/// A key is remembered for the default of 30 days, or for the sender's floor if that is longer.
#[tokio::test]
async fn default_retention_is_raised_to_the_floor_of_the_sender() {
    const DAY: Duration = Duration::from_secs(86_400);
    for (sender, id, default) in [
        (provider::TELEGRAM, "1", 30 * DAY),
        (provider::ADYEN, "SampleAccount|1|AUTHORISATION|true", 60 * DAY),
    ] {
        let store = store();
        let dedup = DedupLayer::new(sender, Arc::clone(&store));
        let app = Router::new().route("/", post(async || ()).layer(dedup));
        let event = testing::request(sender, "/", "1");
        assert_eq!(app.oneshot(event.map(Body::new)).await.unwrap().status(), 200);
        let key = tower_dedup::DedupKey::new(sender.name(), id).unwrap();
        let entry = store.get(&key).await.unwrap().unwrap();
        let retention = entry.expires_at.duration_since(entry.first_seen_at).unwrap();
        let difference = retention.abs_diff(default);
        assert!(difference < Duration::from_secs(60), "{retention:?}");
    }
}

/// axum's extractors take such a body too. The layer raises the default of axum, and no limit that the application has
/// chosen.
#[tokio::test]
async fn default_body_limit_is_raised_to_the_largest_body_of_the_sender() {
    use axum::extract::DefaultBodyLimit;
    const MB: usize = 1 << 20;
    let github = || DedupLayer::new(provider::GITHUB, store());
    let other = || DedupLayer::new(key::header("x-github-delivery").namespace("stripe"), store());
    for (layer, limit, bytes, status) in [
        (github().body_limit(10), None, 10, 200),
        (github().body_limit(10), None, 11, 413),
        (github(), None, 25 * MB, 200),
        (github(), None, 25 * MB + 1, 413),
        (other(), None, 2 * MB, 200),
        (other(), None, 2 * MB + 1, 413),
        (github(), Some(DefaultBodyLimit::max(10)), 10, 200),
        (github(), Some(DefaultBodyLimit::max(10)), 11, 413),
        (github(), Some(DefaultBodyLimit::max(3 * MB)), 3 * MB, 200),
        (github(), Some(DefaultBodyLimit::max(3 * MB)), 3 * MB + 1, 413),
        (github(), Some(DefaultBodyLimit::max(2 * MB)), 2 * MB + 1, 413),
        (github(), Some(DefaultBodyLimit::max(26 * MB)), 25 * MB, 200),
        (github(), Some(DefaultBodyLimit::disable()), 25 * MB, 200),
        (github(), Some(DefaultBodyLimit::disable()), 25 * MB + 1, 413),
    ] {
        let is_of_the_layer = limit.is_none() || bytes > 25 * MB;
        let handler = async |body: axum::body::Bytes| body.len().to_string();
        let app = Router::new().route("/", post(handler).layer(layer));
        let app = if let Some(limit) = limit { app.layer(limit) } else { app };
        let push = Request::post("/").header("x-github-delivery", "push");
        let push = push.body(Body::from(vec![b' '; bytes])).unwrap();
        let response = app.oneshot(push).await.unwrap();
        assert_eq!(response.status(), status, "{bytes} bytes under {limit:?}");
        let told = (status == 413 && is_of_the_layer).then_some("too-large");
        assert_eq!(result(&response), told, "{bytes} bytes under {limit:?}");
    }
}

/// The client learns nothing about the routes. The log names the fault.
#[test]
fn rejected_arguments_are_an_empty_500_and_a_logged_cause_with_its_fix() {
    let log = logged(async || {
        let dedup =
            DedupLayer::new(provider::STRIPE, store()).on_missing_key(OnMissingKey::PassThrough);
        let app = Router::new()
            .route("/handshake", post(async |_: Delivery| ()))
            .layer(dedup)
            .route("/undeduplicated", post(async |_: Delivery| ()));
        for path in ["/undeduplicated", "/handshake"] {
            let event = Request::post(path).body(Body::from("{}")).unwrap();
            let response = app.clone().oneshot(event).await.unwrap();
            assert_eq!(response.status(), 500, "{path}");
            let body = to_bytes(response.into_body(), 1 << 20).await.unwrap();
            assert!(body.is_empty(), "{path}: {body:?}");
        }
    });
    assert_eq!(levels(&log, "rejected"), ["WARN"; 2]);
    let rejected = log.beginning("rejected");
    let said = [
        ("Delivery", "was not deduplicated", "put a DedupLayer around the route"),
        ("Delivery", "was not deduplicated", "take Option<Delivery> if handshakes"),
    ];
    for (event, (argument, cause, fix)) in rejected.iter().zip(said) {
        assert!(event["argument"].contains(argument), "{event:?}");
        assert!(event["error"].contains(cause), "{event:?}");
        assert!(event["fix"].contains(fix), "{event:?}");
    }
    assert_eq!(rejected.len(), 2);
}

#[tokio::test]
async fn retry_after_of_a_failed_commit_is_the_layers() {
    let handler = async || {
        let error = StoreError::new(StoreErrorKind::Unavailable, "committing");
        Err::<(), _>(CommitError::from(error))
    };
    let dedup = DedupLayer::new(provider::STRIPE, store())
        .retry_after_unavailable(Duration::from_millis(6_001));
    let app: Router = Router::new().route("/hook", post(handler).layer(dedup));
    let event = Request::post("/hook").body(Body::from(r#"{"id": "evt_1"}"#)).unwrap();
    let answer = app.oneshot(event).await.unwrap();
    assert_eq!(
        (answer.status().as_u16(), &answer.headers()["retry-after"]),
        (503, &"7".parse().unwrap())
    );
}
