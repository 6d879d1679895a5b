//! The spans of a delivery and of its store calls.

use tracing::field::Empty;
use tracing::level_filters::LevelFilter;
use tracing::{Level, Span};

use super::delivery::shown;
use super::meters::Meters;
use crate::key::DedupKey;

/// Makes the span of a delivery. Returns also the id that the span shows, for the record: it is hashed
/// once, and only if a subscriber wants the span.
pub(crate) fn delivery_span(
    meters: &Meters,
    key: Option<&DedupKey>,
    plain_ids: bool,
) -> (Span, Option<String>) {
    let mut id = None;
    if !may_be_wanted(Level::INFO) {
        return (Span::none(), id);
    }
    let span = tracing::info_span!(
        target: "tower_dedup",
        "delivery",
        namespace = &*meters.namespace,
        id = key.map(|key| &**id.insert(shown(key, plain_ids))),
        outcome = Empty,
        attempt = Empty,
        mode = Empty,
        verdict = Empty,
    );
    (span, id)
}

/// Makes the span of a store call.
pub(crate) fn store_span(operation: &'static str) -> Span {
    if !may_be_wanted(Level::DEBUG) {
        return Span::none();
    }
    tracing::debug_span!(target: "tower_dedup", "store", operation, result = Empty)
}

/// Returns `false` if no subscriber wants spans of this level.
///
/// The macros read the same level. But if a dependency sets the feature `log` of `tracing` and no
/// subscriber was ever set, they compute all fields, which hashes the id.
fn may_be_wanted(level: Level) -> bool {
    level <= LevelFilter::current()
}
