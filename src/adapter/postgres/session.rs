//! [`Session`]: the statements of calls, in a batch or in a transaction of the user's.
//!
//! Each try handles the rows that have no reply yet, with at most one statement a step:
//!
//! 1. Read the rows. A row that decides the reply gives it. The first try begins at step 3, unless the adapter
//!    reads first.
//! 2. Take the existing rows that are free, each at the version that was read, and only for a caller that still
//!    waits. A caller releases after it has stopped waiting, and the release raises the version. So a release is
//!    a fence: a late take finds another version. A completion has no such step. A row at its version that an open
//!    transaction holds is passed over: the claim is in flight.
//! 3. Insert the missing rows. A completion also updates rows that are not complete. A renewal and a release have this
//!    step only, and it replies to each row.
//!
//! A row that was written in step 2 or 3 has its reply. A row may have none after [`TRIES`].
//!
//! A row that an open transaction holds delays no other row. The first batch that meets one waits for it briefly, and
//! is then sent again by statements that pass over such rows, which cost more: see [`Wait`]. They are used for the next
//! 10 s. A completion or a release of a row that was passed over is sent alone, beside the queue, and waits.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use sqlx::Row as _;
use sqlx::postgres::{PgConnection, PgPool, PgRow, Postgres};

use super::super::completion::Completion;
use super::super::replies::{ClaimReply, RenewReply};
use super::super::sql::batch::{Failed, RowExecutor, TRIES, unanswered};
use super::super::sql::call::{Kind, Replied, RowCall, RowReply, checked, select};
use super::super::sql::row::{Row, completed};
use super::super::sql::statement::query;
use super::super::sql::store::{Common, READING_RESPONSE, SqlStore};
use super::super::stored::Fetch;
use super::super::terms::CallTerms;
use super::abandoned::{Permission, Sender, Work};
use super::completion::completion;
use super::connections::Fetched;
use super::errors::{is_locked, is_row_error, store_error};
use super::params::{
    Bind, Bound, Uuid, bind_claim, bind_data, bind_rows, by_key, key_hash, read_row, uuids,
};
use super::statements::{ByWait, Statements, Wait};
use super::store::PostgresStore;
use crate::error::StoreError;
use crate::key::DedupKey;

/// Where a session sends its statements.
enum Link<'c> {
    /// Over the connections of the adapter: each statement is a transaction of its own.
    Own(Permission),
    /// In a transaction of the user's.
    Within(&'c mut PgConnection),
}

/// Runs statements.
pub(in crate::adapter) struct Session<'c> {
    store: Arc<PostgresStore>,
    statements: ByWait,
    /// How batches meet rows that open transactions hold.
    wait: Wait,
    link: Link<'c>,
    /// How many rows needed no write.
    known: usize,
    /// Whether a statement may have written rows whose reply was lost.
    lost_reply: bool,
}

impl SqlStore for PostgresStore {
    type Database = Postgres;
    type Session = Session<'static>;

    fn common(&self) -> &Common {
        &self.common
    }

    fn pool(&self) -> &PgPool {
        &self.connections.pool
    }

    fn is_closed(&self) -> bool {
        self.connections.is_closed()
    }

    async fn close(&self) {
        self.common.stop();
        self.connections.close().await;
        if !self.user_pool {
            self.pool().close().await;
        }
    }

    fn on_pool_closed(&self) {
        self.connections.close_idle();
    }

    async fn prepare(self: &Arc<Self>) -> Result<(), StoreError> {
        self.prepare_once().await
    }

    fn hash(key: &DedupKey) -> u128 {
        key_hash(key)
    }

    async fn session(self: &Arc<Self>, alone: bool) -> Result<Session<'static>, StoreError> {
        let sender = if alone { Sender::Alone } else { Sender::Batch };
        let permission = self.connections.senders.permission(sender).await;
        let wait = if alone { Wait::Long } else { self.wait() };
        Ok(Session::new(self, Link::Own(permission), wait))
    }

    async fn read_response(&self, key: &DedupKey) -> Result<Option<Row>, StoreError> {
        let read = self.read_key(key_hash(key), Fetch::DigestAndResponse).await;
        read.map_err(|error| store_error(READING_RESPONSE, error))
    }

    fn completion(&self, keys: &[DedupKey], terms: &CallTerms, mark: Option<&str>) -> Completion {
        completion(&self.statements(), keys, terms, mark)
    }
}

impl RowExecutor for Session<'_> {
    async fn execute(
        &mut self,
        kind: Kind,
        rows: &[RowCall<'_>],
    ) -> (Vec<Replied>, Option<Failed>) {
        let reads_first = kind.is_claim() && self.store.read_first.load(Ordering::Relaxed);
        let mut replies: Vec<Replied> = rows.iter().map(|_| None).collect();
        self.known = 0;
        let mut error = self.run(kind, rows, &mut replies, reads_first).await.err();
        // One wait is enough: this batch and the next ones pass over the row.
        if self.wait == Wait::Briefly && error.as_ref().is_some_and(is_locked) {
            self.store.note_held();
            self.wait = Wait::PassOver;
            error = self.run(kind, rows, &mut replies, reads_first).await.err();
        }
        if self.wait == Wait::PassOver && error.is_none() && !kind.is_claim() {
            let locked = replies.iter_mut().filter(|reply| reply.is_none());
            locked.for_each(|reply| *reply = Some(Ok(RowReply::Locked)));
        }
        let unanswered = unanswered(&replies);
        let answered = rows.len() - unanswered.len();
        if kind.is_claim() && answered > 0 {
            let known = self.known * 2 >= answered;
            // Every claim reads the flag, and few change it.
            if known != self.store.read_first.load(Ordering::Relaxed) {
                self.store.read_first.store(known, Ordering::Relaxed);
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

impl<'c> Session<'c> {
    fn new(store: &Arc<PostgresStore>, link: Link<'c>, wait: Wait) -> Self {
        let (store, statements) = (Arc::clone(store), store.statements_by_wait());
        Self { store, statements, wait, link, known: 0, lost_reply: false }
    }

    /// Returns the session of a transaction of the user's.
    pub(super) fn within(store: &Arc<PostgresStore>, connection: &'c mut PgConnection) -> Self {
        Self::new(store, Link::Within(connection), Wait::Briefly)
    }

    fn all(&self) -> Arc<Statements> {
        Arc::clone(&self.statements[self.wait as usize])
    }

    /// Sends the statements for the rows without a reply. After an error, some more rows may have their reply.
    pub(super) async fn run(
        &mut self,
        kind: Kind,
        rows: &[RowCall<'_>],
        replies: &mut [Replied],
        mut reads: bool,
    ) -> Result<(), sqlx::Error> {
        // A row that a statement has passed over may be held for long. A completion also finds rows that are complete.
        let tries = match kind {
            Kind::Complete if self.wait == Wait::PassOver => 2,
            Kind::Claim | Kind::ClaimComplete | Kind::Complete => TRIES,
            Kind::Renew | Kind::Release | Kind::ReleaseComplete | Kind::Check => 1,
        };
        if kind == Kind::Check {
            let found = self.read(rows, Fetch::Nothing).await?;
            replies.clone_from_slice(&checked(rows, &found));
            return Ok(());
        }
        for _ in 0..tries {
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
        let (mut unwritten, mut free, mut found_free) = (Vec::new(), Vec::new(), Vec::new());
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
                    found_free.push(row);
                }
                None => replies[index] = Some(Err(kind.unknown())),
            }
        }
        if !free.is_empty() {
            let taken = self.take(kind, &select(rows, &free), &found_free).await?;
            for (index, reply) in free.into_iter().zip(taken) {
                replies[index] = reply;
            }
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
        let all = self.all();
        let sql = match kind {
            Kind::Claim => &all.claim_insert,
            Kind::ClaimComplete => &all.claim_complete_insert,
            Kind::Renew => &all.renew,
            Kind::Complete => &all.complete,
            Kind::Release => &all.release,
            Kind::ReleaseComplete => &all.release_complete,
            // `run` only reads.
            Kind::Check => return Ok(rows.iter().map(|_| None).collect()),
        };
        let returned = self.send(work(kind), sql, &|query| bind_rows(query, kind, rows)).await?;
        let connections = &self.store.connections;
        if kind.is_claim() {
            connections.replanner.note_rows(returned.len());
        }
        // A statement that writes nothing waits for no disk and no standby. A renewal also returns rows that it has not
        // written.
        if kind != Kind::Renew && !returned.is_empty() && matches!(self.link, Link::Own(_)) {
            connections.senders.succeeded(work(kind));
        }
        let written = by_key(rows, &returned, |index, row| {
            Ok(Some(match kind {
                Kind::Complete => completed_reply(row, rows[index].token().into())?,
                // By position, as in RETURNING in `sql/renew.sql`.
                Kind::Renew if row.try_get(1)? => RowReply::Renewed(RenewReply::Locked),
                Kind::Renew => RowReply::Renewed(RenewReply::Held),
                Kind::Release | Kind::ReleaseComplete => RowReply::Released,
                _ => RowReply::first(1, false),
            }))
        })?;
        let lost = (kind == Kind::Renew).then_some(RowReply::Renewed(RenewReply::Lost));
        Ok(written.into_iter().map(|reply| reply.or_else(|| lost.clone())).collect())
    }

    /// Takes existing rows at the versions that were found. Returns the reply for each row that it wrote, or that an open
    /// transaction holds: the claim is in flight. A row that this claim itself may hold has no reply.
    async fn take(
        &mut self,
        kind: Kind,
        rows: &[RowCall<'_>],
        found: &[Row],
    ) -> Result<Vec<Replied>, sqlx::Error> {
        let versions: Vec<_> = found.iter().map(|row| row.version).collect();
        let all = self.all();
        let bind = |query| {
            let query = bind_claim(query, kind, rows);
            bind_data(query, rows, kind == Kind::ClaimComplete).bind(&versions)
        };
        let taken = self.send(work(kind), &all.claim_existing, &bind).await?;
        let lost_reply = self.lost_reply;
        by_key(rows, &taken, |index, row| {
            // By position, in the order of RETURNING in `sql/*claim*.sql`.
            let Some(attempts) = row.try_get::<Option<i32>, _>(1)? else {
                let (mine, holder) = (rows[index].token(), found[index].token);
                let is_own = holder.as_ref() == Some(mine.as_bytes());
                // It is read again: another call may hold it for a moment.
                if lost_reply || is_own {
                    return Ok(None);
                }
                return Ok(Some(Ok(RowReply::Claimed(ClaimReply::InFlight, holder))));
            };
            Ok(Some(Ok(RowReply::first(attempts.into(), row.try_get(2)?))))
        })
    }

    pub(super) async fn read(
        &mut self,
        rows: &[RowCall<'_>],
        fetch: Fetch,
    ) -> Result<Vec<Option<Row>>, sqlx::Error> {
        let all = self.all();
        let bind = |query: Bound| query.bind(uuids(rows));
        let returned = self.send(Work::Read, all.read(fetch), &bind).await?;
        by_key(rows, &returned, |_, row| Ok(Some(read_row(row, fetch))))
    }

    async fn send(
        &mut self,
        work: Work,
        sql: &Arc<str>,
        bind: Bind<'_>,
    ) -> Result<Vec<PgRow>, sqlx::Error> {
        let permission = match &mut self.link {
            Link::Own(permission) => permission,
            Link::Within(connection) => return bind(query(sql)).fetch_all(&mut **connection).await,
        };
        let fetched = self.store.connections.fetch(permission, (work, 1), sql, bind).await;
        let Fetched { rows, lost_reply } = fetched?;
        self.lost_reply |= lost_reply;
        Ok(rows)
    }
}

/// Returns what a statement of this kind may wait for.
fn work(kind: Kind) -> Work {
    if kind == Kind::Claim { Work::Write } else { Work::DurableWrite }
}

fn set(replies: &mut [Replied], indexes: &[usize], written: Vec<Option<RowReply>>) {
    for (index, reply) in indexes.iter().zip(written) {
        replies[*index] = reply.map(Ok);
    }
}

/// Returns the reply of a row that a completion wrote: its key, attempts and token.
fn completed_reply(row: &PgRow, mine: Uuid) -> Result<RowReply, sqlx::Error> {
    // By position, in the order of RETURNING in `sql/complete.sql`.
    let attempts: i32 = row.try_get(1)?;
    let token: Option<Uuid> = row.try_get(2)?;
    Ok(RowReply::Completed(completed(attempts.into(), token == Some(mine))))
}
