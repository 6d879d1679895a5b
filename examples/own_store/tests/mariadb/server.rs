//! A private MariaDB server, which is deleted when the tests end.

use std::any::Any;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use own_store::{MariaDbStore, Options};
use sqlx::mysql::MySqlConnection;
use sqlx::{AssertSqlSafe, Connection, Executor};
use tower_dedup::adapter::contract::Completion;
use tower_dedup::{BoxError, DedupKey};
use tower_dedup_conformance::{HandlerTransaction, RemoteStore, SharedStore, Store, Transactional};

/// A shell that keeps the server. The pipe to its stdin breaks when the tests end, even by SIGKILL. Then it kills the
/// server and deletes its folder.
const KEEPER: &str = r#"
trap '' HUP INT TERM PIPE
dir=$(mktemp -d) || exit 1
# The server refuses to run as root, unless it is told to.
[ "$(id -u)" = 0 ] && user=--user=root
start="--no-defaults --datadir=$dir/data $user"
mariadb-install-db $start --auth-root-authentication-method=normal --skip-test-db >"$dir/log" 2>&1
# Processes are killed here, the power is not cut: a COMMIT need not reach the disk.
PATH=$PATH:/usr/sbin mariadbd $start --socket="$dir/socket" --bind-address=127.0.0.1 --port="$1" --skip-log-bin \
    --skip-name-resolve --max-connections=500 --innodb-flush-log-at-trx-commit=2 >>"$dir/log" 2>&1 </dev/null &
for _ in $(seq 300); do
    [ -S "$dir/socket" ] && echo ready && break
    kill -0 $! 2>/dev/null || { cat "$dir/log" >&2; break; }
    sleep 0.1
done
cat >/dev/null
kill -KILL $! 2>/dev/null
rm -rf "$dir"
"#;

/// A server, for as long as this process runs.
struct Server {
    port: u16,
    _keeper: Child,
}

fn server() -> &'static Server {
    static SERVER: OnceLock<Server> = OnceLock::new();
    SERVER.get_or_init(|| {
        // The port is free for a moment more.
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut keeper = Command::new("sh")
            .args(["-c", KEEPER, "keeper", &port.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(keeper.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(
            line == "ready\n",
            "no MariaDB server could be started: install it (apt-get install mariadb-server)"
        );
        Server { port, _keeper: keeper }
    })
}

/// A database of its own, with a store.
pub(crate) struct Database {
    pub(crate) url: String,
    store: Arc<MariaDbStore>,
}

impl Database {
    pub(crate) async fn connection(&self) -> MySqlConnection {
        MySqlConnection::connect(&self.url).await.unwrap()
    }

    pub(crate) async fn execute(&self, sql: &str) {
        self.connection().await.execute(AssertSqlSafe(sql.to_owned())).await.unwrap();
    }

    /// Moves all times by this many milliseconds.
    async fn shift(&self, by: i64) {
        self.execute(&format!(
            "UPDATE webhook_deliveries SET lease_until = lease_until + {by}, first_seen_at = first_seen_at + {by}, \
             completed_at = completed_at + {by}, expires_at = expires_at + {by}"
        ))
        .await;
    }
}

fn milliseconds(by: Duration) -> i64 {
    i64::try_from(by.as_millis()).unwrap()
}

impl Store for Database {
    type Adapter = MariaDbStore;

    async fn create() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let port = tokio::task::spawn_blocking(|| server().port).await.unwrap();
        let name = format!("test_{}", NUMBER.fetch_add(1, Ordering::Relaxed));
        let root = format!("mysql://root@127.0.0.1:{port}/");
        let mut connection = MySqlConnection::connect(&root).await.unwrap();
        connection.execute(AssertSqlSafe(format!("CREATE DATABASE {name}"))).await.unwrap();
        let url = format!("{root}{name}");
        Self { store: Self::attach(&url).await, url }
    }

    fn adapter(&self) -> Arc<MariaDbStore> {
        Arc::clone(&self.store)
    }

    async fn advance(&self, by: Duration) {
        self.shift(-milliseconds(by)).await;
    }

    async fn set_back(&self, by: Duration) {
        self.shift(milliseconds(by)).await;
    }

    async fn hold(&self, key: &DedupKey) -> Box<dyn Any + Send> {
        let mut connection = self.connection().await;
        connection.execute("BEGIN").await.unwrap();
        let sql =
            "UPDATE webhook_deliveries SET version = version + 1 WHERE namespace = ? AND id = ?";
        let held = sqlx::query(sql).bind(key.namespace()).bind(key.id());
        assert_eq!(held.execute(&mut connection).await.unwrap().rows_affected(), 1);
        // Dropped, it is closed, and the server rolls back.
        Box::new(connection)
    }

    async fn corrupt(&self, key: &DedupKey) {
        let sql = "UPDATE webhook_deliveries SET response_headers = 'no JSON' WHERE namespace = ? AND id = ?";
        let corrupt = sqlx::query(sql).bind(key.namespace()).bind(key.id());
        assert_eq!(corrupt.execute(&mut self.connection().await).await.unwrap().rows_affected(), 1);
    }
}

impl RemoteStore for Database {
    fn server(&self) -> (String, u16) {
        ("127.0.0.1".to_owned(), server().port)
    }

    async fn connect(&self, port: u16) -> Arc<MariaDbStore> {
        Self::attach(&self.url.replace(&format!(":{}/", server().port), &format!(":{port}/"))).await
    }
}

impl SharedStore for Database {
    fn address(&self) -> String {
        self.url.clone()
    }

    async fn attach(address: &str) -> Arc<MariaDbStore> {
        let options = Options { timeout: Duration::from_secs(15), ..Options::default() };
        Arc::new(MariaDbStore::connect(address, options).await.unwrap())
    }
}

impl Transactional for Database {
    async fn transaction(&self) -> Box<dyn HandlerTransaction> {
        let mut connection = self.connection().await;
        connection.execute("CREATE TABLE IF NOT EXISTS effects (id VARCHAR(255))").await.unwrap();
        connection.execute("BEGIN").await.unwrap();
        connection.execute("INSERT INTO effects VALUES ('a')").await.unwrap();
        Box::new(Handler(connection))
    }
}

/// A transaction as a handler has one, on a connection with settings of its own.
struct Handler(MySqlConnection);

impl HandlerTransaction for Handler {
    fn complete<'t>(
        &'t mut self,
        completion: &'t Completion,
    ) -> BoxFuture<'t, Result<(), BoxError>> {
        async move {
            let complete = sqlx::query(AssertSqlSafe(completion.sql().to_owned()));
            complete.bind(completion.parameter()).execute(&mut self.0).await?;
            Ok(())
        }
        .boxed()
    }

    fn commit(mut self: Box<Self>) -> BoxFuture<'static, ()> {
        async move {
            self.0.execute("COMMIT").await.unwrap();
        }
        .boxed()
    }
}
