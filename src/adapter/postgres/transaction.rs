//! Keys in a transaction: the handler's, lent by the ledger, or one of the user's own.
//!
//! 1. A second claim on a key that an open transaction holds is in flight at once. An insertion would
//!    wait for that transaction, with a connection, as long as a handler runs. So the claim first tries
//!    for an advisory lock, which ends with its transaction, also behind PgBouncer. A transaction takes
//!    63 locks at most: the last keys of a larger delivery share one. A transaction that ends frees its locks one
//!    after another, so a delivery that arrives meanwhile may get a part of its keys.
//! 2. The user's isolation level stays. Where a snapshot hides the winner (40001), the claim is made
//!    again in a new transaction, a bounded number of times.
//! 3. The row is inserted incomplete, under a lease. The last message before COMMIT completes it, if
//!    this is the transaction that claimed. An aborted transaction returns an error, and another
//!    transaction returns no row. COMMIT alone shows neither: an aborted transaction returns ROLLBACK,
//!    which sqlx takes for success.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use sqlx::pool::PoolConnection;
use sqlx::postgres::{PgConnection, PgRow, Postgres};
use sqlx::{AssertSqlSafe, Row as _};

use super::super::contract::StoreFuture;
use super::super::replies::ClaimReply;
use super::super::sql::batch::{known, unanswered, with_claimed};
use super::super::sql::call::{Kind, RowReply, Rows};
use super::super::sql::responses::most_read;
use super::super::sql::row::Row;
use super::super::sql::statement::{fill, query, render};
use super::super::stored::Fetch;
use super::super::terms::{CallTerms, Token};
use super::super::transaction::{OpenTransaction, Opened, Sealed, TransactionAdapter, not_ours};
use super::adapter::PostgresAdapter;
use super::connections::BoundedConnection;
use super::dialect::claimed;
use super::errors::{is_broken_transaction, is_conflict, is_locked, is_read_only, store_error};
use super::params::{
    Uuid, advisory_locks, bind_claim, bind_data, by_key, key_hash, read_row, retention_ms, uuids,
};
use super::schema::literal;
use super::statements::{Statements, TAG};
use super::store::{PostgresStore, repeats};
use super::writing::{RowStatements, Writing};
use crate::error::Error;
use crate::key::DedupKey;

/// How many connections of a pool handlers leave to everybody else by default.
const SPARE_CONNECTIONS: u32 = 2;

impl Sealed for PostgresAdapter {}

impl TransactionAdapter for PostgresAdapter {
    type Database = Postgres;

    fn stores_data(&self) -> bool {
        true
    }

    fn open<'a>(
        &'a self,
        keys: &'a [DedupKey],
        terms: &'a CallTerms,
    ) -> StoreFuture<'a, Opened<Postgres>> {
        Box::pin(self.0.with_table(move || Box::pin(self.0.open(keys, terms))))
    }

    fn release_in<'a>(
        &'a self,
        transaction: &'a mut OpenTransaction<Postgres>,
        keys: &'a [DedupKey],
        terms: &'a CallTerms,
    ) -> StoreFuture<'a, ()> {
        Box::pin(async move {
            let rows = Rows::of_call(keys, terms, key_hash);
            let release = self.0.statements().release_in(&uuids(&rows), terms.token().into());
            let release = sqlx::raw_sql(AssertSqlSafe(release)).execute(transaction.connection());
            release.await.map_err(|error| store_error("releasing keys in a transaction", error))?;
            Ok(())
        })
    }

    fn commit<'a>(
        &'a self,
        transaction: OpenTransaction<Postgres>,
        keys: &'a [DedupKey],
        terms: &'a CallTerms,
    ) -> StoreFuture<'a, ()> {
        Box::pin(async move {
            commit(self.0.statements(), transaction, keys, terms).await?;
            self.0.transactions.holds.has_ended();
            Ok(())
        })
    }

    fn rollback(&self, transaction: OpenTransaction<Postgres>) -> StoreFuture<'_, ()> {
        Box::pin(async move {
            let rolled_back = transaction.rollback().await;
            rolled_back.map_err(|error| store_error("rolling the transaction back", error))?;
            self.0.transactions.holds.has_ended();
            Ok(())
        })
    }

    fn default_max_running(&self) -> Option<usize> {
        let connections = self.0.connections.pool.options().get_max_connections();
        usize::try_from(connections.saturating_sub(SPARE_CONNECTIONS).max(1)).ok()
    }
}

impl PostgresAdapter {
    /// Claims a key in a transaction of yours: the key is complete when, and only if, the transaction
    /// commits.
    ///
    /// For code that owns its transactions, without the layer. `retention` is how long the key is
    /// remembered. Nothing waits for another transaction: a key that one holds is
    /// [`InFlight`](ClaimReply::InFlight). On `Duplicate` and `InFlight`, nothing was written.
    ///
    /// It sets `synchronous_commit` to `on` for this transaction if it is weaker (`off`, `local`,
    /// `remote_write`), because what is acknowledged has to be on disk, and on that of a synchronous
    /// standby. If there is no table yet, it is made on another connection of the pool.
    ///
    /// # Errors
    ///
    /// The database's errors. The transaction is aborted then, and has to be rolled back. After
    /// [`ErrorKind::Refused`](crate::ErrorKind::Refused), try a new transaction: under REPEATABLE READ
    /// and SERIALIZABLE, another claim that has just committed shows as this error.
    ///
    /// # Example
    ///
    /// ```no_run
    /// # async fn example(pool: sqlx::PgPool) -> Result<(), Box<dyn std::error::Error>> {
    /// use std::time::Duration;
    /// use tower_dedup::DedupKey;
    /// use tower_dedup::adapter::PostgresAdapter;
    /// use tower_dedup::adapter::contract::ClaimReply;
    ///
    /// let adapter = PostgresAdapter::new(pool.clone());
    /// let key = DedupKey::new("orders", "order_17")?;
    /// let mut tx = pool.begin().await?;
    /// let month = Duration::from_secs(30 * 86_400);
    /// if let ClaimReply::First { .. } = adapter.record_in(&mut tx, &key, month).await? {
    ///     sqlx::query("UPDATE stock SET left_over = left_over - 1").execute(&mut *tx).await?;
    ///     tx.commit().await?; // the key and the effect, or neither
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn record_in(
        &self,
        connection: &mut PgConnection,
        key: &DedupKey,
        retention: Duration,
    ) -> Result<ClaimReply, Error> {
        let statements = self.0.ready_within(connection).await?;
        let terms = CallTerms::on_claim(Token::random(), retention);
        let rows = Rows::of_call(std::slice::from_ref(key), &terms, key_hash);
        let mut session = InTransaction::new(connection, &statements, &rows);
        let mut writing = Writing::new(Kind::ClaimComplete, &rows);
        writing.run(&mut session, false).await.map_err(|error| {
            let error = store_error("claiming a key in a transaction", error);
            // The transaction is lost. The next one finds the table, or makes it.
            self.0.note_missing_table(&error, &statements);
            error
        })?;
        Ok(writing.claimed()?.into_iter().next().unwrap_or(ClaimReply::InFlight))
    }
}

impl PostgresStore {
    /// Reads first: duplicates need no transaction. A transaction begins on the connection of the read,
    /// because the pool tests each connection that it lends, and each that returns.
    async fn open(&self, keys: &[DedupKey], terms: &CallTerms) -> Result<Opened<Postgres>, Error> {
        let fault = |error| store_error("opening a transaction", error);
        let rows = Rows::of_call(keys, terms, key_hash);
        let (found, connection) = self.read(&rows, terms.fetch()).await.map_err(fault)?;
        let known = known(found, terms)?;
        let left = unanswered(&known);
        if left.is_empty() && !keys.is_empty() {
            return Ok(Opened { replies: with_claimed(known, Vec::new()), transaction: None });
        }
        let connection = connection.and_then(BoundedConnection::into_pooled);
        let (claimed, transaction) =
            self.claim_in_new_transaction(connection, &rows.select(&left), terms).await?;
        Ok(Opened { replies: with_claimed(known, claimed), transaction })
    }

    /// Claims in a new transaction; in another one after a conflict. Returns the transaction if anything
    /// was granted, or if there is no row. The first transaction begins on `connection`, if it is given.
    async fn claim_in_new_transaction(
        &self,
        mut connection: Option<PoolConnection<Postgres>>,
        rows: &Rows<'_>,
        terms: &CallTerms,
    ) -> Result<(Vec<ClaimReply>, Option<OpenTransaction<Postgres>>), Error> {
        let fault = |error| store_error("opening a transaction", error);
        let statements = self.statements();
        let mut pauses = repeats();
        loop {
            let place = self.transactions.place().await;
            let connection = match connection.take() {
                Some(connection) => connection,
                None => self.connections.pooled().await.map_err(fault)?,
            };
            let begin = statements.begin(terms);
            let transaction = OpenTransaction::begin_on(connection, begin, place.lost()).await;
            let mut transaction = transaction.map_err(fault)?;
            let mut session = InTransaction::new(transaction.connection(), &statements, rows);
            let mut writing = Writing::new(Kind::Claim, rows);
            let ran = if rows.is_empty() {
                session.open_without_keys().await
            } else {
                writing.run(&mut session, false).await
            };
            let begun = session.begun.take();
            let error = match (ran, writing.claimed()) {
                (Err(error), _) => error,
                (Ok(()), Err(error)) => {
                    end_badly(transaction).await;
                    return Err(error);
                }
                (Ok(()), Ok(claimed)) => {
                    let granted = rows.is_empty()
                        || claimed.iter().any(|reply| matches!(reply, ClaimReply::First { .. }));
                    if let Some(begun) = begun.filter(|_| granted) {
                        return Ok((claimed, Some(transaction.with(begun))));
                    }
                    transaction.rollback().await.map_err(fault)?;
                    return Ok((claimed, None));
                }
            };
            let read_only = is_read_only(&error);
            if read_only {
                transaction.close();
                self.connections.test_idle();
            } else {
                end_badly(transaction).await;
            }
            // An open transaction holds the row, without a lock of the key's: one of the user's own, or
            // a large delivery. Of several keys the others may be free, and are not in flight then.
            if is_locked(&error) && rows.len() == 1 {
                return Ok((vec![ClaimReply::InFlight], None));
            }
            match pauses.next() {
                Some(pause) if read_only || is_conflict(&error) => {
                    tokio::time::sleep(pause).await;
                }
                _ => return Err(fault(error)),
            }
        }
    }
}

/// The statements of a round, in a transaction. All rows have the terms of one call.
struct InTransaction<'t> {
    connection: &'t mut PgConnection,
    statements: &'t Statements,
    /// The lock of each key, made once: a repeated statement asks for the same locks.
    locks: HashMap<u128, i64>,
    begun: Option<Begun>,
}

impl<'t> InTransaction<'t> {
    fn new(connection: &'t mut PgConnection, statements: &'t Statements, rows: &Rows<'_>) -> Self {
        let locks = rows.iter().map(|row| row.hash).zip(advisory_locks(rows)).collect();
        Self { connection, statements, locks, begun: None }
    }

    async fn open_without_keys(&mut self) -> Result<(), sqlx::Error> {
        let open = query(&self.statements.tx_open);
        self.begun = Some(Begun::new(&open.fetch_one(&mut *self.connection).await?)?);
        Ok(())
    }

    async fn send(
        &mut self,
        sql: &Arc<str>,
        kind: Kind,
        rows: &Rows<'_>,
    ) -> Result<Vec<PgRow>, sqlx::Error> {
        let locks: Vec<i64> = rows.iter().map(|row| self.locks[&row.hash]).collect();
        let claim = bind_claim(query(sql), kind, rows).bind(locks);
        claim.fetch_all(&mut *self.connection).await
    }
}

impl RowStatements for InTransaction<'_> {
    async fn write(
        &mut self,
        kind: Kind,
        rows: &Rows<'_>,
    ) -> Result<Vec<Option<RowReply>>, sqlx::Error> {
        let returned = self.send(&self.statements.tx_claim_insert, kind, rows).await?;
        if let (None, Some(row)) = (&self.begun, returned.first()) {
            self.begun = Some(Begun::new(row)?);
        }
        let written = by_key(rows, &returned, |_, row| {
            Ok(match (row.try_get("locked")?, row.try_get("granted")?) {
                (false, _) => Some(RowReply::Claimed(ClaimReply::InFlight)),
                (true, true) => Some(RowReply::Claimed(ClaimReply::first(1, false))),
                (true, false) => None,
            })
        })?;
        Ok(written.into_iter().map(Option::flatten).collect())
    }

    async fn take(
        &mut self,
        kind: Kind,
        rows: &Rows<'_>,
        _: &[i64],
    ) -> Result<Vec<Option<RowReply>>, sqlx::Error> {
        let taken = self.send(&self.statements.tx_claim_existing, kind, rows).await?;
        by_key(rows, &taken, |_, row| claimed(row))
    }

    async fn read(
        &mut self,
        rows: &Rows<'_>,
        fetch: Fetch,
    ) -> Result<Vec<Option<Row>>, sqlx::Error> {
        let mut found = Vec::with_capacity(rows.len());
        for part in rows.chunks(most_read(fetch)) {
            let read = query(self.statements.read(fetch)).bind(uuids(part));
            let returned = read.fetch_all(&mut *self.connection).await?;
            found.extend(by_key(part, &returned, |_, row| Ok(read_row(row, fetch)))?);
        }
        Ok(found)
    }
}

/// Returns what [`PostgresStore::claim_in_new_transaction`] has attached.
fn begun(transaction: &OpenTransaction<Postgres>) -> Result<&Begun, Error> {
    transaction.attachment().ok_or_else(|| not_ours("using a transaction: nothing was claimed"))
}

/// Stores the keys' data, completes the keys, and commits.
async fn commit(
    statements: Arc<Statements>,
    mut transaction: OpenTransaction<Postgres>,
    keys: &[DedupKey],
    terms: &CallTerms,
) -> Result<(), Error> {
    let fault = |error: sqlx::Error| {
        let by_handler = is_broken_transaction(&error);
        let error = store_error("committing the handler's transaction", error);
        if by_handler { error.of_the_transaction() } else { error }
    };
    let rows = Rows::of_call(keys, terms, key_hash);
    let (row_keys, token) = (uuids(&rows), Uuid::from(terms.token()));
    let begun = begun(&transaction)?;
    let begin_end = statements.begin_end(begun);
    let complete = statements.complete_in(begun, &row_keys, token, retention_ms(terms));
    let connection = transaction.connection();
    let completing = async {
        if terms.stores_data() {
            sqlx::raw_sql(AssertSqlSafe(begin_end)).execute(&mut *connection).await?;
            let store = query(&statements.tx_store).bind(&row_keys).bind(token);
            bind_data(store, &rows, true).execute(&mut *connection).await?;
        }
        Ok(sqlx::raw_sql(AssertSqlSafe(complete)).fetch_all(connection).await?.len())
    };
    let completed = match completing.await {
        Ok(completed) => completed,
        Err(error) => {
            end_badly(transaction).await;
            return Err(fault(error));
        }
    };
    // Without keys, the check of the transaction returns one row.
    if completed != keys.len().max(1) {
        end_badly(transaction).await;
        return Err(not_ours("committing: the handler has ended its transaction"));
    }
    if transaction.has_leaked_savepoint() {
        transaction.close();
        return Err(not_ours("committing: the handler has leaked a savepoint"));
    }
    transaction.commit().await.map_err(fault)
}

/// Rolls back after another error, which is the one to report.
async fn end_badly(transaction: OpenTransaction<Postgres>) {
    let _ = transaction.rollback().await;
}

/// The transaction that claimed.
#[derive(Debug)]
struct Begun {
    xid: u64,
    /// The role of the claim, as `current_setting` returns it: a name, or `none`.
    role: String,
}

impl Begun {
    fn new(row: &PgRow) -> Result<Self, sqlx::Error> {
        let xid: &str = row.try_get("xid")?;
        let xid = xid.parse().map_err(|error| sqlx::Error::Decode(Box::new(error)))?;
        Ok(Self { xid, role: row.try_get("role")? })
    }

    /// Returns an expression that sets the role of the claim again. Its value is never the empty string.
    fn set_role(&self) -> String {
        render(include_str!("sql/tx_set_role.sql"), &[("role", &literal(&self.role))])
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
        let idle_ms = terms.transaction_bound_ms().to_string();
        format!("{TAG}BEGIN; {}", fill(&self.tx_begin, &[("idle_ms", &*idle_ms)]))
    }

    /// Returns the message that releases keys while their transaction goes on, before a handler has it.
    fn release_in(&self, keys: &[Uuid], token: Uuid) -> String {
        let values = [("keys", &*array(keys)), ("token", &*token.to_string())];
        fill(&self.tx_release, &values)
    }

    /// Returns the statement that comes before a statement that completes keys.
    fn begin_end(&self, begun: &Begun) -> String {
        fill(&self.tx_begin_end, &[("set_role", &begun.set_role())])
    }

    /// Returns the message that completes keys in the transaction that claimed them. `retention_ms`
    /// counts again from zero for a row that has expired. Without keys, it only checks the transaction.
    fn complete_in(&self, begun: &Begun, keys: &[Uuid], token: Uuid, retention_ms: i64) -> String {
        let values = [
            ("keys", &*array(keys)),
            ("token", &*token.to_string()),
            ("retention_ms", &*retention_ms.to_string()),
            ("xid", &*begun.xid.to_string()),
        ];
        let complete = if keys.is_empty() { &self.tx_is_same } else { &self.tx_complete };
        let (begin_end, complete) = (self.begin_end(begun), fill(complete, &values));
        format!("{begin_end}; {complete}; {}", self.tx_restore_role)
    }
}

#[cfg(test)]
mod tests {
    use super::super::schema::TableName;
    use super::*;

    #[test]
    fn every_statement_of_a_message_begins_with_the_tag() {
        let statements = Statements::new(&TableName::default(), true);
        let terms = CallTerms::on_claim(Token::random(), Duration::ZERO);
        let begin = statements.begin(&terms.with_transaction_bound_ms(i32::MAX));
        assert!(begin.contains("nullif(2147483647 *"), "{begin}");
        let (keys, token) = (&[Uuid([1; 16])], Uuid([2; 16]));
        let mut messages = vec![(begin, 2), (statements.release_in(keys, token), 1)];
        for role in ["none", "a \"role\"", "{keys}"] {
            let begun = Begun { xid: 7, role: role.to_owned() };
            for keys in [&keys[..], &[]] {
                let complete = statements.complete_in(&begun, keys, token, 1);
                assert!(complete.contains(&literal(role)), "{complete}");
                messages.push((complete, 3));
            }
        }
        for (message, statements) in messages {
            assert!(message.starts_with(TAG), "{message}");
            assert_eq!(message.matches(TAG).count(), statements, "{message}");
        }
    }
}
