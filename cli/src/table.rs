//! `migrate`, `stats` and `purge`.

use std::time::Duration;

use serde::Serialize;
use serde_json::json;
use tower_dedup::adapter::inspect::MaintenanceAdapter;

use crate::failure::Failure;
use crate::options::Migrate;
use crate::output::{Output, write};
use crate::store::{Access, Known, TableState, Target};

const WITHOUT_TABLE: &str = "a Redis store has no table: there is nothing to make";

pub(crate) fn print(target: &Known, output: Output) -> Result<bool, Failure> {
    let statements = target.schema_sql();
    if output.json {
        return output.print(&json!({ "statements": statements })).map(|_| true);
    }
    let statements = statements.iter().map(|statement| format!("{};", statement.trim_end()));
    let sql = statements.collect::<Vec<_>>().join("\n");
    write(&if target.is_redis() { format!("-- {WITHOUT_TABLE}") } else { sql })?;
    Ok(true)
}

#[derive(Serialize)]
struct Migration {
    state: TableState,
    changed: bool,
    note: &'static str,
}

/// Makes the table unless it is current. Returns `false` if `--check` finds work.
pub(crate) async fn migrate(
    target: &Known,
    options: &Migrate,
    output: Output,
) -> Result<bool, Failure> {
    let mut state = target.table_state().await?;
    let changed = !options.check && state != TableState::Current;
    if changed {
        target.migrate().await?;
        state = TableState::Current;
    }
    let note = match state {
        TableState::Missing => "the table is missing: run `tower-dedup migrate`",
        TableState::Older => "the table is older: run `tower-dedup migrate`",
        TableState::Current if changed => "the table is made",
        TableState::Current if target.is_redis() => WITHOUT_TABLE,
        TableState::Current => "the table is current",
    };
    output.print(&Migration { state, changed, note })?;
    Ok(state == TableState::Current)
}

#[derive(Serialize)]
struct Counts {
    is_exact: bool,
    rows: u64,
    in_flight: u64,
    lapsed: u64,
    released: u64,
    complete: u64,
    expired: u64,
    oldest_in_flight_seconds: Option<u64>,
    oldest_lapsed_seconds: Option<u64>,
    oldest_expired_seconds: Option<u64>,
    bytes: Option<u64>,
}

pub(crate) async fn stats(target: &Target, output: Output) -> Result<bool, Failure> {
    let stats = target.with(Access::Read, async |store| Ok(store.stats().await?)).await?;
    let seconds = |time: Option<Duration>| time.map(|time| time.as_secs());
    output.print(&Counts {
        is_exact: stats.is_exact,
        rows: stats.rows,
        in_flight: stats.in_flight,
        lapsed: stats.lapsed,
        released: stats.released,
        complete: stats.complete,
        expired: stats.expired,
        oldest_in_flight_seconds: seconds(stats.oldest_in_flight),
        oldest_lapsed_seconds: seconds(stats.oldest_lapsed),
        oldest_expired_seconds: seconds(stats.oldest_expired),
        bytes: stats.bytes,
    })?;
    Ok(true)
}

/// Purges every key that can be purged. Ctrl-C is safe: each statement is a transaction of its own.
pub(crate) async fn purge(
    target: &Target,
    keys_per_statement: u32,
    output: Output,
) -> Result<bool, Failure> {
    let purge = async |store: &dyn MaintenanceAdapter| {
        let mut purged = 0;
        loop {
            let deleted = store.purge(keys_per_statement).await?;
            purged += deleted;
            if deleted < u64::from(keys_per_statement) {
                break;
            }
        }
        let expires_keys = store.abilities().expires_keys;
        let note = expires_keys.then_some("the store deletes expired keys by itself");
        Ok(json!({ "purged": purged, "note": note }))
    };
    output.print(&target.with(Access::Write, purge).await?)?;
    Ok(true)
}
