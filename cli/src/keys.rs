//! `get`, `list` and `forget`.

use std::time::SystemTime;

use serde::Serialize;
use serde_json::{Map, Value, json};
use tower_dedup::DedupKey;
use tower_dedup::adapter::inspect::{Entry, ForgetReply, KeyState, ListFilter};

use crate::failure::Failure;
use crate::options::{EventId, List};
use crate::output::{Output, confirm, members, table, tell, text, write};
use crate::store::{Access, Store, Target};

/// A row of the on-arrival ledger is complete before its handler runs, so the store does not see the run.
const FORGET: &str = "The on-arrival ledger: the event may be running now, because its key is complete from \
                      the start.\nForget this key? Its next delivery runs again.";
const MISSING: &str = "there is no such key";
/// How many keys one call of a list returns.
const PORTION: u32 = 1_000;
/// The members of a line that the table shows.
const COLUMNS: [&str; 6] = ["state", "namespace", "id", "event_type", "attempts", "first_seen_at"];

/// One key: what the library serializes an [`Entry`] to, after the names of the key.
#[derive(Serialize)]
struct Line {
    namespace: String,
    id: String,
    /// Null for an unknown or expired key.
    state: Value,
    #[serde(flatten)]
    entry: Map<String, Value>,
}

impl Line {
    /// `selected` is the state by which the store selected the key. Without it, this machine's clock decides
    /// whether a lease has lapsed.
    fn new(
        output: Output,
        key: &DedupKey,
        entry: Option<&Entry>,
        selected: Option<KeyState>,
    ) -> Self {
        let mut entry = match entry.map(serde_json::to_value) {
            Some(Ok(Value::Object(entry))) => entry,
            _ => Map::new(),
        };
        let state = entry.remove("state").unwrap_or_default();
        let state = selected.map_or(state, |state| json!(state));
        Self { namespace: key.namespace().to_owned(), id: output.id(key), state, entry }
    }

    fn row(&self) -> Vec<String> {
        let line = json!(self);
        COLUMNS.map(|name| text(&line[name])).to_vec()
    }
}

pub(crate) async fn get(target: &Target, event: &EventId, output: Output) -> Result<bool, Failure> {
    let key = DedupKey::new(&event.namespace, &event.id)?;
    let store = target.open(Access::Read).await?;
    let entry = store.adapter.get(&key).await;
    store.close().await;
    let entry = entry?;
    if entry.is_none() && !output.json {
        tell(MISSING);
    } else {
        output.print(&Line::new(output, &key, entry.as_ref(), None))?;
    }
    Ok(entry.is_some())
}

pub(crate) async fn list(target: &Target, options: &List, output: Output) -> Result<bool, Failure> {
    let mut filter = ListFilter::default();
    filter.state = options.state;
    filter.namespace.clone_from(&options.namespace);
    filter.id_part.clone_from(&options.id);
    filter.since = options.since;
    filter.attempts_over = options.attempts_over;
    let store = target.open(Access::Read).await?;
    let listed = list_open(&store, &filter, options.limit, output).await;
    store.close().await;
    let (rows, is_complete, unreadable) = listed?;
    if !output.json {
        let head = COLUMNS.map(|name| name.to_uppercase().replace('_', " ")).to_vec();
        let table = table([head].into_iter().chain(rows.iter().cloned()));
        write(if rows.is_empty() { "no keys" } else { &table })?;
    }
    if unreadable > 0 {
        tell(&format!("{unreadable} keys are left out, because their data is unreadable"));
    }
    if !is_complete {
        tell(&format!("--limit {} is reached: there may be more keys", options.limit));
    }
    Ok(true)
}

/// Lists up to `limit` keys. With JSON, each is printed as it comes, and none is returned. Also returns
/// whether the list is complete, and how many keys are unreadable.
async fn list_open(
    store: &Store,
    filter: &ListFilter,
    limit: u32,
    output: Output,
) -> Result<(Vec<Vec<String>>, bool, u64), Failure> {
    let (mut rows, mut left, mut after, mut unreadable) = (Vec::new(), limit, None, 0);
    loop {
        let portion = store.adapter.list(filter, after.as_deref(), left.min(PORTION)).await?;
        unreadable += portion.unreadable;
        left = left.saturating_sub(u32::try_from(portion.keys.len()).unwrap_or(u32::MAX));
        for (key, entry) in portion.keys {
            let line = Line::new(output, &key, Some(&entry), filter.state);
            if !output.json {
                rows.push(line.row());
            } else if !output.print(&line)? {
                return Ok((rows, true, unreadable));
            }
        }
        match portion.next {
            None => return Ok((rows, true, unreadable)),
            Some(_) if left == 0 => return Ok((rows, false, unreadable)),
            next => after = next,
        }
    }
}

/// What became of `forget`. It is the only record of the reason.
#[derive(Serialize)]
struct Outcome {
    namespace: String,
    id: String,
    result: &'static str,
    note: &'static str,
    at: String,
    reason: Option<String>,
}

pub(crate) async fn forget(
    target: &Target,
    event: &EventId,
    reason: Option<String>,
    yes: bool,
    output: Output,
) -> Result<bool, Failure> {
    let key = DedupKey::new(&event.namespace, &event.id)?;
    let store = target.open(Access::Write).await?;
    let forgotten = forget_open(&store, &key, yes, output).await;
    store.close().await;
    let (result, note) = match forgotten? {
        None => ("declined", "nothing was changed"),
        Some(ForgetReply::Removed) => ("forgotten", "the next delivery runs"),
        Some(ForgetReply::InFlight) => ("in-flight", "refused: the event is running"),
        Some(_) => ("missing", MISSING),
    };
    let at = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
    let namespace = event.namespace.clone();
    output.print(&Outcome { namespace, id: output.id(&key), result, note, at, reason })?;
    Ok(result == "forgotten")
}

/// Returns `None` if the operator did not confirm.
async fn forget_open(
    store: &Store,
    key: &DedupKey,
    yes: bool,
    output: Output,
) -> Result<Option<ForgetReply>, Failure> {
    if !yes {
        let Some(entry) = store.adapter.get(key).await? else {
            return Ok(Some(ForgetReply::Missing));
        };
        tell(&members(&Line::new(output, key, Some(&entry), None))?);
        if !confirm(FORGET)? {
            return Ok(None);
        }
    }
    Ok(Some(store.adapter.forget(key).await?))
}
