//! Lends a delivery's transaction: to one borrower at a time, and to one copy of the request.
//!
//! A layer inside this one that runs the handler again, such as a retry, clones the request with its
//! extensions. Both runs would write in the same transaction, and their effects would commit together.
//! So only the copy that borrows first may borrow again.
//!
//! 1. Each clone of a handle has a number of its own, and so has the handle in each copy of a request.
//! 2. A handler may clone its handle too. [`CopyMark`] is held by the request's extensions only, so it
//!    is cloned only with the *request*. Until then, every clone of the handle may borrow.
//!
//! A request without a key has no transaction before its handler borrows one. Until the transaction is
//! open, the slot counts as lent. So two borrowers never open two transactions.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use http::Extensions;
use sqlx::Database;
use tokio::runtime::Handle;

use super::super::call::bounded;
use super::super::contract::HandlerSuccess;
use crate::adapter::TransactionAdapter;
use crate::adapter::contract::CallTerms;
use crate::adapter::transaction::{OpenTransaction, Opened};
use crate::error::{Error, ErrorKind};
use crate::key::{DedupKey, List};

/// Why a transaction cannot be lent.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum TxUnavailable {
    /// There is no transaction: the ledger is not transactional, or uses another database, or the
    /// request's method is not deduplicated.
    Absent,
    /// The transaction is lent already.
    Lent,
    /// Another copy of the request borrowed it, because a layer inside this one runs the handler
    /// again. The writes of the earlier run would commit too.
    Copied,
    /// The delivery has ended, and the transaction with it.
    Closed,
    /// The request has no key, and the store did not open a transaction for it. The handler may try
    /// again.
    Unopened(Error),
}

impl fmt::Display for TxUnavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Absent => "there is no transaction over this database",
            Self::Lent => "the delivery's transaction is lent already",
            Self::Copied => "another copy of the request borrowed the delivery's transaction",
            Self::Closed => "the delivery's transaction has ended",
            Self::Unopened(_) => "the store opened no transaction",
        })
    }
}

impl std::error::Error for TxUnavailable {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Unopened(error) => Some(error),
            Self::Absent | Self::Lent | Self::Copied | Self::Closed => None,
        }
    }
}

/// Holds a transaction while its handler may borrow it.
pub(super) struct LendSlot<DB: Database> {
    state: Mutex<State<DB>>,
    adapter: Arc<dyn TransactionAdapter<Database = DB>>,
    /// The keys to complete, sorted.
    keys: List<DedupKey>,
    terms: CallTerms,
    store_timeout: Duration,
    /// Ends a transaction whose holder drops it on a thread without a runtime.
    runtime: Handle,
    /// The number of the next handle.
    next: AtomicU64,
    /// The number of the handle that borrowed first.
    holder: OnceLock<u64>,
    is_copied: AtomicBool,
}

/// Stays in the request's extensions, and so is cloned with the request only.
struct CopyMark<DB: Database>(Arc<LendSlot<DB>>);

impl<DB: Database> Clone for CopyMark<DB> {
    fn clone(&self) -> Self {
        self.0.is_copied.store(true, Ordering::Release);
        Self(Arc::clone(&self.0))
    }
}

pub(super) enum State<DB: Database> {
    /// The request has no key, and its handler has not borrowed a transaction yet.
    Unopened,
    Available(OpenTransaction<DB>),
    Lent,
    /// The delivery has ended.
    Closed,
}

/// Opens a transaction that claims these keys.
pub(super) async fn open<DB: Database>(
    adapter: &dyn TransactionAdapter<Database = DB>,
    keys: &[DedupKey],
    terms: &CallTerms,
    store_timeout: Duration,
) -> Result<Opened<DB>, Error> {
    let bound = store_timeout.saturating_add(adapter.open_timeout());
    bounded(&["begin", "opening a transaction"], bound, || adapter.open(keys, terms)).await
}

impl<DB: Database> LendSlot<DB> {
    /// Without a `transaction`, the first borrower opens it.
    ///
    /// # Panics
    ///
    /// Panics outside a runtime.
    pub(super) fn new(
        adapter: &Arc<dyn TransactionAdapter<Database = DB>>,
        keys: List<DedupKey>,
        terms: CallTerms,
        store_timeout: Duration,
        transaction: Option<OpenTransaction<DB>>,
    ) -> Arc<Self> {
        let state = Mutex::new(transaction.map_or(State::Unopened, State::Available));
        let (adapter, runtime) = (Arc::clone(adapter), Handle::current());
        let (next, holder, is_copied) = Default::default();
        Arc::new(Self {
            state,
            adapter,
            keys,
            terms,
            store_timeout,
            runtime,
            next,
            holder,
            is_copied,
        })
    }

    /// Ends the lending. Returns the state before.
    pub(super) fn close(&self) -> State<DB> {
        std::mem::replace(&mut *lock(&self.state), State::Closed)
    }

    pub(super) async fn commit(
        &self,
        transaction: OpenTransaction<DB>,
        success: &HandlerSuccess,
    ) -> Result<(), Error> {
        let with_response = success.terms(&self.terms);
        let terms = with_response.as_ref().unwrap_or(&self.terms);
        bounded(&["commit", "committing the handler's transaction"], self.store_timeout, || {
            self.adapter.commit(transaction, &self.keys, terms)
        })
        .await
    }

    pub(super) async fn rollback(&self, transaction: OpenTransaction<DB>) -> Result<(), Error> {
        bounded(&["rollback", "rolling the handler's transaction back"], self.store_timeout, || {
            self.adapter.rollback(transaction)
        })
        .await
    }

    /// Rolls a transaction back in a task of its own.
    pub(super) fn end_detached(self: &Arc<Self>, transaction: OpenTransaction<DB>) {
        let slot = Arc::clone(self);
        // sqlx panics when a connection is dropped on a thread without a runtime. A runtime that has
        // ended drops the task, with its connection, on this thread.
        let _entered = self.runtime.enter();
        self.runtime.spawn(async move {
            let _ = slot.rollback(transaction).await;
        });
    }

    /// Returns the transaction, or `None` if the borrower has to open it.
    fn lend(&self) -> Result<Option<OpenTransaction<DB>>, TxUnavailable> {
        let mut state = lock(&self.state);
        match std::mem::replace(&mut *state, State::Lent) {
            State::Unopened => Ok(None),
            State::Available(transaction) => Ok(Some(transaction)),
            State::Lent => Err(TxUnavailable::Lent),
            State::Closed => {
                *state = State::Closed;
                Err(TxUnavailable::Closed)
            }
        }
    }

    /// Fails if another copy of the request borrowed the transaction. The caller holds the transaction.
    fn check_copy(&self, number: u64) -> Result<(), TxUnavailable> {
        let is_holder = *self.holder.get_or_init(|| number) == number;
        if !is_holder && self.is_copied.load(Ordering::Acquire) {
            return Err(TxUnavailable::Copied);
        }
        Ok(())
    }

    /// `None` if the borrower has not opened the transaction.
    fn take_back(self: &Arc<Self>, transaction: Option<OpenTransaction<DB>>) {
        let mut state = lock(&self.state);
        if let State::Lent = *state {
            *state = transaction.map_or(State::Unopened, State::Available);
        } else if let Some(transaction) = transaction {
            drop(state);
            // The delivery has answered 500.
            self.end_detached(transaction);
        }
    }

    fn is_closed(&self) -> bool {
        matches!(*lock(&self.state), State::Closed)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Lends the delivery's transaction; in the request's extensions under
/// [`DedupLayer::transactional`](crate::DedupLayer::transactional).
///
/// A clone is a handle to the same transaction. If a layer clones the *request*, for example to
/// retry, only one of the copies can borrow the transaction.
///
/// # Example
///
/// ```no_run
/// use http::Request;
/// use sqlx::Postgres;
/// use tower_dedup::TxHandle;
///
/// async fn handler<B>(request: Request<B>) -> Result<(), Box<dyn std::error::Error>> {
///     let handle = request.extensions().get::<TxHandle<Postgres>>().ok_or("not deduplicated")?;
///     let mut tx = handle.lend().await?;
///     sqlx::query("UPDATE orders SET paid = true").execute(&mut *tx).await?;
///     Ok(())
/// }
/// # let _ = handler::<()>;
/// ```
pub struct TxHandle<DB: Database> {
    slot: Arc<LendSlot<DB>>,
    number: u64,
}

impl<DB: Database> TxHandle<DB> {
    /// Lends the transaction until the returned [`DedupTx`] is dropped.
    ///
    /// A delivery has its transaction before its handler runs. A request without a key gets its
    /// transaction here, within [`store_timeout`](crate::DedupLayer::store_timeout). On SQLite, it
    /// also waits for the write lock.
    ///
    /// # Errors
    ///
    /// [`TxUnavailable::Lent`] while the transaction is lent, [`TxUnavailable::Copied`] if another
    /// copy of the request borrowed it, [`TxUnavailable::Closed`] once the delivery has ended,
    /// [`TxUnavailable::Unopened`] if the store opened none.
    ///
    /// # Cancel safety
    ///
    /// If the call is dropped while it opens the transaction, that transaction is rolled back. The
    /// next call opens another one.
    pub async fn lend(&self) -> Result<DedupTx<DB>, TxUnavailable> {
        let slot = Arc::clone(&self.slot);
        // Dropped without a transaction, it leaves the slot unopened again.
        let mut lent = DedupTx { transaction: slot.lend()?, slot };
        lent.slot.check_copy(self.number)?;
        if lent.transaction.is_none() {
            let LendSlot { adapter, keys, terms, store_timeout, .. } = &*lent.slot;
            let opened = open(&**adapter, keys, terms, *store_timeout).await;
            let opened = opened.and_then(|opened| {
                let context = "opening a transaction: the adapter opened none";
                opened.transaction.ok_or_else(|| Error::new(ErrorKind::Corrupt, context))
            });
            lent.transaction = Some(opened.map_err(TxUnavailable::Unopened)?);
            // The delivery has ended meanwhile: nothing would commit.
            if lent.slot.is_closed() {
                return Err(TxUnavailable::Closed);
            }
        }
        Ok(lent)
    }

    /// Adds the first handle to a request.
    pub(super) fn attach(slot: &Arc<LendSlot<DB>>, extensions: &mut Extensions) {
        extensions.insert(Self::of(slot));
        extensions.insert(CopyMark(Arc::clone(slot)));
    }

    fn of(slot: &Arc<LendSlot<DB>>) -> Self {
        let number = slot.next.fetch_add(1, Ordering::Relaxed);
        Self { slot: Arc::clone(slot), number }
    }
}

impl<DB: Database> Clone for TxHandle<DB> {
    fn clone(&self) -> Self {
        Self::of(&self.slot)
    }
}

impl<DB: Database> fmt::Debug for TxHandle<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TxHandle").finish_non_exhaustive()
    }
}

/// The delivery's transaction: a connection that commits together with the event's key if the handler
/// succeeds, and rolls back if it fails.
///
/// ```
/// # #[cfg(all(feature = "axum", feature = "postgres"))] {
/// use axum::http::StatusCode;
/// use tower_dedup::sqlx::{self, Postgres};
/// use tower_dedup::{DedupTx, Delivery};
///
/// async fn on_paid(mut tx: DedupTx<Postgres>, event: Delivery) -> Result<(), StatusCode> {
///     let insert = sqlx::query("INSERT INTO payments (event) VALUES ($1)").bind(event.id());
///     insert.execute(&mut *tx).await.map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?;
///     Ok(()) // committed together with the key
/// }
/// # let _: axum::Router = axum::Router::new().route("/", axum::routing::post(on_paid));
/// # }
/// ```
///
/// It is an extractor with the feature `axum`. Drop it before the handler returns. If a task still
/// holds it then, the answer is 500 and the transaction is rolled back.
///
/// Only the layer sends `COMMIT` and `ROLLBACK`. For a savepoint of your own, call
/// [`begin`](sqlx::Connection::begin). The events of a multi-event delivery commit together, or none does.
pub struct DedupTx<DB: Database> {
    /// `None` until it is open. Taken when dropped.
    transaction: Option<OpenTransaction<DB>>,
    slot: Arc<LendSlot<DB>>,
}

impl<DB: Database> Deref for DedupTx<DB> {
    type Target = DB::Connection;

    #[expect(
        clippy::expect_used,
        reason = "`lend` returns it with a transaction, and only `drop` takes the transaction"
    )]
    fn deref(&self) -> &DB::Connection {
        self.transaction.as_ref().expect("a `DedupTx` holds its transaction").get()
    }
}

impl<DB: Database> DerefMut for DedupTx<DB> {
    #[expect(
        clippy::expect_used,
        reason = "`lend` returns it with a transaction, and only `drop` takes the transaction"
    )]
    fn deref_mut(&mut self) -> &mut DB::Connection {
        self.transaction.as_mut().expect("a `DedupTx` holds its transaction").connection()
    }
}

impl<DB: Database> Drop for DedupTx<DB> {
    fn drop(&mut self) {
        self.slot.take_back(self.transaction.take());
    }
}

impl<DB: Database> fmt::Debug for DedupTx<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DedupTx").field("transaction", &self.transaction).finish_non_exhaustive()
    }
}
