//! [`ReportFields`]: the log record of one delivery.

use std::time::{Duration, Instant};

use http::StatusCode;

use super::config::Config;
use super::policy::LogIds;
use crate::error::BoxError;
use crate::key::Keys;
use crate::observe::{Outcome, Report};

/// The fields of a delivery's log record. Each is set when it is known.
pub(super) struct ReportFields {
    started: Instant,
    /// The attempt, and whether it is a takeover and a rerun.
    pub(super) attempt: Option<(u32, bool, bool)>,
    pub(super) age: Option<Duration>,
    pub(super) status: Option<StatusCode>,
    pub(super) error: Option<BoxError>,
}

impl ReportFields {
    pub(super) fn started_now() -> Self {
        Self { started: Instant::now(), attempt: None, age: None, status: None, error: None }
    }

    /// Emits the record and counts the delivery.
    pub(super) fn emit(&self, outcome: Outcome, keys: Option<&Keys>, config: &Config) {
        Report {
            outcome,
            meters: &config.meters,
            key: keys.map(Keys::first),
            event_type: keys.and_then(|keys| keys.events()[0].event_type()),
            keys: keys.map_or(0, |keys| keys.events().len()),
            plain_ids: config.log_ids == LogIds::Plain,
            attempt: self.attempt,
            age: self.age,
            status: self.status,
            duration: self.started.elapsed(),
            error: self.error.as_deref().map(|error| error as _),
        }
        .emit();
    }
}
