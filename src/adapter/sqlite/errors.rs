//! What SQLite's errors mean.
//!
//! Result codes: <https://sqlite.org/rescode.html>.

use sqlx::error::DatabaseError;

use super::super::sql::statement;
use crate::error::StoreError;

const BUSY: i64 = 5;
const LOCKED: i64 = 6;
const READONLY: i64 = 8;
const FULL: i64 = 13;
const CANTOPEN: i64 = 14;
const TOOBIG: i64 = 18;
const CONSTRAINT: i64 = 19;
const MISMATCH: i64 = 20;

pub(super) fn store_error(context: &'static str, error: sqlx::Error) -> StoreError {
    statement::store_error(context, error, is_refusal)
}

/// Returns `true` if a statement with this error changed nothing.
fn is_refusal(error: &dyn DatabaseError) -> bool {
    matches!(primary_code(error), Some(BUSY | LOCKED | READONLY | FULL | CANTOPEN))
}

/// Returns `true` if another process holds the file.
pub(super) fn is_busy(error: &sqlx::Error) -> bool {
    matches!(code(error), Some(BUSY | LOCKED))
}

/// Returns `true` if one row may have caused the error: its value, or a trigger.
pub(super) fn is_row_error(error: &sqlx::Error) -> bool {
    matches!(code(error), Some(TOOBIG | CONSTRAINT | MISMATCH))
}

fn code(error: &sqlx::Error) -> Option<i64> {
    error.as_database_error().and_then(primary_code)
}

fn primary_code(error: &dyn DatabaseError) -> Option<i64> {
    let extended = error.code()?.parse::<i64>().ok()?;
    Some(extended & 0xff)
}
