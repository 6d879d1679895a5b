//! Sends the spans of deliveries to an OpenTelemetry collector, by OTLP over HTTP.
//!
//! The exporter and the SDK read the standard variables, such as `OTEL_EXPORTER_OTLP_ENDPOINT`,
//! `OTEL_EXPORTER_OTLP_HEADERS` and `OTEL_SERVICE_NAME`.

use std::{env, time::Duration};

use axum::{Router, routing::post};
use opentelemetry::trace::TracerProvider;
use opentelemetry_otlp::SpanExporter;
use opentelemetry_sdk::trace::SdkTracerProvider;
use tokio::signal::{self, ctrl_c};
use tower_dedup::adapter::MemoryAdapter;
use tower_dedup::{BoxError, DedupLayer, key};
use tracing_subscriber::{filter::Targets, fmt, layer::SubscriberExt, util::SubscriberInitExt};

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let listen = env::var("LISTEN").unwrap_or("127.0.0.1:3000".to_owned());
    let exporter = SpanExporter::builder().with_http().build();
    let exporter = exporter.map_err(|error| format!("building the exporter: {error}"))?;
    let provider = SdkTracerProvider::builder().with_batch_exporter(exporter).build();
    let spans = tracing_opentelemetry::layer().with_tracer(provider.tracer("receiver"));
    // The level debug adds the spans `store`.
    let filter = env::var("RUST_LOG").unwrap_or("info,tower_dedup=debug".to_owned());
    let filter: Targets = filter.parse().map_err(|error| format!("RUST_LOG: {error}"))?;
    // One filter for all layers: see the log records in `tower_dedup::observe`.
    tracing_subscriber::registry().with(spans).with(fmt::layer()).with(filter).init();

    let dedup = DedupLayer::new(key::header("webhook-id").namespace("acme"), MemoryAdapter::new());
    let handle = dedup.handle();
    let app = Router::new().route("/webhooks", post(on_event).layer(dedup));
    let listener = tokio::net::TcpListener::bind(&listen).await?;
    println!("listening on http://{}/webhooks", listener.local_addr()?);
    #[cfg(unix)] // SIGTERM ends a container.
    let mut terminate = signal::unix::signal(signal::unix::SignalKind::terminate())?;
    #[cfg(windows)]
    let mut terminate = signal::windows::ctrl_close()?;
    let stop = async move { tokio::select!(_ = ctrl_c() => {}, _ = terminate.recv() => {}) };
    axum::serve(listener, app).with_graceful_shutdown(stop).await?;
    let drained = tokio::time::timeout(Duration::from_secs(30), handle.drain()).await;
    // Sends the spans that are left.
    provider.shutdown().map_err(|error| format!("sending the last spans: {error}"))?;
    Ok(drained?)
}

async fn on_event(body: String) {
    println!("once: {body}");
}
