//! A Postgres primary and its standby behind one address, as behind a virtual IP address or a load
//! balancer.

use std::sync::Arc;
use std::time::Duration;

use sqlx::{AssertSqlSafe, Connection, PgConnection};

use super::postgres::Server;
use super::redis::link::Link;

/// The primary acknowledges no commit that the standby has not flushed, unless a session asks for less.
pub struct Cluster {
    pub primary: Arc<Server>,
    pub standby: Arc<Server>,
    pub address: Link,
    /// The old primaries, which go on running.
    demoted: Vec<Arc<Server>>,
}

impl Cluster {
    pub async fn start() -> Self {
        let (primary, standby, address) = blocking(|| {
            let primary = Server::start();
            primary.run("ALTER SYSTEM SET synchronous_standby_names = '*'");
            // Sessions would learn it from a reload at an unknown time.
            primary.restart_immediately();
            let standby = primary.standby();
            let address = Link::start();
            address.lead_to(primary.port());
            (Arc::new(primary), Arc::new(standby), address)
        })
        .await;
        let cluster = Self { primary, standby, address, demoted: Vec::new() };
        cluster.until_followed().await;
        cluster
    }

    /// Returns the URL of the address.
    pub fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/postgres", self.address.port())
    }

    /// Kills the primary, promotes the standby and sends new connections there. Then creates a new
    /// standby: until it follows, no COMMIT is acknowledged.
    pub async fn fail_over(&mut self) {
        let primary = Arc::clone(&self.primary);
        blocking(move || primary.stop_immediately()).await;
        self.promote().await;
        self.follow().await;
    }

    /// Makes the primary read-only, promotes the standby once it has received everything, and sends
    /// *new* connections there. The old connections still lead to the old primary. Then creates a new standby.
    pub async fn switch_over(&mut self) {
        let primary = Arc::clone(&self.primary);
        blocking(move || {
            primary.run("ALTER SYSTEM SET default_transaction_read_only = on");
            primary.run("SELECT pg_reload_conf()");
        })
        .await;
        let mut admin = PgConnection::connect(&self.primary.url()).await.unwrap();
        until_true(&mut admin, "SELECT current_setting('default_transaction_read_only') = 'on'")
            .await;
        // A transaction that began before may still write.
        let now: String = scalar(&mut admin, "SELECT clock_timestamp()::text").await;
        let ended = format!(
            "SELECT clock_timestamp() > '{now}'::timestamptz + interval '100 ms' AND NOT EXISTS \
             (SELECT 1 FROM pg_stat_activity WHERE backend_type = 'client backend' \
             AND pid <> pg_backend_pid() \
             AND xact_start < '{now}'::timestamptz + interval '100 ms')"
        );
        until_true(&mut admin, &ended).await;
        let written: String = scalar(&mut admin, "SELECT pg_current_wal_insert_lsn()::text").await;
        let mut standby = PgConnection::connect(&self.standby.url()).await.unwrap();
        let received = format!("SELECT pg_last_wal_receive_lsn() >= '{written}'::pg_lsn");
        until_true(&mut standby, &received).await;
        self.demoted.push(Arc::clone(&self.primary));
        self.promote().await;
        self.follow().await;
    }

    /// Promotes the standby, which is the primary from now on.
    pub async fn promote(&mut self) {
        let standby = Arc::clone(&self.standby);
        blocking(move || standby.promote()).await;
        self.primary = Arc::clone(&self.standby);
        self.address.lead_to(self.primary.port());
    }

    /// Creates a new standby of the primary.
    async fn follow(&mut self) {
        let primary = Arc::clone(&self.primary);
        self.standby = Arc::new(blocking(move || primary.standby()).await);
        self.until_followed().await;
    }

    pub async fn until_followed(&self) {
        let follows = "SELECT EXISTS (SELECT 1 FROM pg_stat_replication \
                       WHERE state = 'streaming' AND sync_state = 'sync')";
        let mut admin = PgConnection::connect(&self.primary.url()).await.unwrap();
        until_true(&mut admin, follows).await;
    }
}

/// Runs `work`, which waits for the server's programs, on a thread of its own.
pub async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(work).await.unwrap()
}

pub async fn scalar<T>(connection: &mut PgConnection, sql: &str) -> T
where
    T: for<'r> sqlx::Decode<'r, sqlx::Postgres> + sqlx::Type<sqlx::Postgres> + Send + Unpin,
{
    sqlx::query_scalar(AssertSqlSafe(sql)).fetch_one(connection).await.unwrap()
}

/// Waits until the query returns true, for half a minute at most.
pub async fn until_true(connection: &mut PgConnection, sql: &str) {
    for _ in 0..3_000 {
        if scalar::<Option<bool>>(connection, sql).await == Some(true) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("not true after half a minute: {sql}");
}
