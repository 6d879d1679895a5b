//! The spans of a delivery and of its store calls.

use tracing::field::Empty;
use tracing::level_filters::LevelFilter;
use tracing::{Level, Span};

use super::meters::Meters;
use crate::key::DedupKey;

/// The span of a delivery.
pub(crate) struct DeliverySpan {
    pub(crate) span: Span,
    /// The span around `span`; `None` before that is opened.
    around: Option<Span>,
    /// The id that the span shows. It is hashed once, and only if a subscriber wants the span.
    pub(super) id: Option<String>,
}

impl DeliverySpan {
    pub(crate) const fn none() -> Self {
        Self { span: Span::none(), around: None, id: None }
    }

    pub(crate) fn open(meters: &Meters, key: Option<&DedupKey>, plain_ids: bool) -> Self {
        if !may_be_wanted(Level::INFO) {
            return Self::none();
        }
        let mut id = None;
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
        Self { span, around: Some(Span::current()), id }
    }

    /// Returns the span for the record of the delivery. The record has the fields of the delivery's span
    /// itself, and many subscribers show an event with the fields of the spans around it.
    pub(super) fn of_record(&self) -> Span {
        self.around.clone().unwrap_or_else(Span::current)
    }
}

/// Returns the id as logs show it.
pub(super) fn shown(key: &DedupKey, plain: bool) -> String {
    if plain { key.id().to_owned() } else { key.log_id() }
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
