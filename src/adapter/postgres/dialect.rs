//! How a batch of calls is sent, and the statement for each step.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use sqlx::Row as _;
use sqlx::postgres::PgRow;

use super::super::replies::{ClaimReply, RenewReply};
use super::super::sql::batch::{Failed, Replied, RowExecutor, execute_batch};
use super::super::sql::call::{Call, Kind, RowReply, Rows};
use super::super::sql::queue::{BatchExecutor, Waits};
use super::super::sql::row::{Row, completed, first};
use super::super::stored::Fetch;
use super::connections::Source;
use super::errors::{is_locked, is_row_error, is_timed_out, store_error};
use super::params::{Bind, Bound, Uuid, bind_claim, bind_data, bind_rows, by_key, read_row, uuids};
use super::places::Place;
use super::statements::LOCK_TIMEOUT;
use super::store::{Fetched, PostgresStore};
use super::writing::{RowStatements, Writing};
use crate::error::Error;

/// The statements of one batch.
struct PostgresDialect<'s> {
    store: &'s PostgresStore,
    /// Whether a statement may have written rows whose reply was lost.
    lost_reply: bool,
    /// Whether the server may still run a statement.
    has_abandoned: bool,
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
        let mut dialect = PostgresDialect { store: self, lost_reply: false, has_abandoned: false };
        let replies = execute_batch(&mut dialect, &batch, waits).await;
        if dialect.has_abandoned {
            place.hold(self.connections.pool.close_event());
        }
        replies
    }
}

impl PostgresDialect<'_> {
    async fn send(&mut self, sql: &Arc<str>, bind: Bind<'_>) -> Result<Vec<PgRow>, sqlx::Error> {
        let bound = self.store.options.statement_timeout;
        let fetched = self.store.fetch_on(Source::Lane, bound, sql, bind).await;
        self.has_abandoned |= fetched.as_ref().is_err_and(is_timed_out);
        let Fetched { rows, lost_reply, .. } = fetched?;
        self.lost_reply |= lost_reply;
        Ok(rows)
    }

    /// Sends a statement that writes.
    async fn write_rows(
        &mut self,
        sql: &Arc<str>,
        bind: Bind<'_>,
    ) -> Result<Vec<PgRow>, sqlx::Error> {
        let written = self.send(sql, bind).await?;
        self.store.connections.batches.holds.has_ended();
        Ok(written)
    }

    /// Returns how long a release waits for a row. A key that is complete at once and never ran is a duplicate for
    /// other processes, until its release has the row. So this release, once it is sent alone, waits nearly as long as
    /// the statement may run: then the server ends the wait.
    fn release_timeout(&self, rows: &Rows<'_>) -> String {
        if rows.len() > 1 {
            return LOCK_TIMEOUT.to_owned();
        }
        format!("{}ms", self.store.options.statement_timeout.as_millis() * 9 / 10)
    }
}

impl RowExecutor for PostgresDialect<'_> {
    async fn execute(&mut self, kind: Kind, rows: &Rows<'_>) -> (Vec<Replied>, Option<Failed>) {
        let read_first = &self.store.read_first;
        let reads_first = kind.is_claim() && read_first.load(Ordering::Relaxed);
        let mut writing = Writing::new(kind, rows);
        let error = writing.run(self, reads_first).await.err();
        let unanswered = writing.unanswered();
        let answered = rows.len() - unanswered.len();
        if kind.is_claim() && answered > 0 {
            let known = writing.known * 2 >= answered;
            // Every claim reads the flag, and few change it.
            if known != read_first.load(Ordering::Relaxed) {
                read_first.store(known, Ordering::Relaxed);
            }
        }
        let Some(error) = error else { return (writing.finish(), None) };
        let (is_row_error, is_locked) = (is_row_error(&error), is_locked(&error));
        let error = store_error(kind.context(), error);
        let error = if self.lost_reply { error.with_unknown_outcome() } else { error };
        // A claim that stands alone and meets a row of an open transaction is in flight. After a lost reply, the
        // claim may hold the row itself.
        if let [index] = &unanswered[..]
            && kind.is_claim()
            && is_locked
            && !error.is_unknown()
        {
            writing.replies[*index] = Some(Ok(RowReply::Claimed(ClaimReply::InFlight)).into());
            return (writing.replies, None);
        }
        (writing.replies, Some(Failed { error, is_row_error }))
    }
}

impl RowStatements for PostgresDialect<'_> {
    async fn write(
        &mut self,
        kind: Kind,
        rows: &Rows<'_>,
    ) -> Result<Vec<Option<RowReply>>, sqlx::Error> {
        let all = self.store.statements();
        let bind = |query| bind_rows(query, kind, rows);
        let (sql, other) = match kind {
            Kind::Claim => (&all.claim_insert, None),
            Kind::ClaimComplete => (&all.claim_complete_insert, None),
            Kind::Renew => (&all.renew, Some(RowReply::Renewed(RenewReply::Lost))),
            Kind::Complete => (&all.complete, None),
            Kind::Release => (&all.release, Some(RowReply::Released)),
            Kind::ReleaseComplete => {
                let wait = self.release_timeout(rows);
                let bind = |query| bind_rows(query, kind, rows).bind(&wait);
                self.write_rows(&all.release_complete, &bind).await?;
                return Ok(vec![Some(RowReply::Released); rows.len()]);
            }
        };
        let returned = self.write_rows(sql, &bind).await?;
        if kind.is_claim() {
            self.store.replanner.note_rows(returned.len());
        }
        let written = by_key(rows, &returned, |index, row| match kind {
            Kind::Complete => completion(row, rows[index].token().into()),
            Kind::Renew => Ok(RowReply::Renewed(RenewReply::Held)),
            _ => Ok(RowReply::Claimed(ClaimReply::first(1, false))),
        })?;
        Ok(written.into_iter().map(|reply| reply.or_else(|| other.clone())).collect())
    }

    async fn take(
        &mut self,
        kind: Kind,
        rows: &Rows<'_>,
        versions: &[i64],
    ) -> Result<Vec<Option<RowReply>>, sqlx::Error> {
        let bind = |query| {
            let query = bind_claim(query, kind, rows);
            bind_data(query, rows, kind == Kind::ClaimComplete).bind(versions)
        };
        let taken = self.write_rows(&self.store.statements().claim_existing, &bind).await?;
        by_key(rows, &taken, |_, row| claimed(row))
    }

    async fn read(
        &mut self,
        rows: &Rows<'_>,
        fetch: Fetch,
    ) -> Result<Vec<Option<Row>>, sqlx::Error> {
        let bind = |query: Bound| query.bind(uuids(rows));
        let returned = self.send(self.store.statements().read(fetch), &bind).await?;
        by_key(rows, &returned, |_, row| Ok(read_row(row, fetch)))
    }
}

/// Returns the reply of a row that a claim took: its key, attempts and takeover.
pub(super) fn claimed(row: &PgRow) -> Result<RowReply, sqlx::Error> {
    // By position, in the order of RETURNING in `sql/*claim*.sql`.
    let attempts: i32 = row.try_get(1)?;
    Ok(RowReply::Claimed(first(attempts.into(), row.try_get(2)?)))
}

/// Returns the reply of a row that a completion wrote: its key, attempts and token.
fn completion(row: &PgRow, mine: Uuid) -> Result<RowReply, sqlx::Error> {
    // By position, in the order of RETURNING in `sql/complete.sql`.
    let attempts: i32 = row.try_get(1)?;
    let token: Option<Uuid> = row.try_get(2)?;
    Ok(RowReply::Completed(completed(attempts.into(), token == Some(mine))))
}
