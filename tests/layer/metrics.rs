//! Gauges, histograms and counters: of a layer and of a deduplicator.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use http::Request;
use metrics_util::debugging::{DebugValue, Snapshotter};
use tokio::time::{Instant, timeout};
use tower::Layer;
use tower_dedup::adapter::contract::DedupAdapter;
use tower_dedup::key::{self, Event};
use tower_dedup::testing::{Fault, StoreCall};
use tower_dedup::{
    DedupKey, DedupLayer, Deduplicator, Delivery, Mode, OnMismatch, OnUnavailable, Replay,
    RunError, RunOutcome,
};

use crate::observe::checked;
use crate::observed::{measured, observed, value};
use support::words::by_word;
use support::{
    Body, Handler, by_header, dedup_key, faulty_memory as store, request, request_to, send,
    spawn_send, terms, until,
};

const WAITING: &str = "tower_dedup_waiting";
const PENDING: &str = "tower_dedup_pending_writes";
const RUNNING: &str = "tower_dedup_running";

/// Returns the change of a gauge since the last snapshot, which resets it.
fn change(snapshotter: &Snapshotter, gauge: &str) -> f64 {
    value(&measured(snapshotter), gauge, &["test"])
}

/// Returns the changes of those that wait, and of those that run or wait.
fn gauges(snapshotter: &Snapshotter) -> [f64; 2] {
    let sums = measured(snapshotter);
    [WAITING, RUNNING].map(|gauge| value(&sums, gauge, &["test"]))
}

#[test]
fn gauges_forget_a_run_that_is_dropped_while_it_waits() {
    observed(async |log, snapshotter| {
        let dedup = Deduplicator::new(store());
        let (key, waiting) = (dedup_key("a"), dedup.clone().wait(Duration::from_secs(30)));
        let mut first = Box::pin(dedup.run(&key, async |_| {
            std::future::pending::<()>().await;
            Ok::<_, ()>(())
        }));
        assert!(futures_util::poll!(first.as_mut()).is_pending());
        let mut waits = Box::pin(waiting.run(&key, async |_| Ok::<_, ()>(())));
        assert!(futures_util::poll!(waits.as_mut()).is_pending());
        assert_eq!(gauges(&snapshotter), [1.0, 2.0]);
        drop((waits, first));
        dedup.drain().await;
        assert_eq!(gauges(&snapshotter), [-1.0, -2.0]);
        let records = log.all("delivery");
        assert_eq!(records.len(), 2);
        assert!(records.iter().all(|record| record["outcome"] == "cancelled"), "{records:?}");
    });
}

#[test]
fn pending_writes_gauge_counts_completions_and_releases_in_the_background() {
    observed(async |_, snapshotter| {
        let store = store();
        let layer = DedupLayer::new(by_header(), Arc::clone(&store))
            .store_timeout(Duration::from_millis(50));
        let (handle, handler) = (layer.handle(), Handler::default().then(200).then(500));
        let service = layer.layer(handler.service());
        store.set(StoreCall::Complete, Fault::Fail);
        store.set(StoreCall::Release, Fault::Fail);
        send(&service, request("completed")).await;
        assert_eq!(change(&snapshotter, PENDING), 1.0);
        send(&service, request("released")).await;
        assert_eq!(change(&snapshotter, PENDING), 1.0);
        assert_eq!(handle.pending_writes(), 2);
        store.set(StoreCall::Complete, Fault::None);
        store.set(StoreCall::Release, Fault::None);
        handle.drain().await;
        let sums = measured(&snapshotter);
        assert_eq!(value(&sums, PENDING, &["test"]), -2.0);
        for call in ["complete", "release"] {
            let ended = value(&sums, "tower_dedup_background_total", &[call, "ok"]);
            assert_eq!(ended, 1.0, "{call}");
        }
    });
}

/// Returns the samples of a histogram.
fn samples(snapshotter: &Snapshotter, name: &str) -> Vec<f64> {
    let all = snapshotter.snapshot().into_vec().into_iter();
    all.filter(|(key, ..)| key.key().name() == name)
        .flat_map(|(.., value)| match value {
            DebugValue::Histogram(samples) => samples,
            _ => Vec::new(),
        })
        .map(|sample| sample.into_inner())
        .collect()
}

#[test]
fn age_of_duplicates_is_recorded_in_seconds() {
    observed(async |_, snapshotter| {
        let store = store();
        let service =
            DedupLayer::new(by_header(), Arc::clone(&store)).layer(Handler::default().service());
        send(&service, request("a")).await;
        assert!(samples(&snapshotter, "tower_dedup_duplicate_age_seconds").is_empty());
        store.get_ref().advance(Duration::from_secs(7_200));
        send(&service, request("a")).await;
        let ages = samples(&snapshotter, "tower_dedup_duplicate_age_seconds");
        let [age] = ages[..] else { panic!("{ages:?}") };
        assert!((7_200.0..7_260.0).contains(&age), "{age}");
    });
}

/// The record says that the handler ran, and that another delivery runs the rest.
#[test]
fn list_with_an_event_in_flight_elsewhere_is_a_completed_attempt() {
    observed(async |log, snapshotter| {
        let store = store();
        store.claim(&dedup_key("b"), &terms()).await.unwrap();
        let service = DedupLayer::new(by_word(), store).layer(Handler::default().service());
        let list = Request::post("/").body(Body::from("a b".to_owned())).unwrap();
        assert_eq!(send(&service, list).await.status(), 503);
        let record = log.last("delivery");
        let fields = ["outcome", "attempt", "status", "level"].map(|field| &*record[field]);
        assert_eq!(fields, ["in_flight", "1", "503", "INFO"]);
        let sums = measured(&snapshotter);
        let first = |result| value(&sums, "tower_dedup_first_attempts_total", &["test", result]);
        assert_eq!([first("completed"), first("failed")], [1.0, 0.0]);
    });
}

/// Does what the name of the way says.
pub(crate) async fn work(way: &str) -> Result<(), &'static str> {
    match way {
        "fails" => Err("no"),
        "hangs" => std::future::pending().await,
        "panics" => panic!("on purpose"),
        _ => Ok(()),
    }
}

/// An attempt that is no success has released its key when it ends: the next run is the second, and no takeover.
#[test]
fn deduplicator_reports_every_outcome_as_a_layer_does() {
    observed(async |log, snapshotter| {
        let (watch, store) = ((log, snapshotter), store());
        let dedup = Deduplicator::new(Arc::clone(&store)).store_timeout(Duration::from_millis(50));
        let timed = dedup.clone().handler_timeout(Duration::from_millis(10));
        let timed = timed.wait(Duration::from_millis(20));
        let open = dedup.clone().on_unavailable(OnUnavailable::FailOpen);
        store.claim(&dedup_key("held"), &terms()).await.unwrap();
        for (number, (id, payload, way, outcome, level, attempt)) in [
            ("a", "one", "fails", "failed", "INFO", "1"),
            ("a", "one", "", "completed", "INFO", "2"),
            ("a", "one", "", "duplicate", "INFO", ""),
            ("a", "two", "", "mismatch", "WARN", ""),
            ("b", "", "hangs", "handler_timeout", "WARN", "1"),
            ("b", "", "", "completed", "INFO", "2"),
            ("c", "", "panics", "panicked", "ERROR", "1"),
            ("c", "", "", "completed", "INFO", "2"),
            ("d=order", "", "", "completed", "INFO", "1"),
            // By its second identity.
            ("e=order", "", "", "duplicate", "INFO", ""),
            ("held", "", "", "in_flight", "INFO", ""),
            ("f", "", "", "unavailable", "WARN", ""),
            ("f", "", "open", "completed", "INFO", "1"),
        ]
        .into_iter()
        .enumerate()
        {
            let is_away = id == "f";
            store.set(StoreCall::Claim, if is_away { Fault::Fail } else { Fault::None });
            let (id, second) = id.split_once('=').unwrap_or((id, ""));
            let mut event = Event::new(dedup_key(id)).with_payload(payload.into());
            if !second.is_empty() {
                event = event.with_alias(dedup_key(second));
            }
            let dedup = if way == "open" { &open } else { &timed };
            let started = Instant::now();
            let run = dedup.run(event, async |delivery: Delivery| {
                assert_eq!((delivery.is_unprotected(), delivery.is_takeover()), (is_away, false));
                work(way).await
            });
            let ended = timeout(Duration::from_secs(1), AssertUnwindSafe(run).catch_unwind());
            let ended = match ended.await.expect("an end") {
                Ok(Ok(RunOutcome::First(()))) => "completed",
                Ok(Ok(RunOutcome::Duplicate(_))) => "duplicate",
                Ok(Ok(RunOutcome::InFlight)) => "in_flight",
                Ok(Ok(RunOutcome::Mismatch(_))) => "mismatch",
                Ok(Err(RunError::Handler(_))) => "failed",
                Ok(Err(RunError::TimedOut)) => "handler_timeout",
                Ok(Err(RunError::Store(_))) => "unavailable",
                Ok(other) => panic!("{other:?}"),
                Err(panic) if panic.downcast_ref() == Some(&"on purpose") => "panicked",
                Err(other) => panic!("{other:?}"),
            };
            assert_eq!(ended, outcome);
            let bound = Duration::from_millis(if outcome == "in_flight" { 20 } else { 10 });
            assert!(started.elapsed() <= bound, "{outcome}: {:?}", started.elapsed());
            let (record, _) = checked(&watch, number + 1, [outcome, level, ""]);
            let field = |name| record.get(name).map_or("", String::as_str);
            let fields = ["id", "namespace", "keys", "attempt"].map(field);
            assert_eq!(fields, [id, "test", "1", attempt], "{record:?}");
            let is_known = ["duplicate", "mismatch"].contains(&outcome);
            assert_eq!(record.contains_key("age_ms"), is_known, "{record:?}");
            let error = "calling a faulty adapter: the store is unavailable";
            assert_eq!(field("error") == error, outcome == "unavailable", "{record:?}");
        }
        dedup.drain().await;
    });
}

fn of_tenant(tenant: &str, path: &'static str, id: &str) -> Request<Body> {
    let mut request = request_to(path, id);
    request.headers_mut().insert("x-tenant", tenant.parse().unwrap());
    request
}

/// Two tenants behind one layer: every metric has one series, and every record of an event has its tenant.
#[test]
fn metrics_have_the_namespace_of_the_layer_and_records_that_of_the_key() {
    const TENANTS: [&str; 2] = ["tenant-1", "tenant-2"];
    observed(async |log, snapshotter| {
        let (store, handler) = (store(), Handler::default());
        let by_tenant = by_header().namespace_by(|request| {
            Some(request.headers().get("x-tenant")?.to_str().ok()?.to_owned())
        });
        let layer = DedupLayer::new(by_tenant, Arc::clone(&store))
            .compare_payload(key::body_digest(), OnMismatch::Report)
            .replay(Replay::new().body_limit(1))
            .on_unavailable(OnUnavailable::FailOpen)
            .store_timeout(Duration::from_millis(50));
        let service = layer.layer(handler.service());
        for tenant in TENANTS {
            let deliver = |id| send(&service, of_tenant(tenant, "/hook", id));
            let key = |id| DedupKey::new(&format!("test:{tenant}"), id).unwrap();
            deliver("e1").await;
            deliver("e1").await;
            let mut other = of_tenant(tenant, "/elsewhere", "e1");
            *other.body_mut() = Body::from("another");
            send(&service, other).await;
            // Another process dies with this event.
            store.claim(&key("taken-over"), &terms()).await.unwrap();
            store.get_ref().advance(Duration::from_secs(61));
            deliver("taken-over").await;
            // Another process takes this event over.
            handler.hold();
            let late = spawn_send(&service, of_tenant(tenant, "/hook", "lost"));
            handler.running(1).await;
            store.get_ref().advance(Duration::from_secs(61));
            store.claim(&key("lost"), &terms()).await.unwrap();
            let waits = spawn_send(&service, of_tenant(tenant, "/hook", "lost"));
            until(|| layer.handle().waiting() == 1).await;
            handler.release();
            late.await.unwrap();
            waits.await.unwrap();
            store.set(StoreCall::Claim, Fault::Fail);
            store.set(StoreCall::Complete, Fault::Fail);
            deliver("unprotected").await;
            store.set_all(Fault::None);
            layer.handle().set_mode(Mode::Shadow);
            deliver("shadow").await;
            layer.handle().set_mode(Mode::Enforce);
        }
        layer.handle().drain().await;

        let sums = measured(&snapshotter);
        for (name, labels) in sums.keys() {
            let has_tenant = labels.iter().any(|label| label.contains("tenant"));
            assert!(!has_tenant, "{name} {labels:?}");
        }
        for name in [
            "deliveries_total",
            "running",
            "waiting",
            "pending_writes",
            "delivery_duration_seconds",
            "duplicate_age_seconds",
            "first_attempts_total",
            "takeovers_total",
            "leases_lost_total",
            "unprotected_total",
            "other_path_total",
            "mismatches_total",
            "responses_not_stored_total",
            "shadow_total",
        ] {
            let name = format!("tower_dedup_{name}");
            let is_measured = |(of, labels): &(String, Vec<String>)| {
                *of == name && labels.first().is_some_and(|label| label == "test")
            };
            assert!(sums.keys().any(is_measured), "{name}: {sums:#?}");
        }
        for (message, count) in [("delivery", 8), ("takeover", 1), ("lease lost", 1)] {
            for tenant in TENANTS.map(|tenant| format!("test:{tenant}")) {
                let records = log.beginning(message);
                let of_tenant = records.iter().filter(|it| it["namespace"] == tenant).count();
                assert_eq!(of_tenant, count, "{tenant}: {records:#?}");
            }
        }
    });
}

/// The first thousand namespaces have series of their own, and the others share one.
#[test]
fn deduplicator_counts_a_thousand_namespaces() {
    observed(async |log, snapshotter| {
        let store = store();
        let dedup = Deduplicator::new(Arc::clone(&store));
        for n in 0..1_050 {
            let key = DedupKey::new(&format!("tenant-{n}"), "1").unwrap();
            if n >= 1_000 {
                store.claim(&key, &terms()).await.unwrap();
                store.get_ref().advance(Duration::from_secs(61));
            }
            dedup.clone().run(&key, async |_| Ok::<_, ()>(())).await.unwrap();
            assert_eq!(log.last("delivery")["namespace"], key.namespace());
        }
        let sums = measured(&snapshotter);
        let deliveries =
            |namespace| value(&sums, "tower_dedup_deliveries_total", &[namespace, "completed"]);
        assert_eq!([deliveries("tenant-0"), deliveries("tenant-999")], [1.0, 1.0]);
        assert_eq!([deliveries("tenant-1000"), deliveries("other")], [0.0, 50.0]);
        let takeovers: Vec<_> =
            sums.iter().filter(|((name, _), _)| name == "tower_dedup_takeovers_total").collect();
        assert_eq!(takeovers.len(), 1, "{takeovers:?}");
        assert_eq!(value(&sums, "tower_dedup_takeovers_total", &["other"]), 50.0);
    });
}
