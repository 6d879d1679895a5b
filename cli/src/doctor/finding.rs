//! [`Finding`]: the result of one check, and the checks that both SQL stores share.

use std::time::Duration;

use serde::Serialize;
use serde_json::json;
use tower_dedup::adapter::maintenance::PURGE_GRACE;
use tower_dedup_inbox::{Count, Parked};

use crate::failure::{Failure, NO_INBOX, within};
use crate::output::text;
use crate::store::Target;

/// A service purges every ten minutes, unless its options say otherwise. A lag beyond this means that nothing purges.
const LONGEST_LAG: Duration = PURGE_GRACE.saturating_add(Duration::from_secs(24 * 3_600));

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Level {
    Ok,
    Warning,
    Error,
}

/// The result of one check.
#[derive(Debug, Serialize)]
pub(super) struct Finding {
    check: &'static str,
    pub(super) level: Level,
    found: String,
    /// The remedy; `None` if all is well.
    advice: Option<&'static str>,
}

impl Finding {
    pub(super) fn ok(check: &'static str, found: impl Into<String>) -> Self {
        Self { check, level: Level::Ok, found: found.into(), advice: None }
    }

    /// Returns the fault, if there is one and this finding is ok: the first fault counts.
    pub(super) fn error(self, fault: Option<impl Into<String>>, advice: &'static str) -> Self {
        self.or(Level::Error, fault, advice)
    }

    /// Does the same as [`error`](Self::error), with a warning.
    pub(super) fn warning(self, fault: Option<impl Into<String>>, advice: &'static str) -> Self {
        self.or(Level::Warning, fault, advice)
    }

    fn or(self, level: Level, fault: Option<impl Into<String>>, advice: &'static str) -> Self {
        match fault {
            Some(found) if self.level == Level::Ok => {
                Self { check: self.check, level, found: found.into(), advice: Some(advice) }
            }
            _ => self,
        }
    }

    /// Returns the rows of the report: one, and one with the advice.
    pub(super) fn rows(&self) -> Vec<Vec<String>> {
        let finding = json!(self);
        let mut rows = vec![["level", "check", "found"].map(|name| text(&finding[name])).to_vec()];
        rows.extend(
            self.advice.map(|advice| vec![String::new(), String::new(), format!("-> {advice}")]),
        );
        rows
    }
}

pub(super) fn table(read: &Result<(), Failure>) -> Finding {
    let ok = Finding::ok("table", "exists, and is of this version");
    match read {
        Ok(()) => ok,
        Err(failure) if failure.needs_migration() => {
            ok.error(Some(&*failure.message), "or name another table in the URL: dedup_table=NAME")
        }
        Err(Failure { message, .. }) => ok.error(
            Some(format!("cannot be read: {message}")),
            "see this error, and the other lines",
        ),
    }
}

/// Whether a statement can write at all: every delivery is answered 503 meanwhile.
pub(super) fn lock(lock: Result<(), Failure>, advice: &'static str) -> Finding {
    let fault = lock.err().map(|failure| format!("no write gets its lock: {}", failure.message));
    Finding::ok("lock", "a write gets its lock").error(fault, advice)
}

/// The table of an inbox, if the database has one by its default name.
pub(super) async fn inbox(target: &Target, timeout: Duration) -> Option<Finding> {
    /// As the alert on the oldest row that waits.
    const LONGEST_WAIT: Duration = Duration::from_secs(3_600);

    let count = async {
        let inbox = target.inbox("webhook_inbox").await?;
        // It reads every column. Another version of the table may lack one.
        inbox.show(0).await?;
        Ok(inbox.count().await?)
    };
    let counts = match within(timeout, "counting rows", count).await {
        Ok(counts) => counts,
        Err(Failure { message, .. }) if message == NO_INBOX => return None,
        Err(Failure { message, .. }) => {
            let found = format!("the table of the inbox cannot be read: {message}");
            return Some(Finding::ok("inbox", "").error(
                Some(found),
                "see this error; if a column is missing, call `Inbox::migrate` of the version that runs",
            ));
        }
    };
    let (parked, waiting): (Vec<_>, Vec<_>) =
        counts.into_iter().partition(|count| count.parked.is_some());
    let rows = |counts: &[Count]| counts.iter().map(|count| count.rows).sum::<u64>();
    let ok = format!("{} rows wait, {} are parked", rows(&waiting), rows(&parked));
    let oldest = waiting.iter().max_by_key(|count| count.oldest);
    let late = oldest.filter(|count| count.oldest > LONGEST_WAIT).map(|count| {
        let time = humantime::format_duration(Duration::from_secs(count.oldest.as_secs()));
        let Count { service, namespace, .. } = count;
        format!("a row of {namespace} of the service {service} waits for {time}")
    });
    let needs_a_person = |count: &Count| count.parked != Some(Parked::Refused);
    let parked: Vec<_> = parked.into_iter().filter(needs_a_person).collect();
    let parked = (!parked.is_empty()).then(|| format!("{} rows are parked", rows(&parked)));
    Some(
        Finding::ok("inbox", ok)
            .warning(
                parked,
                "see `tower-dedup inbox list --parked`, mend the cause, then `inbox retry` or `inbox drop`",
            )
            .warning(
                late,
                "see `tower-dedup inbox list`: its handler fails, or no process runs a loop with its namespace",
            ),
    )
}

pub(super) async fn purge(target: &Target) -> Finding {
    let lag = match target.stats().await {
        Ok(stats) => stats.oldest_expired.unwrap_or_default(),
        Err(Failure { message, .. }) => {
            let found = format!("the statistics cannot be read: {message}");
            return Finding::ok("purge", "")
                .warning(Some(found), "see this error, and the other lines");
        }
    };
    let time = humantime::format_duration(Duration::from_secs(lag.as_secs()));
    let found = format!("the oldest expired key expired {time} ago");
    let ok = if lag.is_zero() { "no expired key waits for its purge" } else { &found };
    Finding::ok("purge", ok).warning(
        (lag > LONGEST_LAG).then_some(&*found),
        "look for `purging failed` in the service's log; purge now: `tower-dedup purge`",
    )
}
