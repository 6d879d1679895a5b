//! The spans of a delivery and of its store calls.

use tracing::Span;
use tracing::field::Empty;

use super::delivery::shown;
use super::meters::Meters;
use crate::key::DedupKey;

/// Makes the span of a delivery. A span that no subscriber wants costs one atomic load.
pub(crate) fn delivery_span(meters: &Meters, key: Option<&DedupKey>, plain_ids: bool) -> Span {
    tracing::info_span!(
        target: "tower_dedup",
        "delivery",
        namespace = &*meters.namespace,
        id = key.map(|key| shown(key, plain_ids)),
        outcome = Empty,
        attempt = Empty,
        mode = Empty,
        verdict = Empty,
    )
}

/// Makes the span of a store call.
pub(crate) fn store_span(operation: &'static str) -> Span {
    tracing::debug_span!(target: "tower_dedup", "store", operation, result = Empty)
}
