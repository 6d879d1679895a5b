//! Postgres's rows, parameters and errors.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;

use sha2::{Digest, Sha256};
use sqlx::encode::IsNull;
use sqlx::error::{BoxDynError, DatabaseError};
use sqlx::postgres::types::Oid;
use sqlx::postgres::{
    PgArgumentBuffer, PgArguments, PgHasArrayType, PgRow, PgTypeInfo, PgValueFormat, PgValueRef,
    Postgres,
};
use sqlx::query::Query;
use sqlx::{AssertSqlSafe, Decode, Encode, Row, Type};

use super::super::sql::{self, KeptRow, Rows, Stored};
use super::super::stored::{StoredData, StoredResponse};
use super::super::terms::{CallTerms, Token};
use crate::error::Error;
use crate::key::DedupKey;

/// Sixteen bytes as a `uuid`, without asking users for sqlx's feature of that name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Uuid(pub(super) [u8; 16]);

// The catalogue's own numbers: <https://github.com/postgres/postgres/blob/master/src/include/catalog/pg_type.dat>.
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

/// A time as Postgres sends it: microseconds since the year 2000.
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

/// The primary key of a row: what the guide tells operators to compute in SQL.
pub(super) fn row_key(key: &DedupKey) -> Uuid {
    let hash = Sha256::new()
        .chain_update(key.namespace())
        .chain_update(b"\n")
        .chain_update(key.id())
        .finalize();
    let mut first = [0; 16];
    first.copy_from_slice(&hash[..16]);
    Uuid(first)
}

/// What stands for a key in a batch, in the order of rows.
pub(super) fn number(key: &DedupKey) -> u64 {
    let Uuid(bytes) = row_key(key);
    let mut first = [0; 8];
    first.copy_from_slice(&bytes[..8]);
    u64::from_be_bytes(first)
}

/// A key's part of its advisory lock; the statements add the table's.
pub(super) fn advisory_lock(key: &DedupKey) -> i64 {
    let Uuid(bytes) = row_key(key);
    let mut last = [0; 8];
    last.copy_from_slice(&bytes[8..]);
    i64::from_be_bytes(last)
}

/// How many advisory locks a transaction takes for its keys, beside the one that names its session:
/// the server's lock table has room for 64 for each connection, by default.
const MOST_LOCKS: usize = 63;

/// The locks that a transaction takes for its keys, in their order.
///
/// Of a large set the last share one, which stands for the whole set: so a copy of the delivery is
/// in flight at once, and all of it. Whoever else asks for a key without a lock of its own waits for
/// the row, for as long as `lock_timeout` says.
pub(super) fn advisory_locks(keys: &[DedupKey]) -> Vec<i64> {
    let mut locks: Vec<i64> = keys.iter().map(advisory_lock).collect();
    if locks.len() > MOST_LOCKS {
        let mut set = Sha256::new();
        for key in keys {
            set.update(row_key(key).0);
        }
        let mut last = [0; 8];
        last.copy_from_slice(&set.finalize()[..8]);
        locks[MOST_LOCKS - 1..].fill(i64::from_be_bytes(last));
    }
    locks
}

/// Where each key stands in a list.
pub(super) struct Places(Vec<(Uuid, usize)>);

impl Places {
    pub(super) fn new(keys: &[Uuid]) -> Self {
        let mut places: Vec<_> = keys.iter().copied().zip(0..).collect();
        // As batches come already.
        places.sort_unstable();
        Self(places)
    }

    fn of(&self, key: Uuid) -> Option<usize> {
        let at = self.0.binary_search_by_key(&key, |(key, _)| *key).ok()?;
        Some(self.0[at].1)
    }

    /// Each of the rows that begin with a key, with the place of that.
    pub(super) fn of_rows(&self, rows: Vec<PgRow>) -> Result<Vec<(usize, PgRow)>, sqlx::Error> {
        let mut found = Vec::with_capacity(rows.len());
        for row in rows {
            if let Some(place) = self.of(row.try_get(0)?) {
                found.push((place, row));
            }
        }
        Ok(found)
    }
}

pub(super) fn row_keys(keys: &[DedupKey]) -> Vec<Uuid> {
    keys.iter().map(row_key).collect()
}

/// Keys as parameters, and the terms under which each is asked for.
pub(super) struct Columns<'k> {
    keys: Vec<Uuid>,
    namespaces: Vec<&'k str>,
    ids: Vec<&'k str>,
    tokens: Vec<Uuid>,
    retentions: Vec<i64>,
    leases: Vec<i64>,
}

impl<'k> Columns<'k> {
    pub(super) fn new(rows: &'k Rows<'_>) -> Self {
        let call_terms = || (0..rows.len()).map(|place| rows.terms(place));
        Self {
            keys: row_keys(&rows.keys),
            namespaces: rows.keys.iter().map(DedupKey::namespace).collect(),
            ids: rows.keys.iter().map(DedupKey::id).collect(),
            tokens: call_terms().map(|terms| terms.token().into()).collect(),
            retentions: call_terms().map(|terms| terms.retention_ms().min(MOST_MS)).collect(),
            leases: call_terms().map(|terms| terms.lease_ms().min(MOST_MS)).collect(),
        }
    }

    pub(super) fn places(&self) -> Places {
        Places::new(&self.keys)
    }

    fn bind<'q>(&'q self, query: Bound<'q>) -> Bound<'q> {
        query
            .bind(&self.keys)
            .bind(&self.namespaces)
            .bind(&self.ids)
            .bind(&self.tokens)
            .bind(&self.retentions)
            .bind(&self.leases)
    }

    /// All under the terms of one call.
    pub(super) fn bind_within<'q>(&'q self, sql: &Arc<str>, terms: &CallTerms) -> Bound<'q> {
        sqlx::query(AssertSqlSafe(Arc::clone(sql)))
            .bind(&self.keys)
            .bind(&self.namespaces)
            .bind(&self.ids)
            .bind(Uuid::from(terms.token()))
            .bind(terms.retention_ms().min(MOST_MS))
            .bind(terms.lease_ms().min(MOST_MS))
    }
}

/// The longest time that `timestamptz` is asked to add, ten thousand years.
pub(super) const MOST_MS: i64 = 10_000 * 365 * 86_400_000;

/// What a statement is asked.
#[derive(Clone, Copy)]
pub(super) enum Params<'k> {
    None,
    /// One key, for how long to wait for a lock, and whether to keep something.
    One(&'k Rows<'k>, &'static str, bool),
    Keys(&'k Columns<'k>, &'static str),
    Keeping(&'k Columns<'k>, &'static str, &'k KeptColumns),
    /// Claims, and completions with what to keep.
    Mixed(&'k Columns<'k>, &'static str, &'k Columns<'k>, &'k KeptColumns),
    Read(&'k [Uuid]),
    Locks(&'k [i64]),
    /// How many keys, and from which expiry on, in milliseconds.
    Purge(i64, f64),
}

impl<'k> Params<'k> {
    pub(super) fn bind(self, sql: &Arc<str>) -> Bound<'k> {
        let query = sqlx::query(AssertSqlSafe(Arc::clone(sql)));
        match self {
            Self::None => query,
            Self::One(rows, wait, keeps) => {
                let (key, terms) = (&rows.keys[0], rows.terms(0));
                let query = query
                    .bind(row_key(key))
                    .bind(key.namespace())
                    .bind(key.id())
                    .bind(Uuid::from(terms.token()))
                    .bind(terms.retention_ms().min(MOST_MS))
                    .bind(terms.lease_ms().min(MOST_MS))
                    .bind(wait);
                if keeps {
                    bind_kept(query, &terms.stored_data_for(key).unwrap_or_default())
                } else {
                    query
                }
            }
            Self::Keys(columns, wait) => columns.bind(query).bind(wait),
            Self::Keeping(columns, wait, kept) => kept.bind(Self::Keys(columns, wait).bind(sql)),
            Self::Mixed(claims, wait, completions, kept) => {
                kept.bind(completions.bind(Self::Keys(claims, wait).bind(sql)))
            }
            Self::Read(keys) => query.bind(keys),
            Self::Locks(locks) => query.bind(locks),
            Self::Purge(limit, from_ms) => query.bind(limit).bind(from_ms),
        }
    }
}

type Bound<'k> = Query<'k, Postgres, PgArguments>;

/// What is kept with one key.
fn bind_kept<'k>(query: Bound<'k>, kept: &StoredData) -> Bound<'k> {
    let response = kept.response.as_deref();
    query
        .bind(kept.payload_sha256.map(|digest| digest.to_vec()))
        .bind(response.and_then(status))
        .bind(response.map(StoredResponse::headers_json))
        .bind(response.map(|response| response.body.to_vec()))
}

fn status(response: &StoredResponse) -> Option<i16> {
    i16::try_from(response.status.as_u16()).ok()
}

/// What is kept with keys, as parameters; null where nothing is.
#[derive(Default)]
pub(super) struct KeptColumns {
    pub(super) payloads: Option<Vec<Option<Vec<u8>>>>,
    pub(super) statuses: Option<Vec<Option<i16>>>,
    pub(super) headers: Option<Vec<Option<String>>>,
    pub(super) bodies: Option<Vec<Option<Vec<u8>>>>,
}

impl KeptColumns {
    pub(super) fn new(rows: &Rows<'_>) -> Self {
        if !rows.keeps() {
            return Self::default();
        }
        let keys = rows.keys.iter().enumerate();
        let kept = keys.map(|(at, key)| rows.terms(at).stored_data_for(key).unwrap_or_default());
        let kept: Vec<StoredData> = kept.collect();
        let responses = || kept.iter().map(|kept| kept.response.as_deref());
        Self {
            payloads: Some(kept.iter().map(|kept| Some(kept.payload_sha256?.to_vec())).collect()),
            statuses: Some(responses().map(|response| status(response?)).collect()),
            headers: Some(responses().map(|response| Some(response?.headers_json())).collect()),
            bodies: Some(responses().map(|response| Some(response?.body.to_vec())).collect()),
        }
    }

    fn bind<'k>(&'k self, query: Bound<'k>) -> Bound<'k> {
        query.bind(&self.payloads).bind(&self.statuses).bind(&self.headers).bind(&self.bodies)
    }
}

/// What a complete row has kept.
pub(super) fn kept(row: &PgRow) -> Result<KeptRow, sqlx::Error> {
    Ok(KeptRow {
        payload_sha256: row.try_get("payload_sha256")?,
        status: row.try_get("response_status")?,
        headers: row.try_get("response_headers")?,
        body: row.try_get("response_body")?,
    })
}

/// A row as it is read, from this column on.
pub(super) fn stored(row: &PgRow, from: usize) -> Result<Stored, sqlx::Error> {
    let time = |column: usize| row.try_get::<Time, _>(from + column).map(i64::from);
    let maybe = |column: usize| {
        let time = row.try_get::<Option<Time>, _>(from + column);
        time.map(|time| time.map(i64::from))
    };
    let token: Option<Uuid> = row.try_get(from + 1)?;
    let attempts: i32 = row.try_get(from + 2)?;
    Ok(Stored {
        token: token.map(|token| token.0),
        attempts: attempts.into(),
        takeover: row.try_get(from + 3)?,
        first_seen_at: time(4)?,
        completed_at: maybe(5)?,
        expires_at: time(6)?,
        lease_until: maybe(7)?,
        now: time(8)?,
    })
}

/// The place of a row's key, which `WITH ORDINALITY` counts from 1.
pub(super) fn place(row: &PgRow) -> Result<usize, sqlx::Error> {
    let place: i64 = row.try_get("place")?;
    usize::try_from(place - 1).map_err(|error| sqlx::Error::Decode(error.into()))
}

pub(super) fn store_error(context: &'static str, error: sqlx::Error) -> Error {
    sql::store_error(context, error, is_refusal)
}

// SQLSTATEs: <https://www.postgresql.org/docs/current/errcodes-appendix.html>.
const LOCK_NOT_AVAILABLE: &str = "55P03";
const SERIALIZATION_FAILURE: &str = "40001";
const DEADLOCK_DETECTED: &str = "40P01";
const IN_FAILED_TRANSACTION: &str = "25P02";
const READ_ONLY_TRANSACTION: &str = "25006";
const UNDEFINED_TABLE: &str = "42P01";
const NO_SUCH_SAVEPOINT: &str = "3B001";
const NO_ACTIVE_TRANSACTION: &str = "25P01";

/// Whether a statement that ends with this has surely changed nothing: one that the server answers
/// with an error is rolled back, unless the connection or the server ends with it (08, 57P, XX), it
/// says so itself (40003), or it is a pooler's that has lost the server (58).
fn is_refusal(answer: &dyn DatabaseError) -> bool {
    let Some(code) = answer.code() else { return false };
    !["08", "57P", "XX", "40003", "58"].iter().any(|class| code.starts_with(class))
}

/// The table is not there, or not any more.
pub(super) fn is_without_table(error: &Error) -> bool {
    let Some(source) = error.source() else { return false };
    // As all callers of a batch have it.
    let shared = source.downcast_ref::<Arc<dyn StdError + Send + Sync>>();
    let error = source.downcast_ref().or_else(|| shared?.downcast_ref());
    error.is_some_and(|error| has_code(error, &[UNDEFINED_TABLE]))
}

fn has_code(error: &sqlx::Error, codes: &[&str]) -> bool {
    let code = error.as_database_error().and_then(DatabaseError::code);
    code.is_some_and(|code| codes.contains(&&*code))
}

/// Somebody's open transaction holds a row.
pub(super) fn is_locked(error: &sqlx::Error) -> bool {
    has_code(error, &[LOCK_NOT_AVAILABLE])
}

/// Whether it may be one row's doing: its value (22, 23, 54), its lock (55P03, 40), or what a trigger
/// says to it (P0). Everything else, every row would meet.
pub(super) fn is_of_a_row(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(DatabaseError::code);
    code.is_some_and(|code| {
        code == LOCK_NOT_AVAILABLE
            || ["22", "23", "40", "54", "P0"].iter().any(|class| code.starts_with(class))
    })
}

/// The same statement may succeed at once.
pub(super) fn is_conflict(error: &sqlx::Error) -> bool {
    has_code(error, &[SERIALIZATION_FAILURE, DEADLOCK_DETECTED])
}

/// The server takes no writes any more, as after a failover: a new connection may lead elsewhere.
pub(super) fn is_read_only(error: &sqlx::Error) -> bool {
    has_code(error, &[READ_ONLY_TRANSACTION])
}

/// The handler has broken the transaction, or left something in it that cannot be committed: an
/// error that it swallowed (25P02), a constraint that is looked at last (class 23), or a session in
/// which the table cannot be named or written any more, as it could at the claim (class 42).
pub(super) fn has_lost_its_transaction(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(DatabaseError::code);
    code.is_some_and(|code| {
        code == IN_FAILED_TRANSACTION || code.starts_with("23") || code.starts_with("42")
    })
}

/// There is no savepoint of that name, or no transaction that could have one.
pub(super) fn is_no_savepoint(error: &sqlx::Error) -> bool {
    has_code(error, &[NO_SUCH_SAVEPOINT, NO_ACTIVE_TRANSACTION])
}

/// The connection is gone, as all of a pool's are after the server was restarted.
pub(super) fn is_broken(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Io(_) | sqlx::Error::Protocol(_) | sqlx::Error::WorkerCrashed => true,
        sqlx::Error::Database(answer) => {
            answer.code().is_some_and(|code| code.starts_with("57P") || code.starts_with("08"))
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_key_never_changes() {
        // Pinned: another one would run every stored event again.
        let key = DedupKey::new("github", "72d3162e-cc78-11e3-81ab-4c9367dc0958").unwrap();
        let hex: String = row_key(&key).0.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, "45c7e4d103b89e99d136273d963606e0");
    }
}
