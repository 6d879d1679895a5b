//! Purge, statistics and lists. Statistics and lists are read on the connections that only read, and wait for no
//! writer.

use std::sync::Arc;
use std::time::Duration;

use sqlx::sqlite::SqliteRow;
use sqlx::{AssertSqlSafe, Row as _};

use super::super::inspect::{Cursor, Entry, ListFilter, Listing, Stats};
use super::super::stored::Fetch;
use super::errors::store_error;
use super::params::read_row;
use super::store::SqliteStore;
use crate::error::{Error, ErrorKind};
use crate::key::DedupKey;

const LISTING: &str = "listing keys";

impl SqliteStore {
    /// Deletes at most `limit` expired keys.
    pub(super) async fn purge(self: &Arc<Self>, limit: u32) -> Result<u64, Error> {
        self.write_in_task(move |store, _guard| async move {
            let purge = sqlx::query(AssertSqlSafe(Arc::clone(&store.statements.purge)));
            let done = purge.bind(limit).execute(&store.writer).await;
            done.map(|done| done.rows_affected()).map_err(|error| store_error("purging", error))
        })
        .await
    }

    pub(super) async fn stats(&self) -> Result<Stats, Error> {
        let fault = |error| store_error("reading statistics", error);
        let stats = sqlx::query(AssertSqlSafe(Arc::clone(&self.statements.stats)));
        let stats = stats.fetch_one(&self.readers).await.map_err(fault)?;
        let bytes = sqlx::query_scalar(AssertSqlSafe(Arc::clone(&self.statements.bytes)));
        let bytes: i64 = bytes.fetch_one(&self.readers).await.map_err(fault)?;
        let stats = read_stats(&stats).map_err(fault)?;
        Ok(Stats { bytes: u64::try_from(bytes).ok(), ..stats })
    }

    /// Reads one portion of a list.
    pub(super) async fn list(
        &self,
        filter: &ListFilter,
        after: Option<&Cursor>,
        limit: u32,
    ) -> Result<Listing, Error> {
        let fault = |error| store_error(LISTING, error);
        // A namespace has at most 64 bytes, so none is greater.
        let (mut from, mut end) = (Place::default(), char::MAX.to_string().repeat(17));
        if let Some(namespace) = &filter.namespace {
            from.0.clone_from(namespace);
            // No namespace holds a NUL, so none lies between.
            end = format!("{namespace}\0");
        }
        if let Some(cursor) = after {
            from = from.max(Place::read(cursor)?);
        }
        let since = filter.since.map(|since| i64::try_from(since.as_millis()).unwrap_or(i64::MAX));
        // With 0, the list would never end.
        let limit = limit.max(1);
        let rows = sqlx::query(AssertSqlSafe(Arc::clone(&self.statements.list)))
            .bind(from.0)
            .bind(from.1)
            .bind(end)
            .bind(filter.state.map(|state| state.to_string()))
            .bind(since)
            .bind(filter.attempts_over.map(i64::from))
            .bind(filter.id_part.as_deref())
            .bind(i64::from(limit))
            .fetch_all(&self.readers)
            .await
            .map_err(fault)?;
        let mut listing = Listing::default();
        if let Some(last) = rows.last()
            && (rows.len() >= limit as usize || last.try_get("is_last").map_err(fault)?)
        {
            listing.next = Some(Place::of(last).map_err(fault)?.cursor());
        }
        for row in &rows {
            if !row.try_get("is_selected").map_err(fault)? {
                continue;
            }
            match listed(row) {
                Ok(Some(key)) => listing.keys.push(key),
                Ok(None) => {}
                Err(_) => listing.unreadable += 1,
            }
        }
        Ok(listing)
    }
}

/// The namespace and the id of a key, which exists or not: a place in the order of the primary key.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Place(String, String);

impl Place {
    fn of(row: &SqliteRow) -> Result<Self, sqlx::Error> {
        Ok(Self(row.try_get("namespace")?, row.try_get("id")?))
    }

    /// Returns the cursor of this place: its names as JSON, which escapes whatever they hold.
    fn cursor(&self) -> Cursor {
        // Strings always serialize.
        Cursor::new(serde_json::to_string(&(&self.0, &self.1)).unwrap_or_default())
    }

    /// Reads a cursor.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Refused`] for a text that [`cursor`](Self::cursor) does not make of a key.
    fn read(cursor: &Cursor) -> Result<Self, Error> {
        let names = serde_json::from_str::<(String, String)>(cursor.as_str()).ok();
        let place = names.map(|(namespace, id)| Self(namespace, id));
        let is_own = |place: &Self| {
            place.cursor() == *cursor
                && DedupKey::new(&place.0, &place.1).is_ok_and(|key| key.id() == place.1)
        };
        place.filter(is_own).ok_or_else(|| {
            Error::new(ErrorKind::Refused, "listing keys: the cursor is not one of this store")
        })
    }
}

/// Returns the key and the entry of a row; `None` for an expired row.
fn listed(row: &SqliteRow) -> Result<Option<(DedupKey, Entry)>, Error> {
    let fault = |error| store_error(LISTING, error);
    let Place(namespace, id) = Place::of(row).map_err(fault)?;
    let key = DedupKey::new(&namespace, &id)
        .map_err(|error| Error::new(ErrorKind::Corrupt, LISTING).with_source(error))?;
    let entry = read_row(row, Fetch::Nothing).entry(row.try_get("event_type").map_err(fault)?)?;
    Ok(entry.map(|entry| (key, Entry { stored: None, ..entry })))
}

fn read_stats(row: &SqliteRow) -> Result<Stats, sqlx::Error> {
    let number = |name| row.try_get::<i64, _>(name).map(|rows| u64::try_from(rows).unwrap_or(0));
    let age = |name| {
        let ms = row.try_get::<Option<i64>, _>(name)?;
        // A clock that went back makes a time negative.
        let ms = ms.map(|ms| Duration::from_millis(u64::try_from(ms).unwrap_or(0)));
        Ok::<_, sqlx::Error>(ms)
    };
    Ok(Stats {
        is_exact: row.try_get("is_exact")?,
        rows: number("rows")?,
        in_flight: number("in_flight")?,
        lapsed: number("lapsed")?,
        released: number("released")?,
        complete: number("complete")?,
        expired: number("expired")?,
        oldest_in_flight: age("oldest_in_flight")?,
        oldest_lapsed: age("oldest_lapsed")?,
        oldest_expired: age("oldest_expired")?,
        bytes: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cursor_is_read_only_as_it_was_written() {
        for (namespace, id) in [("a", "b"), ("a\"", "\\"), ("\u{10ffff}", "\n\u{7f}"), ("[", "]")] {
            let place = Place(namespace.to_owned(), id.to_owned());
            assert_eq!(Place::read(&place.cursor()).unwrap(), place);
        }
        let long = format!("[\"a\",\"{}\"]", "x".repeat(256));
        let foreign = [
            "",
            "0",
            "1:2",
            "null",
            "[]",
            "{}",
            "[\"a\"]",
            "[\"a\",\"\"]",
            "[\"\",\"a\"]",
            "[\"a\",\"b\",\"c\"]",
            "[\"a\", \"b\"]",
            "[\"a\",\"\\u0062\"]",
            "[\"a\",\"\\u0000\"]",
            "[\"a\\nb\",\"c\"]",
            &long,
        ];
        for text in foreign {
            let refused = Place::read(&Cursor::new(text)).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Refused, "{text}");
        }
    }
}
