//! The effects of the handlers: one row per run, in the store that holds the keys or in `--effects`.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use backon::{ExponentialBuilder, Retryable};
use serde::Serialize;
use sqlx::postgres::{PgConnection, PgPool, PgPoolOptions, Postgres};
use sqlx::sqlite::{
    Sqlite, SqliteConnectOptions, SqliteConnection, SqliteJournalMode, SqlitePool,
    SqlitePoolOptions, SqliteSynchronous,
};
use sqlx::{Executor, Pool, Result};
use tokio::sync::Mutex;
use tokio::time::timeout;
use tower_dedup::DedupKey;
use tower_dedup::adapter::CompletionDatabase;

// Valid on both databases.
const CREATE: &str = "CREATE TABLE IF NOT EXISTS effects (\
     namespace TEXT NOT NULL, id TEXT NOT NULL, attempt BIGINT NOT NULL, \
     at TIMESTAMP NOT NULL DEFAULT CURRENT_TIMESTAMP)";
const INSERT: &str = "INSERT INTO effects (namespace, id, attempt) VALUES ($1, $2, $3)";
const LIST: &str = "SELECT namespace, id, count(*) FROM effects \
     GROUP BY namespace, id ORDER BY namespace, id";
/// The first pause before a file that another process holds is opened again. Pauses double.
const RETRY_DELAY: Duration = Duration::from_millis(50);
const RETRIES: usize = 6;

#[derive(Debug, Clone)]
pub(crate) enum Effects {
    Memory(Arc<Mutex<BTreeMap<(String, String), i64>>>),
    Sqlite(SqlitePool),
    Postgres(PgPool),
}

/// The time limit of a handler's statement, because a silent connection never replies.
const BOUND: Duration = Duration::from_secs(5);

/// How long a connection that comes back to the pool may take to end what was left open.
const ENDS: Duration = Duration::from_secs(1);

/// Runs statements of a handler within [`BOUND`].
pub(crate) async fn bounded<T>(statements: impl Future<Output = Result<T>>) -> Result<T> {
    let late = |_| Err(sqlx::Error::Io(std::io::ErrorKind::TimedOut.into()));
    timeout(BOUND, statements).await.unwrap_or_else(late)
}

/// Returns `true` if another process holds the SQLite file (`SQLITE_BUSY`, in the lowest 8 bits).
fn is_busy(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(|error| error.code()?.parse::<u32>().ok());
    code.is_some_and(|code| code & 0xff == 5)
}

/// How often the handler ran successfully for one key. The expected count is 1.
#[derive(Debug, Serialize)]
pub(crate) struct Effect {
    namespace: String,
    id: String,
    count: i64,
}

/// A database in which a handler's transaction can write effects.
pub(crate) trait Table: CompletionDatabase {
    /// Returns the pool, if the effects are in this kind of database.
    fn pool(effects: &Effects) -> Option<&Pool<Self>>;

    fn add(
        connection: &mut Self::Connection,
        key: &DedupKey,
        attempt: u32,
    ) -> impl Future<Output = Result<()>> + Send;
}

impl Table for Sqlite {
    fn pool(effects: &Effects) -> Option<&SqlitePool> {
        match effects {
            Effects::Sqlite(pool) => Some(pool),
            _ => None,
        }
    }

    async fn add(connection: &mut SqliteConnection, key: &DedupKey, attempt: u32) -> Result<()> {
        let insert = sqlx::query(INSERT).bind(key.namespace()).bind(key.id());
        insert.bind(i64::from(attempt)).execute(connection).await.map(drop)
    }
}

impl Table for Postgres {
    fn pool(effects: &Effects) -> Option<&PgPool> {
        match effects {
            Effects::Postgres(pool) => Some(pool),
            _ => None,
        }
    }

    async fn add(connection: &mut PgConnection, key: &DedupKey, attempt: u32) -> Result<()> {
        let insert = sqlx::query(INSERT).bind(key.namespace()).bind(key.id());
        insert.bind(i64::from(attempt)).execute(connection).await.map(drop)
    }
}

impl Effects {
    /// Opens the table in the database at this URL.
    pub(crate) async fn connect(url: &str) -> Result<Self> {
        if url.starts_with("memory:") {
            return Ok(Self::Memory(Arc::default()));
        }
        if url.starts_with("sqlite:") {
            let options = url.parse::<SqliteConnectOptions>()?.create_if_missing(true);
            // As the adapter opens its own file.
            let options = options.journal_mode(SqliteJournalMode::Wal);
            let options = options.synchronous(SqliteSynchronous::Full);
            // SQLite refuses the switch to WAL at once, without a busy timeout, while another process
            // makes it: receivers may start together.
            let open = async || {
                let pool = SqlitePoolOptions::new().max_connections(1);
                let pool = pool.connect_with(options.clone()).await?;
                sqlx::query(CREATE).execute(&pool).await?;
                Ok(Self::Sqlite(pool))
            };
            let retries = ExponentialBuilder::new().with_min_delay(RETRY_DELAY).with_jitter();
            return open.retry(retries.with_max_times(RETRIES)).when(is_busy).await;
        }
        // A handler that is dropped may leave a transaction open, or a connection on which nothing comes any more.
        let options = PgPoolOptions::new().max_connections(10).after_release(|connection, _| {
            Box::pin(async move {
                let ended = timeout(ENDS, connection.execute("BEGIN; ROLLBACK")).await;
                Ok(matches!(ended, Ok(Ok(_)))) // otherwise the connection is closed
            })
        });
        let pool = options.connect(url).await?;
        // `IF NOT EXISTS` can fail when receivers start together, so they take a lock.
        let mut tx = pool.begin().await?;
        sqlx::query("SELECT pg_advisory_xact_lock(3000)").execute(&mut *tx).await?;
        sqlx::query(CREATE).execute(&mut *tx).await?;
        tx.commit().await?;
        Ok(Self::Postgres(pool))
    }

    /// Adds an effect on a connection of the pool.
    pub(crate) async fn add(&self, key: &DedupKey, attempt: u32) -> Result<()> {
        match self {
            Self::Memory(counts) => {
                let key = (key.namespace().to_owned(), key.id().to_owned());
                *counts.lock().await.entry(key).or_default() += 1;
                Ok(())
            }
            Self::Sqlite(pool) => Sqlite::add(&mut *pool.acquire().await?, key, attempt).await,
            Self::Postgres(pool) => {
                let add = async { Postgres::add(&mut *pool.acquire().await?, key, attempt).await };
                bounded(add).await
            }
        }
    }

    pub(crate) async fn list(&self) -> Result<Vec<Effect>> {
        let rows: Vec<(String, String, i64)> = match self {
            Self::Memory(counts) => {
                let counts = counts.lock().await;
                counts.iter().map(|((space, id), n)| (space.clone(), id.clone(), *n)).collect()
            }
            Self::Sqlite(pool) => sqlx::query_as(LIST).fetch_all(pool).await?,
            Self::Postgres(pool) => bounded(sqlx::query_as(LIST).fetch_all(pool)).await?,
        };
        let effect = |(namespace, id, count)| Effect { namespace, id, count };
        Ok(rows.into_iter().map(effect).collect())
    }

    pub(crate) async fn close(&self) {
        match self {
            Self::Memory(_) => {}
            Self::Sqlite(pool) => pool.close().await,
            Self::Postgres(pool) => pool.close().await,
        }
    }
}
