//! What the layer says of itself: one `tracing` event for every delivery, and metrics.
//!
//! # Events
//!
//! Target `tower_dedup`. Every delivery that the layer looks at ends in exactly one event with the
//! message `delivery` and these fields, as far as they are known:
//!
//! | field | meaning |
//! |---|---|
//! | `outcome` | see below |
//! | `namespace`, `id` | the first key; `id` is the first 16 hex digits of its SHA-256, or the id itself by choice ([`LogIds`](crate::LogIds)) |
//! | `keys` | how many events the delivery carries |
//! | `attempt`, `takeover` | of a first run |
//! | `age_ms` | of a duplicate: since the event was first seen |
//! | `status` | the handler's, or the layer's |
//! | `duration_ms` | from the head of the request to the answer |
//! | `error` | what went wrong inside, never told to the client |
//!
//! | `outcome` | level | meaning |
//! |---|---|---|
//! | `completed` | info | the handler ran and succeeded; the key is complete |
//! | `failed` | info | the handler ran and failed; the key is free for the retry |
//! | `panicked` | error | the handler panicked; the key is free for the retry |
//! | `uncommitted` | error | the handler succeeded, but its ledger could not commit |
//! | `partial` | info | a batch: the new events are complete, others run elsewhere still |
//! | `duplicate` | info | answered without running the handler |
//! | `in_flight` | info | the event was running elsewhere for longer than the wait |
//! | `mismatch` | warn | the id is known, with another payload, where the layer [compares](crate::DedupLayer::compare_payload) them |
//! | `broken_response` | error | the handler's response, which was to be kept, ended in an error; the key is free for the retry |
//! | `unavailable` | warn | the store did not answer |
//! | `overloaded` | warn | `max_running` or `max_waiting` deliveries were under way, or the inner service was not ready to the end of a wait |
//! | `invalid_key` | warn | the key is missing, malformed, or one of too many |
//! | `too_large`, `broken_body`, `slow_body` | warn | the body was not read to its end |
//! | `unverified` | error | no `Verified` marker: the layers are in the wrong order |
//! | `bypass` | debug | a handshake, a missing key that was let through, or a delivery that an outer layer runs already |
//!
//! Beside them, naming events by their hash: `lease lost` (warn), `takeover` (warn), `running
//! unprotected` (warn), `handled on another path` (error, once a minute at most), `nested layers`
//! (warn, once), `payload mismatch` (warn), `response not kept` (warn), `completed in the
//! background` (info), `gave up in the background` (error), `purged` (debug), `purging failed` (warn);
//! of a `MemoryAdapter`, `nearly full` (warn, once an hour at most) and `evicted` (warn, once a minute
//! at most, with `keys` and `age_s`, the age of the youngest of them). `rejected` (error) names an
//! argument of a handler, a `Delivery` or a `DedupTx`, that is not in its request.
//!
//! # Metrics
//!
//! With the feature `metrics`, through the [`metrics`](https://docs.rs/metrics) facade:
//!
//! | name | kind | labels | meaning |
//! |---|---|---|---|
//! | `tower_dedup_deliveries_total` | counter | `namespace`, `outcome` | deliveries by outcome, as above |
//! | `tower_dedup_running` | gauge | `namespace` | deliveries that have begun and not ended |
//! | `tower_dedup_delivery_duration_seconds` | histogram | `namespace`, `outcome` | from the head of the request to the answer |
//! | `tower_dedup_store_duration_seconds` | histogram | `operation`, `result` | calls to the store: `claim`, `renew`, `complete`, `release`; `begin`, `release_in`, `savepoint`, `commit`, `rollback` of transactions. `result` is `ok` or the kind of the error |
//! | `tower_dedup_takeovers_total` | counter | `namespace` | first runs after somebody else's lease lapsed |
//! | `tower_dedup_leases_lost_total` | counter | `namespace` | handlers that ended after somebody took their event over |
//! | `tower_dedup_unprotected_total` | counter | `namespace` | handlers run although the store did not answer |
//! | `tower_dedup_other_path_total` | counter | `namespace` | duplicates that came on another path than the one on which this process has handled their event |
//! | `tower_dedup_mismatches_total` | counter | `namespace` | events that came again with another payload |
//! | `tower_dedup_responses_not_kept_total` | counter | `namespace` | responses that were to be kept and cannot be |
//! | `tower_dedup_background_total` | counter | `operation`, `result` | completions, releases and claims that ended in the background; `result` is `ok`, `gave_up` or `refused` |
//! | `tower_dedup_purged_total` | counter | | expired keys that were deleted |
//! | `tower_dedup_evicted_total` | counter | | keys that a full `MemoryAdapter` has forgotten before they had expired |

use std::sync::Arc;
#[cfg(feature = "metrics")]
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use http::StatusCode;

use crate::error::Error;
use crate::key::DedupKey;

/// How one delivery ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    Completed,
    Failed,
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
    Bypass,
}

impl Outcome {
    fn as_str(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::Failed => "failed",
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
            Self::Bypass => "bypass",
        }
    }
}

/// What the deliveries of one layer are counted under.
///
/// A metric's key is text that is put together and hashed: making those of a delivery anew each time
/// would cost more than counting it. The recorder is asked each time, for it may come late.
pub(crate) struct Meters {
    namespace: Arc<str>,
    /// Whether it was said that the layer is around a route twice.
    told_nested: AtomicBool,
    /// When it was said last that an event was handled on another path.
    told_other_path: Mutex<Option<Instant>>,
    #[cfg(feature = "metrics")]
    running: metrics::Key,
    /// By outcome.
    #[cfg(feature = "metrics")]
    ended: [OnceLock<Ended>; Outcome::Bypass as usize + 1],
}

/// The keys of one outcome.
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
            told_nested: AtomicBool::new(false),
            told_other_path: Mutex::default(),
            #[cfg(feature = "metrics")]
            running: key("tower_dedup_running", namespace, None),
            #[cfg(feature = "metrics")]
            ended: std::array::from_fn(|_| OnceLock::new()),
        }
    }

    /// A request came that an outer layer runs already. Logged once: it is so for every request.
    pub(crate) fn nested(&self) {
        if !self.told_nested.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                target: "tower_dedup",
                namespace = &*self.namespace,
                "nested layers: an outer layer deduplicates these requests by the same keys; the inner one lets them through"
            );
        }
    }

    /// A duplicate came on another path than the one on which its event was handled.
    pub(crate) fn handled_on_another_path(&self, key: &DedupKey) {
        const PAUSE: Duration = Duration::from_secs(60);
        #[cfg(feature = "metrics")]
        count("tower_dedup_other_path_total", key);
        let mut told = self.told_other_path.lock().unwrap_or_else(PoisonError::into_inner);
        if told.is_some_and(|told| told.elapsed() < PAUSE) {
            return;
        }
        *told = Some(Instant::now());
        drop(told);
        tracing::error!(
            target: "tower_dedup",
            namespace = key.namespace(),
            id = key.log_id(),
            "handled on another path: this event is a duplicate here, and this path's handler has not run; give each route that has to see it a namespace of its own"
        );
    }

    /// Counts a delivery as running until the answer is dropped.
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
    // Shared, so that a recorder keeps it without a copy.
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

/// What is known of a delivery when it ends.
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
            | Outcome::Unverified => event!(ERROR),
            Outcome::Mismatch
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

/// To the microsecond.
fn rounded_ms(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1e6).round() / 1e3
}

/// The error and its causes in one line.
pub(crate) fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut line = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let text = cause.to_string();
        // Some errors say their cause themselves.
        if !line.ends_with(&text) {
            line.push_str(": ");
            line.push_str(&text);
        }
        next = cause.source();
    }
    line
}

/// Counts a delivery as running for as long as it lives.
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

/// A call to the store came back.
#[cfg_attr(not(feature = "metrics"), expect(unused_variables, reason = "metrics only"))]
pub(crate) fn store_call(operation: &'static str, took: Duration, error: Option<&Error>) {
    #[cfg(feature = "metrics")]
    {
        let result = error.map_or("ok", |error| error.kind().as_str());
        // Those that a delivery which goes well makes: their keys are made by the compiler.
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

/// A handler starts on an event whose earlier handler ended without a word.
pub(crate) fn takeover(key: &DedupKey, attempt: u32) {
    #[cfg(feature = "metrics")]
    count("tower_dedup_takeovers_total", key);
    tracing::warn!(
        target: "tower_dedup",
        namespace = key.namespace(),
        id = key.log_id(),
        attempt,
        "takeover: an earlier handler of this event died or lost its lease"
    );
}

/// A handler lost its lease while it ran.
pub(crate) fn lease_lost(key: &DedupKey) {
    #[cfg(feature = "metrics")]
    count("tower_dedup_leases_lost_total", key);
    tracing::warn!(
        target: "tower_dedup",
        namespace = key.namespace(),
        id = key.log_id(),
        "lease lost: another handler may have run this event too"
    );
}

/// A handler starts although the store did not answer.
pub(crate) fn unprotected(key: &DedupKey, error: &Error) {
    #[cfg(feature = "metrics")]
    count("tower_dedup_unprotected_total", key);
    tracing::warn!(
        target: "tower_dedup",
        namespace = key.namespace(),
        id = key.log_id(),
        error = chain(error),
        "running unprotected: the store did not answer"
    );
}

/// An event was handled before, with another payload.
pub(crate) fn mismatch(key: &DedupKey) {
    #[cfg(feature = "metrics")]
    count("tower_dedup_mismatches_total", key);
    tracing::warn!(
        target: "tower_dedup",
        namespace = key.namespace(),
        id = key.log_id(),
        "payload mismatch: this event was handled with another payload"
    );
}

/// A handler's response cannot be kept: its duplicates get an empty one.
pub(crate) fn response_not_kept(key: &DedupKey, why: &'static str) {
    #[cfg(feature = "metrics")]
    count("tower_dedup_responses_not_kept_total", key);
    tracing::warn!(
        target: "tower_dedup",
        namespace = key.namespace(),
        id = key.log_id(),
        why,
        "response not kept: duplicates of this event are answered without it"
    );
}

/// A failed handler's finished events could not be committed.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub(crate) fn not_kept(key: Option<&DedupKey>, error: &Error) {
    tracing::warn!(
        target: "tower_dedup",
        namespace = key.map(DedupKey::namespace),
        id = key.map(DedupKey::log_id),
        error = chain(error),
        "what the handler has marked as done is not committed, as far as is known: the retry finds out"
    );
}

/// A handler's argument could not be taken from its request: the route is wired wrongly.
#[cfg(feature = "axum")]
pub(crate) fn rejected(argument: &'static str, error: &(dyn std::error::Error + 'static)) {
    tracing::error!(
        target: "tower_dedup",
        argument,
        error = chain(error),
        "rejected: an argument of the handler is not in its request"
    );
}

/// How work that outlived its delivery ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Background {
    Done,
    GaveUp,
    /// Too much of it is under way already.
    Refused,
}

/// A completion, release or undone record ended in the background.
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
            "gave up at once: too much is under way in the background, or the runtime is gone"
        ),
    }
}

/// A handler's panic that nobody waits for any more.
pub(crate) fn orphaned_panic(namespace: &str, message: &str) {
    tracing::error!(
        target: "tower_dedup",
        namespace,
        panic = message,
        "a handler panicked after its client had gone"
    );
}

/// A retention that is shorter than the time in which the sender may deliver again.
pub(crate) fn short_retention(namespace: &str, retention: Duration, floor: Duration) {
    tracing::warn!(
        target: "tower_dedup",
        namespace,
        retention_s = retention.as_secs(),
        floor_s = floor.as_secs(),
        "the retention is shorter than the time in which this sender may deliver an event again"
    );
}

/// Counts keys that a store has forgotten before they had expired.
#[cfg(feature = "memory")]
pub(crate) fn evicted(keys: u64) {
    #[cfg(feature = "metrics")]
    metrics::counter!("tower_dedup_evicted_total").increment(keys);
    #[cfg(not(feature = "metrics"))]
    let _ = keys;
}

/// A store has forgotten keys before they had expired, the youngest of them so long after it was
/// first seen.
#[cfg(feature = "memory")]
pub(crate) fn evicting(keys: u64, age: Duration) {
    tracing::warn!(
        target: "tower_dedup",
        keys,
        age_s = age.as_secs(),
        "evicted: the memory store is full and forgets events that may be delivered again"
    );
}

/// A store is nearly full.
#[cfg(feature = "memory")]
pub(crate) fn nearly_full() {
    tracing::warn!(
        target: "tower_dedup",
        "nearly full: the memory store has taken four fifths of its capacity"
    );
}

/// Expired keys were deleted.
pub(crate) fn purged(keys: u64) {
    #[cfg(feature = "metrics")]
    metrics::counter!("tower_dedup_purged_total").increment(keys);
    tracing::debug!(target: "tower_dedup", keys, "purged");
}

/// A round of purging failed; the next one is not far.
pub(crate) fn purge_failed(error: &Error) {
    tracing::warn!(target: "tower_dedup", error = chain(error), "purging failed; will try again");
}

#[cfg(feature = "metrics")]
fn count(name: &'static str, key: &DedupKey) {
    metrics::counter!(name, "namespace" => key.namespace().to_owned()).increment(1);
}
