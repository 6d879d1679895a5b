//! Completion in the handler's own transaction: [`Delivery::begin`], [`Delivery::completion`].
//!
//! 1. The layer claims under a lease. The handler opens a transaction, writes, and completes the
//!    events in it. The layer holds no connection while the handler runs.
//! 2. A completion writes the rows of all events that the delivery holds, if none is complete. The
//!    first COMMIT wins, whoever holds the lease. So the row decides, and the lease only prevents
//!    runs that could not commit.
//! 3. A transaction that [`DedupTx`] commits is known to have completed its events. After a
//!    completion by another driver, the ledger reads the rows: see
//!    [`Transactional`](super::Transactional).
//! 4. A delivery that holds nothing completes nothing: one in shadow, one of a layer that is off,
//!    one that runs unprotected. Its transaction contains only the handler's writes.

use std::any::Any;
use std::fmt;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
use std::ops::{Deref, DerefMut};

#[cfg(any(feature = "postgres", feature = "sqlite"))]
use sqlx::{Connection, Database, Pool, Transaction};

use super::held::{Effect, Held};
use crate::adapter::KeyedTerms;
use crate::adapter::contract::{Completion, StoredResponse};
#[cfg(any(feature = "postgres", feature = "sqlite"))]
use crate::adapter::own_completion::Within;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
use crate::adapter::transaction::{CompletionDatabase, begin, is_completed};
use crate::delivery::Delivery;
use crate::error::{BoxError, StoreError, StoreErrorKind};

impl Delivery {
    /// Begins a transaction of the handler on the handler's own pool. [`DedupTx::commit`] completes
    /// the events of the delivery in it: the key and the handler's writes, in one COMMIT.
    ///
    /// ```
    /// # #[cfg(all(feature = "axum", feature = "postgres"))] {
    /// use axum::extract::State;
    /// use tower_dedup::sqlx::{self, PgPool};
    /// use tower_dedup::{CommitError, Delivery};
    ///
    /// async fn on_paid(State(pool): State<PgPool>, event: Delivery) -> Result<(), CommitError> {
    ///     let mut tx = event.begin(&pool).await?;
    ///     let insert = sqlx::query("INSERT INTO payments (event) VALUES ($1)").bind(event.id());
    ///     insert.execute(&mut *tx).await?;
    ///     tx.commit().await // the key and the payment
    /// }
    /// # let route = axum::routing::post(on_paid);
    /// # let _: axum::Router<PgPool> = axum::Router::new().route("/", route);
    /// # }
    /// ```
    ///
    /// The pool leads to the database of the layer's store, and may be another pool than the
    /// store's. On SQLite, the transaction begins by `BEGIN IMMEDIATE`, after those of other
    /// handlers.
    ///
    /// On Postgres the transaction may be idle for a [bounded
    /// time](crate::adapter::PostgresOptions::transaction_idle_timeout). An idle connection that
    /// has become silent costs 1 s. A connection that was left in a transaction is closed.
    ///
    /// In [shadow](crate::Mode::Shadow), in a layer that is off, and in an
    /// [unprotected](Self::is_unprotected) run, the transaction completes no event: `commit` only
    /// commits.
    ///
    /// # Errors
    ///
    /// [`CommitErrorKind::Config`] for a pool of another kind of database than the store's, for a
    /// store of another crate (use [`completion`](Self::completion)), and for one that completes no
    /// events in a transaction. Otherwise [`CommitErrorKind::Unavailable`], also for a pool without
    /// a free connection.
    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    pub async fn begin<DB: CompletionDatabase>(
        &self,
        pool: &Pool<DB>,
    ) -> Result<DedupTx<DB>, CommitError> {
        let held = self.held()?;
        let completion = held.completion(self.keys_to_complete())?.within(Within::Marked);
        // Before the transaction begins: an error that the handler ignores is no success.
        held.say(Effect::Begun);
        let begun = begin::<_, CommitError>(pool, &completion).await?;
        let (transaction, turn) = begun.ok_or_else(|| CommitError::config(OTHER_STORE))?;
        let event = self.clone();
        Ok(DedupTx { transaction, event, completion, is_early: false, _turn: turn })
    }

    /// Returns the statement that completes the events of this delivery, for a transaction of
    /// another driver than sqlx.
    ///
    /// Execute it in the transaction that has the handler's writes, with its one parameter, and
    /// commit. The statement fails if an event is complete already: return the error, and roll
    /// back. For a delivery that holds no event, the statement completes nothing.
    ///
    /// # Errors
    ///
    /// [`CommitErrorKind::Config`] for a store that completes no events in a transaction.
    pub fn completion(&self) -> Result<Completion, CommitError> {
        let (held, keys) = (self.held()?, self.keys_to_complete());
        let completion = held.completion(keys)?;
        if !keys.is_empty() {
            held.say(Effect::Begun);
        }
        Ok(completion)
    }

    /// Completes the events of this delivery in a transaction of sqlx that the handler has begun.
    ///
    /// Does the same as [`completion`](Self::completion), with the errors of this crate. Commit
    /// afterwards. Under [`DedupLayer::transactional`](crate::DedupLayer::transactional), the layer
    /// reads the rows after a success, which it does not do after [`begin`](Self::begin).
    ///
    /// # Errors
    ///
    /// [`CommitErrorKind::AlreadyComplete`] or [`CommitErrorKind::MissingRow`]; on Postgres
    /// [`CommitErrorKind::Config`] if nothing was written before in this transaction; on SQLite
    /// [`CommitErrorKind::TransactionEnded`] if no transaction is open. Otherwise the errors of the
    /// database. On Postgres the transaction is aborted then; on SQLite roll it back.
    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    pub async fn complete_in<C>(&self, connection: &mut C) -> Result<(), CommitError>
    where
        C: Connection<Database: CompletionDatabase<Connection = C>>,
    {
        let completion = self.completion()?;
        let ran = C::Database::complete_in(connection, &completion).await;
        self.held()?.note(|it| it.may_have_completed = true);
        self.completed(ran)
    }

    /// Declares that the handler writes nothing for this delivery, for example because the handler
    /// ignores events of this type. The layer then completes the events as under a lease, and
    /// requires no transaction. A later [`begin`](Self::begin) cancels this.
    pub fn nothing_to_write(&self) {
        if let Ok(held) = self.held() {
            held.say(Effect::NothingToWrite);
        }
    }

    /// Returns `true` if the layer that runs this delivery demands a commit of it.
    pub(crate) fn demands_commit(&self) -> bool {
        !self.is_unenforced() && self.held().is_ok_and(|held| held.state().demands_commit)
    }

    /// Demands a commit of this delivery, as its own layer does under the transactional ledger.
    pub(crate) fn demand_commit(&self) {
        if let (false, Ok(held)) = (self.is_unenforced(), self.held()) {
            held.note(|it| it.demands_commit = true);
        }
    }

    /// Stores this response with the event, in the completion of the handler's transaction. Only
    /// the first call counts, and only before the completion. The [`Replay`](crate::Replay) of the
    /// layer decides which parts are stored, as for a response of the handler. The call has no
    /// effect in a layer that replays no responses, and in a delivery of several events.
    ///
    /// Without it, a layer that stores responses adds the response of the handler after the commit.
    /// If the process dies in between, the event is complete without a response.
    #[expect(clippy::needless_pass_by_value, reason = "the caller has no further use of it")]
    pub fn set_response(&self, response: StoredResponse) {
        if let Ok(held) = self.held() {
            held.set_response(&response);
        }
    }

    /// Returns what the ledger holds for the delivery of the claim.
    fn held(&self) -> Result<&Held, CommitError> {
        let held = (self.of_ledger() as &dyn Any).downcast_ref::<Held>();
        held.ok_or_else(|| {
            CommitError::config("on arrival, an event is complete before its handler runs")
        })
    }

    /// Returns the keys that a completion completes.
    fn keys_to_complete(&self) -> &[KeyedTerms] {
        match self.held() {
            Ok(held) if !self.is_unprotected() => &held.keys,
            _ => &[],
        }
    }

    /// Returns the result of a completion, and notes a refusal.
    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    fn completed<T>(&self, result: sqlx::Result<T>) -> Result<T, CommitError> {
        result.map_err(|error| {
            let error = CommitError { operation: COMPLETING, ..error.into() };
            if let (CommitErrorKind::AlreadyComplete, Ok(held)) = (error.kind, self.held()) {
                held.note(|it| it.is_refused = true);
            }
            error
        })
    }
}

/// A transaction of the handler that completes the events of its delivery.
///
/// [`Delivery::begin`] begins it. It derefs to the connection. Dropped without
/// [`commit`](Self::commit), it is rolled back.
///
/// Savepoints of your own work as usual; complete and commit outside of them. [The
/// guide](crate::guide::transactions#what-a-handler-may-do) says what else a handler may do.
///
/// ```
/// # #[cfg(feature = "postgres")] {
/// use tower_dedup::sqlx::{self, PgPool};
/// use tower_dedup::{CommitError, Delivery};
///
/// async fn pay(event: &Delivery, pool: &PgPool) -> Result<(), CommitError> {
///     let mut tx = event.begin(pool).await?;
///     let insert = sqlx::query("INSERT INTO payments (event) VALUES ($1)").bind(event.id());
///     insert.execute(&mut *tx).await?; // an error drops `tx`, which rolls back
///     tx.commit().await
/// }
/// # let _ = pay;
/// # }
/// ```
#[cfg(any(feature = "postgres", feature = "sqlite"))]
#[must_use = "a transaction that is dropped is rolled back"]
pub struct DedupTx<DB: CompletionDatabase> {
    transaction: Transaction<'static, DB>,
    event: Delivery,
    /// The completion of the events that the delivery holds.
    completion: Completion,
    /// Whether the events were completed before the commit.
    is_early: bool,
    /// Dropped after the transaction.
    _turn: DB::Turn,
}

#[cfg(any(feature = "postgres", feature = "sqlite"))]
impl<DB: CompletionDatabase> DedupTx<DB> {
    /// Completes the events of the delivery, and commits.
    ///
    /// After that, nothing that matters may fail: the events are complete, and a retry is a
    /// duplicate.
    ///
    /// # Errors
    ///
    /// [`CommitErrorKind::AlreadyComplete`], [`CommitErrorKind::MissingRow`] or
    /// [`CommitErrorKind::TransactionEnded`]: the transaction is rolled back.
    /// [`CommitErrorKind::Unknown`] if the COMMIT has no reply. Otherwise the errors of the
    /// database: nothing was committed. Return the error: the layer answers for you, and releases
    /// the events unless they are complete.
    ///
    /// # Cancel safety
    ///
    /// Dropped before the COMMIT is sent, the transaction is rolled back. Dropped later, the
    /// database decides.
    pub async fn commit(mut self) -> Result<(), CommitError> {
        if let Err(error) = self.complete_last().await {
            // An error of the rollback changes nothing: a connection that is lost rolls back, too.
            let _ = self.transaction.rollback().await;
            return Err(error);
        }
        self.transaction.commit().await.map_err(CommitError::of_commit)?;
        let is_held = !self.event.keys_to_complete().is_empty();
        self.event.held()?.say(if is_held { Effect::Committed } else { Effect::Unsaid });
        Ok(())
    }

    async fn complete_last(&mut self) -> Result<(), CommitError> {
        let may_stand = self.is_early || self.event.held()?.state().may_have_completed;
        if may_stand && self.stands().await? {
            return Ok(());
        }
        if self.is_early { Err(CommitError::ended()) } else { self.write(true).await }
    }

    /// Completes the events now, before more statements of the handler.
    ///
    /// Above READ COMMITTED, call this before all other statements. Otherwise a renewal of the
    /// lease after the snapshot of the transaction is a conflict. [`commit`](Self::commit) then
    /// only checks that the completion still stands.
    ///
    /// # Errors
    ///
    /// Those of [`commit`](Self::commit). Return the error: the transaction cannot commit.
    pub async fn complete(&mut self) -> Result<(), CommitError> {
        self.is_early = true;
        self.write(false).await
    }

    /// Rolls back now, because the handler writes nothing after all.
    ///
    /// Under [`DedupLayer::new`](crate::DedupLayer::new), a success then completes the events, and
    /// needs no commit. Under [`DedupLayer::transactional`](crate::DedupLayer::transactional), call
    /// [`nothing_to_write`](Delivery::nothing_to_write), too. Dropping rolls back in the
    /// background, and a success is `uncommitted`.
    ///
    /// # Errors
    ///
    /// The errors of the database; nothing was committed.
    pub async fn rollback(self) -> Result<(), CommitError> {
        self.event.held()?.say(Effect::Unsaid);
        Ok(self.transaction.rollback().await?)
    }

    async fn write(&mut self, is_last: bool) -> Result<(), CommitError> {
        let Self { transaction, event, completion, .. } = self;
        let keys = event.keys_to_complete();
        if keys.is_empty() {
            return Ok(());
        }
        let held = event.held()?;
        if held.response.get().is_some() {
            // The handler may have set it after the beginning.
            *completion = held.completion(keys)?.within(Within::Marked);
        }
        let written = DB::complete_marked(transaction, completion, is_last).await;
        event.completed(written)
    }

    /// Returns `true` if this transaction has completed the events, and its completion was not
    /// undone.
    async fn stands(&mut self) -> Result<bool, CommitError> {
        let Self { transaction, event, completion, .. } = self;
        if event.keys_to_complete().is_empty() {
            return Ok(true);
        }
        event.completed(is_completed::<DB>(transaction, completion).await)
    }
}

#[cfg(any(feature = "postgres", feature = "sqlite"))]
impl<DB: CompletionDatabase> Deref for DedupTx<DB> {
    type Target = <DB as Database>::Connection;

    fn deref(&self) -> &Self::Target {
        &self.transaction
    }
}

#[cfg(any(feature = "postgres", feature = "sqlite"))]
impl<DB: CompletionDatabase> DerefMut for DedupTx<DB> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.transaction
    }
}

#[cfg(any(feature = "postgres", feature = "sqlite"))]
impl<DB: CompletionDatabase> fmt::Debug for DedupTx<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DedupTx").field("event", &self.event).finish_non_exhaustive()
    }
}

/// Why a transaction did not begin, complete its events, or commit.
///
/// With the feature `axum` it is a response: 503 with `Retry-After` if it is
/// [transient](Self::is_transient), so that the sender delivers again, and 500 otherwise. Its body
/// is empty, and its cause is logged. `?` makes one of an error of sqlx.
#[derive(Debug)]
pub struct CommitError {
    kind: CommitErrorKind,
    /// The operation that failed.
    operation: &'static str,
    fact: &'static str,
    source: Option<BoxError>,
}

/// The kinds of [`CommitError`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CommitErrorKind {
    /// An event is complete already. Nothing was committed. If all events are complete, the layer
    /// answers as for a duplicate.
    AlreadyComplete,
    /// An event has no row: the pool leads to another database than the store, or the store has
    /// lost the claim in a crash, and the retry runs. Nothing was committed.
    MissingRow,
    /// The transaction has ended before its completion: by a COMMIT, a ROLLBACK or `RESET ALL` of
    /// the handler, or by an error that the handler ignored. What was written after its end is
    /// committed.
    TransactionEnded,
    /// The database is unavailable or busy, or another transaction conflicts. Nothing was
    /// committed.
    Unavailable,
    /// The COMMIT has no reply: the retry finds the events complete, or runs.
    Unknown,
    /// The database refused a statement of the handler or the COMMIT, as for a constraint. Nothing
    /// was committed.
    Database,
    /// The program is wrong: the pool leads to another kind of database than the store, the store
    /// is of another crate, the store or the ledger completes no events in a transaction, or, on
    /// Postgres, nothing was written before the completion (see
    /// [`Completion::as_first_statement`]).
    Config,
}

impl CommitError {
    fn config(fact: &'static str) -> Self {
        Self { kind: CommitErrorKind::Config, operation: COMPLETING, fact, source: None }
    }

    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    fn ended() -> Self {
        let kind = CommitErrorKind::TransactionEnded;
        Self { kind, operation: COMPLETING, fact: ENDED, source: None }
    }

    /// Returns the error of a COMMIT: without a reply from the database, its outcome is unknown.
    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    fn of_commit(error: sqlx::Error) -> Self {
        let (kind, fact) = meaning(&error);
        Self { kind, operation: "committing", fact, source: Some(error.into()) }
    }

    /// Returns the kind.
    #[must_use]
    pub fn kind(&self) -> CommitErrorKind {
        self.kind
    }

    /// Returns `true` if the event may succeed when it is delivered again, without any change.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        !matches!(
            self.kind,
            CommitErrorKind::Database | CommitErrorKind::Config | CommitErrorKind::TransactionEnded
        )
    }
}

const COMPLETING: &str = "completing in a transaction";
#[cfg(any(feature = "postgres", feature = "sqlite"))]
const ENDED: &str = "the transaction has ended, by a COMMIT, a ROLLBACK or RESET ALL of the handler, or by an error \
                     that it ignored";
#[cfg(any(feature = "postgres", feature = "sqlite"))]
const OTHER_STORE: &str = "the pool leads to another kind of database than the store, or the store is of \
                           another crate: use `Delivery::completion`";
const UNAVAILABLE: &str = "the database is away or busy";

impl From<StoreError> for CommitError {
    fn from(error: StoreError) -> Self {
        let (kind, fact) = match error.kind() {
            StoreErrorKind::Config | StoreErrorKind::Unsupported => {
                (CommitErrorKind::Config, "the store completes no events in a transaction")
            }
            _ => (CommitErrorKind::Unavailable, UNAVAILABLE),
        };
        Self { kind, operation: COMPLETING, fact, source: Some(error.into()) }
    }
}

/// For `?` in a handler: an error of one of its own statements.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
impl From<sqlx::Error> for CommitError {
    fn from(error: sqlx::Error) -> Self {
        let (kind, fact) = match meaning(&error) {
            // Before a COMMIT, nothing is committed.
            (CommitErrorKind::Unknown, _) => (CommitErrorKind::Unavailable, UNAVAILABLE),
            known => known,
        };
        Self { kind, operation: "in the handler's transaction", fact, source: Some(error.into()) }
    }
}

/// The texts with which the databases refuse a completion, of which each begins so, and what each
/// means.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
const REFUSALS: [(&str, CommitErrorKind, &str); 5] = [
    (
        "tower_dedup: nothing was written",
        CommitErrorKind::Config,
        "nothing was written before the completion: complete after the writes, or call \
         `Completion::as_first_statement`",
    ),
    ("tower_dedup: the transaction has ended", CommitErrorKind::TransactionEnded, ENDED),
    ("tower_dedup: no transaction is open", CommitErrorKind::TransactionEnded, ENDED),
    (
        "tower_dedup: an event has no row",
        CommitErrorKind::MissingRow,
        "an event has no row: the pool leads to another database than the store, or a crash has \
         lost the claim",
    ),
    ("tower_dedup: ", CommitErrorKind::AlreadyComplete, "an event is complete already"),
];

/// Returns what an error of sqlx means: `Unknown` if the database has not replied.
///
/// SQLSTATEs: <https://www.postgresql.org/docs/current/errcodes-appendix.html>. Result codes of
/// SQLite: <https://sqlite.org/rescode.html>.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
fn meaning(error: &sqlx::Error) -> (CommitErrorKind, &'static str) {
    let away = (CommitErrorKind::Unknown, "the database has not replied");
    let in_the_way = (CommitErrorKind::Unavailable, UNAVAILABLE);
    let refused = (CommitErrorKind::Database, "the database refused a statement");
    let sqlx::Error::Database(error) = error else {
        return match error {
            sqlx::Error::PoolTimedOut => in_the_way,
            sqlx::Error::Io(_)
            | sqlx::Error::Tls(_)
            | sqlx::Error::Protocol(_)
            | sqlx::Error::PoolClosed
            | sqlx::Error::WorkerCrashed
            | sqlx::Error::BeginFailed => away,
            _ => refused,
        };
    };
    let code = error.code().unwrap_or_default();
    // Bad input has the same codes.
    if matches!(&*code, "22P02" | "1")
        && let Some((_, kind, fact)) =
            REFUSALS.iter().find(|(text, ..)| error.message().contains(text))
    {
        return (*kind, fact);
    }
    match &*code {
        "40003" => away,
        "25006" => (
            CommitErrorKind::Unavailable,
            "the session is read-only: a standby, or a transaction that is set so",
        ),
        // A transaction that was idle or open for too long.
        "25P03" | "25P04" => in_the_way,
        // Five characters are of Postgres.
        code if code.len() == 5 => match &code[..2] {
            "40" | "53" | "55" => in_the_way,
            "08" | "57" | "58" | "XX" => away,
            _ => refused,
        },
        code => match code.parse::<i32>().map(|extended| extended & 0xff) {
            // BUSY, LOCKED, NOMEM, FULL.
            Ok(5 | 6 | 7 | 13) => in_the_way,
            // IOERR, CANTOPEN.
            Ok(10 | 14) => away,
            _ => refused,
        },
    }
}

impl fmt::Display for CommitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.operation, self.fact)
    }
}

impl std::error::Error for CommitError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }
}

#[cfg(all(test, any(feature = "postgres", feature = "sqlite")))]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn error_has_its_kind_and_its_source() {
        let lost = || sqlx::Error::Io(io::ErrorKind::ConnectionReset.into());
        let of_store = |kind| CommitError::from(StoreError::new(kind, "completing"));
        for (error, kind) in [
            (CommitError::of_commit(lost()), CommitErrorKind::Unknown),
            (lost().into(), CommitErrorKind::Unavailable),
            (of_store(StoreErrorKind::Unsupported), CommitErrorKind::Config),
            (of_store(StoreErrorKind::Timeout), CommitErrorKind::Unavailable),
        ] {
            assert_eq!(error.kind(), kind);
            assert!(std::error::Error::source(&error).is_some(), "{error}");
        }
    }
}
