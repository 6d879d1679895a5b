//! The adapter's connections: each is taken for one statement, and closed if the reply does not
//! come.
//!
//! A connection may stop carrying bytes without a reset: the server's machine is gone, or a
//! firewall has forgotten the flow. sqlx sets no TCP keepalive and gives a statement no timeout, so
//! the adapter sets the timeouts.
//!
//! 1. The adapter has connections of its own, so that no statement runs in a transaction that the
//!    user has leaked. A private pool opens them, with the hooks and the connect options of the
//!    user's pool, so that rotated credentials take effect. The private pool keeps no connection,
//!    because sqlx pings a returned connection without a time limit.
//! 2. A statement that takes too long, or whose caller is dropped, is abandoned: its connection is
//!    closed, and its outcome is unknown.
//! 3. If one statement is late, or one connection has failed, the idle connections may have failed
//!    too: they are closed.
//! 4. The connections are closed with the user's pool: the task that purges detects its end.
//!    Otherwise a database could not be dropped after its pool was closed, as `#[sqlx::test]` does,
//!    while a handle to the adapter exists.
//!
//! [`Senders`](super::senders::Senders) bounds the sessions of abandoned statements.

use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use backon::{BackoffBuilder, ExponentialBuilder};
use sqlx::postgres::{PgConnectOptions, PgConnection, PgPool, PgRow};
use sqlx::{AssertSqlSafe, Row};
use tokio::time::{sleep, timeout};

use super::super::sql::statement::{fill, query};
use super::errors::{is_broken, is_conflict, is_gone, is_timed_out, timed_out};
use super::params::Bind;
use super::senders::{OTHERS, Permission, Senders, Work};
use super::statements::{Replanner, TAG, literal};
use crate::observe;

/// How long opening a connection may take, over all tries.
const CONNECT: Duration = Duration::from_secs(2);
/// A statement without a reply for so long is late.
const LATE: Duration = Duration::from_millis(500);
/// How long a connection stays open that nothing needs. A firewall forgets an idle flow later.
const IDLE: Duration = Duration::from_secs(60);
/// Ends the session of an abandoned statement on the server, whatever it waits for: its connection
/// is closed. For the session, because a statement waits for the table's lock before it could set
/// anything. A pooler may give the session to others, whom the setting does not disturb.
const CHECK_CLIENT: &str = "SELECT set_config('client_connection_check_interval', '1s', false) \
     WHERE current_setting('client_connection_check_interval') = '0'";
/// How often a statement is repeated that conflicted with another, or whose connection was gone.
const REPEATS: usize = 6;
/// Whether the server does not run the statement that begins with `{probe}`. True only if the reply
/// can be trusted: the server is no standby, and the view shows the statements of this role, such
/// as this one.
const IS_LOST: &str = "SELECT NOT pg_is_in_recovery() \
     AND bool_or(pid = pg_backend_pid() AND starts_with(query, {tag})) \
     AND NOT bool_or(state = 'active' AND starts_with(query, {probe})) \
     FROM pg_stat_activity";

/// The user's pool, and the connections that are beside it.
pub(super) struct Connections {
    pub(super) pool: PgPool,
    private: PgPool,
    /// The last used is the last.
    idle: Mutex<Vec<Own>>,
    /// How many of them there may be.
    most: usize,
    pub(super) senders: Senders,
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
    pub(super) fn new(pool: PgPool, workers: usize, statement_timeout: Duration) -> Self {
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
        Self {
            pool,
            private,
            idle: Mutex::default(),
            most: most.saturating_add(OTHERS),
            senders: Senders::new(most, statement_timeout),
            replanner: Replanner::default(),
        }
    }

    /// Runs one statement within `bound`; without `bind`, statements without parameters as one
    /// message. Returns its rows.
    ///
    /// The statement is repeated after a conflict, and if its connection turns out to be gone: a
    /// statement that is repeated with its token has the same result. A repetition may be refused
    /// because the server still runs the statement whose reply was lost: the outcome is unknown
    /// then. A statement that has used up its time is not repeated, because its caller has stopped
    /// waiting.
    pub(super) async fn fetch(
        &self,
        permission: &Permission,
        (work, bound): (Work, Duration),
        sql: &Arc<str>,
        bind: Option<Bind<'_>>,
    ) -> Result<Fetched, sqlx::Error> {
        let (sql, bound) = (self.replanner.text(sql), permission.bound(bound));
        let pauses = ExponentialBuilder::new().with_min_delay(Duration::from_millis(1));
        let pauses = pauses.with_max_delay(Duration::from_millis(50)).with_jitter();
        let mut pauses = pauses.with_max_times(REPEATS).build();
        let mut lost = None;
        loop {
            let (sql, mark) = permission.mark(&sql);
            let sent = match self.lend().await {
                Ok(own) => self.send(own, (work, bound), (&sql, mark.as_deref()), bind).await,
                Err(error) => return Err(lost.unwrap_or(error)),
            };
            let error = match sent {
                Ok(rows) => return Ok(Fetched { rows, lost_reply: lost.is_some() }),
                Err(error) => error,
            };
            let is_again = !is_timed_out(&error) && (is_gone(&error) || is_conflict(&error));
            match pauses.next().filter(|_| is_again) {
                Some(pause) => sleep(pause).await,
                None => return Err(lost.unwrap_or(error)),
            }
            if is_broken(&error) {
                lost = Some(error);
            }
        }
    }

    /// Returns the connection that was used last, or opens one. If its runtime has ended, the
    /// statement fails at once and is repeated.
    async fn lend(&self) -> Result<Own, sqlx::Error> {
        if self.is_closed() {
            return Err(sqlx::Error::PoolClosed);
        }
        let idle = self.idle().pop();
        if let Some(own) = idle {
            return Ok(own);
        }
        tokio::select! {
            biased;
            own = self.open() => own,
            error = self.refusal() => Err(error),
        }
    }

    async fn open(&self) -> Result<Own, sqlx::Error> {
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

    /// Returns why no connection opens, early enough for the record of a caller. While a server
    /// refuses connections, sqlx tries again, and at last says only that its time is up.
    async fn refusal(&self) -> sqlx::Error {
        sleep(CONNECT / 2).await;
        let options = self.pool.connect_options();
        match timeout(LATE, sqlx::ConnectOptions::connect(&*options)).await {
            Ok(Err(error)) => error,
            _ => std::future::pending().await,
        }
    }

    /// Sends one statement, and keeps the connection if it may serve another one.
    async fn send(
        &self,
        mut own: Own,
        (work, bound): (Work, Duration),
        sql: (&Arc<str>, Option<&str>),
        bind: Option<Bind<'_>>,
    ) -> Result<Vec<PgRow>, sqlx::Error> {
        let mut sent = Sent { connections: self, work, is_abandoned: true, is_lost: true };
        let fetched = self.reply(&mut own.connection, bound, sql, bind).await;
        sent.is_abandoned = fetched.as_ref().is_err_and(is_timed_out);
        sent.is_lost = fetched.as_ref().is_err_and(is_gone);
        let mut idle = self.idle();
        if !sent.is_lost && idle.len() < self.most && !self.is_closed() {
            idle.push(Own { used: Instant::now(), ..own });
        }
        drop(idle);
        if fetched.is_ok() {
            self.senders.succeeded(Work::Read);
        }
        fetched
    }

    /// Waits for the reply to a statement until `bound`; for that to a probe, which has a mark, no
    /// longer than the server runs it.
    async fn reply(
        &self,
        connection: &mut PgConnection,
        bound: Duration,
        (sql, mark): (&Arc<str>, Option<&str>),
        bind: Option<Bind<'_>>,
    ) -> Result<Vec<PgRow>, sqlx::Error> {
        let mut reply = pin!(async {
            let rows = match bind {
                Some(bind) => bind(query(sql)).fetch_all(connection).await?,
                None => sqlx::raw_sql(AssertSqlSafe(Arc::clone(sql))).fetch_all(connection).await?,
            };
            // The server only follows another.
            if rows.first().is_some_and(|row| row.try_get("standby").unwrap_or(false)) {
                return Err(sqlx::Error::Protocol("the server is a standby".to_owned()));
            }
            Ok(rows)
        });
        if let Ok(reply) = timeout(bound.min(LATE), &mut reply).await {
            return reply;
        }
        self.close_idle();
        let reply = timeout(bound.saturating_sub(LATE), reply);
        let reply = match mark {
            None => reply.await,
            // Boxed, because few statements are probes.
            Some(mark) => tokio::select! {
                biased;
                reply = reply => reply,
                () = Box::pin(self.lost(mark)) => return Err(timed_out()),
            },
        };
        reply.unwrap_or_else(|_| Err(timed_out()))
    }

    /// Returns once the server says that it does not run the probe with this mark. Asks as often as
    /// another statement may take.
    async fn lost(&self, mark: &str) {
        let values = [("tag", &*literal(TAG)), ("probe", &*literal(mark))];
        let sql: Arc<str> = [TAG, &fill(IS_LOST, &values)].concat().into();
        let is_lost = async || {
            let mut own = self.open().await?;
            let sql = sqlx::raw_sql(AssertSqlSafe(Arc::clone(&sql)));
            sql.fetch_one(&mut own.connection).await?.try_get::<bool, _>(0)
        };
        loop {
            sleep(self.senders.statement_timeout.max(LATE)).await;
            if let Ok(Ok(true)) = timeout(CONNECT, is_lost()).await {
                return;
            }
        }
    }

    /// Closes the connections beside the pool. Later calls fail.
    pub(super) async fn close(&self) {
        let closing = self.private.close();
        self.close_idle();
        closing.await;
    }

    pub(super) fn close_idle(&self) {
        self.idle().clear();
    }

    fn is_closed(&self) -> bool {
        self.private.is_closed() || self.pool.is_closed()
    }

    /// Locks the idle connections, and closes those that are too old, or were opened with other
    /// options.
    fn idle(&self) -> MutexGuard<'_, Vec<Own>> {
        let (options, longest) =
            (self.pool.connect_options(), self.pool.options().get_max_lifetime());
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        idle.retain(|own| {
            let is_old = longest.is_some_and(|longest| own.opened.elapsed() > longest);
            !is_old && own.used.elapsed() < IDLE && Arc::ptr_eq(&own.options, &options)
        });
        idle
    }
}

/// A statement that was sent. It is abandoned if this is dropped before its reply.
struct Sent<'c> {
    connections: &'c Connections,
    work: Work,
    is_abandoned: bool,
    /// Whether its connection is.
    is_lost: bool,
}

impl Drop for Sent<'_> {
    fn drop(&mut self) {
        if self.is_abandoned {
            self.connections.senders.abandoned_one(self.work);
        }
        if self.is_lost {
            observe::records::worker_restarted("postgres");
            self.connections.close_idle();
        }
    }
}
