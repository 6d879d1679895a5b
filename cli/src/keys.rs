//! `get`, `list` and `forget`.

use std::time::SystemTime;

use chrono::{DateTime, SecondsFormat, Utc};
use serde::Serialize;
use tower_dedup::DedupKey;
use tower_dedup::adapter::{Forgotten, ListFilter};

use crate::failure::Failure;
use crate::line::Line;
use crate::options::{EventId, List};
use crate::output::{Output, confirm, printable, table, tell};
use crate::store::{Access, Store, Target};

/// A row of the on-arrival ledger is complete before its handler runs, so the store does not see the run.
const FORGET: &str = "The on-arrival ledger: the event may be running now, because its key is complete from \
                      the start.\nForget this key? Its next delivery runs again.";
/// How many keys one call of a list returns.
const PORTION: u32 = 1_000;

pub(crate) async fn get(target: &Target, event: &EventId, output: Output) -> Result<bool, Failure> {
    let key = DedupKey::new(&event.namespace, &event.id)?;
    let store = target.open(Access::Read).await?;
    let entry = store.adapter.get(&key).await;
    store.close().await;
    let entry = entry?;
    let line = Line::new(output, &key, entry.as_ref(), None);
    output.print(&line, || line.text())?;
    Ok(entry.is_some())
}

pub(crate) async fn list(target: &Target, options: &List, output: Output) -> Result<bool, Failure> {
    let mut filter = ListFilter::new();
    filter.state = options.state;
    filter.namespace.clone_from(&options.namespace);
    filter.id_part.clone_from(&options.id);
    filter.since = options.since;
    filter.attempts_over = options.attempts_over;
    let store = target.open(Access::Read).await?;
    let listed = list_open(&store, &filter, options.limit, output).await;
    store.close().await;
    let (lines, is_complete, unreadable) = listed?;
    if !output.json {
        let head = ["STATE", "NAMESPACE", "ID", "TYPE", "ATTEMPTS", "FIRST SEEN"];
        let head = head.map(str::to_owned).to_vec();
        let text = if lines.is_empty() {
            "no keys".to_owned()
        } else {
            table([head].into_iter().chain(lines.iter().map(row)))
        };
        output.print(&(), || text)?;
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
) -> Result<(Vec<Line>, bool, u64), Failure> {
    let (mut lines, mut left, mut after, mut unreadable) = (Vec::new(), limit, None, 0);
    loop {
        let portion = store.adapter.list(filter, after.as_ref(), left.min(PORTION)).await?;
        unreadable += portion.unreadable;
        left = left.saturating_sub(u32::try_from(portion.keys.len()).unwrap_or(u32::MAX));
        for (key, entry) in portion.keys {
            let line = Line::new(output, &key, Some(&entry), filter.state);
            if !output.json {
                lines.push(line);
            } else if !output.print(&line, String::new)? {
                return Ok((lines, true, unreadable));
            }
        }
        match portion.next {
            None => return Ok((lines, true, unreadable)),
            Some(_) if left == 0 => return Ok((lines, false, unreadable)),
            next => after = next,
        }
    }
}

fn row(line: &Line) -> Vec<String> {
    let fact = |name| line.get(name).unwrap_or_else(|| "-".to_owned());
    vec![
        line.state.clone().unwrap_or_default(),
        line.namespace.clone(),
        line.id.clone(),
        fact("event_type"),
        fact("attempts"),
        fact("first_seen_at"),
    ]
}

/// What became of `forget`. It is the only record of the reason.
#[derive(Serialize)]
struct Outcome {
    namespace: String,
    id: String,
    result: &'static str,
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
    let (result, text) = match forgotten? {
        None => ("declined", "nothing was changed"),
        Some(Forgotten::Removed) => ("forgotten", "forgotten: the next delivery runs"),
        Some(Forgotten::InFlight) => ("in-flight", "refused: the event is running"),
        Some(_) => ("missing", "there is no such key"),
    };
    let at = DateTime::<Utc>::from(SystemTime::now()).to_rfc3339_opts(SecondsFormat::Secs, true);
    let outcome =
        Outcome { namespace: event.namespace.clone(), id: output.id(&key), result, at, reason };
    output.print(&outcome, || outcome.text(text))?;
    Ok(result == "forgotten")
}

impl Outcome {
    fn text(&self, text: &str) -> String {
        let Self { namespace, id, at, .. } = self;
        let reason = self.reason.iter().map(|reason| format!("\nreason: {}", printable(reason)));
        let (namespace, id) = (printable(namespace), printable(id));
        format!("{at} {namespace}/{id}: {text}{}", reason.collect::<String>())
    }
}

/// Returns `None` if the operator did not confirm.
async fn forget_open(
    store: &Store,
    key: &DedupKey,
    yes: bool,
    output: Output,
) -> Result<Option<Forgotten>, Failure> {
    if !yes {
        let Some(entry) = store.adapter.get(key).await? else {
            return Ok(Some(Forgotten::Missing));
        };
        tell(&Line::new(output, key, Some(&entry), None).text());
        if !confirm(FORGET)? {
            return Ok(None);
        }
    }
    Ok(Some(store.adapter.forget(key).await?))
}
