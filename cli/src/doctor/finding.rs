//! [`Finding`]: one line of the report, and the judgements that several stores share.

use std::time::Duration;

use serde::Serialize;
use tower_dedup::Error;
use tower_dedup::adapter::{PURGE_GRACE, Stats};

use crate::failure::in_one_line;
use crate::output::{printable, span};
use crate::store::TableState;

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

/// One row of a check: whether the fault exists, how bad it is, its words, and what to do.
pub(super) type Fault<'a> = (bool, Level, &'a str, &'static str);

/// One line of the report.
#[derive(Debug, Serialize)]
pub(super) struct Finding {
    check: &'static str,
    pub(super) level: Level,
    found: String,
    /// The remedy; `None` if all is well.
    advice: Option<&'static str>,
}

impl Finding {
    /// Returns the first fault that exists, or `ok`.
    pub(super) fn first(check: &'static str, ok: impl Into<String>, faults: &[Fault<'_>]) -> Self {
        match faults.iter().find(|(exists, ..)| *exists) {
            None => Self { check, level: Level::Ok, found: ok.into(), advice: None },
            Some((_, level, found, advice)) => {
                Self { check, level: *level, found: (*found).to_owned(), advice: Some(advice) }
            }
        }
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

pub(super) fn table(state: &Result<TableState, String>, is_unlogged: bool) -> Finding {
    let error = state.as_ref().err().map(|error| format!("cannot be read: {error}"));
    let is = |other| *state == Ok(other);
    Finding::first(
        "table",
        "exists, and is of this version",
        &[
            (
                error.is_some(),
                Level::Error,
                error.as_deref().unwrap_or_default(),
                "see the other lines",
            ),
            (
                is(TableState::Missing),
                Level::Error,
                "is missing",
                "run `tower-dedup migrate`, or set --table",
            ),
            (
                is(TableState::Older),
                Level::Error,
                "is of an older version",
                "run `tower-dedup migrate`",
            ),
            (
                is_unlogged,
                Level::Error,
                "is unlogged: a crash of the server empties it",
                "ALTER TABLE … SET LOGGED",
            ),
        ],
    )
}

pub(super) fn purge(stats: &Result<Stats, Error>) -> Finding {
    let lag = stats.as_ref().ok().and_then(|stats| stats.oldest_expired);
    let found = match (stats, lag) {
        (Err(error), _) => format!("the statistics cannot be read: {}", in_one_line(error)),
        (_, Some(lag)) => format!("the oldest expired key expired {} ago", span(lag, 2)),
        _ => "no expired key waits for its purge".to_owned(),
    };
    let faults = [
        (stats.is_err(), Level::Warning, &*found, "see this error, and the other lines"),
        (
            lag > Some(LONGEST_LAG),
            Level::Warning,
            &found,
            "look for `purging failed` in the service's log; purge now: `tower-dedup purge`",
        ),
    ];
    Finding::first("purge", &*found, &faults)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finding_shows_what_to_do() {
        let finding = table(&Ok(TableState::Older), false);
        let text = "error    table         is of an older version\n                       -> run";
        assert!(finding.text().starts_with(text), "{}", finding.text());
    }

    #[test]
    fn purge_lag_of_a_day_and_the_grace_is_a_warning() {
        let lag = |seconds| {
            let mut stats = Stats::default();
            stats.oldest_expired = Some(Duration::from_secs(seconds));
            purge(&Ok(stats)).level
        };
        assert_eq!(lag(25 * 3_600), Level::Ok);
        assert_eq!(lag(25 * 3_600 + 1), Level::Warning);
    }
}
