//! `migrate`, `stats` and `purge`.

use std::time::Duration;

use serde_json::json;
use tower_dedup::adapter::maintenance::MaintenanceAdapter;

use crate::failure::Failure;
use crate::options::Migrate;
use crate::output::{Output, write, write_json};
use crate::store::Target;

const WITHOUT_TABLE: &str = "a Redis store has no table: there is nothing to make";

pub(crate) fn print(target: &Target, output: Output) -> Result<bool, Failure> {
    let statements = target.schema_sql()?;
    if output.json {
        return write_json(&json!({ "statements": statements })).map(|_| true);
    }
    let statements = statements.iter().map(|statement| format!("{};", statement.trim_end()));
    let sql = statements.collect::<Vec<_>>().join("\n");
    write(&if sql.is_empty() { format!("-- {WITHOUT_TABLE}") } else { sql })?;
    Ok(true)
}

/// Makes the table unless it is current. Returns `false` if `--check` finds work.
pub(crate) async fn migrate(
    target: &Target,
    options: &Migrate,
    output: Output,
) -> Result<bool, Failure> {
    let (state, note) = match target.read_table().await {
        Ok(()) if matches!(target, Target::Redis(_)) => ("current", WITHOUT_TABLE.to_owned()),
        Ok(()) => ("current", "the table is current".to_owned()),
        Err(failure) if !failure.needs_migration() => return Err(failure),
        Err(_) if !options.check => {
            target.migrate().await?;
            target.read_table().await?;
            ("made", "the table is made".to_owned())
        }
        Err(Failure { message, .. }) => ("missing", message),
    };
    output.print(&[("state", state.into()), ("note", note.into())].into())?;
    Ok(state != "missing")
}

pub(crate) async fn stats(target: &Target, output: Output) -> Result<bool, Failure> {
    let stats = target.stats().await?;
    let seconds = |time: Option<Duration>| json!(time.map(|time| time.as_secs()));
    let counts = [
        ("is_exact", stats.is_exact.into()),
        ("rows", stats.rows.into()),
        ("in_flight", stats.in_flight.into()),
        ("lapsed", stats.lapsed.into()),
        ("released", stats.released.into()),
        ("complete", stats.complete.into()),
        ("expired", stats.expired.into()),
        ("oldest_in_flight_seconds", seconds(stats.oldest_in_flight)),
        ("oldest_lapsed_seconds", seconds(stats.oldest_lapsed)),
        ("oldest_expired_seconds", seconds(stats.oldest_expired)),
        ("bytes", json!(stats.bytes)),
    ];
    output.print(&counts.into())?;
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
        Ok([("note", json!(note)), ("purged", json!(purged))])
    };
    output.print(&target.with(purge).await?.into())?;
    Ok(true)
}
