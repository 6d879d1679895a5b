//! Postgres's rows, parameters and errors.

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

use super::super::contract::{Receipt, Token};
use super::super::kept::{Kept, StoredResponse};
use super::super::sql::{self, KeptRow, Rows, Stored};
use crate::error::Error;
use crate::key::DedupKey;

/// Sixteen bytes as a `uuid`, without asking users for sqlx's feature of that name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Uuid(pub(super) [u8; 16]);

// The catalogue's own numbers: <https://github.com/postgres/postgres/blob/master/src/include/catalog/pg_type.dat>.
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

/// A key's part of its advisory lock; the statements add the table's.
pub(super) fn advisory_lock(key: &DedupKey) -> i64 {
    let Uuid(bytes) = row_key(key);
    let mut last = [0; 8];
    last.copy_from_slice(&bytes[8..]);
    i64::from_be_bytes(last)
}

/// Keys as parameters.
pub(super) struct Columns<'k> {
    pub(super) keys: Vec<Uuid>,
    pub(super) namespaces: Vec<&'k str>,
    pub(super) ids: Vec<&'k str>,
}

impl<'k> Columns<'k> {
    pub(super) fn new(keys: &'k [DedupKey]) -> Self {
        Self {
            keys: keys.iter().map(row_key).collect(),
            namespaces: keys.iter().map(DedupKey::namespace).collect(),
            ids: keys.iter().map(DedupKey::id).collect(),
        }
    }
}

/// The terms of each key, where they differ.
pub(super) struct TermColumns {
    tokens: Vec<Uuid>,
    retentions: Vec<i64>,
    leases: Vec<i64>,
}

impl TermColumns {
    pub(super) fn new(receipts: &[&Receipt]) -> Self {
        let most = |ms: i64| ms.min(MOST_MS);
        Self {
            tokens: receipts.iter().map(|receipt| receipt.token().into()).collect(),
            retentions: receipts.iter().map(|receipt| most(receipt.retention_ms())).collect(),
            leases: receipts.iter().map(|receipt| most(receipt.lease_ms())).collect(),
        }
    }
}

/// The longest time that `timestamptz` is asked to add, ten thousand years.
const MOST_MS: i64 = 10_000 * 365 * 86_400_000;

/// What a statement is asked.
#[derive(Clone, Copy)]
pub(super) enum Params<'k> {
    None,
    Keys(&'k Columns<'k>, &'k Receipt),
    Keeping(&'k Columns<'k>, &'k Receipt, &'k KeptColumns),
    Each(&'k Columns<'k>, &'k TermColumns),
    EachKeeping(&'k Columns<'k>, &'k TermColumns, &'k KeptColumns),
    Read(&'k Columns<'k>),
    Locks(&'k [i64]),
    Limit(i64),
}

impl<'k> Params<'k> {
    pub(super) fn bind(self, sql: &Arc<str>) -> Query<'k, Postgres, PgArguments> {
        let query = sqlx::query(AssertSqlSafe(Arc::clone(sql)));
        match self {
            Self::None => query,
            Self::Keys(columns, receipt) => query
                .bind(&columns.keys)
                .bind(&columns.namespaces)
                .bind(&columns.ids)
                .bind(Uuid::from(receipt.token()))
                .bind(receipt.retention_ms().min(MOST_MS))
                .bind(receipt.lease_ms().min(MOST_MS)),
            Self::Each(columns, terms) => query
                .bind(&columns.keys)
                .bind(&columns.namespaces)
                .bind(&columns.ids)
                .bind(&terms.tokens)
                .bind(&terms.retentions)
                .bind(&terms.leases),
            Self::Keeping(columns, receipt, kept) => {
                kept.bind(Self::Keys(columns, receipt).bind(sql))
            }
            Self::EachKeeping(columns, terms, kept) => {
                kept.bind(Self::Each(columns, terms).bind(sql))
            }
            Self::Read(columns) => query.bind(&columns.keys),
            Self::Locks(locks) => query.bind(locks),
            Self::Limit(limit) => query.bind(limit),
        }
    }
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
        let kept: Vec<Kept> =
            keys.map(|(at, key)| rows.receipt(at).kept_for(key).unwrap_or_default()).collect();
        let responses = || kept.iter().map(|kept| kept.response.as_deref());
        let status = |response: &StoredResponse| i16::try_from(response.status.as_u16()).ok();
        Self {
            payloads: Some(kept.iter().map(|kept| Some(kept.payload_sha256?.to_vec())).collect()),
            statuses: Some(responses().map(|response| status(response?)).collect()),
            headers: Some(responses().map(|response| Some(response?.headers_json())).collect()),
            bodies: Some(responses().map(|response| Some(response?.body.to_vec())).collect()),
        }
    }

    fn bind<'k>(
        &'k self,
        query: Query<'k, Postgres, PgArguments>,
    ) -> Query<'k, Postgres, PgArguments> {
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

/// A row that a left join may have left out.
pub(super) fn stored(row: &PgRow) -> Result<Option<Stored>, sqlx::Error> {
    let Some(attempts) = row.try_get("attempts")? else { return Ok(None) };
    let token: Option<Uuid> = row.try_get("token")?;
    Ok(Some(Stored {
        token: token.map(|token| token.0),
        attempts,
        takeover: row.try_get("takeover")?,
        first_seen_at: row.try_get("first_seen_at")?,
        completed_at: row.try_get("completed_at")?,
        expires_at: row.try_get("expires_at")?,
        lease_until: row.try_get("lease_until")?,
        now: row.try_get("now")?,
    }))
}

/// The place of a row's key, which `WITH ORDINALITY` counts from 1.
pub(super) fn place(row: &PgRow) -> Result<usize, sqlx::Error> {
    let place: i64 = row.try_get("place")?;
    usize::try_from(place - 1).map_err(|error| sqlx::Error::Decode(error.into()))
}

/// What each row says, in its key's place.
pub(super) fn placed<T>(
    keys: &[DedupKey],
    rows: &[PgRow],
    read: impl Fn(&PgRow) -> Result<Option<T>, sqlx::Error>,
) -> Result<Vec<Option<T>>, sqlx::Error> {
    let mut found: Vec<Option<T>> = keys.iter().map(|_| None).collect();
    for row in rows {
        if let Some(slot) = found.get_mut(place(row)?) {
            *slot = read(row)?;
        }
    }
    Ok(found)
}

/// Each returned row with the place of its key.
pub(super) fn matched<'r>(
    keys: &[DedupKey],
    rows: &'r [PgRow],
) -> Result<Vec<(usize, &'r PgRow)>, sqlx::Error> {
    sql::matched(keys.iter().map(row_key), rows, |row| row.try_get("key"))
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
const NO_SUCH_SAVEPOINT: &str = "3B001";
const NO_ACTIVE_TRANSACTION: &str = "25P01";

/// Whether a statement that ends with this has surely changed nothing: one that the server answers
/// with an error is rolled back, unless the connection or the server ends with it.
fn is_refusal(answer: &dyn DatabaseError) -> bool {
    let Some(code) = answer.code() else { return false };
    !["08", "57P", "XX"].iter().any(|class| code.starts_with(class))
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
/// error that it swallowed (25P02), or a constraint that is looked at last (class 23).
pub(super) fn has_lost_its_transaction(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(DatabaseError::code);
    code.is_some_and(|code| code == IN_FAILED_TRANSACTION || code.starts_with("23"))
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
