//! `migrate`, `stats` and `purge`.

use serde::Serialize;
use serde_json::json;

use crate::failure::Failure;
use crate::output::{Output, write};
use crate::store::{Access, Store, TableState, Target};

const WITHOUT_TABLE: &str = "a Redis store has no table: there is nothing to make";

pub(crate) fn print(target: &Target, output: Output) -> Result<bool, Failure> {
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

/// Returns `false` if `migrate` would change something.
pub(crate) async fn check(target: &Target, output: Output) -> Result<bool, Failure> {
    let state = target.table_state().await?;
    let note = match state {
        TableState::Missing => "the table is missing: run `tower-dedup migrate`",
        TableState::Older => "the table is older: run `tower-dedup migrate`",
        TableState::Current if target.is_redis() => WITHOUT_TABLE,
        TableState::Current => "the table is current",
    };
    output.print(&Migration { state, changed: false, note })?;
    Ok(state == TableState::Current)
}

/// `always` runs the migration beside a table that is current, too.
pub(crate) async fn migrate(
    target: &Target,
    always: bool,
    output: Output,
) -> Result<bool, Failure> {
    let changed = target.table_state().await? != TableState::Current;
    if changed || always {
        target.migrate().await?;
    }
    let note = match changed {
        true => "the table is made",
        false if target.is_redis() => WITHOUT_TABLE,
        false => "the table is current",
    };
    output.print(&Migration { state: TableState::Current, changed, note })?;
    Ok(true)
}

pub(crate) async fn stats(target: &Target, output: Output) -> Result<bool, Failure> {
    let store = target.open(Access::Read).await?;
    let stats = store.adapter.stats().await;
    store.close().await;
    output.print(&stats?)?;
    Ok(true)
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
    let expires_keys = store.adapter.abilities().expires_keys;
    let note = expires_keys.then_some("the store deletes expired keys by itself");
    output.print(&json!({ "purged": purged?, "note": note }))?;
    Ok(true)
}

async fn purge_open(store: &Store, keys_per_statement: u32) -> Result<u64, Failure> {
    let mut total = 0;
    loop {
        let deleted = store.adapter.purge(keys_per_statement).await?;
        total += deleted;
        if deleted < u64::from(keys_per_statement) {
            return Ok(total);
        }
    }
}
