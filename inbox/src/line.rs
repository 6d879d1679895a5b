//! What the databases share: a [`Line`], the bounds of the calls, and the reading of rows. Numbers
//! of a row are 64 bits wide, and times are milliseconds since 1970.

use std::future::Future;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use sqlx::{ColumnIndex, Decode, Row, Type};
use tokio::sync::{Mutex, MutexGuard};
use tokio::time::timeout;
use tower_dedup::adapter::contract::Token;

use crate::inspect::{Count, ShownRow};
use crate::row::{Parked, Place, TakenRow};
use crate::table::{TableError, parse_keys};

/// The bound on a call of the writer.
pub(crate) const STORE: Duration = Duration::from_secs(1);
/// The bound on a call of the loop.
pub(crate) const CHANGE: Duration = Duration::from_secs(2);
/// The bound on a call of an operator, and on one that reads the whole table.
pub(crate) const INSPECT: Duration = Duration::from_secs(30);

/// One connection, opened when it is needed.
pub(crate) struct Line<C>(Mutex<Option<C>>);

/// A connection in use. Unless it is [given back](Self::back), it is closed, and its transaction
/// rolled back.
pub(crate) struct Lent<'l, C> {
    pub(crate) connection: C,
    place: MutexGuard<'l, Option<C>>,
}

impl<C> Line<C> {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(None))
    }

    pub(crate) async fn lend(
        &self,
        open: impl Future<Output = Result<C, sqlx::Error>>,
    ) -> Result<Lent<'_, C>, sqlx::Error> {
        let mut place = self.0.lock().await;
        let connection = match place.take() {
            Some(connection) => connection,
            None => open.await?,
        };
        Ok(Lent { connection, place })
    }
}

impl<C> Lent<'_, C> {
    pub(crate) fn back(mut self) {
        *self.place = Some(self.connection);
    }
}

/// Runs a call within `bound`. A call that is late is dropped with its connection.
pub(crate) async fn bounded<T>(
    bound: Duration,
    call: impl Future<Output = Result<T, sqlx::Error>> + Send,
) -> Result<T, TableError> {
    match timeout(bound, call).await {
        Ok(done) => done.map_err(TableError::from),
        Err(_elapsed) => Err(sqlx::Error::Io(std::io::ErrorKind::TimedOut.into()).into()),
    }
}

impl From<sqlx::Error> for TableError {
    fn from(error: sqlx::Error) -> Self {
        let code = error.as_database_error().and_then(|error| error.code()).unwrap_or_default();
        let is_of_a_row = match code.parse::<u32>() {
            // SQLite: a value that is too large (18), or that a constraint of somebody refuses
            // (19).
            Ok(code) if code < 10_000 => matches!(code & 0xff, 18 | 19),
            // Postgres, five characters: a value (22, 23, 54), a lock (55P03, 40), or a trigger
            // (P0).
            _ => ["22", "23", "40", "54", "55P03", "P0"].iter().any(|it| code.starts_with(it)),
        };
        Self { is_of_a_row, error: error.into() }
    }
}

/// Reads service, namespace, reason, number, age of the oldest and bytes. `None` for a reason of a
/// newer version.
pub(crate) fn counted<'r, R: Row>(row: &'r R) -> Result<Option<Count>, sqlx::Error>
where
    usize: ColumnIndex<R>,
    i64: Decode<'r, R::Database> + Type<R::Database>,
    String: Decode<'r, R::Database> + Type<R::Database>,
{
    let parked = match row.try_get::<Option<String>, _>(2)? {
        None => None,
        Some(reason) => match Parked::parse(&reason) {
            None => return Ok(None),
            known => known,
        },
    };
    let number = |at: usize| Ok::<_, sqlx::Error>(row.try_get::<i64, _>(at)?.max(0).unsigned_abs());
    Ok(Some(Count {
        service: row.try_get(0)?,
        namespace: row.try_get(1)?,
        parked,
        rows: number(3)?,
        oldest: Duration::from_millis(number(4)?),
        bytes: number(5)?,
    }))
}

pub(crate) fn shown<'r, R: Row>(row: &'r R) -> Result<ShownRow, sqlx::Error>
where
    &'static str: ColumnIndex<R>,
    bool: Decode<'r, R::Database> + Type<R::Database>,
    i64: Decode<'r, R::Database> + Type<R::Database>,
    String: Decode<'r, R::Database> + Type<R::Database>,
    Vec<u8>: Decode<'r, R::Database> + Type<R::Database>,
{
    let at =
        |ms: i64| -> SystemTime { UNIX_EPOCH + Duration::from_millis(ms.max(0).unsigned_abs()) };
    let number = |name: &'static str| {
        let number: i64 = row.try_get(name)?;
        Ok::<u32, sqlx::Error>(u32::try_from(number).unwrap_or(u32::MAX))
    };
    let parked: Option<String> = row.try_get("parked")?;
    Ok(ShownRow {
        seq: row.try_get("seq")?,
        service: row.try_get("service")?,
        namespace: row.try_get("namespace")?,
        keys: parse_keys(&row.try_get::<String, _>("keys")?),
        event_type: row.try_get("event_type")?,
        received: at(row.try_get("received")?),
        due: row.try_get::<Option<i64>, _>("due")?.map(at),
        is_running: row.try_get("is_running")?,
        parked: parked.as_deref().and_then(Parked::parse),
        attempts: number("attempts")?,
        deaths: number("deaths")?,
        answered: row.try_get("answered")?,
        method: row.try_get("method")?,
        target: text(&row.try_get::<Vec<u8>, _>("target")?),
        verified: row.try_get("verified")?,
        last: row.try_get("last")?,
        body_bytes: row.try_get::<i64, _>("body_bytes")?.unsigned_abs(),
    })
}

pub(crate) fn taken<'r, R: Row>(row: &'r R, turn: Token) -> Result<TakenRow, sqlx::Error>
where
    &'static str: ColumnIndex<R>,
    bool: Decode<'r, R::Database> + Type<R::Database>,
    i64: Decode<'r, R::Database> + Type<R::Database>,
    String: Decode<'r, R::Database> + Type<R::Database>,
    Vec<u8>: Decode<'r, R::Database> + Type<R::Database>,
{
    Ok(TakenRow {
        at: Place { seq: row.try_get("seq")?, version: row.try_get("version")?, turn },
        namespace: row.try_get("namespace")?,
        keys: row.try_get("keys")?,
        attempts: row.try_get("attempts")?,
        misrouted: row.try_get("misrouted")?,
        answered: row.try_get("answered")?,
        method: row.try_get("method")?,
        target: text(&row.try_get::<Vec<u8>, _>("target")?),
        headers: row.try_get("headers")?,
        body: row.try_get::<Option<Vec<u8>>, _>("body")?.map(Into::into),
        verified: row.try_get("verified")?,
    })
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
