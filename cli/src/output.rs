//! Text or JSON on stdout, questions and errors on stderr.

use std::io::{self, BufRead, Write};
use std::time::Duration;

use serde::Serialize;
use tower_dedup::DedupKey;

use crate::failure::Failure;

#[derive(Clone, Copy)]
pub(crate) struct Output {
    pub(crate) json: bool,
    pub(crate) hash_ids: bool,
}

#[derive(Serialize)]
struct ErrorLine<'a> {
    error: &'a str,
    exit_code: u8,
}

impl Output {
    /// Prints one object as a line of JSON, or its text. Returns `false` if the reader of stdout has gone,
    /// as `head` does: that changes no answer.
    pub(crate) fn print(
        self,
        object: &impl Serialize,
        text: impl FnOnce() -> String,
    ) -> Result<bool, Failure> {
        let line = if self.json { json(object)? } else { lines(&text()) };
        match writeln!(io::stdout(), "{line}") {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
            written => Ok(written.map(|()| true)?),
        }
    }

    pub(crate) fn failure(self, failure: &Failure) {
        let Failure { code, message } = failure;
        let line = ErrorLine { error: message, exit_code: *code };
        let line = if self.json { json(&line) } else { Ok(format!("error: {message}")) };
        tell(&line.unwrap_or_default());
    }

    /// Returns the id for the eyes of the operator, or its hash.
    pub(crate) fn id(self, key: &DedupKey) -> String {
        if self.hash_ids { format!("#{}", key.log_id()) } else { key.id().to_owned() }
    }
}

/// Returns one line of JSON. `serde_json` escapes no character above U+001F, and a terminal obeys some.
pub(crate) fn json(object: &impl Serialize) -> Result<String, Failure> {
    let line = serde_json::to_string(object).map_err(io::Error::from)?;
    Ok(escaped(&line, |char| format!("\\u{:04x}", u32::from(char))))
}

/// Prints a line on stderr. Nobody is left to tell if stderr is closed.
pub(crate) fn tell(line: &str) {
    let _ = writeln!(io::stderr(), "{}", lines(line));
}

/// Asks a question that only `y` or `yes` confirms. The end of the input does not.
pub(crate) fn confirm(question: &str) -> Result<bool, Failure> {
    // Without a reader of the question, the command did nothing.
    ask(question).map_err(|error| Failure::usage(error.to_string()))
}

fn ask(question: &str) -> io::Result<bool> {
    write!(io::stderr(), "{} [y/N] ", lines(question))?;
    io::stderr().flush()?;
    let mut reply = String::new();
    if io::stdin().lock().read_line(&mut reply)? == 0 {
        writeln!(io::stderr())?;
    }
    Ok(matches!(reply.trim().to_ascii_lowercase().as_str(), "y" | "yes"))
}

/// Returns a duration in so many units from the largest one on: `2 d 3 h`, `15 min`, `0 s`.
pub(crate) fn span(time: Duration, units: usize) -> String {
    let seconds = time.as_secs();
    let parts = [
        (seconds / 86_400, "d"),
        (seconds / 3_600 % 24, "h"),
        (seconds / 60 % 60, "min"),
        (seconds % 60, "s"),
    ];
    let first = parts.iter().position(|(count, _)| *count > 0).unwrap_or(3);
    let shown = parts[first..].iter().take(units).enumerate();
    let shown = shown.filter(|(index, (count, _))| *index == 0 || *count > 0);
    shown.map(|(_, (count, unit))| format!("{count} {unit}")).collect::<Vec<_>>().join(" ")
}

/// Returns bytes in the largest binary unit that gives at least 1.
pub(crate) fn bytes(count: u64) -> String {
    let units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
    let mut unit = 0;
    let mut scaled = count;
    while scaled >= 10_240 && unit + 1 < units.len() {
        scaled /= 1_024;
        unit += 1;
    }
    format!("{scaled} {}", units[unit])
}

/// Returns lines of columns, with two spaces between them and none at the ends.
pub(crate) fn table(rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let escaped = |row: Vec<String>| row.iter().map(|cell| printable(cell)).collect::<Vec<_>>();
    let rows: Vec<_> = rows.into_iter().map(escaped).collect();
    let length = |cell: &String| cell.chars().count();
    let width = |column| rows.iter().map(|row| length(&row[column])).max().unwrap_or_default();
    let widths: Vec<_> = (0..rows.first().map_or(0, Vec::len)).map(width).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}  "));
        cells.collect::<String>().trim_end().to_owned()
    };
    rows.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// Escapes control characters and direction overrides: an id comes from outside, and must not command the
/// terminal or show text in another order.
pub(crate) fn printable(text: &str) -> String {
    escaped(text, |char| char.escape_default().to_string())
}

fn escaped(text: &str, escape: impl Fn(char) -> String) -> String {
    let escape = |char| if is_unprintable(char) { escape(char) } else { char.to_string() };
    text.chars().map(escape).collect()
}

/// Escapes as [`printable`] does, and keeps the lines.
pub(crate) fn lines(text: &str) -> String {
    text.split('\n').map(printable).collect::<Vec<_>>().join("\n")
}

/// Returns `true` for control characters (U+0000 to U+001F, U+007F to U+009F) and for the characters that
/// change the direction of text (Unicode Standard Annex 9).
fn is_unprintable(char: char) -> bool {
    let is_direction = matches!(char,
        '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    char.is_control() || is_direction
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn span_begins_with_the_largest_unit() {
        for (seconds, text) in [
            (0, "0 s"),
            (59, "59 s"),
            (60, "1 min"),
            (3_601, "1 h"),
            (3_660, "1 h 1 min"),
            (200_000, "2 d 7 h"),
        ] {
            assert_eq!(span(Duration::from_secs(seconds), 2), text);
        }
        assert_eq!(span(Duration::from_secs(200_000), 4), "2 d 7 h 33 min 20 s");
    }

    #[test]
    fn bytes_keep_two_digits_at_least() {
        assert_eq!(bytes(10_239), "10239 bytes");
        assert_eq!(bytes(10_240), "10 KiB");
        assert_eq!(bytes(20 << 30), "20 GiB");
    }

    #[test]
    fn table_pads_columns_and_escapes_control_characters() {
        let rows = [vec!["a".into(), "long".into()], vec!["bcd".into(), "\u{1b}[2J".into()]];
        assert_eq!(table(rows), "a    long\nbcd  \\u{1b}[2J");
    }
}
