//! [`Target`]: the store that the command line names, and how it is opened.

use std::fs::OpenOptions;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tower_dedup::adapter::maintenance::{MaintenanceAdapter, Stats};
use tower_dedup::adapter::{
    PostgresAdapter, PostgresOptions, Purging, RedisAdapter, RedisOptions, SqliteAdapter,
    SqliteOptions,
};
use tower_dedup::sqlx::postgres::{PgConnectOptions, PgConnection, PgPool, PgPoolOptions};
use tower_dedup::sqlx::sqlite::{
    SqliteConnectOptions, SqliteConnection, SqlitePool, SqlitePoolOptions,
};
use tower_dedup::sqlx::{self, AssertSqlSafe, ConnectOptions, Connection};
use tower_dedup::{StoreError, internals};
use tower_dedup_inbox::Inbox;

use crate::failure::{Failure, NO_INBOX, NO_TABLE, REFUSED, within};

/// A store, before it is opened.
pub(crate) enum Target {
    Postgres(Box<Postgres>),
    Sqlite(Box<Sqlite>),
    Redis(Redis),
    Own(Own),
}

/// An adapter, and what closes it.
type Opened = (Arc<dyn MaintenanceAdapter>, Closing);
type Closing = Pin<Box<dyn Future<Output = ()>>>;

/// Opens a store of the program's author at the URL of the command line.
pub(crate) type Connect = Box<dyn Fn(String) -> Connecting>;
type Connecting = Pin<Box<dyn Future<Output = Result<Arc<dyn MaintenanceAdapter>, StoreError>>>>;

/// A store of the program's author.
pub(crate) struct Own {
    url: String,
    connect: Connect,
    timeout: Duration,
}

pub(crate) struct Postgres {
    options: PostgresOptions,
    connect: PgConnectOptions,
    timeout: Duration,
}

pub(crate) struct Sqlite {
    url: String,
    options: SqliteOptions,
    connect: SqliteConnectOptions,
    /// Looked at once, before the first connection: to close a descriptor of the file drops the locks of this process.
    pub(crate) is_writable: bool,
    pub(crate) timeout: Duration,
}

pub(crate) struct Redis {
    pub(crate) url: String,
    options: RedisOptions,
    pub(crate) timeout: Duration,
}

/// What a command does to the store.
#[derive(Clone, Copy)]
pub(crate) enum Access {
    Read,
    Write,
}

/// Whether the table exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum TableState {
    Missing,
    Older,
    Current,
}

/// The facts of a Postgres server, by `sql/facts.sql`.
#[derive(Deserialize)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
pub(crate) struct Facts {
    pub(crate) is_standby: bool,
    pub(crate) is_read_only: bool,
    pub(crate) fsync: bool,
    pub(crate) full_page_writes: bool,
    pub(crate) tls: Option<bool>,
    /// The connection comes from the server's own machine.
    pub(crate) is_local: bool,
    pub(crate) table: Option<PgTable>,
}

#[derive(Deserialize)]
pub(crate) struct PgTable {
    /// The quoted name of the table.
    name: String,
    /// The quoted name of the table with the version.
    version_table: Option<String>,
    /// The rights that are missing, without DELETE.
    pub(crate) lacks: String,
    pub(crate) may_delete: bool,
    pub(crate) is_unlogged: bool,
    pub(crate) has_index: bool,
}

impl Target {
    /// Reads the URL, unless it is for a store of one's own. Connects to nothing.
    pub(crate) fn new(url: &str, timeout: Duration, own: Option<Connect>) -> Result<Self, Failure> {
        if url.is_empty() {
            return Err(Failure::usage("no store is given: set --store or TOWER_DEDUP_STORE"));
        }
        if let Some(connect) = own {
            return Ok(Self::Own(Own { url: url.to_owned(), connect, timeout }));
        }
        let scheme = url.split(':').next().unwrap_or_default();
        let is_postgres = matches!(scheme, "postgres" | "postgresql");
        match scheme.split('+').next().unwrap_or_default() {
            _ if is_postgres => Ok(Self::Postgres(Postgres::new(url, timeout)?.into())),
            "sqlite" => Ok(Self::Sqlite(Sqlite::new(url, timeout)?.into())),
            "redis" | "rediss" | "valkey" | "valkeys" => Ok(Self::Redis(Redis::new(url, timeout))),
            "memory" => Err(Failure::usage("a memory store exists only in its own process")),
            _ => {
                Err(Failure::usage("the store is no URL of the kind sqlite:, postgres: or redis:"))
            }
        }
    }

    /// Opens the store, whose table must exist, does this work, and closes the store.
    pub(crate) async fn with<T>(
        &self,
        access: Access,
        work: impl AsyncFnOnce(&dyn MaintenanceAdapter) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let (adapter, closing) = match self {
            Self::Postgres(postgres) => postgres.open().await?,
            Self::Sqlite(sqlite) => sqlite.open(access).await?,
            Self::Redis(redis) => {
                let adapter: Arc<dyn MaintenanceAdapter> = Arc::new(redis.open().await?);
                (adapter.clone(), closing(adapter, redis.timeout))
            }
            Self::Own(own) => {
                let connecting = (own.connect)(own.url.clone());
                let adapter = within(own.timeout, async { Ok(connecting.await?) }).await?;
                (adapter.clone(), closing(adapter, own.timeout))
            }
        };
        let done = work(&*adapter).await;
        closing.await;
        done
    }

    /// Opens the inbox whose table this database has, for operators only. Does not make the table, nor a file.
    pub(crate) async fn inbox(&self, table: &str) -> Result<Inbox, Failure> {
        /// Nothing that an operator calls is about one service.
        const SERVICE: &str = "tower-dedup";
        let inbox = match self {
            Self::Postgres(postgres) => Inbox::postgres(postgres.pool(), SERVICE),
            Self::Sqlite(sqlite) => Inbox::sqlite(sqlite.path(), SERVICE),
            Self::Redis(_) => {
                return Err(Failure::usage("an inbox is in a database of Postgres or SQLite"));
            }
            Self::Own(_) => return Err(Failure::own_store()),
        };
        let inbox = inbox.table(table).checked()?;
        match self {
            Self::Postgres(postgres) => {
                let connection = postgres.connect().await?;
                let _ = tokio::time::timeout(postgres.timeout, connection.close()).await;
            }
            Self::Sqlite(sqlite) if !sqlite.has_inbox(table).await? => {
                return Err(Failure::new(REFUSED, NO_INBOX));
            }
            _ => {}
        }
        Ok(inbox)
    }

    pub(crate) async fn stats(&self) -> Result<Stats, Failure> {
        self.with(Access::Read, async |store| Ok(store.stats().await?)).await
    }

    pub(crate) async fn table_state(&self) -> Result<TableState, Failure> {
        match self {
            Self::Postgres(postgres) => postgres.look().await?.1,
            Self::Sqlite(sqlite) if !sqlite.path().exists() => Ok(TableState::Missing),
            Self::Sqlite(sqlite) => sqlite.table(&mut sqlite.connect().await?).await,
            // It has no table. A server that is away is an error here too.
            Self::Redis(_) => self.with(Access::Read, async |_| Ok(TableState::Current)).await,
            Self::Own(_) => Err(Failure::own_store()),
        }
    }

    /// Makes the table, and the file of a SQLite store.
    pub(crate) async fn migrate(&self) -> Result<(), Failure> {
        match self {
            Self::Postgres(postgres) => {
                let pool = postgres.pool();
                let migrated = postgres.adapter(&pool).migrate().await;
                pool.close().await;
                Ok(migrated?)
            }
            Self::Sqlite(sqlite) => {
                let options = sqlite.options.clone();
                let adapter = SqliteAdapter::connect_with(&sqlite.url, options).await?;
                let migrated = adapter.migrate().await;
                adapter.close().await;
                Ok(migrated?)
            }
            Self::Redis(_) | Self::Own(_) => Ok(()),
        }
    }

    pub(crate) fn schema_sql(&self) -> Result<Vec<String>, Failure> {
        match self {
            Self::Postgres(postgres) => Ok(postgres.adapter(&postgres.pool()).schema_sql()),
            Self::Sqlite(sqlite) => Ok(sqlite.adapter(&sqlite.pool(Access::Write)).schema_sql()),
            Self::Redis(_) => Ok(Vec::new()),
            Self::Own(_) => Err(Failure::own_store()),
        }
    }
}

/// Closes an adapter. The network may be silent.
fn closing(adapter: Arc<dyn MaintenanceAdapter>, timeout: Duration) -> Closing {
    Box::pin(async move {
        let _ = tokio::time::timeout(timeout, adapter.close()).await;
    })
}

impl Postgres {
    fn new(url: &str, timeout: Duration) -> Result<Self, Failure> {
        let options = PostgresOptions::new()
            .purging(Purging::off())
            // A session that is set read-only would reach the service through a pooler.
            .make_table(false)
            .statement_timeout(timeout);
        let (options, connect) = options.read_url(url).map_err(Failure::usage)?;
        let connect = connect.application_name("tower-dedup");
        Ok(Self { options, connect, timeout })
    }

    /// Connects. A pool would try until its time is up, and not say what was wrong.
    async fn connect(&self) -> Result<PgConnection, Failure> {
        let connecting = |failure: Failure| {
            Failure::new(failure.code, format!("connecting to Postgres: {}", failure.message))
        };
        within(self.timeout, async { Ok(self.connect.connect().await?) }).await.map_err(connecting)
    }

    fn pool(&self) -> PgPool {
        PgPoolOptions::new()
            .max_connections(2)
            .acquire_timeout(self.timeout)
            .connect_lazy_with(self.connect.clone())
    }

    fn adapter(&self, pool: &PgPool) -> PostgresAdapter {
        PostgresAdapter::with_options(pool.clone(), self.options.clone())
    }

    /// Returns the facts, and the state of the table or why it cannot be read.
    pub(crate) async fn look(&self) -> Result<(Facts, Result<TableState, Failure>), Failure> {
        let mut connection = self.connect().await?;
        let facts = within(self.timeout, self.facts(&mut connection)).await?;
        let version_table = facts.table.as_ref().and_then(|table| table.version_table.as_deref());
        // The last, because a lock of the version table leaves the connection unusable.
        let state = async {
            let state = Self::state(&mut connection, version_table).await;
            // The state stands.
            let _ = connection.close().await;
            state
        };
        let state = within(self.timeout, state).await;
        Ok((facts, state))
    }

    /// Finds the table as the adapter does, and also a table of a schema that the role may not use.
    async fn facts(&self, connection: &mut PgConnection) -> Result<Facts, Failure> {
        let (schema, table) = internals::postgres_table(&self.options);
        // Without a name, which fails behind some poolers before `doctor` can say so.
        let facts = sqlx::query_scalar(include_str!("sql/facts.sql"))
            .persistent(false)
            .bind(table)
            .bind(schema);
        let facts: String = facts.fetch_one(connection).await?;
        let unreadable = |error| Failure::new(REFUSED, format!("reading the facts: {error}"));
        serde_json::from_str(&facts).map_err(unreadable)
    }

    async fn state(
        connection: &mut PgConnection,
        version_table: Option<&str>,
    ) -> Result<TableState, Failure> {
        let Some(version_table) = version_table else { return Ok(TableState::Missing) };
        let version = format!("SELECT coalesce(max(version), 0) FROM {version_table}");
        let version = sqlx::query_scalar(AssertSqlSafe(version)).persistent(false);
        let version: i32 = version.fetch_one(connection).await?;
        let is_current = version >= internals::POSTGRES_SCHEMA_VERSION;
        Ok(if is_current { TableState::Current } else { TableState::Older })
    }

    /// Takes the lock of a statement that writes to the table, and gives it back. Fails after the timeout if another
    /// session has locked the table.
    pub(crate) async fn lock(&self, table: &PgTable) -> Result<(), Failure> {
        // Below the timeout, so that no session is left that waits for the lock.
        let bound = (self.timeout.as_millis() * 9 / 10).max(1);
        let sql = format!(
            "BEGIN; SET LOCAL lock_timeout = '{bound}ms'; LOCK TABLE {} IN ROW EXCLUSIVE MODE; ROLLBACK",
            table.name
        );
        let mut connection = self.connect().await?;
        let lock = async {
            sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut connection).await?;
            let _ = connection.close().await;
            Ok(())
        };
        within(self.timeout, lock).await
    }

    /// Opens an adapter that does not make the table.
    async fn open(&self) -> Result<Opened, Failure> {
        let (connection, timeout) = (self.connect().await?, self.timeout);
        let _ = tokio::time::timeout(timeout, connection.close()).await;
        let pool = self.pool();
        let adapter = Arc::new(self.adapter(&pool));
        // The network may be silent. The server ends a connection whose process has ended.
        let closing = async move {
            let _ = tokio::time::timeout(timeout, pool.close()).await;
        };
        Ok((adapter, Box::pin(closing)))
    }
}

impl Sqlite {
    fn new(url: &str, timeout: Duration) -> Result<Self, Failure> {
        let options = SqliteOptions::new().purging(Purging::off()).write_lock_timeout(timeout);
        let (options, connect) = options.read_url(url).map_err(Failure::usage)?;
        let connect = connect.busy_timeout(timeout);
        let is_writable = OpenOptions::new().write(true).open(connect.get_filename()).is_ok();
        Ok(Self { url: url.to_owned(), options, connect, is_writable, timeout })
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.connect.get_filename().to_owned()
    }

    /// Returns how to open the file without changing its keys.
    ///
    /// If the file can be written, the connection can write too, but for its `query_only`: its close
    /// deletes the files `-wal` and `-shm`, which a connection that cannot write would make and leave.
    /// Left by another user, they would stop the service.
    fn for_reading(&self) -> SqliteConnectOptions {
        let connect = self.connect.clone();
        if self.is_writable { connect.pragma("query_only", "ON") } else { connect.read_only(true) }
    }

    fn pool(&self, access: Access) -> SqlitePool {
        let connect = match access {
            Access::Read => self.for_reading(),
            Access::Write => self.connect.clone(),
        };
        SqlitePoolOptions::new().max_connections(2).connect_lazy_with(connect)
    }

    /// Returns an adapter over a pool, because its own pool would set WAL mode.
    fn adapter(&self, pool: &SqlitePool) -> SqliteAdapter {
        SqliteAdapter::with_options(pool.clone(), self.options.clone())
    }

    /// Opens a connection that does not write.
    pub(crate) async fn connect(&self) -> Result<SqliteConnection, Failure> {
        let path = self.path();
        if !path.exists() {
            let message = format!("there is no file {}: run `tower-dedup migrate`", path.display());
            return Err(Failure::new(REFUSED, message));
        }
        Ok(self.for_reading().connect().await?)
    }

    pub(crate) async fn table(
        &self,
        connection: &mut SqliteConnection,
    ) -> Result<TableState, Failure> {
        let table = internals::sqlite_table(&self.options);
        let tables = sqlx::query_scalar(
            "SELECT count(*) FROM sqlite_schema WHERE type = 'table' AND name IN (?1, ?1 || '_schema')",
        );
        let tables: i64 = tables.bind(table).fetch_one(&mut *connection).await?;
        if tables != 2 {
            return Ok(TableState::Missing);
        }
        let version = format!("SELECT coalesce(max(version), 0) FROM \"{table}_schema\"");
        let version: i64 = sqlx::query_scalar(AssertSqlSafe(version)).fetch_one(connection).await?;
        let is_current = version >= internals::SQLITE_SCHEMA_VERSION;
        Ok(if is_current { TableState::Current } else { TableState::Older })
    }

    /// Looks for the table of an inbox, which would make a file that is missing.
    pub(crate) async fn has_inbox(&self, table: &str) -> Result<bool, Failure> {
        let path = self.path();
        if !path.exists() {
            return Err(Failure::new(REFUSED, format!("there is no file {}", path.display())));
        }
        let mut connection = self.connect().await?;
        let found = sqlx::query("SELECT 1 FROM sqlite_schema WHERE type = 'table' AND name = ?1");
        let found = found.bind(table).fetch_optional(&mut connection).await?;
        connection.close().await?;
        Ok(found.is_some())
    }

    /// Takes the lock of a statement that writes to the file, and gives it back. Fails after the timeout if another
    /// process has locked the file.
    pub(crate) async fn lock(&self) -> Result<(), Failure> {
        let mut connection = self.connect.connect().await?;
        sqlx::raw_sql("BEGIN IMMEDIATE; ROLLBACK").execute(&mut connection).await?;
        Ok(connection.close().await?)
    }

    async fn open(&self, access: Access) -> Result<Opened, Failure> {
        let mut connection = self.connect().await?;
        let state = self.table(&mut connection).await?;
        connection.close().await?;
        if state != TableState::Current {
            return Err(Failure::new(REFUSED, NO_TABLE));
        }
        let pool = self.pool(access);
        let adapter = Arc::new(self.adapter(&pool));
        let opened = adapter.clone();
        let closing = async move {
            adapter.close().await;
            pool.close().await;
        };
        Ok((opened, Box::pin(closing)))
    }
}

impl Redis {
    fn new(url: &str, timeout: Duration) -> Self {
        let options = RedisOptions::new()
            // `doctor` reports it. The other commands work on such a server too.
            .evictable(true)
            .call_timeout(timeout)
            .response_timeout(timeout)
            .connect_timeout(timeout);
        Self { url: url.to_owned(), options, timeout }
    }

    pub(crate) async fn open(&self) -> Result<RedisAdapter, Failure> {
        let connect = RedisAdapter::connect_with(&self.url, self.options.clone());
        within(self.timeout, async { Ok(connect.await?) }).await
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::os::unix::fs::MetadataExt;
    use std::{fs, process};

    use super::*;

    /// Returns how many locks this process has on a file.
    fn locks(path: &std::path::Path) -> usize {
        let (pid, inode) = (process::id().to_string(), fs::metadata(path).unwrap().ino());
        let is_ours = |lock: &&str| {
            let mut fields = lock.split_whitespace().skip(4);
            fields.next() == Some(&pid)
                && fields.next().is_some_and(|file| file.ends_with(&format!(":{inode}")))
        };
        fs::read_to_string("/proc/locks").unwrap().lines().filter(is_ours).count()
    }

    /// Without its lock, another process may delete the WAL below the connection.
    #[tokio::test]
    async fn open_connection_keeps_its_locks_beside_another_command() {
        let dir = tempfile::tempdir().unwrap();
        let url = format!("sqlite://{}", dir.path().join("dedup.db").display());
        let service = SqliteAdapter::connect(&url).await.unwrap();
        service.migrate().await.unwrap();
        service.close().await;
        let target = Target::new(&url, Duration::from_secs(10), None).ok().unwrap();
        let Target::Sqlite(sqlite) = &target else { panic!("a file") };
        let mut connection = sqlite.connect().await.ok().unwrap();
        let state = sqlite.table(&mut connection).await;
        assert_eq!(state.ok(), Some(TableState::Current));
        let before = locks(&sqlite.path());
        assert!(before > 0, "WAL mode holds a lock");
        assert_eq!(target.stats().await.map(|stats| stats.rows).ok(), Some(0));
        assert_eq!(locks(&sqlite.path()), before);
    }
}
