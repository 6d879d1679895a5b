//! [`Transactional`]: the key becomes permanent in the same COMMIT as what the handler wrote.
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
//! 6. [`DedupTx::mark_done`] sets a mark, and counts only once that is surely there. Where the handler
//!    fails, what it wrote after its last mark is rolled back, the rest is committed with the keys
//!    that it has marked by then, and the other keys are free. Of a call that was cut off, the
//!    database tells whether its mark is there. Where there is none, all is rolled back.
//!
//! # Why not a savepoint per event?
//!
//! Savepoints of which none ever ends are one more level each, and a mark need not be undone by
//! itself: there is one at a time, and the next takes its place.

use std::collections::HashSet;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::BoxFuture;
use http::Extensions;
use sqlx::Database;

use super::call::bounded;
use super::fold::{Answer, fold, identities, plan};
use super::lend::{Borrower, TxUnavailable};
use super::pending::{Pending, StillPending};
use super::recall::{Recaller, Recalls, Replays, doubt, look_ahead, recall};
use super::{Begin, BeginContext, Claim, HandlerSuccess, Ledger};
use crate::adapter::{CallTerms, OpenTransaction, Recall, TransactionAdapter};
use crate::delivery::Delivery;
use crate::error::{Error, ErrorKind};
use crate::key::{DedupKey, Keys};
use crate::observe;

/// Commits a key together with what its handler wrote: every effect in that database is there
/// exactly once.
///
/// Cloning makes another handle to the same ledger.
pub struct Transactional<A>(Arc<Inner<A>>);

struct Inner<A> {
    adapter: Arc<A>,
    /// What this process is running.
    running: Arc<Pending>,
}

impl<A> Transactional<A> {
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

impl<A> Clone for Transactional<A> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<A: fmt::Debug> fmt::Debug for Transactional<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transactional").field("adapter", &self.0.adapter).finish_non_exhaustive()
    }
}

impl<A: TransactionAdapter> Ledger for Transactional<A> {
    type Claim = TransactionClaim<A>;

    async fn begin(
        &self,
        keys: &Keys,
        context: &BeginContext,
    ) -> Result<Begin<Self::Claim>, Error> {
        let inner = &self.0;
        let (events, flat) = plan(keys);
        let rest = inner.running.rest(&flat);
        let asked = rest.as_deref().unwrap_or(&flat);
        if asked.is_empty() {
            return Ok(Begin::InFlight);
        }
        let (terms, bound) = (context.terms(), context.store_timeout);
        // Of one key, the answer is either a transaction or what there is to recall.
        let several = flat.len() > 1 && context.recaller.is_some();
        let before = look_ahead(context, &events, if several { asked } else { &[] }).await?;
        let open = Box::pin(inner.adapter.open(asked, &terms));
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
            doubt(&flat, &mut answers, &before);
        }
        let here = |key: &DedupKey| before.get(key).cloned();
        let response = recall(context, &events, &flat, &mut answers, here).await?;
        let mut folded = fold(events, &flat, &answers);
        let keep = std::mem::take(&mut folded.keep);
        let Some(mut transaction) = opened.transaction else {
            return Ok(folded.without_any_new(response));
        };
        if !folded.give_back.is_empty() {
            let given = inner.adapter.give_back(&mut transaction, &folded.give_back, &terms);
            bounded("give_back", bound, Box::pin(given)).await?;
        }
        if folded.new.is_empty() {
            let ended = if keep.is_empty() {
                bounded("rollback", bound, Box::pin(inner.adapter.rollback(transaction))).await
            } else {
                let kept = inner.adapter.commit(transaction, &keep, &terms);
                bounded("commit", bound, Box::pin(kept)).await
            };
            ended?;
            return Ok(folded.without_any_new(response));
        }
        let (mut held, others) = (Vec::from(folded.held()), folded.others());
        held.extend(keep);
        held.sort_unstable();
        let held: Arc<[DedupKey]> = held.into();
        let delivery = Delivery::transactional(folded.new.into(), folded.attempt, folded.takeover);
        if folded.takeover
            && let Some(key) = delivery.key()
        {
            observe::takeover(key, folded.attempt);
        }
        let running = inner.running.add(Arc::clone(&held));
        let adapter = Arc::clone(&inner.adapter);
        let open = Arc::new(OpenDelivery { adapter, delivery, keys: held, terms, bound });
        let slot = open.slot(transaction);
        Ok(Begin::first(TransactionClaim { open, slot, _running: running }, others))
    }

    fn background(&self) -> usize {
        0
    }

    async fn drain(&self) {}
}

impl<A: TransactionAdapter + Recall> Recalls for Transactional<A> {
    fn recaller(&self) -> Recaller {
        Recaller::new(Arc::clone(&self.0.adapter))
    }
}

impl<A: TransactionAdapter + Recall> Replays for Transactional<A> {}

/// What a delivery's transaction ends by.
struct OpenDelivery<A> {
    adapter: Arc<A>,
    delivery: Delivery,
    keys: Arc<[DedupKey]>,
    terms: CallTerms,
    bound: Duration,
}

impl<A: TransactionAdapter> OpenDelivery<A> {
    /// A slot whose transaction is ended, in a task of its own, should it be dropped.
    fn slot(self: &Arc<Self>, transaction: OpenTransaction<A::Database>) -> Arc<Slot<A::Database>> {
        let open = Arc::clone(self);
        let runtime = tokio::runtime::Handle::current();
        let abandon = move |transaction, marks| {
            let open = Arc::clone(&open);
            // Whoever lets go may be a thread without a runtime, where sqlx's own drop panics. One
            // that has ended drops the task, and its connection, right here.
            let _entered = runtime.enter();
            runtime.spawn(async move {
                let _ = open.rollback(transaction, &marks).await;
            });
        };
        Arc::new(Slot {
            state: Mutex::new(State::Here(transaction)),
            marks: Mutex::default(),
            delivery: self.delivery.clone(),
            mark: self.mark(),
            abandon: Box::new(abandon),
        })
    }

    fn mark(&self) -> Box<SetMark<A::Database>> {
        let (adapter, bound) = (Arc::clone(&self.adapter), self.bound);
        Box::new(move |transaction, mark, instead_of| {
            let adapter = Arc::clone(&adapter);
            Box::pin(async move {
                let set = Box::pin(adapter.mark(transaction, mark, instead_of));
                bounded("mark", bound, set).await
            })
        })
    }

    async fn commit(
        &self,
        mut transaction: OpenTransaction<A::Database>,
        marks: &Marks,
        outcome: &HandlerSuccess,
    ) -> Result<(), Error> {
        if marks.asked > 0 {
            // A transaction that the handler has broken says so here, while what it has marked can
            // still be kept.
            let sound = self.adapter.mark(&mut transaction, marks.asked + 1, None);
            if let Err(error) = sound.await {
                if let Err(error) = self.keep_marked(transaction, marks).await {
                    observe::not_kept(self.delivery.key(), &error);
                }
                return Err(error);
            }
        }
        let terms = outcome.completes(&self.terms);
        self.adapter.commit(transaction, &self.keys, &terms).await
    }

    async fn rollback(
        &self,
        transaction: OpenTransaction<A::Database>,
        marks: &Marks,
    ) -> Result<(), Error> {
        let ended = Box::pin(self.keep_marked(transaction, marks));
        let ended = bounded("rollback", self.bound, ended).await;
        if let (Err(error), true) = (&ended, marks.asked > 0) {
            observe::not_kept(self.delivery.key(), error);
        }
        ended
    }

    /// Rolls back what is not marked as done, and commits the rest; if nothing is, rolls back.
    async fn keep_marked(
        &self,
        mut transaction: OpenTransaction<A::Database>,
        marks: &Marks,
    ) -> Result<(), Error> {
        let (done, rest) = match self.back_to_a_mark(&mut transaction, marks).await {
            Ok(Some(mark)) => self.keys_by(mark, marks),
            Ok(None) => return self.adapter.rollback(transaction).await,
            Err(error) => {
                let _ = self.adapter.rollback(transaction).await;
                return Err(error);
            }
        };
        let given = match &*rest {
            [] => Ok(()),
            rest => self.adapter.give_back(&mut transaction, rest, &self.terms).await,
        };
        if let Err(error) = given {
            let _ = self.adapter.rollback(transaction).await;
            return Err(error);
        }
        self.adapter.commit(transaction, &done, &self.terms).await
    }

    /// The last mark that is there.
    async fn back_to_a_mark(
        &self,
        transaction: &mut OpenTransaction<A::Database>,
        marks: &Marks,
    ) -> Result<Option<u32>, Error> {
        for mark in (marks.set.max(1)..=marks.asked).rev() {
            if self.adapter.roll_back_to(transaction, mark).await? {
                return Ok(Some(mark));
            }
        }
        Ok(None)
    }

    /// The keys to complete with this mark, with all identities of their events, and the others.
    fn keys_by(&self, mark: u32, marks: &Marks) -> (Vec<DedupKey>, Vec<DedupKey>) {
        let done: HashSet<&DedupKey> = marks.keys_by(mark).collect();
        let undone = self.delivery.events().iter().filter(|event| !done.contains(event.key()));
        let rest = identities(undone);
        let done = self.keys.iter().filter(|key| rest.binary_search(key).is_err());
        (done.cloned().collect(), rest)
    }
}

/// A delivery whose keys are claimed in a transaction.
pub struct TransactionClaim<A: TransactionAdapter> {
    open: Arc<OpenDelivery<A>>,
    slot: Arc<Slot<A::Database>>,
    /// To the end: a twin that finds the key free has to find the row too.
    _running: StillPending,
}

impl<A: TransactionAdapter> Claim for TransactionClaim<A> {
    fn delivery(&self) -> &Delivery {
        &self.open.delivery
    }

    fn attach(&self, extensions: &mut Extensions) {
        let (borrower, mark) = Borrower::with_mark();
        extensions.insert(TxHandle { slot: Arc::clone(&self.slot), borrower });
        extensions.insert(mark);
    }

    async fn commit(self, outcome: &HandlerSuccess) -> Result<(), Error> {
        let Some((transaction, marks)) = self.slot.close() else {
            return Err(Error::new(
                ErrorKind::Transaction,
                "committing: the handler has kept its transaction",
            ));
        };
        let commit = Box::pin(self.open.commit(transaction, &marks, outcome));
        bounded("commit", self.open.bound, commit).await
    }

    async fn rollback(self) -> Result<(), Error> {
        // What somebody has kept is rolled back when they let go.
        let Some((transaction, marks)) = self.slot.close() else { return Ok(()) };
        self.open.rollback(transaction, &marks).await
    }
}

impl<A: TransactionAdapter> Drop for TransactionClaim<A> {
    fn drop(&mut self) {
        if let Some((transaction, marks)) = self.slot.close() {
            (self.slot.abandon)(transaction, marks);
        }
    }
}

impl<A: TransactionAdapter> fmt::Debug for TransactionClaim<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TransactionClaim")
            .field("delivery", &self.open.delivery)
            .finish_non_exhaustive()
    }
}

/// What a handler has marked as done.
#[derive(Default)]
struct Marks {
    /// Each with the mark that keeps it.
    keys: Vec<(DedupKey, u32)>,
    /// The last mark that was asked for.
    asked: u32,
    /// The last one that is surely there; 0 is none.
    set: u32,
}

impl Marks {
    /// The next mark, which is to keep this key too, and the one that it takes the place of. After
    /// one that may be there or not, it is set above both: to release what is not there aborts.
    fn ask(&mut self, key: &DedupKey) -> (u32, Option<u32>) {
        let last = (self.set == self.asked && self.set > 0).then_some(self.set);
        self.asked += 1;
        self.keys.push((key.clone(), self.asked));
        (self.asked, last)
    }

    fn answered(&mut self, mark: u32, answer: &Result<(), Error>) {
        match answer {
            Ok(()) => self.set = mark,
            Err(error) if error.kind() == ErrorKind::Transaction => {
                self.asked = mark - 1;
                self.keys.retain(|(_, by)| *by < mark);
            }
            Err(_unknown) => {}
        }
    }

    fn keys_by(&self, mark: u32) -> impl Iterator<Item = &DedupKey> {
        self.keys.iter().filter(move |(_, by)| *by <= mark).map(|(key, _)| key)
    }
}

/// Where a transaction is while its handler runs.
struct Slot<DB: Database> {
    state: Mutex<State<DB>>,
    marks: Mutex<Marks>,
    delivery: Delivery,
    mark: Box<SetMark<DB>>,
    abandon: Box<dyn Fn(OpenTransaction<DB>, Marks) + Send + Sync>,
}

type SetMark<DB> = dyn for<'t> Fn(&'t mut OpenTransaction<DB>, u32, Option<u32>) -> BoxFuture<'t, Result<(), Error>>
    + Send
    + Sync;

enum State<DB: Database> {
    Here(OpenTransaction<DB>),
    Lent,
    /// The delivery has ended.
    Closed,
}

impl<DB: Database> Slot<DB> {
    /// Ends the lending; `None` if the transaction is not here.
    fn close(&self) -> Option<(OpenTransaction<DB>, Marks)> {
        match std::mem::replace(&mut *lock(&self.state), State::Closed) {
            State::Here(transaction) => Some((transaction, std::mem::take(&mut lock(&self.marks)))),
            State::Lent | State::Closed => None,
        }
    }

    fn lend(&self) -> Result<OpenTransaction<DB>, TxUnavailable> {
        let mut state = lock(&self.state);
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
        let mut state = lock(&self.state);
        if let State::Lent = *state {
            *state = State::Here(transaction);
        } else {
            drop(state);
            // All of it, for its delivery has ended otherwise.
            (self.abandon)(transaction, Marks::default());
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
/// Cloning makes another handle to the same transaction. Where the *request* was cloned, as by a
/// layer that retries, only one of its copies can have the transaction.
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
pub struct TxHandle<DB: Database> {
    slot: Arc<Slot<DB>>,
    borrower: Borrower,
}

impl<DB: Database> TxHandle<DB> {
    /// Lends the transaction, until the answer is dropped.
    ///
    /// # Errors
    ///
    /// [`TxUnavailable::Lent`] while somebody else has it, [`TxUnavailable::Copied`] if another
    /// copy of the request has had it, [`TxUnavailable::Closed`] once the delivery has ended.
    pub fn lend(&self) -> Result<DedupTx<DB>, TxUnavailable> {
        let slot = Arc::clone(&self.slot);
        let lent = DedupTx { transaction: Some(slot.lend()?), slot };
        self.borrower.may_have_it()?;
        Ok(lent)
    }
}

impl<DB: Database> Clone for TxHandle<DB> {
    fn clone(&self) -> Self {
        Self { slot: Arc::clone(&self.slot), borrower: self.borrower.clone() }
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
/// [`begin`](sqlx::Connection::begin) makes one. In a batch, [`done`](Self::done) keeps an event
/// whatever becomes of the others.
pub struct DedupTx<DB: Database> {
    /// Taken when dropped.
    transaction: Option<OpenTransaction<DB>>,
    slot: Arc<Slot<DB>>,
}

impl<DB: Database> DedupTx<DB> {
    /// Marks one event of a batch as finished: **all** that was written in this transaction so far
    /// is committed with its key, even if the handler then fails, and the retry skips it. Answers
    /// whether it is an event of this delivery that is to run.
    ///
    /// Nothing of it is durable before the delivery has ended: a process that dies takes it along,
    /// and the retry runs everything.
    ///
    /// Roll back first what an event that has failed wrote: let each run under a savepoint of
    /// [`begin`](sqlx::Connection::begin). [The guide](crate::guide::transactions#multi-event-deliveries) shows it.
    ///
    /// # Errors
    ///
    /// The database has not answered in time, or has refused since the transaction is broken, or
    /// the delivery has ended. The handler should fail: what it has marked before is kept.
    ///
    /// # Cancel safety
    ///
    /// The event counts as done if the mark was set by then, or with the next one that is.
    pub async fn mark_done(&mut self, key: &DedupKey) -> Result<bool, Error> {
        let slot = &self.slot;
        if !slot.delivery.runs(key) {
            return Ok(false);
        }
        let Some(transaction) = &mut self.transaction else { return Ok(false) };
        if slot.is_closed() {
            return Err(Error::new(ErrorKind::Transaction, "marking: the delivery has ended"));
        }
        let (mark, instead_of) = lock(&slot.marks).ask(key);
        let answer = (slot.mark)(transaction, mark, instead_of).await;
        lock(&slot.marks).answered(mark, &answer);
        answer?;
        slot.delivery.marked().insert(key.clone());
        Ok(true)
    }
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
