//! [`Completion`]: a statement that completes events in a transaction of the handler's.

use std::fmt;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
use std::future::Future;
use std::sync::Arc;
#[cfg(feature = "sqlite")]
use std::time::Duration;

#[cfg(any(feature = "postgres", feature = "sqlite"))]
use sqlx::pool::PoolConnection;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
use sqlx::{Connection, Database, Pool, SqlSafeStr, Transaction};

#[cfg(any(feature = "postgres", feature = "sqlite"))]
use crate::error::StoreError;

/// A statement that completes the events of a delivery in the handler's own transaction, for any driver.
///
/// [`Delivery::completion`](crate::Delivery::completion) makes it. Execute it in the transaction that has the
/// handler's writes, and commit. The transaction then completes all events that the delivery holds, or it cannot
/// commit: if an event is complete already, the statement is an error. [The
/// guide](crate::guide::transactions#other-drivers) has the call of each driver.
///
/// ```
/// # #[cfg(feature = "sqlite")]
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// use tower_dedup::adapter::SqliteAdapter;
/// use tower_dedup::sqlx::{self, AssertSqlSafe, SqlitePool};
/// use tower_dedup::{BoxError, DedupKey, Deduplicator, RunOutcome};
///
/// # let dir = tempfile::tempdir()?;
/// # let url = format!("sqlite://{}?mode=rwc", dir.path().join("shop.db").display());
/// # let pool = SqlitePool::connect(&url).await?;
/// # sqlx::query("CREATE TABLE orders (id TEXT)").execute(&pool).await?;
/// let dedup = Deduplicator::transactional(SqliteAdapter::new(pool.clone()));
/// let key = DedupKey::new("shop", "order_17")?;
/// for is_first in [true, false] {
///     let ran = dedup.run(&key, async |event| {
///         let completion = event.completion()?;
///         let mut tx = pool.begin().await?; // of any driver
///         sqlx::query("INSERT INTO orders VALUES ($1)").bind(event.id()).execute(&mut *tx).await?;
///         let complete = sqlx::query(AssertSqlSafe(completion.sql().to_owned()));
///         complete.bind(completion.parameter()).execute(&mut *tx).await?;
///         tx.commit().await?;
///         Ok::<_, BoxError>(())
///     });
///     assert_eq!(matches!(ran.await, Ok(RunOutcome::First(()))), is_first);
/// }
/// let orders = sqlx::query_scalar("SELECT count(*) FROM orders").fetch_one(&pool);
/// assert_eq!(orders.await.ok(), Some(1_i64));
/// # Ok::<(), BoxError>(())
/// # }).unwrap();
/// ```
#[derive(Clone)]
pub struct Completion {
    sql: Arc<str>,
    parameter: String,
    /// The parameter of a statement that may be the first of its transaction.
    first: Option<String>,
    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    pub(crate) own: Own,
}

/// What only the stores of this crate know, for a transaction that this crate has begun.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
#[derive(Debug, Clone, Default)]
pub(crate) struct Own {
    pub(crate) database: Option<CompletedIn>,
    #[cfg(feature = "postgres")]
    pub(crate) lean: Option<Lean>,
    /// Returns a row if this transaction has completed the events. It takes the parameter of [`Completion`].
    pub(crate) check: Option<Arc<str>>,
}

/// A faster statement for one event, with its parameters. It refuses by writing no row.
#[cfg(feature = "postgres")]
#[derive(Debug, Clone)]
pub(crate) struct Lean {
    pub(crate) sql: Arc<str>,
    pub(crate) key: u128,
    pub(crate) token: u128,
    pub(crate) mark: String,
    pub(crate) retention_ms: i64,
    pub(crate) idle_ms: i32,
}

/// The database in which a store of this crate completes events. Not a part of the API.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CompletedIn {
    /// Postgres.
    #[cfg(feature = "postgres")]
    Postgres,
    /// SQLite.
    #[cfg(feature = "sqlite")]
    Sqlite {
        /// How long a transaction waits for those before it.
        write_lock_timeout: Duration,
    },
}

impl Completion {
    /// Makes a completion of a store of your own: a statement with one text parameter. It must fail if it does not
    /// complete every event.
    pub fn new(sql: impl Into<Arc<str>>, parameter: impl Into<String>) -> Self {
        Self {
            sql: sql.into(),
            parameter: parameter.into(),
            first: None,
            #[cfg(any(feature = "postgres", feature = "sqlite"))]
            own: Own::default(),
        }
    }

    /// Adds the parameter that [`first`](Self::first) chooses, for a store that can tell whether its statement is the
    /// first of a transaction.
    #[must_use]
    pub fn with_first(mut self, parameter: impl Into<String>) -> Self {
        self.first = Some(parameter.into());
        self
    }

    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    pub(crate) fn with_own(self, own: Own) -> Self {
        Self { own, ..self }
    }

    /// Returns the statement. It has one parameter, and is the same for every event of the store.
    ///
    /// On Postgres it returns one row with the column `completion`; on SQLite it returns none.
    #[must_use]
    pub fn sql(&self) -> &str {
        &self.sql
    }

    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    pub(crate) fn shared_sql(&self) -> &Arc<str> {
        &self.sql
    }

    /// Returns the value of the parameter, a text: `$1` on Postgres, `?1` on SQLite; that of a store of your own is as
    /// its database writes it.
    #[must_use]
    pub fn parameter(&self) -> &str {
        &self.parameter
    }

    /// Lets the statement be the first that writes in its transaction.
    ///
    /// By default it fails there on Postgres, because it could be outside of the handler's transaction, as after
    /// `&db` in place of `&txn`: it would then complete the events alone. Above READ COMMITTED, complete first: see
    /// [the guide](crate::guide::transactions).
    #[must_use]
    pub fn first(mut self) -> Self {
        if let Some(parameter) = self.first.take() {
            self.parameter = parameter;
        }
        self
    }
}

impl fmt::Debug for Completion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The parameter may hold a response, which may be personal data.
        f.debug_struct("Completion").field("sql", &self.sql).finish_non_exhaustive()
    }
}

/// Prevents implementations of [`CompletionDatabase`] and [`CompletionConnection`] in other crates.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub trait Sealed {}

/// A database of sqlx in which [`Delivery::begin`](crate::Delivery::begin) begins a transaction.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub trait CompletionDatabase: Database<Connection: CompletionConnection> + Sealed {
    /// The head of the line of handlers.
    #[doc(hidden)]
    type Line: Send + 'static;

    /// The right to a transaction, which is held to its end.
    #[doc(hidden)]
    type Turn: Send + Sync + 'static;

    /// Waits for the handlers before. None if the store completes its events in another kind of database.
    #[doc(hidden)]
    fn line(
        database: Option<CompletedIn>,
        pool: &Pool<Self>,
    ) -> impl Future<Output = Result<Option<Self::Line>, StoreError>> + Send;

    /// Waits until a transaction may begin, and returns the right to it.
    #[doc(hidden)]
    fn turn(line: Self::Line) -> impl Future<Output = Result<Self::Turn, StoreError>> + Send;

    /// Returns the statement that begins a transaction with this mark.
    #[doc(hidden)]
    fn begin_statement(mark: &str) -> String;
}

/// A connection of sqlx on which [`Delivery::complete_in`](crate::Delivery::complete_in) completes events.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub trait CompletionConnection: Connection + Sealed {
    /// Completes the events in a transaction that this crate has begun. Returns `false` if it wrote none, where the
    /// statement is not an error then. `is_last`: the COMMIT follows.
    #[doc(hidden)]
    fn completes(
        &mut self,
        completion: &Completion,
        is_last: bool,
    ) -> impl Future<Output = Result<bool, sqlx::Error>> + Send;

    /// Fails unless the transaction that this crate has begun goes on.
    #[doc(hidden)]
    fn still_within(&mut self) -> impl Future<Output = Result<(), sqlx::Error>> + Send;

    /// Executes a statement with one text parameter. Returns `true` if it returns a row.
    #[doc(hidden)]
    fn finds(
        &mut self,
        sql: &Arc<str>,
        parameter: &str,
    ) -> impl Future<Output = Result<bool, sqlx::Error>> + Send;
}

/// What an error of a handler's transaction means.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// A completion was refused: its text begins so.
    Refused,
    /// The database is busy, or another transaction was in the way. Nothing was written.
    InTheWay,
    /// The database is away. The outcome is unknown.
    Away,
    /// The statement cannot succeed.
    Statement,
}

/// The start of the text of a refusal.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
const REFUSAL: &str = "tower_dedup: ";

/// Returns what an error of sqlx means.
///
/// SQLSTATEs: <https://www.postgresql.org/docs/current/errcodes-appendix.html>. Result codes of SQLite:
/// <https://sqlite.org/rescode.html>.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub(crate) fn fault(error: &sqlx::Error) -> Fault {
    let sqlx::Error::Database(error) = error else {
        return match error {
            sqlx::Error::PoolTimedOut => Fault::InTheWay,
            sqlx::Error::Io(_)
            | sqlx::Error::Tls(_)
            | sqlx::Error::Protocol(_)
            | sqlx::Error::PoolClosed
            | sqlx::Error::WorkerCrashed
            | sqlx::Error::BeginFailed => Fault::Away,
            _ => Fault::Statement,
        };
    };
    let code = error.code().unwrap_or_default();
    // Bad input has the same codes.
    if matches!(&*code, "22P02" | "1") && error.message().contains(REFUSAL) {
        return Fault::Refused;
    }
    match &*code {
        "40003" => Fault::Away,
        // Five characters are of Postgres.
        code if code.len() == 5 => match &code[..2] {
            "40" | "53" | "55" => Fault::InTheWay,
            "08" | "57" | "58" | "XX" => Fault::Away,
            // A standby; a transaction that was idle or open for too long.
            _ if matches!(code, "25006" | "25P03" | "25P04") => Fault::InTheWay,
            _ => Fault::Statement,
        },
        code => match code.parse::<i32>().map(|extended| extended & 0xff) {
            // BUSY, LOCKED, NOMEM, FULL.
            Ok(5 | 6 | 7 | 13) => Fault::InTheWay,
            // IOERR, CANTOPEN.
            Ok(10 | 14) => Fault::Away,
            _ => Fault::Statement,
        },
    }
}

/// Begins a transaction. The turn comes after the connection: while a handler waits for its pool, others write. `BEGIN`
/// has a task of its own: in sqlx up to 0.9.0, a dropped one leaves its connection in a transaction
/// ([sqlx#4385](https://github.com/transact-rs/sqlx/issues/4385)). Closes connections that sqlx believes to be in a
/// transaction, and those in an aborted one: no transaction begins on them.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub(crate) async fn begin<DB: CompletionDatabase, E: From<StoreError> + From<sqlx::Error>>(
    pool: &Pool<DB>,
    mark: &str,
    line: DB::Line,
) -> Result<(Transaction<'static, DB>, DB::Turn), E> {
    let mut connection = acquire(pool).await?;
    let turn = DB::turn(line).await?;
    let (pool, statement) = (pool.clone(), DB::begin_statement(mark));
    let begin = async move {
        for _ in 0..=pool.options().get_max_connections() {
            let statement = sqlx::AssertSqlSafe(statement.clone()).into_sql_str();
            let begun = Transaction::begin(connection, Some(statement)).await;
            if !begun.as_ref().is_err_and(is_of_an_aborted_transaction) {
                return Ok((begun?, turn));
            }
            let _ = pool.acquire().await?.close().await;
            connection = acquire(&pool).await?;
        }
        Err(sqlx::Error::PoolTimedOut)
    };
    Ok(tokio::spawn(begin).await.unwrap_or(Err(sqlx::Error::WorkerCrashed))?)
}

/// Returns a connection that is in no transaction, as far as sqlx knows.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
async fn acquire<DB: CompletionDatabase>(pool: &Pool<DB>) -> sqlx::Result<PoolConnection<DB>> {
    let mut connection = pool.acquire().await?;
    for _ in 0..pool.options().get_max_connections() {
        if !connection.is_in_transaction() {
            break;
        }
        // The connection is closed in any case.
        let _ = connection.close().await;
        connection = pool.acquire().await?;
    }
    Ok(connection)
}

#[cfg(any(feature = "postgres", feature = "sqlite"))]
fn is_of_an_aborted_transaction(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(sqlx::error::DatabaseError::code);
    code.is_some_and(|code| code == "25P02")
}
