//! The calls of operators.

use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;

use sqlx::Row as _;
use sqlx::postgres::PgRow;

use super::super::contract::{Fetch, StoreFuture};
use super::super::maintenance::{
    Entry, ForgetReply, ListFilter, Listing, MaintenanceAdapter, Stats,
};
use super::super::sql::{Columns as _, SqlAdapter as _, TRIES, listing, ready, stats};
use super::super::terms::saturating_ms;
use super::adapter::PostgresAdapter;
use super::connections::Fetched;
use super::errors::{is_locked, store_error};
use super::params::{BoundQuery, Uuid, key_hash, read_row};
use super::senders::Work;
use super::statements::Wait;
use crate::error::{StoreError, StoreErrorKind};
use crate::key::DedupKey;

/// A statement over many rows has six times as long as another.
const LONG_READ: (Work, u32) = (Work::Read, 6);
const LONG_WRITE: (Work, u32) = (Work::DurableWrite, 6);

impl MaintenanceAdapter for PostgresAdapter {
    fn purge(&self, limit: u32) -> StoreFuture<'_, u64> {
        Box::pin(async move {
            let store = ready(self).await?;
            let bind = move |query: BoundQuery| query.bind(i64::from(limit));
            let all = store.statements(Wait::Briefly);
            let purged = store.fetch("purging", LONG_WRITE, &all.purge, bind).await?;
            let count =
                purged.and_then(|it| it.rows.first().map_or(Ok(0), |row| row.count("count")));
            count.map_err(|error| store_error("purging", error))
        })
    }

    fn stats(&self) -> StoreFuture<'_, Stats> {
        Box::pin(async move {
            const CONTEXT: &str = "reading statistics";
            let store = ready(self).await?;
            let all = store.statements(Wait::Briefly);
            let read = store.fetch(CONTEXT, LONG_READ, &all.stats, |query| query).await?;
            let read = read.and_then(|read| {
                let Some(row) = read.rows.first() else { return Ok(Stats::default()) };
                let mut stats = Stats { bytes: Some(row.count("bytes")?), ..stats(row)? };
                if !stats.is_exact {
                    // Nearly all of the rows that were not counted are complete.
                    let more = row.count("estimate")?.saturating_sub(stats.rows);
                    stats.rows += more;
                    stats.complete += more;
                }
                Ok(stats)
            });
            read.map_err(|error| store_error(CONTEXT, error))
        })
    }

    fn list<'a>(
        &'a self,
        filter: &'a ListFilter,
        after: Option<&'a str>,
        limit: u32,
    ) -> StoreFuture<'a, Listing> {
        const CONTEXT: &str = "listing keys";
        // With 0, the list would never end.
        let limit = limit.max(1);
        Box::pin(async move {
            let (store, filter) = (ready(self).await?, filter.clone());
            // No key is 0: it is a part of a SHA-256.
            let after = after.map_or(Ok(Uuid(0)), read_cursor)?;
            let bind = move |query: BoundQuery| {
                query
                    .bind(after)
                    // The numbers of `sql/list.sql`.
                    .bind(filter.state.map(|state| state as i32 + 1))
                    .bind(filter.namespace.clone())
                    .bind(filter.since.map(saturating_ms))
                    .bind(filter.attempts_over.map(i64::from))
                    .bind(filter.id_part.clone())
                    .bind(i64::from(limit))
            };
            let cursor = |row: &PgRow| Ok(cursor_at(row.try_get::<Uuid, _>("key")?.0));
            let read = |row: &PgRow| read_row(row, Fetch::Nothing);
            let all = store.statements(Wait::Briefly);
            let listed = store.fetch(CONTEXT, LONG_READ, &all.list, bind).await?;
            let listed = listed.and_then(|it| listing(&it.rows, limit, cursor, read));
            listed.map_err(|error| store_error(CONTEXT, error))
        })
    }

    /// Reads a key on any server.
    fn get<'a>(&'a self, key: &'a DedupKey) -> StoreFuture<'a, Option<Entry>> {
        Box::pin(async move {
            const CONTEXT: &str = "looking up a key";
            let fault = |error| store_error(CONTEXT, error);
            let (store, fetch) = (ready(self).await?, Fetch::DigestAndResponse);
            let row = store.read_key(CONTEXT, key, fetch, true).await?;
            let Some(row) = row else { return Ok(None) };
            read_row(&row, fetch).entry(row.text("event_type").map_err(fault)?)
        })
    }

    /// Reads keys on any server.
    fn get_many<'a>(&'a self, keys: &'a [DedupKey]) -> StoreFuture<'a, Vec<Option<Entry>>> {
        Box::pin(async move {
            const CONTEXT: &str = "looking up keys";
            let fault = |error| store_error(CONTEXT, error);
            let store = ready(self).await?;
            let hashes: Vec<_> = keys.iter().map(|key| Uuid(key_hash(key))).collect();
            let bound = hashes.clone();
            let bind = move |query: BoundQuery| query.bind(bound.clone());
            let all = store.statements(Wait::Briefly);
            let read =
                store.fetch(CONTEXT, LONG_READ, &all.get_many, bind).await?.map_err(fault)?;
            let mut found = HashMap::with_capacity(read.rows.len());
            for row in &read.rows {
                let Uuid(key) = row.try_get(0).map_err(fault)?;
                let event_type = row.text("event_type").map_err(fault)?;
                found.insert(key, read_row(row, Fetch::Nothing).entry(event_type)?);
            }
            Ok(hashes.iter().map(|Uuid(key)| found.get(key).cloned().flatten()).collect())
        })
    }

    /// Forgets a key, unless a live lease or an open transaction holds it.
    fn forget<'a>(&'a self, key: &'a DedupKey) -> StoreFuture<'a, ForgetReply> {
        const CONTEXT: &str = "forgetting a key";
        Box::pin(async move {
            let fault = |error| store_error(CONTEXT, error);
            let store = ready(self).await?;
            for _ in 0..TRIES {
                let row = store.read_key(CONTEXT, key, Fetch::Nothing, false).await?;
                let Some(row) = row.map(|row| read_row(&row, Fetch::Nothing)) else {
                    return Ok(ForgetReply::Missing);
                };
                if let Some(reply) = row.forgotten() {
                    return Ok(reply);
                }
                let all = store.statements(Wait::Briefly);
                let (key, version) = (Uuid(key_hash(key)), row.version);
                let bind = move |query: BoundQuery| query.bind(key).bind(version);
                let write = (Work::DurableWrite, 1);
                let forgotten = store.fetch(CONTEXT, write, &all.forget, bind).await?;
                if forgotten.as_ref().is_err_and(is_locked) {
                    return Ok(ForgetReply::InFlight);
                }
                let Fetched { rows, lost_reply } = forgotten.map_err(fault)?;
                if !rows.is_empty() {
                    return Ok(ForgetReply::Removed);
                }
                // The lost try may have written the row, or another call has.
                if lost_reply {
                    return Err(StoreError::new(StoreErrorKind::Unavailable, CONTEXT));
                }
            }
            Ok(ForgetReply::InFlight)
        })
    }

    fn close(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(self.store().close())
    }
}

/// Returns the cursor behind a key: its hexadecimal digits.
fn cursor_at(key: u128) -> String {
    format!("{key:032x}")
}

/// Reads a text that [`cursor_at`] makes of a key.
fn read_cursor(cursor: &str) -> Result<Uuid, StoreError> {
    let key = u128::from_str_radix(cursor, 16).ok();
    key.filter(|key| cursor_at(*key) == cursor).map(Uuid).ok_or_else(|| {
        StoreError::new(StoreErrorKind::Refused, "listing keys: the cursor is not of this store")
    })
}
