//! Keys in a transaction: the handler's, lent by the ledger, or one of the user's own.
//!
//! 1. One transaction is lent at a time: it holds the file against every other writer. The next waits
//!    for the write lock, in the order of arrival, for
//!    [`write_lock_timeout`](super::SqliteOptions::write_lock_timeout). Duplicates are only read, and
//!    do not wait.
//! 2. `BEGIN IMMEDIATE`: a transaction that begins by reading may be refused when it writes, whatever
//!    the busy timeout.
//! 3. A commit hook turns every COMMIT that is not the ledger's into a rollback: a raw COMMIT, and the
//!    COMMIT of statements that run on their own after a conflict (`INSERT OR ROLLBACK`) has silently
//!    ended the transaction. The hook replaces a hook that a pool of yours may have set.
//! 4. The row is inserted incomplete. The last statement before COMMIT completes it. If the row is
//!    gone, the transaction has ended.
//!    A transaction without keys begins with a savepoint instead of a row.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use sqlx::Connection;
use sqlx::sqlite::{Sqlite, SqliteConnection, SqlitePool};

use super::super::contract::StoreFuture;
use super::super::replies::ClaimReply;
use super::super::sql::batch::{claimed, known, unanswered, with_claimed};
use super::super::sql::call::{Kind, Rows};
use super::super::sql::statement::query;
use super::super::terms::{CallTerms, Token};
use super::super::transaction::{OpenTransaction, Opened, Sealed, TransactionAdapter, not_ours};
use super::adapter::SqliteAdapter;
use super::errors::{is_constraint, is_refused_commit, store_error};
use super::params::{keys_json, rows_json};
use super::session::Session;
use super::store::{SqliteStore, WriteGuard};
use crate::error::{Error, ErrorKind};
use crate::key::DedupKey;

const OPENING: &str = "opening a transaction";
const COMMITTING: &str = "committing the handler's transaction";
/// How often a transaction is begun again on another connection.
const ATTEMPTS: u32 = 8;

/// What a lent transaction holds until its end.
struct Lent {
    hook: Arc<Hook>,
    _guard: WriteGuard,
}

/// The state of the commit hook.
#[derive(Default)]
struct Hook {
    allows: AtomicBool,
    committed: AtomicBool,
}

impl Hook {
    /// Returns `true` if this COMMIT may take place.
    fn allows(&self) -> bool {
        let allows = self.allows.load(Ordering::SeqCst);
        self.committed.fetch_or(allows, Ordering::SeqCst);
        allows
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        // The connection returns to its pool, with the hook.
        self.hook.allows.store(true, Ordering::SeqCst);
    }
}

fn hook_of(transaction: &OpenTransaction<Sqlite>) -> Option<Arc<Hook>> {
    transaction.attachment::<Lent>().map(|lent| Arc::clone(&lent.hook))
}

impl Sealed for SqliteAdapter {}

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
        Box::pin(self.0.with_table(|| self.0.open(keys, terms)))
    }

    fn release_in<'a>(
        &'a self,
        transaction: &'a mut OpenTransaction<Sqlite>,
        keys: &'a [DedupKey],
        terms: &'a CallTerms,
    ) -> StoreFuture<'a, ()> {
        const CONTEXT: &str = "releasing keys in a transaction";
        Box::pin(async move {
            let all = &self.0.statements;
            // Inserted rows first: the second statement takes an attempt from the others.
            for statement in [&all.tx_release_inserted, &all.tx_release_existing] {
                change(transaction.connection(), CONTEXT, statement, keys, terms).await?;
            }
            Ok(())
        })
    }

    fn commit<'a>(
        &'a self,
        transaction: OpenTransaction<Sqlite>,
        keys: &'a [DedupKey],
        terms: &'a CallTerms,
    ) -> StoreFuture<'a, ()> {
        Box::pin(self.0.commit(transaction, keys, terms))
    }

    fn rollback(&self, transaction: OpenTransaction<Sqlite>) -> StoreFuture<'_, ()> {
        Box::pin(self.0.rollback(transaction))
    }

    fn open_timeout(&self) -> Duration {
        self.0.options.write_lock_timeout
    }
}

impl SqliteAdapter {
    /// Claims a key in a transaction of yours: the key is complete when, and only if, the transaction
    /// commits.
    ///
    /// For code that owns its transactions, without the layer. `retention` is how long the key is
    /// remembered. On `Duplicate` and `InFlight`, nothing was written. Begin the transaction with
    /// `BEGIN IMMEDIATE`: a transaction that has only read so far may be refused here. If there is no table yet, it is
    /// made in your transaction, and a rollback removes it again.
    ///
    /// # Errors
    ///
    /// The database's errors.
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
    /// use tower_dedup::adapter::SqliteAdapter;
    /// use tower_dedup::adapter::contract::ClaimReply;
    ///
    /// let options = SqliteConnectOptions::new().filename(path).create_if_missing(true);
    /// let pool = SqlitePool::connect_with(options).await?;
    /// let adapter = SqliteAdapter::new(pool.clone());
    /// let (key, month) = (DedupKey::new("orders", "order_17")?, Duration::from_secs(30 * 86_400));
    ///
    /// let mut tx = pool.begin_with("BEGIN IMMEDIATE").await?;
    /// assert_eq!(adapter.record_in(&mut tx, &key, month).await?, ClaimReply::first(1, false));
    /// tx.rollback().await?; // neither the key nor the effect …
    ///
    /// let mut tx = pool.begin_with("BEGIN IMMEDIATE").await?;
    /// assert_eq!(adapter.record_in(&mut tx, &key, month).await?, ClaimReply::first(1, false));
    /// tx.commit().await?; // … or both
    /// # Ok(())
    /// # }
    /// ```
    pub async fn record_in(
        &self,
        connection: &mut SqliteConnection,
        key: &DedupKey,
        retention: Duration,
    ) -> Result<ClaimReply, Error> {
        let store = &self.0;
        // Looked for on this connection: another one would wait for its transaction.
        store.ready_within(connection).await?;
        let terms = CallTerms::on_claim(Token::random(), retention);
        let rows = Rows::of_call(std::slice::from_ref(key), &terms, |_| 0);
        let claimed = match store.claim_in(connection, Kind::ClaimComplete, &rows).await {
            Err(_) if store.lacks_table(connection).await => {
                store.ready_within(connection).await?;
                store.claim_in(connection, Kind::ClaimComplete, &rows).await?
            }
            claimed => claimed?,
        };
        Ok(claimed.into_iter().next().unwrap_or(ClaimReply::InFlight))
    }
}

impl SqliteStore {
    /// Reads first: duplicates need no transaction.
    async fn open(&self, keys: &[DedupKey], terms: &CallTerms) -> Result<Opened<Sqlite>, Error> {
        let found = self.read(&keys.iter().collect::<Vec<_>>(), terms.fetch()).await;
        let found = found.map_err(|error| store_error("looking up keys", error))?;
        let known = known(found, terms)?;
        let left = unanswered(&known);
        if left.is_empty() && !keys.is_empty() {
            return Ok(Opened { replies: with_claimed(known, Vec::new()), transaction: None });
        }
        let guard = self.write_lock(ErrorKind::Timeout).await?;
        let mut transaction = self.begin(guard).await?;
        let connection = transaction.connection();
        let claimed = if keys.is_empty() {
            let set = sqlx::raw_sql("SAVEPOINT tower_dedup").execute(connection).await;
            set.map(|_| Vec::new()).map_err(|error| store_error(OPENING, error))
        } else {
            let rows = Rows::of_call(keys, terms, |_| 0).select(&left);
            self.claim_in(connection, Kind::Claim, &rows).await
        };
        match claimed {
            Ok(claimed) => {
                let replies = with_claimed(known, claimed);
                Ok(Opened { replies, transaction: Some(transaction) })
            }
            Err(error) => {
                let _ = self.rollback(transaction).await;
                Err(error)
            }
        }
    }

    /// Claims in a transaction that holds the file, so that no other process writes.
    async fn claim_in(
        &self,
        connection: &mut SqliteConnection,
        kind: Kind,
        rows: &Rows<'_>,
    ) -> Result<Vec<ClaimReply>, Error> {
        let mut session = Session { connection, statements: &self.statements };
        let written = session.write(kind, rows).await;
        let written = written.map_err(|error| store_error("claiming keys in a transaction", error));
        claimed(written?)
    }

    async fn begin(&self, guard: WriteGuard) -> Result<OpenTransaction<Sqlite>, Error> {
        let fault = |error| store_error(OPENING, error);
        let hook = Arc::new(Hook::default());
        let lent = Lent { hook: Arc::clone(&hook), _guard: guard };
        let mut attempts = 0;
        let begun = loop {
            attempts += 1;
            match OpenTransaction::begin(&self.writer, Some("BEGIN IMMEDIATE")).await {
                Err(sqlx::Error::InvalidSavePointStatement) if attempts < ATTEMPTS => {
                    // The connection may still be on its way back to the pool.
                    tokio::time::sleep(Duration::from_millis(1 << attempts)).await;
                    close_stuck(&self.writer).await;
                }
                begun => break begun.map_err(fault)?,
            }
        };
        let mut transaction = begun.with(lent);
        let mut handle = transaction.connection().lock_handle().await.map_err(fault)?;
        handle.set_commit_hook(move || hook.allows());
        drop(handle);
        Ok(transaction)
    }

    async fn commit(
        &self,
        mut transaction: OpenTransaction<Sqlite>,
        keys: &[DedupKey],
        terms: &CallTerms,
    ) -> Result<(), Error> {
        let hook = match self.complete(&mut transaction, keys, terms).await {
            Ok(hook) => hook,
            Err(error) => {
                let _ = self.rollback(transaction).await;
                return Err(error);
            }
        };
        hook.allows.store(true, Ordering::SeqCst);
        transaction.commit().await.map_err(|error| {
            let by_handler = is_constraint(&error);
            let error = store_error(COMMITTING, error);
            if by_handler { error.of_the_transaction() } else { error }
        })?;
        if hook.committed.load(Ordering::SeqCst) {
            return Ok(());
        }
        Err(not_ours("committing: nothing was committed"))
    }

    /// Stores the keys' data and completes the keys. Returns the hook of the transaction.
    async fn complete(
        &self,
        transaction: &mut OpenTransaction<Sqlite>,
        keys: &[DedupKey],
        terms: &CallTerms,
    ) -> Result<Arc<Hook>, Error> {
        let connection = transaction.connection();
        if terms.stores_data() {
            let rows = Rows::of_call(keys, terms, |_| 0);
            let store = query(&self.statements.tx_store).bind(rows_json(&rows));
            let stored = store.execute(&mut *connection).await;
            stored.map_err(|error| store_error(COMMITTING, error))?;
        }
        let is_ours = if keys.is_empty() {
            is_same(connection).await
        } else {
            let complete = &self.statements.tx_complete;
            change(connection, COMMITTING, complete, keys, terms).await? == keys.len()
        };
        let hook = hook_of(transaction).filter(|_| is_ours && !transaction.has_leaked_savepoint());
        hook.ok_or_else(|| not_ours("committing: the handler has ended its transaction"))
    }

    /// Rolls back all of a handler's transaction.
    async fn rollback(&self, mut transaction: OpenTransaction<Sqlite>) -> Result<(), Error> {
        // An error if the transaction has silently ended.
        let _ = sqlx::query("ROLLBACK").execute(transaction.connection()).await;
        // sqlx does not know of that ROLLBACK. Without another transaction, its own ROLLBACK would
        // fail, and it would believe for ever to be in one.
        let _ = sqlx::query("BEGIN").execute(transaction.connection()).await;
        let rolled_back = transaction.rollback().await;
        rolled_back.map_err(|error| store_error("rolling the transaction back", error))
    }
}

/// Runs a statement that writes in a transaction. Returns how many rows it returned.
async fn change(
    connection: &mut SqliteConnection,
    context: &'static str,
    statement: &Arc<str>,
    keys: &[DedupKey],
    terms: &CallTerms,
) -> Result<usize, Error> {
    let rows = query(statement)
        .bind(keys_json(keys))
        .bind(terms.token().as_bytes().to_vec())
        .bind(terms.retention_ms())
        .fetch_all(connection)
        .await;
    let rows = rows.map_err(|error| {
        let refused = is_refused_commit(&error);
        let error = store_error(context, error);
        // The transaction has ended, and the commit hook refused the statement on its own.
        if refused { error.of_the_transaction() } else { error }
    })?;
    Ok(rows.len())
}

/// Returns `true` if the transaction without keys goes on. If the handler has ended it, its savepoint
/// is gone, also from a transaction that the handler has begun since.
async fn is_same(connection: &mut SqliteConnection) -> bool {
    sqlx::raw_sql("RELEASE SAVEPOINT tower_dedup").execute(connection).await.is_ok()
}

/// Closes the idle connections that sqlx believes to be in a transaction. No caller holds that transaction:
/// it ended without sqlx's knowledge, and the connection was dropped then.
async fn close_stuck(pool: &SqlitePool) {
    let mut sound = Vec::new();
    while let Some(connection) = pool.try_acquire() {
        if connection.is_in_transaction() {
            let _ = connection.close().await;
        } else {
            sound.push(connection);
        }
    }
}
