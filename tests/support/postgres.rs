//! A PostgreSQL server for the tests: a private one, deleted when the tests end, or the server that
//! `TEST_POSTGRES_URL` names.

use std::env;
use std::fs;
use std::future::Future;
use std::iter;
use std::path::{Path, PathBuf};
use std::process::{self, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use super::keeper::{Keeper, find, is_free};

use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, Executor, PgConnection};

/// Names a server to use in place of a private one. The tests create and drop databases in it, so its
/// role needs CREATEDB.
pub const URL: &str = "TEST_POSTGRES_URL";

/// The server's keeper. It lives in a process group of its own and executes the lines of its stdin.
/// The pipe breaks when the test's process ends, even by SIGKILL. Then the keeper stops the server
/// and deletes its folder.
///
/// PIPE is ignored, because the keeper must clean up even if the test is dead when it replies.
const KEEPER: &str = r#"
bin=$1
trap '' PIPE
trap 'exit 1' HUP INT TERM
dir=$(mktemp -d "$2/tower-dedup-postgres.XXXXXX" 2>&1) || { echo "$dir"; exit 1; }
export LOCPATH="$dir/locale"
clean() {
    "$bin/pg_ctl" stop -s -m immediate -D "$dir/data" >/dev/null 2>&1
    rm -rf "$dir"
}
trap clean EXIT
echo "$dir"
exec 2>>"$dir/log"
while read -r command port; do
    case $command in
    init)
        "$bin/initdb" -D "$dir/data" -U postgres -A trust -E UTF8 --no-locale --no-sync &&
            cat >>"$dir/data/postgresql.conf" <<CONF
listen_addresses = '127.0.0.1'
unix_socket_directories = ''
max_connections = 200
# Processes are killed here, the power is not cut.
fsync = off
CONF
        ;;
    copy) cp -Rp "$port/data" "$dir/data" ;;
    # Messages in this language. The locale need not be installed: glibc finds it in LOCPATH.
    speak)
        mkdir -p "$LOCPATH" && {
            localedef -i "$port" -f UTF-8 "$LOCPATH/$port.UTF-8" || [ -d "$LOCPATH/$port.UTF-8" ]
        } && echo "lc_messages = '$port.UTF-8'" >>"$dir/data/postgresql.conf"
        ;;
    follow) "$bin/pg_basebackup" -D "$dir/data" -R -c fast --no-sync -U postgres -h 127.0.0.1 -p "$port" ;;
    promote) "$bin/pg_ctl" promote -s -w -D "$dir/data" ;;
    start) "$bin/pg_ctl" start -s -w -D "$dir/data" -l "$dir/log" -o "-p $port" ;;
    restart) "$bin/pg_ctl" restart -s -w -m immediate -D "$dir/data" -l "$dir/log" ;;
    stop) "$bin/pg_ctl" stop -s -w -m immediate -D "$dir/data" ;;
    *) false ;;
    esac </dev/null >>"$dir/log" && echo done || echo failed
done
"#;

/// A private server of this process.
pub struct Server {
    keeper: Mutex<Keeper>,
    dir: PathBuf,
    port: u16,
}

impl Server {
    /// Starts a server. Takes a second or two and blocks; inside a runtime, a worker waits.
    pub fn start() -> Self {
        Self::started(&[&Self::copy()])
    }

    /// Starts a server whose messages are in the language of this locale.
    pub fn start_in(locale: &str) -> Self {
        Self::started(&[&Self::copy(), &format!("speak {locale}")])
    }

    /// Returns the command that copies the first files of a server. `initdb` makes them once in a process.
    fn copy() -> String {
        static FIRST: OnceLock<Server> = OnceLock::new();
        format!("copy {}", FIRST.get_or_init(|| Self::made(&["init"])).dir.display())
    }

    /// Starts a standby of this server, which follows it until it is [promoted](Self::promote).
    pub fn standby(&self) -> Self {
        Self::started(&[&format!("follow {}", self.port)])
    }

    /// Promotes a standby.
    pub fn promote(&self) {
        self.must("promote");
    }

    fn made(commands: &[&str]) -> Self {
        let mut keeper = start_keeper();
        let dir = keeper.answer();
        assert!(dir.starts_with('/'), "no folder for PostgreSQL: {dir}");
        let server = Self { keeper: Mutex::new(keeper), dir: PathBuf::from(dir), port: 0 };
        for command in commands {
            server.must(command);
        }
        server
    }

    fn started(commands: &[&str]) -> Self {
        let mut server = Self::made(commands);
        // Another process may take the port before the server does.
        for _ in 0..5 {
            server.port = free_port();
            if server.tell(&format!("start {}", server.port)) {
                return server;
            }
        }
        panic!("PostgreSQL does not start:\n{}", server.log());
    }

    pub fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/postgres", self.port)
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns the folder of all its files.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the log of the server.
    pub fn log(&self) -> String {
        fs::read_to_string(self.dir.join("log")).unwrap_or_else(|error| error.to_string())
    }

    /// Crashes and restarts the server, without closing its sessions. Returns when it accepts
    /// connections.
    pub fn restart_immediately(&self) {
        self.must("restart");
    }

    /// Crashes the server. Its port refuses connections until [`start_again`](Self::start_again).
    pub fn stop_immediately(&self) {
        self.must("stop");
    }

    /// Starts the server at the same URL. Returns when it accepts connections.
    pub fn start_again(&self) {
        self.must(&format!("start {}", self.port));
    }

    /// Runs a statement, on a connection of its own.
    pub fn run(&self, sql: &str) {
        execute(&self.url(), sql.to_owned()).expect("a statement that runs");
    }

    fn must(&self, command: &str) {
        assert!(self.tell(command), "PostgreSQL does not {command}:\n{}", self.log());
    }

    fn tell(&self, command: &str) -> bool {
        // A test that has panicked here has reported why.
        let mut keeper = self.keeper.lock().unwrap_or_else(PoisonError::into_inner);
        keeper.tell(command) == "done"
    }
}

fn start_keeper() -> Keeper {
    let bin = find("postgres", URL);
    let mut command = Command::new("sh");
    let dir = apart(&mut command);
    command.args(["-c", KEEPER, "keeper"]).arg(bin).arg(dir);
    // The folder of the tests may be closed to the server's user.
    command.current_dir("/");
    // A locale that is not installed would stop the server.
    command.env("LC_ALL", "C");
    Keeper::start(&mut command)
}

/// Puts the keeper into a process group of its own, so that it does not get the tests' signals
/// (Ctrl-C). If we are root, the keeper runs as another user, because PostgreSQL refuses to run as
/// root. Returns a folder that this user may write to.
#[cfg(unix)]
fn apart(command: &mut Command) -> PathBuf {
    use std::os::unix::process::CommandExt;

    command.process_group(0);
    if id(&["-u"]) != Some(0) {
        return env::temp_dir();
    }
    for user in ["postgres", "nobody"] {
        if let (Some(uid), Some(gid)) = (id(&["-u", user]), id(&["-g", user])) {
            command.uid(uid).gid(gid);
            // Only root may be able to write to root's TMPDIR.
            return PathBuf::from("/tmp");
        }
    }
    panic!("PostgreSQL does not run as root, and there is no user `postgres` or `nobody`");
}

#[cfg(not(unix))]
fn apart(_: &mut Command) -> PathBuf {
    panic!("a private PostgreSQL server needs a Unix: set {URL}");
}

fn id(args: &[&str]) -> Option<u32> {
    let output = Command::new("id").args(args).stderr(Stdio::null()).output().ok()?;
    String::from_utf8(output.stdout).ok()?.trim().parse().ok()
}

/// Returns a free port below the ephemeral range. While the server is down, the system may give an
/// ephemeral port to any client. The server's own client could even connect to itself.
///
/// Calls get different ports, and so do processes that run at the same time: a port is bound later.
pub fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let next = || {
        let at = process::id().wrapping_mul(100).wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
        15_000 + u16::try_from(at % 17_000).expect("a small number")
    };
    iter::repeat_with(next).take(1_000).find(|port| is_free(*port)).expect("a free port")
}

/// Returns the URL of the server that all tests of this process share. The first call may start the
/// server.
pub fn shared() -> &'static str {
    static SHARED: OnceLock<(String, Option<Server>)> = OnceLock::new();
    let (url, _) = SHARED.get_or_init(|| match named() {
        Some(url) => (url, None),
        None => {
            let server = Server::start();
            (server.url(), Some(server))
        }
    });
    url
}

/// Returns the URL of a server to use in place of a private one.
fn named() -> Option<String> {
    env::var(URL).ok().filter(|url| !url.is_empty())
}

/// A schema of one test. The drop removes it, unless its server ends with the tests.
pub struct Schema {
    /// The URL of its database.
    database: String,
    name: String,
    end: End,
}

/// What the drop of a schema does.
enum End {
    /// It removes the schema.
    Schema,
    /// It removes the database, which has the name of the schema.
    Database,
    /// It leaves the database to another test.
    Leave,
}

/// The databases of the private server that no test has now.
static FREE: Mutex<Vec<String>> = Mutex::new(Vec::new());

impl Schema {
    /// Creates a schema in a database that no other test has at the same time, in the [`shared`] server: migrations in
    /// one database wait for each other.
    pub fn fresh() -> Self {
        if named().is_some() {
            return Self::alone();
        }
        let free = FREE.lock().unwrap_or_else(PoisonError::into_inner).pop();
        Self::create(
            free.unwrap_or_else(|| create_database(&fresh_name())),
            fresh_name(),
            End::Leave,
        )
    }

    /// Creates a schema in a database of its own, which takes ten times as long. The drop ends the sessions that a test
    /// has left.
    pub fn alone() -> Self {
        let name = fresh_name();
        Self::create(create_database(&name), name, End::Database)
    }

    /// Creates a schema in this database.
    pub fn fresh_in(database: &str) -> Self {
        Self::create(database.to_owned(), fresh_name(), End::Schema)
    }

    fn create(database: String, name: String, end: End) -> Self {
        execute(&database, format!("CREATE SCHEMA {name}")).expect("a fresh schema");
        Self { database, name, end }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the URL of the database, with the server's default search path.
    pub fn database_url(&self) -> &str {
        &self.database
    }

    /// Returns the URL of the database, with this schema as the search path.
    pub fn url(&self) -> String {
        let and = if self.database.contains('?') { '&' } else { '?' };
        format!("{}{and}options[search_path]={}", self.database, self.name)
    }
}

/// Returns the URL with this path. Its other parts stay.
pub fn with_path(url: &str, path: &str) -> String {
    let uri: http::Uri = url.parse().expect("a URL");
    let query = uri.query().map(|query| format!("?{query}")).unwrap_or_default();
    let mut parts = uri.into_parts();
    parts.path_and_query = Some(format!("/{path}{query}").parse().expect("a path"));
    http::Uri::from_parts(parts).expect("a URL").to_string()
}

/// Returns a name for a schema or a database of one test.
pub fn fresh_name() -> String {
    format!("tower_dedup_test_{:016x}", rand::random::<u64>())
}

/// Runs the statements that make the schema, with a table of so many partitions, as the guide says.
pub async fn create_partitions(
    connection: &mut PgConnection,
    schema_sql: &[String],
    partitions: u32,
) {
    for sql in schema_sql {
        let Some((columns, settings)) = sql.split_once(") WITH (") else {
            sqlx::raw_sql(AssertSqlSafe(sql.clone())).execute(&mut *connection).await.unwrap();
            continue;
        };
        let (_, name) = columns.split_once("IF NOT EXISTS ").unwrap();
        let name = name.split_once(" (").unwrap().0.to_owned();
        let table = format!("{columns}) PARTITION BY HASH (key)");
        sqlx::raw_sql(AssertSqlSafe(table)).execute(&mut *connection).await.unwrap();
        for remainder in 0..partitions {
            let partition = format!("{}_{remainder}\"", name.trim_end_matches('"'));
            let sql = format!(
                "CREATE TABLE {partition} PARTITION OF {name} \
                 FOR VALUES WITH (MODULUS {partitions}, REMAINDER {remainder}) WITH ({settings}"
            );
            sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut *connection).await.unwrap();
        }
    }
}

impl Drop for Schema {
    fn drop(&mut self) {
        // A transaction that a test has left open must not block the drop. The drop must not panic:
        // the server may be gone, and a failing test passes here too.
        let dropped = match self.end {
            End::Schema => {
                let sql = format!("SET lock_timeout = '5s'; DROP SCHEMA {} CASCADE", self.name);
                execute(&self.database, sql)
            }
            End::Database => execute(shared(), format!("DROP DATABASE {} WITH (FORCE)", self.name)),
            End::Leave => {
                let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
                free.push(std::mem::take(&mut self.database));
                return;
            }
        };
        if let Err(error) = dropped {
            eprintln!("the schema {} is left: {error}", self.name);
        }
    }
}

/// Creates a database in the [`shared`] server, and returns its URL.
fn create_database(name: &str) -> String {
    let create = format!("CREATE DATABASE {name} TEMPLATE template0");
    execute(shared(), create).expect("a fresh database");
    with_path(shared(), name)
}

/// Runs on a thread of its own, so that it can be called inside a runtime too.
fn execute(url: &str, sql: String) -> sqlx::Result<()> {
    on_a_thread(async move {
        let mut connection = connect(url).await?;
        connection.execute(AssertSqlSafe(sql)).await?;
        connection.close().await
    })
}

async fn connect(url: &str) -> sqlx::Result<PgConnection> {
    let options: PgConnectOptions = url.parse()?;
    options.connect().await
}

fn on_a_thread<T: Send>(work: impl Future<Output = T> + Send) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime").block_on(work)
        });
        thread.join().expect("no panic")
    })
}
