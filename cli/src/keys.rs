//! `get`, `list` and `forget`.

use std::cmp::Reverse;
use std::iter;
use std::time::{Duration, SystemTime};

use serde_json::json;
use tower_dedup::DedupKey;
use tower_dedup::adapter::maintenance::{
    Entry, ForgetReply, KeyState, ListFilter, MaintenanceAdapter,
};

use crate::failure::Failure;
use crate::options::{Event, Forget, List};
use crate::output::{Members, Output, confirm, table, tell, text, write};
use crate::store::Target;

/// A row of the on-arrival ledger is complete before its handler runs, so the store does not see the run.
const FORGET: &str = "If its layer is `on_arrival`, the event may still be running.\nForget this key? Its next \
                      delivery runs, unless a second identity is complete for another id: see the record \
                      `same body`, and `tower-dedup key`.";
/// The row of a content identity may name another key, and no store knows of the pair.
const FORGOTTEN: &str =
    "the next delivery runs, unless a second identity is complete for another id";
const MISSING: &str = "there is no such key";
/// Without the id, which comes from outside: whoever copies the line gives it to a shell.
const PART: &str = "to find an id by a part of it: tower-dedup list --id PART";
/// The store has no row of these.
const UNSEEN: &str = "a delivery that was refused, or answered 503 before its claim, leaves no key: search the \
                      service's log";
const RELEASED: &str = "why a handler failed is in the service's log (`outcome=failed`). On arrival, a failed event \
                        is complete";
/// How many keys one call of a list returns.
const PORTION: u32 = 1_000;
/// The members of a line that the table shows.
const COLUMNS: [&str; 6] = ["state", "namespace", "id", "event_type", "attempts", "first_seen_at"];

/// Returns a time in whole seconds. A time beyond the years of RFC 3339 becomes their last second.
pub(crate) fn utc(time: SystemTime) -> String {
    const LAST: u64 = 253_402_300_799;
    let seconds = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    let time = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds.min(LAST));
    humantime::format_rfc3339_seconds(time).to_string()
}

fn hex(digest: [u8; 32]) -> String {
    digest.map(|byte| format!("{byte:02x}")).concat()
}

/// Returns one key. An unknown or expired key has no entry. The headers and the body of a stored response may be
/// personal data, and are left out. `selected` is the state by which the store selected the key. Without it, this
/// machine's clock decides whether a lease has lapsed.
fn members(
    output: Output,
    key: &DedupKey,
    entry: Option<&Entry>,
    selected: Option<KeyState>,
) -> Members {
    let state = selected.or(entry.map(|entry| entry.state)).map(|state| state.to_string());
    let named = [
        ("namespace", key.namespace().into()),
        ("id", output.id(key).into()),
        ("state", json!(state)),
    ];
    let mut members = Members::from(named);
    members.0.extend(entry.into_iter().flat_map(|entry| {
        let stored = entry.stored.as_deref();
        let response = stored.and_then(|stored| stored.response.as_ref()).map(
            |response| json!({ "bytes": response.body.len(), "status": response.status.as_u16() }),
        );
        let shown = [
            ("attempts", entry.attempts.into()),
            ("completed_at", json!(entry.completed_at.map(utc))),
            ("event_type", json!(entry.event_type)),
            ("expires_at", utc(entry.expires_at).into()),
            ("first_seen_at", utc(entry.first_seen_at).into()),
            ("lease_until", json!(entry.lease_until.map(utc))),
            ("payload_sha256", json!(stored.and_then(|stored| stored.payload_sha256).map(hex))),
            ("response", json!(response)),
            ("response_is_unreadable", entry.response_is_unreadable.into()),
            ("takeover", entry.takeover.into()),
        ];
        Members::from(shown).0
    }));
    members
}

pub(crate) async fn get(target: &Target, event: &Event, output: Output) -> Result<bool, Failure> {
    let key = event.key()?;
    let get = async |store: &dyn MaintenanceAdapter| Ok(store.get(&key).await?);
    let entry = target.with(get).await?;
    if entry.is_none() && !output.json {
        for line in [MISSING, PART, UNSEEN] {
            tell(line);
        }
    } else {
        output.print(&members(output, &key, entry.as_ref(), None))?;
    }
    Ok(entry.is_some())
}

/// Lists up to `--limit` keys: as JSON, each as it comes; else the newest first.
pub(crate) async fn list(target: &Target, options: &List, output: Output) -> Result<bool, Failure> {
    let mut filter = ListFilter::default();
    filter.state = options.state;
    filter.namespace.clone_from(&options.namespace);
    filter.id_part.clone_from(&options.id);
    filter.since = options.since;
    filter.attempts_over = options.attempts_over;
    let mut rows = Vec::new();
    let (mut left, mut unreadable) = (options.limit, 0);
    let list = async |store: &dyn MaintenanceAdapter| {
        let mut after = None;
        loop {
            let portion = store.list(&filter, after.as_deref(), left.min(PORTION)).await?;
            unreadable += portion.unreadable;
            for (key, entry) in portion.keys {
                left = left.saturating_sub(1);
                let members = members(output, &key, Some(&entry), filter.state);
                if !output.json {
                    let row = COLUMNS.map(|name| text(members.get(name))).to_vec();
                    rows.push((entry.first_seen_at, row));
                } else if !output.print(&members)? {
                    return Ok(true);
                }
            }
            after = portion.next;
            if after.is_none() || left == 0 {
                return Ok(after.is_none());
            }
        }
    };
    let is_complete = target.with(list).await?;
    if !output.json {
        let is_empty = rows.is_empty();
        rows.sort_by_key(|(first_seen_at, _)| Reverse(*first_seen_at));
        let head = COLUMNS.map(|name| name.to_uppercase().replace('_', " ")).to_vec();
        let rows = iter::once(head).chain(rows.into_iter().map(|(_, row)| row));
        write(&if is_empty { "no keys".to_owned() } else { table(rows) })?;
        if is_empty {
            tell(UNSEEN);
        } else if options.state == Some(KeyState::Released) {
            tell(RELEASED);
        }
    }
    if unreadable > 0 {
        tell(&format!("{unreadable} keys are left out, because their data is unreadable"));
    }
    if !is_complete {
        tell(&format!(
            "--limit {} is reached: this is one page of any keys, and there may be newer ones",
            options.limit
        ));
    }
    Ok(true)
}

/// The output is the only record of the reason.
pub(crate) async fn forget(
    target: &Target,
    options: &Forget,
    output: Output,
) -> Result<bool, Failure> {
    let key = options.event.key()?;
    let forget = async |store: &dyn MaintenanceAdapter| {
        if !options.yes {
            let Some(entry) = store.get(&key).await? else { return Ok(("missing", MISSING)) };
            tell(&members(output, &key, Some(&entry), None).lines());
            // Without a reader of the question, nothing is forgotten.
            if !confirm(FORGET)? {
                return Ok(("declined", "nothing was changed"));
            }
        }
        Ok(match store.forget(&key).await? {
            ForgetReply::Removed => ("forgotten", FORGOTTEN),
            ForgetReply::InFlight => ("in-flight", "refused: the event is running"),
            _ => ("missing", MISSING),
        })
    };
    let (result, note) = target.with(forget).await?;
    let outcome = [
        ("namespace", key.namespace().into()),
        ("id", output.id(&key).into()),
        ("result", result.into()),
        ("note", note.into()),
        ("at", utc(SystemTime::now()).into()),
        ("reason", json!(options.reason)),
    ];
    output.print(&outcome.into())?;
    Ok(result == "forgotten")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_outside_the_calendar_is_its_end() {
        let epoch = SystemTime::UNIX_EPOCH;
        for (time, shown) in [
            (epoch + Duration::from_secs(951_782_400), "2000-02-29T00:00:00Z"),
            (epoch - Duration::from_secs(1), "1970-01-01T00:00:00Z"),
            (epoch + Duration::from_secs(1 << 60), "9999-12-31T23:59:59Z"),
        ] {
            assert_eq!(utc(time), shown);
        }
    }
}
