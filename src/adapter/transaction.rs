//! [`TransactionAdapter`]: keys that are claimed in the handler's own transaction.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use sqlx::pool::PoolConnection;
use sqlx::{Database, SqlSafeStr};
// `sqlx` names the type of a database's transaction manager, but not the trait.
use sqlx_core::transaction::TransactionManager;

use super::contract::StoreFuture;
use super::replies::ClaimReply;
use super::terms::CallTerms;
use crate::error::{Error, ErrorKind};
use crate::key::DedupKey;

/// Prevents implementations of [`TransactionAdapter`] in other crates.
pub trait Sealed {}

/// An adapter of a SQL database, which claims keys in the handler's own transaction.
///
/// A bound for code that is generic over the adapter of
/// [`DedupLayer::transactional`](crate::DedupLayer::transactional). It is sealed.
// 1. `open` claims keys *in* the transaction, and does not complete them. If a handler
//    commits the transaction by itself, the keys stay open until their lease lapses.
// 2. A key that another open transaction has claimed is in flight, at once or after a short wait.
//    `open` never waits for a handler to end. A key that may be free is not in flight: if the store
//    cannot find out which of several keys is held, `open` fails.
// 3. No call asks for a second connection while it holds a transaction, because a pool of waiting transactions would
//    lock up.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot claim keys in the handler's transaction",
    label = "not an adapter of a SQL database",
    note = "the transactional ledger commits the key and the handler's writes together, so both must be \
            in one SQL database",
    note = "with this adapter, the key and the effect are in two stores: use the lease ledger, \
            `DedupLayer::new`"
)]
pub trait TransactionAdapter: Sealed + Send + Sync + 'static {
    /// The database.
    type Database: Database;

    /// Claims keys in a new transaction, which is rolled back if it is dropped. The keys are sorted and distinct, and
    /// the terms have a lease. A duplicate carries the stored data that the terms ask for.
    ///
    /// Without keys, it opens a transaction that claims nothing: the handler of a handshake writes in it.
    ///
    /// # Errors
    ///
    /// The store's own errors; the transaction is rolled back.
    #[doc(hidden)]
    fn open<'a>(
        &'a self,
        keys: &'a [DedupKey],
        terms: &'a CallTerms,
    ) -> StoreFuture<'a, Opened<Self::Database>>;

    /// Releases keys that [`open`](Self::open) has claimed, while the transaction goes on. Once the
    /// transaction commits, each key has the state that it had before `open`.
    ///
    /// # Errors
    ///
    /// The store's own errors.
    #[doc(hidden)]
    fn release_in<'a>(
        &'a self,
        transaction: &'a mut OpenTransaction<Self::Database>,
        keys: &'a [DedupKey],
        terms: &'a CallTerms,
    ) -> StoreFuture<'a, ()>;

    /// Completes the keys as the last statement of the transaction that claimed them, then commits it. There are no keys
    /// if [`open`](Self::open) had none.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Transaction`] if the handler has ended or broken the transaction. Otherwise the
    /// store's own errors.
    #[doc(hidden)]
    fn commit<'a>(
        &'a self,
        transaction: OpenTransaction<Self::Database>,
        keys: &'a [DedupKey],
        terms: &'a CallTerms,
    ) -> StoreFuture<'a, ()>;

    /// Rolls the transaction back.
    ///
    /// # Errors
    ///
    /// The store's own errors.
    #[doc(hidden)]
    fn rollback(&self, transaction: OpenTransaction<Self::Database>) -> StoreFuture<'_, ()>;

    /// Returns how much longer than any other call [`open`](Self::open) may take, for a store that
    /// runs one transaction at a time. By default: no longer.
    #[doc(hidden)]
    fn open_timeout(&self) -> Duration {
        Duration::ZERO
    }

    /// Returns how many deliveries may run at once by default. `None` leaves the layer's default.
    #[doc(hidden)]
    fn default_max_running(&self) -> Option<usize> {
        None
    }
}

impl<A: Sealed + ?Sized> Sealed for Arc<A> {}

/// Forwards every method.
impl<A: TransactionAdapter + ?Sized> TransactionAdapter for Arc<A> {
    type Database = A::Database;

    fn open<'a>(
        &'a self,
        keys: &'a [DedupKey],
        terms: &'a CallTerms,
    ) -> StoreFuture<'a, Opened<Self::Database>> {
        (**self).open(keys, terms)
    }

    fn release_in<'a>(
        &'a self,
        transaction: &'a mut OpenTransaction<Self::Database>,
        keys: &'a [DedupKey],
        terms: &'a CallTerms,
    ) -> StoreFuture<'a, ()> {
        (**self).release_in(transaction, keys, terms)
    }

    fn commit<'a>(
        &'a self,
        transaction: OpenTransaction<Self::Database>,
        keys: &'a [DedupKey],
        terms: &'a CallTerms,
    ) -> StoreFuture<'a, ()> {
        (**self).commit(transaction, keys, terms)
    }

    fn rollback(&self, transaction: OpenTransaction<Self::Database>) -> StoreFuture<'_, ()> {
        (**self).rollback(transaction)
    }

    fn open_timeout(&self) -> Duration {
        (**self).open_timeout()
    }

    fn default_max_running(&self) -> Option<usize> {
        (**self).default_max_running()
    }
}

/// The reply to [`TransactionAdapter::open`].
#[derive(Debug)]
pub struct Opened<DB: Database> {
    /// One reply for each key.
    pub replies: Vec<ClaimReply>,
    /// The transaction, if any key was claimed or there is no key.
    pub transaction: Option<OpenTransaction<DB>>,
}

/// A transaction that holds claims, with its connection.
///
/// # Why not sqlx's `Transaction`?
///
/// sqlx returns the connection of an ended transaction to its pool by a ping without a bound. On a
/// silent connection the ping never returns, and the pool has one connection less until the process
/// ends. So this type owns the connection. A transaction that has ended returns its connection to the
/// pool within 5 s, or closes it. A transaction on Postgres that is dropped
/// before its end closes the connection too. `BEGIN`, `COMMIT` and savepoints are sqlx's own, so that
/// the handler's `begin` works as usual.
pub struct OpenTransaction<DB: Database> {
    /// `None` once the transaction has ended.
    connection: Option<PoolConnection<DB>>,
    /// Takes the connection of a transaction that is dropped before its end. `None` rolls back and
    /// returns the connection to its pool.
    on_drop: Option<Box<OnDrop<DB>>>,
    /// Dropped after the connection was returned or closed.
    attachment: Option<Box<dyn Any + Send + Sync>>,
    /// Whether the COMMIT was sent.
    commits: bool,
}

pub(super) type OnDrop<DB> = dyn FnOnce(PoolConnection<DB>, bool) + Send + Sync;

/// The time after which a connection that has not returned to its pool is closed.
const RETURN_TIMEOUT: Duration = Duration::from_secs(5);

impl<DB: Database> OpenTransaction<DB> {
    /// Begins a transaction on this connection. `statement` may be several statements.
    ///
    /// A transaction that is dropped before its end, or while a statement is under way, hands its
    /// connection to `on_drop`, with `true` if its COMMIT was sent. `on_drop` must not return the connection to the
    /// pool, because the state of the transaction on the server is unknown.
    ///
    /// `None` is for a database that is a file: the transaction is rolled back, and its connection returns to the
    /// pool. Begin it in a task of its own: in sqlx up to 0.9.0 a dropped `BEGIN` leaves its connection in a
    /// transaction ([sqlx#4385](https://github.com/transact-rs/sqlx/issues/4385)).
    ///
    /// # Errors
    ///
    /// The errors of sqlx.
    pub(super) async fn begin(
        connection: PoolConnection<DB>,
        statement: impl SqlSafeStr,
        on_drop: Option<Box<OnDrop<DB>>>,
    ) -> Result<Self, sqlx::Error> {
        let (connection, statement) = (Some(connection), statement.into_sql_str());
        let mut transaction = Self { connection, on_drop, attachment: None, commits: false };
        DB::TransactionManager::begin(transaction.connection(), Some(statement)).await?;
        Ok(transaction)
    }

    /// Attaches a value of the adapter's, which lives until the transaction has ended.
    #[must_use]
    pub(super) fn with(mut self, attachment: impl Any + Send + Sync) -> Self {
        self.attachment = Some(Box::new(attachment));
        self
    }

    /// Returns the attached value, if it is of this type.
    #[must_use]
    pub(super) fn attachment<T: Any>(&self) -> Option<&T> {
        self.attachment.as_deref().and_then(|attachment| (attachment as &dyn Any).downcast_ref())
    }

    /// Returns the connection, for reading its state.
    #[expect(
        clippy::expect_used,
        reason = "only methods that consume the transaction take its connection"
    )]
    pub(crate) fn get(&self) -> &DB::Connection {
        self.connection.as_ref().expect(HELD)
    }

    /// Returns the connection, inside the transaction.
    ///
    /// # Panics
    ///
    /// Never, because only methods that consume the transaction take its connection.
    #[expect(
        clippy::expect_used,
        reason = "only methods that consume the transaction take its connection"
    )]
    pub fn connection(&mut self) -> &mut DB::Connection {
        self.connection.as_mut().expect(HELD)
    }

    /// Returns `true` if sqlx counts more than this transaction: the handler has leaked the guard of a
    /// savepoint (`mem::forget`). sqlx would then release the savepoint instead of committing, and return
    /// the connection to its pool with the transaction open.
    ///
    /// A database that drops guards in the background, as SQLite does, counts right after the next
    /// statement.
    #[must_use]
    pub(crate) fn has_leaked_savepoint(&self) -> bool {
        DB::TransactionManager::get_transaction_depth(self.get()) > 1
    }

    /// Commits through sqlx. sqlx returns `Ok` for the COMMIT of an aborted Postgres
    /// transaction, so an adapter completes its keys first: see [`TransactionAdapter`].
    ///
    /// # Errors
    ///
    /// The errors of sqlx.
    pub(crate) async fn commit(mut self) -> Result<(), sqlx::Error> {
        self.commits = true;
        let committed = DB::TransactionManager::commit(self.connection()).await;
        // A COMMIT that the database refuses has ended the transaction, or leaves it open. In both
        // cases the connection is usable.
        let ended = match &committed {
            Ok(()) => true,
            Err(sqlx::Error::Database(_)) => {
                DB::TransactionManager::rollback(self.connection()).await.is_ok()
            }
            Err(_) => false,
        };
        if ended {
            self.end();
        } else if self.on_drop.is_none() {
            // A full disk has ended the transaction. sqlx would believe for ever that the connection is in it.
            self.close();
        }
        committed
    }

    /// Rolls back. If sqlx does not count exactly this transaction, the connection is closed: the handler
    /// has leaked the guard of a savepoint, or dropped a `begin` half-way. sqlx would roll back to that
    /// savepoint, or nothing, and the connection would be in its pool with the transaction open.
    ///
    /// # Errors
    ///
    /// The errors of sqlx.
    pub(crate) async fn rollback(mut self) -> Result<(), sqlx::Error> {
        if DB::TransactionManager::get_transaction_depth(self.get()) != 1 {
            self.close();
            return Ok(());
        }
        let mut rolled_back = DB::TransactionManager::rollback(self.connection()).await;
        // sqlx's Postgres driver returns the error of a dropped statement to the next one, which it does
        // not send.
        if let Err(sqlx::Error::Database(_)) = rolled_back {
            rolled_back = DB::TransactionManager::rollback(self.connection()).await;
        }
        match &rolled_back {
            Ok(()) => self.end(),
            // The server has answered: it notices that the connection is closed, and nothing is lost.
            Err(sqlx::Error::Database(_)) => self.close(),
            Err(_) => {}
        }
        rolled_back
    }

    /// Closes the connection. The server rolls back.
    pub(crate) fn close(mut self) {
        drop(self.connection.take().map(PoolConnection::detach));
    }

    fn end(&mut self) {
        // Before the pool's next user has the connection, whose COMMIT the hook on SQLite would refuse.
        self.attachment = None;
        if let Some(connection) = self.connection.take() {
            return_to_pool(connection);
        }
    }
}

const HELD: &str = "an open transaction holds its connection";

/// Returns a connection to its pool, or closes it if it does not answer.
pub(super) fn return_to_pool<DB: Database>(mut connection: PoolConnection<DB>) {
    // A dropped connection returns too, but without a bound.
    tokio::spawn(tokio::time::timeout(RETURN_TIMEOUT, connection.return_to_pool()));
}

impl<DB: Database> Drop for OpenTransaction<DB> {
    fn drop(&mut self) {
        let Some(mut connection) = self.connection.take() else { return };
        match self.on_drop.take() {
            Some(on_drop) => on_drop(connection, self.commits),
            None => DB::TransactionManager::start_rollback(&mut connection),
        }
    }
}

impl<DB: Database> fmt::Debug for OpenTransaction<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenTransaction").finish_non_exhaustive()
    }
}

/// Returns the error of a transaction that the handler has ended, broken or kept.
pub(super) fn not_ours(what: &'static str) -> Error {
    Error::new(ErrorKind::Transaction, what)
}
