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
}

impl DeliverySpan {
    pub(crate) const fn none() -> Self {
        Self { span: Span::none(), around: None }
    }

    pub(crate) fn open(meters: &Meters, key: Option<&DedupKey>) -> Self {
        if !may_be_wanted(Level::INFO) {
            return Self::none();
        }
        let span = tracing::info_span!(
            target: "tower_dedup",
            "delivery",
            namespace = &*meters.namespace,
            id = key.map(DedupKey::shown_id).as_deref(),
            outcome = Empty,
            attempt = Empty,
            mode = Empty,
            verdict = Empty,
        );
        Self { span, around: Some(Span::current()) }
    }

    /// Returns the span for the record of the delivery. The record has the fields of the delivery's span
    /// itself, and many subscribers show an event with the fields of the spans around it.
    pub(super) fn of_record(&self) -> Span {
        self.around.clone().unwrap_or_else(Span::current)
    }
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
/// subscriber was ever set, they compute all fields, which may hash the id.
fn may_be_wanted(level: Level) -> bool {
    level <= LevelFilter::current()
}
