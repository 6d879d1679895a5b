//! `GET /metrics`: the layer's metrics as Prometheus reads them.

use std::time::Duration;

use axum::Router;
use axum::http::header::CONTENT_TYPE;
use axum::routing::get;
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};

/// Installs the recorder for the metrics of this process. Without buckets, the exporter would make
/// summaries, which nobody can add up over several receivers.
///
/// # Errors
///
/// If the process has a recorder already.
pub(crate) fn install() -> Result<PrometheusHandle, BuildError> {
    let mut builder = PrometheusBuilder::new();
    for &(name, buckets) in tower_dedup::observe::metrics_buckets() {
        builder = builder.set_buckets_for_metric(Matcher::Full(name.to_owned()), buckets)?;
    }
    let metrics = builder.install_recorder()?;
    tower_dedup::observe::describe_metrics();
    tower_dedup_inbox::describe_metrics();
    Ok(metrics)
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
