//! The parts that the databases share: the [`Lines`] of a table, and the reading of rows. Numbers
//! of a row are 64 bits wide, and times are milliseconds since 1970.

use std::future::Future;
use std::time::{Duration, UNIX_EPOCH};

use sqlx::{ColumnIndex, Decode, Row, Type};
use tokio::sync::Mutex;
use tokio::time::timeout;
use tower_dedup::adapter::contract::Token;

use crate::inspect::{Count, ShownRequest, ShownRow};
use crate::row::{Parked, Place, TakenRow};
use crate::table::{Swept, TableError, Took};

/// One connection, opened when it is needed, and the bound on a call.
pub(crate) struct Line<C> {
    bound: Duration,
    connection: Mutex<Option<C>>,
}

/// The connections of a table.
pub(crate) struct Lines<C> {
    /// Of the writer.
    pub(crate) writer: Line<C>,
    /// Of the ender and the loop.
    pub(crate) ender: Line<C>,
    /// Of operators, and of calls that read the whole table.
    pub(crate) operator: Line<C>,
}

impl<C> Lines<C> {
    pub(crate) fn new() -> Self {
        let [writer, ender, operator] = [1, 2, 30].map(|seconds| Line {
            bound: Duration::from_secs(seconds),
            connection: Mutex::new(None),
        });
        Self { writer, ender, operator }
    }
}

impl<C> Line<C> {
    /// Runs a call within the bound. After an error, and if it is late or dropped, its connection
    /// is closed, and its transaction rolled back.
    pub(crate) async fn call<T>(
        &self,
        open: impl Future<Output = Result<C, sqlx::Error>>,
        call: impl AsyncFnOnce(&mut C) -> Result<T, sqlx::Error>,
    ) -> Result<T, TableError> {
        let called = async {
            let mut place = self.connection.lock().await;
            let mut connection = match place.take() {
                Some(connection) => connection,
                None => open.await?,
            };
            let done = call(&mut connection).await?;
            *place = Some(connection);
            Ok(done)
        };
        let late = |_elapsed| Err(sqlx::Error::Io(std::io::ErrorKind::TimedOut.into()));
        timeout(self.bound, called).await.unwrap_or_else(late).map_err(TableError::from)
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

/// A row that a statement has returned. Its columns have the same names in each database.
pub(crate) struct Found<'r, R>(pub(crate) &'r R);

impl<'r, R: Row> Found<'r, R>
where
    &'static str: ColumnIndex<R>,
    bool: Decode<'r, R::Database> + Type<R::Database>,
    i64: Decode<'r, R::Database> + Type<R::Database>,
    String: Decode<'r, R::Database> + Type<R::Database>,
    Vec<u8>: Decode<'r, R::Database> + Type<R::Database>,
{
    fn get<T: Decode<'r, R::Database> + Type<R::Database>>(
        &self,
        name: &'static str,
    ) -> Result<T, sqlx::Error> {
        self.0.try_get(name)
    }

    fn number(&self, name: &'static str) -> Result<u64, sqlx::Error> {
        Ok(self.get::<i64>(name)?.max(0).unsigned_abs())
    }

    fn text(&self, name: &'static str) -> Result<String, sqlx::Error> {
        Ok(String::from_utf8_lossy(&self.get::<Vec<u8>>(name)?).into_owned())
    }

    fn parked(&self) -> Result<Option<Parked>, sqlx::Error> {
        Ok(self.get::<Option<String>>("parked")?.as_deref().and_then(Parked::parse))
    }

    /// `None` for rows that are parked for a reason of a newer version.
    pub(crate) fn counted(&self) -> Result<Option<Count>, sqlx::Error> {
        let parked = self.parked()?;
        if parked.is_none() && self.get::<Option<String>>("parked")?.is_some() {
            return Ok(None);
        }
        Ok(Some(Count {
            service: self.get("service")?,
            namespace: self.get("namespace")?,
            parked,
            rows: self.number("rows")?,
            bytes: self.number("bytes")?,
            oldest: Duration::from_millis(self.number("oldest")?),
        }))
    }

    pub(crate) fn shown(&self) -> Result<ShownRow, sqlx::Error> {
        let at = |ms: i64| UNIX_EPOCH + Duration::from_millis(ms.max(0).unsigned_abs());
        let number =
            |name| Ok::<_, sqlx::Error>(u32::try_from(self.number(name)?).unwrap_or(u32::MAX));
        let keys: String = self.get("keys")?;
        let keys = keys.split_terminator('\n').filter_map(|line| line.split_once('\t'));
        Ok(ShownRow {
            seq: self.get("seq")?,
            service: self.get("service")?,
            namespace: self.get("namespace")?,
            keys: keys.map(|(namespace, id)| (namespace.to_owned(), id.to_owned())).collect(),
            event_type: self.get("event_type")?,
            received: at(self.get("received")?),
            due: self.get::<Option<i64>>("due")?.map(at),
            is_running: self.get("is_running")?,
            parked: self.parked()?,
            attempts: number("attempts")?,
            deaths: number("deaths")?,
            answered: self.get("answered")?,
            method: self.get("method")?,
            target: self.text("target")?,
            verified: self.get("verified")?,
            last: self.get("last")?,
            body_bytes: self.number("body_bytes")?,
        })
    }

    /// Reads a row with the headers and the body of its request.
    pub(crate) fn whole(&self) -> Result<(ShownRow, ShownRequest), sqlx::Error> {
        let body: Vec<u8> = self.get("body")?;
        Ok((self.shown()?, ShownRequest { headers: self.text("headers")?, body: body.into() }))
    }

    /// Adds a row that a take has changed.
    pub(crate) fn took(&self, turn: Token, took: &mut Took) -> Result<(), sqlx::Error> {
        let namespace = self.get("namespace")?;
        if !self.get::<bool>("is_ours")? {
            took.lapsed.push((namespace, self.parked()?));
            return Ok(());
        }
        took.rows.push(TakenRow {
            at: Place { seq: self.get("seq")?, version: self.get("version")?, turn },
            namespace,
            keys: self.get("keys")?,
            attempts: self.get("attempts")?,
            misrouted: self.get("misrouted")?,
            answered: self.get("answered")?,
            method: self.get("method")?,
            target: self.text("target")?,
            headers: self.get("headers")?,
            body: self.get::<Option<Vec<u8>>>("body")?.map(Into::into),
            verified: self.get("verified")?,
        });
        Ok(())
    }

    pub(crate) fn swept(&self) -> Result<Swept, sqlx::Error> {
        Ok((self.get("service")?, self.get("namespace")?, self.parked()?))
    }
}
