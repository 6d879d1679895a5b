//! Parameters and columns: keys and their terms as Postgres takes them, rows as it returns them.

use sha2::{Digest, Sha256};
use sqlx::encode::IsNull;
use sqlx::error::BoxDynError;
use sqlx::postgres::types::Oid;
use sqlx::postgres::{
    PgArgumentBuffer, PgArguments, PgHasArrayType, PgRow, PgTypeInfo, PgValueRef, Postgres,
};
use sqlx::query::Query;
use sqlx::{Decode, Encode, Row as _, Type};

use super::super::contract::{CallTerms, Fetch, StoredResponse, Token};
use super::super::sql::{Call, Row, RowCall};
use crate::key::DedupKey;

/// A `uuid`, without sqlx's feature of that name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Uuid(pub(super) u128);

// The type numbers of the catalogue:
// <https://github.com/postgres/postgres/blob/master/src/include/catalog/pg_type.dat>.
const UUID: PgTypeInfo = PgTypeInfo::with_oid(Oid(2950));
const UUID_ARRAY: PgTypeInfo = PgTypeInfo::with_oid(Oid(2951));

impl Type<Postgres> for Uuid {
    fn type_info() -> PgTypeInfo {
        UUID
    }
}

impl PgHasArrayType for Uuid {
    fn array_type_info() -> PgTypeInfo {
        UUID_ARRAY
    }
}

impl Encode<'_, Postgres> for Uuid {
    fn encode_by_ref(&self, buffer: &mut PgArgumentBuffer) -> Result<IsNull, BoxDynError> {
        buffer.extend_from_slice(&self.0.to_be_bytes());
        Ok(IsNull::No)
    }
}

impl<'r> Decode<'r, Postgres> for Uuid {
    fn decode(value: PgValueRef<'r>) -> Result<Self, BoxDynError> {
        let bytes = <&[u8] as Decode<Postgres>>::decode(value)?;
        Ok(Self(u128::from_be_bytes(bytes.try_into()?)))
    }
}

impl From<Token> for Uuid {
    fn from(token: Token) -> Self {
        Self(u128::from_be_bytes(*token.as_bytes()))
    }
}

/// Returns the primary key of a row. The guide tells operators how to compute it in SQL.
pub(super) fn key_hash(key: &DedupKey) -> u128 {
    let hash = Sha256::new()
        .chain_update(key.namespace())
        .chain_update(b"\n")
        .chain_update(key.id())
        .finalize();
    let mut first = [0; 16];
    first.copy_from_slice(&hash[..16]);
    u128::from_be_bytes(first)
}

/// Returns the index of the row of a batch that has the key of a returned row, which begins with
/// it.
pub(super) fn index_of(
    rows: &[&mut RowCall<'_>],
    returned: &PgRow,
) -> Result<Option<usize>, sqlx::Error> {
    let Uuid(key) = returned.try_get(0)?;
    Ok(rows.binary_search_by_key(&key, |row| row.call.hash).ok())
}

/// A statement with the parameters that were bound so far.
pub(super) type BoundQuery = Query<'static, Postgres, PgArguments>;

/// Binds the parameters of a statement. They are bound again if the statement is repeated.
pub(super) type Bind<'b> = &'b (dyn Fn(BoundQuery) -> BoundQuery + Sync);

/// Returns the primary keys of rows.
pub(super) fn uuids(rows: &[&mut RowCall<'_>]) -> Vec<Uuid> {
    rows.iter().map(|row| Uuid(row.call.hash)).collect()
}

/// Binds the rows of a statement, `$1` to `$12`: the arrays of keys, namespaces, ids and tokens,
/// the retention in milliseconds, the array of the events' types, the lease in milliseconds, the
/// arrays of the payload's SHA-256 and of the response's status, headers and body, and the array of
/// the times at which events of the past were handled. A statement may use fewer. Types, each
/// column of stored data, and these times are null as a whole if no row has any.
pub(super) fn bind_rows(query: BoundQuery, rows: &[&mut RowCall<'_>]) -> BoundQuery {
    let calls = || rows.iter().map(|row| &**row.call);
    let types = calls().any(|call| call.terms.event_type().is_some());
    let types = types.then(|| calls().map(|call| call.terms.event_type()).collect::<Vec<_>>());
    let stores = calls().any(Call::stores_data);
    let past = calls().any(|call| call.terms.handled_at().is_some());
    let handled_at = |call: &Call| call.terms.handled_at_ms();
    let status = |response: &StoredResponse| i16::try_from(response.status.as_u16()).ok();
    query
        .bind(uuids(rows))
        .bind(calls().map(|call| call.key.namespace()).collect::<Vec<_>>())
        .bind(calls().map(|call| call.key.id()).collect::<Vec<_>>())
        .bind(calls().map(|call| call.terms.token().into()).collect::<Vec<Uuid>>())
        .bind(calls().next().map(|call| call.terms.retention_ms()))
        .bind(types)
        .bind(calls().next().and_then(Call::lease_ms))
        .bind(column(stores, calls(), CallTerms::payload_sha256))
        .bind(column(stores, calls(), |terms| status(terms.response()?)))
        .bind(column(stores, calls(), |terms| Some(terms.response()?.headers_json())))
        .bind(column(stores, calls(), |terms| Some(&*terms.response()?.body)))
        .bind(past.then(|| calls().map(handled_at).collect::<Vec<_>>()))
}

/// Returns a column of stored data, if any row stores data.
fn column<'c, T>(
    stores: bool,
    calls: impl Iterator<Item = &'c Call>,
    of: impl Fn(&'c CallTerms) -> Option<T>,
) -> Option<Vec<Option<T>>> {
    stores.then(|| calls.map(|call| of(&call.terms)).collect())
}

/// Returns a row that was read with as much of its stored data. Only the callers of the row fail if
/// a column does not decode.
pub(super) fn read_row(row: &PgRow, fetch: Fetch) -> Row {
    let unreadable = |error| {
        // A row that is forgotten is named by its version.
        Row { version: row.try_get(VERSION).unwrap_or_default(), ..Row::unreadable(error) }
    };
    try_read_row(row, fetch).unwrap_or_else(unreadable)
}

/// The position of the version in a row that is read.
const VERSION: usize = 9;

fn try_read_row(row: &PgRow, fetch: Fetch) -> Result<Row, sqlx::Error> {
    // A `timestamptz` is the microseconds since the year 2000.
    let millis = |micros: i64| micros.div_euclid(1_000).saturating_add(946_684_800_000);
    let maybe = |column: usize| row.try_get_unchecked::<Option<i64>, _>(column);
    let time = |column: usize| row.try_get_unchecked::<i64, _>(column).map(millis);
    // By position, in the order of `sql/get.sql` and `sql/read.sql`: a lookup by name costs more.
    let read = Row {
        token: row.try_get::<Option<Uuid>, _>(1)?.map(|Uuid(token)| token.to_be_bytes()),
        version: row.try_get(VERSION)?,
        attempts: row.try_get::<i32, _>(2)?.into(),
        takeover: row.try_get(3)?,
        first_seen_at: time(4)?,
        completed_at: maybe(5)?.map(millis),
        expires_at: time(6)?,
        lease_until: maybe(7)?.map(millis),
        now: time(8)?,
        ..Row::default()
    };
    read.with_stored(row, fetch)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_hash_never_changes() {
        // Another hash would run every stored event again.
        let key = DedupKey::new("github", "72d3162e-cc78-11e3-81ab-4c9367dc0958").unwrap();
        assert_eq!(format!("{:032x}", key_hash(&key)), "45c7e4d103b89e99d136273d963606e0");
    }
}
