//! [`TransactionLedger`]: the key becomes permanent in the same COMMIT as what the handler wrote.
//!
//! 1. A delivery claims its keys in a transaction, lends it to the handler, and commits it after a
//!    success, before the response leaves. A handler that fails has its transaction rolled back,
//!    and the key with it; so has a process that dies.
//! 2. The handler takes the transaction as a [`DedupTx`], which is a connection, not sqlx's
//!    `Transaction`: there is nothing to commit. Savepoints work as they always do.
//! 3. What a handler can do wrong ends in a 500 and a rollback, never in a 2xx: to keep the
//!    transaction past its response, to end it by itself, to go on after an error that has aborted
//!    it.
//! 4. A commit that fails is 503 where a retry may succeed, and so is one whose outcome is unknown:
//!    the retry finds out. The layer never runs a handler again by itself.
//! 5. An event that this process is running already is in flight without asking the store.
//!
//! [`Delivery::done`] keeps nothing here: what a failed handler wrote is rolled back, all of it.

use std::collections::HashMap;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http::Extensions;
use sqlx::Database;

use super::call::bounded;
use super::fold::{Answer, fold, plan};
use super::pending::{Pending, StillPending};
use super::recall::{Recaller, Recalls, Replays, look_ahead, recall};
use super::{Begin, BeginContext, Claim, Ledger, Outcome};
use crate::adapter::{OpenTransaction, Recall, Receipt, TransactionAdapter};
use crate::delivery::Delivery;
use crate::error::{Error, ErrorKind};
use crate::key::{DedupKey, Keys};
use crate::observe;

/// Commits a key together with what its handler wrote: every effect in that database is there
/// exactly once.
///
/// Cloning makes another handle to the same ledger.
pub struct TransactionLedger<A>(Arc<Inner<A>>);

struct Inner<A> {
    adapter: Arc<A>,
    /// What this process is running.
    running: Arc<Pending>,
}

impl<A> TransactionLedger<A> {
    /// A ledger over this database.
    #[must_use]
    pub fn new(adapter: A) -> Self {
        Self(Arc::new(Inner { adapter: Arc::new(adapter), running: Arc::default() }))
    }

    /// The store.
    #[must_use]
    pub fn adapter(&self) -> &A {
        &self.0.adapter
    }
}

impl<A> Clone for TransactionLedger<A> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<A: fmt::Debug> fmt::Debug for TransactionLedger<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TransactionLedger")
            .field("adapter", &self.0.adapter)
            .finish_non_exhaustive()
    }
}

impl<A: TransactionAdapter> Ledger for TransactionLedger<A> {
    type Claim = TransactionClaim<A>;

    async fn begin(
        &self,
        keys: &Keys,
        context: &BeginContext,
    ) -> Result<Begin<Self::Claim>, Error> {
        let inner = &self.0;
        let (elements, flat) = plan(keys);
        let rest = inner.running.rest(&flat);
        let asked = rest.as_deref().unwrap_or(&flat);
        if asked.is_empty() {
            return Ok(Begin::InFlight);
        }
        let (receipt, bound) = (context.receipt(), context.store_timeout);
        // Of one event, the answer is either a transaction or what there is to recall.
        let several = elements.len() > 1 && context.recaller.is_some();
        let before = if several { look_ahead(context, asked).await? } else { HashMap::new() };
        let open = Box::pin(inner.adapter.open(asked, &receipt));
        let opened = bounded("begin", bound.saturating_add(inner.adapter.patience()), open).await?;
        if opened.answers.len() != asked.len() {
            return Err(Error::new(ErrorKind::Corrupt, "counting the answers of the store"));
        }
        let mut known = asked.iter().zip(&opened.answers).peekable();
        let mut answers: Vec<Answer> = flat
            .iter()
            .map(|key| match known.next_if(|(asked, _)| *asked == key) {
                Some((_, answer)) => (*answer).into(),
                None => Answer::InFlight,
            })
            .collect();
        if several {
            // Complete since we looked: the retry will find what is kept with it.
            for (key, answer) in flat.iter().zip(&mut answers) {
                if matches!(answer, Answer::Duplicate(_)) && !before.contains_key(key) {
                    *answer = Answer::InFlight;
                }
            }
        }
        let here = |key: &DedupKey| before.get(key).cloned();
        let response = recall(context, &elements, &flat, &mut answers, here).await?;
        let mut folded = fold(elements, &flat, &answers);
        let keep = std::mem::take(&mut folded.keep);
        let Some(mut transaction) = opened.transaction else {
            return Ok(folded.without_any_new(response));
        };
        if !folded.give_back.is_empty() {
            let given = inner.adapter.give_back(&mut transaction, &folded.give_back, &receipt);
            bounded("give_back", bound, Box::pin(given)).await?;
        }
        if folded.new.is_empty() {
            let ended = if keep.is_empty() {
                bounded("rollback", bound, Box::pin(inner.adapter.rollback(transaction))).await
            } else {
                let kept = inner.adapter.commit(transaction, &keep, &receipt);
                bounded("commit", bound, Box::pin(kept)).await
            };
            ended?;
            return Ok(folded.without_any_new(response));
        }
        let (mut held, others) = (folded.held(), folded.others());
        held.extend(keep);
        held.sort_unstable();
        let held: Arc<[DedupKey]> = held.into();
        let delivery = Delivery::new(folded.new, folded.attempt, folded.takeover);
        if folded.takeover
            && let Some(key) = delivery.key()
        {
            observe::takeover(key, folded.attempt);
        }
        let claim = TransactionClaim {
            slot: inner.slot(transaction, bound),
            adapter: Arc::clone(&inner.adapter),
            delivery,
            _running: inner.running.add(Arc::clone(&held)),
            keys: held,
            receipt,
            store_timeout: bound,
        };
        Ok(Begin::first(claim, others))
    }

    fn background(&self) -> usize {
        0
    }

    async fn drain(&self) {}
}

impl<A: TransactionAdapter + Recall> Recalls for TransactionLedger<A> {
    fn recaller(&self) -> Recaller {
        Recaller::new(Arc::clone(&self.0.adapter))
    }
}

impl<A: TransactionAdapter + Recall> Replays for TransactionLedger<A> {}

impl<A: TransactionAdapter> Inner<A> {
    /// A slot whose transaction is rolled back, in a task of its own, should it be dropped.
    fn slot(
        &self,
        transaction: OpenTransaction<A::Database>,
        bound: Duration,
    ) -> Arc<Slot<A::Database>> {
        let adapter = Arc::clone(&self.adapter);
        let runtime = tokio::runtime::Handle::current();
        let abandon = move |transaction| {
            let adapter = Arc::clone(&adapter);
            // Whoever lets go may be a thread without a runtime, where sqlx's own drop panics. One
            // that has ended drops the task, and its connection, right here.
            let _entered = runtime.enter();
            runtime.spawn(async move {
                let rollback = Box::pin(adapter.rollback(transaction));
                let _ = bounded("rollback", bound, rollback).await;
            });
        };
        Arc::new(Slot { state: Mutex::new(State::Here(transaction)), abandon: Box::new(abandon) })
    }
}

/// A delivery whose keys are claimed in a transaction.
pub struct TransactionClaim<A: TransactionAdapter> {
    adapter: Arc<A>,
    slot: Arc<Slot<A::Database>>,
    delivery: Delivery,
    keys: Arc<[DedupKey]>,
    receipt: Receipt,
    store_timeout: Duration,
    /// To the end: a twin that finds the key free has to find the row too.
    _running: StillPending,
}

impl<A: TransactionAdapter> Claim for TransactionClaim<A> {
    fn delivery(&self) -> &Delivery {
        &self.delivery
    }

    fn attach(&self, extensions: &mut Extensions) {
        extensions.insert(TxHandle(Arc::clone(&self.slot)));
    }

    async fn commit(self, outcome: &Outcome) -> Result<(), Error> {
        let Some(transaction) = self.slot.close() else {
            return Err(Error::new(
                ErrorKind::Transaction,
                "committing: the handler has kept its transaction",
            ));
        };
        let receipt = outcome.completes(self.receipt.clone());
        let commit = Box::pin(self.adapter.commit(transaction, &self.keys, &receipt));
        bounded("commit", self.store_timeout, commit).await
    }

    async fn rollback(self) -> Result<(), Error> {
        // What somebody has kept is rolled back when they let go.
        let Some(transaction) = self.slot.close() else { return Ok(()) };
        let rollback = Box::pin(self.adapter.rollback(transaction));
        bounded("rollback", self.store_timeout, rollback).await
    }
}

impl<A: TransactionAdapter> Drop for TransactionClaim<A> {
    fn drop(&mut self) {
        if let Some(transaction) = self.slot.close() {
            (self.slot.abandon)(transaction);
        }
    }
}

impl<A: TransactionAdapter> fmt::Debug for TransactionClaim<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TransactionClaim").field("delivery", &self.delivery).finish_non_exhaustive()
    }
}

/// Where a transaction is while its handler runs.
struct Slot<DB: Database> {
    state: Mutex<State<DB>>,
    abandon: Box<dyn Fn(OpenTransaction<DB>) + Send + Sync>,
}

enum State<DB: Database> {
    Here(OpenTransaction<DB>),
    Lent,
    /// The delivery has ended.
    Closed,
}

impl<DB: Database> Slot<DB> {
    /// Ends the lending; `None` if the transaction is not here.
    fn close(&self) -> Option<OpenTransaction<DB>> {
        match std::mem::replace(&mut *self.lock(), State::Closed) {
            State::Here(transaction) => Some(transaction),
            State::Lent | State::Closed => None,
        }
    }

    fn lend(&self) -> Result<OpenTransaction<DB>, TxUnavailable> {
        let mut state = self.lock();
        match std::mem::replace(&mut *state, State::Lent) {
            State::Here(transaction) => Ok(transaction),
            State::Lent => Err(TxUnavailable::Lent),
            State::Closed => {
                *state = State::Closed;
                Err(TxUnavailable::Closed)
            }
        }
    }

    fn take_back(&self, transaction: OpenTransaction<DB>) {
        let mut state = self.lock();
        if let State::Lent = *state {
            *state = State::Here(transaction);
        } else {
            drop(state);
            (self.abandon)(transaction);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<DB>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Lends the delivery's transaction; in the request's extensions under
/// [`DedupLayer::transactional`](crate::DedupLayer::transactional).
///
/// Cloning makes another handle to the same transaction.
///
/// # Example
///
/// ```no_run
/// use http::Request;
/// use sqlx::Postgres;
/// use tower_dedup::ledger::TxHandle;
///
/// async fn handler<B>(request: Request<B>) -> Result<(), Box<dyn std::error::Error>> {
///     let handle = request.extensions().get::<TxHandle<Postgres>>().ok_or("not deduplicated")?;
///     let mut tx = handle.lend()?;
///     sqlx::query("UPDATE orders SET paid = true").execute(&mut *tx).await?;
///     Ok(())
/// }
/// # let _ = handler::<()>;
/// ```
pub struct TxHandle<DB: Database>(Arc<Slot<DB>>);

impl<DB: Database> TxHandle<DB> {
    /// Lends the transaction, until the answer is dropped.
    ///
    /// # Errors
    ///
    /// [`TxUnavailable::Lent`] while somebody else has it, [`TxUnavailable::Closed`] once the
    /// delivery has ended.
    pub fn lend(&self) -> Result<DedupTx<DB>, TxUnavailable> {
        Ok(DedupTx { transaction: Some(self.0.lend()?), slot: Arc::clone(&self.0) })
    }
}

impl<DB: Database> Clone for TxHandle<DB> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<DB: Database> fmt::Debug for TxHandle<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TxHandle").finish_non_exhaustive()
    }
}

/// The delivery's transaction: a connection, which commits with the event's key if the handler
/// succeeds, and rolls back if it does not.
///
/// With the feature `axum` it is an extractor. Give it back by dropping it before the handler
/// returns: one that is kept, in a spawned task for instance, makes the answer a 500, and is
/// rolled back.
///
/// `COMMIT` and `ROLLBACK` are the layer's. A savepoint is yours:
/// [`begin`](sqlx::Connection::begin) makes one.
pub struct DedupTx<DB: Database> {
    /// Taken when dropped.
    transaction: Option<OpenTransaction<DB>>,
    slot: Arc<Slot<DB>>,
}

impl<DB: Database> Deref for DedupTx<DB> {
    type Target = DB::Connection;

    #[expect(clippy::expect_used, reason = "only dropping takes it")]
    fn deref(&self) -> &DB::Connection {
        self.transaction.as_ref().expect("a transaction until it is dropped").get()
    }
}

impl<DB: Database> DerefMut for DedupTx<DB> {
    #[expect(clippy::expect_used, reason = "only dropping takes it")]
    fn deref_mut(&mut self) -> &mut DB::Connection {
        self.transaction.as_mut().expect("a transaction until it is dropped").connection()
    }
}

impl<DB: Database> Drop for DedupTx<DB> {
    fn drop(&mut self) {
        if let Some(transaction) = self.transaction.take() {
            self.slot.take_back(transaction);
        }
    }
}

impl<DB: Database> fmt::Debug for DedupTx<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DedupTx").field("transaction", &self.transaction).finish_non_exhaustive()
    }
}

/// Why a transaction cannot be lent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum TxUnavailable {
    /// There is none: the ledger is not transactional, or over another database, or the request
    /// was not deduplicated.
    Absent,
    /// Somebody else has it: there is one.
    Lent,
    /// The delivery has ended, and its transaction with it.
    Closed,
}

impl fmt::Display for TxUnavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Absent => "there is no transaction over this database",
            Self::Lent => "the delivery's transaction is lent already",
            Self::Closed => "the delivery's transaction has ended",
        })
    }
}

impl std::error::Error for TxUnavailable {}
