//! Metrics of store calls and of the table of a store.

use std::time::{Duration, Instant};

use tracing::Span;

use crate::error::Error;

/// Measures a store call that began at `start`. Without metrics, it reads no clock.
#[cfg_attr(not(feature = "metrics"), expect(unused_variables, reason = "metrics only"))]
pub(crate) fn store_call(
    operation: &'static str,
    start: Instant,
    error: Option<&Error>,
    span: &Span,
) {
    let result = error.map_or("ok", |error| error.kind().as_str());
    span.record("result", result);
    #[cfg(feature = "metrics")]
    {
        // The compiler makes the metrics' keys for the calls of a successful delivery.
        macro_rules! duration {
            ($($usual:literal)+) => {
                match (operation, result) {
                    $(($usual, "ok") => duration!($usual, "ok"),)+
                    (operation, result) => duration!(operation, result),
                }
            };
            ($operation:expr, $result:expr) => {
                metrics::histogram!(
                    "tower_dedup_store_duration_seconds",
                    "operation" => $operation,
                    "result" => $result
                )
            };
        }
        duration!("claim" "complete" "release" "begin" "commit").record(start.elapsed());
    }
}

/// The keys of a store by state, after a round of a purge.
#[cfg_attr(not(feature = "metrics"), expect(dead_code, reason = "metrics only"))]
pub(crate) struct TableCounts {
    pub(crate) in_flight: u64,
    pub(crate) lapsed: u64,
    pub(crate) released: u64,
    pub(crate) complete: u64,
    pub(crate) expired: u64,
    pub(crate) oldest_lapsed: Option<Duration>,
    pub(crate) bytes: Option<u64>,
}

/// Reports that a round of a purge has succeeded, or that the first one is still to come.
pub(crate) fn set_last_purge() {
    #[cfg(feature = "metrics")]
    {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        metrics::gauge!("tower_dedup_last_purge_timestamp_seconds")
            .set(now.unwrap_or_default().as_secs_f64());
    }
}

/// Reports the keys of a store.
#[cfg(not(feature = "metrics"))]
pub(crate) fn table(_: &TableCounts) {}

/// Reports the keys of a store.
#[cfg(feature = "metrics")]
#[expect(clippy::cast_precision_loss, reason = "a gauge is a float")]
pub(crate) fn table(table: &TableCounts) {
    for (state, rows) in [
        ("in_flight", table.in_flight),
        ("lapsed", table.lapsed),
        ("released", table.released),
        ("complete", table.complete),
        ("expired", table.expired),
    ] {
        metrics::gauge!("tower_dedup_rows", "state" => state).set(rows as f64);
    }
    metrics::gauge!("tower_dedup_expired_rows").set(table.expired as f64);
    let oldest = table.oldest_lapsed.unwrap_or_default();
    metrics::gauge!("tower_dedup_oldest_lapsed_seconds").set(oldest.as_secs_f64());
    if let Some(bytes) = table.bytes {
        metrics::gauge!("tower_dedup_table_bytes").set(bytes as f64);
    }
}
