//! What SQLite's errors mean.
//!
//! Result codes: <https://sqlite.org/rescode.html>.

use sqlx::error::DatabaseError;

use super::super::sql::statement;
use crate::error::StoreError;

pub(super) fn store_error(context: &'static str, error: sqlx::Error) -> StoreError {
    // Changed nothing: BUSY, LOCKED, READONLY, FULL, CANTOPEN.
    let is_refusal = |error: &_| matches!(primary_code(error), Some(5 | 6 | 8 | 13 | 14));
    statement::store_error(context, error, is_refusal)
}

/// Returns `true` if another process holds the file: BUSY, LOCKED.
pub(super) fn is_busy(error: &sqlx::Error) -> bool {
    matches!(code(error), Some(5 | 6))
}

/// Returns `true` if one row may have caused the error, by its value or a trigger: TOOBIG, CONSTRAINT, MISMATCH.
pub(super) fn is_row_error(error: &sqlx::Error) -> bool {
    matches!(code(error), Some(18..=20))
}

fn code(error: &sqlx::Error) -> Option<i64> {
    error.as_database_error().and_then(primary_code)
}

fn primary_code(error: &dyn DatabaseError) -> Option<i64> {
    let extended = error.code()?.parse::<i64>().ok()?;
    Some(extended & 0xff)
}
