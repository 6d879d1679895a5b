//! [`Report`]: the log record of a delivery.

use std::borrow::Cow;
use std::time::Duration;

use http::StatusCode;

use super::error_text::chain;
use super::meters::Meters;
use super::outcome::Outcome;
use super::shadow::ShadowFields;
use super::span::{DeliverySpan, shown};
use crate::key::DedupKey;

/// The facts about a delivery that has ended.
pub(crate) struct Report<'a> {
    pub(crate) outcome: Outcome,
    pub(crate) meters: &'a Meters,
    pub(crate) span: &'a DeliverySpan,
    pub(crate) key: Option<&'a DedupKey>,
    pub(crate) event_type: Option<&'a str>,
    pub(crate) keys: usize,
    pub(crate) plain_ids: bool,
    /// The attempt, and whether it is a takeover.
    pub(crate) attempt: Option<(u32, bool)>,
    pub(crate) age: Option<Duration>,
    pub(crate) status: Option<StatusCode>,
    pub(crate) duration: Duration,
    pub(crate) error: Option<&'a (dyn std::error::Error + 'static)>,
    pub(crate) shadow: Option<&'a ShadowFields>,
}

impl Report<'_> {
    fn shown_id(&self) -> Option<Cow<'_, str>> {
        let key = self.key?;
        let of_span = self.span.id.as_deref().map(Cow::Borrowed);
        Some(of_span.unwrap_or_else(|| shown(key, self.plain_ids).into()))
    }

    pub(crate) fn emit(&self) {
        #[cfg(feature = "metrics")]
        self.meters.count(
            self.outcome,
            self.duration,
            self.attempt.map(|(attempt, _)| attempt),
            self.age,
        );
        let span = &self.span.span;
        span.record("outcome", self.outcome.as_str());
        span.record("attempt", self.attempt.map(|(attempt, ..)| attempt));
        if let Some(shadow) = self.shadow {
            span.record("mode", "shadow");
            span.record("verdict", shadow.verdict);
        }
        macro_rules! event {
            ($level:ident) => {
                tracing::event!(
                    target: "tower_dedup",
                    parent: self.span.of_record(),
                    tracing::Level::$level,
                    outcome = self.outcome.as_str(),
                    namespace = &*self.meters.namespace,
                    id = self.shown_id().as_deref(),
                    event_type = self.event_type,
                    keys = self.keys,
                    attempt = self.attempt.map(|(attempt, ..)| attempt),
                    takeover = self.attempt.map(|(_, takeover)| takeover),
                    age_ms = self.age.map(ms),
                    mode = self.shadow.map(|_| "shadow"),
                    verdict = self.shadow.map(|shadow| shadow.verdict),
                    payload = self.shadow.map(|shadow| &*shadow.payload),
                    status = self.status.map(|status| status.as_u16()),
                    duration_ms = rounded_ms(self.duration),
                    error = self.error.map(chain),
                    "delivery"
                )
            };
        }
        match self.outcome {
            Outcome::Completed
            | Outcome::Failed
            | Outcome::Duplicate
            | Outcome::Handshake
            | Outcome::InFlight => match self.shadow {
                Some(shadow) if shadow.is_fault => event!(WARN),
                _ => event!(INFO),
            },
            Outcome::Panicked
            | Outcome::Uncommitted
            | Outcome::BrokenResponse
            | Outcome::Unverified
            | Outcome::Unscoped => event!(ERROR),
            Outcome::HandlerTimeout
            | Outcome::Mismatch
            | Outcome::Unavailable
            | Outcome::Overloaded
            | Outcome::InvalidKey
            | Outcome::TooLarge
            | Outcome::BrokenBody
            | Outcome::SlowBody
            | Outcome::Cancelled => event!(WARN),
            Outcome::Bypass => event!(DEBUG),
        }
    }
}

fn ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Returns milliseconds, rounded to the microsecond.
fn rounded_ms(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1e6).round() / 1e3
}
