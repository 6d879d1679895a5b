//! [`PostgresDialect`]: how a batch of calls is sent, and the statement for each step.

use std::sync::Arc;
use std::time::Duration;

use sqlx::Row as _;
use sqlx::pool::PoolConnection;
use sqlx::postgres::{PgRow, Postgres};

use super::super::inspect::ForgetReply;
use super::super::replies::{ClaimReply, RenewReply};
use super::super::sql::batch::{Failed, Replied, RowExecutor, TRIES, execute_batch};
use super::super::sql::call::{Call, Kind, RowReply, Rows};
use super::super::sql::queue::{BatchExecutor, Waits};
use super::super::sql::row::{Row, completed};
use super::super::stored::Fetch;
use super::super::terms::{CallTerms, Token};
use super::connections::{BoundedConnection, Source};
use super::errors::{is_locked, is_row_error, is_timed_out, store_error};
use super::params::{
    DataColumns, Extra, KeyColumns, KeyIndexes, Params, Uuid, advisory_lock, claimed_row, key_hash,
    read_row, uuids,
};
use super::places::Place;
use super::statements::{LOCK_TIMEOUT, Statements};
use super::store::PostgresStore;
use super::writing::{RowStatements, Writing};
use crate::error::Error;
use crate::key::DedupKey;

/// The statements of one call or batch, on connections of one source.
pub(super) struct PostgresDialect<'s> {
    store: &'s PostgresStore,
    source: Source,
    /// Whether the connection of the last statement is held after it.
    keeps_connection: bool,
    connection: Option<BoundedConnection<'s>>,
    /// Whether a statement may have written rows whose reply was lost.
    lost_reply: bool,
    /// Whether the server may still run a statement.
    has_abandoned: bool,
}

impl PostgresStore {
    pub(super) fn dialect(&self, source: Source) -> PostgresDialect<'_> {
        PostgresDialect {
            store: self,
            source,
            keeps_connection: false,
            connection: None,
            lost_reply: false,
            has_abandoned: false,
        }
    }
}

impl BatchExecutor<Call> for PostgresStore {
    type SendGuard = Place;

    async fn send_guard(&self) -> Result<Place, Error> {
        Ok(self.connections.batches.place().await)
    }

    async fn execute(
        &self,
        place: Place,
        batch: Vec<Call>,
        waits: &Waits<'_>,
    ) -> Vec<Result<RowReply, Error>> {
        let mut dialect = self.dialect(Source::Lane);
        let replies = execute_batch(&mut dialect, &batch, waits).await;
        if dialect.has_abandoned {
            place.hold(self.connections.pool.close_event());
        }
        replies
    }
}

impl<'s> PostgresDialect<'s> {
    /// Holds the connection of the last statement, for [`into_pooled`](Self::into_pooled).
    pub(super) fn keeping_connection(self) -> Self {
        Self { keeps_connection: true, ..self }
    }

    /// Returns the pool's connection of the last statement, if there was one.
    pub(super) fn into_pooled(self) -> Option<PoolConnection<Postgres>> {
        self.connection.and_then(BoundedConnection::into_pooled)
    }

    fn statements(&self) -> Arc<Statements> {
        self.store.statements()
    }

    async fn send(
        &mut self,
        sql: &Arc<str>,
        params: Params<'_>,
    ) -> Result<Vec<PgRow>, sqlx::Error> {
        let bound = self.store.options.statement_timeout;
        // No call waits for a connection while it holds another.
        drop(self.connection.take());
        let fetched = self.store.fetch_on(self.source, bound, sql, params).await;
        self.has_abandoned |= fetched.as_ref().is_err_and(is_timed_out);
        let fetched = fetched?;
        self.lost_reply |= fetched.lost_reply;
        self.connection = self.keeps_connection.then_some(fetched.connection);
        Ok(fetched.rows)
    }

    /// Sends a statement that writes. Returns its rows, each with the index of its key.
    async fn write_rows(
        &mut self,
        sql: &Arc<str>,
        rows: &Rows<'_>,
        extra: Extra,
        versions: Option<&[i64]>,
    ) -> Result<Vec<(usize, PgRow)>, sqlx::Error> {
        // The statement inserts in the order of its arrays, and the rows of a batch are sorted.
        let columns = KeyColumns::new(rows);
        let params = match versions {
            None => Params::Rows(&columns, &extra),
            Some(versions) => Params::Versions(&columns, &extra, versions),
        };
        let written = self.send(sql, params).await?;
        self.store.connections.batches.holds.has_ended();
        KeyIndexes::new(rows).of_rows(written)
    }

    /// Releases rows, held or not. A key that is complete at once and never ran is a duplicate for other
    /// processes, until its release has the row. So this release, once it is sent alone, waits for the row nearly as
    /// long as the statement may run: then the server ends the wait.
    async fn release(&mut self, kind: Kind, rows: &Rows<'_>) -> Result<(), sqlx::Error> {
        let all = self.statements();
        let (sql, extra) = match kind {
            Kind::ReleaseComplete if rows.len() > 1 => {
                (&all.release_complete, Extra::LockTimeout(LOCK_TIMEOUT.to_owned()))
            }
            Kind::ReleaseComplete => {
                let wait = self.store.options.statement_timeout.as_millis() * 9 / 10;
                (&all.release_complete, Extra::LockTimeout(format!("{wait}ms")))
            }
            _ => (&all.release, Extra::Nothing),
        };
        self.send(sql, Params::Rows(&KeyColumns::new(rows), &extra)).await.map(drop)
    }
}

impl RowExecutor for PostgresDialect<'_> {
    async fn execute(&mut self, kind: Kind, rows: &Rows<'_>) -> (Vec<Replied>, Option<Failed>) {
        if matches!(kind, Kind::Renew | Kind::Release | Kind::ReleaseComplete) {
            return match self.renew_or_release(kind, rows).await {
                Ok(replies) => {
                    (replies.into_iter().map(|reply| Some(Ok(reply).into())).collect(), None)
                }
                Err(error) => (rows.iter().map(|_| None).collect(), Some(self.failed(kind, error))),
            };
        }
        let reads_first = kind.is_claim() && self.store.read_first.is_on();
        let mut writing = Writing::new(kind, rows);
        let error = writing.run(self, reads_first).await.err();
        let unanswered = writing.unanswered();
        if kind.is_claim() {
            self.store.read_first.note(writing.known, rows.len() - unanswered.len());
        }
        let Some(error) = error else { return (writing.finish(), None) };
        let is_locked = is_locked(&error);
        let failed = self.failed(kind, error);
        // A claim that stands alone and meets a row of an open transaction is in flight. After a lost reply, the
        // claim may hold the row itself.
        if let [index] = &unanswered[..]
            && kind.is_claim()
            && is_locked
            && !failed.error.is_unknown()
        {
            writing.replies[*index] = Some(Ok(RowReply::Claimed(ClaimReply::InFlight)).into());
            return (writing.replies, None);
        }
        (writing.replies, Some(failed))
    }
}

impl RowStatements for PostgresDialect<'_> {
    async fn write(
        &mut self,
        kind: Kind,
        rows: &Rows<'_>,
    ) -> Result<Vec<Option<RowReply>>, sqlx::Error> {
        let all = self.statements();
        let data = || Extra::Data(DataColumns::new(rows));
        let (sql, extra) = match kind {
            Kind::Claim => (&all.claim_insert, Extra::lease(rows)),
            Kind::ClaimComplete => (&all.claim_complete_insert, data()),
            _ => (&all.complete, data()),
        };
        let returned = self.write_rows(sql, rows, extra, None).await?;
        let mut written = vec![None; rows.len()];
        if kind == Kind::Complete {
            for (index, row) in returned {
                written[index] = Some(completion(&row, rows[index].token().into())?);
            }
        } else {
            self.store.replanner.note_rows(returned.len());
            for (index, _) in returned {
                written[index] = Some(RowReply::Claimed(ClaimReply::first(1, false)));
            }
        }
        Ok(written)
    }

    async fn take(
        &mut self,
        kind: Kind,
        rows: &Rows<'_>,
        versions: &[i64],
    ) -> Result<Vec<Option<RowReply>>, sqlx::Error> {
        let all = self.statements();
        let (sql, extra) = match kind {
            Kind::Claim => (&all.claim_existing, Extra::lease(rows)),
            _ => (&all.claim_complete_existing, Extra::Data(DataColumns::new(rows))),
        };
        let taken = self.write_rows(sql, rows, extra, Some(versions)).await?;
        claimed_rows(rows, &taken)
    }

    async fn read(
        &mut self,
        rows: &Rows<'_>,
        fetch: Fetch,
    ) -> Result<Vec<Option<Row>>, sqlx::Error> {
        let keys = uuids(rows);
        let returned = self.send(self.statements().read(fetch), Params::Keys(&keys)).await?;
        rows_in_order(rows, returned, fetch)
    }
}

/// Returns the reply of each row that a claim returned.
pub(super) fn claimed_rows(
    rows: &Rows<'_>,
    returned: &[(usize, PgRow)],
) -> Result<Vec<Option<RowReply>>, sqlx::Error> {
    let mut claimed = vec![None; rows.len()];
    for (index, row) in returned {
        claimed[*index] = Some(RowReply::Claimed(claimed_row(row)?));
    }
    Ok(claimed)
}

/// Returns rows that were read in the order of their keys.
pub(super) fn rows_in_order(
    rows: &Rows<'_>,
    returned: Vec<PgRow>,
    fetch: Fetch,
) -> Result<Vec<Option<Row>>, sqlx::Error> {
    let mut found: Vec<Option<Row>> = rows.iter().map(|_| None).collect();
    for (index, row) in KeyIndexes::new(rows).of_rows(returned)? {
        found[index] = Some(read_row(&row, fetch));
    }
    Ok(found)
}

/// Returns the reply of a row that a completion wrote: its key, attempts and token.
fn completion(row: &PgRow, mine: Uuid) -> Result<RowReply, sqlx::Error> {
    // By position, in the order of RETURNING in `sql/complete.sql`.
    let attempts: i32 = row.try_get(1)?;
    let token: Option<Uuid> = row.try_get(2)?;
    Ok(RowReply::Completed(completed(attempts.into(), token == Some(mine))))
}

impl PostgresDialect<'_> {
    async fn renew_or_release(
        &mut self,
        kind: Kind,
        rows: &Rows<'_>,
    ) -> Result<Vec<RowReply>, sqlx::Error> {
        if kind != Kind::Renew {
            self.release(kind, rows).await?;
            return Ok(vec![RowReply::Released; rows.len()]);
        }
        let all = self.statements();
        let renewed = self.write_rows(&all.renew, rows, Extra::lease(rows), None).await?;
        let mut replies = vec![RowReply::Renewed(RenewReply::Lost); rows.len()];
        for (index, _) in renewed {
            replies[index] = RowReply::Renewed(RenewReply::Held);
        }
        Ok(replies)
    }

    fn failed(&self, kind: Kind, error: sqlx::Error) -> Failed {
        let is_row_error = is_row_error(&error);
        let error = store_error(kind.context(), error);
        let error = if self.lost_reply { error.with_unknown_outcome() } else { error };
        Failed { error, is_row_error }
    }
}

impl PostgresStore {
    /// Forgets a key, unless a live lease or an open transaction holds it.
    pub(super) async fn forget(&self, key: &DedupKey) -> Result<ForgetReply, Error> {
        let fault = |error| store_error("forgetting a key", error);
        // The statement does not use its terms.
        let terms = CallTerms::on_claim(Token::from([0; 16]), Duration::ZERO);
        let rows = Rows::of_call(std::slice::from_ref(key), &terms, key_hash);
        let mut dialect = self.dialect(Source::Pool);
        for _ in 0..TRIES {
            let found = dialect.read(&rows, Fetch::Nothing).await.map_err(fault)?;
            let row = found.into_iter().flatten().next();
            match row.as_ref().map_or(Some(ForgetReply::Missing), Row::forgotten) {
                Some(ForgetReply::Missing)
                    if self.is_in_transaction(rows[0].hash).await.map_err(fault)? =>
                {
                    return Ok(ForgetReply::InFlight);
                }
                Some(reply) => return Ok(reply),
                None => {}
            }
            let (columns, versions) = (KeyColumns::new(&rows), [row.map_or(0, |row| row.version)]);
            let params = Params::Versions(&columns, &Extra::Nothing, &versions);
            // After a lost reply, a repetition would say that there is no such key.
            let forgotten = self.fetch_once(&self.statements().forget, params).await;
            if !forgotten.map_err(fault)?.is_empty() {
                return Ok(ForgetReply::Removed);
            }
            // Another call has written the row since: try again.
        }
        Ok(ForgetReply::InFlight)
    }

    /// Returns `true` if an open transaction holds the lock of a key. Its row is not visible yet.
    pub(super) async fn is_in_transaction(&self, hash: u128) -> Result<bool, sqlx::Error> {
        let locked =
            self.fetch(&self.statements().is_locked, Params::Lock(advisory_lock(hash))).await?;
        locked.first().map_or(Ok(false), |row| row.try_get(0))
    }
}
