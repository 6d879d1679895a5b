//! Redis servers for the tests: private ones, deleted when the tests end, or the server that
//! `TEST_REDIS_URL` names. Valkey serves as well.

mod cluster;
pub mod link;
mod sentinel;

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::keeper::{Keeper, find, is_free};
use redis::{Client, Cmd, Connection, FromRedisValue, RedisResult};

pub use cluster::Cluster;
pub use sentinel::SentinelSet;

/// Names a server to use in place of a private one. The tests write keys with fresh prefixes into it, and
/// leave them.
pub const URL: &str = "TEST_REDIS_URL";

/// The server's keeper. It lives in a process group of its own and executes the lines of its stdin.
/// The pipe breaks when the test's process ends, even by SIGKILL. Then the keeper kills the server
/// and deletes its folder.
///
/// PIPE is ignored, because the keeper must clean up even if the test is dead when it replies.
const KEEPER: &str = r#"
program=$1
trap '' PIPE
trap 'exit 1' HUP INT TERM
dir=$(mktemp -d "$2/tower-dedup-redis.XXXXXX" 2>&1) || { echo "$dir"; exit 1; }
pid=
end() {
    [ -z "$pid" ] || { kill -9 "$pid"; wait "$pid"; }
    pid=
} 2>/dev/null
# A child that writes a snapshot may outlive the server for a moment.
trap 'end; rm -rf "$dir" || { sleep 1; rm -rf "$dir"; }' EXIT
echo "$dir"
exec 2>>"$dir/log"
while read -r command argument; do
    case $command in
    start)
        "$program" "$dir/redis.conf" $argument </dev/null >>"$dir/log" 2>&1 &
        pid=$!
        ;;
    kill) end ;;
    stop) kill -STOP "$pid" ;;
    cont) kill -CONT "$pid" ;;
    esac
    echo "$pid"
done
"#;

/// A private server of this process.
pub struct Server {
    keeper: Mutex<Keeper>,
    dir: PathBuf,
    port: u16,
    directives: Vec<String>,
    is_sentinel: bool,
}

impl Server {
    /// Starts a server without persistence. Blocks; inside a runtime, a worker waits.
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    /// Starts a server with more lines of configuration, such as `appendonly yes`.
    pub fn start_with(directives: &[&str]) -> Self {
        Self::started(|_| directives.iter().map(|line| (*line).to_owned()).collect(), false)
    }

    /// Starts a server with the lines of configuration that `directives` returns for its port.
    fn started(directives: impl Fn(u16) -> Vec<String>, is_sentinel: bool) -> Self {
        let mut command = Command::new("sh");
        command.args(["-c", KEEPER, "keeper"]).arg(find("redis", URL)).arg(env::temp_dir());
        apart(&mut command);
        let mut keeper = Keeper::start(&mut command);
        let dir = keeper.answer();
        assert!(dir.starts_with('/'), "no folder for Redis: {dir}");
        let (keeper, dir) = (Mutex::new(keeper), PathBuf::from(dir));
        let mut server = Self { keeper, dir, port: 0, directives: Vec::new(), is_sentinel };
        // Another process may take the port before the server does.
        for _ in 0..5 {
            server.port = free_port();
            server.directives = directives(server.port);
            if server.launch(&[]) {
                return server;
            }
        }
        panic!("Redis does not start:\n{}", server.log());
    }

    /// Returns `redis://127.0.0.1:PORT`.
    pub fn url(&self) -> String {
        format!("redis://{}", self.address())
    }

    /// Returns `127.0.0.1:PORT`.
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns the folder of all its files.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the log of all its runs.
    pub fn log(&self) -> String {
        fs::read_to_string(self.dir.join("log")).unwrap_or_default()
    }

    /// Kills the server by SIGKILL. Its port refuses connections until
    /// [`start_again`](Self::start_again).
    pub fn kill(&self) {
        self.tell("kill");
    }

    /// Stops the server by SIGSTOP: its connections stay open and silent.
    pub fn stop(&self) {
        self.tell("stop");
    }

    /// Ends [`stop`](Self::stop).
    pub fn cont(&self) {
        self.tell("cont");
    }

    /// Starts a killed server on the same port, with what its folder has. Returns when it has
    /// loaded its data.
    pub fn start_again(&self) {
        self.start_again_with(&[]);
    }

    /// The same, with more lines of configuration for this run.
    pub(super) fn start_again_with(&self, directives: &[&str]) {
        assert!(self.launch(directives), "Redis does not start again:\n{}", self.log());
    }

    /// Kills the server and starts it again.
    pub fn restart(&self) {
        self.kill();
        self.start_again();
    }

    /// Kills the server, deletes its data, and starts it again. A node of a cluster stays one.
    pub fn restart_empty(&self) {
        self.kill();
        let _ = fs::remove_dir_all(self.dir.join("appendonlydir"));
        for file in ["appendonly.aof", "dump.rdb"] {
            let _ = fs::remove_file(self.dir.join(file));
        }
        self.start_again();
    }

    /// Opens a connection. Each of its calls blocks, for five seconds at most.
    pub fn connection(&self) -> RedisResult<Connection> {
        connection(&self.url())
    }

    /// Runs one command on a connection of its own. Blocks.
    pub fn ask<T: FromRedisValue>(&self, words: &[&str]) -> RedisResult<T> {
        command(words).query(&mut self.connection()?)
    }

    /// Runs one command that must succeed.
    #[track_caller]
    pub fn run<T: FromRedisValue>(&self, words: &[&str]) -> T {
        match self.ask(words) {
            Ok(value) => value,
            Err(error) => panic!("{words:?}: {error}\n{}", self.log()),
        }
    }

    /// Returns one field of `INFO`, if the server replies and has the field.
    pub fn info(&self, field: &str) -> Option<String> {
        let info: String = self.ask(&["INFO", "all"]).ok()?;
        field_of(&info, field)
    }

    /// Returns the version of Redis, or that of Redis which Valkey claims to be: major, minor, patch.
    pub fn version(&self) -> (u32, u32, u32) {
        let version = self.info("redis_version").expect("a version");
        let mut parts = version.split('.').map(|part| part.parse().expect("a number"));
        let mut next = || parts.next().expect("three numbers");
        (next(), next(), next())
    }

    /// Returns `false` if another process has the port.
    fn launch(&self, more: &[&str]) -> bool {
        let conf = self.dir.join("redis.conf");
        // A Sentinel keeps its state in this file.
        if !(self.is_sentinel && conf.exists()) {
            let (port, dir) = (self.port, self.dir.display());
            let mut lines = format!("port {port}\nbind 127.0.0.1\ndir {dir}\n");
            if !self.is_sentinel {
                lines.push_str("save \"\"\nrepl-diskless-sync-delay 0\n");
            }
            for line in self.directives.iter().map(String::as_str).chain(more.iter().copied()) {
                lines.push_str(line);
                lines.push('\n');
            }
            fs::write(conf, lines).expect("a configuration");
        }
        let known = self.log().len();
        let pid = self.tell(if self.is_sentinel { "start --sentinel" } else { "start" });
        block_until("the start of Redis", || {
            let loading = self.info("loading").is_some_and(|loading| loading != "0");
            if !loading && self.info("process_id").as_deref() == Some(&pid) {
                return Some(true);
            }
            let log = self.log();
            let failed = ["listening socket", "Failed listening", "FATAL", "Bad directive"];
            let failed = failed.iter().any(|text| log[known..].contains(text));
            failed.then_some(false)
        })
    }

    /// Returns the keeper's answer: the process id of the server.
    fn tell(&self, command: &str) -> String {
        // A test that has panicked here has reported why.
        let mut keeper = self.keeper.lock().unwrap_or_else(PoisonError::into_inner);
        keeper.tell(command)
    }
}

/// Puts the keeper into a process group of its own, so that it does not get the tests' signals
/// (Ctrl-C).
#[cfg(unix)]
fn apart(command: &mut Command) {
    std::os::unix::process::CommandExt::process_group(command, 0);
}

#[cfg(not(unix))]
fn apart(_: &mut Command) {
    panic!("a private Redis server needs a Unix: set {URL}");
}

/// Returns a free port whose port of the cluster bus (10,000 higher) is free and below the ephemeral range too.
fn free_port() -> u16 {
    let mut ports = (0..1_000).map(|_| rand::random_range(15_000..22_000));
    ports.find(|port| is_free(*port) && is_free(*port + 10_000)).expect("a free port")
}

/// Returns a command of these words.
pub fn command(words: &[&str]) -> Cmd {
    let mut command = Cmd::new();
    command.arg(words);
    command
}

/// Opens a connection to one server. Each of its calls blocks, for five seconds at most.
pub fn connection(url: &str) -> RedisResult<Connection> {
    let connection = Client::open(url)?.get_connection_with_timeout(Duration::from_secs(1))?;
    connection.set_read_timeout(Some(Duration::from_secs(5)))?;
    Ok(connection)
}

/// Returns one field of the text that `INFO` or `CLUSTER INFO` returns.
fn field_of(info: &str, field: &str) -> Option<String> {
    let mut values = info.lines().filter_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    values.next().map(|value| value.trim_end().to_owned())
}

/// How long servers have to reach a state. A failover takes two to four seconds on an idle machine.
const BOUND: Duration = Duration::from_secs(60);

/// Waits until `ready` returns a value. Blocks.
#[track_caller]
fn block_until<T>(what: &str, mut ready: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(value) = ready() {
            return value;
        }
        assert!(begun.elapsed() < BOUND, "{what}: not within {BOUND:?}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Waits until `ready` returns a value. `ready` may block for a moment.
pub async fn wait_until<T>(what: &str, mut ready: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(value) = ready() {
            return value;
        }
        assert!(begun.elapsed() < BOUND, "{what}: not within {BOUND:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// How many databases the shared server has.
const DATABASES: u32 = 1_000;

/// The URL of the server that all tests of this process share, and the server, if it is a private one.
fn shared_server() -> &'static (String, Option<Server>) {
    static SHARED: OnceLock<(String, Option<Server>)> = OnceLock::new();
    SHARED.get_or_init(|| match env::var(URL) {
        Ok(url) if !url.is_empty() => (url, None),
        _ => {
            let server = Server::start_with(&[&format!("databases {DATABASES}")]);
            (server.url(), Some(server))
        }
    })
}

/// Returns the URL of the server that all tests of this process share. The first call may start the
/// server.
pub fn shared() -> &'static str {
    &shared_server().0
}

/// Returns the URL of a database on it without the keys of other tests, because a list reads all keys of a database. A
/// server that `TEST_REDIS_URL` names has one for all tests.
pub(crate) fn shared_database() -> String {
    static NUMBER: AtomicU32 = AtomicU32::new(1);
    match shared_server() {
        (url, None) => url.clone(),
        (url, Some(_)) => format!("{url}/{}", NUMBER.fetch_add(1, Ordering::Relaxed) % DATABASES),
    }
}

/// Returns a prefix of keys for one test, so that tests can share a server.
pub fn fresh_prefix() -> String {
    format!("test-{:016x}", rand::random::<u64>())
}

/// Returns the URL with this prefix of keys as its parameter.
pub fn with_prefix(url: &str, prefix: &str) -> String {
    let and = if url.contains('?') { '&' } else { '?' };
    format!("{url}{and}dedup_prefix={prefix}")
}

/// Returns all keys of Redis with this prefix that one server has.
pub fn keys_of(connection: &mut Connection, prefix: &str) -> RedisResult<BTreeSet<Vec<u8>>> {
    // SCAN may return a key twice.
    let (mut keys, mut cursor) = (BTreeSet::new(), 0_u64);
    loop {
        let mut scan = redis::cmd("SCAN");
        scan.arg(cursor).arg("MATCH").arg(format!("{prefix}:*")).arg("COUNT").arg(1_000);
        let page: Vec<Vec<u8>>;
        (cursor, page) = scan.query(connection)?;
        keys.extend(page);
        if cursor == 0 {
            return Ok(keys);
        }
    }
}
