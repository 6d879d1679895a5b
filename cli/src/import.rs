//! `import`: ids that another program has handled, from the lines of stdin.
//!
//! 1. An id is claimed, and is complete in the same atomic step. A key that is complete or in flight stays as it is. So
//!    the service may run meanwhile, and a second run continues the first.
//! 2. A line that cannot be read is reported with its number and counted. The lines after it are imported.
//! 3. A key has the times of the line: it was first seen and completed then, and its retention counts from then on.

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::HashSet;
use std::time::{Duration, SystemTime};

use futures_util::{StreamExt, stream};
use tower_dedup::adapter::contract::{CallTerms, ClaimReply, Token};
use tower_dedup::adapter::maintenance::MaintenanceAdapter;
use tower_dedup::{DedupKey, provider};

use crate::failure::Failure;
use crate::lines::Lines;
use crate::options::{Import, time_of};
use crate::output::Output;
use crate::store::Target;

/// How many lines are read before their keys are sent.
const PART: usize = 16_384;
/// How many keys are on their way to the store.
const AT_ONCE: usize = 512;
const NO_SEPARATOR: &str = "has no tab and no comma between an id and a time";
const NO_TAB: &str = "has no tab between an id and a time";
/// The default of the layer.
const RETENTION: Duration = Duration::from_secs(30 * 86_400);

/// The numbers of lines.
#[derive(Default)]
struct Counts {
    imported: u64,
    /// The key was complete already, or another line has it.
    known: u64,
    /// A handler of the service runs. The key stays as it is.
    in_flight: u64,
    /// The retention has ended.
    too_old: u64,
}

/// Returns `false` if a line could not be read.
pub(crate) async fn import(
    target: &Target,
    options: &Import,
    output: Output,
) -> Result<bool, Failure> {
    let mut input = Input::new(options, output)?;
    let import = async |store: &dyn MaintenanceAdapter| {
        loop {
            let part = input.part()?;
            if part.is_empty() {
                return Ok(());
            }
            let claims = part.into_iter().map(async |(key, time)| {
                let terms = CallTerms::on_claim(Token::random(), input.retention);
                store.claim(&key, &terms.with_handled_at(time)).await
            });
            // A claim that is dropped after an error is repeated by the next run.
            let mut replies = stream::iter(claims).buffer_unordered(AT_ONCE);
            while let Some(reply) = replies.next().await {
                match reply? {
                    ClaimReply::First { .. } => input.counts.imported += 1,
                    ClaimReply::InFlight => input.counts.in_flight += 1,
                    _ => input.counts.known += 1,
                }
            }
        }
    };
    if let Err(mut failure) = target.with(import).await {
        let Counts { imported, .. } = input.counts;
        failure.message += &format!(" ({imported} are imported: run the command again)");
        return Err(failure);
    }
    let (Counts { imported, known, in_flight, too_old }, bad_lines) =
        (input.counts, input.lines.bad);
    let counts = [
        ("imported", imported.into()),
        ("known", known.into()),
        ("in_flight", in_flight.into()),
        ("too_old", too_old.into()),
        ("bad_lines", bad_lines.into()),
    ];
    output.print(&counts.into())?;
    Ok(bad_lines == 0)
}

struct Input<'a> {
    lines: Lines,
    namespace: &'a str,
    retention: Duration,
    /// The lines are in the text format of `COPY`.
    copy: bool,
    counts: Counts,
}

impl<'a> Input<'a> {
    fn new(options: &'a Import, output: Output) -> Result<Self, Failure> {
        let namespace = &*options.namespace;
        DedupKey::new(namespace, "id").map_err(Failure::usage)?;
        let floor = provider::find(namespace).map(|preset| preset.retention_floor());
        let retention = options.retention.unwrap_or(RETENTION.max(floor.unwrap_or_default()));
        let (lines, counts) = (Lines::of_stdin(output), Counts::default());
        Ok(Self { lines, namespace, retention, copy: options.copy, counts })
    }

    /// Reads the next lines. Returns their keys and times, the latest first: of an id with several times, the latest
    /// counts. Empty after the last line.
    fn part(&mut self) -> Result<Vec<(DedupKey, SystemTime)>, Failure> {
        let now = SystemTime::now();
        let mut part = Vec::new();
        while part.len() < PART {
            let Some(line) = self.lines.next_line()? else { break };
            match self.read(&line) {
                Ok((key, time)) => match time.min(now) {
                    time if time + self.retention > now => part.push((key, time)),
                    _ => self.counts.too_old += 1,
                },
                Err(why) => self.lines.report(why),
            }
        }
        part.sort_by_key(|(_, time)| Reverse(*time));
        // Two claims of one key are sent at the same time, in statements of their own.
        let (lines, mut keys) = (part.len(), HashSet::new());
        part.retain(|(key, _)| keys.insert(key.clone()));
        self.counts.known += (lines - part.len()) as u64;
        Ok(part)
    }

    fn read(&self, line: &str) -> Result<(DedupKey, SystemTime), &'static str> {
        let by_tab = line.rsplit_once('\t');
        let (id, time) = by_tab
            .or_else(|| line.rsplit_once(',').filter(|_| !self.copy))
            .ok_or(if self.copy { NO_TAB } else { NO_SEPARATOR })?;
        // They would be a part of the id, and the event would run again.
        if by_tab.is_none() && id.starts_with('"') {
            return Err("has quotes, which are not read: put a tab after the bare id");
        }
        if id.contains(if by_tab.is_none() { ',' } else { '\t' }) {
            return Err("has more than an id and a time: put a tab after an id with a comma");
        }
        // An escape of `COPY` would be a part of the id, too.
        if !self.copy && id.contains('\\') {
            return Err(
                "has a backslash, which only --copy reads: as an escape of `COPY … TO STDOUT`",
            );
        }
        let id = if self.copy { unescaped(id)?.into() } else { Cow::from(id) };
        let time = time_of(time.trim())
            .ok_or("has no time like 2026-01-31T12:00:00Z or 2026-01-31 12:00:00+00")?;
        let key = DedupKey::new(self.namespace, &id)
            .map_err(|_| "has an id that is empty or has a NUL")?;
        Ok((key, time))
    }
}

/// Returns the text of a column that `COPY … TO STDOUT` has written in its text format:
/// <https://www.postgresql.org/docs/current/sql-copy.html>. It writes no other escapes.
fn unescaped(column: &str) -> Result<String, &'static str> {
    if column == r"\N" {
        return Err("has no id: it is NULL");
    }
    let (mut text, mut chars) = (String::with_capacity(column.len()), column.chars());
    while let Some(char) = chars.next() {
        text.push(match char {
            '\\' => match chars.next() {
                Some('\\') => '\\',
                Some('b') => '\u{8}',
                Some('f') => '\u{c}',
                Some('n') => '\n',
                Some('r') => '\r',
                Some('t') => '\t',
                Some('v') => '\u{b}',
                _ => return Err("has an escape that COPY does not write"),
            },
            char => char,
        });
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn column_of_copy_is_decoded() {
        for (column, text) in [
            ("", Some("")),
            ("plain,\"id\"", Some("plain,\"id\"")),
            (r"a\\b", Some(r"a\b")),
            (r"\\", Some(r"\")),
            (r"\\\\n\\t", Some(r"\\n\t")),
            (r"\b\f\n\r\t\v\\N", Some("\u{8}\u{c}\n\r\t\u{b}\\N")),
            (r"\n\n", Some("\n\n")),
            (r"\N", None),
            (r"a\N", None),
            (r"\", None),
            (r"a\\\", None),
            (r"\.", None),
            (r"\x41", None),
            ("\\\u{20ac}", None),
        ] {
            assert_eq!(unescaped(column).ok().as_deref(), text, "{column}");
        }
    }
}
