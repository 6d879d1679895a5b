//! [`Target`]: the store that the command line names, and how it is opened.

mod redis;

use std::fs::OpenOptions;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tower_dedup::adapter::{
    MaintenanceAdapter, PostgresAdapter, PostgresOptions, Purging, SqliteAdapter, SqliteOptions,
};
use tower_dedup::sqlx::postgres::{PgConnectOptions, PgConnection, PgPool, PgPoolOptions};
use tower_dedup::sqlx::sqlite::{
    SqliteConnectOptions, SqliteConnection, SqlitePool, SqlitePoolOptions,
};
use tower_dedup::sqlx::{self, AssertSqlSafe, ConnectOptions, Connection};

use crate::failure::{Failure, NO_TABLE, REFUSED, UNAVAILABLE, within};
use crate::options::Global;
pub(crate) use redis::Redis;

/// A store, before it is opened.
pub(crate) enum Target {
    Postgres(Postgres),
    Sqlite(Sqlite),
    Redis(Redis),
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

/// What a command does to the store.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
}

/// An open store, whose table exists if it has one.
pub(crate) struct Store {
    pub(crate) adapter: Arc<dyn MaintenanceAdapter>,
    timeout: Duration,
    pools: Pools,
}

enum Pools {
    Postgres(PgPool),
    /// With the pool of a store that is open for reading; the adapter has the pool otherwise.
    Sqlite(Option<SqlitePool>),
    /// The adapter has the connections.
    Redis,
}

/// Where the table is in Postgres.
#[derive(Debug, Clone)]
pub(crate) struct PgTable {
    pub(crate) oid: i64,
    schema: String,
    has_version: bool,
}

/// Whether the table exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TableState {
    Missing,
    Older,
    Current,
}

impl Target {
    /// Reads the URL. Connects to nothing.
    pub(crate) fn new(global: &Global) -> Result<Self, Failure> {
        let url = global.store.as_deref().unwrap_or_default();
        let timeout = global.timeout;
        match url.split(':').next().unwrap_or_default() {
            "postgres" | "postgresql" => {
                let mut options = PostgresOptions::new()
                    .purging(Purging::off())
                    // A session that is set read-only would reach the service through a pooler.
                    .make_table(false)
                    .statement_timeout(timeout);
                if let Some(table) = global.table.clone() {
                    options = options.table(table);
                }
                if let Some(schema) = global.schema.clone() {
                    options = options.schema(schema);
                }
                let (options, connect) = options.read_url(url)?;
                let connect = connect.application_name("tower-dedup");
                Ok(Self::Postgres(Postgres { options, connect, timeout }))
            }
            "sqlite" if global.schema.is_some() => Err(Failure::usage("--schema is for Postgres")),
            "sqlite" => {
                let mut options =
                    SqliteOptions::new().purging(Purging::off()).write_lock_timeout(timeout);
                if let Some(table) = global.table.clone() {
                    options = options.table(table);
                }
                let (options, connect) = options.read_url(url)?;
                let connect = connect.busy_timeout(timeout);
                Ok(Self::Sqlite(Sqlite { url: url.to_owned(), options, connect, timeout }))
            }
            scheme if redis::is_redis(scheme) => Ok(Self::Redis(Redis::new(url, global)?)),
            "memory" => Err(Failure::usage("a memory store exists only in its own process")),
            "" => Err(Failure::usage("no store is given: set --store or TOWER_DEDUP_STORE")),
            _ => {
                Err(Failure::usage("the store is no URL of the kind sqlite:, postgres: or redis:"))
            }
        }
    }

    /// Sets whether `migrate` and `schema_sql` also make the function that records a key.
    pub(crate) fn record_function(self, make: bool) -> Result<Self, Failure> {
        match self {
            Self::Postgres(Postgres { options, connect, timeout }) => {
                let options = options.record_function(make);
                Ok(Self::Postgres(Postgres { options, connect, timeout }))
            }
            _ if make => Err(Failure::usage("--record-function is for Postgres")),
            other => Ok(other),
        }
    }

    /// Opens the store, whose table must exist.
    pub(crate) async fn open(&self, access: Access) -> Result<Store, Failure> {
        match self {
            Self::Postgres(postgres) => postgres.open().await,
            Self::Sqlite(sqlite) => sqlite.open(access).await,
            Self::Redis(redis) => {
                let adapter = Arc::new(redis.connect().await?);
                Ok(Store { adapter, timeout: redis.timeout, pools: Pools::Redis })
            }
        }
    }

    pub(crate) async fn table_state(&self) -> Result<TableState, Failure> {
        match self {
            Self::Postgres(postgres) => {
                let mut connection = postgres.connect().await?;
                let work = async {
                    let table = postgres.find(&mut connection).await?;
                    postgres.state(&mut connection, table.as_ref()).await
                };
                within(postgres.timeout, work).await
            }
            Self::Sqlite(sqlite) if !sqlite.path().exists() => Ok(TableState::Missing),
            Self::Sqlite(sqlite) => sqlite.table(&mut sqlite.connect().await?).await,
            // It has no table. A server that is away is an error here too.
            Self::Redis(_) => {
                self.open(Access::Read).await?.close().await;
                Ok(TableState::Current)
            }
        }
    }

    /// Makes the table, and the file of a SQLite store.
    pub(crate) async fn migrate(&self) -> Result<(), Failure> {
        match self {
            Self::Postgres(postgres) => {
                drop(postgres.connect().await?);
                let pool = postgres.pool();
                let adapter = PostgresAdapter::with_options(pool.clone(), postgres.options.clone());
                let migrated = adapter.migrate().await;
                adapter.close().await;
                pool.close().await;
                Ok(migrated?)
            }
            Self::Sqlite(sqlite) => {
                let adapter = sqlite.writer().await?;
                let migrated = adapter.migrate().await;
                adapter.close().await;
                Ok(migrated?)
            }
            Self::Redis(_) => Ok(()),
        }
    }

    pub(crate) fn schema_sql(&self) -> Vec<String> {
        match self {
            Self::Postgres(postgres) => {
                PostgresAdapter::with_options(postgres.pool(), postgres.options.clone())
                    .schema_sql()
            }
            Self::Sqlite(sqlite) => {
                let pool = SqlitePoolOptions::new().connect_lazy_with(sqlite.connect.clone());
                SqliteAdapter::with_options(pool, sqlite.options.clone()).schema_sql()
            }
            Self::Redis(_) => Vec::new(),
        }
    }

    /// Returns `false` for Redis.
    pub(crate) fn has_table(&self) -> bool {
        !matches!(self, Self::Redis(_))
    }

    /// Returns the table's name as in `schema.table`; for Redis, what all keys begin with.
    pub(crate) fn table_name(&self) -> String {
        match self {
            Self::Postgres(postgres) => match postgres.options.schema_name() {
                Some(schema) => format!("{schema}.{}", postgres.options.table_name()),
                None => postgres.options.table_name().to_string(),
            },
            Self::Sqlite(sqlite) => sqlite.options.table_name().to_string(),
            Self::Redis(redis) => redis.prefix(),
        }
    }
}

impl Store {
    /// Closes the connections: those to a server within `--timeout`, because the network may be silent.
    pub(crate) async fn close(&self) {
        match &self.pools {
            Pools::Postgres(pool) => {
                let close = async {
                    self.adapter.close().await;
                    pool.close().await;
                };
                // The server ends a connection whose process has ended.
                let _ = tokio::time::timeout(self.timeout, close).await;
            }
            Pools::Sqlite(pool) => {
                self.adapter.close().await;
                if let Some(pool) = pool {
                    pool.close().await;
                }
            }
            Pools::Redis => {
                let _ = tokio::time::timeout(self.timeout, self.adapter.close()).await;
            }
        }
    }
}

impl Postgres {
    /// Connects. A pool would try until its time is up, and not say what was wrong.
    pub(crate) async fn connect(&self) -> Result<PgConnection, Failure> {
        let connected = tokio::time::timeout(self.timeout, self.connect.connect()).await;
        let connected = connected.map_err(|_| {
            Failure::new(UNAVAILABLE, "connecting to Postgres: the store timed out")
        })?;
        connected.map_err(|error| {
            let failure = Failure::from(error);
            Failure { message: format!("connecting to Postgres: {}", failure.message), ..failure }
        })
    }

    fn pool(&self) -> PgPool {
        PgPoolOptions::new()
            .max_connections(2)
            .acquire_timeout(self.timeout)
            .connect_lazy_with(self.connect.clone())
    }

    /// Finds the table as the adapter does, and also a table of a schema that the role may not use.
    pub(crate) async fn find(
        &self,
        connection: &mut PgConnection,
    ) -> Result<Option<PgTable>, Failure> {
        // Without names, which fail behind some poolers before `doctor` can say so.
        let found = sqlx::query_as(include_str!("sql/table.sql"))
            .persistent(false)
            .bind(self.options.table_name().as_str())
            .bind(self.options.schema_name());
        let found: Option<(i64, String, bool)> = found.fetch_optional(connection).await?;
        Ok(found.map(|(oid, schema, has_version)| PgTable { oid, schema, has_version }))
    }

    /// Reads the version of a table that was found.
    pub(crate) async fn state(
        &self,
        connection: &mut PgConnection,
        table: Option<&PgTable>,
    ) -> Result<TableState, Failure> {
        let Some(table) = table.filter(|table| table.has_version) else {
            return Ok(TableState::Missing);
        };
        let (schema, name) = (table.schema.replace('"', "\"\""), self.options.table_name());
        let version =
            format!("SELECT coalesce(max(version), 0) FROM \"{schema}\".\"{name}_schema\"");
        let version = sqlx::query_scalar(AssertSqlSafe(version)).persistent(false);
        let version: i32 = version.fetch_one(connection).await?;
        let is_current = version >= PostgresAdapter::SCHEMA_VERSION;
        Ok(if is_current { TableState::Current } else { TableState::Older })
    }

    async fn open(&self) -> Result<Store, Failure> {
        let mut connection = self.connect().await?;
        let work = async {
            let table = self.find(&mut connection).await?;
            let state = self.state(&mut connection, table.as_ref()).await?;
            connection.close().await?;
            Ok(state)
        };
        let state = within(self.timeout, work).await?;
        if state != TableState::Current {
            return Err(Failure::new(REFUSED, NO_TABLE));
        }
        Ok(self.open_pool())
    }

    /// Opens the adapter over a pool. The table was found, so that the adapter does not make it.
    pub(crate) fn open_pool(&self) -> Store {
        let pool = self.pool();
        let adapter = PostgresAdapter::with_options(pool.clone(), self.options.clone());
        Store { adapter: Arc::new(adapter), timeout: self.timeout, pools: Pools::Postgres(pool) }
    }
}

impl Sqlite {
    pub(crate) fn path(&self) -> PathBuf {
        self.connect.get_filename().to_owned()
    }

    /// Returns how to open the file without changing its keys.
    ///
    /// If the file can be written, the connection can write too, but for its `query_only`: its close
    /// deletes the files `-wal` and `-shm`, which a connection that cannot write would make and leave.
    /// Left by another user, they would stop the service.
    fn for_reading(&self) -> SqliteConnectOptions {
        let is_writable = OpenOptions::new().write(true).open(self.path()).is_ok();
        let connect = self.connect.clone();
        if is_writable { connect.pragma("query_only", "ON") } else { connect.read_only(true) }
    }

    /// Opens a connection that does not write.
    pub(crate) async fn connect(&self) -> Result<SqliteConnection, Failure> {
        if !self.path().exists() {
            let path = self.path();
            return Err(Failure::new(
                REFUSED,
                format!("there is no file {}: run `tower-dedup migrate`", path.display()),
            ));
        }
        Ok(self.for_reading().connect().await?)
    }

    pub(crate) async fn table(
        &self,
        connection: &mut SqliteConnection,
    ) -> Result<TableState, Failure> {
        let table = self.options.table_name();
        let tables = sqlx::query_scalar(
            "SELECT count(*) FROM sqlite_schema WHERE type = 'table' AND name IN (?1, ?1 || '_schema')",
        );
        let tables: i64 = tables.bind(table.as_str()).fetch_one(&mut *connection).await?;
        if tables != 2 {
            return Ok(TableState::Missing);
        }
        let version = format!("SELECT coalesce(max(version), 0) FROM \"{table}_schema\"");
        let version: i64 = sqlx::query_scalar(AssertSqlSafe(version)).fetch_one(connection).await?;
        let is_current = version >= SqliteAdapter::SCHEMA_VERSION;
        Ok(if is_current { TableState::Current } else { TableState::Older })
    }

    async fn writer(&self) -> Result<SqliteAdapter, Failure> {
        Ok(SqliteAdapter::connect_with(&self.url, self.options.clone()).await?)
    }

    async fn open(&self, access: Access) -> Result<Store, Failure> {
        let mut connection = self.connect().await?;
        let state = self.table(&mut connection).await?;
        connection.close().await?;
        if state != TableState::Current {
            return Err(Failure::new(REFUSED, NO_TABLE));
        }
        if access == Access::Write {
            let adapter = Arc::new(self.writer().await?);
            return Ok(Store { adapter, timeout: self.timeout, pools: Pools::Sqlite(None) });
        }
        Ok(self.open_reader())
    }

    /// Opens the adapter over a pool that does not write. The adapter's own would set WAL mode.
    pub(crate) fn open_reader(&self) -> Store {
        let connect = self.for_reading();
        let pool = SqlitePoolOptions::new().max_connections(2).connect_lazy_with(connect);
        let adapter = SqliteAdapter::with_options(pool.clone(), self.options.clone());
        Store {
            adapter: Arc::new(adapter),
            timeout: self.timeout,
            pools: Pools::Sqlite(Some(pool)),
        }
    }
}
