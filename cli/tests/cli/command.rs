//! Runs the command.

use std::env;
use std::io::ErrorKind;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;
use sqlx::{AssertSqlSafe, Connection, PgConnection, SqliteConnection};
use tokio::io::AsyncWriteExt;
use tokio::process::Child;

/// The end of a run.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Ran {
    /// Returns the lines of JSON on stdout.
    pub(crate) fn json(&self) -> Vec<Value> {
        let lines = self.stdout.lines().map(serde_json::from_str);
        lines.collect::<Result<_, _>>().unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// Returns everything that was printed.
    pub(crate) fn said(&self) -> String {
        format!("{}{}", self.stdout, self.stderr)
    }

    #[track_caller]
    pub(crate) fn assert(&self, code: i32, words: &str) {
        assert_eq!(self.code, code, "{self:?}");
        assert!(self.said().contains(words), "{words:?} in {self:?}");
    }

    /// Asserts that `doctor --json` has found this, and that a finding which is not ok says what to do.
    #[track_caller]
    pub(crate) fn assert_finding(&self, check: &str, level: &str, words: &str) {
        let findings = self.json();
        let is_it = |finding: &&Value| finding["check"] == check && finding["level"] == level;
        let finding = findings.iter().find(is_it);
        let finding = finding.unwrap_or_else(|| panic!("no {level} of {check}: {self:?}"));
        let (found, advice) = (finding["found"].as_str().unwrap(), finding["advice"].as_str());
        let text = format!("{found} -> {}", advice.unwrap_or_default());
        assert!(text.contains(words), "{check}: {words:?} in {text:?}");
        assert_eq!(advice.is_some(), level != "ok", "{finding}");
        let has_error = findings.iter().any(|finding| finding["level"] == "error");
        assert_eq!(self.code, i32::from(has_error), "{self:?}");
    }
}

/// Returns the URL with this parameter.
pub(crate) fn with(url: &str, parameter: &str) -> String {
    let and = if url.contains('?') { '&' } else { '?' };
    format!("{url}{and}{parameter}")
}

/// Runs `doctor` on this store.
pub(crate) async fn doctor(store: &str) -> Ran {
    run(store, &["doctor", "--json"]).await
}

/// Runs SQL on a SQLite or Postgres store.
pub(crate) async fn execute(store: &str, sql: &str) {
    let sql = sqlx::raw_sql(AssertSqlSafe(sql));
    if store.starts_with("sqlite:") {
        let mut connection = SqliteConnection::connect(store).await.unwrap();
        sql.execute(&mut connection).await.unwrap();
        connection.close().await.unwrap();
    } else {
        let mut connection = PgConnection::connect(store).await.unwrap();
        sql.execute(&mut connection).await.unwrap();
        connection.close().await.unwrap();
    }
}

/// Returns the command without the settings of the tests' own environment.
pub(crate) fn command() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tower-dedup"));
    command.env_remove("TOWER_DEDUP_STORE").env("USER", "grace").env("TERM", "dumb");
    for (name, _) in env::vars_os() {
        if name.to_string_lossy().starts_with("PG") {
            command.env_remove(name);
        }
    }
    command
}

/// Runs the command on this store.
pub(crate) async fn run(store: &str, args: &[&str]) -> Ran {
    run_with(store, args, "").await
}

/// Runs the command on this store, with this text on its stdin.
pub(crate) async fn run_with(store: &str, args: &[&str], stdin: &str) -> Ran {
    let mut command = command();
    command.env("TOWER_DEDUP_STORE", store).args(args);
    end_of(command, stdin).await
}

pub(crate) async fn end_of(mut command: Command, stdin: &str) -> Ran {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut process = spawn(command);
    // The process may end before it has read all of stdin.
    let _ = process.stdin.take().expect("a pipe").write_all(stdin.as_bytes()).await;
    let ended = tokio::time::timeout(Duration::from_secs(60), process.wait_with_output()).await;
    let output = ended.expect("the command ends").unwrap();
    Ran {
        code: output.status.code().expect("an exit code"),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

pub(crate) fn spawn(command: Command) -> Child {
    let mut command = tokio::process::Command::from(command);
    command.kill_on_drop(true);
    for _ in 0..100 {
        match command.spawn() {
            // A child that another thread forks has a file open for writing until it runs its own program.
            Err(error) if error.kind() == ErrorKind::ExecutableFileBusy => {
                std::thread::sleep(Duration::from_millis(10));
            }
            spawned => return spawned.expect("a command"),
        }
    }
    panic!("the program is open for writing");
}

/// Returns the exit code of the command on this store, if nobody reads what it prints on stdout or stderr.
pub(crate) async fn code_unread(store: &str, args: &[&str], stderr: bool) -> Option<i32> {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = command();
    command.env("TOWER_DEDUP_STORE", store).args(args);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    if stderr {
        command.stderr(writer)
    } else {
        command.stdout(writer)
    };
    let mut process = spawn(command);
    let ended = tokio::time::timeout(Duration::from_secs(60), process.wait()).await;
    ended.expect("the command ends").unwrap().code()
}
