//! A Postgres primary and its standby behind one address, as behind a virtual IP address or a load
//! balancer.

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use sqlx::{AssertSqlSafe, Connection, PgConnection};
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use super::postgres::Server;

/// A TCP address that connects each new client to one server. The server can change later.
pub(crate) struct Address {
    port: u16,
    target: Arc<AtomicU16>,
    cuts: watch::Sender<()>,
}

impl Address {
    pub(crate) async fn of(server: &Server) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let target = Arc::new(AtomicU16::new(server.port()));
        let (cuts, cut) = watch::channel(());
        let leads_to = Arc::clone(&target);
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let (port, mut cut) = (leads_to.load(Ordering::SeqCst), cut.clone());
                // Only cuts from now on concern this connection.
                cut.mark_unchanged();
                tokio::spawn(async move {
                    // The server does not listen: the drop closes the client's connection.
                    let Ok(mut server) = TcpStream::connect(("127.0.0.1", port)).await else {
                        return;
                    };
                    tokio::select! {
                        _ = copy_bidirectional(&mut client, &mut server) => {}
                        _ = cut.changed() => {}
                    }
                });
            }
        });
        Self { port, target, cuts }
    }

    /// New connections go to this server. Open connections stay where they are.
    pub(crate) fn lead_to(&self, server: &Server) {
        self.target.store(server.port(), Ordering::SeqCst);
    }

    /// Closes all connections.
    pub(crate) fn cut(&self) {
        self.cuts.send_replace(());
    }

    pub(crate) fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/postgres", self.port)
    }
}

pub(crate) struct Cluster {
    pub(crate) primary: Arc<Server>,
    pub(crate) standby: Arc<Server>,
    pub(crate) address: Address,
    synchronous: bool,
}

impl Cluster {
    /// The primary acknowledges no commit that the standby has not flushed, unless a session asks
    /// for less.
    pub(crate) async fn synchronous() -> Self {
        Self::start(true).await
    }

    pub(crate) async fn asynchronous() -> Self {
        Self::start(false).await
    }

    async fn start(synchronous: bool) -> Self {
        let (primary, standby) = blocking(move || {
            let primary = Server::start();
            if synchronous {
                primary.run("ALTER SYSTEM SET synchronous_standby_names = '*'");
                // Sessions would learn it from a reload at an unknown time.
                primary.restart_immediately();
            }
            let standby = primary.standby();
            (primary, standby)
        })
        .await;
        let address = Address::of(&primary).await;
        let (primary, standby) = (Arc::new(primary), Arc::new(standby));
        let cluster = Self { primary, standby, address, synchronous };
        cluster.until_followed().await;
        cluster
    }

    /// Kills the primary, promotes the standby and sends new connections there. Then creates a new
    /// standby.
    pub(crate) async fn fail_over(&mut self) {
        let primary = Arc::clone(&self.primary);
        blocking(move || primary.stop_immediately()).await;
        self.promote().await;
        self.address.cut();
        self.follow().await;
    }

    /// Makes the primary read-only, promotes the standby once it has received everything, and sends
    /// *new* connections there. The old connections still lead to the old primary, which goes on
    /// running. Then creates a new standby. Returns the old primary.
    pub(crate) async fn switch_over(&mut self) -> Arc<Server> {
        let demoted = Arc::clone(&self.primary);
        let server = Arc::clone(&self.primary);
        blocking(move || {
            server.run("ALTER SYSTEM SET default_transaction_read_only = on");
            server.run("SELECT pg_reload_conf()");
        })
        .await;
        // A transaction that began before may still write.
        let mut admin = PgConnection::connect(&demoted.url()).await.unwrap();
        until_true(&mut admin, "SELECT current_setting('default_transaction_read_only') = 'on'")
            .await;
        let now: String = scalar(&mut admin, "SELECT clock_timestamp()::text").await;
        let ended = format!(
            "SELECT clock_timestamp() > '{now}'::timestamptz + interval '100 ms' AND NOT EXISTS \
             (SELECT 1 FROM pg_stat_activity WHERE backend_type = 'client backend' \
             AND pid <> pg_backend_pid() \
             AND xact_start < '{now}'::timestamptz + interval '100 ms')"
        );
        until_true(&mut admin, &ended).await;
        self.until_received().await;
        self.promote().await;
        self.follow().await;
        demoted
    }

    /// Waits until the standby has flushed everything that the primary has written by now.
    pub(crate) async fn until_received(&self) {
        let mut primary = PgConnection::connect(&self.primary.url()).await.unwrap();
        let written: String =
            scalar(&mut primary, "SELECT pg_current_wal_insert_lsn()::text").await;
        let mut standby = PgConnection::connect(&self.standby.url()).await.unwrap();
        let received = format!("SELECT pg_last_wal_receive_lsn() >= '{written}'::pg_lsn");
        until_true(&mut standby, &received).await;
    }

    /// Promotes the standby, which is the primary from now on.
    pub(crate) async fn promote(&mut self) {
        let standby = Arc::clone(&self.standby);
        blocking(move || standby.promote()).await;
        self.primary = Arc::clone(&self.standby);
        self.address.lead_to(&self.primary);
    }

    /// Creates a new standby of the primary.
    pub(crate) async fn follow(&mut self) {
        let primary = Arc::clone(&self.primary);
        self.standby = Arc::new(blocking(move || primary.standby()).await);
        self.until_followed().await;
    }

    pub(crate) async fn until_followed(&self) {
        let state = if self.synchronous { "sync" } else { "async" };
        let follows = format!(
            "SELECT EXISTS (SELECT 1 FROM pg_stat_replication \
             WHERE state = 'streaming' AND sync_state = '{state}')"
        );
        let mut admin = PgConnection::connect(&self.primary.url()).await.unwrap();
        until_true(&mut admin, &follows).await;
    }
}

/// Runs `work`, which waits for the server's programs, on a thread of its own.
pub(crate) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(work).await.unwrap()
}

pub(crate) async fn scalar<T>(connection: &mut PgConnection, sql: &str) -> T
where
    T: for<'r> sqlx::Decode<'r, sqlx::Postgres> + sqlx::Type<sqlx::Postgres> + Send + Unpin,
{
    sqlx::query_scalar(AssertSqlSafe(sql)).fetch_one(connection).await.unwrap()
}

/// Waits until the query returns true, for half a minute at most.
pub(crate) async fn until_true(connection: &mut PgConnection, sql: &str) {
    for _ in 0..3_000 {
        if scalar::<Option<bool>>(connection, sql).await == Some(true) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("not true after half a minute: {sql}");
}
