//! Keys in a transaction: the handler's, lent by the ledger, or one of the user's own.
//!
//! 1. The twin of a key that an open transaction holds is told at once. An insertion would wait
//!    for that transaction, with a connection in hand for as long as a handler runs, so an
//!    advisory lock is tried for first. It is the transaction's own, and ends with it, behind
//!    PgBouncer too. There are 63 at most: of a larger set the last keys share one. One more lock
//!    names the session, so that another connection can terminate it.
//! 2. The user's isolation level stays. Where a snapshot hides the winner (40001), the claim is
//!    made again in a new transaction, a bounded number of times.
//! 3. The row goes in *open*, under a lease. It is completed by the last message before COMMIT,
//!    which asks whether this is the transaction that claimed: an aborted one answers an error,
//!    another one no row. COMMIT alone tells neither: to an aborted transaction the server
//!    answers ROLLBACK, which sqlx takes for success.
//! 4. A mark takes the place of the one before it, so that savepoints do not pile up: each is one
//!    more level that every statement looks through.

use std::sync::Arc;
use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBuilder};
use futures_util::future::BoxFuture;
use sqlx::postgres::{PgConnection, PgRow, Postgres};
use sqlx::{AssertSqlSafe, Connection, Row};

use super::super::contract::StoreFuture;
use super::super::replies::Claimed;
use super::super::sql::{Grant, Recorded, Rows, at, attach, duplicates, open_places};
use super::super::stored::Fetch;
use super::super::terms::{CallTerms, Token};
use super::super::transaction::{
    OpenTransaction, Opened, TransactionAdapter, not_ours, rollback_to_sql, savepoint_sql,
};
use super::change::grant;
use super::ending::Begun;
use super::rows::{
    Columns, KeptColumns, MOST_MS, Places, Uuid, advisory_locks, has_lost_its_transaction,
    is_broken, is_conflict, is_locked, is_no_savepoint, is_read_only, place, row_keys, store_error,
    stored,
};
use super::server_session::{self, BEGIN};
use super::statements::{Statements, Within};
use super::store::PostgresAdapter;
use crate::error::Error;
use crate::key::DedupKey;

/// How often a claim is made again that was in another's way.
const REPEATS: usize = 5;
/// How often a key is looked at again that changed hands between two statements.
const ROUNDS: usize = 4;
/// What comes before the stored row in what an insertion answers within a transaction.
const WITHIN: usize = 5;

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
        Box::pin(self.open_fetching(keys, terms))
    }

    fn release_in<'a>(
        &'a self,
        transaction: &'a mut OpenTransaction<Postgres>,
        keys: &'a [DedupKey],
        terms: &'a CallTerms,
    ) -> StoreFuture<'a, ()> {
        Box::pin(self.release_within(transaction, keys, terms))
    }

    fn savepoint<'a>(
        &'a self,
        transaction: &'a mut OpenTransaction<Postgres>,
        savepoint: u32,
        replaces: Option<u32>,
    ) -> StoreFuture<'a, ()> {
        Box::pin(self.set_savepoint(transaction, savepoint, replaces))
    }

    fn rollback_to<'a>(
        &'a self,
        transaction: &'a mut OpenTransaction<Postgres>,
        savepoint: u32,
    ) -> StoreFuture<'a, bool> {
        Box::pin(self.back_to(transaction, savepoint))
    }

    fn commit<'a>(
        &'a self,
        transaction: OpenTransaction<Postgres>,
        keys: &'a [DedupKey],
        terms: &'a CallTerms,
    ) -> StoreFuture<'a, ()> {
        Box::pin(self.complete_and_commit(transaction, keys, terms))
    }

    fn rollback(&self, transaction: OpenTransaction<Postgres>) -> StoreFuture<'_, ()> {
        Box::pin(self.roll_all_back(transaction))
    }

    /// The pool's size less two, so that handlers cannot take every connection.
    fn default_max_running(&self) -> Option<usize> {
        let connections = self.inner().connections.pool.options().get_max_connections();
        Some(connections.saturating_sub(2).max(1) as usize)
    }
}

impl PostgresAdapter {
    async fn open_fetching(
        &self,
        keys: &[DedupKey],
        terms: &CallTerms,
    ) -> Result<Opened<Postgres>, Error> {
        let fetch = terms.fetch();
        // Of several keys, before there is a transaction: to wait for a second connection with a
        // transaction in hand is how a pool locks up. Of one, there is a transaction or a duplicate.
        let several = keys.len() > 1;
        let before = if several { keys.to_vec() } else { Vec::new() };
        let mut stored = self.stored(before, fetch).await?;
        let open =
            |statements| -> BoxFuture<'_, _> { Box::pin(self.open_with(statements, keys, terms)) };
        let mut opened = self.inner().with_table(open).await?;
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
        transaction: &mut OpenTransaction<Postgres>,
        keys: &[DedupKey],
        terms: &CallTerms,
    ) -> Result<(), Error> {
        let begun = begun(transaction)?;
        let token = terms.token().into();
        let back = self.inner().statements().give_back(begun, &row_keys(keys), token);
        sqlx::raw_sql(AssertSqlSafe(back))
            .execute(transaction.connection())
            .await
            .map_err(|error| store_error("giving keys back", error))?;
        Ok(())
    }

    async fn set_savepoint(
        &self,
        transaction: &mut OpenTransaction<Postgres>,
        savepoint: u32,
        replaces: Option<u32>,
    ) -> Result<(), Error> {
        let set =
            sqlx::raw_sql(savepoint_sql(savepoint, replaces)).execute(transaction.connection());
        set.await.map(drop).map_err(|error| {
            let refused = matches!(&error, sqlx::Error::Database(_)) && !is_broken(&error);
            let error = store_error("setting a savepoint", error);
            if refused { error.of_the_transaction() } else { error }
        })
    }

    async fn back_to(
        &self,
        transaction: &mut OpenTransaction<Postgres>,
        savepoint: u32,
    ) -> Result<bool, Error> {
        let mut repeats = REPEATS;
        loop {
            let back = sqlx::raw_sql(rollback_to_sql(savepoint)).execute(transaction.connection());
            match back.await {
                Ok(_) => return Ok(true),
                Err(error) if is_no_savepoint(&error) => return Ok(false),
                // To a statement that the handler has not waited for: sqlx answers the next one
                // with its error, and does not send that.
                Err(sqlx::Error::Database(_)) if repeats > 0 => repeats -= 1,
                Err(error) => return Err(store_error("rolling back to a savepoint", error)),
            }
        }
    }

    async fn complete_and_commit(
        &self,
        mut transaction: OpenTransaction<Postgres>,
        keys: &[DedupKey],
        terms: &CallTerms,
    ) -> Result<(), Error> {
        const CONTEXT: &str = "committing the handler's transaction";
        let fault = |error: sqlx::Error| {
            let ended = has_lost_its_transaction(&error);
            let error = store_error(CONTEXT, error);
            if ended { error.of_the_transaction() } else { error }
        };
        let statements = self.inner().statements();
        let begun = begun(&transaction)?;
        let retention = terms.retention_ms().min(MOST_MS);
        let complete = statements.commit(begun, &row_keys(keys), terms.token().into(), retention);
        let kept = if terms.stores_data() {
            let end = statements.end(begun);
            keep(transaction.connection(), end, &statements.keep, keys, terms).await
        } else {
            Ok(())
        };
        let completed = match kept {
            Ok(()) => {
                let complete = sqlx::raw_sql(AssertSqlSafe(complete));
                complete.fetch_all(transaction.connection()).await
            }
            Err(error) => Err(error),
        };
        let completed = match completed {
            Ok(completed) => completed,
            Err(error) => {
                end_badly(transaction).await;
                return Err(fault(error));
            }
        };
        if completed.len() != keys.len() {
            end_badly(transaction).await;
            return Err(not_ours("completing keys: the handler has ended its transaction"));
        }
        let at_the_top = completed.iter().all(|row| row.try_get("top").unwrap_or(false));
        if !at_the_top && has_leaked(transaction.connection()).await.map_err(fault)? {
            transaction.close();
            return Err(not_ours("committing: the handler has leaked a savepoint"));
        }
        transaction.commit().await.map_err(fault)
    }

    async fn roll_all_back(&self, transaction: OpenTransaction<Postgres>) -> Result<(), Error> {
        end(transaction)
            .await
            .map_err(|error| store_error("rolling the handler's transaction back", error))
    }
}

impl PostgresAdapter {
    /// Records a key in a transaction of yours: it is complete when, and only if, that commits.
    ///
    /// For code that owns its transactions, without the layer. `ttl` is how long the key is
    /// remembered. Nothing waits for another transaction: a key that one holds is
    /// [`InFlight`](Claimed::InFlight). On `Duplicate` and `InFlight`, nothing was written.
    ///
    /// It sets `synchronous_commit` to `on` for this transaction if it is weaker (`off`, `local`,
    /// `remote_write`), because what is acknowledged has to be on disk, and on that of a synchronous
    /// standby. Where the table is not there yet, it is made on another connection of the pool.
    ///
    /// # Errors
    ///
    /// What the database answers; the transaction is aborted then, and has to be rolled back.
    /// [`ErrorKind::Refused`](crate::ErrorKind::Refused) is worth a new transaction: under
    /// REPEATABLE READ and SERIALIZABLE it is how a twin that has just committed shows.
    ///
    /// # Example
    ///
    /// ```no_run
    /// # async fn example(pool: sqlx::PgPool) -> Result<(), Box<dyn std::error::Error>> {
    /// use std::time::Duration;
    /// use tower_dedup::DedupKey;
    /// use tower_dedup::adapter::{Claimed, PostgresAdapter};
    ///
    /// let adapter = PostgresAdapter::new(pool.clone());
    /// let key = DedupKey::new("orders", "order_17")?;
    /// let mut tx = pool.begin().await?;
    /// let month = Duration::from_secs(30 * 86_400);
    /// if let Claimed::First { .. } = adapter.record_in(&mut tx, &key, month).await? {
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
        ttl: Duration,
    ) -> Result<Claimed, Error> {
        let inner = self.inner();
        let statements = inner.ready_within(connection).await?;
        let (keys, terms) = ([key.clone()], CallTerms::on_claim(Token::random(), ttl));
        let session = rand::random();
        let take = &statements.record_in;
        let taken = self.take_within(connection, session, take, &keys, &terms).await;
        let (answers, _): (Vec<Recorded>, _) = taken.map_err(|error| {
            let error = store_error("recording in a transaction", error);
            // The transaction is lost. The next one finds the table, or makes it.
            inner.has_gone(&error, &statements);
            error
        })?;
        Ok(answers.into_iter().next().map_or(Claimed::InFlight, Into::into))
    }

    async fn open_with(
        &self,
        statements: Arc<Statements>,
        keys: &[DedupKey],
        terms: &CallTerms,
    ) -> Result<Opened<Postgres>, Error> {
        // Duplicates need no transaction.
        let stored = self.inner().read(keys).await?;
        let mut answers: Vec<Option<Claimed>> = stored
            .into_iter()
            .map(|stored| stored.and_then(|stored| Claimed::known(&stored, terms.token())))
            .collect();
        let open = open_places(&answers);
        let mut transaction = None;
        if !open.is_empty() {
            let opened = self.claim_within(&statements.open, &at(keys, &open), terms).await;
            let (taken, begun) =
                opened.map_err(|error| store_error("opening a transaction", error))?;
            transaction = begun;
            for (place, taken) in open.into_iter().zip(taken) {
                answers[place] = Some(taken);
            }
        }
        let answers = answers.into_iter();
        let replies = answers.map(|answer| answer.unwrap_or(Claimed::InFlight)).collect();
        Ok(Opened { replies, transaction })
    }

    /// Claims in a transaction of its own; a new one where two were in each other's way.
    async fn claim_within(
        &self,
        take: &Within,
        keys: &[DedupKey],
        terms: &CallTerms,
    ) -> Result<(Vec<Claimed>, Option<OpenTransaction<Postgres>>), sqlx::Error> {
        let mut pauses = ExponentialBuilder::new()
            .with_min_delay(Duration::from_millis(1))
            .with_max_delay(Duration::from_millis(50))
            .with_max_times(REPEATS)
            .with_jitter()
            .build();
        loop {
            let connection = self.inner().connections.pooled().await?;
            let (adapter, lock) = (self.clone(), rand::random());
            let lost = move |connection| server_session::end(adapter, lock, connection);
            let mut transaction = OpenTransaction::begin_on(connection, Some(BEGIN), lost).await?;
            let connection = transaction.connection();
            let taken = self.take_within(connection, lock, take, keys, terms).await;
            let error = match taken {
                Ok((answers, Some(begun))) => {
                    return Ok((answers, Some(transaction.with(begun))));
                }
                Ok((answers, None)) => {
                    transaction.rollback().await?;
                    return Ok((answers, None));
                }
                Err(error) => error,
            };
            let read_only = is_read_only(&error);
            if read_only {
                transaction.close();
                self.inner().connections.suspect();
            } else {
                end_badly(transaction).await;
            }
            // An open transaction holds the row, by no lock of the key's: one of the user's own, or a
            // large delivery. Of several keys the others may be free, and are not in flight then.
            if is_locked(&error) && keys.len() == 1 {
                return Ok((vec![Claimed::InFlight], None));
            }
            match pauses.next() {
                Some(pause) if read_only || is_conflict(&error) => {
                    tokio::time::sleep(pause).await;
                }
                _ => return Err(error),
            }
        }
    }

    /// Claims or records within a transaction, and returns it if anything was granted.
    async fn take_within<T: Grant>(
        &self,
        connection: &mut PgConnection,
        session: i64,
        take: &Within,
        keys: &[DedupKey],
        terms: &CallTerms,
    ) -> Result<(Vec<T>, Option<Begun>), sqlx::Error> {
        let mut answers: Vec<Option<T>> = keys.iter().map(|_| None).collect();
        // Once, so that what is asked for again has the same locks.
        let locks = advisory_locks(keys);
        let mut begun = None;
        for _ in 0..ROUNDS {
            let open = open_places(&answers);
            let asked = at(keys, &open);
            let locks_of = |places: &[usize]| -> Vec<i64> {
                places.iter().map(|place| locks[*place]).collect()
            };
            let tried = locks_of(&open);
            let rows =
                self.within(connection, session, &take.insert, &asked, &tried, terms).await?;
            let mut free = Vec::new();
            for row in &rows {
                let Some(place) = open.get(place(row)?) else { continue };
                if !row.try_get::<bool, _>("locked")? {
                    answers[*place] = Some(T::in_flight());
                } else if row.try_get("granted")? {
                    answers[*place] = Some(T::granted(1, false));
                    begun = Some(Begun::new(row)?);
                } else if row.try_get::<Option<i32>, _>("attempts")?.is_some() {
                    let stored = stored(row, WITHIN)?;
                    answers[*place] = T::known(&stored, terms.token());
                    if answers[*place].is_none() {
                        free.push(*place);
                        begun = Some(Begun::new(row)?);
                    }
                }
            }
            if !free.is_empty() {
                let asked = at(keys, &free);
                let held = locks_of(&free);
                let rows =
                    self.within(connection, session, &take.seize, &asked, &held, terms).await?;
                for (place, row) in Places::new(&row_keys(&asked)).of_rows(rows)? {
                    answers[free[place]] = Some(grant(&row)?);
                }
            }
            if answers.iter().all(Option::is_some) {
                break;
            }
        }
        let answers: Vec<T> =
            answers.into_iter().map(|answer| answer.unwrap_or_else(T::in_flight)).collect();
        Ok((answers, begun))
    }

    async fn within(
        &self,
        connection: &mut PgConnection,
        session: i64,
        sql: &Arc<str>,
        keys: &[DedupKey],
        locks: &[i64],
        terms: &CallTerms,
    ) -> Result<Vec<PgRow>, sqlx::Error> {
        let rows = Rows::one(keys, terms);
        Columns::new(&rows)
            .bind_within(sql, terms)
            .bind(locks)
            .bind(session)
            .fetch_all(connection)
            .await
    }
}

/// What [`PostgresAdapter::claim_within`] has attached.
fn begun(transaction: &OpenTransaction<Postgres>) -> Result<&Begun, Error> {
    transaction.attachment().ok_or_else(|| not_ours("completing keys: nothing was claimed"))
}

/// Stores what is kept with the keys, before they are completed.
async fn keep(
    connection: &mut PgConnection,
    end: String,
    sql: &Arc<str>,
    keys: &[DedupKey],
    terms: &CallTerms,
) -> Result<(), sqlx::Error> {
    sqlx::raw_sql(AssertSqlSafe(end)).execute(&mut *connection).await?;
    let kept = KeptColumns::new(&Rows::one(keys, terms));
    sqlx::query(AssertSqlSafe(Arc::clone(sql)))
        .bind(row_keys(keys))
        .bind(Uuid::from(terms.token()))
        .bind(kept.payloads)
        .bind(kept.statuses)
        .bind(kept.headers)
        .bind(kept.bodies)
        .execute(connection)
        .await
        .map(drop)
}

/// Rolls back; what comes of it is of no interest, for something else went wrong before.
async fn end_badly(transaction: OpenTransaction<Postgres>) {
    let _ = end(transaction).await;
}

/// Rolls back all of a handler's transaction. Where it has leaked the guard of a savepoint, sqlx
/// rolls back to that, and no further: it does not find it in the new transaction, and gives the
/// connection up.
async fn end(mut transaction: OpenTransaction<Postgres>) -> Result<(), sqlx::Error> {
    // An error where the handler has ended the transaction by itself.
    let _ = sqlx::raw_sql("/* tower-dedup */ ROLLBACK AND CHAIN")
        .execute(transaction.connection())
        .await;
    transaction.rollback().await
}

/// Whether a handler has leaked the guard of a savepoint: sqlx would release that instead of
/// committing, and give the connection back to its pool with the transaction open.
///
/// Which savepoint is sqlx's next shows how many it takes for open. If it is the first, it is the
/// one above `probe`, which then is still there; else `probe` goes with an older first one. (Those
/// that were rolled back stay on the stack as well, so that looking for one tells nothing.)
async fn has_leaked(connection: &mut PgConnection) -> Result<bool, sqlx::Error> {
    sqlx::raw_sql("SAVEPOINT tower_dedup_probe").execute(&mut *connection).await?;
    connection.begin().await?.rollback().await?;
    let release = "RELEASE _sqlx_savepoint_1; RELEASE tower_dedup_probe";
    match sqlx::raw_sql(release).execute(connection).await {
        Ok(_) => Ok(false),
        Err(sqlx::Error::Database(_)) => Ok(true),
        Err(error) => Err(error),
    }
}
