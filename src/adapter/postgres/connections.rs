//! Connections, and the bounds on waiting for one that has fallen silent.
//!
//! A connection may stop carrying bytes without a reset: the server's machine is gone, or a
//! firewall has forgotten the flow. sqlx sets no TCP keepalive and gives a statement no timeout, so
//! the adapter sets the timeouts.
//!
//! 1. The adapter uses connections of its own, beside the user's pool: nobody commits what is written in a transaction that
//!    the user has leaked. A private pool opens them, with the hooks and the connect options of the user's: rotated
//!    credentials take effect. It holds none, because sqlx takes a connection back by a task and a ping.
//! 2. A statement that takes too long, or whose caller is dropped, is *abandoned*. Its connection is closed, and its
//!    outcome is unknown. The server may still run it: its session waits for a lock, until the server notices that the
//!    client has gone; or for a disk or a standby. Nothing searches for such a session. Its [`Place`] stays taken for
//!    [`FIRST`], and then each time twice as long until a statement of its kind writes. Otherwise each call would leave
//!    one more session on the server.
//! 3. After one connection has failed, the idle connections are suspect: those of the adapter are closed. Those of the
//!    user's pool are tested at once, because the transactions of handlers would wait for each that has fallen silent.
//! 4. The connections end with the user's pool: the task that purges sees its end. Otherwise a database could not be
//!    dropped after its pool was closed, as `#[sqlx::test]` does, while a handle to the adapter exists.

use std::future::Future;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use backon::{BackoffBuilder, ExponentialBuilder};
use sqlx::pool::PoolConnection;
use sqlx::postgres::{PgConnectOptions, PgConnection, PgPool, PgRow, Postgres};
use sqlx::{AssertSqlSafe, Connection, Row};
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{sleep, timeout};

use super::super::sql::call::Kind;
use super::super::sql::statement::query;
use super::errors::{is_broken, is_conflict, is_gone, is_read_only, is_timed_out, timed_out};
use super::params::Bind;
use super::statements::{Replanner, TAG};
use crate::observe;

/// How long a test of an idle connection may take.
const TEST: Duration = Duration::from_millis(500);
/// How long a connection may be idle and not be tested.
const TEST_AFTER: Duration = Duration::from_secs(10);
/// How long opening a connection may take, over all tries.
const CONNECT: Duration = Duration::from_secs(2);
/// How long a connection stays open that nothing needs.
const SURPLUS: Duration = Duration::from_secs(60);
/// Ends the session of an abandoned statement on the server, whatever it waits for: its connection is closed. For the
/// session, because a statement waits for the table's lock before it could set anything. A pooler may give the session
/// to others, whom the setting does not disturb.
const CHECK_CLIENT: &str = "SELECT set_config('client_connection_check_interval', '1s', false) \
     WHERE current_setting('client_connection_check_interval') = '0'";
/// How many statements run beside the batches: those of operators, purges, and reads of stored responses.
const OTHERS: usize = 4;
/// How often a statement is repeated that conflicted with another, or whose connection was gone.
const REPEATS: usize = 6;
/// How long the place of an abandoned statement stays taken at first, and at most.
const FIRST: Duration = Duration::from_secs(10);
const LONGEST: Duration = Duration::from_secs(60);

/// How many statements or transactions may be under way, those that were lost included.
pub(super) struct Places {
    free: Arc<Semaphore>,
    doubled: Doubled,
}

/// How often the time of a lost place was doubled since a statement or a transaction ended well, by [`Kind`]. While one
/// kind ends well, another may not: claims do not wait for a standby, for example.
type Doubled = Arc<[AtomicU32; 6]>;

/// The place of a batch, a transaction or a migration.
pub(super) struct Place {
    permit: Option<OwnedSemaphorePermit>,
    doubled: Doubled,
    /// The kind of its calls. All transactions and all migrations have one.
    pub(super) kind: Kind,
    /// Whether the place stays taken for a while after it is dropped.
    pub(super) is_lost: bool,
}

impl Places {
    pub(super) fn new(count: usize) -> Self {
        let free = Arc::new(Semaphore::new(count.min(Semaphore::MAX_PERMITS)));
        Self { free, doubled: Arc::default() }
    }

    pub(super) async fn place(&self) -> Place {
        // The semaphore is never closed.
        let permit = Arc::clone(&self.free).acquire_owned().await.ok();
        Place { permit, doubled: Arc::clone(&self.doubled), kind: Kind::Claim, is_lost: false }
    }

    /// Notes that a statement of this kind has written, or a transaction has ended well.
    pub(super) fn has_ended(&self, kind: Kind) {
        self.doubled[kind as usize].store(0, Ordering::Relaxed);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // Without a runtime, the place is free at once.
        let (true, Ok(runtime)) = (self.is_lost, Handle::try_current()) else { return };
        let (permit, all, kind) = (self.permit.take(), Arc::clone(&self.doubled), self.kind);
        let (before, order) = (all[kind as usize].load(Ordering::Relaxed), Ordering::Relaxed);
        runtime.spawn(async move {
            sleep(lost_for(before)).await;
            let doubled = &all[kind as usize];
            // Those that were lost together double the time once.
            let _ = doubled.compare_exchange(before, before.saturating_add(1), order, order);
            drop(permit);
        });
    }
}

fn lost_for(doubled: u32) -> Duration {
    FIRST.saturating_mul(1 << doubled.min(8)).min(LONGEST)
}

/// The user's pool, and the connections that are beside it.
pub(super) struct Connections {
    pub(super) pool: PgPool,
    private: PgPool,
    /// The connections beside the pool. The last used is the last.
    idle: Mutex<Vec<Own>>,
    /// How many of them there may be.
    most: usize,
    pub(super) batches: Places,
    /// For calls that wait for a row, beside the batches.
    pub(super) alone: Places,
    pub(super) others: Places,
    pub(super) migration: Places,
    pub(super) replanner: Replanner,
}

/// The rows that a statement returned.
pub(super) struct Fetched {
    pub(super) rows: Vec<PgRow>,
    /// An earlier try of the statement lost its reply: the rows may show what that try wrote.
    pub(super) lost_reply: bool,
}

/// A connection beside the pool.
struct Own {
    connection: PgConnection,
    /// How it was opened.
    options: Arc<PgConnectOptions>,
    opened: Instant,
    used: Instant,
}

impl Connections {
    /// Workers whose batches are late do not count, so there are up to twice as many.
    pub(super) fn new(pool: PgPool, workers: usize) -> Self {
        let most = workers.saturating_mul(2);
        let options = pool.options();
        // sqlx refuses a pool that is larger than its parent, which the options may contain.
        let opening = u32::try_from(most).unwrap_or(u32::MAX).min(options.get_max_connections());
        let private = options
            .clone()
            .min_connections(0)
            .max_connections(opening)
            .acquire_timeout(CONNECT)
            // Without both, sqlx starts no task for idle connections. There are none.
            .max_lifetime(None)
            .idle_timeout(None)
            .connect_lazy_with((*pool.connect_options()).clone());
        let [batches, alone, others, migration] = [most, most, OTHERS, 1].map(Places::new);
        let (idle, most) = (Mutex::default(), most.saturating_add(OTHERS));
        let replanner = Replanner::default();
        Self { pool, private, idle, most, batches, alone, others, migration, replanner }
    }

    pub(super) async fn get(&self) -> Result<BoundedConnection<'_>, sqlx::Error> {
        let own = tokio::select! {
            biased;
            own = self.own() => own?,
            error = self.refusal() => return Err(error),
        };
        Ok(BoundedConnection { connections: self, own: Some(own), is_usable: true })
    }

    /// Returns why no connection opens, early enough for the record of a caller. While a server refuses connections,
    /// sqlx tries again, and at last says only that its time is up.
    async fn refusal(&self) -> sqlx::Error {
        const ASK_AFTER: Duration = Duration::from_secs(1);
        sleep(ASK_AFTER).await;
        let options = self.pool.connect_options();
        match timeout(TEST, sqlx::ConnectOptions::connect(&*options)).await {
            Ok(Err(error)) => error,
            _ => std::future::pending().await,
        }
    }

    async fn own(&self) -> Result<Own, sqlx::Error> {
        loop {
            if self.is_closed() {
                return Err(sqlx::Error::PoolClosed);
            }
            // The connection that was used last. If its runtime has ended, the statement fails at once and is repeated.
            let Some(mut own) = self.lock().pop() else { break };
            if own.used.elapsed() < TEST_AFTER
                || matches!(timeout(TEST, own.connection.ping()).await, Ok(Ok(())))
            {
                return Ok(own);
            }
            drop(own);
            observe::worker_restarted("postgres");
            self.test_idle();
        }
        let options = self.pool.connect_options();
        self.private.set_connect_options((*options).clone());
        let mut connection = self.private.acquire().await?.detach();
        let set = AssertSqlSafe(format!("{TAG}{CHECK_CLIENT}"));
        let set = timeout(CONNECT, sqlx::raw_sql(set).execute(&mut connection)).await;
        match set.unwrap_or_else(|_| Err(timed_out())) {
            // Not every system can tell that a client has gone.
            Ok(_) | Err(sqlx::Error::Database(_)) => {}
            Err(error) => return Err(error),
        }
        let now = Instant::now();
        Ok(Own { connection, options, opened: now, used: now })
    }

    /// Keeps a connection for the next batch, unless there are enough or it is too old.
    fn keep(&self, own: Own) {
        let longest = self.pool.options().get_max_lifetime();
        let is_old = longest.is_some_and(|longest| own.opened.elapsed() > longest)
            || !Arc::ptr_eq(&own.options, &self.pool.connect_options());
        let mut idle = self.lock();
        idle.retain(|own| own.used.elapsed() < SURPLUS);
        if !is_old && !self.is_closed() && idle.len() < self.most {
            idle.push(Own { used: Instant::now(), ..own });
        }
    }

    /// Closes the connections beside the pool. Later calls fail.
    pub(super) async fn close(&self) {
        let closing = self.private.close();
        self.close_idle();
        closing.await;
    }

    pub(super) fn close_idle(&self) {
        self.lock().clear();
    }

    pub(super) fn is_closed(&self) -> bool {
        self.private.is_closed() || self.pool.is_closed()
    }

    /// Closes the idle connections, and tests those of the user's pool.
    fn test_idle(&self) {
        self.close_idle();
        if Handle::try_current().is_err() {
            return;
        }
        while let Some(connection) = self.pool.try_acquire() {
            tokio::spawn(test(connection));
        }
    }

    /// Runs one statement within `bound`. Returns its rows.
    ///
    /// The statement is repeated after a conflict, and if its connection turns out to be gone: a
    /// statement that is repeated with its token has the same result. A repetition may be refused
    /// because the server still runs the statement whose reply was lost: the outcome is unknown then.
    /// A statement that has used up its time is not repeated, because its caller has stopped waiting.
    pub(super) async fn fetch(
        &self,
        bound: Duration,
        sql: &Arc<str>,
        bind: Bind<'_>,
    ) -> Result<Fetched, sqlx::Error> {
        let sql = &self.replanner.text(sql);
        let mut pauses = repeats();
        let mut lost = None;
        loop {
            let mut session = match self.get().await {
                Ok(session) => session,
                Err(error) => return Err(lost.unwrap_or(error)),
            };
            let fetch = |connection| async {
                let rows = bind(query(sql)).fetch_all(connection).await?;
                if rows.first().is_some_and(is_from_a_standby) {
                    return Err(sqlx::Error::Protocol("the server is a standby".to_owned()));
                }
                Ok(rows)
            };
            let error = match session.run(bound, fetch).await {
                Ok(rows) => {
                    let lost_reply = lost.is_some();
                    return Ok(Fetched { rows, lost_reply });
                }
                Err(error) => error,
            };
            if is_read_only(&error) || matches!(error, sqlx::Error::Protocol(_)) {
                // All connections may lead to the same server.
                self.test_idle();
            }
            if is_timed_out(&error) {
                return Err(error);
            }
            drop(session);
            match pauses.next() {
                Some(pause) if is_gone(&error) || is_conflict(&error) => {
                    sleep(pause).await;
                }
                _ => return Err(lost.unwrap_or(error)),
            }
            if is_broken(&error) {
                lost = Some(error);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Own>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the pauses between the repetitions of a statement or a transaction.
fn repeats() -> impl Iterator<Item = Duration> + Send {
    ExponentialBuilder::new()
        .with_min_delay(Duration::from_millis(1))
        .with_max_delay(Duration::from_millis(50))
        .with_jitter()
        .with_max_times(REPEATS)
        .build()
}

/// Returns `true` for a row from a server that only follows another.
fn is_from_a_standby(row: &PgRow) -> bool {
    row.try_get("standby").unwrap_or(false)
}

/// Returns a connection to its pool if it leads to a primary that replies in time.
async fn test(mut connection: PoolConnection<Postgres>) {
    let asked = async {
        let row = sqlx::raw_sql("SELECT NOT pg_is_in_recovery()").fetch_one(&mut *connection);
        row.await?.try_get::<bool, _>(0)
    };
    if matches!(timeout(TEST, asked).await, Ok(Ok(true))) {
        // sqlx asks once more.
        let _ = timeout(TEST, connection.return_to_pool()).await;
    } else {
        drop(connection.detach());
    }
}

/// A connection for one statement. It is closed if it is dropped while a statement is under way, after a statement
/// without an answer, and if the server takes no writes. Otherwise it serves the next statement.
pub(super) struct BoundedConnection<'c> {
    connections: &'c Connections,
    own: Option<Own>,
    is_usable: bool,
}

impl BoundedConnection<'_> {
    /// Runs one statement within `bound`.
    pub(super) async fn run<'s, T, F>(
        &'s mut self,
        bound: Duration,
        statement: impl FnOnce(&'s mut PgConnection) -> F,
    ) -> Result<T, sqlx::Error>
    where
        F: Future<Output = Result<T, sqlx::Error>>,
    {
        self.is_usable = false;
        let Some(own) = self.own.as_mut() else { return Err(sqlx::Error::PoolClosed) };
        let run = timeout(bound, statement(&mut own.connection)).await;
        let run = run.unwrap_or_else(|_| Err(timed_out()));
        self.is_usable = !run.as_ref().is_err_and(|error| is_timed_out(error) || is_gone(error));
        run
    }
}

impl Drop for BoundedConnection<'_> {
    fn drop(&mut self) {
        match self.own.take() {
            Some(own) if self.is_usable => self.connections.keep(own),
            own => {
                drop(own);
                observe::worker_restarted("postgres");
                self.connections.test_idle();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Claims, which may not wait for the disk, end well while completions do not.
    #[tokio::test(start_paused = true)]
    async fn only_a_success_of_the_same_kind_resets_the_time_of_a_lost_place() {
        let places = Places::new(1);
        let lose = async |kind| {
            let mut place = places.place().await;
            (place.kind, place.is_lost) = (kind, true);
            drop(place);
            let start = tokio::time::Instant::now();
            drop(places.place().await);
            start.elapsed().as_secs()
        };
        assert_eq!(lose(Kind::Complete).await, 10);
        places.has_ended(Kind::Claim);
        assert_eq!(lose(Kind::Complete).await, 20);
        assert_eq!(lose(Kind::Claim).await, 10);
        places.has_ended(Kind::Complete);
        assert_eq!(lose(Kind::Complete).await, 10);
    }

    #[test]
    fn lost_place_is_taken_for_10_to_60_s() {
        let times = [0, 1, 2, 3, u32::MAX].map(|doubled| lost_for(doubled).as_secs());
        assert_eq!(times, [10, 20, 40, 60, 60]);
    }
}
