//! Records about the settings of a layer, about arguments of a handler that are not available, and
//! about requests that are not verified.

use std::time::Duration;

#[cfg(feature = "axum")]
use super::error_text::chain;

/// Reports a retention below the retention floor.
pub(crate) fn short_retention(namespace: &str, retention: Duration, floor: Duration) {
    tracing::warn!(
        target: "tower_dedup",
        namespace,
        retention_s = retention.as_secs(),
        floor_s = floor.as_secs(),
        "the retention is shorter than the time in which this sender may deliver an event again"
    );
}

/// Reports that replays under another id are not recognised.
pub(crate) fn unsigned_id(namespace: &str) {
    tracing::warn!(
        target: "tower_dedup",
        namespace,
        "unsigned id: this sender does not sign the id, so a captured delivery runs again under \
         another id; add a `content_identity`"
    );
}

/// Counts and reports a request that is not verified. The URI grammar keeps control characters out of the path.
#[cfg(feature = "verify")]
pub(crate) fn not_verified(
    preset: Option<&'static str>,
    path: &str,
    name: &'static str,
    reason: &dyn std::fmt::Display,
) {
    #[cfg(feature = "metrics")]
    metrics::counter!(
        "tower_dedup_not_verified_total",
        "preset" => preset.unwrap_or("other"),
        "reason" => name
    )
    .increment(1);
    #[cfg(not(feature = "metrics"))]
    let _ = name;
    tracing::warn!(target: "tower_dedup", preset, path, %reason, "not verified");
}

/// Reports a body limit below the largest body of the sender.
pub(crate) fn small_body_limit(namespace: &str, limit: usize, largest: usize) {
    tracing::warn!(
        target: "tower_dedup",
        namespace,
        limit_bytes = limit,
        largest_bytes = largest,
        "the body limit is smaller than the largest body of this sender: such a delivery gets 413"
    );
}

/// Reports that an argument of a handler is not available, and what the user should change.
#[cfg(feature = "axum")]
pub(crate) fn rejected(
    argument: &'static str,
    error: &(dyn std::error::Error + 'static),
    fix: &'static str,
) {
    tracing::warn!(
        target: "tower_dedup",
        argument,
        error = chain(error),
        fix,
        "rejected: an argument of the handler is not available"
    );
}
