//! The statements that read or purge a part of the table: purge, statistics, lists.

use std::sync::Arc;
use std::time::Duration;

use sqlx::Row as _;
use sqlx::postgres::PgRow;

use super::super::inspection::{Cursor, KeyState, ListFilter, Listing, Stats};
use super::super::replies::Entry;
use super::super::sql::purge::Step;
use super::super::stored::Fetch;
use super::connections::Source;
use super::errors::store_error;
use super::params::{Params, Selection, read_row};
use super::store::PostgresStore;
use super::walk::{Blocks, Place, TableSize, row_id};
use crate::error::{Error, ErrorKind};
use crate::key::DedupKey;

/// Where a list goes on: after this row id, in this partition. Its text is four numbers with dots between.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Position {
    block: u32,
    item: u16,
    partition: u32,
    /// The number of blocks when the list began. Rows in later blocks are newer: a list that read them
    /// would never end if writers are faster.
    end: u32,
}

impl Position {
    fn parse(cursor: &Cursor) -> Result<Self, Error> {
        let foreign =
            || Error::new(ErrorKind::Refused, "listing keys: the cursor is not of this store");
        let mut parts = cursor.as_str().split('.');
        let mut next =
            || parts.next().filter(|part| part.bytes().all(|byte| byte.is_ascii_digit()));
        let (block, item, partition, end) = (next(), next(), next(), next());
        let position = || {
            let (block, item) = (block?.parse().ok()?, item?.parse().ok()?);
            let (partition, end) = (partition?.parse().ok()?, end?.parse().ok()?);
            Some(Self { block, item, partition, end })
        };
        let position = position().ok_or_else(foreign)?;
        if parts.next().is_some() { Err(foreign()) } else { Ok(position) }
    }

    /// Reads the position of a row, in the same list.
    fn at(self, row: &PgRow) -> Result<Self, sqlx::Error> {
        let place: &str = row.try_get("place")?;
        let partition: i64 = row.try_get("partition")?;
        let numbers = || {
            let (block, item) = place.strip_prefix('(')?.strip_suffix(')')?.split_once(',')?;
            let (block, item) = (block.parse().ok()?, item.parse().ok()?);
            Some(Self { block, item, partition: partition.try_into().ok()?, ..self })
        };
        numbers().ok_or_else(|| sqlx::Error::Decode("a row id of another form".into()))
    }

    fn cursor(self) -> Cursor {
        Cursor::new(format!("{}.{}.{}.{}", self.block, self.item, self.partition, self.end))
    }
}

impl PostgresStore {
    /// Does one step of a purge.
    pub(super) async fn purge(&self, limit: u32, at: Option<Place>) -> Result<Step<Place>, Error> {
        let fault = |error| store_error("purging", error);
        let statements = self.statements();
        let clock = self.fetch(&statements.clock, Params::None).await.map_err(fault)?;
        if let Some(row) = clock.first() {
            self.purge_state.check_clock(row.try_get(0).map_err(fault)?)?;
        }
        let at = match at {
            Some(at) => at,
            None => Place::begin(&self.size().await.map_err(fault)?),
        };
        let blocks = Blocks::from(&at.range());
        let purge = Params::Purge(&blocks, limit.into());
        let rows = self.read_part(&statements.purge, purge).await.map_err(fault)?;
        let deleted = rows.first().map_or(Ok(0), |row| number(row, 0)).map_err(fault)?;
        // More may be there: the step is done again, and then counts.
        if deleted > 0 && deleted >= u64::from(limit) {
            return Ok(Step { next: Some(at.clone()), at, deleted, left: Stats::default() });
        }
        let left = self.count(&blocks).await.map_err(fault)?;
        let left = Stats { bytes: Some(at.bytes()), ..left };
        Ok(Step { next: at.next(), at, deleted, left })
    }

    /// Reads statistics: of the whole table, or of a sample of a large table.
    pub(super) async fn stats(&self) -> Result<Stats, Error> {
        let fault = |error| store_error("reading statistics", error);
        let size = self.size().await.map_err(fault)?;
        let (sample, mut stats) = (size.sample(), Stats::default());
        for range in &sample.ranges {
            stats.add(&self.count(&range.into()).await.map_err(fault)?);
        }
        Ok(Stats { bytes: Some(size.bytes), ..sample.scale(&stats) })
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
        let from = after.map(Position::parse).transpose()?;
        let size = self.size().await.map_err(fault)?;
        let from = from.unwrap_or_else(|| Position { end: size.length(), ..Position::default() });
        let blocks = size.list_range(from.block, from.end);
        let selection = Selection {
            blocks: (&blocks).into(),
            after: row_id(from.block.into(), from.item),
            partition: from.partition.into(),
            state: filter.state.map(state_number),
            namespace: filter.namespace.as_deref(),
            since_ms: filter.since.map(since_ms),
            attempts_over: filter.attempts_over.map(Into::into),
            limit: limit.into(),
        };
        let rows = self.read_part(&self.statements().list, Params::List(&selection)).await;
        let rows = rows.map_err(fault)?;
        let next = if rows.len() >= limit as usize {
            let last = rows.last().map_or(Ok(from), |row| from.at(row)).map_err(fault)?;
            Some(last.cursor())
        } else {
            let block = u32::try_from(blocks.end).unwrap_or(u32::MAX);
            let next = Position { block, end: from.end, ..Position::default() };
            (block < from.end).then(|| next.cursor())
        };
        let mut listing = Listing::new(Vec::new(), next);
        for row in &rows {
            match listed(row) {
                Ok(Some(key)) => listing.keys.push(key),
                Ok(None) => {}
                Err(_) => listing.unreadable += 1,
            }
        }
        Ok(listing)
    }

    /// Counts rows by their states.
    async fn count(&self, blocks: &Blocks) -> Result<Stats, sqlx::Error> {
        let rows = self.read_part(&self.statements().stats, Params::Blocks(blocks)).await?;
        let Some(row) = rows.first() else { return Ok(Stats::default()) };
        let age = |at| {
            let ms: Option<i64> = row.try_get(at)?;
            Ok::<_, sqlx::Error>(ms.map(|ms| Duration::from_millis(u64::try_from(ms).unwrap_or(0))))
        };
        Ok(Stats {
            is_exact: false,
            rows: number(row, 0)?,
            in_flight: number(row, 1)?,
            lapsed: number(row, 2)?,
            released: number(row, 3)?,
            complete: number(row, 4)?,
            expired: number(row, 5)?,
            oldest_in_flight: age(6)?,
            oldest_lapsed: age(7)?,
            oldest_expired: age(8)?,
            bytes: None,
        })
    }

    async fn size(&self) -> Result<TableSize, sqlx::Error> {
        let rows = self.fetch(&self.statements().size, Params::None).await?;
        let mut size = TableSize { blocks: Vec::with_capacity(rows.len()), bytes: 0 };
        for row in &rows {
            size.blocks.push(number(row, 0)?);
            size.bytes += number(row, 1)?;
        }
        Ok(size)
    }

    /// Runs a statement over a part of the table. It has six times as long as another statement, because
    /// Postgres 13 reads the whole table.
    async fn read_part(
        &self,
        sql: &Arc<str>,
        params: Params<'_>,
    ) -> Result<Vec<PgRow>, sqlx::Error> {
        let bound = self.options.statement_timeout.saturating_mul(6);
        Ok(self.fetch_on(Source::Pool, bound, sql, params).await?.rows)
    }
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
    fn cursor_is_read_as_it_was_written() {
        for position in [
            Position::default(),
            Position { block: 7, item: 42, partition: 16_384, end: 8 },
            Position { block: u32::MAX, item: u16::MAX, partition: u32::MAX, end: u32::MAX },
        ] {
            assert_eq!(Position::parse(&position.cursor()).unwrap(), position);
        }
    }

    #[test]
    fn foreign_cursor_is_refused() {
        for text in [
            "",
            ".",
            "...",
            "1",
            "1.2.3",
            "1.2.3.4.5",
            "1.2.3.4.",
            "-1.2.3.4",
            "+1.2.3.4",
            "1.2.x.4",
            " 1.2.3.4",
            "1.70000.3.4",
            "4294967296.1.1.1",
            "stripe\nevt_1",
            "(1,2).3.4",
            "1.2.3.4\0",
            "1,2,3,4",
            "٣.1.1.1",
        ] {
            let refused = Position::parse(&Cursor::new(text)).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Refused, "{text:?}");
        }
    }
}
