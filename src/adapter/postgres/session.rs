//! [`Session`]: the statements of calls, in a batch, in an open transaction or on the pool.
//!
//! Each try handles the rows that have no reply yet, with at most one statement a step:
//!
//! 1. Read the rows. A row that decides the reply gives it. The first try begins at step 3, unless the adapter
//!    reads first.
//! 2. Take the existing rows that are free, each at the version that was read, and only for a caller that still
//!    waits. A caller releases after it has stopped waiting, and the release raises the version. So a release is
//!    a fence: a late take finds another version. A completion has no such step.
//! 3. Insert the missing rows. A completion also updates rows that are not complete. A renewal and a release have this
//!    step only, and it replies to each row.
//!
//! A row that was written in step 2 or 3 has its reply. A row may have none after [`TRIES`].

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use sqlx::Row as _;
use sqlx::pool::PoolConnection;
use sqlx::postgres::{PgConnection, PgRow, Postgres};

use super::super::replies::RenewReply;
use super::super::sql::batch::{Failed, RowExecutor, TRIES, execute_batch, unanswered};
use super::super::sql::call::{Call, Kind, Replied, RowCall, RowReply, select};
use super::super::sql::queue::{BatchExecutor, Waits};
use super::super::sql::responses::most_read;
use super::super::sql::row::{Row, completed};
use super::super::sql::statement::query;
use super::super::stored::Fetch;
use super::connections::{BoundedConnection, Place, Source};
use super::errors::{is_locked, is_row_error, is_timed_out, store_error};
use super::params::{
    Bind, Bound, Uuid, advisory_locks, bind_claim, bind_data, bind_rows, by_key, read_row, uuids,
};
use super::statements::{LOCK_TIMEOUT, Statements};
use super::store::{Fetched, PostgresStore};
use crate::error::Error;

/// Runs statements. Outside of a transaction, each is a transaction of its own.
pub(super) struct Session<'s> {
    store: &'s PostgresStore,
    statements: Arc<Statements>,
    source: Source,
    transaction: Option<InTransaction<'s>>,
    /// The connection of the last statement, if it was one of the pool.
    pooled: Option<BoundedConnection<'s>>,
    /// How many rows needed no write.
    known: usize,
    /// Whether a statement may have written rows whose reply was lost.
    lost_reply: bool,
    /// Whether the server may still run a statement.
    has_abandoned: bool,
}

struct InTransaction<'s> {
    connection: &'s mut PgConnection,
    /// The lock of each key, made once: a repeated statement asks for the same locks.
    locks: HashMap<u128, i64>,
    begun: Option<Begun>,
}

/// The transaction that claimed.
#[derive(Debug)]
pub(super) struct Begun {
    pub(super) xid: String,
    /// The role of the claim, as `current_setting` returns it: a name, or `none`.
    pub(super) role: String,
}

impl Begun {
    fn new(row: &PgRow) -> Result<Self, sqlx::Error> {
        Ok(Self { xid: row.try_get("xid")?, role: row.try_get("role")? })
    }
}

impl BatchExecutor<Call> for PostgresStore {
    type SendGuard = Place;

    async fn send_guard(&self) -> Result<Place, Error> {
        Ok(self.connections.batches.place().await)
    }

    async fn execute(
        &self,
        mut place: Place,
        batch: Vec<Call>,
        waits: &Waits<'_>,
    ) -> Vec<Result<RowReply, Error>> {
        let mut session = Session::new(self, Source::Lane);
        let replies = execute_batch(&mut session, &batch, waits).await;
        place.is_lost = session.has_abandoned;
        replies
    }
}

impl RowExecutor for Session<'_> {
    async fn execute(
        &mut self,
        kind: Kind,
        rows: &[RowCall<'_>],
    ) -> (Vec<Replied>, Option<Failed>) {
        let read_first = &self.store.read_first;
        let reads_first = kind.is_claim() && read_first.load(Ordering::Relaxed);
        let mut replies: Vec<Replied> = rows.iter().map(|_| None).collect();
        self.known = 0;
        let error = self.run(kind, rows, &mut replies, reads_first).await.err();
        let unanswered = unanswered(&replies);
        let answered = rows.len() - unanswered.len();
        if kind.is_claim() && answered > 0 {
            let known = self.known * 2 >= answered;
            // Every claim reads the flag, and few change it.
            if known != read_first.load(Ordering::Relaxed) {
                read_first.store(known, Ordering::Relaxed);
            }
        }
        let Some(error) = error else { return (replies, None) };
        let (is_row_error, is_locked) = (is_row_error(&error), is_locked(&error));
        let error = store_error(kind.context(), error);
        let error = if self.lost_reply { error.with_unknown_outcome() } else { error };
        // A claim that stands alone and meets a row of an open transaction is in flight. After a lost reply, the
        // claim may hold the row itself.
        if let [index] = unanswered[..]
            && kind.is_claim()
            && is_locked
            && !error.is_unknown()
        {
            replies[index] = Some(Ok(RowReply::IN_FLIGHT));
            return (replies, None);
        }
        (replies, Some(Failed { error, is_row_error }))
    }
}

impl<'s> Session<'s> {
    pub(super) fn new(store: &'s PostgresStore, source: Source) -> Self {
        Self {
            store,
            statements: store.statements(),
            source,
            transaction: None,
            pooled: None,
            known: 0,
            lost_reply: false,
            has_abandoned: false,
        }
    }

    /// Returns the session of a transaction that claims no other keys than these.
    pub(super) fn within(
        store: &'s PostgresStore,
        statements: &Arc<Statements>,
        connection: &'s mut PgConnection,
        rows: &[RowCall<'_>],
    ) -> Self {
        let locks = rows.iter().map(|row| row.hash).zip(advisory_locks(rows)).collect();
        let transaction = Some(InTransaction { connection, locks, begun: None });
        let statements = Arc::clone(statements);
        Self { statements, transaction, ..Self::new(store, Source::Pool) }
    }

    /// Returns the connection of the pool that the last statement has left. The caller has to bound what it does with it.
    pub(super) fn into_pooled(self) -> Option<PoolConnection<Postgres>> {
        self.pooled.and_then(BoundedConnection::into_pooled)
    }

    /// Returns the transaction, once it has sent a statement.
    pub(super) fn into_begun(self) -> Option<Begun> {
        self.transaction.and_then(|transaction| transaction.begun)
    }

    /// Sends the statements for the rows without a reply. After an error, some more rows may have their reply.
    /// Without rows, it begins the work of a transaction without keys.
    pub(super) async fn run(
        &mut self,
        kind: Kind,
        rows: &[RowCall<'_>],
        replies: &mut [Replied],
        mut reads: bool,
    ) -> Result<(), sqlx::Error> {
        if rows.is_empty() {
            let all = Arc::clone(&self.statements);
            let opened = self.send(&all.tx_open, &|query| query).await?;
            return self.note_begun(opened.first());
        }
        for _ in 0..TRIES {
            let mut unwritten = unanswered(replies);
            if unwritten.is_empty() {
                break;
            }
            if reads {
                unwritten = self.read_and_take(kind, rows, replies, unwritten).await?;
            }
            reads = true;
            if !unwritten.is_empty() {
                let written = self.write(kind, &select(rows, &unwritten)).await?;
                set(replies, &unwritten, written);
            }
        }
        Ok(())
    }

    /// Reads the rows, and replies where a row decides the reply. A claim also takes the free rows.
    /// Returns the indexes of the rows to write.
    async fn read_and_take(
        &mut self,
        kind: Kind,
        rows: &[RowCall<'_>],
        replies: &mut [Replied],
        indexes: Vec<usize>,
    ) -> Result<Vec<usize>, sqlx::Error> {
        // A statement of its own: the statement that found a row may have begun before the row was
        // committed, and would not see it.
        let fetch = rows.first().map_or(Fetch::Nothing, |row| row.terms.fetch());
        let found = self.read(&select(rows, &indexes), fetch).await?;
        let (mut unwritten, mut free, mut versions) = (Vec::new(), Vec::new(), Vec::new());
        for (index, row) in indexes.into_iter().zip(found) {
            let Some(row) = row else {
                unwritten.push(index);
                continue;
            };
            match RowReply::of_row(&row, kind, rows[index].terms) {
                Some(reply) => {
                    self.known += 1;
                    replies[index] = Some(reply);
                }
                None if !kind.is_claim() => unwritten.push(index),
                None if rows[index].has_caller() => {
                    free.push(index);
                    versions.push(row.version);
                }
                None => replies[index] = Some(Err(kind.unknown())),
            }
        }
        if !free.is_empty() {
            let taken = self.take(kind, &select(rows, &free), &versions).await?;
            set(replies, &free, taken);
        }
        Ok(unwritten)
    }

    /// Inserts the rows of claims; completes, renews or releases rows. Returns the reply for each row that it wrote, or
    /// that an open transaction holds.
    async fn write(
        &mut self,
        kind: Kind,
        rows: &[RowCall<'_>],
    ) -> Result<Vec<Option<RowReply>>, sqlx::Error> {
        let (all, locks) = (Arc::clone(&self.statements), self.locks(rows));
        let is_within = locks.is_some();
        let (sql, other) = match kind {
            Kind::Claim | Kind::ClaimComplete if is_within => (&all.tx_claim_insert, None),
            Kind::Claim => (&all.claim_insert, None),
            Kind::ClaimComplete => (&all.claim_complete_insert, None),
            Kind::Renew => (&all.renew, Some(RowReply::Renewed(RenewReply::Lost))),
            Kind::Complete => (&all.complete, None),
            Kind::Release => (&all.release, Some(RowReply::Released)),
            Kind::ReleaseComplete => (&all.release_complete, Some(RowReply::Released)),
        };
        let wait = self.release_timeout(rows);
        let bind = |query| match &locks {
            Some(locks) => bind_claim(query, kind, rows).bind(locks),
            None if kind == Kind::ReleaseComplete => bind_rows(query, kind, rows).bind(&wait),
            None => bind_rows(query, kind, rows),
        };
        let returned = self.send_write(sql, &bind).await?;
        self.note_begun(returned.first())?;
        if kind.is_claim() && !is_within {
            self.store.replanner.note_rows(returned.len());
        }
        let written = by_key(rows, &returned, |index, row| {
            Ok(Some(match kind {
                Kind::Complete => completion(row, rows[index].token().into())?,
                Kind::Renew => RowReply::Renewed(RenewReply::Held),
                _ if is_within && !row.try_get("locked")? => RowReply::IN_FLIGHT,
                _ if is_within && !row.try_get("granted")? => return Ok(None),
                _ => RowReply::first(1, false),
            }))
        })?;
        Ok(written.into_iter().map(|reply| reply.or_else(|| other.clone())).collect())
    }

    /// Takes existing rows at these versions. Returns the reply for each row that it wrote.
    async fn take(
        &mut self,
        kind: Kind,
        rows: &[RowCall<'_>],
        versions: &[i64],
    ) -> Result<Vec<Option<RowReply>>, sqlx::Error> {
        let (all, locks) = (Arc::clone(&self.statements), self.locks(rows));
        let sql = if locks.is_some() { &all.tx_claim_existing } else { &all.claim_existing };
        let bind = |query| {
            let query = bind_claim(query, kind, rows);
            match &locks {
                Some(locks) => query.bind(locks),
                None => bind_data(query, rows, kind == Kind::ClaimComplete).bind(versions),
            }
        };
        let taken = self.send_write(sql, &bind).await?;
        by_key(rows, &taken, |_, row| {
            // By position, in the order of RETURNING in `sql/*claim*.sql`.
            let attempts: i32 = row.try_get(1)?;
            Ok(Some(RowReply::first(attempts.into(), row.try_get(2)?)))
        })
    }

    pub(super) async fn read(
        &mut self,
        rows: &[RowCall<'_>],
        fetch: Fetch,
    ) -> Result<Vec<Option<Row>>, sqlx::Error> {
        let all = Arc::clone(&self.statements);
        let mut found = Vec::with_capacity(rows.len());
        for part in rows.chunks(most_read(fetch)) {
            let bind = |query: Bound| query.bind(uuids(part));
            let returned = self.send(all.read(fetch), &bind).await?;
            found.extend(by_key(part, &returned, |_, row| Ok(Some(read_row(row, fetch))))?);
        }
        Ok(found)
    }

    fn note_begun(&mut self, row: Option<&PgRow>) -> Result<(), sqlx::Error> {
        if let (Some(InTransaction { begun: begun @ None, .. }), Some(row)) =
            (&mut self.transaction, row)
        {
            *begun = Some(Begun::new(row)?);
        }
        Ok(())
    }

    /// Returns the locks of the keys, in a transaction.
    fn locks(&self, rows: &[RowCall<'_>]) -> Option<Vec<Option<i64>>> {
        let locks = &self.transaction.as_ref()?.locks;
        Some(rows.iter().map(|row| locks.get(&row.hash).copied()).collect())
    }

    async fn send_write(
        &mut self,
        sql: &Arc<str>,
        bind: Bind<'_>,
    ) -> Result<Vec<PgRow>, sqlx::Error> {
        let written = self.send(sql, bind).await?;
        if self.source == Source::Lane {
            self.store.connections.batches.has_ended();
        }
        Ok(written)
    }

    async fn send(&mut self, sql: &Arc<str>, bind: Bind<'_>) -> Result<Vec<PgRow>, sqlx::Error> {
        if let Some(transaction) = &mut self.transaction {
            return bind(query(sql)).fetch_all(&mut *transaction.connection).await;
        }
        // No call waits for a connection while it holds another.
        drop(self.pooled.take());
        let bound = self.store.options.statement_timeout;
        let fetched = self.store.fetch_on(self.source, bound, sql, bind).await;
        self.has_abandoned |= fetched.as_ref().is_err_and(is_timed_out);
        let Fetched { rows, connection, lost_reply } = fetched?;
        self.lost_reply |= lost_reply;
        self.pooled = Some(connection).filter(|_| self.source == Source::Pool);
        Ok(rows)
    }

    /// Returns how long a release waits for a row. A key that is complete at once and never ran is a duplicate for
    /// other processes, until its release has the row. So this release, once it is sent alone, waits nearly as long as
    /// the statement may run: then the server ends the wait.
    fn release_timeout(&self, rows: &[RowCall<'_>]) -> String {
        if rows.len() > 1 {
            return LOCK_TIMEOUT.to_owned();
        }
        // The setting has 31 bits, and 0 is no bound.
        let ms = (self.store.options.statement_timeout.as_millis() * 9 / 10).max(1);
        format!("{}ms", i32::try_from(ms).unwrap_or(i32::MAX))
    }
}

fn set(replies: &mut [Replied], indexes: &[usize], written: Vec<Option<RowReply>>) {
    for (index, reply) in indexes.iter().zip(written) {
        replies[*index] = reply.map(Ok);
    }
}

/// Returns the reply of a row that a completion wrote: its key, attempts and token.
fn completion(row: &PgRow, mine: Uuid) -> Result<RowReply, sqlx::Error> {
    // By position, in the order of RETURNING in `sql/complete.sql`.
    let attempts: i32 = row.try_get(1)?;
    let token: Option<Uuid> = row.try_get(2)?;
    Ok(RowReply::Completed(completed(attempts.into(), token == Some(mine))))
}
