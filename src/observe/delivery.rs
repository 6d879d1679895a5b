//! [`Report`]: the log record and the span of a delivery, or of a [`RunReport`].

use std::borrow::Cow;
use std::cell::LazyCell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::StatusCode;
use tracing::field::Empty;
use tracing::{Level, Span};

use super::endings::{Outcome, fix};
use super::meters::{Counted, Meters};
use super::records::chain;
use super::store::may_be_wanted;
use crate::error::{BoxError, StoreError};
use crate::key::{Event, Keys};

/// The fields of the log record of a delivery in shadow.
pub(crate) struct ShadowFields {
    pub(crate) verdict: &'static str,
    /// Whether the layer would have refused the delivery because of a fault.
    pub(crate) is_fault: bool,
    /// The beginning of the payload's SHA-256, in hex.
    pub(crate) payload: String,
}

/// The fields of a delivery's log record. Each is set when it is known.
pub(crate) struct Report {
    started: Instant,
    /// Disabled until the keys are known.
    pub(crate) span: Span,
    /// The span around `span`; `None` before that is opened.
    around: Option<Span>,
    /// The attempt, and whether it is a takeover.
    pub(crate) attempt: Option<(u32, bool)>,
    pub(crate) age: Option<Duration>,
    pub(crate) status: Option<StatusCode>,
    pub(crate) error: Option<BoxError>,
    /// Set for a delivery in shadow.
    pub(crate) shadow: Option<ShadowFields>,
}

impl Report {
    pub(crate) fn started_now() -> Self {
        Self {
            started: Instant::now(),
            span: Span::none(),
            around: None,
            attempt: None,
            age: None,
            status: None,
            error: None,
            shadow: None,
        }
    }

    /// Opens the span of the delivery, which the rest of its work enters.
    pub(crate) fn open_span(&mut self, events: &[Event], meters: &Meters) {
        if may_be_wanted(Level::INFO) {
            self.around = Some(Span::current());
            self.span = tracing::info_span!(
                target: "tower_dedup",
                "delivery",
                namespace = &*namespace(events.first(), meters),
                id = events.first().map(|event| event.key().shown_id(meters.log_ids)).as_deref(),
                outcome = Empty,
                attempt = Empty,
                mode = Empty,
                verdict = Empty,
            );
        }
    }

    /// Emits the record and counts the delivery.
    pub(crate) fn emit(&self, outcome: Outcome, events: &[Event], meters: &Meters) {
        // The clock is read only if somebody wants the duration.
        let duration = LazyCell::new(|| self.started.elapsed());
        #[cfg(feature = "metrics")]
        meters.count(outcome, *duration, self.attempt.map(|(attempt, _)| attempt), self.age);
        let span = &self.span;
        span.record("outcome", outcome.as_str());
        span.record("attempt", self.attempt.map(|(attempt, ..)| attempt));
        if let Some(shadow) = &self.shadow {
            span.record("mode", "shadow");
            span.record("verdict", shadow.verdict);
            let namespace = meters.label();
            count!("tower_dedup_shadow_total", "namespace" => namespace, "verdict" => shadow.verdict);
        }
        let first = events.first();
        let verdict = || self.shadow.as_ref().map(|shadow| shadow.verdict);
        // Outside of its span: many subscribers show a record with the fields of the spans around
        // it.
        let around = || self.around.clone().unwrap_or_else(Span::current);
        macro_rules! event {
            ($level:ident) => {
                tracing::event!(
                    target: "tower_dedup",
                    parent: around(),
                    tracing::Level::$level,
                    outcome = outcome.as_str(),
                    namespace = &*namespace(first, meters),
                    id = first.map(|event| event.key().shown_id(meters.log_ids)).as_deref(),
                    event_type = first.and_then(Event::event_type),
                    keys = events.len(),
                    attempt = self.attempt.map(|(attempt, ..)| attempt),
                    takeover = self.attempt.map(|(_, takeover)| takeover),
                    age_ms = self.age.map(ms),
                    mode = self.shadow.as_ref().map(|_| "shadow"),
                    verdict = verdict(),
                    payload = self.shadow.as_ref().map(|shadow| &*shadow.payload),
                    status = self.status.map(|status| status.as_u16()),
                    duration_ms = rounded_ms(*duration),
                    error = self.error.as_deref().map(|error| chain(error)),
                    fix = fix(verdict().unwrap_or(outcome.as_str())),
                    "delivery"
                )
            };
        }
        let is_fault = self.shadow.as_ref().is_some_and(|shadow| shadow.is_fault);
        // No retry handles a failure of a sender that tries once.
        let is_lost = outcome == Outcome::Failed && meters.is_tried_once;
        match outcome.level() {
            Level::ERROR => event!(ERROR),
            Level::WARN => event!(WARN),
            Level::INFO if is_fault || is_lost => event!(WARN),
            Level::INFO => event!(INFO),
            _ => event!(DEBUG),
        }
    }
}

/// Returns the namespace of a record. That of a key may have a tenant, which no metric has.
fn namespace<'n>(first: Option<&'n Event>, meters: &'n Meters) -> Cow<'n, str> {
    first.map_or(Cow::Borrowed(&meters.namespace), |event| event.key().shown_namespace())
}

fn ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Returns milliseconds, rounded to the microsecond.
fn rounded_ms(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1e6).round() / 1e3
}

/// Reports one run when it is dropped.
pub(crate) struct RunReport {
    pub(crate) meters: Arc<Meters>,
    pub(crate) fields: Report,
    /// The keys of one event, without the bytes of its payload, which may be large.
    pub(crate) keys: Keys,
    /// `None` until the run has ended.
    outcome: Option<Outcome>,
    _running: Counted,
}

impl RunReport {
    pub(crate) fn start(meters: Arc<Meters>, keys: Keys) -> Self {
        let mut fields = Report::started_now();
        fields.open_span(keys.events(), &meters);
        Self { fields, keys, outcome: None, _running: meters.running(), meters }
    }

    pub(crate) fn end(&mut self, outcome: Outcome, error: Option<&StoreError>) {
        self.outcome = Some(outcome);
        self.fields.error = error.map(|error| error.clone().into());
    }
}

impl Drop for RunReport {
    fn drop(&mut self) {
        let dropped = if std::thread::panicking() { Outcome::Panicked } else { Outcome::Cancelled };
        self.fields.emit(self.outcome.unwrap_or(dropped), self.keys.events(), &self.meters);
    }
}
