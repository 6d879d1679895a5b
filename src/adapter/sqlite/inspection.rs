//! The calls of operators. Statistics and lists are read on the connections that only read, and
//! wait for no writer.

use futures_util::future::BoxFuture;
use sqlx::Row as _;
use sqlx::sqlite::SqliteRow;

use super::super::contract::{Fetch, StoreFuture};
use super::super::maintenance::{
    Entry, ForgetReply, ListFilter, Listing, MaintenanceAdapter, Stats,
};
use super::super::sql::statement::query;
use super::super::sql::{Columns as _, SqlAdapter as _, listing, ready, stats};
use super::adapter::SqliteAdapter;
use super::errors::store_error;
use super::params::{keys_json, read_row};
use super::session::SqliteSession;
use super::store::SqliteStore;
use crate::error::{StoreError, StoreErrorKind};
use crate::key::DedupKey;

impl MaintenanceAdapter for SqliteAdapter {
    fn purge(&self, limit: u32) -> StoreFuture<'_, u64> {
        let purge = move |mut session: SqliteSession| async move {
            let purge = query(&session.statements.purge).bind(limit);
            let purged = purge.execute(&mut *session.connection).await;
            purged
                .map(|purged| purged.rows_affected())
                .map_err(|error| store_error("purging", error))
        };
        Box::pin(async move { ready(self).await?.write_in_task(purge).await })
    }

    fn forget<'a>(&'a self, key: &'a DedupKey) -> StoreFuture<'a, ForgetReply> {
        let key = key.clone();
        let forget = |mut session: SqliteSession| async move {
            let fault = |error| store_error("forgetting a key", error);
            let found = session.read(&[&key], Fetch::Nothing).await.map_err(fault)?;
            let found = found.into_iter().flatten().next();
            if let Some(reply) = found.map_or(Some(ForgetReply::Missing), |row| row.forgotten()) {
                return Ok(reply);
            }
            let forget = query(&session.statements.forget).bind(keys_json([&key]));
            let forgotten = forget.execute(&mut *session.connection).await.map_err(fault)?;
            let is_held = forgotten.rows_affected() == 0;
            Ok(if is_held { ForgetReply::InFlight } else { ForgetReply::Removed })
        };
        Box::pin(async move { ready(self).await?.write_in_task(forget).await })
    }

    fn get<'a>(&'a self, key: &'a DedupKey) -> StoreFuture<'a, Option<Entry>> {
        Box::pin(async move {
            let fault = |error| store_error("looking up a key", error);
            let SqliteStore { readers, statements, .. } = &**ready(self).await?;
            let get = query(&statements.get).bind(keys_json([key]));
            let row = get.fetch_optional(readers).await.map_err(fault)?;
            let Some(row) = row else { return Ok(None) };
            read_row(&row, Fetch::DigestAndResponse).entry(row.text("event_type").map_err(fault)?)
        })
    }

    fn get_many<'a>(&'a self, keys: &'a [DedupKey]) -> StoreFuture<'a, Vec<Option<Entry>>> {
        Box::pin(async move {
            let fault = |error| store_error("looking up keys", error);
            let SqliteStore { readers, statements, .. } = &**ready(self).await?;
            let get = query(&statements.get_many).bind(keys_json(keys));
            let mut entries = vec![None; keys.len()];
            for row in get.fetch_all(readers).await.map_err(fault)? {
                let ordinal: i64 = row.try_get("ordinal").map_err(fault)?;
                let event_type = row.text("event_type").map_err(fault)?;
                let entry = read_row(&row, Fetch::Nothing).entry(event_type)?;
                let place =
                    usize::try_from(ordinal).ok().and_then(|ordinal| entries.get_mut(ordinal));
                // `json_each` numbers the keys.
                if let Some(place) = place {
                    *place = entry;
                }
            }
            Ok(entries)
        })
    }

    fn stats(&self) -> StoreFuture<'_, Stats> {
        Box::pin(async move {
            let SqliteStore { readers, statements, .. } = &**ready(self).await?;
            let read = async {
                let row = query(&statements.stats).fetch_one(readers).await?;
                let bytes = query(&statements.bytes).fetch_one(readers).await?;
                Ok(Stats { bytes: u64::try_from(bytes.try_get::<i64, _>(0)?).ok(), ..stats(&row)? })
            };
            read.await.map_err(|error| store_error("reading statistics", error))
        })
    }

    fn list<'a>(
        &'a self,
        filter: &'a ListFilter,
        after: Option<&'a str>,
        limit: u32,
    ) -> StoreFuture<'a, Listing> {
        Box::pin(async move {
            let SqliteStore { readers, statements, .. } = &**ready(self).await?;
            // A namespace has at most 64 bytes, so none is greater.
            let (mut from, mut end) = (Names::default(), char::MAX.to_string().repeat(17));
            if let Some(namespace) = &filter.namespace {
                from.0.clone_from(namespace);
                // No namespace holds a NUL, so none lies between.
                end = format!("{namespace}\0");
            }
            if let Some(cursor) = after {
                from = from.max(read_cursor(cursor)?);
            }
            let since =
                filter.since.map(|since| i64::try_from(since.as_millis()).unwrap_or(i64::MAX));
            // With 0, the list would never end.
            let limit = limit.max(1);
            let rows = query(&statements.list)
                .bind(from.0)
                .bind(from.1)
                .bind(end)
                .bind(filter.state.map(|state| state.to_string()))
                .bind(since)
                .bind(filter.attempts_over.map(i64::from))
                .bind(filter.id_part.as_deref())
                .bind(i64::from(limit))
                .fetch_all(readers)
                .await;
            let cursor =
                |row: &SqliteRow| Ok(cursor_at(&(row.try_get("namespace")?, row.try_get("id")?)));
            rows.and_then(|rows| listing(&rows, limit, cursor, |row| read_row(row, Fetch::Nothing)))
                .map_err(|error| store_error("listing keys", error))
        })
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(self.store().close())
    }
}

/// The namespace and the id of a key, which exists or not, in the order of the primary key.
type Names = (String, String);

/// Returns the cursor of these names, as JSON, which escapes whatever they hold.
fn cursor_at(names: &Names) -> String {
    // Strings always serialize.
    serde_json::to_string(names).unwrap_or_default()
}

/// Reads a text that [`cursor_at`] makes of a key.
fn read_cursor(cursor: &str) -> Result<Names, StoreError> {
    let names = serde_json::from_str::<Names>(cursor).ok();
    let is_own = |names: &Names| {
        cursor_at(names) == cursor
            && DedupKey::new(&names.0, &names.1).is_ok_and(|key| key.id() == names.1)
    };
    names.filter(is_own).ok_or_else(|| {
        StoreError::new(
            StoreErrorKind::Refused,
            "listing keys: the cursor is not one of this store",
        )
    })
}
