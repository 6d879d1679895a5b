//! [`Settings`] and [`InboxError`].

use std::fmt;
use std::time::Duration;

/// How long a row may wait for its run.
pub(crate) const LIFE: Duration = Duration::from_secs(14 * 86_400);
/// How much longer the retention of a key has to be than the time in which its sender delivers
/// again, so that no row outlives its key.
pub(crate) const SPARE: Duration = Duration::from_secs(15 * 86_400);
/// That time, of a sender whose preset does not say so.
pub(crate) const FLOOR: Duration = Duration::from_secs(7 * 86_400);

const MINUTE: u64 = 60;
const HOUR: u64 = 60 * MINUTE;
const DELAYS: [u64; 10] =
    [5, 30, 2 * MINUTE, 10 * MINUTE, 30 * MINUTE, HOUR, 2 * HOUR, 4 * HOUR, 8 * HOUR, 8 * HOUR];

#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub(crate) answer_within: Duration,
    pub(crate) delays: Vec<Duration>,
    pub(crate) slots: usize,
    pub(crate) turn: Duration,
    pub(crate) later: bool,
    pub(crate) max_waiting: u64,
    pub(crate) table: String,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            answer_within: Duration::from_secs(5),
            delays: DELAYS.map(Duration::from_secs).to_vec(),
            slots: 16,
            turn: Duration::from_secs(60),
            later: false,
            max_waiting: 1_000_000,
            table: "webhook_inbox".to_owned(),
        }
    }
}

impl Settings {
    /// Returns the delay after this many earlier failures, without its deviation; `None` after the
    /// last one.
    pub(crate) fn delay(&self, failures: i64) -> Option<Duration> {
        self.delays.get(usize::try_from(failures).unwrap_or_default()).copied()
    }

    pub(crate) fn check(&self, service: &str) -> Result<(), InboxError> {
        let is_name = |part: &str| {
            let is_word = part.bytes().all(|it| it.is_ascii_alphanumeric() || it == b'_');
            (1..=48).contains(&part.len()) && is_word && !part.as_bytes()[0].is_ascii_digit()
        };
        let parts: Vec<&str> = self.table.split('.').collect();
        rule(
            !service.is_empty() && !service.contains(char::is_control),
            "`service` must be a name",
        )?;
        rule(
            parts.len() <= 2 && parts.into_iter().all(is_name),
            "`table` must be a name of letters, digits and `_`, at most 48 characters, or `schema.name`",
        )?;
        rule(!self.answer_within.is_zero(), "`answer_within` must not be zero")?;
        rule(!self.delays.is_empty(), "`delays` must have at least one delay")?;
        let is_short = |delay: &Duration| *delay < LIFE;
        rule(self.delays.iter().all(is_short), "`delays` must be shorter than 14 days")?;
        rule((1..=10_000).contains(&self.slots), "`slots` must be between 1 and 10,000")?;
        let turns = Duration::from_secs(1)..=Duration::from_secs(3_600);
        rule(turns.contains(&self.turn), "`turn` must be between 1 s and 1 h")?;
        rule(self.max_waiting > 0, "`max_waiting` must be at least 1 row")
    }
}

/// An error of an inbox or of its table.
#[derive(Debug)]
#[non_exhaustive]
pub enum InboxError {
    /// A setting is invalid, or the layer cannot have an inbox around it. The text names the fault.
    Setting(String),
    /// The table did not answer, or refused a statement.
    Table(Box<dyn std::error::Error + Send + Sync>),
}

/// Returns an error with this text unless the rule is met.
pub(crate) fn rule(is_met: bool, text: &str) -> Result<(), InboxError> {
    if is_met { Ok(()) } else { Err(InboxError::Setting(text.to_owned())) }
}

impl fmt::Display for InboxError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Setting(text) => f.write_str(text),
            Self::Table(_) => f.write_str("the table of the inbox failed"),
        }
    }
}

impl std::error::Error for InboxError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Setting(_) => None,
            Self::Table(error) => Some(&**error),
        }
    }
}
