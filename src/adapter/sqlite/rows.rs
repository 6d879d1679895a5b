//! SQLite's rows and errors.

use std::collections::HashMap;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::sync::Arc;

use serde_json::Value;
use sqlx::Row;
use sqlx::error::DatabaseError;
use sqlx::sqlite::SqliteRow;

use super::super::sql::{self, RowTerms, Rows, Stored};
use super::super::stored::StoredResponse;
use super::schema::{DIGITS, TERMS};
use crate::error::Error;
use crate::key::{DedupKey, hex};

/// The keys as one parameter: a JSON array of `[namespace, id]` pairs.
pub(super) fn keys_json(keys: &[DedupKey]) -> String {
    let pairs: Vec<_> = keys.iter().map(|key| (key.namespace(), key.id())).collect();
    // Strings and tuples of them always serialize.
    serde_json::to_string(&pairs).unwrap_or_default()
}

/// What a changing statement is asked: the keys, each with its terms where they differ, and with
/// what is kept with it.
pub(super) fn rows_json(rows: &Rows<'_>) -> String {
    let keeps = rows.keeps();
    let places = 0..rows.len();
    let all: Vec<Vec<Value>> = places.map(|place| row_json(rows, place, keeps)).collect();
    // Strings and numbers always serialize.
    serde_json::to_string(&all).unwrap_or_default()
}

/// The terms of each key, as the statements that answer no rows take them.
pub(super) fn rows_terms(rows: &Rows<'_>) -> Vec<u8> {
    let mut all = Vec::with_capacity(rows.len() * TERMS);
    for place in 0..rows.len() {
        let terms = rows.terms(place);
        all.extend(terms.token().as_bytes());
        for number in [terms.retention_ms(), terms.lease_ms()] {
            all.extend(format!("{number:0DIGITS$}").into_bytes());
        }
    }
    all
}

fn row_json(rows: &Rows<'_>, place: usize, keeps: bool) -> Vec<Value> {
    let (key, terms) = (&rows.keys[place], rows.terms(place));
    let mut row: Vec<Value> = vec![key.namespace().into(), key.id().into()];
    if let RowTerms::Each(_) = rows.row_terms {
        row.push(hex(terms.token().as_bytes()).into());
        row.extend([terms.retention_ms().into(), terms.lease_ms().into()]);
    }
    if keeps {
        let kept = terms.stored_data_for(key).unwrap_or_default();
        let response = kept.response.as_deref();
        row.extend([
            kept.payload_sha256.map(|digest| hex(&digest)).into(),
            response.map(|response| response.status.as_u16()).into(),
            response.map(StoredResponse::headers_json).into(),
            response.map(|response| hex(&response.body)).into(),
        ]);
    }
    row
}

/// What a complete row has kept.
pub(super) fn kept(row: &SqliteRow) -> Result<sql::KeptRow, sqlx::Error> {
    Ok(sql::KeptRow {
        payload_sha256: row.try_get("payload_sha256")?,
        status: row.try_get("response_status")?,
        headers: row.try_get("response_headers")?,
        body: row.try_get("response_body")?,
    })
}

pub(super) fn stored(row: &SqliteRow) -> Result<Stored, sqlx::Error> {
    let token: Option<Vec<u8>> = row.try_get("token")?;
    Ok(Stored {
        // Of another length, it is nobody's.
        token: token.map(|token| token.try_into().unwrap_or_default()),
        attempts: row.try_get("attempts")?,
        takeover: row.try_get("takeover")?,
        first_seen_at: row.try_get("first_seen_at")?,
        completed_at: row.try_get("completed_at")?,
        expires_at: row.try_get("expires_at")?,
        lease_until: row.try_get("lease_until")?,
        now: row.try_get("now")?,
    })
}

/// What each row says, in its key's place.
pub(super) fn placed<T>(
    keys: &[DedupKey],
    rows: &[SqliteRow],
    read: impl Fn(&SqliteRow) -> Result<T, sqlx::Error>,
) -> Result<Vec<Option<T>>, sqlx::Error> {
    let mut found: Vec<Option<T>> = keys.iter().map(|_| None).collect();
    for row in rows {
        let place: i64 = row.try_get("place")?;
        let slot = usize::try_from(place).ok().and_then(|place| found.get_mut(place));
        if let Some(slot) = slot {
            *slot = Some(read(row)?);
        }
    }
    Ok(found)
}

/// Each returned row with the place of its key.
pub(super) fn matched<'r>(
    keys: &[DedupKey],
    rows: &'r [SqliteRow],
) -> Result<Vec<(usize, &'r SqliteRow)>, sqlx::Error> {
    let names = keys.iter().map(|key| (key.namespace(), key.id()));
    let places: HashMap<(&str, &str), usize> = names.zip(0..).collect();
    let mut found = Vec::with_capacity(rows.len());
    for row in rows {
        if let Some(place) = places.get(&(row.try_get("namespace")?, row.try_get("id")?)) {
            found.push((*place, row));
        }
    }
    Ok(found)
}

/// What stands for keys in a batcher.
pub(super) fn numbers(keys: &[DedupKey]) -> Vec<u64> {
    let hasher = BuildHasherDefault::<DefaultHasher>::default();
    keys.iter().map(|key| hasher.hash_one(key)).collect()
}

pub(super) fn store_error(context: &'static str, error: sqlx::Error) -> Error {
    sql::store_error(context, error, is_refusal)
}

// Result codes of SQLite: <https://sqlite.org/rescode.html>.
pub(super) const BUSY: i64 = 5;
pub(super) const LOCKED: i64 = 6;
const READONLY: i64 = 8;
const FULL: i64 = 13;
const CANTOPEN: i64 = 14;
const TOOBIG: i64 = 18;
const CONSTRAINT: i64 = 19;
const MISMATCH: i64 = 20;

/// Whether it may be one row's doing: its value, or what a trigger says to it.
pub(super) fn is_of_a_row(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(primary_code);
    matches!(code, Some(TOOBIG | CONSTRAINT | MISMATCH))
}

/// Whether it is an error in SQL, as where there is no such table.
pub(super) fn is_of_the_sql(error: &Error) -> bool {
    const ERROR: i64 = 1;
    let source = std::error::Error::source(error);
    // That of a batch is shared among its callers.
    let shared = source.and_then(|source| source.downcast_ref::<Arc<Shared>>());
    let own = source.and_then(|source| source.downcast_ref::<sqlx::Error>());
    let error = own.or_else(|| shared?.downcast_ref());
    error.and_then(sqlx::Error::as_database_error).and_then(primary_code) == Some(ERROR)
}

/// What [`Error::shared`] makes of a source.
type Shared = dyn std::error::Error + Send + Sync;

/// Whether a COMMIT is refused for what was written before it: a deferred constraint.
pub(super) fn is_of_a_constraint(error: &sqlx::Error) -> bool {
    error.as_database_error().and_then(primary_code) == Some(CONSTRAINT)
}

/// Whether a commit hook has turned the COMMIT into a rollback.
pub(super) fn is_refused_commit(error: &sqlx::Error) -> bool {
    const CONSTRAINT_COMMITHOOK: &str = "531";
    let code = error.as_database_error().and_then(DatabaseError::code);
    code.is_some_and(|code| code == CONSTRAINT_COMMITHOOK)
}

/// Whether a statement that ends with this has surely changed nothing.
fn is_refusal(answer: &dyn DatabaseError) -> bool {
    matches!(primary_code(answer), Some(BUSY | LOCKED | READONLY | FULL | CANTOPEN))
}

pub(super) fn primary_code(answer: &dyn DatabaseError) -> Option<i64> {
    let extended = answer.code()?.parse::<i64>().ok()?;
    Some(extended & 0xff)
}
