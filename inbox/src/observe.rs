//! Log records and metrics. `lib.rs` lists the records, and `metrics.md` the metrics.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::inspect::Count;
use crate::row::{Counts, Fate, Parked};
use crate::table::{Swept, TableError};

/// Why a delivery has no row: it went to the layer without one.
#[derive(Debug, Clone)]
pub(crate) enum NotStored {
    /// The table has as much as it may.
    Full,
    /// The writer has more to do than it can.
    Busy,
    /// An earlier batch has failed within the last seconds.
    Paused,
    TimedOut,
    Failed(Arc<TableError>),
}

impl NotStored {
    /// Returns the reason of the metric, and a text for people.
    fn texts(&self) -> (&'static str, String) {
        let (reason, text) = match self {
            Self::Full => ("full", "the table has as many rows or bytes as it may"),
            Self::Busy => ("busy", "too many deliveries wait for the table"),
            Self::Paused => ("paused", "the table has failed within the last 5 s"),
            Self::TimedOut => ("timed_out", "the table did not answer within 1 s"),
            Self::Failed(error) => return ("failed", error.to_string()),
        };
        (reason, text.to_owned())
    }
}

macro_rules! count {
    ($name:literal $(, $label:literal => $value:expr)* ; $by:expr) => {
        #[cfg(feature = "metrics")]
        metrics::counter!($name $(, $label => $value.to_string())*).increment($by);
        #[cfg(not(feature = "metrics"))]
        let _ = || ($by, $($value),*);
    };
}

macro_rules! set {
    ($name:literal $(, $label:literal => $value:expr)* ; $to:expr) => {
        #[cfg(feature = "metrics")]
        metrics::gauge!($name $(, $label => $value.to_owned())*).set($to);
        #[cfg(not(feature = "metrics"))]
        let _ = || ($to, $($value),*);
    };
}

/// Describes every metric of the inbox, with its unit, to the recorder of the
/// [`metrics`](https://docs.rs/metrics) facade. Call it once, after the recorder is installed. The
/// [page of the crate](crate#metrics) lists them.
///
/// Without it, the metrics are recorded and have no description.
#[cfg(feature = "metrics")]
pub fn describe_metrics() {
    use metrics::Unit;

    for row in include_str!("metrics.md").lines().skip(2) {
        let mut cells = row.split('|').map(str::trim).skip(1);
        let [name, kind, _labels, meaning] = std::array::from_fn(|_| cells.next().unwrap_or(""));
        let name = name.trim_matches('`');
        let unit = if name.ends_with("_seconds") { Unit::Seconds } else { Unit::Count };
        match kind {
            "counter" => metrics::describe_counter!(name, unit, meaning),
            _ => metrics::describe_gauge!(name, unit, meaning),
        }
    }
}

/// A record that is written once a minute at most, for each subject.
struct Seldom(Mutex<Option<HashMap<String, Instant>>>);

impl Seldom {
    const fn new() -> Self {
        Self(Mutex::new(None))
    }

    fn is_due(&self, subject: &str) -> bool {
        let mut all = locked(&self.0);
        let all = all.get_or_insert_default();
        let last = all.get(subject);
        let is_due = last.is_none_or(|at| at.elapsed() >= Duration::from_secs(60));
        if is_due {
            all.insert(subject.to_owned(), Instant::now());
        }
        is_due
    }
}

pub(crate) fn stored(namespace: &str, is_known: bool) {
    count!("tower_dedup_inbox_stored_total", "namespace" => namespace, "known" => is_known; 1);
    tracing::debug!(target: "tower_dedup_inbox", namespace, is_known, "stored");
}

pub(crate) fn not_stored(namespace: &str, why: &NotStored) {
    let (reason, error) = why.texts();
    count!("tower_dedup_inbox_not_stored_total", "namespace" => namespace, "reason" => reason; 1);
    tracing::warn!(
        target: "tower_dedup_inbox",
        namespace,
        reason,
        error,
        "not stored: the delivery goes to its layer as without an inbox"
    );
}

/// Reports what became of a row.
pub(crate) fn ended(namespace: &str, seq: i64, fate: Fate, last: &str, is_redelivery: bool) {
    let outcome = match fate {
        Fate::Delete => "complete",
        Fate::Keep => return,
        Fate::Due { counts: Counts::Attempt, .. } => "failed",
        Fate::Due { counts: Counts::Nothing, .. } => "not_ended",
        Fate::Due { counts: Counts::Misrouted, .. } => "misrouted",
        Fate::Park(_) => "parked",
    };
    count!("tower_dedup_inbox_ended_total",
        "namespace" => namespace, "outcome" => outcome, "redelivery" => is_redelivery; 1);
    match fate {
        Fate::Park(reason) => parked(namespace, Some(seq), reason, 1, last),
        Fate::Due { after, counts: Counts::Attempt } => tracing::warn!(
            target: "tower_dedup_inbox", namespace, seq, last, due_in_s = after.as_secs(),
            "the handler failed: the event runs again"
        ),
        _ => tracing::debug!(target: "tower_dedup_inbox", namespace, seq, last, outcome, "ended"),
    }
}

pub(crate) fn parked(namespace: &str, seq: Option<i64>, reason: Parked, rows: u64, last: &str) {
    count!("tower_dedup_inbox_parked_total", "namespace" => namespace, "reason" => reason.as_str(); rows);
    macro_rules! event {
        ($level:ident) => {
            tracing::$level!(
                target: "tower_dedup_inbox",
                namespace,
                seq,
                reason = reason.as_str(),
                rows,
                last,
                fix = "look at it by `tower-dedup inbox show`, then `inbox retry` or `inbox drop`",
                "parked: it waits for a person"
            )
        };
    }
    if reason == Parked::Refused { event!(info) } else { event!(error) }
}

pub(crate) fn lapsed(namespace: &str, parked_as: Option<Parked>) {
    count!("tower_dedup_inbox_lapsed_total", "namespace" => namespace; 1);
    tracing::warn!(
        target: "tower_dedup_inbox",
        namespace,
        "the process that ran a row has died, or lost its turn: the row runs after its next delay"
    );
    if let Some(reason) = parked_as {
        parked(namespace, None, reason, 1, "its process died, or lost its turn");
    }
}

pub(crate) fn misrouted(namespace: &str, seq: i64, why: &str) {
    static SELDOM: Seldom = Seldom::new();
    count!("tower_dedup_inbox_misrouted_total", "namespace" => namespace; 1);
    if SELDOM.is_due(namespace) {
        tracing::error!(
            target: "tower_dedup_inbox",
            namespace,
            seq,
            why,
            fix = "give `run` the application from the top, with the route and the inbox around its layer",
            "misrouted: a redelivery has not reached its layer"
        );
    }
}

pub(crate) fn swept(swept: Vec<Swept>) {
    let mut groups = HashMap::new();
    for row in swept {
        *groups.entry(row).or_insert(0_u64) += 1;
    }
    for ((service, namespace, reason), rows) in groups {
        match reason {
            Some(reason) => parked(&namespace, None, reason, rows, "too old to run"),
            None => tracing::warn!(
                target: "tower_dedup_inbox", service, namespace, rows,
                "rows that were parked for long are deleted"
            ),
        }
    }
}

/// The gauges of the table. One that was set, and has no rows any more, is set to 0.
#[derive(Default)]
pub(crate) struct Gauges(HashSet<(String, String, Option<Parked>)>);

impl Gauges {
    pub(crate) fn set(&mut self, counts: &[Count], fullness: f64) {
        let now: HashSet<_> =
            counts.iter().map(|it| (it.service.clone(), it.namespace.clone(), it.parked)).collect();
        for (service, namespace, parked) in self.0.difference(&now) {
            gauge(service, namespace, *parked, 0, Duration::ZERO);
        }
        for count in counts {
            gauge(&count.service, &count.namespace, count.parked, count.rows, count.oldest);
        }
        self.0 = now;
        set!("tower_dedup_inbox_full_ratio"; fullness);
    }
}

fn gauge(service: &str, namespace: &str, parked: Option<Parked>, rows: u64, oldest: Duration) {
    let rows = u32::try_from(rows).unwrap_or(u32::MAX);
    if let Some(reason) = parked {
        set!("tower_dedup_inbox_parked_rows",
            "service" => service, "namespace" => namespace, "reason" => reason.as_str(); rows);
        return;
    }
    set!("tower_dedup_inbox_waiting", "service" => service, "namespace" => namespace; rows);
    set!("tower_dedup_inbox_oldest_waiting_seconds",
        "service" => service, "namespace" => namespace; oldest.as_secs_f64());
}

pub(crate) fn table_failed(what: &'static str, error: &TableError) {
    static SELDOM: Seldom = Seldom::new();
    count!("tower_dedup_inbox_table_failures_total"; 1);
    if SELDOM.is_due(what) {
        tracing::error!(target: "tower_dedup_inbox", error = %error, what, "the table does not answer");
    }
}

pub(crate) fn verified_outside(namespace: &str) {
    static SELDOM: Seldom = Seldom::new();
    count!("tower_dedup_inbox_not_stored_total", "namespace" => namespace, "reason" => "verified_outside"; 1);
    if SELDOM.is_due(namespace) {
        tracing::error!(
            target: "tower_dedup_inbox",
            namespace,
            fix = "give the verifying layer to `verified_by`, because a redelivery has an old signature",
            "not stored: a layer outside of the inbox has verified the request"
        );
    }
}

pub(crate) fn no_loop(service: &str) {
    tracing::error!(
        target: "tower_dedup_inbox",
        service,
        fix = "spawn `Inbox::run`",
        "deliveries are stored, and no loop of this process runs them"
    );
}

/// Locks what no panic leaves half-written.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(all(test, feature = "metrics"))]
mod tests {
    use metrics_util::debugging::{DebugValue, DebuggingRecorder};

    use super::*;

    fn count(parked: Option<Parked>) -> Count {
        Count {
            service: "shop".to_owned(),
            namespace: "acme".to_owned(),
            parked,
            rows: 2,
            oldest: Duration::from_secs(90),
            bytes: 0,
        }
    }

    /// An alert on a gauge would not end.
    #[test]
    fn gauge_of_rows_that_are_gone_is_0() {
        let failed = || count(Some(Parked::Failed));
        for (next, expected) in [
            (vec![count(None), failed()], [0.5, 90.0, 2.0, 2.0]),
            (vec![failed()], [0.5, 0.0, 2.0, 0.0]),
            (vec![], [0.5, 0.0, 0.0, 0.0]),
        ] {
            let recorder = DebuggingRecorder::new();
            metrics::with_local_recorder(&recorder, || {
                let mut gauges = Gauges::default();
                gauges.set(&[count(None), failed()], 0.25);
                gauges.set(&next, 0.5);
            });
            // A snapshot sets them to 0.
            let all = recorder.snapshotter().snapshot().into_vec().into_iter();
            let mut all: Vec<_> = all
                .map(|(key, _, _, value)| match value {
                    DebugValue::Gauge(value) => (key.key().name().to_owned(), *value),
                    other => panic!("{other:?}"),
                })
                .collect();
            all.sort_by(|one, other| one.partial_cmp(other).unwrap());
            let values: Vec<_> = all.into_iter().map(|(_, value)| value).collect();
            assert_eq!(values, expected);
        }
    }
}
