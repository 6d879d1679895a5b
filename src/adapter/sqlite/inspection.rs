//! Statistics of a file, for operators.

use std::sync::Arc;
use std::time::Duration;

use sqlx::sqlite::SqliteRow;
use sqlx::{AssertSqlSafe, Row as _};

use super::super::inspection::Stats;
use super::errors::store_error;
use super::store::SqliteStore;
use crate::error::Error;

/// Greater than every text.
const END: &[u8] = &[];

impl SqliteStore {
    pub(super) async fn stats(&self) -> Result<Stats, Error> {
        let fault = |error| store_error("reading statistics", error);
        let row = sqlx::query(AssertSqlSafe(Arc::clone(&self.statements.stats)))
            .bind("")
            .bind("")
            .bind(END)
            .bind(END)
            .bind(i64::MAX)
            .fetch_one(&self.readers)
            .await
            .map_err(fault)?;
        let mut stats = read_stats(&row).map_err(fault)?;
        let bytes: i64 = sqlx::query_scalar(AssertSqlSafe(Arc::clone(&self.statements.bytes)))
            .fetch_one(&self.readers)
            .await
            .map_err(fault)?;
        stats.bytes = u64::try_from(bytes).ok();
        stats.is_exact = true;
        Ok(stats)
    }
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
