//! Transactions of handlers in which a store of this crate completes events: how they begin over
//! sqlx.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use sqlx::pool::PoolConnection;
use sqlx::{Connection, Database, Pool, SqlSafeStr, Transaction};
use tokio::time::timeout;

use super::contract::Completion;
use crate::error::StoreError;

/// A connection on which a transaction may begin, the right to it, and the statement that begins
/// it.
pub(crate) type Connected<DB> = (PoolConnection<DB>, <DB as CompletionDatabase>::Turn, String);

/// Prevents implementations of [`CompletionDatabase`] in other crates.
pub trait Sealed {}

/// A database of sqlx in which [`Delivery::begin`](crate::Delivery::begin) begins a transaction,
/// and [`Delivery::complete_in`](crate::Delivery::complete_in) completes events.
pub trait CompletionDatabase: Database + Sealed {
    /// The right to a transaction, which is held to its end.
    #[doc(hidden)]
    type Turn: Send + Sync + 'static;

    /// Returns a connection of the pool once a transaction may begin on it. Returns `None` if the
    /// store is of another crate, or completes its events in another kind of database. The
    /// statement that begins the transaction fails in one that was left open.
    #[doc(hidden)]
    fn connect<E: From<StoreError> + From<sqlx::Error> + Send>(
        completion: &Completion,
        pool: &Pool<Self>,
    ) -> impl Future<Output = Result<Option<Connected<Self>>, E>> + Send;

    /// How long sqlx may test an idle connection of a pool, which may have fallen silent. `None` if
    /// it leads to no other machine.
    #[doc(hidden)]
    const TEST_TIMEOUT: Option<Duration>;

    /// Completes the events in a transaction that this crate has begun and marked. An error if that
    /// transaction has ended. `is_last`: the COMMIT follows.
    #[doc(hidden)]
    fn complete_marked(
        connection: &mut Self::Connection,
        completion: &Completion,
        is_last: bool,
    ) -> impl Future<Output = Result<(), sqlx::Error>> + Send;

    /// Executes a statement with the parameter of this completion. Returns whether it returns a
    /// row.
    #[doc(hidden)]
    fn finds(
        connection: &mut Self::Connection,
        sql: &Arc<str>,
        completion: &Completion,
    ) -> impl Future<Output = Result<bool, sqlx::Error>> + Send;

    /// Completes the events in a transaction that the handler has begun.
    #[doc(hidden)]
    fn complete_in(
        connection: &mut Self::Connection,
        completion: &Completion,
    ) -> impl Future<Output = Result<(), sqlx::Error>> + Send;

    /// Returns whether somebody has left a transaction open that sqlx does not know of. So does a
    /// connection that is broken.
    #[doc(hidden)]
    fn is_left_open(connection: &mut Self::Connection) -> impl Future<Output = bool> + Send;
}

/// Begins a transaction; `None` for the stores of [`connect`](CompletionDatabase::connect)'s
/// `None`.
///
/// `BEGIN` has a task of its own: in sqlx up to 0.9.0, a dropped one leaves its connection in a
/// transaction ([sqlx#4385](https://github.com/transact-rs/sqlx/issues/4385)). Closes connections
/// that are in a transaction already: no other begins on them.
pub(crate) async fn begin<
    DB: CompletionDatabase,
    E: From<StoreError> + From<sqlx::Error> + Send,
>(
    pool: &Pool<DB>,
    completion: &Completion,
) -> Result<Option<(Transaction<'static, DB>, DB::Turn)>, E> {
    let connected = DB::connect::<E>(completion, pool).await?;
    let Some((mut connection, turn, statement)) = connected else { return Ok(None) };
    let pool = pool.clone();
    let begin = async move {
        for _ in 0..=pool.options().get_max_connections() {
            let statement = sqlx::AssertSqlSafe(statement.clone()).into_sql_str();
            let begun = Transaction::begin(connection, Some(statement)).await;
            if !begun.as_ref().is_err_and(is_left_open) {
                return Ok(Some((begun?, turn)));
            }
            connection = after_closing_one(&pool).await?;
        }
        Err(sqlx::Error::PoolTimedOut)
    };
    Ok(tokio::spawn(begin).await.unwrap_or(Err(sqlx::Error::WorkerCrashed))?)
}

/// Returns whether this transaction has completed the events, and still is the one that this crate
/// has begun.
pub(crate) async fn is_completed<DB: CompletionDatabase>(
    connection: &mut DB::Connection,
    completion: &Completion,
) -> sqlx::Result<bool> {
    let Some(own) = &completion.own else { return Ok(false) };
    DB::finds(connection, &own.check, completion).await
}

/// Returns a connection that is in no transaction, as far as sqlx knows. Closes the others: a
/// transaction of the user's has ended without sqlx's knowledge, or is open still. Nobody would
/// commit what is written in it, and it does not see what others have written since.
pub(crate) async fn acquire<DB: CompletionDatabase>(
    pool: &Pool<DB>,
) -> sqlx::Result<PoolConnection<DB>> {
    for _ in 0..=pool.options().get_max_connections() {
        let connection = tested(pool).await?;
        if !connection.is_in_transaction() {
            return Ok(connection);
        }
        // The connection is closed in any case.
        let _ = connection.close().await;
    }
    Err(sqlx::Error::PoolTimedOut)
}

/// Returns a connection of the pool. sqlx tests an idle one without a bound, and one that has
/// fallen silent never replies.
async fn tested<DB: CompletionDatabase>(pool: &Pool<DB>) -> sqlx::Result<PoolConnection<DB>> {
    // Without an idle connection there is none to test, and a caller that waits for a busy pool
    // keeps its place in the queue.
    let Some(bound) = DB::TEST_TIMEOUT.filter(|_| pool.num_idle() > 0) else {
        return pool.acquire().await;
    };
    match timeout(bound, pool.acquire()).await {
        Err(_) | Ok(Err(sqlx::Error::PoolTimedOut)) => {}
        Ok(acquired) => return acquired,
    }
    // sqlx has closed the connection, because its test was dropped. The machine behind it may have
    // gone, and with it the other connections.
    while let Some(idle) = pool.try_acquire() {
        drop(idle.detach());
    }
    pool.acquire().await
}

/// How long one idle connection is asked. It may have fallen silent.
const ASK: Duration = Duration::from_millis(100);

/// Closes the connection that was left open in a transaction, and returns another one. sqlx has
/// given it back to the pool, so the idle connections are asked. If a task has got it in between,
/// that one fails.
async fn after_closing_one<DB: CompletionDatabase>(
    pool: &Pool<DB>,
) -> sqlx::Result<PoolConnection<DB>> {
    let mut connection = acquire(pool).await?;
    if DB::is_left_open(&mut connection).await {
        let _ = connection.close().await;
        return acquire(pool).await;
    }
    // They stay out of the pool until the search is over.
    let mut sound = Vec::new();
    while let Some(mut idle) = pool.try_acquire() {
        if timeout(ASK, DB::is_left_open(&mut idle)).await.unwrap_or(true) {
            let _ = idle.close().await;
            break;
        }
        sound.push(idle);
    }
    Ok(connection)
}

/// Returns whether a transaction did not begin because its connection is in one: one that goes on,
/// or one that an error has aborted.
pub(super) fn is_left_open(error: &sqlx::Error) -> bool {
    let Some(error) = error.as_database_error() else { return false };
    match error.code().as_deref() {
        Some("25001" | "25P02") => true,
        Some("1") => error.message().contains("within a transaction"),
        _ => false,
    }
}
