//! Purge, statistics and lists.

use std::sync::Arc;
use std::time::Duration;

use sqlx::Row as _;
use sqlx::postgres::PgRow;

use super::super::inspect::{Cursor, Entry, KeyState, ListFilter, Listing, Stats};
use super::super::stored::Fetch;
use super::connections::Source;
use super::errors::store_error;
use super::params::{Params, Selection, Uuid, read_row};
use super::store::PostgresStore;
use crate::error::{Error, ErrorKind};
use crate::key::DedupKey;

impl PostgresStore {
    /// Deletes at most `limit` expired keys.
    pub(super) async fn purge(&self, limit: u32) -> Result<u64, Error> {
        let fault = |error| store_error("purging", error);
        let rows = self.read_part(&self.statements().purge, Params::Purge(limit.into())).await;
        let rows = rows.map_err(fault)?;
        rows.first().map_or(Ok(0), |row| number(row, 0)).map_err(fault)
    }

    pub(super) async fn stats(&self) -> Result<Stats, Error> {
        self.count().await.map_err(|error| store_error("reading statistics", error))
    }

    async fn count(&self) -> Result<Stats, sqlx::Error> {
        let statements = self.statements();
        let size = self.fetch(&statements.size, Params::None).await?;
        let rows = self.read_part(&statements.stats, Params::None).await?;
        let (Some(size), Some(row)) = (size.first(), rows.first()) else {
            return Ok(Stats::default());
        };
        let age = |at| {
            let ms: Option<i64> = row.try_get(at)?;
            Ok::<_, sqlx::Error>(ms.map(|ms| Duration::from_millis(u64::try_from(ms).unwrap_or(0))))
        };
        let mut stats = Stats {
            is_exact: row.try_get("is_exact")?,
            rows: number(row, 0)?,
            in_flight: number(row, 1)?,
            lapsed: number(row, 2)?,
            released: number(row, 3)?,
            complete: number(row, 4)?,
            expired: number(row, 5)?,
            oldest_in_flight: age(6)?,
            oldest_lapsed: age(7)?,
            oldest_expired: age(8)?,
            bytes: Some(number(size, 1)?),
        };
        if !stats.is_exact {
            // Nearly all of the rows that were not counted are complete.
            let more = number(size, 0)?.saturating_sub(stats.rows);
            stats.rows += more;
            stats.complete += more;
        }
        Ok(stats)
    }

    /// Reads one portion of a list.
    pub(super) async fn list(
        &self,
        filter: &ListFilter,
        after: Option<&Cursor>,
        limit: u32,
    ) -> Result<Listing, Error> {
        let fault = |error| store_error("listing keys", error);
        // With 0, the list would never end.
        let limit = limit.max(1);
        let selection = Selection {
            // No key is 0: it is a part of a SHA-256.
            after: after.map_or(Ok(Uuid([0; 16])), read_cursor)?,
            state: filter.state.map(state_number),
            namespace: filter.namespace.as_deref(),
            since_ms: filter.since.map(since_ms),
            attempts_over: filter.attempts_over.map(Into::into),
            id_part: filter.id_part.as_deref(),
            limit: limit.into(),
        };
        let rows = self.read_part(&self.statements().list, Params::List(&selection)).await;
        let rows = rows.map_err(fault)?;
        let mut listing = Listing::default();
        if let Some(last) = rows.last()
            && (rows.len() >= limit as usize || last.try_get("is_last").map_err(fault)?)
        {
            let key: Uuid = last.try_get("key").map_err(fault)?;
            listing.next = Some(Cursor::new(key.to_string()));
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

    /// Runs a statement over many rows, which has six times as long as another statement.
    async fn read_part(
        &self,
        sql: &Arc<str>,
        params: Params<'_>,
    ) -> Result<Vec<PgRow>, sqlx::Error> {
        let bound = self.options.statement_timeout.saturating_mul(6);
        Ok(self.fetch_on(Source::Pool, bound, sql, params).await?.rows)
    }
}

/// Reads a cursor: the last key, as 32 hexadecimal digits.
fn read_cursor(cursor: &Cursor) -> Result<Uuid, Error> {
    let key = u128::from_str_radix(cursor.as_str(), 16).map(Uuid::from).ok();
    key.filter(|key| key.to_string() == cursor.as_str()).ok_or_else(|| {
        Error::new(ErrorKind::Refused, "listing keys: the cursor is not of this store")
    })
}

fn number(row: &PgRow, at: usize) -> Result<u64, sqlx::Error> {
    row.try_get::<i64, _>(at).map(|number| u64::try_from(number).unwrap_or(0))
}

/// Returns the number of a state in `sql/state.sql`.
fn state_number(state: KeyState) -> i32 {
    match state {
        KeyState::InFlight => 1,
        KeyState::Lapsed => 2,
        KeyState::Released => 3,
        KeyState::Complete => 4,
    }
}

/// Returns a time before now that a `timestamptz` can hold: a thousand years at most.
fn since_ms(since: Duration) -> i64 {
    const MAX_MS: i64 = 1_000 * 365 * 86_400_000;
    i64::try_from(since.as_millis()).map_or(MAX_MS, |ms| ms.min(MAX_MS))
}

fn listed(row: &PgRow) -> Result<Option<(DedupKey, Entry)>, Error> {
    let fault = |error| store_error("listing keys", error);
    let namespace: &str = row.try_get("namespace").map_err(fault)?;
    let id: &str = row.try_get("id").map_err(fault)?;
    let key = DedupKey::new(namespace, id).map_err(|error| {
        Error::new(ErrorKind::Corrupt, "listing keys: a key is not readable").with_source(error)
    })?;
    let entry = read_row(row, Fetch::Nothing).entry(row.try_get("event_type").map_err(fault)?)?;
    Ok(entry.map(|entry| (key, Entry { stored: None, ..entry })))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cursor_is_read_only_as_it_was_written() {
        for key in [0, 1, u128::MAX].map(Uuid::from) {
            assert_eq!(read_cursor(&Cursor::new(key.to_string())).unwrap(), key);
        }
        let key = "00112233445566778899aabbccddeeff";
        assert!(read_cursor(&Cursor::new(key)).is_ok());
        let upper = key.to_uppercase();
        let foreign =
            ["", "0", &key[1..], &upper, &format!("{key}0"), &format!("+{}", &key[1..]), "(0,1)"];
        for text in foreign {
            let refused = read_cursor(&Cursor::new(text)).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Refused, "{text:?}");
        }
    }
}
