//! Spans and metrics of store calls, and metrics of the table of a store.

#[cfg(any(feature = "postgres", feature = "sqlite"))]
use std::time::{Duration, SystemTime};

use tracing::field::Empty;
use tracing::level_filters::LevelFilter;
use tracing::{Level, Span};

use crate::error::StoreError;

/// Returns `false` if no subscriber wants spans of this level.
///
/// The macros read the same level. But if a dependency sets the feature `log` of `tracing` and no
/// subscriber was ever set, they compute all fields, which may hash the id.
pub(super) fn may_be_wanted(level: Level) -> bool {
    level <= LevelFilter::current()
}

/// The span and the duration of a store call.
pub(crate) struct StoreSpan {
    /// `None` if nobody wants it.
    span: Option<Span>,
    /// Without metrics, no clock is read.
    #[cfg(feature = "metrics")]
    start: std::time::Instant,
}

impl StoreSpan {
    pub(crate) fn begin(operation: &'static str) -> Self {
        let span = may_be_wanted(Level::DEBUG).then(
            || tracing::debug_span!(target: "tower_dedup", "store", operation, result = Empty),
        );
        Self {
            span,
            #[cfg(feature = "metrics")]
            start: std::time::Instant::now(),
        }
    }

    pub(crate) fn in_scope<T>(&self, part: impl FnOnce() -> T) -> T {
        match &self.span {
            Some(span) => span.in_scope(part),
            None => part(),
        }
    }

    /// Reports the result of the call.
    #[cfg_attr(not(feature = "metrics"), expect(unused_variables, reason = "metrics only"))]
    pub(crate) fn end(&self, operation: &'static str, error: Option<&StoreError>) {
        let result = error.map_or("ok", |error| error.kind().as_str());
        if let Some(span) = &self.span {
            span.record("result", result);
        }
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
            let took = self.start.elapsed();
            duration!("claim" "complete").record(took);
        }
    }
}

/// Reports that a purge has succeeded, or that the first one is still to come.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub(crate) fn set_last_purge() {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    meter!(gauge set now.as_secs_f64(); "tower_dedup_last_purge_timestamp_seconds");
}

/// Reports the keys of a store by state, the time since the oldest lapsed lease lapsed, and the
/// bytes of the table.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub(crate) fn table(
    rows: [(&'static str, u64); 5],
    oldest_lapsed: Option<Duration>,
    bytes: Option<u64>,
) {
    for (state, rows) in rows {
        meter!(gauge set rows as f64; "tower_dedup_rows", "state" => state);
    }
    let lapsed = oldest_lapsed.unwrap_or_default();
    meter!(gauge set lapsed.as_secs_f64(); "tower_dedup_oldest_lapsed_seconds");
    if let Some(bytes) = bytes {
        meter!(gauge set bytes as f64; "tower_dedup_table_bytes");
    }
}
