//! Log records and metrics.

use std::fmt;
use std::sync::Arc;
use std::sync::Mutex;
use std::time::Duration;

use tokio::time::Instant;

use crate::inbox::locked;
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
    const fn as_str(&self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Busy => "busy",
            Self::Paused => "paused",
            Self::TimedOut => "timed_out",
            Self::Failed(_) => "failed",
        }
    }
}

impl fmt::Display for NotStored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full => f.write_str("the table has as many rows or bytes as it may"),
            Self::Busy => f.write_str("too many deliveries wait for the table"),
            Self::Paused => f.write_str("the table has failed within the last 5 s"),
            Self::TimedOut => f.write_str("the table did not answer within 1 s"),
            Self::Failed(error) => error.fmt(f),
        }
    }
}

macro_rules! count {
    ($name:literal $(, $label:literal => $value:expr)* ; $by:expr) => {
        #[cfg(feature = "metrics")]
        metrics::counter!($name $(, $label => $value.to_string())*).increment($by);
    };
}

/// A record that is written once a minute at most.
pub(crate) struct Seldom(Mutex<Option<Instant>>);

impl Seldom {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(None))
    }

    fn is_due(&self) -> bool {
        let mut last = locked(&self.0);
        let is_due = last.is_none_or(|at| at.elapsed() >= Duration::from_secs(60));
        if is_due {
            *last = Some(Instant::now());
        }
        is_due
    }
}

pub(crate) fn stored(namespace: &str, is_known: bool) {
    count!("tower_dedup_inbox_stored_total", "namespace" => namespace, "known" => is_known; 1);
    tracing::debug!(target: "tower_dedup_inbox", namespace, is_known, "stored");
}

pub(crate) fn not_stored(namespace: &str, why: &NotStored) {
    count!("tower_dedup_inbox_not_stored_total", "namespace" => namespace, "reason" => why.as_str(); 1);
    tracing::warn!(
        target: "tower_dedup_inbox",
        namespace,
        reason = why.as_str(),
        error = %why,
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
    #[cfg(not(feature = "metrics"))]
    let _ = is_redelivery;
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

pub(crate) fn misrouted(namespace: &str, seq: i64, why: &str, seldom: &Seldom) {
    count!("tower_dedup_inbox_misrouted_total", "namespace" => namespace; 1);
    if seldom.is_due() {
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

pub(crate) fn swept(swept: &[Swept]) {
    for Swept { service, namespace, parked: reason, rows } in swept {
        match reason {
            Some(reason) => parked(namespace, None, *reason, rows.unsigned_abs(), "too old to run"),
            None => tracing::warn!(
                target: "tower_dedup_inbox", service, namespace, rows,
                "rows that were parked for long are deleted"
            ),
        }
    }
}

/// Sets the gauges of the table.
pub(crate) fn counted(counts: &[Count], fullness: f64) {
    #[cfg(feature = "metrics")]
    {
        for count in counts {
            let rows = u32::try_from(count.rows).unwrap_or(u32::MAX);
            let [service, namespace] = [&count.service, &count.namespace].map(Clone::clone);
            match count.parked {
                Some(reason) => metrics::gauge!("tower_dedup_inbox_parked",
                    "service" => service, "namespace" => namespace, "reason" => reason.as_str())
                .set(rows),
                None => {
                    metrics::gauge!("tower_dedup_inbox_waiting",
                        "service" => service.clone(), "namespace" => namespace.clone())
                    .set(rows);
                    metrics::gauge!("tower_dedup_inbox_oldest_waiting_seconds",
                        "service" => service, "namespace" => namespace)
                    .set(count.oldest.as_secs_f64());
                }
            }
        }
        metrics::gauge!("tower_dedup_inbox_full_ratio").set(fullness);
    }
    let _ = (counts, fullness);
}

pub(crate) fn table_failed(what: &'static str, error: &TableError) {
    static SELDOM: Seldom = Seldom::new();
    count!("tower_dedup_inbox_table_failures_total"; 1);
    if SELDOM.is_due() {
        tracing::error!(target: "tower_dedup_inbox", error = %error, what, "the table does not answer");
    }
}

pub(crate) fn verified_outside(namespace: &str) {
    static SELDOM: Seldom = Seldom::new();
    count!("tower_dedup_inbox_not_stored_total", "namespace" => namespace, "reason" => "verified_outside"; 1);
    if SELDOM.is_due() {
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
