//! Connections, and the bounds on waiting for one that has fallen silent.
//!
//! A connection may stop carrying bytes without a reset: the server's machine is gone, or a
//! firewall has forgotten the flow. sqlx sets no TCP keepalive and gives a statement no timeout, so
//! the adapter sets the timeouts.
//!
//! 1. Batches use connections of the adapter's own, beside the user's pool. A private pool opens them, with
//!    the hooks and the connect options of the user's: rotated credentials take effect. It holds none,
//!    because sqlx takes a connection back by a task and a ping.
//! 2. A statement that takes too long, or whose caller is dropped, is *abandoned*. Its connection is closed and not
//!    pooled, and its outcome is unknown. The server may still run it, so its [place](super::places) stays taken
//!    for a while.
//! 3. After one connection has failed, the idle connections are suspect: those of the batches are closed.
//!    If it fell silent or led to a standby, those of the user's pool are tested at once.
//! 4. The connections end with the user's pool. Otherwise a database could not be dropped after its pool was
//!    closed, as `#[sqlx::test]` does, while a handle to the adapter exists.

use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sqlx::pool::PoolConnection;
use sqlx::postgres::{PgConnectOptions, PgConnection, PgPool, Postgres};
use sqlx::{Connection, Row};
use tokio::runtime::Handle;
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;

use super::super::transaction::return_to_pool;
use super::errors::{is_gone, is_timed_out, timed_out};
use super::places::{Holds, Places};
use crate::observe;

/// How long a test of an idle connection may take.
const TEST: Duration = Duration::from_millis(500);
/// How long a connection of the batches may be idle and not be tested.
const TEST_AFTER: Duration = Duration::from_secs(10);
/// How long opening a connection may take, over all tries.
const CONNECT: Duration = Duration::from_secs(2);
/// How long a connection stays open that no batch needs.
const SURPLUS: Duration = Duration::from_secs(60);

/// Where a statement runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    /// A connection of the pool.
    Pool,
    /// A connection of the batches, beside the pool.
    Lane,
}

/// The user's pool, and the connections that are beside it.
pub(super) struct Connections {
    pub(super) pool: PgPool,
    private: PgPool,
    beside: Mutex<Beside>,
    pub(super) batches: Places,
    pub(super) migration: Places,
}

#[derive(Default)]
struct Beside {
    /// The last used is the last.
    idle: Vec<Own>,
    /// Waits until the user's pool is closed.
    watcher: Option<AbortOnDropHandle<()>>,
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
    /// Lanes whose batches are late do not count, so there are up to twice as many.
    pub(super) fn new(pool: PgPool, lanes: usize) -> Self {
        let batches = lanes.saturating_mul(2);
        let options = pool.options();
        // sqlx refuses a pool that is larger than its parent, which the options may contain.
        let most = u32::try_from(batches).unwrap_or(u32::MAX).min(options.get_max_connections());
        let private = options
            .clone()
            .min_connections(0)
            .max_connections(most)
            .acquire_timeout(CONNECT)
            // Without both, sqlx starts no task for idle connections. There are none.
            .max_lifetime(None)
            .idle_timeout(None)
            .connect_lazy_with((*pool.connect_options()).clone());
        let (batches, migration) = (Places::new(batches), Places::new(1));
        Self { pool, private, beside: Mutex::default(), batches, migration }
    }

    pub(super) async fn get(
        self: &Arc<Self>,
        source: Source,
    ) -> Result<BoundedConnection<'_>, sqlx::Error> {
        let connection = match source {
            Source::Pool => Lent::Pooled(self.pooled().await?),
            Source::Lane => Lent::Own(self.own().await?),
        };
        let connection = Some(connection);
        Ok(BoundedConnection { connections: self, connection, state: State::Usable })
    }

    /// Returns a connection of the pool. The pool tests an idle connection without a timeout of its own,
    /// so a test that takes longer than [`TEST`] is dropped, which closes the connection.
    pub(super) async fn pooled(&self) -> Result<PoolConnection<Postgres>, sqlx::Error> {
        if self.is_closed() {
            return Err(sqlx::Error::PoolClosed);
        }
        if self.pool.num_idle() > 0 {
            let _test = PoolTest { connections: self, since: Instant::now() };
            if let Ok(acquired) = timeout(TEST, self.pool.acquire()).await {
                return acquired;
            }
        }
        self.pool.acquire().await
    }

    async fn own(&self) -> Result<Own, sqlx::Error> {
        loop {
            if self.is_closed() {
                return Err(sqlx::Error::PoolClosed);
            }
            // The connection that was used last. If its runtime has ended, the statement fails at once and is repeated.
            let Some(mut own) = self.lock().idle.pop() else { break };
            if own.used.elapsed() < TEST_AFTER
                || matches!(timeout(TEST, own.connection.ping()).await, Ok(Ok(())))
            {
                return Ok(own);
            }
            drop(own);
            observe::lane_restarted("postgres");
            self.test_idle();
        }
        let options = self.pool.connect_options();
        self.private.set_connect_options((*options).clone());
        let (connection, now) = (self.private.acquire().await?.detach(), Instant::now());
        Ok(Own { connection, options, opened: now, used: now })
    }

    /// Keeps a connection for the next batch, unless there are enough or it is too old.
    fn keep(self: &Arc<Self>, own: Own) {
        let longest = self.pool.options().get_max_lifetime();
        let is_old = longest.is_some_and(|longest| own.opened.elapsed() > longest)
            || !Arc::ptr_eq(&own.options, &self.pool.connect_options());
        let mut beside = self.lock();
        beside.idle.retain(|own| own.used.elapsed() < SURPLUS);
        if is_old || self.is_closed() || beside.idle.len() >= self.batches.count {
            return;
        }
        beside.idle.push(Own { used: Instant::now(), ..own });
        if beside.watcher.as_ref().is_none_or(AbortOnDropHandle::is_finished) {
            beside.watcher = Some(self.close_with_pool());
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
        let closing = self.private.close();
        self.lock().idle.clear();
        closing.await;
    }

    pub(super) fn is_closed(&self) -> bool {
        self.private.is_closed() || self.pool.is_closed()
    }

    /// Tests all idle connections, after one has fallen silent or led to a standby.
    pub(super) fn test_idle(&self) {
        self.lock().idle.clear();
        if Handle::try_current().is_err() {
            return;
        }
        while let Some(connection) = self.pool.try_acquire() {
            tokio::spawn(test(connection));
        }
    }

    fn lock(&self) -> MutexGuard<'_, Beside> {
        self.beside.lock().unwrap_or_else(PoisonError::into_inner)
    }
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

/// A test of a connection by the pool. If it takes long, or its caller stops waiting, the connection may
/// have fallen silent.
struct PoolTest<'c> {
    connections: &'c Connections,
    since: Instant,
}

impl Drop for PoolTest<'_> {
    fn drop(&mut self) {
        if self.since.elapsed() >= TEST / 2 {
            self.connections.test_idle();
        }
    }
}

/// A connection of the pool that is closed when it is dropped.
struct Guard(Option<PoolConnection<Postgres>>);

impl Drop for Guard {
    fn drop(&mut self) {
        drop(self.0.take().map(PoolConnection::detach));
    }
}

/// A connection for one statement. It is closed if it is dropped while a statement is under way, or
/// after a statement without an answer. Otherwise it returns to its source.
pub(super) struct BoundedConnection<'c> {
    connections: &'c Arc<Connections>,
    connection: Option<Lent>,
    state: State,
}

enum State {
    Usable,
    /// A statement is under way, or was abandoned.
    Busy,
    Broken,
}

enum Lent {
    Pooled(PoolConnection<Postgres>),
    Own(Own),
}

impl BoundedConnection<'_> {
    /// Returns the connection of the pool after a statement that the server has answered. The caller
    /// has to bound what it does with it.
    pub(super) fn into_pooled(mut self) -> Option<PoolConnection<Postgres>> {
        match (self.connection.take(), &self.state) {
            (Some(Lent::Pooled(connection)), State::Usable) => Some(connection),
            (connection, _) => {
                self.connection = connection;
                None
            }
        }
    }

    /// Runs one statement within `bound`. The connection is closed after a timeout, if the connection is broken, and
    /// if the server takes no writes.
    pub(super) async fn run<'s, T, F>(
        &'s mut self,
        bound: Duration,
        statement: impl FnOnce(&'s mut PgConnection) -> F,
    ) -> Result<T, sqlx::Error>
    where
        F: Future<Output = Result<T, sqlx::Error>>,
    {
        self.state = State::Busy;
        let connection = match self.connection.as_mut() {
            Some(Lent::Pooled(connection)) => &mut **connection,
            Some(Lent::Own(own)) => &mut own.connection,
            None => return Err(sqlx::Error::PoolClosed),
        };
        let run = timeout(bound, statement(connection)).await;
        let run = run.unwrap_or_else(|_| Err(timed_out()));
        self.state = match &run {
            Err(error) if is_timed_out(error) => State::Busy,
            Err(error) if is_gone(error) => State::Broken,
            _ => State::Usable,
        };
        run
    }
}

impl Drop for BoundedConnection<'_> {
    fn drop(&mut self) {
        match (self.connection.take(), &self.state) {
            (Some(Lent::Pooled(connection)), State::Usable) => return_to_pool(connection),
            (Some(Lent::Own(own)), State::Usable) => self.connections.keep(own),
            (Some(Lent::Pooled(connection)), State::Busy) => {
                self.connections.test_idle();
                // Not longer each time: a pool of the user's serves other work too.
                let closing = self.connections.pool.close_event();
                Holds::default().hold(Guard(Some(connection)), closing);
            }
            (Some(Lent::Pooled(connection)), State::Broken) => drop(connection.detach()),
            (Some(Lent::Own(_)), state) => {
                observe::lane_restarted("postgres");
                match state {
                    State::Busy => self.connections.test_idle(),
                    // The pool itself notices closed connections, before it lends one.
                    _ => self.connections.lock().idle.clear(),
                }
            }
            (None, _) => {}
        }
    }
}
