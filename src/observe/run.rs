//! [`RunReport`]: the log record of a run of a deduplicator.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::delivery::Report;
use super::meters::{Counted, Meters};
use super::outcome::Outcome;
use super::span::DeliverySpan;
use crate::error::Error;
use crate::key::{DedupKey, Event};

/// Reports one run: when it ends, or when it is dropped before.
pub(crate) struct RunReport {
    pub(crate) meters: Arc<Meters>,
    pub(crate) span: DeliverySpan,
    /// The attempt, and whether it is a takeover.
    pub(crate) attempt: Option<(u32, bool)>,
    key: DedupKey,
    event_type: Option<String>,
    started: Instant,
    has_ended: bool,
    _running: Counted,
}

impl RunReport {
    pub(crate) fn start(meters: Arc<Meters>, event: &Event) -> Self {
        Self {
            span: DeliverySpan::open(&meters, Some(event.key()), false),
            attempt: None,
            key: event.key().clone(),
            event_type: event.event_type().map(str::to_owned),
            started: Instant::now(),
            has_ended: false,
            _running: meters.running(),
            meters,
        }
    }

    /// Reports the end. `age` is the age of a duplicate.
    pub(crate) fn end(&mut self, outcome: Outcome, age: Option<Duration>, error: Option<&Error>) {
        self.has_ended = true;
        Report {
            outcome,
            meters: &self.meters,
            span: &self.span,
            key: Some(&self.key),
            event_type: self.event_type.as_deref(),
            keys: 1,
            plain_ids: false,
            attempt: self.attempt,
            age,
            status: None,
            duration: self.started.elapsed(),
            error: error.map(|error| error as _),
            shadow: None,
        }
        .emit();
    }
}

impl Drop for RunReport {
    fn drop(&mut self) {
        if self.has_ended {
            return;
        }
        let is_panic = std::thread::panicking();
        self.end(if is_panic { Outcome::Panicked } else { Outcome::Cancelled }, None, None);
    }
}
