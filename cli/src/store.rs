//! [`Target`]: the store that the command line names, and how it is opened.

use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
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
use tower_dedup::{DedupKey, StoreError, internals};
use tower_dedup_inbox::Inbox;

use crate::failure::{Failure, MIGRATE, NO_INBOX, NO_TABLE, REFUSED, within};

const CONNECTING: &str = "connecting to the store";

/// A store, before it is opened.
pub(crate) enum Target {
    Postgres(Box<Postgres>),
    Sqlite(Box<Sqlite>),
    Redis(Redis),
    Own(Own),
}

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
    pub(crate) timeout: Duration,
}

pub(crate) struct Sqlite {
    url: String,
    options: SqliteOptions,
    connect: SqliteConnectOptions,
    pub(crate) timeout: Duration,
}

pub(crate) struct Redis {
    pub(crate) url: String,
    options: RedisOptions,
    pub(crate) timeout: Duration,
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
        work: impl AsyncFnOnce(&dyn MaintenanceAdapter) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        match self {
            Self::Postgres(postgres) => {
                let pool = postgres.connected().await?;
                let done = work(&postgres.adapter(&pool)).await;
                closed(postgres.timeout, pool.close()).await;
                done
            }
            Self::Sqlite(sqlite) => {
                if !sqlite.path().exists() {
                    let message = format!("there is no file {}{MIGRATE}", sqlite.path().display());
                    return Err(Failure::new(REFUSED, message));
                }
                let pool = sqlite.pool();
                let adapter = sqlite.adapter(&pool);
                // A call would make it.
                let done = match internals::has_sqlite_table(&adapter).await {
                    Ok(true) => work(&adapter).await,
                    Ok(false) => Err(Failure::new(REFUSED, NO_TABLE)),
                    Err(error) => Err(error.into()),
                };
                adapter.close().await;
                pool.close().await;
                done
            }
            Self::Redis(redis) => {
                let adapter = redis.open().await?;
                let done = work(&adapter).await;
                closed(redis.timeout, adapter.close()).await;
                done
            }
            Self::Own(own) => {
                let connecting = (own.connect)(own.url.clone());
                let adapter =
                    within(own.timeout, CONNECTING, async { Ok(connecting.await?) }).await?;
                let done = work(&*adapter).await;
                closed(own.timeout, adapter.close()).await;
                done
            }
        }
    }

    /// Opens the inbox whose table this database has, for operators only. Does not make the table, nor a file.
    pub(crate) async fn inbox(&self, table: &str) -> Result<Inbox, Failure> {
        /// Nothing that an operator calls is about one service.
        const SERVICE: &str = "tower-dedup";
        match self {
            Self::Postgres(postgres) => {
                let inbox = Inbox::postgres(postgres.pool(), SERVICE).table(table).checked()?;
                postgres.connected().await?;
                Ok(inbox)
            }
            Self::Sqlite(sqlite) => {
                let inbox = Inbox::sqlite(sqlite.path(), SERVICE).table(table).checked()?;
                let mut connection = sqlite.connect().await?;
                let find = "SELECT 1 FROM sqlite_schema WHERE type = 'table' AND name = ?1";
                let found = sqlx::query(find).bind(table).fetch_optional(&mut connection).await?;
                connection.close().await?;
                found.map(|_| inbox).ok_or_else(|| Failure::new(REFUSED, NO_INBOX))
            }
            Self::Redis(_) => {
                Err(Failure::usage("an inbox is in a database of Postgres or SQLite"))
            }
            Self::Own(_) => Err(Failure::own_store()),
        }
    }

    pub(crate) async fn stats(&self) -> Result<Stats, Failure> {
        self.with(async |store| Ok(store.stats().await?)).await
    }

    /// Reads the table as the service does, with every column. Returns why it cannot be read.
    pub(crate) async fn read_table(&self) -> Result<(), Failure> {
        if matches!(self, Self::Own(_)) {
            return Err(Failure::own_store());
        }
        let key = DedupKey::new("tower-dedup.doctor", "table").expect("a key");
        self.with(async |store| Ok(store.get(&key).await.map(drop)?)).await
    }

    /// Makes the table, and the file of a SQLite store.
    pub(crate) async fn migrate(&self) -> Result<(), Failure> {
        match self {
            Self::Postgres(postgres) => {
                let pool = postgres.pool();
                let migrated = postgres.adapter(&pool).migrate().await;
                closed(postgres.timeout, pool.close()).await;
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
            Self::Sqlite(sqlite) => Ok(sqlite.adapter(&sqlite.pool()).schema_sql()),
            Self::Redis(_) => Ok(Vec::new()),
            Self::Own(_) => Err(Failure::own_store()),
        }
    }
}

/// Waits until a store is closed. The network may be silent, and a server ends a connection whose process has ended.
async fn closed<T>(timeout: Duration, closing: impl Future<Output = T>) {
    let _ = tokio::time::timeout(timeout, closing).await;
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
        let connecting = |error| {
            let Failure { code, message } = Failure::from(error);
            Failure { code, message: format!("{CONNECTING}: {message}") }
        };
        let connect = async { self.connect.connect().await.map_err(connecting) };
        within(self.timeout, CONNECTING, connect).await
    }

    /// Returns a pool whose server takes connections.
    async fn connected(&self) -> Result<PgPool, Failure> {
        let connection = self.connect().await?;
        closed(self.timeout, connection.close()).await;
        Ok(self.pool())
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

    /// Returns the facts. Finds the table as the adapter does, and also a table of a schema that the role may not use.
    pub(crate) async fn facts(&self) -> Result<Facts, Failure> {
        let (schema, table) = internals::postgres_table(&self.options);
        // Without a name, which fails behind some poolers before `doctor` can say so.
        let facts = sqlx::query_scalar(include_str!("sql/facts.sql"))
            .persistent(false)
            .bind(table)
            .bind(schema);
        let mut connection = self.connect().await?;
        let facts = within(self.timeout, "reading the facts", async {
            let facts: String = facts.fetch_one(&mut connection).await?;
            let _ = connection.close().await;
            Ok(facts)
        });
        let unreadable = |error| Failure::new(REFUSED, format!("reading the facts: {error}"));
        serde_json::from_str(&facts.await?).map_err(unreadable)
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
        within(self.timeout, "locking the table", lock).await
    }
}

impl Sqlite {
    fn new(url: &str, timeout: Duration) -> Result<Self, Failure> {
        let options = SqliteOptions::new().purging(Purging::off()).write_lock_timeout(timeout);
        let (options, connect) = options.read_url(url).map_err(Failure::usage)?;
        let connect = connect.busy_timeout(timeout);
        Ok(Self { url: url.to_owned(), options, connect, timeout })
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.connect.get_filename().to_owned()
    }

    /// The last connection deletes the files `-wal` and `-shm`. One that may not write would make and leave them, and those
    /// of another user stop the service.
    fn pool(&self) -> SqlitePool {
        SqlitePoolOptions::new().max_connections(2).connect_lazy_with(self.connect.clone())
    }

    /// Returns an adapter over a pool, because its own pool would set WAL mode.
    fn adapter(&self, pool: &SqlitePool) -> SqliteAdapter {
        SqliteAdapter::with_options(pool.clone(), self.options.clone())
    }

    /// Opens a connection to a file that exists.
    pub(crate) async fn connect(&self) -> Result<SqliteConnection, Failure> {
        let path = self.path();
        if !path.exists() {
            return Err(Failure::new(REFUSED, format!("there is no file {}", path.display())));
        }
        Ok(self.connect.connect().await?)
    }

    /// Takes the lock of a statement that writes to the file, and gives it back. Fails after the timeout if another
    /// process has locked the file.
    pub(crate) async fn lock(&self) -> Result<(), Failure> {
        let mut connection = self.connect.connect().await?;
        sqlx::raw_sql("BEGIN IMMEDIATE; ROLLBACK").execute(&mut connection).await?;
        Ok(connection.close().await?)
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
        within(self.timeout, CONNECTING, async { Ok(connect.await?) }).await
    }
}
