//! Keys in a transaction: the handler's, lent by the ledger, or one of the user's own.
//!
//! 1. One transaction is lent at a time: it holds the file against every other writer. The next
//!    waits for its turn, in the order of arrival, for as long as
//!    [`gate_timeout`](SqliteAdapter::gate_timeout) says. Duplicates are read, and wait for nobody.
//! 2. `BEGIN IMMEDIATE`: a transaction that begins by reading may be refused when it writes,
//!    however long the busy timeout is.
//! 3. A commit hook turns every COMMIT that is not the ledger's into a rollback: a raw one, and
//!    those of statements that run on their own after a conflict (`INSERT OR ROLLBACK`) has
//!    silently ended the transaction. It replaces a hook that a pool of yours may have set.
//! 4. The row goes in *open*, and is completed by the last statement before COMMIT. If it is not
//!    there any more, neither is the transaction.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use sqlx::sqlite::{Sqlite, SqliteConnection, SqlitePool};
use sqlx::{AssertSqlSafe, Connection};
use tokio::sync::OwnedMutexGuard;

use super::super::contract::StoreFuture;
use super::super::replies::Claimed;
use super::super::sql::{Grant, Recorded, Rows, at, attach, duplicates, open_places};
use super::super::stored::Fetch;
use super::super::terms::{CallTerms, Token};
use super::super::transaction::{
    OpenTransaction, Opened, TransactionAdapter, not_ours, rollback_to_sql, savepoint_sql,
};
use super::change::grant;
use super::rows::{
    is_of_a_constraint, is_refused_commit, keys_json, matched, placed, rows_json, store_error,
    stored,
};
use super::store::SqliteAdapter;
use crate::error::{Error, ErrorKind};
use crate::key::DedupKey;

/// How often a transaction is begun anew on another connection.
const ATTEMPTS: u32 = 8;

/// What goes with a transaction, to its end.
struct Lent {
    hook: Arc<Hook>,
    _turn: OwnedMutexGuard<()>,
}

/// What the commit hook knows.
#[derive(Default)]
struct Hook {
    allows: AtomicBool,
    committed: AtomicBool,
    /// Whether there was a mark, which may have hidden a savepoint of the handler's.
    marked: AtomicBool,
}

impl Hook {
    /// Whether this COMMIT may be.
    fn asked(&self) -> bool {
        let allows = self.allows.load(Ordering::SeqCst);
        self.committed.fetch_or(allows, Ordering::SeqCst);
        allows
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        // The connection goes on without us.
        self.hook.allows.store(true, Ordering::SeqCst);
    }
}

fn hook_of(transaction: &OpenTransaction<Sqlite>) -> Option<Arc<Hook>> {
    transaction.attachment::<Lent>().map(|lent| Arc::clone(&lent.hook))
}

impl TransactionAdapter for SqliteAdapter {
    type Database = Sqlite;

    fn stores_data(&self) -> bool {
        true
    }

    fn open<'a>(
        &'a self,
        keys: &'a [DedupKey],
        terms: &'a CallTerms,
    ) -> StoreFuture<'a, Opened<Sqlite>> {
        Box::pin(self.open_fetching(keys, terms))
    }

    fn release_in<'a>(
        &'a self,
        transaction: &'a mut OpenTransaction<Sqlite>,
        keys: &'a [DedupKey],
        terms: &'a CallTerms,
    ) -> StoreFuture<'a, ()> {
        Box::pin(self.release_within(transaction, keys, terms))
    }

    fn savepoint<'a>(
        &'a self,
        transaction: &'a mut OpenTransaction<Sqlite>,
        savepoint: u32,
        replaces: Option<u32>,
    ) -> StoreFuture<'a, ()> {
        Box::pin(self.set_savepoint(transaction, savepoint, replaces))
    }

    fn rollback_to<'a>(
        &'a self,
        transaction: &'a mut OpenTransaction<Sqlite>,
        savepoint: u32,
    ) -> StoreFuture<'a, bool> {
        Box::pin(self.back_to(transaction, savepoint))
    }

    fn commit<'a>(
        &'a self,
        transaction: OpenTransaction<Sqlite>,
        keys: &'a [DedupKey],
        terms: &'a CallTerms,
    ) -> StoreFuture<'a, ()> {
        Box::pin(self.complete_and_commit(transaction, keys, terms))
    }

    fn rollback(&self, transaction: OpenTransaction<Sqlite>) -> StoreFuture<'_, ()> {
        Box::pin(self.roll_all_back(transaction))
    }

    fn open_timeout(&self) -> Duration {
        self.inner().gate_timeout
    }
}

impl SqliteAdapter {
    async fn open_fetching(
        &self,
        keys: &[DedupKey],
        terms: &CallTerms,
    ) -> Result<Opened<Sqlite>, Error> {
        let fetch = terms.fetch();
        // Of several keys, before there is a transaction: to wait for a second connection with a
        // transaction in hand is how a pool locks up. Of one, there is a transaction or a duplicate.
        let several = keys.len() > 1;
        let before = if several { keys.to_vec() } else { Vec::new() };
        let mut stored = self.stored(before, fetch).await?;
        let mut opened = self.with_table(|| self.open_once(keys, terms)).await?;
        if fetch != Fetch::Nothing {
            if !several {
                stored = self.stored(duplicates(keys, &opened.replies), fetch).await?;
            }
            attach(keys, &mut opened.replies, &stored);
        }
        Ok(opened)
    }

    async fn release_within(
        &self,
        transaction: &mut OpenTransaction<Sqlite>,
        keys: &[DedupKey],
        terms: &CallTerms,
    ) -> Result<(), Error> {
        let connection = transaction.connection();
        // What was made first: taken rows are one attempt younger after the second.
        for statement in &self.inner().statements.give_back {
            self.change(connection, "giving keys back", statement, keys, terms).await?;
        }
        Ok(())
    }

    async fn set_savepoint(
        &self,
        transaction: &mut OpenTransaction<Sqlite>,
        savepoint: u32,
        replaces: Option<u32>,
    ) -> Result<(), Error> {
        if let Some(hook) = hook_of(transaction) {
            hook.marked.store(true, Ordering::SeqCst);
        }
        let set =
            sqlx::raw_sql(savepoint_sql(savepoint, replaces)).execute(transaction.connection());
        set.await.map(drop).map_err(|error| {
            let refused = matches!(&error, sqlx::Error::Database(_));
            let error = store_error("setting a savepoint", error);
            if refused { error.of_the_transaction() } else { error }
        })
    }

    async fn back_to(
        &self,
        transaction: &mut OpenTransaction<Sqlite>,
        savepoint: u32,
    ) -> Result<bool, Error> {
        let back = sqlx::raw_sql(rollback_to_sql(savepoint)).execute(transaction.connection());
        match back.await {
            Ok(_) => Ok(true),
            Err(sqlx::Error::Database(_)) => Ok(false),
            Err(error) => Err(store_error("rolling back to a savepoint", error)),
        }
    }

    async fn complete_and_commit(
        &self,
        mut transaction: OpenTransaction<Sqlite>,
        keys: &[DedupKey],
        terms: &CallTerms,
    ) -> Result<(), Error> {
        const CONTEXT: &str = "committing the handler's transaction";
        if terms.stores_data() {
            let keep = sqlx::query(AssertSqlSafe(Arc::clone(&self.inner().statements.keep)))
                .bind(rows_json(&Rows::one(keys, terms)))
                .bind(terms.token().as_bytes().to_vec())
                .execute(transaction.connection())
                .await;
            if let Err(error) = keep {
                let _ = self.roll_all_back(transaction).await;
                return Err(store_error(CONTEXT, error));
            }
        }
        let statement = &self.inner().statements.finish;
        let connection = transaction.connection();
        let finished = self.change(connection, CONTEXT, statement, keys, terms).await;
        let ours = matches!(&finished, Ok(finished) if *finished == keys.len());
        let hook = hook_of(&transaction);
        let marked = hook.as_ref().is_some_and(|hook| hook.marked.load(Ordering::SeqCst));
        let leaked = ours && leaks_a_savepoint(transaction.connection(), marked).await;
        let (true, false, Some(hook)) = (ours, leaked, hook) else {
            let _ = self.end(transaction, leaked).await;
            finished?;
            return Err(not_ours("completing keys: the handler has ended its transaction"));
        };
        hook.allows.store(true, Ordering::SeqCst);
        transaction.commit().await.map_err(|error| {
            let of_the_handler = is_of_a_constraint(&error);
            let error = store_error(CONTEXT, error);
            if of_the_handler { error.of_the_transaction() } else { error }
        })?;
        if hook.committed.load(Ordering::SeqCst) {
            return Ok(());
        }
        Err(not_ours("committing: nothing was committed"))
    }

    async fn roll_all_back(&self, mut transaction: OpenTransaction<Sqlite>) -> Result<(), Error> {
        let hook = hook_of(&transaction);
        let marked = hook.as_ref().is_some_and(|hook| hook.marked.load(Ordering::SeqCst));
        let leaked = leaks_a_savepoint(transaction.connection(), marked).await;
        self.end(transaction, leaked).await
    }
}

impl SqliteAdapter {
    /// Records a key in a transaction of yours: it is complete when, and only if, that commits.
    ///
    /// For code that owns its transactions, without the layer. `ttl` is how long the key is
    /// remembered. On `Duplicate` and `InFlight`, nothing was written. Begin the transaction with
    /// `BEGIN IMMEDIATE`: one that has only read so far may be refused here.
    ///
    /// # Errors
    ///
    /// What the database answers.
    ///
    /// # Example
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = tempfile::tempdir()?;
    /// # let path = dir.path().join("shop.db");
    /// use std::time::Duration;
    /// use sqlx::sqlite::{SqliteConnectOptions, SqlitePool};
    /// use tower_dedup::DedupKey;
    /// use tower_dedup::adapter::{Claimed, SqliteAdapter};
    ///
    /// let options = SqliteConnectOptions::new().filename(path).create_if_missing(true);
    /// let pool = SqlitePool::connect_with(options).await?;
    /// let adapter = SqliteAdapter::new(pool.clone());
    /// let (key, month) = (DedupKey::new("orders", "order_17")?, Duration::from_secs(30 * 86_400));
    ///
    /// let mut tx = pool.begin_with("BEGIN IMMEDIATE").await?;
    /// assert_eq!(adapter.record_in(&mut tx, &key, month).await?, Claimed::first(1, false));
    /// tx.rollback().await?; // neither the key nor the effect …
    ///
    /// let mut tx = pool.begin_with("BEGIN IMMEDIATE").await?;
    /// assert_eq!(adapter.record_in(&mut tx, &key, month).await?, Claimed::first(1, false));
    /// tx.commit().await?; // … or both
    /// # Ok(())
    /// # }
    /// ```
    pub async fn record_in(
        &self,
        connection: &mut SqliteConnection,
        key: &DedupKey,
        ttl: Duration,
    ) -> Result<Claimed, Error> {
        let statement = &self.inner().statements.record;
        // Looked for on this very connection: another one would wait for its transaction.
        self.inner().ready_within(connection).await?;
        let (keys, terms) = ([key.clone()], CallTerms::on_claim(Token::random(), ttl));
        let answers: Vec<Recorded> =
            match self.take_within(connection, statement, &keys, &terms).await {
                Err(_) if self.inner().lacks_its_table(connection).await => {
                    self.inner().ready_within(connection).await?;
                    self.take_within(connection, statement, &keys, &terms).await?
                }
                answers => answers?,
            };
        Ok(answers.into_iter().next().map_or(Claimed::InFlight, Into::into))
    }

    async fn open_once(
        &self,
        keys: &[DedupKey],
        terms: &CallTerms,
    ) -> Result<Opened<Sqlite>, Error> {
        let inner = self.inner();
        let known = inner.read(keys).await?;
        let mut answers: Vec<Option<Claimed>> = known
            .into_iter()
            .map(|stored| stored.and_then(|stored| Claimed::known(&stored, terms.token())))
            .collect();
        let open = open_places(&answers);
        let mut lent = None;
        if !open.is_empty() {
            let turn = Arc::clone(&inner.turn).lock_owned();
            let turn = tokio::time::timeout(inner.gate_timeout, turn).await.map_err(|_| {
                Error::new(ErrorKind::Timeout, "waiting for the file's other transactions")
            })?;
            let mut transaction = self.begin(turn).await?;
            let statement = &inner.statements.claim;
            let asked = at(keys, &open);
            let taken = self.take_within(transaction.connection(), statement, &asked, terms).await;
            match taken {
                Ok(taken) => {
                    for (place, taken) in open.into_iter().zip(taken) {
                        answers[place] = Some(taken);
                    }
                    lent = Some(transaction);
                }
                Err(error) => {
                    let _ = self.roll_all_back(transaction).await;
                    return Err(error);
                }
            }
        }
        let answers = answers.into_iter();
        let replies = answers.map(|answer| answer.unwrap_or(Claimed::InFlight)).collect();
        Ok(Opened { replies, transaction: lent })
    }

    async fn begin(&self, turn: OwnedMutexGuard<()>) -> Result<OpenTransaction<Sqlite>, Error> {
        const CONTEXT: &str = "opening a transaction";
        let writer = &self.inner().writer;
        let hook = Arc::new(Hook::default());
        let lent = Lent { hook: Arc::clone(&hook), _turn: turn };
        let mut attempts = 0;
        let begun = loop {
            attempts += 1;
            match OpenTransaction::begin(writer, Some("BEGIN IMMEDIATE")).await {
                Err(sqlx::Error::InvalidSavePointStatement) if attempts < ATTEMPTS => {
                    // It may still be on its way back to the pool.
                    tokio::time::sleep(Duration::from_millis(1 << attempts)).await;
                    close_stuck(writer).await;
                }
                begun => break begun.map_err(|error| store_error(CONTEXT, error))?,
            }
        };
        let mut transaction = begun.with(lent);
        let mut handle = transaction
            .connection()
            .lock_handle()
            .await
            .map_err(|error| store_error(CONTEXT, error))?;
        handle.set_commit_hook(move || hook.asked());
        drop(handle);
        Ok(transaction)
    }

    /// Rolls back all of a handler's transaction. `leaked` is whether it has leaked the guard of a
    /// savepoint, back to which, and no further, sqlx would roll back: the connection would be in the
    /// pool with the transaction open, and the file locked.
    async fn end(
        &self,
        mut transaction: OpenTransaction<Sqlite>,
        leaked: bool,
    ) -> Result<(), Error> {
        // An error where the transaction has silently ended.
        let _ = sqlx::query("ROLLBACK").execute(transaction.connection()).await;
        if !leaked {
            // sqlx does not know: without another one, its ROLLBACK fails, and it believes for ever
            // to be in one.
            let _ = sqlx::query("BEGIN").execute(transaction.connection()).await;
            return transaction
                .rollback()
                .await
                .map_err(|error| store_error("rolling the handler's transaction back", error));
        }
        // It finds no savepoint to roll back to, and counts on.
        let _ = transaction.rollback().await;
        for attempt in 0..ATTEMPTS {
            if close_stuck(&self.inner().writer).await > 0 {
                break;
            }
            // On its way back to the pool. Whoever gets it before us is in no transaction.
            tokio::time::sleep(Duration::from_millis(1 << attempt)).await;
        }
        Ok(())
    }

    /// Claims or records within a transaction that holds the file: nobody else writes meanwhile.
    async fn take_within<T: Grant>(
        &self,
        connection: &mut SqliteConnection,
        statement: &Arc<str>,
        keys: &[DedupKey],
        terms: &CallTerms,
    ) -> Result<Vec<T>, Error> {
        let fault = |error| store_error("taking keys in a transaction", error);
        let rows = sqlx::query(AssertSqlSafe(Arc::clone(&self.inner().statements.read)))
            .bind(keys_json(keys))
            .fetch_all(&mut *connection)
            .await
            .map_err(fault)?;
        let stored = placed(keys, &rows, stored).map_err(fault)?.into_iter();
        let mut answers: Vec<Option<T>> =
            stored.map(|stored| T::known(&stored?, terms.token())).collect();
        let free = open_places(&answers);
        if !free.is_empty() {
            let asked = at(keys, &free);
            let rows = self.bound(statement, &asked, terms).fetch_all(connection).await;
            let rows = rows.map_err(fault)?;
            for (place, row) in matched(&asked, &rows).map_err(fault)? {
                answers[free[place]] = Some(grant(row).map_err(fault)?);
            }
        }
        Ok(answers.into_iter().map(|answer| answer.unwrap_or_else(T::in_flight)).collect())
    }

    /// Runs a changing statement in a transaction, and answers how many rows it returned.
    async fn change(
        &self,
        connection: &mut SqliteConnection,
        context: &'static str,
        statement: &Arc<str>,
        keys: &[DedupKey],
        terms: &CallTerms,
    ) -> Result<usize, Error> {
        let rows = self.bound(statement, keys, terms).fetch_all(connection).await;
        let rows = rows.map_err(|error| {
            let refused = is_refused_commit(&error);
            let error = store_error(context, error);
            // On its own, for the transaction has ended, it was not let.
            if refused { error.of_the_transaction() } else { error }
        })?;
        Ok(rows.len())
    }
}

/// Closes the idle connections that sqlx takes to be in a transaction. Nobody holds that transaction:
/// it was ended without sqlx's knowledge, and the connection was dropped then. Returns how many.
async fn close_stuck(pool: &SqlitePool) -> usize {
    let (mut sound, mut closed) = (Vec::new(), 0);
    while let Some(connection) = pool.try_acquire() {
        if connection.is_in_transaction() {
            let _ = connection.close().await;
            closed += 1;
        } else {
            sound.push(connection);
        }
    }
    closed
}

/// Whether sqlx believes to be under a savepoint: a handler has leaked the guard of one. It would
/// end that one, and not the transaction, and be content.
///
/// Savepoints that were rolled back stay on SQLite's stack; what tells is the name that sqlx gives
/// to the next one, which counts the guards. One that was leaked is on the stack, unless a mark has
/// released it.
async fn leaks_a_savepoint(connection: &mut SqliteConnection, marked: bool) -> bool {
    let mut found = marked;
    while sqlx::query("RELEASE _sqlx_savepoint_1").execute(&mut *connection).await.is_ok() {
        found = true;
    }
    if !found {
        return false;
    }
    let Ok(mut next) = connection.begin().await else { return true };
    let is_first = sqlx::query("ROLLBACK TO _sqlx_savepoint_1").execute(&mut *next).await.is_ok();
    let _ = next.rollback().await;
    !is_first
}
