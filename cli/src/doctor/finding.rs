//! [`Finding`]: the result of one check, and the checks that both SQL stores share.

use std::time::Duration;

use serde::Serialize;
use serde_json::json;
use tower_dedup::adapter::inspect::PURGE_GRACE;

use crate::failure::Failure;
use crate::output::text;
use crate::store::{Store, TableState};

/// Rounds over a large table begin up to about 13 h apart: a round, and a pause of 6.6 h at most after it. A
/// lag beyond this means that nothing purges.
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

pub(super) fn table(state: &Result<TableState, Failure>) -> Finding {
    const ADVICE: &str = "run `tower-dedup migrate`, or name another in the URL: dedup_table=NAME";
    let error = state.as_ref().err().map(|failure| format!("cannot be read: {}", failure.message));
    let is = |other| matches!(state, Ok(state) if *state == other);
    Finding::ok("table", "exists, and is of this version")
        .error(is(TableState::Missing).then_some("is missing"), ADVICE)
        .error(is(TableState::Older).then_some("is of an older version"), ADVICE)
        .error(error, "see the other lines")
}

/// Reads the purge lag of a store.
pub(super) async fn purge(store: Result<Store, Failure>) -> Finding {
    let stats = async {
        let store = store?;
        let stats = store.adapter.stats().await;
        store.close().await;
        Ok(stats?.oldest_expired)
    };
    stats.await.map_or_else(
        |Failure { message, .. }| {
            let found = format!("the statistics cannot be read: {message}");
            Finding::ok("purge", "").warning(Some(found), "see this error, and the other lines")
        },
        purge_lag,
    )
}

fn purge_lag(lag: Option<Duration>) -> Finding {
    let found = lag.map(|lag| {
        let time = humantime::format_duration(Duration::from_secs(lag.as_secs()));
        format!("the oldest expired key expired {time} ago")
    });
    let ok = found.clone().unwrap_or_else(|| "no expired key waits for its purge".to_owned());
    Finding::ok("purge", ok).warning(
        found.filter(|_| lag > Some(LONGEST_LAG)),
        "look for `purging failed` in the service's log; purge now: `tower-dedup purge`",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn purge_lag_of_a_day_and_the_grace_is_a_warning() {
        let lag = |seconds| purge_lag(Some(Duration::from_secs(seconds))).level;
        assert_eq!(lag(25 * 3_600), Level::Ok);
        assert_eq!(lag(25 * 3_600 + 1), Level::Warning);
    }
}
