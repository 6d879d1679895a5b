//! Keys in a transaction: the handler's, lent by the ledger, or one of the user's own.
//!
//! 1. One transaction is lent at a time: it holds the write lock. Duplicates are only read, and do not wait.
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

use sqlx::sqlite::{Sqlite, SqliteConnection};

use super::super::replies::ClaimReply;
use super::super::sql::batch::{claimed, known};
use super::super::sql::call::{Kind, Replied, RowCall, rows_of};
use super::super::sql::statement::query;
use super::super::terms::{CallTerms, Token};
use super::super::transaction::{OpenTransaction, Opened, not_ours};
use super::adapter::SqliteAdapter;
use super::errors::{is_constraint, is_refused_commit, store_error};
use super::params::{keys_json, rows_json};
use super::session::Session;
use super::store::{SqliteStore, WriteGuard, acquire};
use crate::error::{Error, ErrorKind};
use crate::key::DedupKey;

const OPENING: &str = "opening a transaction";
const COMMITTING: &str = "committing the handler's transaction";

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

impl SqliteAdapter {
    /// Claims a key in a transaction of yours: the key is complete when, and only if, the transaction
    /// commits.
    ///
    #[doc = include_str!("../../docs/stores/sqlite_record_in.md")]
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
        let (kind, rows) = (Kind::ClaimComplete, rows_of(std::slice::from_ref(key), &terms, |_| 0));
        let mut claimed = store.claim_in(connection, kind, &rows, vec![None]).await;
        if claimed.is_err() && store.lacks_table(connection).await {
            store.ready_within(connection).await?;
            claimed = store.claim_in(connection, kind, &rows, vec![None]).await;
        }
        Ok(claimed?.remove(0))
    }
}

impl SqliteStore {
    /// Releases keys while their transaction goes on, before a handler has it.
    pub(super) async fn release_in(
        &self,
        connection: &mut SqliteConnection,
        keys: &[DedupKey],
        terms: &CallTerms,
    ) -> Result<(), Error> {
        const CONTEXT: &str = "releasing keys in a transaction";
        // Inserted rows first: the second statement takes an attempt from the others.
        for statement in
            [&self.statements.tx_release_inserted, &self.statements.tx_release_existing]
        {
            change(connection, CONTEXT, statement, keys, terms).await?;
        }
        Ok(())
    }

    /// Reads first: duplicates need no transaction.
    pub(super) async fn open(
        &self,
        keys: &[DedupKey],
        terms: &CallTerms,
    ) -> Result<Opened<Sqlite>, Error> {
        let found = self.read(&keys.iter().collect::<Vec<_>>(), terms.fetch()).await;
        let found = found.map_err(|error| store_error("looking up keys", error))?;
        let known = known(found, terms)?;
        if known.iter().all(Option::is_some) && !keys.is_empty() {
            return Ok(Opened { replies: claimed(known)?, transaction: None });
        }
        let guard = self.write_lock(ErrorKind::Timeout).await?;
        let mut transaction = self.begin(guard).await?;
        let connection = transaction.connection();
        let claimed = if keys.is_empty() {
            let set = sqlx::raw_sql("SAVEPOINT tower_dedup").execute(connection).await;
            set.map(|_| Vec::new()).map_err(|error| store_error(OPENING, error))
        } else {
            let rows = rows_of(keys, terms, |_| 0);
            self.claim_in(connection, Kind::Claim, &rows, known).await
        };
        match claimed {
            Ok(replies) => Ok(Opened { replies, transaction: Some(transaction) }),
            Err(error) => {
                let _ = self.rollback(transaction).await;
                Err(error)
            }
        }
    }

    /// Claims the rows without a reply, in a transaction that holds the file, so that no other process writes.
    async fn claim_in(
        &self,
        connection: &mut SqliteConnection,
        kind: Kind,
        rows: &[RowCall<'_>],
        replies: Vec<Replied>,
    ) -> Result<Vec<ClaimReply>, Error> {
        let mut session = Session { connection, statements: &self.statements };
        let written = session.write(kind, rows, replies, &mut false).await;
        let written = written.map_err(|error| store_error("claiming keys in a transaction", error));
        claimed(written?)
    }

    async fn begin(&self, guard: WriteGuard) -> Result<OpenTransaction<Sqlite>, Error> {
        let fault = |error| store_error(OPENING, error);
        let hook = Arc::new(Hook::default());
        let lent = Lent { hook: Arc::clone(&hook), _guard: guard };
        let writer = self.writer.clone();
        let begin = async move {
            OpenTransaction::begin(acquire(&writer).await?, "BEGIN IMMEDIATE", None).await
        };
        let begun = tokio::spawn(begin).await.unwrap_or(Err(sqlx::Error::WorkerCrashed));
        let mut transaction = begun.map_err(fault)?.with(lent);
        let mut handle = transaction.connection().lock_handle().await.map_err(fault)?;
        handle.set_commit_hook(move || hook.allows());
        drop(handle);
        Ok(transaction)
    }

    pub(super) async fn commit(
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
            let rows = rows_of(keys, terms, |_| 0);
            let store = query(&self.statements.tx_store).bind(rows_json(&rows));
            let stored = store.execute(&mut *connection).await;
            stored.map_err(|error| store_error(COMMITTING, error))?;
        }
        let is_ours = if keys.is_empty() {
            // If the handler has ended the transaction, its savepoint is gone, also from a transaction that the
            // handler has begun since.
            sqlx::raw_sql("RELEASE SAVEPOINT tower_dedup").execute(connection).await.is_ok()
        } else {
            let complete = &self.statements.tx_complete;
            change(connection, COMMITTING, complete, keys, terms).await? == keys.len()
        };
        let is_ours = is_ours && !transaction.has_leaked_savepoint();
        let hook =
            transaction.attachment().filter(|_| is_ours).map(|lent: &Lent| Arc::clone(&lent.hook));
        hook.ok_or_else(|| not_ours("committing: the handler has ended its transaction"))
    }

    /// Rolls back all of a handler's transaction, in a task of its own: the handler may have left a long statement. If
    /// the rollback ended half-way, sqlx would believe for ever that its connection is in a transaction.
    pub(super) async fn rollback(
        &self,
        mut transaction: OpenTransaction<Sqlite>,
    ) -> Result<(), Error> {
        let rollback = async move {
            // An error if the transaction has silently ended.
            let _ = sqlx::query("ROLLBACK").execute(transaction.connection()).await;
            // sqlx does not know of that ROLLBACK. Without another transaction, its own ROLLBACK would
            // fail, and it would believe for ever to be in one.
            let _ = sqlx::query("BEGIN").execute(transaction.connection()).await;
            transaction.rollback().await
        };
        let rolled_back = tokio::spawn(rollback).await.unwrap_or(Err(sqlx::Error::WorkerCrashed));
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
