//! Lists and statistics, from the rows of a statement. Its columns have the same names in every
//! database.

use std::time::Duration;

use super::super::maintenance::{Entry, Listing, Stats};
use super::row::{Columns, Row};
use crate::error::BoxError;
use crate::key::DedupKey;

/// Reads the row of `sql/stats.sql`.
pub(crate) fn stats(row: &impl Columns) -> Result<Stats, sqlx::Error> {
    let age = |name| {
        let is_null = row.number(name)?.is_none();
        Ok::<_, sqlx::Error>((!is_null).then_some(Duration::from_millis(row.count(name)?)))
    };
    Ok(Stats {
        is_exact: row.flag("is_exact")?,
        rows: row.count("rows")?,
        in_flight: row.count("in_flight")?,
        lapsed: row.count("lapsed")?,
        released: row.count("released")?,
        complete: row.count("complete")?,
        expired: row.count("expired")?,
        oldest_in_flight: age("oldest_in_flight")?,
        oldest_lapsed: age("oldest_lapsed")?,
        oldest_expired: age("oldest_expired")?,
        bytes: None,
    })
}

/// Reads the rows of `sql/list.sql`, of which there are at most `limit`.
pub(crate) fn listing<R: Columns>(
    rows: &[R],
    limit: u32,
    cursor: impl Fn(&R) -> Result<String, sqlx::Error>,
    read: impl Fn(&R) -> Row,
) -> Result<Listing, sqlx::Error> {
    let mut listing = Listing::default();
    if let Some(last) = rows.last()
        && (rows.len() >= limit as usize || last.flag("is_last")?)
    {
        listing.next = Some(cursor(last)?);
    }
    for row in rows {
        if !row.flag("is_selected")? {
            continue;
        }
        match listed(row, &read(row)) {
            Ok(key) => listing.keys.extend(key),
            Err(_) => listing.unreadable += 1,
        }
    }
    Ok(listing)
}

/// Returns the key and the entry of a row; `None` for an expired row.
fn listed(columns: &impl Columns, row: &Row) -> Result<Option<(DedupKey, Entry)>, BoxError> {
    let name = |name| columns.text(name).map(Option::unwrap_or_default);
    let key = DedupKey::new(&name("namespace")?, &name("id")?)?;
    let entry = row.entry(columns.text("event_type")?)?;
    Ok(entry.map(|entry| (key, entry)))
}
