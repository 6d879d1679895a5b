//! `inbox`: the rows of an inbox's table. Rows are read in parts, and deleted in parts, each in a transaction of its own: so
//! Ctrl-C is safe.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::OpenOptions;
use std::io::Write;
use std::iter;
use std::path::Path;
use std::time::SystemTime;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use tower_dedup::DedupKey;
use tower_dedup_inbox::{Inbox, Selection, ShownRequest, ShownRow};

use crate::failure::Failure;
use crate::keys::utc;
use crate::options::{self, InboxChange, InboxCommand, InboxList, InboxRows};
use crate::output::{Members, Output, confirm, table, tell, text, write};
use crate::store::Target;

/// How many rows one call of a list returns.
const PORTION: usize = 2_000;
/// How many rows a question shows.
const SHOWN: usize = 10;
/// The members of a line that the table shows.
const COLUMNS: [&str; 9] =
    ["seq", "state", "service", "namespace", "id", "event_type", "received_at", "attempts", "last"];
const MISSING: &str = "there is no such row";
const PERSONAL: &str = "the request may be personal data: mind where this output goes";

/// A command that changes rows.
#[derive(Clone, Copy, PartialEq, Eq)]
enum What {
    Retry,
    Drop,
}

/// The rows that are about to be changed.
#[derive(Default)]
struct Found {
    rows: u64,
    running: u64,
    first: Vec<ShownRow>,
    /// The rows as they are now: neither one that comes later, nor one that its sender delivers again.
    parts: Vec<Selection>,
}

pub(crate) async fn run(
    target: &Target,
    options: options::Inbox,
    output: Output,
) -> Result<bool, Failure> {
    let inbox = target.inbox(&options.table).await?;
    match options.command {
        InboxCommand::List(options) => list(&inbox, &options, output).await,
        InboxCommand::Show { seq, body_to } => show(&inbox, seq, body_to.as_deref(), output).await,
        InboxCommand::Retry(options) => change(&inbox, What::Retry, &options, output).await,
        InboxCommand::Drop(options) => change(&inbox, What::Drop, &options, output).await,
    }
}

fn selection(rows: &InboxRows) -> Selection {
    let mut selection = Selection::default();
    selection.service.clone_from(&rows.service);
    selection.namespace.clone_from(&rows.namespace);
    selection.id.clone_from(&rows.id);
    selection.parked = rows.parked;
    selection.received_until = rows.received_until;
    selection
}

fn state(row: &ShownRow) -> &'static str {
    match row.due {
        None => "parked",
        Some(_) if row.is_running => "running",
        Some(_) => "waiting",
    }
}

/// Returns the id for the eyes of the operator, or its hash.
fn id(output: Output, (namespace, id): &(String, String)) -> String {
    DedupKey::new(namespace, id).map_or_else(|_| "#".to_owned(), |key| output.id(&key))
}

fn members(output: Output, row: &ShownRow) -> Members {
    let key = |key: &(String, String)| json!({ "namespace": key.0, "id": id(output, key) });
    let members = [
        ("seq", json!(row.seq)),
        ("state", state(row).into()),
        ("parked", json!(row.parked.map(|reason| reason.as_str()))),
        ("service", json!(row.service)),
        ("namespace", json!(row.namespace)),
        ("keys", row.keys.iter().map(key).collect()),
        ("event_type", json!(row.event_type)),
        ("received_at", utc(row.received).into()),
        ("due_at", json!(row.due.map(utc))),
        ("attempts", row.attempts.into()),
        ("deaths", row.deaths.into()),
        ("answered", row.answered.into()),
        ("verified", json!(row.verified)),
        ("last", json!(row.last)),
        ("body_bytes", row.body_bytes.into()),
    ];
    members.into()
}

/// Returns the cells of the table's columns.
fn cells(output: Output, row: &ShownRow) -> Vec<String> {
    let members = members(output, row);
    let cell = |name| match name {
        "state" => row.parked.map_or_else(
            || state(row).to_owned(),
            |reason| format!("parked ({})", reason.as_str()),
        ),
        "id" => {
            let first = row.keys.first().map_or_else(|| "-".to_owned(), |key| id(output, key));
            match row.keys.len() {
                ..=1 => first,
                keys => format!("{first} (+{})", keys - 1),
            }
        }
        name => text(members.get(name)),
    };
    COLUMNS.map(cell).to_vec()
}

fn tabular(output: Output, rows: &[ShownRow]) -> String {
    let head = COLUMNS.map(|name| name.to_uppercase().replace('_', " ")).to_vec();
    table(iter::once(head).chain(rows.iter().map(|row| cells(output, row))))
}

async fn list(inbox: &Inbox, options: &InboxList, output: Output) -> Result<bool, Failure> {
    let selection = selection(&options.rows);
    let (mut after, mut left) = (options.after, options.limit as usize);
    let mut is_empty = true;
    loop {
        // One more than are printed says whether there is a next page.
        let mut rows = inbox.list(&selection, after, left.min(PORTION) + 1).await?;
        let is_last = rows.len() <= left.min(PORTION);
        rows.truncate(left.min(PORTION));
        if let Some(row) = rows.last() {
            (after, is_empty) = (row.seq, false);
        }
        left -= rows.len();
        if output.json {
            for row in &rows {
                if !output.print(&members(output, row))? {
                    return Ok(true);
                }
            }
        } else if !rows.is_empty() && !write(&tabular(output, &rows))? {
            return Ok(true);
        }
        if is_last {
            break;
        }
        if left == 0 {
            let limit = options.limit;
            tell(&format!("--limit {limit} is reached: the next page is --after {after}"));
            break;
        }
    }
    if is_empty && !output.json {
        write("no rows")?;
    }
    Ok(true)
}

/// Prints a row, and its request unless ids are hashed: header fields, target and body have the ids.
async fn show(
    inbox: &Inbox,
    seq: i64,
    body_to: Option<&Path>,
    output: Output,
) -> Result<bool, Failure> {
    let Some((row, request)) = inbox.show(seq).await? else {
        tell(MISSING);
        return Ok(false);
    };
    if let Some(path) = body_to {
        write_new(path, &request.body)?;
    }
    let mut members = members(output, &row);
    if output.hash_ids {
        output.print(&members)?;
        return Ok(true);
    }
    let text = str::from_utf8(&request.body).ok();
    if output.json {
        members.0.extend(captured(&row, &request, body_to.is_none()).0);
        output.print(&members)?;
    } else {
        let body = match (body_to, text) {
            (Some(path), _) => format!("the body is in {}", path.display()),
            (None, Some(text)) => text.to_owned(),
            (None, None) => {
                format!("{} bytes that are no text: --body-to FILE", request.body.len())
            }
        };
        let (row_text, headers) = (members.lines(), request.headers);
        write(&format!("{row_text}\n\n{} {}\n{headers}\n{body}", row.method, row.target))?;
    }
    tell(PERSONAL);
    Ok(true)
}

/// Returns a request in the form that `key` reads.
fn captured(row: &ShownRow, request: &ShownRequest, with_body: bool) -> Members {
    let mut headers = BTreeMap::<_, Vec<_>>::new();
    for (name, value) in request.headers.lines().filter_map(|line| line.split_once(": ")) {
        headers.entry(name).or_default().push(value);
    }
    let mut members = vec![
        ("method".to_owned(), json!(row.method)),
        ("url".to_owned(), json!(row.target)),
        ("headers".to_owned(), json!(headers)),
    ];
    if with_body {
        members.push(match str::from_utf8(&request.body) {
            Ok(text) => ("body_utf8".to_owned(), text.into()),
            Err(_) => ("body_base64".to_owned(), STANDARD.encode(&request.body).into()),
        });
    }
    Members(members)
}

/// Writes a file that does not exist, for its owner alone.
fn write_new(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    let mut open = OpenOptions::new();
    open.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut open, 0o600);
    let written = open.open(path).and_then(|mut file| file.write_all(bytes));
    written.map_err(|error| Failure::file(&path.display().to_string(), &error))
}

/// Finds the rows of this selection.
async fn find(
    inbox: &Inbox,
    what: What,
    selection: &Selection,
    found: &mut Found,
) -> Result<(), Failure> {
    let (mut after, mut until, parts) = (0, None, found.parts.len());
    loop {
        let rows = inbox.list(selection, after, PORTION).await?;
        let Some(last) = rows.last() else { return Ok(()) };
        after = last.seq;
        until = rows.iter().map(|row| row.received).chain(until).max();
        // One statement makes all rows due: those of a first part would be selected again.
        if what == What::Retry {
            found.parts.truncate(parts);
        }
        let mut part = selection.clone();
        part.received_until = until;
        found.parts.push(part);
        found.rows += rows.len() as u64;
        found.running += rows.iter().filter(|row| row.is_running).count() as u64;
        found.first.extend(rows.into_iter().take(SHOWN - found.first.len()));
    }
}

/// Returns `false` if a row was left as it is, or does not exist, or if the operator has declined.
async fn change(
    inbox: &Inbox,
    what: What,
    options: &InboxChange,
    output: Output,
) -> Result<bool, Failure> {
    let mut selection = selection(&options.rows);
    if options.seqs.is_empty() && selection == Selection::default() {
        return Err(Failure::usage("name rows by their numbers, or select them by an option"));
    }
    let mut found = Found::default();
    let seqs: BTreeSet<_> = options.seqs.iter().collect();
    for seq in &seqs {
        selection.seq = Some(**seq);
        find(inbox, what, &selection, &mut found).await?;
    }
    if seqs.is_empty() {
        find(inbox, what, &selection, &mut found).await?;
    }
    let asked = found.rows.max(seqs.len() as u64);
    let confirmed = found.rows == 0 || options.yes || {
        tell(&tabular(output, &found.first));
        if found.rows > SHOWN as u64 {
            tell(&format!("and {} more", found.rows - SHOWN as u64));
        }
        confirm(&question(what, &found))?
    };
    let mut changed = 0;
    for part in found.parts.iter().filter(|_| confirmed) {
        changed += match what {
            What::Retry => inbox.retry(part).await?,
            What::Drop => inbox.delete(part).await?,
        };
    }
    let left = asked.saturating_sub(changed);
    let note = match what {
        _ if !confirmed => "nothing was changed",
        _ if asked == 0 => "no row is selected",
        What::Retry if left > 0 => {
            "a row that is left runs, is parked as expired, has changed, or does not exist"
        }
        What::Retry => "they are due now",
        What::Drop if left > 0 => "a row that is left has changed, or does not exist",
        What::Drop => "their events are not delivered again; no key is forgotten",
    };
    let result = match what {
        _ if !confirmed => "declined",
        _ if changed == 0 => "none",
        What::Retry => "retried",
        What::Drop => "dropped",
    };
    let outcome: [(&str, Value); 5] = [
        ("result", result.into()),
        ("rows", changed.into()),
        ("left", left.into()),
        ("note", note.into()),
        ("at", utc(SystemTime::now()).into()),
    ];
    output.print(&outcome.into())?;
    Ok(confirmed && left == 0)
}

fn question(what: What, Found { rows, running, .. }: &Found) -> String {
    match what {
        What::Retry => format!("Make {rows} row(s) due now, with all their attempts?"),
        What::Drop => {
            let running = match running {
                0 => String::new(),
                _ => format!("{running} of them run: their handlers go on, and are not repeated. "),
            };
            format!("{running}Delete {rows} row(s)? Their events are not delivered again.")
        }
    }
}
