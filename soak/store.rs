//! The stores, and what is done to them.

use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{ConnectOptions, Connection, Executor, PgConnection};
use tempfile::TempDir;
use tokio::time::{Instant, sleep};

use crate::effects::Database;
use crate::log::Kind;
use crate::row::StoreKind;
use support::cluster::{Cluster, blocking, scalar};
use support::postgres::Server;
use support::redis::link::Link;
use support::redis::{self, SentinelSet};
use support::sqlite_url;

/// A server serves again within this time.
const SERVES: Duration = Duration::from_secs(60);
/// How often a server is looked at.
const SHORTLY: Duration = Duration::from_millis(10);
/// How long another process holds the write lock of SQLite.
const HELD: Duration = Duration::from_secs(2);

/// A store with servers of its own. They end when it is dropped.
pub(crate) enum Store {
    Sqlite(TempDir),
    /// Receivers connect by the link, so that their connections can be silenced.
    Postgres(Arc<Server>, Link),
    PostgresSync(Cluster),
    /// Redis, and the database of the effects.
    Redis(Arc<redis::Server>, Link, Server),
    Sentinel(SentinelSet, Server),
    Cluster(redis::Cluster, Server),
}

impl Store {
    pub(crate) async fn start(kind: StoreKind) -> Self {
        if kind == StoreKind::PostgresSync {
            return Self::PostgresSync(Cluster::start().await);
        }
        blocking(move || match kind {
            StoreKind::Sqlite => Self::Sqlite(tempfile::tempdir().expect("a folder")),
            StoreKind::Redis => {
                let server = redis::Server::start_with(&["appendonly yes", "appendfsync always"]);
                let link = Link::start();
                link.lead_to(server.port());
                Self::Redis(Arc::new(server), link, Server::start())
            }
            StoreKind::Sentinel => Self::Sentinel(SentinelSet::start_linked(&[]), Server::start()),
            StoreKind::Cluster => Self::Cluster(redis::Cluster::start_linked(&[]), Server::start()),
            StoreKind::Postgres | StoreKind::PostgresSync => {
                let (server, link) = (Server::start(), Link::start());
                link.lead_to(server.port());
                Self::Postgres(Arc::new(server), link)
            }
        })
        .await
    }

    /// Returns the URL of the store for the receivers.
    pub(crate) fn url(&self) -> String {
        match self {
            Self::Sqlite(dir) => sqlite_url(dir.path()),
            Self::Postgres(_, link) => {
                format!("postgres://postgres@127.0.0.1:{}/postgres", link.port())
            }
            Self::PostgresSync(cluster) => cluster.url(),
            Self::Redis(_, link, _) => format!("redis://127.0.0.1:{}", link.port()),
            Self::Sentinel(set, _) => set.url(),
            Self::Cluster(cluster, _) => cluster.url(),
        }
    }

    /// Returns the URL of the database of the effects for the receivers.
    pub(crate) fn effects_url(&self) -> String {
        match self {
            Self::Redis(.., effects) | Self::Sentinel(_, effects) | Self::Cluster(_, effects) => {
                effects.url()
            }
            _ => self.url(),
        }
    }

    /// Opens a connection to the database of the effects that no fault concerns.
    pub(crate) async fn effects(&self) -> Result<Database, String> {
        let url = match self {
            Self::Postgres(server, _) => server.url(),
            Self::PostgresSync(cluster) => cluster.primary.url(),
            _ => self.effects_url(),
        };
        Database::connect(&url)
            .await
            .map_err(|error| format!("the database of the effects: {error}"))
    }

    /// Does this to the store. Returns when the store serves again, or when connections are silent.
    pub(crate) async fn inflict(&mut self, kind: Kind, turn: usize) {
        match (kind, self) {
            (Kind::Restart, Self::Postgres(server, _)) => {
                let server = Arc::clone(server);
                blocking(move || server.restart_immediately()).await;
            }
            (Kind::Restart, Self::PostgresSync(cluster)) => {
                let server = Arc::clone(&cluster.primary);
                blocking(move || server.restart_immediately()).await;
                cluster.until_followed().await;
            }
            (Kind::Restart, Self::Redis(server, ..)) => {
                let server = Arc::clone(server);
                blocking(move || server.restart()).await;
            }
            (Kind::Backend, Self::Postgres(server, _)) => kill_backend(&server.url()).await,
            (Kind::Backend, Self::PostgresSync(cluster)) => {
                kill_backend(&cluster.primary.url()).await;
                cluster.until_followed().await;
            }
            // The primary dies, or it is demoted and keeps its connections.
            (Kind::Failover, Self::PostgresSync(cluster)) if turn.is_multiple_of(2) => {
                cluster.fail_over().await;
            }
            (Kind::Failover, Self::PostgresSync(cluster)) => cluster.switch_over().await,
            (Kind::Failover, Self::Sentinel(set, _)) => sentinel_failover(set).await,
            (Kind::Failover, Self::Cluster(cluster, _)) => {
                // The slot of another primary each turn.
                let slot = [0, 8_000, 16_000][turn % 3];
                let owner = redis::wait_until("one owner", || cluster.owner_of(slot)).await;
                cluster.nodes()[owner].kill();
                redis::wait_until("a failover", || {
                    let new = cluster.owner_of(slot).filter(|new| *new != owner);
                    new.filter(|_| cluster.serves_all())
                })
                .await;
                cluster.nodes()[owner].start_again();
                cluster.settled().await;
            }
            (Kind::Silence, Self::Postgres(_, link) | Self::Redis(_, link, _)) => link.silence(),
            (Kind::Silence, Self::PostgresSync(cluster)) => cluster.address.silence(),
            (Kind::Silence, Self::Sentinel(set, _)) => {
                (0..3).for_each(|number| set.silence(number));
            }
            (Kind::Silence, Self::Cluster(cluster, _)) => {
                (0..6).for_each(|number| cluster.silence(number));
            }
            (Kind::WriteLock, Self::Sqlite(dir)) => {
                let options: SqliteConnectOptions = sqlite_url(dir.path()).parse().expect("a URL");
                let mut other = options.busy_timeout(SERVES).connect().await.expect("the file");
                other.execute("BEGIN IMMEDIATE").await.expect("the write lock");
                sleep(HELD).await;
                other.execute("ROLLBACK").await.expect("an end");
                other.close().await.expect("an end");
            }
            (kind, _) => unreachable!("no store of this row has the fault {kind:?}"),
        }
    }

    /// Returns the program and its version.
    pub(crate) async fn version(&self) -> String {
        match self {
            Self::Sqlite(_) => sqlite_version().await,
            Self::Postgres(server, _) => postgres_version(&server.url()).await,
            Self::PostgresSync(cluster) => postgres_version(&cluster.primary.url()).await,
            Self::Redis(server, ..) => redis_version(server),
            Self::Sentinel(set, _) => redis_version(&set.servers()[0]),
            Self::Cluster(cluster, _) => redis_version(&cluster.nodes()[0]),
        }
    }
}

/// Kills the master, waits for its successor, starts it again as a replica, and waits until the failover has
/// ended everywhere.
async fn sentinel_failover(set: &SentinelSet) {
    let old = redis::wait_until("a primary", || set.primary_by_role()).await;
    set.servers()[old].kill();
    set.failover_from(old).await;
    set.restart_as_replica(old).await;
}

/// Kills one backend of Postgres by SIGKILL. Returns when the server accepts connections again.
async fn kill_backend(url: &str) {
    let begun = Instant::now();
    let mut admin = loop {
        if let Some(admin) = kill_any_backend(url).await {
            break admin;
        }
        assert!(begun.elapsed() < SERVES, "no backend is killed");
        sleep(SHORTLY).await;
    };
    // The server ends this session too, when it has noticed.
    while admin.ping().await.is_ok() {
        sleep(SHORTLY).await;
    }
    while PgConnection::connect(url).await.is_err() {
        assert!(begun.elapsed() < SERVES, "Postgres does not serve again");
        sleep(SHORTLY).await;
    }
}

/// Returns the connection that has looked for the backend, unless the backend had ended by itself.
async fn kill_any_backend(url: &str) -> Option<PgConnection> {
    let mut admin = PgConnection::connect(url).await.ok()?;
    let backend = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' \
         AND pid <> pg_backend_pid() ORDER BY random() LIMIT 1";
    let pid: i32 = sqlx::query_scalar(backend).fetch_optional(&mut admin).await.ok()??;
    let mut kill = Command::new("kill");
    let kill = kill.args(["-9", &pid.to_string()]).stderr(Stdio::null());
    kill.status().expect("`kill`").success().then_some(admin)
}

async fn postgres_version(url: &str) -> String {
    let mut admin = PgConnection::connect(url).await.expect("Postgres");
    let version: String = scalar(&mut admin, "SHOW server_version").await;
    format!("Postgres {}", version.split(' ').next().unwrap_or(&version))
}

async fn sqlite_version() -> String {
    let options = SqliteConnectOptions::new().in_memory(true);
    let mut file = options.connect().await.expect("a database in memory");
    let version = "SELECT sqlite_version()";
    let version: String =
        sqlx::query_scalar(version).fetch_one(&mut file).await.expect("a version");
    format!("SQLite {version}")
}

fn redis_version(server: &redis::Server) -> String {
    // Valkey also has the field of Redis, with the version with which it is compatible.
    let of = |name: &str, field| server.info(field).map(|version| format!("{name} {version}"));
    let version = of("Valkey", "valkey_version").or_else(|| of("Redis", "redis_version"));
    version.expect("a version")
}
