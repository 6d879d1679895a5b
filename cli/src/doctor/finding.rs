//! [`Finding`]: the result of one check, and the checks that both SQL stores share.

use std::time::Duration;

use serde::Serialize;
use serde_json::json;
use tower_dedup::adapter::PURGE_GRACE;

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

    /// Returns this finding in place of `ok`, if the fault exists. So the first fault counts.
    pub(super) fn error_if(
        self,
        exists: bool,
        found: impl Into<String>,
        advice: &'static str,
    ) -> Self {
        self.fault(exists, Level::Error, found.into(), advice)
    }

    /// Does the same as [`error_if`](Self::error_if), with a warning.
    pub(super) fn warn_if(
        self,
        exists: bool,
        found: impl Into<String>,
        advice: &'static str,
    ) -> Self {
        self.fault(exists, Level::Warning, found.into(), advice)
    }

    fn fault(self, exists: bool, level: Level, found: String, advice: &'static str) -> Self {
        if exists && self.level == Level::Ok {
            return Self { check: self.check, level, found, advice: Some(advice) };
        }
        self
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
    let error = state.as_ref().err().map(|failure| format!("cannot be read: {}", failure.message));
    let advice = "run `tower-dedup migrate`, or name another in the URL: dedup_table=NAME";
    Finding::ok("table", "exists, and is of this version")
        .error_if(matches!(state, Ok(TableState::Missing)), "is missing", advice)
        .error_if(matches!(state, Ok(TableState::Older)), "is of an older version", advice)
        .error_if(error.is_some(), error.unwrap_or_default(), "see the other lines")
}

/// Reads the purge lag of a store.
pub(super) async fn purge(store: Result<Store, Failure>) -> Finding {
    let stats = async {
        let store = store?;
        let stats = store.adapter.stats().await;
        store.close().await;
        Ok(stats?.oldest_expired)
    };
    match stats.await {
        Ok(lag) => purge_lag(lag),
        Err(Failure { message, .. }) => {
            let found = format!("the statistics cannot be read: {message}");
            Finding::ok("purge", "").warn_if(true, found, "see this error, and the other lines")
        }
    }
}

fn purge_lag(lag: Option<Duration>) -> Finding {
    let Some(lag) = lag else {
        return Finding::ok("purge", "no expired key waits for its purge");
    };
    let time = humantime::format_duration(Duration::from_secs(lag.as_secs()));
    let found = format!("the oldest expired key expired {time} ago");
    let advice = "look for `purging failed` in the service's log; purge now: `tower-dedup purge`";
    Finding::ok("purge", found.clone()).warn_if(lag > LONGEST_LAG, found, advice)
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
