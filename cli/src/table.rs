//! `migrate` and `stats`.

use serde::Serialize;
use tower_dedup::adapter::Stats;

use crate::failure::Failure;
use crate::output::{Output, bytes, span, table};
use crate::store::{Access, TableState, Target};

const WITHOUT_TABLE: &str = "a Redis store has no table: there is nothing to make";

#[derive(Serialize)]
struct Schema {
    table: String,
    statements: Vec<String>,
}

pub(crate) fn print(target: &Target, output: Output) -> Result<bool, Failure> {
    let schema = Schema { table: target.table_name(), statements: target.schema_sql() };
    output.print(&schema, || {
        if !target.has_table() {
            return format!("-- {WITHOUT_TABLE}");
        }
        let statements = schema.statements.iter().map(|statement| statement.trim_end());
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

pub(crate) async fn migrate(target: &Target, output: Output) -> Result<bool, Failure> {
    let changed = target.table_state().await? != TableState::Current;
    if changed {
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

/// The numbers of [`Stats`], with times in seconds.
#[derive(Serialize)]
pub(crate) struct StatsView {
    is_exact: bool,
    rows: u64,
    in_flight: u64,
    lapsed: u64,
    failed: u64,
    complete: u64,
    expired: u64,
    oldest_in_flight_seconds: Option<u64>,
    oldest_lapsed_seconds: Option<u64>,
    oldest_expired_seconds: Option<u64>,
    bytes: Option<u64>,
}

impl From<&Stats> for StatsView {
    fn from(stats: &Stats) -> Self {
        let seconds = |time: std::time::Duration| time.as_secs();
        Self {
            is_exact: stats.is_exact,
            rows: stats.rows,
            in_flight: stats.in_flight,
            lapsed: stats.lapsed,
            failed: stats.released,
            complete: stats.complete,
            expired: stats.expired,
            oldest_in_flight_seconds: stats.oldest_in_flight.map(seconds),
            oldest_lapsed_seconds: stats.oldest_lapsed.map(seconds),
            oldest_expired_seconds: stats.oldest_expired.map(seconds),
            bytes: stats.bytes,
        }
    }
}

pub(crate) async fn stats(target: &Target, output: Output) -> Result<bool, Failure> {
    let store = target.open(Access::Read).await?;
    let stats = store.adapter.stats().await;
    store.close().await;
    let stats = stats?;
    output.print(&StatsView::from(&stats), || stats_text(&stats))?;
    Ok(true)
}

/// Returns a line for each state.
pub(crate) fn stats_text(stats: &Stats) -> String {
    let about = if stats.is_exact { "" } else { "about " };
    let count = |count: u64| format!("{about}{count}");
    let oldest = |time: Option<std::time::Duration>, words: &str| {
        time.map(|time| format!("{words} {}", span(time))).unwrap_or_default()
    };
    let rows = [
        ("keys", count(stats.rows), stats.bytes.map(bytes).unwrap_or_default()),
        ("in flight", count(stats.in_flight), oldest(stats.oldest_in_flight, "oldest")),
        ("lapsed", count(stats.lapsed), oldest(stats.oldest_lapsed, "oldest")),
        ("failed", count(stats.released), String::new()),
        ("complete", count(stats.complete), String::new()),
        ("expired", count(stats.expired), oldest(stats.oldest_expired, "purge lag")),
    ];
    table(rows.map(|(name, count, more)| vec![name.to_owned(), count, more]))
}
