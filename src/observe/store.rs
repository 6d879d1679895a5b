//! Metrics of store calls and of the connections to a store.

use std::time::Instant;

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

/// Counts a connection of the queue's lanes that was lost. The lane opens another one.
#[cfg(feature = "postgres")]
#[cfg_attr(not(feature = "metrics"), expect(unused_variables, reason = "metrics only"))]
pub(crate) fn lane_restarted(store: &'static str) {
    #[cfg(feature = "metrics")]
    metrics::counter!("tower_dedup_lane_restarts_total", "store" => store).increment(1);
}
