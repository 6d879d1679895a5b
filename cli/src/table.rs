//! `migrate`, `stats` and `purge`.

use std::time::Duration;

use serde::Serialize;
use serde_json::json;
use tower_dedup::adapter::Stats;

use crate::failure::Failure;
use crate::output::{Output, bytes, span, table};
use crate::store::{Access, Store, TableState, Target};

const WITHOUT_TABLE: &str = "a Redis store has no table: there is nothing to make";

pub(crate) fn print(target: &Target, output: Output) -> Result<bool, Failure> {
    let statements = target.schema_sql();
    let object = json!({ "table": target.table_name(), "statements": statements });
    output.print(&object, || {
        if !target.has_table() {
            return format!("-- {WITHOUT_TABLE}");
        }
        let statements = statements.iter().map(|statement| statement.trim_end());
        statements.map(|statement| format!("{statement};")).collect::<Vec<_>>().join("\n")
    })?;
    Ok(true)
}

#[derive(Serialize)]
struct Migration {
    table: String,
    state: &'static str,
    changed: bool,
}

/// Returns `false` if `migrate` would change something.
pub(crate) async fn check(target: &Target, output: Output) -> Result<bool, Failure> {
    let (state, text) = match target.table_state().await? {
        TableState::Missing => ("missing", "the table is missing: run `tower-dedup migrate`"),
        TableState::Older => ("older", "the table is older: run `tower-dedup migrate`"),
        TableState::Current if !target.has_table() => ("current", WITHOUT_TABLE),
        TableState::Current => ("current", "the table is current"),
    };
    output
        .print(&Migration { table: target.table_name(), state, changed: false }, || text.into())?;
    Ok(state == "current")
}

pub(crate) async fn migrate(
    target: &Target,
    record_function: bool,
    output: Output,
) -> Result<bool, Failure> {
    let changed = target.table_state().await? != TableState::Current;
    if changed || record_function {
        target.migrate().await?;
    }
    let text = match changed {
        true => "the table is made",
        false if target.has_table() => "the table is current",
        false => WITHOUT_TABLE,
    };
    let migration = Migration { table: target.table_name(), state: "current", changed };
    output.print(&migration, || text.to_owned())?;
    Ok(true)
}

pub(crate) async fn stats(target: &Target, output: Output) -> Result<bool, Failure> {
    let store = target.open(Access::Read).await?;
    let stats = store.adapter.stats().await;
    store.close().await;
    let stats = stats?;
    output.print(&stats, || stats_text(&stats))?;
    Ok(true)
}

/// Returns a line for each state.
fn stats_text(stats: &Stats) -> String {
    let about = if stats.is_exact { "" } else { "about " };
    let oldest = |time: Option<Duration>, words: &str| {
        time.map(|time| format!("{words} {}", span(time, 2))).unwrap_or_default()
    };
    let rows = [
        ("keys", stats.rows, stats.bytes.map(bytes).unwrap_or_default()),
        ("in flight", stats.in_flight, oldest(stats.oldest_in_flight, "oldest")),
        ("lapsed", stats.lapsed, oldest(stats.oldest_lapsed, "oldest")),
        ("failed", stats.released, String::new()),
        ("complete", stats.complete, String::new()),
        ("expired", stats.expired, oldest(stats.oldest_expired, "purge lag")),
    ];
    table(rows.map(|(name, count, more)| vec![name.to_owned(), format!("{about}{count}"), more]))
}

/// Purges every key that can be purged. Ctrl-C is safe: each statement is a transaction of its own.
pub(crate) async fn purge(
    target: &Target,
    keys_per_statement: u32,
    output: Output,
) -> Result<bool, Failure> {
    let store = target.open(Access::Write).await?;
    let purged = purge_open(&store, keys_per_statement).await;
    store.close().await;
    let purged = purged?;
    let note = if target.has_table() { "" } else { ": the store deletes expired keys by itself" };
    output.print(&json!({ "purged": purged }), || format!("{purged} keys purged{note}"))?;
    Ok(true)
}

async fn purge_open(store: &Store, keys_per_statement: u32) -> Result<u64, Failure> {
    let mut total = 0;
    loop {
        let deleted = store.adapter.purge(keys_per_statement).await?.deleted;
        total += deleted;
        if deleted < u64::from(keys_per_statement) {
            return Ok(total);
        }
    }
}
