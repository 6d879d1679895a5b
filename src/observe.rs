//! Log records and metrics: one `tracing` event for every delivery, and counters.
//!
//! # Log records
//!
//! The target is `tower_dedup`. Every delivery ends in exactly one record with the message
//! `delivery`. The record has these fields, as far as they are known:
//!
//! | field | meaning |
//! |---|---|
//! | `outcome` | see below |
//! | `namespace`, `id` | the first key; `id` is the first 16 hex digits of its SHA-256, or the id itself by choice ([`LogIds`](crate::LogIds)) |
//! | `keys` | the number of events in the delivery (each event has one key, and one second identity at most) |
//! | `attempt`, `takeover` | of a run: see [`Delivery`](crate::Delivery) |
//! | `age_ms` | of a duplicate: the time since the event was first seen |
//! | `mode`, `verdict` | in [shadow](crate::Mode::Shadow): `shadow`, and the [verdict](crate::Verdict); `outcome` says how the handler ended |
//! | `payload` | in shadow: the first 16 hex digits of the SHA-256 of the body, or of the part that [`compare_payload`](crate::DedupLayer::compare_payload) names |
//! | `status` | the status of the response |
//! | `duration_ms` | the time from the head of the request to the head of the response |
//! | `error` | the internal error, which the client never sees |
//!
//! | `outcome` | level | meaning |
//! |---|---|---|
//! | `completed` | info | the handler succeeded; the key is complete |
//! | `failed` | info | the handler failed; the key is free for the retry (on arrival: the event is lost) |
//! | `handler_timeout` | warn | the handler ran for longer than [`handler_timeout`](crate::DedupLayer::handler_timeout) and was dropped; the key is free for the retry (on arrival: the event is lost) |
//! | `panicked` | error | the handler panicked; the key is free for the retry (on arrival: the event is lost) |
//! | `uncommitted` | error | the handler succeeded, but the ledger could not commit |
//! | `partial` | info | a multi-event delivery: the new events are complete; other deliveries still run the rest |
//! | `duplicate` | info | every event is complete; the handler did not run |
//! | `in_flight` | info | another delivery runs the event, or may run it; the handler did not run |
//! | `mismatch` | warn | the id is complete with another payload, and the layer [compares](crate::DedupLayer::compare_payload) payloads |
//! | `broken_response` | error | the body of a response to be stored ended in an error; the key is free for the retry |
//! | `unavailable` | warn | the store did not reply in time, or returned an error |
//! | `overloaded` | warn | `max_running` or `max_waiting` was reached, or the inner service was not ready when the wait ended |
//! | `invalid_key` | warn | the key is missing or malformed, or there are too many keys |
//! | `too_large`, `broken_body`, `slow_body` | warn | the request body could not be read to its end |
//! | `unverified` | error | the marker `Verified` is missing: the layers are in the wrong order |
//! | `unscoped` | error | a request with an `Idempotency-Key` has no [scope](crate::DedupLayer::idempotency_key): no layer outside has set it |
//! | `bypass` | debug | a handshake, a missing key that passes through, or a delivery that an outer layer already runs. Under a transactional ledger, the record of the first two comes after the handler, and `uncommitted`, `panicked` and `handler_timeout` apply to them too |
//!
//! Other records, with the same target. A record about one event names it by the hash of its id:
//!
//! | message begins with | level | meaning |
//! |---|---|---|
//! | `lease lost` | warn | another handler may have run this event too |
//! | `takeover` | warn | an earlier handler of this event died or lost its lease |
//! | `running unprotected` | warn | the handler runs although the store did not reply |
//! | `handled on another path` | error, once a minute at most | a duplicate came on a path on which its event was not handled |
//! | `mode changed` | info | [`set_mode`](crate::DedupHandle::set_mode) was called; `from` and `to` are the modes |
//! | `nested layers` | warn, once | an outer layer uses the same keys |
//! | `unsigned id` | warn, once a layer | [`require_verified`](crate::DedupLayer::require_verified) is set, the sender does not sign the id, and there is no [second identity](crate::guide::keys#an-id-that-is-not-signed) |
//! | `not verified` | warn | a [`VerifyLayer`](crate::verify::VerifyLayer) refused the request; `reason` says why |
//! | `payload mismatch` | warn | the event was handled with another payload |
//! | `response not stored` | warn | duplicates of this event get an empty response |
//! | `completed in the background` | info | a store call succeeded after its delivery had ended |
//! | `gave up in the background` | error | such a call never succeeded |
//! | `gave up at once` | error | such a call was not started: too many are pending, or the runtime has ended |
//! | `a handler panicked after its client had gone` | error | no caller is left that the panic could reach |
//! | `the events that the handler marked` | warn | a handler failed after [`mark_done`](crate::Delivery::mark_done), and the outcome of the COMMIT of its marked events is unknown |
//! | `the retention is shorter` | warn | a layer is built, and the retention is below the preset's floor |
//! | `the body limit is smaller` | warn | a layer is built, and its body limit is below the sender's largest body |
//! | `purged` | debug | expired keys were deleted |
//! | `purging failed` | warn | a round of a purge failed, and the round before it did not |
//! | `purging failed` | debug | a further round failed |
//! | `purging does not succeed` | warn, once until a round succeeds | no round has succeeded for three intervals |
//! | `purging is not permitted` | warn, once | the role of a `PostgresAdapter` may not delete rows |
//! | `not encrypted` | warn, once | a `PostgresAdapter` is connected to another host without TLS |
//! | `nearly full` | warn, once an hour at most | a `MemoryAdapter` has reached four fifths of its capacity |
//! | `evicted` | warn, once a minute at most | a full `MemoryAdapter` has forgotten `keys` live keys; `age_s` is the age of the youngest |
//! | `rejected` | warn | an argument of a handler, `Delivery` or `DedupTx`, is not available; `fix` says what to change |
//! | `could not terminate the session` | warn | Postgres: the server may hold the key of a lost transaction until its own keepalive ends the session |
//! | `the SQLite file was deleted or replaced` | error | every call is refused until the file is back |
//! | `the SQLite file is back` | warn | calls are no longer refused |
//! | `the table of the SQLite store is gone` | warn | the table is made again, without its keys |
//! | `the SQLite pool runs below` | warn | `synchronous` is below `FULL`: a power cut can lose a completed key |
//! | `the SQLite file is not in WAL mode` | warn | duplicates wait for writers |
//!
//! # Metrics
//!
//! The feature `metrics` reports through the [`metrics`](https://docs.rs/metrics) facade:
//!
//! | name | kind | labels | meaning |
//! |---|---|---|---|
//! | `tower_dedup_deliveries_total` | counter | `namespace`, `outcome` | deliveries by outcome, as above |
//! | `tower_dedup_running` | gauge | `namespace` | deliveries that have begun and not ended |
//! | `tower_dedup_delivery_duration_seconds` | histogram | `namespace`, `outcome` | the time from the head of the request to the head of the response |
//! | `tower_dedup_store_duration_seconds` | histogram | `operation`, `result` | store calls: `claim`, `renew`, `complete`, `release`; in transactions `begin`, `release_in`, `savepoint`, `commit`, `rollback`. `result` is `ok` or the kind of the error |
//! | `tower_dedup_takeovers_total` | counter | `namespace` | runs after another lease lapsed |
//! | `tower_dedup_leases_lost_total` | counter | `namespace` | handlers that lost their lease |
//! | `tower_dedup_unprotected_total` | counter | `namespace` | handlers that ran although the store did not reply |
//! | `tower_dedup_other_path_total` | counter | `namespace` | duplicates that came on another path than their event |
//! | `tower_dedup_mismatches_total` | counter | `namespace` | events that came again with another payload |
//! | `tower_dedup_responses_not_stored_total` | counter | `namespace` | responses that were to be stored and cannot be |
//! | `tower_dedup_background_total` | counter | `operation`, `result` | store calls that ended after their delivery; `result` is `ok`, `gave_up` or `refused` |
//! | `tower_dedup_shadow_total` | counter | `namespace`, `verdict` | deliveries in [shadow](crate::Mode::Shadow) by [verdict](crate::Verdict) |
//! | `tower_dedup_purged_total` | counter | | expired keys that were deleted |
//! | `tower_dedup_evicted_total` | counter | | live keys that a full `MemoryAdapter` has forgotten |

mod settings;
mod shadow;

use std::sync::Arc;
#[cfg(feature = "metrics")]
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use http::StatusCode;

use crate::error::Error;
use crate::key::DedupKey;

#[cfg(feature = "verify")]
pub(crate) use settings::not_verified;
pub(crate) use settings::{short_retention, small_body_limit, unsigned_id};
pub(crate) use shadow::{ShadowFields, mode_changed, shadow};

/// Logs a record that names an event by its namespace and the hash of its id.
macro_rules! log {
    ($level:ident, $key:expr, $($fields:tt)+) => {
        tracing::event!(
            target: "tower_dedup",
            tracing::Level::$level,
            namespace = $key.namespace(),
            id = $key.log_id(),
            $($fields)+
        )
    };
}

/// Counts under the namespace of `key`.
#[cfg_attr(not(feature = "metrics"), expect(unused_variables, reason = "metrics only"))]
fn count(counter: &'static str, key: &DedupKey) {
    #[cfg(feature = "metrics")]
    metrics::counter!(counter, "namespace" => key.namespace().to_owned()).increment(1);
}

/// How one delivery ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    Completed,
    Failed,
    HandlerTimeout,
    Panicked,
    Uncommitted,
    Partial,
    Duplicate,
    InFlight,
    Mismatch,
    BrokenResponse,
    Unavailable,
    Overloaded,
    InvalidKey,
    TooLarge,
    BrokenBody,
    SlowBody,
    Unverified,
    Unscoped,
    Bypass,
}

impl Outcome {
    fn as_str(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::HandlerTimeout => "handler_timeout",
            Self::Panicked => "panicked",
            Self::Uncommitted => "uncommitted",
            Self::Partial => "partial",
            Self::Duplicate => "duplicate",
            Self::InFlight => "in_flight",
            Self::Mismatch => "mismatch",
            Self::BrokenResponse => "broken_response",
            Self::Unavailable => "unavailable",
            Self::Overloaded => "overloaded",
            Self::InvalidKey => "invalid_key",
            Self::TooLarge => "too_large",
            Self::BrokenBody => "broken_body",
            Self::SlowBody => "slow_body",
            Self::Unverified => "unverified",
            Self::Unscoped => "unscoped",
            Self::Bypass => "bypass",
        }
    }
}

/// The keys of the metrics of one layer.
///
/// A metric's key is composed and hashed text. Making it for every delivery costs more than
/// counting. The recorder is looked up each time, because it may be installed late.
pub(crate) struct Meters {
    namespace: Arc<str>,
    /// `true` once `nested layers` was logged.
    logged_nested: AtomicBool,
    /// When `handled on another path` was logged last.
    logged_other_path: Mutex<Option<Instant>>,
    #[cfg(feature = "metrics")]
    running: metrics::Key,
    /// Indexed by outcome.
    #[cfg(feature = "metrics")]
    ended: [OnceLock<Ended>; Outcome::Bypass as usize + 1],
}

/// The metrics' keys of one outcome.
#[cfg(feature = "metrics")]
struct Ended {
    deliveries: metrics::Key,
    durations: metrics::Key,
}

#[cfg(feature = "metrics")]
static METADATA: metrics::Metadata<'_> =
    metrics::Metadata::new(module_path!(), metrics::Level::INFO, Some(module_path!()));

impl Meters {
    pub(crate) fn new(namespace: &Arc<str>) -> Self {
        Self {
            namespace: Arc::clone(namespace),
            logged_nested: AtomicBool::new(false),
            logged_other_path: Mutex::default(),
            #[cfg(feature = "metrics")]
            running: key("tower_dedup_running", namespace, None),
            #[cfg(feature = "metrics")]
            ended: std::array::from_fn(|_| OnceLock::new()),
        }
    }

    /// Reports that an outer layer already runs a request. Logs once, because every request of this
    /// layer is concerned.
    pub(crate) fn nested(&self) {
        if !self.logged_nested.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                target: "tower_dedup",
                namespace = &*self.namespace,
                "nested layers: an outer layer deduplicates these requests by the same keys; this layer lets them through"
            );
        }
    }

    /// Reports a duplicate that came on another path than the path on which its event was handled.
    pub(crate) fn handled_on_another_path(&self, key: &DedupKey) {
        const PAUSE: Duration = Duration::from_secs(60);
        count("tower_dedup_other_path_total", key);
        let mut logged = self.logged_other_path.lock().unwrap_or_else(PoisonError::into_inner);
        if logged.is_some_and(|logged| logged.elapsed() < PAUSE) {
            return;
        }
        *logged = Some(Instant::now());
        drop(logged);
        log!(
            ERROR,
            key,
            "handled on another path: this event is a duplicate here, and only a layer in shadow runs this path's handler; give each route that has to see it a namespace of its own"
        );
    }

    /// Counts a delivery as running until the returned guard is dropped.
    pub(crate) fn running(&self) -> Running {
        Running {
            #[cfg(feature = "metrics")]
            gauge: {
                let gauge =
                    metrics::with_recorder(|to| to.register_gauge(&self.running, &METADATA));
                gauge.increment(1.0);
                gauge
            },
        }
    }

    #[cfg(feature = "metrics")]
    fn count(&self, outcome: Outcome, took: Duration) {
        let ended = self.ended[outcome as usize].get_or_init(|| Ended {
            deliveries: key("tower_dedup_deliveries_total", &self.namespace, Some(outcome)),
            durations: key("tower_dedup_delivery_duration_seconds", &self.namespace, Some(outcome)),
        });
        metrics::with_recorder(|to| {
            to.register_counter(&ended.deliveries, &METADATA).increment(1);
            to.register_histogram(&ended.durations, &METADATA).record(took);
        });
    }
}

#[cfg(feature = "metrics")]
fn key(name: &'static str, namespace: &Arc<str>, outcome: Option<Outcome>) -> metrics::Key {
    // Shared, so that the recorder does not copy it.
    let namespace = metrics::SharedString::from_shared(Arc::clone(namespace));
    let mut labels = vec![metrics::Label::new("namespace", namespace)];
    labels.extend(outcome.map(|outcome| metrics::Label::new("outcome", outcome.as_str())));
    metrics::Key::from_parts(name, labels)
}

impl std::fmt::Debug for Meters {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Meters").field("namespace", &self.namespace).finish_non_exhaustive()
    }
}

/// The facts about a delivery that has ended.
pub(crate) struct Report<'a> {
    pub(crate) outcome: Outcome,
    pub(crate) meters: &'a Meters,
    pub(crate) key: Option<&'a DedupKey>,
    pub(crate) keys: usize,
    pub(crate) plain_ids: bool,
    pub(crate) attempt: Option<(u32, bool)>,
    pub(crate) age: Option<Duration>,
    pub(crate) status: Option<StatusCode>,
    pub(crate) duration: Duration,
    pub(crate) error: Option<&'a (dyn std::error::Error + 'static)>,
    pub(crate) shadow: Option<&'a ShadowFields>,
}

impl Report<'_> {
    pub(crate) fn emit(&self) {
        #[cfg(feature = "metrics")]
        self.meters.count(self.outcome, self.duration);
        macro_rules! event {
            ($level:ident) => {
                tracing::event!(
                    target: "tower_dedup",
                    tracing::Level::$level,
                    outcome = self.outcome.as_str(),
                    namespace = &*self.meters.namespace,
                    id = self.key.map(|key| shown(key, self.plain_ids)),
                    keys = self.keys,
                    attempt = self.attempt.map(|(attempt, _)| attempt),
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
            | Outcome::Partial
            | Outcome::Duplicate
            | Outcome::InFlight => event!(INFO),
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
            | Outcome::SlowBody => event!(WARN),
            Outcome::Bypass => event!(DEBUG),
        }
    }
}

fn shown(key: &DedupKey, plain: bool) -> String {
    if plain { key.id().to_owned() } else { key.log_id() }
}

fn ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Returns milliseconds, rounded to the microsecond.
fn rounded_ms(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1e6).round() / 1e3
}

/// Returns the error and its causes in one line.
pub(crate) fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut line = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let text = cause.to_string();
        // The `Display` of some errors ends with their cause.
        if !line.ends_with(&text) {
            line.push_str(": ");
            line.push_str(&text);
        }
        next = cause.source();
    }
    line
}

/// Counts a delivery as running until it is dropped.
pub(crate) struct Running {
    #[cfg(feature = "metrics")]
    gauge: metrics::Gauge,
}

impl Drop for Running {
    fn drop(&mut self) {
        #[cfg(feature = "metrics")]
        self.gauge.decrement(1.0);
    }
}

/// Measures a store call.
#[cfg_attr(not(feature = "metrics"), expect(unused_variables, reason = "metrics only"))]
pub(crate) fn store_call(operation: &'static str, took: Duration, error: Option<&Error>) {
    #[cfg(feature = "metrics")]
    {
        let result = error.map_or("ok", |error| error.kind().as_str());
        // The compiler makes the metrics' keys for the calls of a successful delivery.
        macro_rules! duration {
            ($($usual:literal)+) => {
                match (operation, result) {
                    $(($usual, "ok") => duration!($usual, "ok"),)+
                    (operation, result) => duration!(operation, result),
                }
            };
            ($operation:expr, $result:expr) => {
                metrics::histogram!(
                    "tower_dedup_store_duration_seconds",
                    "operation" => $operation,
                    "result" => $result
                )
            };
        }
        duration!("claim" "complete" "release" "begin" "commit").record(took);
    }
}

/// Reports that a handler starts after another lease on its event lapsed.
pub(crate) fn takeover(key: &DedupKey, attempt: u32) {
    count("tower_dedup_takeovers_total", key);
    log!(WARN, key, attempt, "takeover: an earlier handler of this event died or lost its lease");
}

/// Reports that a handler lost its lease while it ran.
pub(crate) fn lease_lost(key: &DedupKey) {
    count("tower_dedup_leases_lost_total", key);
    log!(WARN, key, "lease lost: another handler may have run this event too");
}

/// Reports that a handler starts although the store did not reply.
pub(crate) fn unprotected(key: &DedupKey, error: &Error) {
    count("tower_dedup_unprotected_total", key);
    log!(WARN, key, error = chain(error), "running unprotected: the store did not reply");
}

/// Reports that an event was handled before with another payload.
pub(crate) fn mismatch(key: &DedupKey) {
    count("tower_dedup_mismatches_total", key);
    log!(WARN, key, "payload mismatch: this event was handled with another payload");
}

/// Reports that a handler's response cannot be stored.
pub(crate) fn response_not_stored(key: &DedupKey, why: &'static str) {
    count("tower_dedup_responses_not_stored_total", key);
    log!(WARN, key, why, "response not stored: duplicates of this event get an empty response");
}

/// Reports that the events which a failed handler marked as done may not be committed.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub(crate) fn marks_not_committed(key: &DedupKey, error: &Error) {
    log!(
        WARN,
        key,
        error = chain(error),
        "the events that the handler marked as done may not be committed"
    );
}

/// Reports that an argument of a handler is not available, and what the user should change.
#[cfg(feature = "axum")]
pub(crate) fn rejected(
    argument: &'static str,
    error: &(dyn std::error::Error + 'static),
    fix: &'static str,
) {
    tracing::warn!(
        target: "tower_dedup",
        argument,
        error = chain(error),
        fix,
        "rejected: an argument of the handler is not available"
    );
}

/// How a store call ended that outlived its delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Background {
    Done,
    GaveUp,
    /// Too many such calls are pending.
    Refused,
}

/// Reports a completion or release that ended in the background.
pub(crate) fn background(operation: &'static str, result: Background, key: Option<&DedupKey>) {
    #[cfg(feature = "metrics")]
    {
        let result = match result {
            Background::Done => "ok",
            Background::GaveUp => "gave_up",
            Background::Refused => "refused",
        };
        metrics::counter!(
            "tower_dedup_background_total",
            "operation" => operation,
            "result" => result
        )
        .increment(1);
    }
    let namespace = key.map(DedupKey::namespace);
    let id = key.map(DedupKey::log_id);
    match result {
        Background::Done => tracing::info!(
            target: "tower_dedup", operation, namespace, id, "completed in the background"
        ),
        Background::GaveUp => tracing::error!(
            target: "tower_dedup", operation, namespace, id, "gave up in the background"
        ),
        Background::Refused => tracing::error!(
            target: "tower_dedup", operation, namespace, id,
            "gave up at once: too many calls are pending in the background, or the runtime has ended"
        ),
    }
}

/// Reports a handler's panic that no caller waits for.
pub(crate) fn orphaned_panic(namespace: &str, message: &str) {
    tracing::error!(
        target: "tower_dedup",
        namespace,
        panic = message,
        "a handler panicked after its client had gone"
    );
}

/// Counts live keys that a store has forgotten.
#[cfg(feature = "memory")]
pub(crate) fn evicted(keys: u64) {
    #[cfg(feature = "metrics")]
    metrics::counter!("tower_dedup_evicted_total").increment(keys);
    #[cfg(not(feature = "metrics"))]
    let _ = keys;
}

/// Reports that a store has forgotten live keys; `age` is the age of the youngest.
#[cfg(feature = "memory")]
pub(crate) fn evicting(keys: u64, age: Duration) {
    tracing::warn!(
        target: "tower_dedup",
        keys,
        age_s = age.as_secs(),
        "evicted: the memory store is full and forgets events that may be delivered again"
    );
}

/// Reports that a store is nearly full.
#[cfg(feature = "memory")]
pub(crate) fn nearly_full() {
    tracing::warn!(
        target: "tower_dedup",
        "nearly full: the memory store has reached four fifths of its capacity"
    );
}

/// Counts expired keys that were deleted.
pub(crate) fn purged(keys: u64) {
    #[cfg(feature = "metrics")]
    metrics::counter!("tower_dedup_purged_total").increment(keys);
    tracing::debug!(target: "tower_dedup", keys, "purged");
}

/// Reports a failed round of a purge, at WARN if it is the first one after a success.
pub(crate) fn purge_failed(error: &Error, is_first: bool) {
    let error = chain(error);
    if is_first {
        tracing::warn!(target: "tower_dedup", error, "purging failed; it is tried again");
    } else {
        tracing::debug!(target: "tower_dedup", error, "purging failed; it is tried again");
    }
}

/// Reports that no round of a purge has succeeded for this long.
pub(crate) fn purge_stuck(error: &Error, since: Duration) {
    tracing::warn!(
        target: "tower_dedup",
        since_s = since.as_secs(),
        error = chain(error),
        "purging does not succeed: expired keys stay, and the store grows"
    );
}
