//! Keys in a transaction: the handler's, lent by the ledger, or one of the user's own.
//!
//! 1. A second claim on a key that an open transaction holds is in flight at once. An insertion would
//!    wait for that transaction, with a connection, as long as a handler runs. So the claim first tries
//!    for an advisory lock, which ends with its transaction, also behind PgBouncer. A transaction that ends frees its
//!    locks one after another, so a delivery that arrives meanwhile may get a part of its keys.
//! 2. The user's isolation level stays. Where a snapshot hides the winner (40001), the claim is made
//!    again in a new transaction, a bounded number of times.
//! 3. The row is inserted incomplete, under a lease. The last message before COMMIT completes it, if
//!    this is the transaction that claimed. An aborted transaction returns an error, and another
//!    transaction returns no row. COMMIT alone shows neither: an aborted transaction returns ROLLBACK,
//!    which sqlx takes for success.

use std::time::Duration;

use futures_util::FutureExt;
use sqlx::AssertSqlSafe;
use sqlx::postgres::{PgConnection, Postgres};

use super::super::replies::ClaimReply;
use super::super::sql::batch::{claimed, known, unanswered};
use super::super::sql::call::{Kind, rows_of};
use super::super::sql::statement::{fill, query, render};
use super::super::terms::{CallTerms, Token};
use super::super::transaction::{OpenTransaction, Opened, not_ours, return_to_pool};
use super::adapter::PostgresAdapter;
use super::connections::Source;
use super::errors::{is_broken_transaction, is_conflict, is_locked, is_read_only, store_error};
use super::params::{Uuid, bind_data, key_hash, retention_ms, uuids};
use super::schema::literal;
use super::session::{Begun, Session};
use super::statements::{Statements, TAG};
use super::store::{PostgresStore, repeats};
use crate::error::Error;
use crate::key::DedupKey;

impl PostgresAdapter {
    /// Claims a key in a transaction of yours: the key is complete when, and only if, the transaction
    /// commits.
    ///
    #[doc = include_str!("../../docs/stores/postgres_record_in.md")]
    pub async fn record_in(
        &self,
        connection: &mut PgConnection,
        key: &DedupKey,
        retention: Duration,
    ) -> Result<ClaimReply, Error> {
        let statements = self.0.ready_within(connection).await?;
        let terms = CallTerms::on_claim(Token::random(), retention);
        let rows = rows_of(std::slice::from_ref(key), &terms, key_hash);
        let mut session = Session::within(&self.0, &statements, connection, &rows);
        let mut replies = vec![None];
        let ran = session.run(Kind::ClaimComplete, &rows, &mut replies, false).await;
        ran.map_err(|error| {
            let error = store_error("claiming a key in a transaction", error);
            // The transaction is lost. The next one finds the table, or makes it.
            self.0.note_missing_table(&error, &statements);
            error
        })?;
        Ok(claimed(replies)?.remove(0))
    }
}

impl PostgresStore {
    /// Releases keys while their transaction goes on, before a handler has it.
    pub(super) async fn release_in(
        &self,
        connection: &mut PgConnection,
        keys: &[DedupKey],
        terms: &CallTerms,
    ) -> Result<(), Error> {
        let rows = rows_of(keys, terms, key_hash);
        let release = self.statements().release_in(&uuids(&rows), terms.token().into());
        let released = sqlx::raw_sql(AssertSqlSafe(release)).execute(connection).await;
        released.map_err(|error| store_error("releasing keys in a transaction", error))?;
        Ok(())
    }

    pub(super) async fn rollback(
        &self,
        transaction: OpenTransaction<Postgres>,
    ) -> Result<(), Error> {
        let rolled_back = transaction.rollback().await;
        rolled_back.map_err(|error| store_error("rolling the transaction back", error))?;
        self.transactions.has_ended(Kind::Claim);
        Ok(())
    }

    /// Reads first: duplicates need no transaction. A transaction begins on the connection of the read,
    /// because the pool tests each connection that it lends, and each that returns. After a conflict, another
    /// transaction begins.
    pub(super) async fn open(
        &self,
        keys: &[DedupKey],
        terms: &CallTerms,
    ) -> Result<Opened<Postgres>, Error> {
        let fault = |error| store_error("opening a transaction", error);
        let rows = rows_of(keys, terms, key_hash);
        let mut session = Session::new(self, Source::Pool);
        let found = session.read(&rows, terms.fetch()).await.map_err(fault)?;
        let known = known(found, terms)?;
        let left = unanswered(&known).len();
        if left == 0 && !keys.is_empty() {
            return Ok(Opened { replies: claimed(known)?, transaction: None });
        }
        let mut connection = session.into_pooled();
        let (statements, mut pauses) = (self.statements(), repeats());
        loop {
            let place = match self.transactions.place().now_or_never() {
                Some(place) => place,
                // A delivery that waits holds no connection of the pool.
                None => {
                    connection.take().into_iter().for_each(return_to_pool);
                    self.transactions.place().await
                }
            };
            let lent = match connection.take() {
                Some(connection) => connection,
                None => self.connections.pooled().await.map_err(fault)?,
            };
            let begin = AssertSqlSafe(statements.begin(terms));
            let transaction = OpenTransaction::begin(lent, begin, Some(place.lost())).await;
            let mut transaction = transaction.map_err(fault)?;
            let mut session = Session::within(self, &statements, transaction.connection(), &rows);
            let mut replied = known.clone();
            let ran = session.run(Kind::Claim, &rows, &mut replied, false).await;
            let begun = session.into_begun();
            let Err(error) = ran else {
                // After an error, the drop of the transaction closes its connection.
                let replies = claimed(replied)?;
                let is_first = |reply: &ClaimReply| matches!(reply, ClaimReply::First { .. });
                let granted = keys.is_empty() || replies.iter().any(is_first);
                if let Some(begun) = begun.filter(|_| granted) {
                    return Ok(Opened { replies, transaction: Some(transaction.with(begun)) });
                }
                transaction.rollback().await.map_err(fault)?;
                return Ok(Opened { replies, transaction: None });
            };
            let read_only = is_read_only(&error);
            if read_only {
                transaction.close();
                self.connections.test_idle();
            } else {
                let _ = transaction.rollback().await;
            }
            // An open transaction holds the row, without a lock of the key's: one of the user's own, or
            // a large delivery. Of several keys the others may be free, and are not in flight then.
            if is_locked(&error) && left == 1 {
                return Ok(Opened { replies: claimed(known)?, transaction: None });
            }
            match pauses.next() {
                Some(pause) if read_only || is_conflict(&error) => {
                    tokio::time::sleep(pause).await;
                }
                _ => return Err(fault(error)),
            }
        }
    }

    /// Stores the keys' data, completes the keys, and commits.
    pub(super) async fn commit(
        &self,
        mut transaction: OpenTransaction<Postgres>,
        keys: &[DedupKey],
        terms: &CallTerms,
    ) -> Result<(), Error> {
        let fault = |error: sqlx::Error| {
            let by_handler = is_broken_transaction(&error);
            let error = store_error("committing the handler's transaction", error);
            if by_handler { error.of_the_transaction() } else { error }
        };
        let completed = match self.complete_in(&mut transaction, keys, terms).await {
            Ok(completed) => completed,
            Err(error) => {
                let _ = transaction.rollback().await;
                return Err(fault(error));
            }
        };
        // Without keys, the check of the transaction returns one row.
        if completed != keys.len().max(1) {
            let _ = transaction.rollback().await;
            return Err(not_ours("committing: the handler has ended its transaction"));
        }
        if transaction.has_leaked_savepoint() {
            transaction.close();
            return Err(not_ours("committing: the handler has leaked a savepoint"));
        }
        transaction.commit().await.map_err(fault)?;
        self.transactions.has_ended(Kind::Claim);
        Ok(())
    }

    /// Returns how many keys are complete. Without what [`open`](Self::open) has attached, it is none.
    async fn complete_in(
        &self,
        transaction: &mut OpenTransaction<Postgres>,
        keys: &[DedupKey],
        terms: &CallTerms,
    ) -> Result<usize, sqlx::Error> {
        let (statements, rows) = (self.statements(), rows_of(keys, terms, key_hash));
        let (row_keys, token) = (uuids(&rows), Uuid::from(terms.token()));
        let Some(begun) = transaction.attachment::<Begun>() else { return Ok(0) };
        let begin_end = statements.begin_end(begun);
        let complete = statements.complete_in(begun, &row_keys, token, retention_ms(terms));
        let connection = transaction.connection();
        if terms.stores_data() {
            sqlx::raw_sql(AssertSqlSafe(begin_end)).execute(&mut *connection).await?;
            let store = query(&statements.tx_store).bind(&row_keys).bind(token);
            bind_data(store, &rows, true).execute(&mut *connection).await?;
        }
        Ok(sqlx::raw_sql(AssertSqlSafe(complete)).fetch_all(connection).await?.len())
    }
}

/// Returns keys as an array.
fn array(keys: &[Uuid]) -> String {
    let keys: Vec<_> = keys.iter().map(Uuid::to_string).collect();
    format!("'{{{}}}'::uuid[]", keys.join(","))
}

// Several statements share one message, so that they cost one round trip. They have no parameters, so the keys are in
// the text.
impl Statements {
    /// Returns the message that begins a lent transaction.
    fn begin(&self, terms: &CallTerms) -> String {
        let idle_ms = terms.transaction_bound_ms.to_string();
        format!("{TAG}BEGIN; {}", fill(&self.tx_begin, &[("idle_ms", &*idle_ms)]))
    }

    /// Returns the message that releases keys.
    fn release_in(&self, keys: &[Uuid], token: Uuid) -> String {
        let values = [("keys", &*array(keys)), ("token", &*token.to_string())];
        fill(&self.tx_release, &values)
    }

    /// Returns the statement that comes before a statement that completes keys.
    fn begin_end(&self, begun: &Begun) -> String {
        let role = [("role", &*literal(&begun.role))];
        fill(
            &self.tx_begin_end,
            &[("set_role", &render(include_str!("sql/tx_set_role.sql"), &role))],
        )
    }

    /// Returns the message that completes keys in the transaction that claimed them. `retention_ms`
    /// counts again from zero for a row that has expired. Without keys, it only checks the transaction.
    fn complete_in(&self, begun: &Begun, keys: &[Uuid], token: Uuid, retention_ms: i64) -> String {
        let values = [
            ("keys", &*array(keys)),
            ("token", &*token.to_string()),
            ("retention_ms", &*retention_ms.to_string()),
            ("xid", &*begun.xid),
        ];
        let complete = if keys.is_empty() { &self.tx_is_same } else { &self.tx_complete };
        let (begin_end, complete) = (self.begin_end(begun), fill(complete, &values));
        format!("{begin_end}; {complete}; {}", self.tx_restore_role)
    }
}
