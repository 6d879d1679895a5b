//! Parameters and columns: keys and their terms as JSON, rows as SQLite returns them.

use sqlx::Row as _;
use sqlx::sqlite::SqliteRow;

use super::super::contract::{Fetch, StoredResponse};
use super::super::sql::{Call, Row, RowCall};
use crate::key::{DedupKey, hex};

/// Returns keys as one parameter: a JSON array of `[namespace, id]` pairs.
pub(super) fn keys_json<'k>(keys: impl IntoIterator<Item = &'k DedupKey>) -> String {
    json(keys.into_iter().map(|key| (key.namespace(), key.id())))
}

/// Returns the rows of a statement that writes, as one parameter: a JSON array of
/// `[namespace, id, token, retention, lease, type]`, with times in milliseconds. If any row has
/// data to store or an event of the past, the payload's SHA-256, the response's status, headers and
/// body, and the time of the event follow; null where there is nothing. Bytes are in hex.
pub(super) fn rows_json(rows: &[&mut RowCall<'_>]) -> String {
    fn head(call: &Call) -> (&str, &str, String, i64, Option<i64>, Option<&str>) {
        let (key, terms) = (&call.key, &call.terms);
        let (token, retention) = (hex(terms.token().as_bytes()), terms.retention_ms());
        let event_type = terms.event_type();
        (key.namespace(), key.id(), token, retention, call.lease_ms(), event_type)
    }
    if !rows.iter().any(|row| row.call.stores_data() || row.call.terms.handled_at().is_some()) {
        return json(rows.iter().map(|row| head(row.call)));
    }
    json(rows.iter().map(|row| {
        let (namespace, id, token, retention, lease, event_type) = head(row.call);
        let response = row.call.terms.response();
        let digest = row.call.terms.payload_sha256().map(|digest| hex(&digest));
        let status = response.map(|response| response.status.as_u16());
        let headers = response.map(StoredResponse::headers_json);
        let body = response.map(|response| hex(&response.body));
        let handled_at = row.call.terms.handled_at_ms();
        (
            namespace, id, token, retention, lease, event_type, digest, status, headers, body,
            handled_at,
        )
    }))
}

fn json(rows: impl Iterator<Item: serde::Serialize>) -> String {
    // Strings, numbers and tuples of them always serialize.
    serde_json::to_string(&rows.collect::<Vec<_>>()).unwrap_or_default()
}

/// Returns a row that was read with as much of its stored data. Only the callers of the row fail if
/// a column does not decode: SQLite stores any type in any column.
pub(super) fn read_row(row: &SqliteRow, fetch: Fetch) -> Row {
    try_read_row(row, fetch).unwrap_or_else(Row::unreadable)
}

fn try_read_row(row: &SqliteRow, fetch: Fetch) -> Result<Row, sqlx::Error> {
    let token: Option<Vec<u8>> = row.try_get("token")?;
    let read = Row {
        // A token of another length equals no caller's token.
        token: token.map(|token| token.try_into().unwrap_or_default()),
        attempts: row.try_get("attempts")?,
        takeover: row.try_get("takeover")?,
        first_seen_at: row.try_get("first_seen_at")?,
        completed_at: row.try_get("completed_at")?,
        expires_at: row.try_get("expires_at")?,
        lease_until: row.try_get("lease_until")?,
        now: row.try_get("now")?,
        ..Row::default()
    };
    read.with_stored(row, fetch)
}

/// Returns the index of the row of a batch that has the key of a returned row.
pub(super) fn index_of(
    rows: &[&mut RowCall<'_>],
    returned: &SqliteRow,
) -> Result<Option<usize>, sqlx::Error> {
    let names: (&str, &str) = (returned.try_get("namespace")?, returned.try_get("id")?);
    let of = |row: &&mut RowCall<'_>| (row.call.key.namespace(), row.call.key.id()).cmp(&names);
    Ok(rows.binary_search_by(of).ok())
}
