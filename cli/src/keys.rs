//! `get`, `list`, `forget` and `rerun`.

use tower_dedup::DedupKey;
use tower_dedup::adapter::{Forgotten, KeyState, ListFilter, RerunOrder, RerunReply};

use crate::failure::Failure;
use crate::options::{EventId, List, Rerun};
use crate::output::{Output, confirm, printable, table, tell};
use crate::store::{Access, Store, Target};
use crate::view::{KeyView, RerunView};

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
    let view = KeyView::new(output, &key, entry.as_ref(), None);
    output.print(&view, || view.text())?;
    Ok(entry.is_some())
}

pub(crate) async fn list(target: &Target, options: &List, output: Output) -> Result<bool, Failure> {
    let mut filter = ListFilter::new();
    filter.state = options.state.map(KeyState::from);
    filter.namespace.clone_from(&options.namespace);
    filter.since = options.since;
    filter.attempts_over = options.attempts_over;
    let store = target.open(Access::Read).await?;
    let listed = list_open(&store, &filter, options.limit, output).await;
    store.close().await;
    let (views, is_complete, unreadable) = listed?;
    if !output.json {
        let head = ["STATE", "NAMESPACE", "ID", "TYPE", "ATTEMPTS", "FIRST SEEN", "RERUN BY"];
        let head = head.map(str::to_owned).to_vec();
        let text = if views.is_empty() {
            "no keys".to_owned()
        } else {
            table([head].into_iter().chain(views.iter().map(row)))
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
) -> Result<(Vec<KeyView>, bool, u64), Failure> {
    let (mut views, mut left, mut after, mut unreadable) = (Vec::new(), limit, None, 0);
    loop {
        let portion = store.adapter.list(filter, after.as_ref(), left.min(PORTION)).await?;
        unreadable += portion.unreadable;
        left = left.saturating_sub(u32::try_from(portion.keys.len()).unwrap_or(u32::MAX));
        for (key, entry) in portion.keys {
            let view = KeyView::new(output, &key, Some(&entry), filter.state);
            if output.json {
                output.stream(&view, String::new)?;
            } else {
                views.push(view);
            }
        }
        match portion.next {
            None => return Ok((views, true, unreadable)),
            Some(_) if left == 0 => return Ok((views, false, unreadable)),
            next => after = next,
        }
    }
}

fn row(view: &KeyView) -> Vec<String> {
    let entry = view.entry.as_ref();
    vec![
        view.state.clone().unwrap_or_default(),
        view.namespace.clone(),
        view.id.clone(),
        entry.and_then(|entry| entry.event_type.clone()).unwrap_or_else(|| "-".to_owned()),
        entry.map(|entry| entry.attempts.to_string()).unwrap_or_default(),
        entry.map(|entry| entry.first_seen_at.clone()).unwrap_or_default(),
        entry.and_then(|entry| entry.rerun.as_ref()).map_or("-", |rerun| &rerun.by).to_owned(),
    ]
}

#[derive(serde::Serialize)]
struct Outcome {
    namespace: String,
    id: String,
    result: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<KeyView>,
}

pub(crate) async fn forget(
    target: &Target,
    event: &EventId,
    yes: bool,
    output: Output,
) -> Result<bool, Failure> {
    let key = DedupKey::new(&event.namespace, &event.id)?;
    let store = target.open(Access::Write).await?;
    let forgotten = forget_open(&store, &key, yes, output).await;
    store.close().await;
    let (result, text) = match forgotten? {
        None => ("declined", "nothing was changed"),
        Some(Forgotten::Removed) => (
            "forgotten",
            "forgotten: the next delivery runs; forget a second identity of the event too",
        ),
        Some(Forgotten::InFlight) => ("in-flight", "refused: the event is running"),
        Some(_) => ("missing", "there is no such key"),
    };
    let object =
        Outcome { namespace: event.namespace.clone(), id: output.id(&key), result, key: None };
    output.print(&object, || text.to_owned())?;
    Ok(result == "forgotten")
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
        tell(&KeyView::new(output, key, Some(&entry), None).text());
        if !confirm(FORGET)? {
            return Ok(None);
        }
    }
    Ok(Some(store.adapter.forget(key).await?))
}

pub(crate) async fn rerun(
    target: &Target,
    options: &Rerun,
    output: Output,
) -> Result<bool, Failure> {
    let order = RerunOrder::new(&options.by, &options.reason).map_err(|_| {
        Failure::usage(format!(
            "--by and --reason need 1 to {} bytes without control characters",
            RerunOrder::MAX_BYTES
        ))
    })?;
    let keys = options.ids.iter().map(|id| DedupKey::new(&options.namespace, id));
    let mut keys = keys.collect::<Result<Vec<_>, _>>()?;
    keys.sort();
    keys.dedup();
    let store = target.open(Access::Write).await?;
    let allowed = rerun_open(&store, &keys, &order, options.yes, output).await;
    store.close().await;
    allowed
}

async fn rerun_open(
    store: &Store,
    keys: &[DedupKey],
    order: &RerunOrder,
    yes: bool,
    output: Output,
) -> Result<bool, Failure> {
    if !yes {
        for key in keys {
            let entry = store.adapter.get(key).await?;
            let state = KeyView::new(output, key, entry.as_ref(), None).state;
            let state = state.unwrap_or_else(|| "unknown".to_owned());
            let (namespace, id) = (printable(key.namespace()), printable(&output.id(key)));
            tell(&format!("{namespace}/{id}: {state}"));
        }
        let count = keys.len();
        if !confirm(&format!("Let {count} event(s) run once more, allowed by {}?", order.by()))? {
            tell("nothing was changed");
            return Ok(false);
        }
    }
    let replies = store.adapter.allow_rerun(keys, order).await?;
    let mut is_allowed = true;
    for (key, reply) in keys.iter().zip(replies) {
        let (result, text) = match reply {
            RerunReply::Allowed => ("allowed", "the next delivery runs"),
            RerunReply::InFlight => ("in-flight", "refused: the event is running"),
            _ => ("missing", "there is no such key: the next delivery runs anyway"),
        };
        is_allowed &= reply == RerunReply::Allowed;
        let mut view = None;
        let mut audit = String::new();
        if reply == RerunReply::Allowed {
            // As the store has it. The rerun is allowed, whatever becomes of this call.
            let entry = store.adapter.get(key).await.ok().flatten();
            view = entry.map(|entry| KeyView::new(output, key, Some(&entry), None));
            let rerun = view.as_ref().and_then(|view| view.entry.as_ref()?.rerun.as_ref());
            let text = rerun.map_or_else(|| "the audit cannot be read".to_owned(), RerunView::text);
            audit = format!("\n  {text}\n  a second identity of the event needs a rerun too");
        }
        let id = output.id(key);
        let line = format!("{}/{}: {text}{audit}", printable(key.namespace()), printable(&id));
        let object = Outcome { namespace: key.namespace().to_owned(), id, result, key: view };
        output.print(&object, || line)?;
    }
    Ok(is_allowed)
}
