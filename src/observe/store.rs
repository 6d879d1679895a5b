//! Metrics of store calls.

use std::time::Duration;

use crate::error::Error;

/// Measures a store call.
#[cfg_attr(not(feature = "metrics"), expect(unused_variables, reason = "metrics only"))]
pub(crate) fn store_call(operation: &'static str, took: Duration, error: Option<&Error>) {
    #[cfg(feature = "metrics")]
    {
        let result = error.map_or("ok", |error| error.kind().as_str());
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
        duration!("claim" "complete" "release" "begin" "commit").record(took);
    }
}
