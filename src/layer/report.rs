//! [`ReportFields`]: the log record of one delivery.

use std::time::{Duration, Instant};

use http::StatusCode;
use tracing::Span;

use super::config::Config;
use super::policy::LogIds;
use crate::error::BoxError;
use crate::key::Event;
use crate::observe::{DeliverySpan, Outcome, Report, ShadowFields};

/// The fields of a delivery's log record. Each is set when it is known.
pub(super) struct ReportFields {
    started: Instant,
    /// Disabled until the keys are known.
    pub(super) span: DeliverySpan,
    /// The attempt, and whether it is a takeover.
    pub(super) attempt: Option<(u32, bool)>,
    pub(super) age: Option<Duration>,
    pub(super) status: Option<StatusCode>,
    pub(super) error: Option<BoxError>,
    /// Of a delivery in shadow.
    pub(super) shadow: Option<ShadowFields>,
}

impl ReportFields {
    pub(super) fn started_now() -> Self {
        Self {
            started: Instant::now(),
            span: DeliverySpan::none(),
            attempt: None,
            age: None,
            status: None,
            error: None,
            shadow: None,
        }
    }

    /// Opens the span of the delivery, which the rest of its work enters.
    pub(super) fn open_span(&mut self, events: &[Event], config: &Config) -> Span {
        let plain_ids = config.log_ids == LogIds::Plain;
        self.span = DeliverySpan::open(&config.meters, events.first().map(Event::key), plain_ids);
        self.span.span.clone()
    }

    /// Emits the record and counts the delivery.
    pub(super) fn emit(&self, outcome: Outcome, events: &[Event], config: &Config) {
        Report {
            outcome,
            meters: &config.meters,
            span: &self.span,
            key: events.first().map(Event::key),
            event_type: events.first().and_then(Event::event_type),
            keys: events.len(),
            plain_ids: config.log_ids == LogIds::Plain,
            attempt: self.attempt,
            age: self.age,
            status: self.status,
            duration: self.started.elapsed(),
            error: self.error.as_deref().map(|error| error as _),
            shadow: self.shadow.as_ref(),
        }
        .emit();
    }
}
