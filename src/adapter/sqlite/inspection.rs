//! Lists and statistics of a file, for operators.
//!
//! 1. They read on the connections that only read, and wait for no writer.
//! 2. A portion of a list is a range of the primary key. The range is fixed before its rows are read, so
//!    that writes beside the list skip no key that they do not touch.
//! 3. Up to [`MAX_COUNTED`] rows are counted one by one. Of more rows, a [`Sample`] is counted.

use std::sync::Arc;
use std::time::Duration;

use sqlx::query::Query;
use sqlx::sqlite::{Sqlite, SqliteArguments, SqliteRow};
use sqlx::{AssertSqlSafe, Row as _};

use super::super::inspection::{Cursor, ListFilter, Listing, Stats};
use super::super::replies::Entry;
use super::super::stored::Fetch;
use super::errors::store_error;
use super::params::read_row;
use super::place::Place;
use super::sample::Sample;
use super::store::SqliteStore;
use crate::error::{Error, ErrorKind};
use crate::key::DedupKey;

const READING: &str = "reading statistics";
const LISTING: &str = "listing keys";
/// How many rows one call of a list reads at most.
const PORTION: u32 = 20_000;
/// How many rows are counted one by one.
const MAX_COUNTED: u32 = 100_000;

impl SqliteStore {
    /// Returns one portion of a list.
    pub(super) async fn list(
        &self,
        filter: &ListFilter,
        after: Option<&Cursor>,
        limit: u32,
    ) -> Result<Listing, Error> {
        let fault = |error| store_error(LISTING, error);
        let (mut from, mut end) = (Place::default(), Place::end());
        if let Some(namespace) = &filter.namespace {
            (from, end) = (Place::before_namespace(namespace), Place::after_namespace(namespace));
        }
        if let Some(cursor) = after {
            from = from.max(Place::read(cursor)?);
        }
        let next = self.key_at(&from, &end, PORTION).await.map_err(fault)?;
        let since = filter.since.map(|since| i64::try_from(since.as_millis()).unwrap_or(i64::MAX));
        // With 0, the list would never end.
        let limit = limit.max(1);
        let rows = self
            .in_range(&self.statements.list, &from, next.as_ref().unwrap_or(&end))
            .bind(filter.state.map(|state| state.to_string()))
            .bind(since)
            .bind(filter.attempts_over.map(i64::from))
            // With the first row of the next portion.
            .bind(i64::from(limit) + 1)
            .fetch_all(&self.readers)
            .await
            .map_err(fault)?;
        let mut listing = Listing::new(Vec::new(), next.map(|next| next.cursor()));
        for (row, number) in rows.iter().zip(0..) {
            if number == limit {
                listing.next = Some(read_place(row).map_err(fault)?.cursor());
                break;
            }
            match listed(row) {
                Ok(Some(key)) => listing.keys.push(key),
                Ok(None) => {}
                Err(_) => listing.unreadable += 1,
            }
        }
        Ok(listing)
    }

    pub(super) async fn stats(&self) -> Result<Stats, Error> {
        let (from, end) = (Place::default(), Place::end());
        let fault = |error| store_error(READING, error);
        let mut stats = match self.key_at(&from, &end, MAX_COUNTED).await.map_err(fault)? {
            Some(_) => Sample::new(self).stats().await.map_err(fault)?,
            None => {
                let counted = self.count(&from, &end, u32::MAX).await.map_err(fault)?;
                Stats { is_exact: true, ..counted }
            }
        };
        stats.bytes = self.bytes().await.map_err(fault)?;
        Ok(stats)
    }

    /// Returns the size of the file.
    pub(super) async fn bytes(&self) -> Result<Option<u64>, sqlx::Error> {
        let bytes = sqlx::query_scalar(AssertSqlSafe(Arc::clone(&self.statements.bytes)));
        bytes.fetch_one(&self.readers).await.map(|bytes: i64| u64::try_from(bytes).ok())
    }

    /// Returns the key before which a range has so many keys, if it has more.
    pub(super) async fn key_at(
        &self,
        from: &Place,
        end: &Place,
        keys: u32,
    ) -> Result<Option<Place>, sqlx::Error> {
        let key = self.in_range(&self.statements.key_at, from, end).bind(i64::from(keys));
        key.fetch_optional(&self.readers).await?.as_ref().map(read_place).transpose()
    }

    /// Counts the first `limit` rows of a range.
    pub(super) async fn count(
        &self,
        from: &Place,
        end: &Place,
        limit: u32,
    ) -> Result<Stats, sqlx::Error> {
        let count = self.in_range(&self.statements.stats, from, end).bind(i64::from(limit));
        read_stats(&count.fetch_one(&self.readers).await?)
    }

    /// Returns a statement over the keys from one place to another.
    pub(super) fn in_range<'q>(
        &self,
        sql: &Arc<str>,
        from: &'q Place,
        end: &'q Place,
    ) -> Query<'q, Sqlite, SqliteArguments> {
        sqlx::query(AssertSqlSafe(Arc::clone(sql)))
            .bind(&from.namespace)
            .bind(&from.id)
            .bind(&end.namespace)
            .bind(&end.id)
    }
}

/// Returns the key and the entry of a row; `None` for an expired row.
fn listed(row: &SqliteRow) -> Result<Option<(DedupKey, Entry)>, Error> {
    let fault = |error| store_error(LISTING, error);
    let place = read_place(row).map_err(fault)?;
    let key = DedupKey::new(&place.namespace, &place.id)
        .map_err(|error| Error::new(ErrorKind::Corrupt, LISTING).with_source(error))?;
    let entry = read_row(row, Fetch::Nothing).entry(row.try_get("event_type").map_err(fault)?)?;
    Ok(entry.map(|entry| (key, Entry { stored: None, ..entry })))
}

pub(super) fn read_place(row: &SqliteRow) -> Result<Place, sqlx::Error> {
    Ok(Place { namespace: row.try_get("namespace")?, id: row.try_get("id")? })
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
        rows: number("rows")?,
        in_flight: number("in_flight")?,
        lapsed: number("lapsed")?,
        released: number("released")?,
        complete: number("complete")?,
        expired: number("expired")?,
        oldest_in_flight: age("oldest_in_flight")?,
        oldest_lapsed: age("oldest_lapsed")?,
        oldest_expired: age("oldest_expired")?,
        ..Stats::default()
    })
}
