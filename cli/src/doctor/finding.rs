//! [`Finding`]: one line of the report, and the judgements that several stores share.

use std::time::Duration;

use serde::Serialize;
use tower_dedup::adapter::{PURGE_GRACE, Stats};

use crate::output::{printable, span};
use crate::store::TableState;

/// Rounds over a large table begin up to about 13 h apart: a round, and a pause of 6.6 h at most after it. A
/// lag beyond this means that nothing purges.
const LONGEST_LAG: Duration = PURGE_GRACE.saturating_add(Duration::from_secs(24 * 3_600));

/// Signatures of senders are valid for five minutes.
const CLOCK_ERROR: f64 = 300.0;
const CLOCK_WARNING: f64 = 5.0;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Level {
    Ok,
    Warning,
    Error,
}

/// One line of the report.
#[derive(Debug, Serialize)]
pub(super) struct Finding {
    pub(super) check: &'static str,
    pub(super) level: Level,
    pub(super) found: String,
    /// What to do; `None` if all is well.
    pub(super) advice: Option<String>,
}

impl Finding {
    pub(super) fn ok(check: &'static str, found: impl Into<String>) -> Self {
        Self { check, level: Level::Ok, found: found.into(), advice: None }
    }

    pub(super) fn warning(
        check: &'static str,
        found: impl Into<String>,
        advice: impl Into<String>,
    ) -> Self {
        Self { check, level: Level::Warning, found: found.into(), advice: Some(advice.into()) }
    }

    pub(super) fn error(
        check: &'static str,
        found: impl Into<String>,
        advice: impl Into<String>,
    ) -> Self {
        Self { check, level: Level::Error, found: found.into(), advice: Some(advice.into()) }
    }

    pub(super) fn text(&self) -> String {
        let level = match self.level {
            Level::Ok => "ok",
            Level::Warning => "warning",
            Level::Error => "error",
        };
        let advice = self.advice.iter().map(|advice| format!("\n{:9}{:14}-> {advice}", "", ""));
        let found = printable(&self.found);
        format!("{level:<9}{:<14}{found}{}", self.check, advice.collect::<String>())
    }
}

pub(super) fn judge_table(state: &Result<TableState, String>) -> Finding {
    match state {
        Ok(TableState::Current) => Finding::ok("table", "exists, and is of this version"),
        Ok(TableState::Missing) => {
            Finding::error("table", "is missing", "run `tower-dedup migrate`, or set --table")
        }
        Ok(TableState::Older) => {
            Finding::error("table", "is of an older version", "run `tower-dedup migrate`")
        }
        Err(error) => {
            Finding::error("table", format!("cannot be read: {error}"), "see the other lines")
        }
    }
}

pub(super) fn judge_purge(stats: &Result<Stats, String>) -> Finding {
    const CHECK: &str = "purge";
    match stats {
        Ok(stats) => match stats.oldest_expired {
            Some(lag) if lag > LONGEST_LAG => Finding::warning(
                CHECK,
                format!("the oldest expired key expired {} ago", span(lag)),
                "look for `purging failed` in the service's log; purge now: `tower-dedup purge`",
            ),
            Some(lag) => {
                Finding::ok(CHECK, format!("the oldest expired key expired {} ago", span(lag)))
            }
            None => Finding::ok(CHECK, "no expired key waits for its purge"),
        },
        Err(error) => Finding::warning(
            CHECK,
            format!("the statistics cannot be read: {error}"),
            "see this error, and the other lines",
        ),
    }
}

/// Judges how far the server's clock is ahead of this machine's, in seconds.
pub(super) fn judge_clock(ahead: f64) -> Finding {
    let found = if ahead.abs() < 0.1 {
        "the server's clock agrees with this machine's".to_owned()
    } else {
        let direction = if ahead < 0.0 { "behind" } else { "ahead of" };
        format!("the server's clock is {:.1} s {direction} this machine's", ahead.abs())
    };
    let advice = "use NTP on both: the store's clock ends leases and retentions, and this machine's \
                  clock checks the time of signatures";
    if ahead.abs() >= CLOCK_ERROR {
        Finding::error("clock", found, advice)
    } else if ahead.abs() >= CLOCK_WARNING {
        Finding::warning("clock", found, advice)
    } else {
        Finding::ok("clock", found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finding_shows_what_to_do() {
        let finding = Finding::error("table", "is missing", "make it");
        assert_eq!(
            finding.text(),
            "error    table         is missing\n                       -> make it"
        );
    }

    #[test]
    fn table_that_is_not_current_is_an_error() {
        assert_eq!(judge_table(&Ok(TableState::Current)).level, Level::Ok);
        assert_eq!(judge_table(&Ok(TableState::Missing)).level, Level::Error);
        assert_eq!(judge_table(&Ok(TableState::Older)).level, Level::Error);
        assert_eq!(judge_table(&Err("denied".to_owned())).level, Level::Error);
    }

    #[test]
    fn purge_lag_of_a_day_and_the_grace_is_a_warning() {
        let lag = |seconds| {
            let mut stats = Stats::default();
            stats.oldest_expired = Some(Duration::from_secs(seconds));
            judge_purge(&Ok(stats)).level
        };
        assert_eq!(lag(14 * 3_600), Level::Ok);
        assert_eq!(lag(25 * 3_600), Level::Ok);
        assert_eq!(lag(25 * 3_600 + 1), Level::Warning);
        assert_eq!(judge_purge(&Ok(Stats::default())).level, Level::Ok);
        assert_eq!(judge_purge(&Err("denied".to_owned())).level, Level::Warning);
    }
}
