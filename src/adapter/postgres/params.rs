//! Parameters and columns: keys and their terms as Postgres takes them, rows as it returns them.

use std::fmt;
use std::sync::Arc;

use sha2::{Digest, Sha256};
use sqlx::encode::IsNull;
use sqlx::error::BoxDynError;
use sqlx::postgres::types::Oid;
use sqlx::postgres::{
    PgArgumentBuffer, PgArguments, PgHasArrayType, PgRow, PgTypeInfo, PgValueFormat, PgValueRef,
    Postgres,
};
use sqlx::query::Query;
use sqlx::{AssertSqlSafe, Decode, Encode, Row as _, Type};

use super::super::replies::ClaimReply;
use super::super::sql::call::{RowCall, Rows};
use super::super::sql::row::{Row, StoredColumns, first};
use super::super::stored::{Fetch, StoredData, StoredResponse};
use super::super::terms::{CallTerms, Token};
use crate::key::DedupKey;

/// A `uuid`, without sqlx's feature of that name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Uuid(pub(super) [u8; 16]);

// The type numbers of the catalogue: <https://github.com/postgres/postgres/blob/master/src/include/catalog/pg_type.dat>.
const UUID: PgTypeInfo = PgTypeInfo::with_oid(Oid(2950));
const UUID_ARRAY: PgTypeInfo = PgTypeInfo::with_oid(Oid(2951));
const TIMESTAMPTZ: PgTypeInfo = PgTypeInfo::with_oid(Oid(1184));

impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

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
        buffer.extend_from_slice(&self.0);
        Ok(IsNull::No)
    }
}

impl Decode<'_, Postgres> for Uuid {
    fn decode(value: PgValueRef<'_>) -> Result<Self, BoxDynError> {
        match value.format() {
            PgValueFormat::Binary => Ok(Self(value.as_bytes()?.try_into()?)),
            PgValueFormat::Text => Err("a uuid as text".into()),
        }
    }
}

/// A time as Postgres sends it, in microseconds since the year 2000.
#[derive(Debug, Clone, Copy)]
struct Time(i64);

impl Type<Postgres> for Time {
    fn type_info() -> PgTypeInfo {
        TIMESTAMPTZ
    }
}

impl Decode<'_, Postgres> for Time {
    fn decode(value: PgValueRef<'_>) -> Result<Self, BoxDynError> {
        match value.format() {
            PgValueFormat::Binary => Ok(Self(i64::from_be_bytes(value.as_bytes()?.try_into()?))),
            PgValueFormat::Text => Err("a time as text".into()),
        }
    }
}

impl From<Time> for i64 {
    /// Milliseconds since the Unix epoch.
    fn from(Time(micros): Time) -> Self {
        const YEAR_2000: i64 = 946_684_800_000;
        micros.div_euclid(1_000).saturating_add(YEAR_2000)
    }
}

impl From<Token> for Uuid {
    fn from(token: Token) -> Self {
        Self(*token.as_bytes())
    }
}

impl From<u128> for Uuid {
    fn from(hash: u128) -> Self {
        Self(hash.to_be_bytes())
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

/// Returns the primary keys of rows.
pub(super) fn row_keys(keys: &[DedupKey]) -> Vec<Uuid> {
    keys.iter().map(|key| key_hash(key).into()).collect()
}

/// Returns a key's part of its advisory lock; the statements add the table's part.
pub(super) fn advisory_lock(hash: u128) -> i64 {
    let [.., a, b, c, d, e, f, g, h] = hash.to_be_bytes();
    i64::from_be_bytes([a, b, c, d, e, f, g, h])
}

/// How many advisory locks a transaction takes for its keys. The server's lock table has by default room for 64
/// locks for each connection.
const MAX_LOCKS: usize = 63;

/// Returns the locks that a transaction takes for its keys, in the order of the keys.
///
/// The last keys of a large delivery share one lock, which stands for the whole set: so a copy of the
/// delivery is in flight at once, with all its keys. A different call that names a key without a lock of
/// its own waits for the row, as long as `lock_timeout` allows.
pub(super) fn advisory_locks(rows: &[RowCall<'_>]) -> Vec<i64> {
    let mut locks: Vec<i64> = rows.iter().map(|row| advisory_lock(row.hash)).collect();
    if locks.len() > MAX_LOCKS {
        let mut set = Sha256::new();
        for row in rows {
            set.update(row.hash.to_be_bytes());
        }
        let mut last = [0; 8];
        last.copy_from_slice(&set.finalize()[..8]);
        locks[MAX_LOCKS - 1..].fill(i64::from_be_bytes(last));
    }
    locks
}

/// The index of each key in a list.
pub(super) struct KeyIndexes(Vec<(u128, usize)>);

impl KeyIndexes {
    pub(super) fn new(rows: &[RowCall<'_>]) -> Self {
        let mut indexes: Vec<_> = rows.iter().map(|row| row.hash).zip(0..).collect();
        // The rows of a batch are sorted already.
        indexes.sort_unstable();
        Self(indexes)
    }

    /// Returns each returned row, which begins with its key, with the index of that key.
    pub(super) fn of_rows(&self, rows: Vec<PgRow>) -> Result<Vec<(usize, PgRow)>, sqlx::Error> {
        let mut found = Vec::with_capacity(rows.len());
        for row in rows {
            // A claim in a transaction that claims nothing returns a row without a key.
            let Some(Uuid(hash)) = row.try_get(0)? else { continue };
            let hash = u128::from_be_bytes(hash);
            if let Ok(at) = self.0.binary_search_by_key(&hash, |(hash, _)| *hash) {
                found.push((self.0[at].1, row));
            }
        }
        Ok(found)
    }
}

/// The longest time that is added to a `timestamptz`: ten thousand years.
pub(super) const MAX_MS: i64 = 10_000 * 365 * 86_400_000;

pub(super) fn retention_ms(terms: &CallTerms) -> i64 {
    terms.retention_ms().min(MAX_MS)
}

fn lease_ms(terms: &CallTerms) -> i64 {
    terms.lease_ms().min(MAX_MS)
}

type Bound<'k> = Query<'k, Postgres, PgArguments>;

/// The parameters of a statement that follow those of every statement. The types of the events come after them.
pub(super) enum Extra {
    Nothing,
    /// A lease in milliseconds.
    Lease(i64),
    /// How long to wait for a row.
    LockTimeout(String),
    Data(DataColumns),
}

impl Extra {
    /// The lease of calls with equal terms.
    pub(super) fn lease(rows: &[RowCall<'_>]) -> Self {
        Self::Lease(rows.first().map_or(0, |row| lease_ms(row.terms)))
    }
}

/// What `list` selects.
#[derive(Debug)]
pub(super) struct Selection<'f> {
    pub(super) after: Uuid,
    pub(super) state: Option<i32>,
    pub(super) namespace: Option<&'f str>,
    pub(super) since_ms: Option<i64>,
    pub(super) attempts_over: Option<i64>,
    pub(super) id_part: Option<&'f str>,
    pub(super) limit: i64,
}

/// The parameters of a statement.
#[derive(Clone, Copy)]
pub(super) enum Params<'k> {
    None,
    /// Keys with equal terms, and the parameters after these.
    Rows(&'k KeyColumns<'k>, &'k Extra),
    /// The same, and the versions of the rows, which come last.
    Versions(&'k KeyColumns<'k>, &'k Extra, &'k [i64]),
    Keys(&'k [Uuid]),
    /// A key's part of its advisory lock.
    Lock(i64),
    /// How many keys.
    Purge(i64),
    List(&'k Selection<'k>),
}

impl<'k> Params<'k> {
    pub(super) fn bind(self, sql: &Arc<str>) -> Bound<'k> {
        let query = sqlx::query(AssertSqlSafe(Arc::clone(sql)));
        match self {
            Self::None => query,
            Self::Rows(columns, extra) => columns.bind_with(query, extra),
            Self::Versions(columns, extra, versions) => {
                columns.bind_with(query, extra).bind(versions)
            }
            Self::Keys(keys) => query.bind(keys),
            Self::Lock(lock) => query.bind(lock),
            Self::Purge(limit) => query.bind(limit),
            Self::List(list) => query
                .bind(list.after)
                .bind(list.state)
                .bind(list.namespace)
                .bind(list.since_ms)
                .bind(list.attempts_over)
                .bind(list.id_part)
                .bind(list.limit),
        }
    }
}

/// Returns the primary keys of rows.
pub(super) fn uuids(rows: &[RowCall<'_>]) -> Vec<Uuid> {
    rows.iter().map(|row| row.hash.into()).collect()
}

/// Returns the types of the events; `None` if no event has a type.
fn event_types<'k>(rows: &'k [RowCall<'k>]) -> Option<Vec<Option<&'k str>>> {
    let has_types = rows.iter().any(|row| row.terms.has_event_types());
    has_types.then(|| rows.iter().map(|row| row.terms.event_type_for(row.key)).collect())
}

/// Keys as arrays, with their terms, which are equal.
pub(super) struct KeyColumns<'k> {
    keys: Vec<Uuid>,
    namespaces: Vec<&'k str>,
    ids: Vec<&'k str>,
    tokens: Vec<Uuid>,
    retention: i64,
    /// `None` if no event has a type.
    pub(super) event_types: Option<Vec<Option<&'k str>>>,
}

impl<'k> KeyColumns<'k> {
    pub(super) fn new(rows: &'k [RowCall<'k>]) -> Self {
        Self {
            keys: uuids(rows),
            namespaces: rows.iter().map(|row| row.key.namespace()).collect(),
            ids: rows.iter().map(|row| row.key.id()).collect(),
            tokens: rows.iter().map(|row| row.token().into()).collect(),
            retention: rows.first().map_or(0, |row| retention_ms(row.terms)),
            event_types: event_types(rows),
        }
    }

    fn bind_with<'q>(&'q self, query: Bound<'q>, extra: &'q Extra) -> Bound<'q> {
        let query = query
            .bind(&self.keys)
            .bind(&self.namespaces)
            .bind(&self.ids)
            .bind(&self.tokens)
            .bind(self.retention);
        let query = match extra {
            Extra::Nothing => return query,
            Extra::LockTimeout(timeout) => return query.bind(timeout),
            Extra::Lease(lease) => query.bind(lease),
            Extra::Data(data) => data.bind(query),
        };
        query.bind(&self.event_types)
    }

    /// Binds the keys of one call, in a transaction.
    pub(super) fn bind_in_transaction<'q>(
        &'q self,
        sql: &Arc<str>,
        terms: &CallTerms,
    ) -> Bound<'q> {
        sqlx::query(AssertSqlSafe(Arc::clone(sql)))
            .bind(&self.keys)
            .bind(&self.namespaces)
            .bind(&self.ids)
            .bind(Uuid::from(terms.token()))
            .bind(retention_ms(terms))
            .bind(lease_ms(terms))
    }
}

fn status(response: &StoredResponse) -> Option<i16> {
    i16::try_from(response.status.as_u16()).ok()
}

/// The data to store with keys, as arrays with nulls. A column that is null as a whole has nothing to
/// store.
#[derive(Default)]
pub(super) struct DataColumns {
    payloads: Option<Vec<Option<Vec<u8>>>>,
    statuses: Option<Vec<Option<i16>>>,
    headers: Option<Vec<Option<String>>>,
    bodies: Option<Vec<Option<Vec<u8>>>>,
}

impl DataColumns {
    pub(super) fn new(rows: &Rows<'_>) -> Self {
        if !rows.stores_data() {
            return Self::default();
        }
        let data = rows.iter().map(|row| row.terms.stored_data_for(row.key).unwrap_or_default());
        let data: Vec<StoredData> = data.collect();
        let responses = || data.iter().map(|data| data.response.as_deref());
        Self {
            payloads: Some(data.iter().map(|data| Some(data.payload_sha256?.to_vec())).collect()),
            statuses: Some(responses().map(|response| status(response?)).collect()),
            headers: Some(responses().map(|response| Some(response?.headers_json())).collect()),
            bodies: Some(responses().map(|response| Some(response?.body.to_vec())).collect()),
        }
    }

    pub(super) fn bind<'k>(&'k self, query: Bound<'k>) -> Bound<'k> {
        query.bind(&self.payloads).bind(&self.statuses).bind(&self.headers).bind(&self.bodies)
    }
}

/// Returns a row that was read with as much of its stored data. Only the callers of the row fail if a
/// column does not decode.
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
    let time = |column: usize| row.try_get::<Time, _>(column).map(i64::from);
    let maybe = |column: usize| {
        let time = row.try_get::<Option<Time>, _>(column);
        time.map(|time| time.map(i64::from))
    };
    let stored = match fetch {
        Fetch::Nothing => StoredColumns::default(),
        Fetch::Digest => StoredColumns::new(row.try_get("payload_sha256")?, Ok(None)),
        Fetch::DigestAndResponse => {
            StoredColumns::new(row.try_get("payload_sha256")?, response_columns(row))
        }
    };
    // By position, in the order of `sql/get.sql` and `sql/read*.sql`: a lookup by name costs more.
    let token: Option<Uuid> = row.try_get(1)?;
    let attempts: i32 = row.try_get(2)?;
    Ok(Row {
        token: token.map(|token| token.0),
        version: row.try_get(VERSION)?,
        attempts: attempts.into(),
        takeover: row.try_get(3)?,
        first_seen_at: time(4)?,
        completed_at: maybe(5)?,
        expires_at: time(6)?,
        lease_until: maybe(7)?,
        now: time(8)?,
        stored,
        unreadable: None,
    })
}

/// Returns status, headers and body of the response that a row stores.
fn response_columns(row: &PgRow) -> Result<Option<(i64, String, Vec<u8>)>, sqlx::Error> {
    let status: Option<i64> = row.try_get("response_status")?;
    let headers: Option<String> = row.try_get("response_headers")?;
    let body: Option<Vec<u8>> = row.try_get("response_body")?;
    Ok(status.zip(headers).zip(body).map(|((status, headers), body)| (status, headers, body)))
}

/// Returns the reply of a row that a claim wrote: its key, attempts and takeover.
pub(super) fn claimed_row(row: &PgRow) -> Result<ClaimReply, sqlx::Error> {
    // By position, in the order of RETURNING in `sql/*claim*.sql`.
    let attempts: i32 = row.try_get(1)?;
    Ok(first(attempts.into(), row.try_get(2)?))
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
