//! `purge`.

use std::time::Instant;

use serde::Serialize;

use crate::failure::Failure;
use crate::output::Output;
use crate::store::{Access, Store, Target};

#[derive(Serialize)]
struct Purged {
    purged: u64,
}

/// Purges one round: reads every key once. Ctrl-C is safe: each statement is a transaction of its own.
pub(crate) async fn purge(
    target: &Target,
    keys_per_statement: u32,
    output: Output,
) -> Result<bool, Failure> {
    let store = target.open(Access::Write).await?;
    let expires_keys = store.adapter.abilities().expires_keys;
    let purged = purge_open(&store, keys_per_statement).await;
    store.close().await;
    let purged = purged?;
    let note = if expires_keys { ": the store deletes expired keys by itself" } else { "" };
    output.print(&Purged { purged }, || format!("{purged} keys purged{note}"))?;
    Ok(true)
}

async fn purge_open(store: &Store, keys_per_statement: u32) -> Result<u64, Failure> {
    if store.adapter.abilities().expires_keys {
        return Ok(store.adapter.purge(keys_per_statement).await?.deleted);
    }
    let mut total = 0;
    loop {
        let started = Instant::now();
        let step = store.adapter.purge(keys_per_statement).await?;
        total += step.deleted;
        if step.is_round_complete {
            return Ok(total);
        }
        // Leaves the store to deliveries for the other half of the time.
        tokio::time::sleep(started.elapsed()).await;
    }
}
