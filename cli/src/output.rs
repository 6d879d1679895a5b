//! Text or JSON on stdout, questions and errors on stderr. Both have one source, [`Members`]: as text, each is a
//! line.

use std::io::{self, BufRead, Write};

use clap::Args;
use serde::{Serialize, Serializer};
use serde_json::{Value, json};
use tower_dedup::DedupKey;
use tower_dedup::internals::is_hidden;

use crate::failure::Failure;

#[derive(Args, Clone, Copy)]
pub(crate) struct Output {
    /// Prints JSON: one object, or one for each key or finding, one a line.
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// Prints the first 16 hex digits of an id's SHA-256, as the logs do, in place of the id.
    #[arg(long, global = true)]
    pub(crate) hash_ids: bool,
}

impl Output {
    /// Prints one object as a line of JSON, or a line for each member that is not null. Returns `false` if the
    /// reader of stdout has gone, as `head` does: that changes no answer.
    pub(crate) fn print(self, object: &Members) -> Result<bool, Failure> {
        if self.json { write_json(object) } else { write(&object.lines()) }
    }

    /// Tells one object on stderr, in one line.
    pub(crate) fn tell(self, object: &Members) {
        let line = match self.json {
            true => json_line(object).unwrap_or_default(),
            false => {
                let members =
                    object.0.iter().map(|(name, value)| format!("{name} {}", text(value)));
                members.collect::<Vec<_>>().join(", ")
            }
        };
        tell(&line);
    }

    pub(crate) fn failure(self, failure: &Failure) {
        let Failure { code, message } = failure;
        let line = match self.json {
            true => json_line(&json!({ "error": message, "exit_code": code })).unwrap_or_default(),
            false => format!("error: {message}"),
        };
        tell(&line);
    }

    /// Returns the id for the eyes of the operator, or its hash.
    pub(crate) fn id(self, key: &DedupKey) -> String {
        if self.hash_ids { format!("#{}", key.log_id()) } else { key.id().to_owned() }
    }
}

/// Prints text on stdout. Returns `false` if its reader has gone.
pub(crate) fn write(text: &str) -> Result<bool, Failure> {
    put(&lines(text))
}

fn put(text: &str) -> Result<bool, Failure> {
    match writeln!(io::stdout(), "{text}") {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        written => written.map(|()| true).map_err(|error| Failure::file("stdout", &error)),
    }
}

/// Prints cells as one line, with a tab between them. Returns `false` if the reader of stdout has gone.
pub(crate) fn row(cells: &[&str]) -> Result<bool, Failure> {
    let cells: Vec<_> = cells.iter().map(|cell| printable(cell)).collect();
    put(&cells.join("\t"))
}

/// Prints one object as a line of JSON.
pub(crate) fn write_json(object: &impl Serialize) -> Result<bool, Failure> {
    write(&json_line(object)?)
}

/// Prints a line on stderr. Nobody is left to tell if stderr is closed.
pub(crate) fn tell(line: &str) {
    let _ = writeln!(io::stderr(), "{}", lines(line));
}

/// Asks a question that only `y` or `yes` confirms. The end of the input does not.
pub(crate) fn confirm(question: &str) -> Result<bool, Failure> {
    let mut reply = String::new();
    let mut ask = || {
        write!(io::stderr(), "{} [y/N] ", lines(question))?;
        if io::stdin().lock().read_line(&mut reply)? == 0 {
            writeln!(io::stderr())?;
        }
        Ok(())
    };
    ask().map_err(|error: io::Error| Failure::file("asking", &error))?;
    Ok(matches!(reply.trim().to_ascii_lowercase().as_str(), "y" | "yes"))
}

/// Returns one line of JSON. `serde_json` escapes no character above U+001F, and a terminal obeys some.
fn json_line(object: &impl Serialize) -> Result<String, Failure> {
    let line = serde_json::to_string(object).map_err(Failure::usage)?;
    Ok(escaped(&line, |char| format!("\\u{:04x}", u32::from(char))))
}

/// Returns a JSON string without its quotes, and `-` for null.
pub(crate) fn text(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
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

/// Escapes control characters, line separators and direction overrides: an id comes from outside, and must not command
/// the terminal, begin a line or show text in another order.
fn printable(text: &str) -> String {
    escaped(text, |char| char.escape_default().to_string())
}

/// Escapes as [`printable`] does, and keeps the lines.
fn lines(text: &str) -> String {
    text.split('\n').map(printable).collect::<Vec<_>>().join("\n")
}

fn escaped(text: &str, escape: impl Fn(char) -> String) -> String {
    let escape = |char| if is_hidden(char) { escape(char) } else { char.to_string() };
    text.chars().map(escape).collect()
}

/// The members of a JSON object in their order.
pub(crate) struct Members(pub(crate) Vec<(String, Value)>);

impl<const N: usize> From<[(&str, Value); N]> for Members {
    fn from(members: [(&str, Value); N]) -> Self {
        Self(members.map(|(name, value)| (name.to_owned(), value)).into())
    }
}

impl Members {
    pub(crate) fn get(&self, name: &str) -> &Value {
        let member = self.0.iter().find(|(member, _)| member == name);
        member.map_or(&Value::Null, |(_, value)| value)
    }

    /// Returns a line for each member that is not null, and none for a rare fact that is not so.
    pub(crate) fn lines(&self) -> String {
        const RARE: [&str; 2] = ["response_is_unreadable", "takeover"];
        let is_told = |(name, value): &&(String, Value)| {
            !value.is_null() && (*value != Value::Bool(false) || !RARE.contains(&&**name))
        };
        let members = self.0.iter().filter(is_told);
        table(members.map(|(name, value)| vec![name.clone(), text(value)]))
    }
}

impl Serialize for Members {
    fn serialize<S: Serializer>(&self, json: S) -> Result<S::Ok, S::Error> {
        json.collect_map(self.0.iter().map(|(name, value)| (name, value)))
    }
}
