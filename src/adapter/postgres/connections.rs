//! Connections, and the bounds on waiting for one that has fallen silent.
//!
//! A connection may stop carrying bytes without a reset: the server's machine is gone, or a
//! firewall has forgotten the flow. sqlx sets no TCP keepalive and gives a statement no timeout, so
//! the adapter sets the timeouts.
//!
//! 1. A statement is *abandoned* after
//!    [`statement_timeout`](super::PostgresOptions::statement_timeout), or if its caller is dropped. Its
//!    connection is closed and not pooled, and its outcome is unknown.
//! 2. After one connection has failed, the idle connections are suspect: those of the lanes are
//!    closed, and those of the pool are tested at once, each within [`TEST`].
//! 3. A lane's connection that was idle for longer than [`TEST_AFTER`] is tested before it is used.
//! 4. To open a connection takes at most [`CONNECT`].
//! 5. A lane's connection is used by the runtime that opened it: a runtime that is not driven
//!    delays no other runtime.
//! 6. New connections follow the pool's connect options of that moment, so that rotated credentials
//!    and a new host take effect.
//! 7. The server may still run an abandoned statement. Its lane, or its place in the pool, stays taken
//!    [for a while](super::places), so that sessions do not pile up.
//! 8. The lanes' connections are closed with the pool. Otherwise a database could not be dropped after
//!    its pool was closed, as `#[sqlx::test]` does, while a handle to the adapter exists.

use std::collections::HashMap;
use std::future::Future;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use backon::{BackoffBuilder, ExponentialBuilder};
use sqlx::pool::PoolConnection;
use sqlx::postgres::{PgConnectOptions, PgConnection, PgPool, Postgres};
use sqlx::{Connection, Row};
use tokio::runtime::{Handle, Id};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;

use super::super::transaction::return_to_pool;
use super::errors::{is_timed_out, timed_out};
use super::places::Holds;
use crate::observe;

/// How long a test of an idle connection may take.
const TEST: Duration = Duration::from_millis(500);
/// How long a lane's connection may be idle and not be tested.
const TEST_AFTER: Duration = Duration::from_secs(10);
/// How long opening a connection may take, over all tries.
const CONNECT: Duration = Duration::from_secs(2);
/// How long closing one may take.
const CLOSE: Duration = Duration::from_secs(1);
/// How long an idle connection of another runtime stays open. That runtime may have ended.
const OTHER_IDLE: Duration = Duration::from_secs(60);

/// Where a statement runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    /// A connection of the pool.
    Pool,
    /// A connection of the lanes, beside the pool.
    Lane,
}

/// Work with a bounded number of places in each runtime.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Work {
    /// The batch of a lane.
    Batch,
    /// Finding or making the table.
    Preparation,
}

/// The pool, and the connections that are beside it.
pub(super) struct Connections {
    pub(super) pool: PgPool,
    /// How many connections a runtime holds for its lanes.
    lanes: usize,
    lane_pool: Mutex<LanePool>,
    closed: AtomicBool,
    pub(super) holds: Holds,
    /// When the pool last lent a connection, in milliseconds since `created`.
    lent: AtomicU64,
    created: Instant,
}

/// The connections of the lanes, and what opens them.
#[derive(Default)]
struct LanePool {
    child: Option<ChildPool>,
    idle: HashMap<Id, Vec<Idle>>,
    /// One task in each runtime that has used a lane: it waits until the pool is closed.
    watchers: HashMap<Id, AbortOnDropHandle<()>>,
    /// See [`Connections::place`].
    places: HashMap<(Id, Work), Arc<Semaphore>>,
}

/// Opens connections as the pool does, with its `after_connect`, and holds none.
#[derive(Clone)]
struct ChildPool {
    options: Arc<PgConnectOptions>,
    pool: PgPool,
}

struct Idle {
    connection: PgConnection,
    opened: Instant,
    /// How it was opened.
    options: Arc<PgConnectOptions>,
    since: Instant,
}

impl Connections {
    pub(super) fn new(pool: PgPool, lanes: usize) -> Self {
        Self {
            pool,
            lanes,
            lane_pool: Mutex::default(),
            closed: AtomicBool::new(false),
            holds: Holds::default(),
            lent: AtomicU64::new(0),
            created: Instant::now(),
        }
    }

    pub(super) async fn get(
        self: &Arc<Self>,
        source: Source,
    ) -> Result<BoundedConnection<'_>, sqlx::Error> {
        match source {
            Source::Pool => {
                self.pooled().await.map(|connection| BoundedConnection::of(self, connection))
            }
            Source::Lane => self.lane().await,
        }
    }

    /// Returns a connection of the pool. The pool tests an idle connection without a timeout of its own,
    /// so a test that takes longer than [`TEST`] is dropped, which closes the connection.
    pub(super) async fn pooled(&self) -> Result<PoolConnection<Postgres>, sqlx::Error> {
        if self.is_closed() {
            return Err(sqlx::Error::PoolClosed);
        }
        let mut acquire = Box::pin(self.pool.acquire());
        if self.pool.num_idle() > 0 {
            // If the caller stops waiting first, the guard's drop notes the silent connection too.
            let test = PoolTest { connections: self, since: Instant::now() };
            loop {
                match timeout(TEST, &mut acquire).await {
                    Ok(acquired) => {
                        self.has_lent();
                        return acquired;
                    }
                    // The pool is busy, and this call stays in the pool's queue.
                    Err(_) if self.lent_since(test.since) => {}
                    Err(_) => break,
                }
            }
            drop(test);
            acquire = Box::pin(self.pool.acquire());
        }
        let acquired = acquire.await;
        self.has_lent();
        acquired
    }

    fn has_lent(&self) {
        self.lent.store(self.millis(), Ordering::Relaxed);
    }

    fn lent_since(&self, since: Instant) -> bool {
        let since = self.millis().saturating_sub(millis(since.elapsed()));
        self.lent.load(Ordering::Relaxed) > since
    }

    fn millis(&self) -> u64 {
        millis(self.created.elapsed())
    }

    /// Waits for one of the places for this work in this runtime. What was abandoned keeps its place for a while.
    pub(super) async fn place(&self, work: Work) -> Result<OwnedSemaphorePermit, sqlx::Error> {
        let places = {
            let (mut lane_pool, runtime) = (self.lock(), current_runtime());
            if !lane_pool.places.contains_key(&(runtime, work)) {
                // Those of runtimes that have ended: without a taken place, a semaphore is as a new one.
                lane_pool.places.retain(|_, places| Arc::strong_count(places) > 1);
            }
            let all = match work {
                // There are as many late lanes as others.
                Work::Batch => self.lanes.saturating_mul(2).min(Semaphore::MAX_PERMITS),
                Work::Preparation => 1,
            };
            let places = lane_pool.places.entry((runtime, work));
            Arc::clone(places.or_insert_with(|| Arc::new(Semaphore::new(all))))
        };
        // The semaphore is never closed.
        places.acquire_owned().await.map_err(|_| sqlx::Error::PoolClosed)
    }

    async fn lane(self: &Arc<Self>) -> Result<BoundedConnection<'_>, sqlx::Error> {
        if let Some(mut idle) = self.idle()? {
            let is_usable = idle.since.elapsed() < TEST_AFTER
                || matches!(timeout(TEST, idle.connection.ping()).await, Ok(Ok(())));
            if is_usable {
                let Idle { connection, opened, options, .. } = idle;
                let connection = PoolOrLane::Lane(connection, opened, options);
                return Ok(BoundedConnection::new(self, connection));
            }
            drop(idle);
            observe::lane_restarted("postgres");
            self.test_idle();
        }
        let options = self.pool.connect_options();
        let connection = self.open().await?;
        Ok(BoundedConnection::new(self, PoolOrLane::Lane(connection, Instant::now(), options)))
    }

    /// Returns an unused connection of this runtime.
    fn idle(&self) -> Result<Option<Idle>, sqlx::Error> {
        let options = self.pool.connect_options();
        let (found, outdated) = {
            let mut lane_pool = self.lock();
            if self.is_closed() {
                return Err(sqlx::Error::PoolClosed);
            }
            let current = lane_pool.child.as_ref().is_some_and(|child| child.is_of(&options));
            let outdated =
                if current { HashMap::new() } else { std::mem::take(&mut lane_pool.idle) };
            (lane_pool.idle.get_mut(&current_runtime()).and_then(Vec::pop), outdated)
        };
        drop(outdated);
        Ok(found)
    }

    /// Opens a connection outside of the pool and the lanes.
    pub(super) async fn open(&self) -> Result<PgConnection, sqlx::Error> {
        let pool = self.child_pool()?.pool;
        let acquired = timeout(CONNECT, pool.acquire()).await;
        acquired.map_err(|_| sqlx::Error::PoolTimedOut)?.map(PoolConnection::detach)
    }

    fn child_pool(&self) -> Result<ChildPool, sqlx::Error> {
        let options = self.pool.connect_options();
        let mut lane_pool = self.lock();
        if self.is_closed() {
            return Err(sqlx::Error::PoolClosed);
        }
        if let Some(child) = lane_pool.child.as_ref().filter(|child| child.is_of(&options)) {
            return Ok(child.clone());
        }
        let most = self.pool.options().get_max_connections();
        let pool_options = self.pool.options().clone();
        let pool = pool_options
            .min_connections(0)
            // Not more than the pool has: sqlx refuses a child of a smaller parent.
            .max_connections(
                u32::try_from(self.lanes.saturating_mul(2).saturating_add(1))
                    .unwrap_or(u32::MAX)
                    .min(most),
            )
            .acquire_timeout(CONNECT)
            // Without both, sqlx starts no task for idle connections. There are none.
            .max_lifetime(None)
            .idle_timeout(None)
            .connect_lazy_with((*options).clone());
        let child = ChildPool { options, pool };
        lane_pool.child = Some(child.clone());
        Ok(child)
    }

    /// Tests all idle connections, after one connection has failed.
    pub(super) fn test_idle(&self) {
        let idle = std::mem::take(&mut self.lock().idle);
        drop(idle);
        if Handle::try_current().is_err() {
            return;
        }
        while let Some(connection) = self.pool.try_acquire() {
            tokio::spawn(test(connection));
        }
    }

    /// Holds the place of a batch of which a statement was abandoned now.
    pub(super) fn hold(&self, place: impl Send + 'static) {
        self.holds.hold(place, self.pool.close_event());
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire) || self.pool.is_closed()
    }

    /// Keeps a lane's connection for the next statement, unless there are enough or it is too old.
    fn store_idle(
        self: &Arc<Self>,
        connection: PgConnection,
        opened: Instant,
        with: Arc<PgConnectOptions>,
    ) {
        let options = self.pool.options();
        let is_old = |opened: Instant| {
            options.get_max_lifetime().is_some_and(|longest| opened.elapsed() > longest)
        };
        let is_idle = |since: Instant| {
            options.get_idle_timeout().is_some_and(|longest| since.elapsed() > longest)
        };
        let mut dropped = Vec::new();
        {
            let mut lane_pool = self.lock();
            // The connections of a runtime that has ended are closed here.
            lane_pool.idle.retain(|runtime, idle| {
                let is_other = *runtime != current_runtime();
                let (fresh, old) = std::mem::take(idle).into_iter().partition(|idle: &Idle| {
                    let forgotten = is_other && idle.since.elapsed() > OTHER_IDLE;
                    !forgotten && !is_old(idle.opened) && !is_idle(idle.since)
                });
                *idle = fresh;
                dropped.extend::<Vec<Idle>>(old);
                !idle.is_empty()
            });
            lane_pool.watchers.retain(|_, watcher| !watcher.is_finished());
            lane_pool.watchers.entry(current_runtime()).or_insert_with(|| self.close_with_pool());
            let mine = lane_pool.idle.entry(current_runtime()).or_default();
            let outdated = !Arc::ptr_eq(&with, &self.pool.connect_options());
            let idle = Idle { connection, opened, options: with, since: Instant::now() };
            mine.push(idle);
            if self.is_closed()
                || outdated
                || is_old(opened)
                || lane_pool.idle[&current_runtime()].len() > self.lanes
            {
                dropped.extend(lane_pool.idle.get_mut(&current_runtime()).and_then(Vec::pop));
            }
        }
    }

    /// Waits in a task until the pool is closed, then closes the connections beside it.
    fn close_with_pool(self: &Arc<Self>) -> AbortOnDropHandle<()> {
        // A handle to the adapter may outlive its pool, and the other way round.
        let (closing, connections) = (self.pool.close_event(), Arc::downgrade(self));
        AbortOnDropHandle::new(tokio::spawn(async move {
            closing.await;
            if let Some(connections) = connections.upgrade() {
                connections.close().await;
            }
        }))
    }

    /// Closes the connections beside the pool. Later calls fail.
    pub(super) async fn close(&self) {
        let (idle, child) = {
            let mut lane_pool = self.lock();
            self.closed.store(true, Ordering::Release);
            (std::mem::take(&mut lane_pool.idle), lane_pool.child.take())
        };
        for Idle { connection, .. } in idle.into_values().flatten() {
            let _ = timeout(CLOSE, connection.close()).await;
        }
        if let Some(child) = child {
            let _ = timeout(CLOSE, child.pool.close()).await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, LanePool> {
        self.lane_pool.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ChildPool {
    fn is_of(&self, options: &Arc<PgConnectOptions>) -> bool {
        Arc::ptr_eq(&self.options, options)
    }
}

fn current_runtime() -> Id {
    Handle::current().id()
}

/// Returns growing pauses with jitter, without an end.
pub(super) fn backoff(first: Duration, longest: Duration) -> impl Iterator<Item = Duration> + Send {
    ExponentialBuilder::new()
        .with_min_delay(first)
        .with_max_delay(longest)
        .with_jitter()
        .without_max_times()
        .build()
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Returns an idle connection to the pool if it leads to a primary that replies in time.
async fn test(connection: PoolConnection<Postgres>) {
    let mut connection = Guard(Some(connection));
    let asked = async {
        let Some(connection) = connection.0.as_mut() else { return Ok(false) };
        let row = sqlx::raw_sql("SELECT NOT pg_is_in_recovery()").fetch_one(&mut **connection);
        row.await?.try_get::<bool, _>(0)
    };
    if matches!(timeout(TEST, asked).await, Ok(Ok(true)))
        && let Some(connection) = connection.0.take()
    {
        return_to_pool(connection);
    }
}

/// A test of a connection by the pool. If the pool lends no connection during the test, the tested
/// connection may have fallen silent.
struct PoolTest<'c> {
    connections: &'c Connections,
    since: Instant,
}

impl Drop for PoolTest<'_> {
    fn drop(&mut self) {
        // A caller that stopped waiting early has no result.
        let long = self.since.elapsed() >= TEST / 2;
        if long && !self.connections.lent_since(self.since) {
            self.connections.test_idle();
        }
    }
}

/// A connection of the pool that is closed when it is dropped.
pub(super) struct Guard(pub(super) Option<PoolConnection<Postgres>>);

impl Drop for Guard {
    fn drop(&mut self) {
        drop(self.0.take().map(PoolConnection::detach));
    }
}

/// A connection for one statement. It is closed if it is dropped while a statement is under way, or
/// after a statement without an answer. Otherwise it returns to its source.
pub(super) struct BoundedConnection<'c> {
    connections: &'c Arc<Connections>,
    connection: Option<PoolOrLane>,
    state: State,
}

enum State {
    Usable,
    /// A statement is under way, or was abandoned.
    Busy,
    Broken,
}

enum PoolOrLane {
    Pooled(PoolConnection<Postgres>),
    /// The time and the options of its opening.
    Lane(PgConnection, Instant, Arc<PgConnectOptions>),
}

impl<'c> BoundedConnection<'c> {
    fn new(connections: &'c Arc<Connections>, connection: PoolOrLane) -> Self {
        Self { connections, connection: Some(connection), state: State::Usable }
    }

    fn of(connections: &'c Arc<Connections>, connection: PoolConnection<Postgres>) -> Self {
        Self::new(connections, PoolOrLane::Pooled(connection))
    }

    /// Returns the connection of the pool after a statement that the server has answered. The caller
    /// has to bound what it does with it.
    pub(super) fn into_pooled(mut self) -> Option<PoolConnection<Postgres>> {
        match (self.connection.take(), &self.state) {
            (Some(PoolOrLane::Pooled(connection)), State::Usable) => Some(connection),
            (connection, _) => {
                self.connection = connection;
                None
            }
        }
    }

    /// Runs one statement within `bound`. The connection is closed after a timeout, and after an error
    /// for which `breaks` returns `true`.
    pub(super) async fn run<'s, T, F>(
        &'s mut self,
        bound: Duration,
        breaks: impl Fn(&sqlx::Error) -> bool,
        statement: impl FnOnce(&'s mut PgConnection) -> F,
    ) -> Result<T, sqlx::Error>
    where
        F: Future<Output = Result<T, sqlx::Error>>,
    {
        self.state = State::Busy;
        let Some(connection) = self.connection.as_mut() else {
            return Err(sqlx::Error::PoolClosed);
        };
        let run = timeout(bound, statement(connection)).await;
        let run = run.unwrap_or_else(|_| Err(timed_out()));
        self.state = match &run {
            Err(error) if is_timed_out(error) => State::Busy,
            Err(error) if breaks(error) => State::Broken,
            _ => State::Usable,
        };
        run
    }
}

impl Drop for BoundedConnection<'_> {
    fn drop(&mut self) {
        match (self.connection.take(), &self.state) {
            (Some(PoolOrLane::Pooled(connection)), State::Usable) => return_to_pool(connection),
            (Some(PoolOrLane::Lane(connection, opened, options)), State::Usable) => {
                self.connections.store_idle(connection, opened, options);
            }
            (Some(PoolOrLane::Pooled(connection)), State::Busy) => {
                self.connections.test_idle();
                // Not longer each time: a pool of the user's serves other work too.
                let closing = self.connections.pool.close_event();
                Holds::default().hold(Guard(Some(connection)), closing);
            }
            (Some(PoolOrLane::Pooled(connection)), State::Broken) => drop(connection.detach()),
            (Some(PoolOrLane::Lane(..)), _) => observe::lane_restarted("postgres"),
            (None, _) => {}
        }
    }
}

impl Deref for PoolOrLane {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        match self {
            Self::Pooled(connection) => connection,
            Self::Lane(connection, ..) => connection,
        }
    }
}

impl DerefMut for PoolOrLane {
    fn deref_mut(&mut self) -> &mut PgConnection {
        match self {
            Self::Pooled(connection) => connection,
            Self::Lane(connection, ..) => connection,
        }
    }
}
