//! [`TransactionAdapter`]: keys that are recorded in the handler's own transaction.

use std::any::Any;
use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use sqlx::SqlSafeStr;
use sqlx::pool::PoolConnection;
use sqlx::{AssertSqlSafe, Database, Pool};
// `sqlx` names the type of a database's transaction manager, but not the trait.
use sqlx_core::transaction::TransactionManager;

use super::contract::{CallTerms, Claimed, MaintenanceAdapter};
use crate::error::{Error, ErrorKind};
use crate::key::DedupKey;

/// The transaction contract: claim keys in a new transaction, lend it to the handler, and complete
/// the keys in it before it commits.
///
/// 1. What [`open`](Self::open) grants is claimed *in* the transaction, and not complete: should a
///    handler commit it by itself, the keys stay open until their lease lapses.
/// 2. A key that another open transaction has claimed is in flight, at once or after a short wait:
///    `open` never waits for a handler to end. A key that may be free is not in flight: where it
///    cannot be told which of several keys is held, `open` fails.
/// 3. [`commit`](Self::commit) completes the keys as the last statement of the very transaction
///    that claimed them, then commits. Is it not that transaction any more, because the handler
///    has ended or broken it, it fails with [`ErrorKind::Transaction`], and nothing is committed.
/// 4. A transaction that is dropped is rolled back.
/// 5. A mark is a savepoint of ours: what was written before it can be kept when the rest is rolled
///    back. One whose call was dropped, or timed out, may be there or not.
pub trait TransactionAdapter: MaintenanceAdapter {
    /// The database.
    type Database: Database;

    /// Claims what can be claimed in a new transaction. The keys are distinct and sorted; there
    /// is one answer per key, and no transaction if none was granted.
    fn open(
        &self,
        keys: &[DedupKey],
        terms: &CallTerms,
    ) -> impl Future<Output = Result<Opened<Self::Database>, Error>> + Send;

    /// Gives up what [`open`](Self::open) has granted, while the transaction goes on: once it
    /// commits, each of these keys is as free as if it had been rolled back, with no attempt more.
    fn give_back(
        &self,
        transaction: &mut OpenTransaction<Self::Database>,
        keys: &[DedupKey],
        terms: &CallTerms,
    ) -> impl Future<Output = Result<(), Error>> + Send;

    /// Sets this mark; in place of that other one, which is the last, if it is given.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Transaction`] where the database refuses, since the handler has ended or broken
    /// the transaction: then this mark is not there. All others leave that unknown.
    fn mark(
        &self,
        transaction: &mut OpenTransaction<Self::Database>,
        mark: u32,
        instead_of: Option<u32>,
    ) -> impl Future<Output = Result<(), Error>> + Send;

    /// Rolls back what was written after this mark, also where an error has aborted the
    /// transaction. Answers whether the mark is there; if not, nothing is rolled back, but the
    /// transaction may be aborted.
    fn roll_back_to(
        &self,
        transaction: &mut OpenTransaction<Self::Database>,
        mark: u32,
    ) -> impl Future<Output = Result<bool, Error>> + Send;

    /// Completes the keys in the transaction and commits it.
    fn commit(
        &self,
        transaction: OpenTransaction<Self::Database>,
        keys: &[DedupKey],
        terms: &CallTerms,
    ) -> impl Future<Output = Result<(), Error>> + Send;

    /// Rolls the transaction back.
    fn rollback(
        &self,
        transaction: OpenTransaction<Self::Database>,
    ) -> impl Future<Output = Result<(), Error>> + Send;

    /// How much longer than any other call [`open`](Self::open) may take, for a store that runs
    /// one transaction at a time.
    fn patience(&self) -> Duration;
}

/// Both kinds of shared handle forward every method.
macro_rules! forward {
    ($($handle:ident),+) => {$(
        impl<A: TransactionAdapter> TransactionAdapter for $handle<A> {
            type Database = A::Database;

            fn open(
                &self,
                keys: &[DedupKey],
                terms: &CallTerms,
            ) -> impl Future<Output = Result<Opened<Self::Database>, Error>> + Send {
                (**self).open(keys, terms)
            }

            fn give_back(
                &self,
                transaction: &mut OpenTransaction<Self::Database>,
                keys: &[DedupKey],
                terms: &CallTerms,
            ) -> impl Future<Output = Result<(), Error>> + Send {
                (**self).give_back(transaction, keys, terms)
            }

            fn mark(
                &self,
                transaction: &mut OpenTransaction<Self::Database>,
                mark: u32,
                instead_of: Option<u32>,
            ) -> impl Future<Output = Result<(), Error>> + Send {
                (**self).mark(transaction, mark, instead_of)
            }

            fn roll_back_to(
                &self,
                transaction: &mut OpenTransaction<Self::Database>,
                mark: u32,
            ) -> impl Future<Output = Result<bool, Error>> + Send {
                (**self).roll_back_to(transaction, mark)
            }

            fn commit(
                &self,
                transaction: OpenTransaction<Self::Database>,
                keys: &[DedupKey],
                terms: &CallTerms,
            ) -> impl Future<Output = Result<(), Error>> + Send {
                (**self).commit(transaction, keys, terms)
            }

            fn rollback(
                &self,
                transaction: OpenTransaction<Self::Database>,
            ) -> impl Future<Output = Result<(), Error>> + Send {
                (**self).rollback(transaction)
            }

            fn patience(&self) -> Duration {
                (**self).patience()
            }
        }
    )+};
}

forward!(Arc, Box);

/// What [`TransactionAdapter::open`] answers.
#[derive(Debug)]
pub struct Opened<DB: Database> {
    /// One for each key.
    pub answers: Vec<Claimed>,
    /// Holds what was granted.
    pub transaction: Option<OpenTransaction<DB>>,
}

/// A transaction that holds claims, and the connection that it is on.
///
/// # Why not sqlx's `Transaction`?
///
/// Every way to end one gives the connection back to its pool by a ping that has no bound. On a
/// connection that has fallen silent the ping never returns, and the pool has one connection less
/// until the process ends. So this type owns the connection. A transaction that has ended gives the
/// connection back within 5 s, or closes it. One that is dropped before its end closes it too if it
/// was begun by [`begin_on`](Self::begin_on). `BEGIN`, `COMMIT` and savepoints are sqlx's own, so that
/// the handler's `begin` works as it always does.
pub struct OpenTransaction<DB: Database> {
    /// `None` once the transaction has ended.
    connection: Option<PoolConnection<DB>>,
    /// What becomes of the connection if the transaction is dropped before its end; `None` if it is
    /// rolled back and returns to its pool.
    lost: Option<Box<Lost<DB>>>,
    /// Dropped after the connection was given back or closed.
    attachment: Option<Box<dyn Any + Send + Sync>>,
}

type Lost<DB> = dyn FnOnce(PoolConnection<DB>) + Send + Sync;

/// For how long a connection may take to return to its pool; past it, the connection is closed.
const RETURN_BOUND: Duration = Duration::from_secs(5);

impl<DB: Database> OpenTransaction<DB> {
    /// A transaction of this pool, begun in a task of its own: the caller may be dropped, but a
    /// dropped `BEGIN` would leave its connection in a transaction up to sqlx 0.9.0
    /// ([sqlx#4385](https://github.com/transact-rs/sqlx/issues/4385)).
    ///
    /// Dropped before its end, it is rolled back, and the connection returns to the pool: for a
    /// database that is a file.
    ///
    /// # Errors
    ///
    /// What sqlx returns.
    pub async fn begin(
        pool: &Pool<DB>,
        statement: Option<&'static str>,
    ) -> Result<Self, sqlx::Error> {
        let pool = pool.clone();
        let begun = tokio::spawn(async move {
            let connection = pool.acquire().await?;
            let mut transaction =
                Self { connection: Some(connection), lost: None, attachment: None };
            transaction.start(statement).await?;
            Ok(transaction)
        });
        begun.await.map_err(|_| sqlx::Error::WorkerCrashed)?
    }

    /// A transaction on this connection, for a database that is reached over a network.
    ///
    /// Dropped before its end, or while a statement is under way, it gives its connection to `lost`,
    /// which must not give it back to the pool: what the server does with the transaction is not
    /// known.
    ///
    /// # Errors
    ///
    /// What sqlx returns.
    pub async fn begin_on(
        connection: PoolConnection<DB>,
        statement: Option<&'static str>,
        lost: impl FnOnce(PoolConnection<DB>) + Send + Sync + 'static,
    ) -> Result<Self, sqlx::Error> {
        let lost: Option<Box<Lost<DB>>> = Some(Box::new(lost));
        let mut transaction = Self { connection: Some(connection), lost, attachment: None };
        transaction.start(statement).await?;
        Ok(transaction)
    }

    async fn start(&mut self, statement: Option<&'static str>) -> Result<(), sqlx::Error> {
        DB::TransactionManager::begin(self.connection(), statement.map(SqlSafeStr::into_sql_str))
            .await
    }

    /// Attaches something of the adapter's, which is kept until the transaction has ended.
    #[must_use]
    pub fn with(mut self, attachment: impl Any + Send + Sync) -> Self {
        self.attachment = Some(Box::new(attachment));
        self
    }

    /// What was attached, if it is of this type.
    #[must_use]
    pub fn attachment<T: Any>(&self) -> Option<&T> {
        self.attachment.as_deref().and_then(|attachment| (attachment as &dyn Any).downcast_ref())
    }

    /// The connection, to look at.
    #[expect(
        clippy::expect_used,
        clippy::missing_panics_doc,
        reason = "only what consumes the transaction takes its connection"
    )]
    pub fn get(&self) -> &DB::Connection {
        self.connection.as_ref().expect(HELD)
    }

    /// The connection, inside the transaction.
    #[expect(
        clippy::expect_used,
        clippy::missing_panics_doc,
        reason = "only what consumes the transaction takes its connection"
    )]
    pub fn connection(&mut self) -> &mut DB::Connection {
        self.connection.as_mut().expect(HELD)
    }

    /// Commits, as far as sqlx can tell: read the rules above.
    ///
    /// # Errors
    ///
    /// What sqlx returns.
    pub async fn commit(mut self) -> Result<(), sqlx::Error> {
        let committed = DB::TransactionManager::commit(self.connection()).await;
        // A COMMIT that the database refuses has ended the transaction, or leaves it to be rolled
        // back; either way the connection is sound.
        let ended = match &committed {
            Ok(()) => true,
            Err(sqlx::Error::Database(_)) => {
                DB::TransactionManager::rollback(self.connection()).await.is_ok()
            }
            Err(_) => false,
        };
        if ended {
            self.end();
        }
        committed
    }

    /// Rolls back.
    ///
    /// # Errors
    ///
    /// What sqlx returns.
    pub async fn rollback(mut self) -> Result<(), sqlx::Error> {
        DB::TransactionManager::rollback(self.connection()).await?;
        self.end();
        Ok(())
    }

    /// Closes the connection: the server rolls back.
    pub fn close(mut self) {
        drop(self.connection.take().map(PoolConnection::detach));
    }

    fn end(&mut self) {
        if let Some(connection) = self.connection.take() {
            give_back(connection);
        }
    }
}

const HELD: &str = "a transaction holds its connection to its end";

/// Gives a connection back to its pool, or closes it if it does not answer.
pub(super) fn give_back<DB: Database>(mut connection: PoolConnection<DB>) {
    // sqlx does the same without a bound when a connection is dropped.
    tokio::spawn(tokio::time::timeout(RETURN_BOUND, connection.return_to_pool()));
}

impl<DB: Database> Drop for OpenTransaction<DB> {
    fn drop(&mut self) {
        let Some(mut connection) = self.connection.take() else { return };
        match self.lost.take() {
            Some(lost) => lost(connection),
            None => DB::TransactionManager::start_rollback(&mut connection),
        }
    }
}

impl<DB: Database> fmt::Debug for OpenTransaction<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenTransaction").finish_non_exhaustive()
    }
}

/// The statements that set a mark, as one message.
pub(super) fn set_mark(mark: u32, instead_of: Option<u32>) -> AssertSqlSafe<String> {
    let set = format!("SAVEPOINT tower_dedup_{mark}");
    AssertSqlSafe(match instead_of {
        Some(last) => format!("RELEASE SAVEPOINT tower_dedup_{last}; {set}"),
        None => set,
    })
}

pub(super) fn back_to_mark(mark: u32) -> AssertSqlSafe<String> {
    AssertSqlSafe(format!("ROLLBACK TO SAVEPOINT tower_dedup_{mark}"))
}

/// The handler's transaction is not what it was.
pub(super) fn not_ours(what: &'static str) -> Error {
    Error::new(ErrorKind::Transaction, what)
}
