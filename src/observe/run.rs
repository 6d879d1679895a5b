//! [`RunReport`]: the log record of a run of a deduplicator.

use std::sync::Arc;

use super::delivery::Report;
use super::error_text::chain;
use super::meters::{Counted, Meters};
use super::outcome::Outcome;
use crate::error::Error;
use crate::key::{Event, Keys};

/// Reports one run: when it ends, or when it is dropped before.
pub(crate) struct RunReport {
    pub(crate) meters: Arc<Meters>,
    pub(crate) fields: Report,
    /// Without the payload, which may be large.
    pub(crate) keys: Keys,
    has_ended: bool,
    _running: Counted,
}

impl RunReport {
    pub(crate) fn start(meters: Arc<Meters>, event: &Event) -> Self {
        let keys = Keys::from(event.clone()).without_payloads();
        let mut fields = Report::started_now();
        fields.open_span(keys.events(), &meters);
        Self { fields, keys, has_ended: false, _running: meters.running(), meters }
    }

    /// Reports the end.
    pub(crate) fn end(&mut self, outcome: Outcome, error: Option<&Error>) {
        self.has_ended = true;
        self.fields.error = error.map(|error| chain(error).into());
        self.fields.emit(outcome, self.keys.events(), &self.meters);
    }
}

impl Drop for RunReport {
    fn drop(&mut self) {
        if self.has_ended {
            return;
        }
        let is_panic = std::thread::panicking();
        self.end(if is_panic { Outcome::Panicked } else { Outcome::Cancelled }, None);
    }
}
