//! [`PostgresStore`]: the state that all handles of an adapter share. [`PostgresSession`]: the
//! statements of calls, in a batch or in a transaction of the user's.
//!
//! Each try handles the rows that have no reply yet, with at most one statement a step:
//!
//! 1. Read the rows. A row that decides the reply gives it. The first try begins at step 3, unless
//!    the adapter reads first.
//! 2. Take the existing rows that are free, each at the version that was read, and only for a
//!    caller that still waits. A caller releases after it has stopped waiting, and the release
//!    raises the version. So a release is a fence: a late take finds another version. A completion
//!    has no such step. A row at its version that an open transaction holds is passed over: the
//!    claim is in flight.
//! 3. Insert the missing rows. A completion also updates rows that are not complete. A renewal and
//!    a release have this step only, and it replies to each row.
//!
//! A row that was written in step 2 or 3 has its reply. A row may have none after [`TRIES`].
//!
//! A row that an open transaction holds delays no other row. The first batch that meets one waits
//! for it briefly, and is then sent again by statements that pass over such rows, which cost more:
//! see [`Wait`]. They are used for the next 10 s. A completion or a release of a row that was
//! passed over is sent alone, beside the queue, and waits.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use sqlx::Row as _;
use sqlx::postgres::{PgConnection, PgPool, PgRow, Postgres};
use tokio::time::timeout;

use super::super::contract::{CallTerms, ClaimReply, Completion, Fetch, RenewReply};
use super::super::sql::statement::query;
use super::super::sql::{
    Common, Failed, Kind, READING_RESPONSE, Row, RowCall, RowExecutor, RowReply, SqlStore, TRIES,
    completed, in_task, unanswered, without_response,
};
use super::completion::completion;
use super::connections::{Connections, Fetched};
use super::errors::{is_locked, is_row_error, store_error};
use super::options::PostgresOptions;
use super::params::{Bind, BoundQuery, Uuid, bind_rows, index_of, key_hash, read_row, uuids};
use super::senders::{Permission, Sender, Work};
use super::statements::{PostgresStatements, TableName, Wait};
use crate::error::{StoreError, StoreErrorKind};
use crate::key::DedupKey;

/// The operation that finds the table, or makes it, for the text of an error.
pub(super) const PREPARING: &str = "preparing the Postgres schema";
/// How long a migration that a call makes waits on the server for another one.
const MIGRATION_WAIT: Duration = Duration::from_secs(5);
/// For how long batches pass over rows that open transactions hold, after one has waited for such a
/// row.
const PASS_OVER_FOR: Duration = Duration::from_secs(10);

/// The state that all handles of an adapter share.
pub(crate) struct PostgresStore {
    pub(super) options: PostgresOptions,
    pub(super) connections: Connections,
    pub(super) common: Common,
    /// Whether the pool is the user's.
    user_pool: bool,
    /// Held by the call that looks for the table, or makes it.
    pub(super) migration: Arc<tokio::sync::Mutex<()>>,
    /// The statements, by [`Wait`]. Once the table is found, they name its schema, so that a later
    /// change of the `search_path` has no effect.
    statements: RwLock<[Arc<PostgresStatements>; 3]>,
    /// Whether claims read before they insert: while at least half of their keys are known. An
    /// insertion shows without extra cost whether a key is new; the row of a known key takes a
    /// second statement, and with it a duplicate costs the server two to three times the CPU.
    reads_first: AtomicBool,
    /// When a batch last waited for a row that an open transaction holds.
    waited_at: Mutex<Option<Instant>>,
}

impl PostgresStore {
    pub(super) fn new(pool: PgPool, options: PostgresOptions, user_pool: bool) -> Self {
        let bounds = options.sql.bounds;
        Self {
            connections: Connections::new(pool, bounds.workers, options.statement_timeout),
            common: Common::new(&options.sql, bounds, options.check()),
            user_pool,
            migration: Arc::default(),
            statements: RwLock::new(PostgresStatements::by_wait(
                &TableName::of(&options),
                &options,
            )),
            reads_first: AtomicBool::new(false),
            waited_at: Mutex::default(),
            options,
        }
    }

    pub(super) fn statements(&self, wait: Wait) -> Arc<PostgresStatements> {
        let statements = self.statements.read().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(&statements[wait as usize])
    }

    pub(super) fn set_statements(&self, statements: [Arc<PostgresStatements>; 3]) {
        *self.statements.write().unwrap_or_else(PoisonError::into_inner) = statements;
    }

    /// Returns how a batch meets a row that an open transaction holds.
    fn wait(&self) -> Wait {
        let waited_at = *self.waited_at.lock().unwrap_or_else(PoisonError::into_inner);
        let is_recent = waited_at.is_some_and(|at| at.elapsed() < PASS_OVER_FOR);
        if is_recent { Wait::PassOver } else { Wait::Briefly }
    }

    /// Notes that a batch has waited for a row.
    fn note_wait(&self) {
        *self.waited_at.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// Runs one statement beside the batches, within so many times the usual bound. It is its own
    /// transaction.
    ///
    /// # Errors
    ///
    /// [`StoreErrorKind::Timeout`]: the bound is over. It holds for the turn and the statement
    /// together, because the caller may have no bound of its own.
    pub(super) async fn fetch(
        self: &Arc<Self>,
        context: &'static str,
        (work, times): (Work, u32),
        sql: &Arc<str>,
        bind: impl Fn(BoundQuery) -> BoundQuery + Send + Sync + 'static,
    ) -> Result<Result<Fetched, sqlx::Error>, StoreError> {
        let bound = self.options.statement_timeout * times;
        let (store, sql) = (Arc::clone(self), Arc::clone(sql));
        let send = move |permission| async move {
            let Connections { senders, .. } = &store.connections;
            let work = (work, bound);
            let fetched = store.connections.fetch(&permission, work, &sql, Some(&bind)).await;
            // A write returns a row only if it has written one.
            if fetched.as_ref().is_ok_and(|fetched| !fetched.rows.is_empty()) {
                senders.succeeded(work.0);
            }
            fetched
        };
        let fetched = async {
            let permission = self.connections.senders.permission(Sender::Other, work).await;
            if !permission.is_probe() {
                return send(permission).await;
            }
            // Abandoned with its caller, it would leave one more session. It is lost only if the
            // runtime ends.
            tokio::spawn(send(permission)).await.unwrap_or(Err(sqlx::Error::WorkerCrashed))
        };
        let fetched = timeout(bound, fetched).await;
        fetched.map_err(|_| StoreError::new(StoreErrorKind::Timeout, context))
    }

    /// Reads a row: on a primary, unless it may be `anywhere`.
    pub(super) async fn read_key(
        self: &Arc<Self>,
        context: &'static str,
        key: &DedupKey,
        fetch: Fetch,
        anywhere: bool,
    ) -> Result<Option<PgRow>, StoreError> {
        let key = Uuid(key_hash(key));
        let bind = move |query: BoundQuery| query.bind([key]).bind(anywhere);
        let all = self.statements(Wait::Briefly);
        let read = self.fetch(context, (Work::Read, 1), all.read(fetch), bind).await?;
        let read = read.map_err(|error| store_error(context, error))?;
        Ok(read.rows.into_iter().next())
    }

    /// Closes the connections; a pool of the user's stays open.
    pub(super) async fn close(&self) {
        self.common.stop();
        self.connections.close().await;
        if !self.user_pool {
            self.connections.pool.close().await;
        }
    }
}

impl SqlStore for PostgresStore {
    type Database = Postgres;
    type Session = PostgresSession<'static>;

    fn common(&self) -> &Common {
        &self.common
    }

    fn pool(&self) -> &PgPool {
        &self.connections.pool
    }

    fn on_pool_closed(&self) {
        self.connections.close_idle();
    }

    /// For one call at a time, and in a task of its own: a migration that was dropped would leave a
    /// session on the server.
    async fn prepare(self: &Arc<Self>) -> Result<(), StoreError> {
        let store = Arc::clone(self);
        let turn = timeout(2 * MIGRATION_WAIT, Arc::clone(&self.migration).lock_owned());
        let prepare = move |turn| async move {
            let _turn = turn;
            if store.common.has_table() {
                return Ok(());
            }
            store.find_or_make(store.options.makes_table, Some(MIGRATION_WAIT)).await
        };
        let late = |_| StoreError::new(StoreErrorKind::Timeout, PREPARING);
        let prepared = in_task(async move { turn.await.map_err(late) }, prepare).await;
        prepared.unwrap_or_else(|| Err(StoreError::new(StoreErrorKind::Unavailable, PREPARING)))
    }

    fn hash(key: &DedupKey) -> u128 {
        key_hash(key)
    }

    async fn session(
        self: &Arc<Self>,
        alone: bool,
    ) -> Result<PostgresSession<'static>, StoreError> {
        let sender = if alone { Sender::Alone } else { Sender::Batch };
        let permission = self.connections.senders.permission(sender, Work::DurableWrite).await;
        let wait = if alone { Wait::Long } else { self.wait() };
        Ok(PostgresSession::new(Arc::clone(self), Link::Own(permission), wait))
    }

    /// While writes wait for the probe, a claim reads beside the queue first: its key may be known,
    /// and a standby that is missing delays no read.
    async fn look_up(
        self: &Arc<Self>,
        key: &DedupKey,
        terms: &CallTerms,
    ) -> Result<Option<ClaimReply>, StoreError> {
        if !self.connections.senders.hold_up_writes() {
            return Ok(None);
        }
        let fetch = without_response(terms.fetch());
        let context = Kind::claim(terms).context();
        // Boxed, because it is rare, and each call of a list is a future of its own.
        let row = Box::pin(self.read_key(context, key, fetch, false)).await?;
        Ok(row.map(|row| read_row(&row, fetch).claimed(terms)).transpose()?.flatten())
    }

    async fn read_response(self: &Arc<Self>, key: &DedupKey) -> Result<Option<Row>, StoreError> {
        let fetch = Fetch::DigestAndResponse;
        let row = self.read_key(READING_RESPONSE, key, fetch, false).await?;
        Ok(row.map(|row| read_row(&row, fetch)))
    }

    fn completion(&self, keys: &[(&DedupKey, &CallTerms)]) -> Completion {
        let statements = &*self.statements(Wait::Briefly);
        let generation = self.connections.replanner.generation();
        let idle = self.options.transaction_idle_timeout;
        completion((statements, generation), idle, keys)
    }
}

/// Where a session sends its statements.
pub(super) enum Link<'c> {
    /// Over the connections of the adapter: each statement is a transaction of its own.
    Own(Permission),
    /// In a transaction of the user's.
    Within(&'c mut PgConnection),
}

/// Runs statements.
pub(crate) struct PostgresSession<'c> {
    store: Arc<PostgresStore>,
    link: Link<'c>,
    /// How batches meet rows that open transactions hold.
    wait: Wait,
    /// How many rows needed no write.
    known: usize,
    /// Whether a statement may have written rows whose reply was lost.
    lost_reply: bool,
}

impl RowExecutor for PostgresSession<'_> {
    async fn execute(&mut self, kind: Kind, rows: &mut [RowCall<'_>]) -> Option<Failed> {
        let store = Arc::clone(&self.store);
        let claims_read_first = store.reads_first.load(Ordering::Relaxed);
        let reads_first = kind == Kind::Check || kind.is_claim() && claims_read_first;
        self.known = 0;
        let mut error = self.run(kind, rows, reads_first).await.err();
        // One wait is enough: this batch and the next ones pass over the row.
        if self.wait == Wait::Briefly && error.as_ref().is_some_and(is_locked) {
            store.note_wait();
            self.wait = Wait::PassOver;
            error = self.run(kind, rows, reads_first).await.err();
        }
        let sent = rows.len();
        let mut left = unanswered(rows);
        if self.wait == Wait::PassOver && error.is_none() && !kind.is_claim() {
            left.drain(..).for_each(|row| row.reply = Some(Ok(RowReply::Locked)));
        }
        let answered = sent - left.len();
        if kind.is_claim() && answered > 0 {
            store.reads_first.store(self.known * 2 >= answered, Ordering::Relaxed);
        }
        let error = error?;
        let (is_row_error, is_locked) = (is_row_error(&error), is_locked(&error));
        let error = store_error(kind.context(), error);
        let error = if self.lost_reply { error.with_unknown_outcome() } else { error };
        // A claim that stands alone and meets a row of an open transaction is in flight. After a
        // lost reply, the claim may hold the row itself.
        if let [row] = &mut left[..]
            && kind.is_claim()
            && is_locked
            && !error.is_unknown()
        {
            row.reply = Some(Ok(RowReply::IN_FLIGHT));
            return None;
        }
        Some(Failed { error, is_row_error })
    }
}

impl<'c> PostgresSession<'c> {
    pub(super) fn new(store: Arc<PostgresStore>, link: Link<'c>, wait: Wait) -> Self {
        Self { store, link, wait, known: 0, lost_reply: false }
    }

    /// Sends the statements for the rows without a reply. After an error, some more rows may have
    /// their reply.
    pub(super) async fn run(
        &mut self,
        kind: Kind,
        rows: &mut [RowCall<'_>],
        mut reads: bool,
    ) -> Result<(), sqlx::Error> {
        // A row that a statement has passed over may be locked for long. A completion also finds
        // rows that are complete.
        let tries = match kind {
            Kind::Complete if self.wait == Wait::PassOver => 2,
            Kind::Claim | Kind::ClaimComplete | Kind::Complete => TRIES,
            Kind::Renew | Kind::Release | Kind::Check => 1,
        };
        for _ in 0..tries {
            let mut left = unanswered(rows);
            if left.is_empty() {
                break;
            }
            if reads {
                left = self.read_and_take(kind, left).await?;
            }
            reads = true;
            if !left.is_empty() {
                self.write(kind, &mut left).await?;
            }
        }
        Ok(())
    }

    /// Reads the rows, and replies where a row decides the reply. A claim also takes the free rows.
    /// Returns the rows to write.
    async fn read_and_take<'r, 'k>(
        &mut self,
        kind: Kind,
        rows: Vec<&'r mut RowCall<'k>>,
    ) -> Result<Vec<&'r mut RowCall<'k>>, sqlx::Error> {
        // A statement of its own: the statement that found a row may have begun before the row was
        // committed, and would not see it.
        let fetch = rows.first().map_or(Fetch::Nothing, |row| row.call.terms.fetch());
        let all = self.store.statements(self.wait);
        let bind = |query: BoundQuery| query.bind(uuids(&rows)).bind(false);
        let returned = self.send(Work::Read, all.read(fetch), &bind).await?;
        let mut found: Vec<_> = rows.iter().map(|_| None).collect();
        for row in &returned {
            if let Some(index) = index_of(&rows, row)? {
                found[index] = Some(read_row(row, fetch));
            }
        }
        let (mut unwritten, mut free, mut found_free) = (Vec::new(), Vec::new(), Vec::new());
        for (row, found) in rows.into_iter().zip(found) {
            row.reply = RowReply::of_row(found.as_ref(), kind, &row.call.terms);
            match found {
                _ if row.reply.is_some() => self.known += 1,
                Some(found) if kind.is_claim() && row.call.has_caller() => {
                    free.push(row);
                    found_free.push(found);
                }
                Some(_) if kind.is_claim() => row.reply = Some(Err(kind.unknown())),
                _ => unwritten.push(row),
            }
        }
        if !free.is_empty() {
            self.take(kind, &mut free, &found_free).await?;
        }
        Ok(unwritten)
    }

    /// Inserts the rows of claims; completes, renews or releases rows. Replies for each row that it
    /// wrote, or that an open transaction holds.
    async fn write(
        &mut self,
        kind: Kind,
        rows: &mut [&mut RowCall<'_>],
    ) -> Result<(), sqlx::Error> {
        let all = self.store.statements(self.wait);
        let sql = match kind {
            Kind::Claim => &all.claim_insert,
            Kind::ClaimComplete => &all.claim_complete_insert,
            Kind::Renew => &all.renew,
            Kind::Complete => &all.complete,
            Kind::Release => &all.release,
            // It has read its rows.
            Kind::Check => return Ok(()),
        };
        let returned = self.send(work(kind), sql, &|query| bind_rows(query, rows)).await?;
        if kind.is_claim() {
            self.store.connections.replanner.note_rows(returned.len());
        }
        // A statement that writes nothing waits for no disk and no standby. A renewal also returns
        // rows that it has passed over.
        let is_written = |row: &PgRow| kind != Kind::Renew || matches!(row.try_get(1), Ok(false));
        if returned.iter().any(is_written) && matches!(self.link, Link::Own(_)) {
            self.store.connections.senders.succeeded(work(kind));
        }
        if kind == Kind::Renew {
            let lost = RowReply::Renewed(RenewReply::Lost);
            rows.iter_mut().for_each(|row| row.reply = Some(Ok(lost.clone())));
        }
        for row in &returned {
            let Some(index) = index_of(rows, row)? else { continue };
            let mine: Uuid = rows[index].call.terms.token().into();
            // By position, in the order of RETURNING in `sql/complete.sql` and `sql/renew.sql`.
            rows[index].reply = Some(Ok(match kind {
                Kind::Complete => {
                    let is_held = row.try_get::<Option<Uuid>, _>(2)? == Some(mine);
                    RowReply::Completed(completed(row.try_get::<i32, _>(1)?.into(), is_held))
                }
                Kind::Renew if row.try_get(1)? => RowReply::Renewed(RenewReply::Locked),
                Kind::Renew => RowReply::Renewed(RenewReply::Held),
                Kind::Release => RowReply::Released,
                _ => RowReply::first(1, false),
            }));
        }
        Ok(())
    }

    /// Takes existing rows at the versions that were found. Replies for each row that it wrote, or
    /// that an open transaction holds: the claim is in flight. A row that this claim itself may
    /// hold has no reply.
    async fn take(
        &mut self,
        kind: Kind,
        rows: &mut [&mut RowCall<'_>],
        found: &[Row],
    ) -> Result<(), sqlx::Error> {
        let versions: Vec<_> = found.iter().map(|row| row.version).collect();
        let all = self.store.statements(self.wait);
        let bind = |query| bind_rows(query, rows).bind(&versions);
        let taken = self.send(work(kind), &all.claim_existing, &bind).await?;
        for row in &taken {
            let Some(index) = index_of(rows, row)? else { continue };
            let (mine, holder) = (*rows[index].call.terms.token().as_bytes(), found[index].token);
            // By position, in the order of RETURNING in `sql/*claim*.sql`.
            rows[index].reply = Some(Ok(match row.try_get::<Option<i32>, _>(1)? {
                Some(attempts) => RowReply::first(attempts.into(), row.try_get(2)?),
                // It is read again: another call may hold it for a moment.
                None if self.lost_reply || holder == Some(mine) => continue,
                None => RowReply::Claimed(ClaimReply::InFlight, holder),
            }));
        }
        Ok(())
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
        let work = (work, self.store.options.statement_timeout);
        let fetched = self.store.connections.fetch(permission, work, sql, Some(bind)).await?;
        self.lost_reply |= fetched.lost_reply;
        Ok(fetched.rows)
    }
}

/// Returns what a statement of this kind may wait for.
fn work(kind: Kind) -> Work {
    if kind == Kind::Claim { Work::Write } else { Work::DurableWrite }
}
