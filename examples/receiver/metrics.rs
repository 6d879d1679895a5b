//! `GET /metrics`: the layer's metrics as Prometheus reads them.

use std::time::Duration;

use axum::Router;
use axum::http::header::CONTENT_TYPE;
use axum::routing::get;
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};

/// From 1 ms to 60 s.
const DELIVERY_SECONDS: &[f64] =
    &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];
/// From 0.2 ms to 5 s.
const STORE_SECONDS: &[f64] =
    &[0.0002, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0];
/// From 1 s to 60 days.
const AGE_SECONDS: &[f64] = &[
    1.0,
    10.0,
    60.0,
    600.0,
    3_600.0,
    21_600.0,
    86_400.0,
    259_200.0,
    604_800.0,
    1_209_600.0,
    2_592_000.0,
    5_184_000.0,
];

/// Installs the recorder for the metrics of this process. Without buckets, the exporter would make
/// summaries, which nobody can add up over several receivers.
///
/// # Errors
///
/// If the process has a recorder already.
pub(crate) fn install() -> Result<PrometheusHandle, BuildError> {
    let mut builder = PrometheusBuilder::new();
    for (name, buckets) in [
        ("tower_dedup_delivery_duration_seconds", DELIVERY_SECONDS),
        ("tower_dedup_store_duration_seconds", STORE_SECONDS),
        ("tower_dedup_duplicate_age_seconds", AGE_SECONDS),
    ] {
        builder = builder.set_buckets_for_metric(Matcher::Full(name.to_owned()), buckets)?;
    }
    builder.install_recorder()
}

/// Returns the route, and runs the upkeep without which histograms grow between two scrapes.
pub(crate) fn routes(metrics: PrometheusHandle) -> Router {
    let upkeep = metrics.clone();
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(Duration::from_secs(5)).await;
            upkeep.run_upkeep();
        }
    });
    let render = async move || ([(CONTENT_TYPE, "text/plain; version=0.0.4")], metrics.render());
    Router::new().route("/metrics", get(render))
}
