//! Connections, and how a statement is sent on one.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use sqlx::mysql::{MySqlArguments, MySqlConnectOptions, MySqlPool, MySqlPoolOptions, MySqlRow};
use sqlx::{Arguments as _, AssertSqlSafe, Connection as _, Encode, Executor, MySql, Type};
use tokio::sync::{Semaphore, oneshot};
use tokio::time::{sleep, timeout};
use tower_dedup::adapter::contract::{CallTerms, StoreFuture};
use tower_dedup::{DedupKey, StoreError, StoreErrorKind};

use crate::Options;
use crate::errors::{is_contended, number, store_error};
use crate::row::header_lines;
use crate::statements::{Statement, Statements};

/// The sessions of this store wait for no lock, and each statement is a transaction. The modes are set because the
/// server's may turn a value that does not fit into a warning.
const SESSION: &str = "SET @@session.innodb_lock_wait_timeout = 0, @@session.autocommit = 1, \
     @@session.time_zone = '+00:00', @@session.sql_mode = 'STRICT_ALL_TABLES'";
/// Without gap locks, statements for two keys do not meet. The guard of an insertion reads without locks.
const ISOLATION: &str = "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED";
/// The pauses after which a statement is sent again that met a lock. A statement holds a row for a moment; a handler's
/// transaction holds it for longer.
const PAUSES_MS: [u64; 3] = [1, 2, 5];
/// How long a patient statement waits for a row: `statements::PATIENT`.
const PATIENCE: Duration = Duration::from_secs(5);
/// A connection that was idle for longer is tested: the server may have restarted.
const IDLE: Duration = Duration::from_secs(5);

/// The state that all handles of a store share.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) pool: MySqlPool,
    pub(crate) statements: Statements,
    options: Options,
    /// A statement that waits for a held row holds a connection. Others must find one, so few wait at a time.
    patient: Semaphore,
}

impl Session {
    /// Opens a pool. A pool of the program's would have other settings of its sessions.
    pub(crate) async fn open(
        connect: MySqlConnectOptions,
        options: Options,
    ) -> Result<Self, StoreError> {
        let fault = |error| store_error("connecting to MariaDB", error);
        let Some(database) = connect.get_database() else {
            return Err(StoreError::new(
                StoreErrorKind::Config,
                "the URL must name a database of MariaDB",
            ));
        };
        let statements = Statements::new(database);
        let pool = MySqlPoolOptions::new()
            .max_connections(options.connections.max(1))
            .acquire_timeout(options.timeout)
            // A connection is tested when it is returned.
            .test_before_acquire(false)
            .before_acquire(|connection, meta| {
                Box::pin(async move {
                    if meta.idle_for > IDLE {
                        connection.ping().await?;
                    }
                    Ok(true)
                })
            })
            .after_connect(|connection, _| {
                Box::pin(async move {
                    connection.execute(SESSION).await?;
                    connection.execute(ISOLATION).await.map(drop)
                })
            });
        let pool = pool.connect_with(connect).await.map_err(fault)?;
        let patient = Semaphore::new((options.connections as usize / 4).max(1));
        Ok(Self { pool, statements, options, patient })
    }
}

/// The rows that a statement returned, and how many it wrote.
pub(crate) type Ran = (Vec<MySqlRow>, u64);

/// The arguments of a statement, in its order.
#[derive(Debug, Clone, Default)]
pub(crate) struct Args(MySqlArguments);

impl Args {
    /// Adds a value. Numbers and bytes always encode; a statement without an argument fails.
    pub(crate) fn add<'v, T: Encode<'v, MySql> + Type<MySql>>(mut self, value: T) -> Self {
        let _ = self.0.add(value);
        self
    }

    pub(crate) fn numbers<const N: usize>(self, values: [Option<i64>; N]) -> Self {
        values.into_iter().fold(self, Self::add)
    }

    pub(crate) fn of(key: &DedupKey) -> Self {
        Self::default().key(key)
    }

    pub(crate) fn key(self, key: &DedupKey) -> Self {
        self.add(key.namespace().as_bytes()).add(key.id().as_bytes())
    }

    pub(crate) fn token(self, terms: &CallTerms) -> Self {
        self.add(&terms.token().as_bytes()[..])
    }

    /// Adds the four columns of the data that is stored with a complete key. Another row has none.
    pub(crate) fn stored(self, terms: &CallTerms, is_complete: bool) -> Self {
        let digest = terms.payload_sha256().filter(|_| is_complete);
        let response = terms.response().filter(|_| is_complete);
        self.add(digest.map(Vec::from))
            .add(response.map(|response| i64::from(response.status.as_u16())))
            .add(response.map(|response| header_lines(&response.headers)))
            .add(response.map(|response| &response.body[..]))
    }
}

/// One call, for as long as its caller waits.
#[derive(Debug)]
pub(crate) struct Call {
    session: Arc<Session>,
    context: &'static str,
    /// Closed once the caller is gone.
    caller: oneshot::Sender<()>,
}

impl Call {
    /// Runs a call in a task of its own.
    ///
    /// A caller may drop its call, or stop polling it. The task ends the statement that it has sent, so that no connection
    /// is left with a lock or an unread reply, and sends no further one for a caller that is gone.
    ///
    /// This is a part of the fence. A claim reads a row and takes it at the version that it has read. If the caller was
    /// dropped meanwhile and has released, the read may have found the version of the release; but then the caller is gone
    /// before the take is sent.
    pub(crate) fn start<'a, T, F>(
        session: &Arc<Session>,
        context: &'static str,
        work: impl FnOnce(Self) -> F + Send + 'a,
    ) -> StoreFuture<'a, T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, StoreError>> + Send + 'static,
    {
        let session = Arc::clone(session);
        Box::pin(async move {
            let (caller, _waits) = oneshot::channel();
            let task = tokio::spawn(work(Self { session, context, caller }));
            // It panicked, or the runtime ends.
            task.await
                .unwrap_or_else(|_| Err(StoreError::new(StoreErrorKind::Unavailable, context)))
        })
    }

    pub(crate) fn sql(&self) -> &Statements {
        &self.session.statements
    }

    /// Returns the error of an sqlx call.
    pub(crate) fn fault(&self, error: sqlx::Error) -> StoreError {
        store_error(self.context, error)
    }

    /// Returns an error of this kind.
    pub(crate) fn error(&self, kind: StoreErrorKind) -> StoreError {
        StoreError::new(kind, self.context)
    }

    /// Sends a statement that meets no lock. Returns its rows.
    pub(crate) async fn query(
        &self,
        of: &Statement,
        args: Args,
    ) -> Result<Vec<MySqlRow>, StoreError> {
        Ok(self.run(of, args).await?.unwrap_or_default().0)
    }

    /// Sends a statement. `None` if a transaction holds its row.
    pub(crate) async fn run(&self, of: &Statement, args: Args) -> Result<Option<Ran>, StoreError> {
        for pause in PAUSES_MS {
            if let Some(ran) = self.send(of, false, args.clone()).await? {
                return Ok(Some(ran));
            }
            sleep(Duration::from_millis(pause)).await;
        }
        self.send(of, false, args).await
    }

    /// Sends a statement that waits for the row that a transaction holds: a completion or a release. Who polls would hardly
    /// ever get a row that handlers hold one after the other. Returns how many rows it wrote.
    pub(crate) async fn run_patiently(
        &self,
        of: &Statement,
        args: Args,
    ) -> Result<u64, StoreError> {
        if let Some((_, written)) = self.run(of, args.clone()).await? {
            return Ok(written);
        }
        // Never closed.
        let _permit = self.session.patient.acquire().await;
        let ran = self.send(of, true, args).await?;
        ran.map(|(_, written)| written).ok_or_else(|| self.error(StoreErrorKind::Refused))
    }

    async fn send(
        &self,
        of: &Statement,
        patient: bool,
        args: Args,
    ) -> Result<Option<Ran>, StoreError> {
        let (pool, options) = (&self.session.pool, &self.session.options);
        let mut connection = match pool.acquire().await {
            Ok(connection) => connection,
            // The server is away, and not the pool too small.
            Err(sqlx::Error::PoolTimedOut) if pool.size() < options.connections => {
                return Err(self.error(StoreErrorKind::Unavailable));
            }
            Err(error) => return Err(self.fault(error)),
        };
        if self.caller.is_closed() {
            return Err(self.error(StoreErrorKind::Timeout));
        }
        let (sql, bound) = match patient {
            false => (&of.sql, options.timeout),
            true => (&of.patient, options.timeout + PATIENCE),
        };
        let query = sqlx::query_with(AssertSqlSafe(Arc::clone(sql)), args.0);
        let ran = timeout(bound, async {
            if of.has_rows {
                return Ok((query.fetch_all(&mut *connection).await?, 0));
            }
            Ok((Vec::new(), query.execute(&mut *connection).await?.rows_affected()))
        });
        match ran.await {
            Ok(Ok(ran)) => Ok(Some(ran)),
            Ok(Err(error)) if is_contended(&error) => Ok(None),
            // Another call has inserted the row in the same moment.
            Ok(Err(error)) if number(&error) == Some(1062) => Ok(Some(Ran::default())),
            Ok(Err(error)) => Err(self.fault(error)),
            // Its reply may come later, so the connection is closed, without another word to a silent server.
            Err(_) => {
                drop(connection.detach());
                Err(self.error(StoreErrorKind::Timeout))
            }
        }
    }
}
