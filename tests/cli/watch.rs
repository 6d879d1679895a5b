//! `watch`: rounds, rates, and a store that goes away and comes back.

use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;
use sqlx::{Connection, PgConnection};
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};
use tower_dedup::adapter::{DedupAdapter, PostgresAdapter};

use crate::command::{command, run};
use crate::support::cluster::blocking;
use crate::support::postgres::{Schema, Server};
use crate::support::{sorted_keys, sqlite_url, terms};

/// A command that watches.
pub(crate) struct Watch {
    lines: Lines<BufReader<ChildStdout>>,
    /// Killed when it is dropped.
    process: Child,
}

impl Watch {
    pub(crate) fn start(store: &str, args: &[&str]) -> Self {
        let mut command = Command::from(command());
        command.env("TOWER_DEDUP_STORE", store).args(["watch", "--every", "100ms"]).args(args);
        command.stdout(Stdio::piped()).stderr(Stdio::null()).kill_on_drop(true);
        let mut process = command.spawn().unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        Self { lines, process }
    }

    /// Returns the next line of which this is true.
    pub(crate) async fn until(&mut self, is: impl Fn(&str) -> bool) -> String {
        let found = tokio::time::timeout(Duration::from_secs(60), async {
            loop {
                let line = self.lines.next_line().await.unwrap().expect("the command goes on");
                if is(&line) {
                    return line;
                }
            }
        });
        found.await.expect("such a line")
    }
}

#[tokio::test]
async fn watch_prints_rates_from_the_second_round_on() {
    let schema = Schema::fresh();
    let adapter = PostgresAdapter::connect(&schema.url()).await.unwrap();
    adapter.migrate().await.unwrap();
    let mut watch = Watch::start(&schema.url(), &["--json"]);
    let first: Value = serde_json::from_str(&watch.until(|_| true).await).unwrap();
    assert_eq!((&first["rows"], &first["rates_per_second"]), (&0.into(), &Value::Null));
    let claimed = terms();
    let keys = sorted_keys("watch", 20);
    adapter.claim(&keys, &claimed).await.unwrap();
    adapter.complete(&keys, &claimed).await.unwrap();
    let has_rate = |name: &'static str| {
        move |line: &str| {
            let round: Value = serde_json::from_str(line).unwrap();
            round["rates_per_second"][name].as_f64().is_some_and(|rate| rate > 0.0)
        }
    };
    // The server publishes inserts and updates together.
    let line = watch.until(has_rate("inserts")).await;
    assert!(has_rate("updates")(&line), "{line}");
    let round: Value = serde_json::from_str(&line).unwrap();
    assert_eq!((&round["complete"], &round["is_exact"]), (&20.into(), &true.into()));
}

#[tokio::test]
async fn watch_goes_on_when_the_store_is_away() {
    let server = blocking(Server::start).await;
    let url = server.url();
    run(&url, &["migrate"]).await.assert(0, "made");
    let mut watch = Watch::start(&url, &["--timeout", "2s"]);
    watch.until(|line| line.contains("keys 0")).await;
    let server = blocking(move || {
        server.stop_immediately();
        server
    })
    .await;
    watch.until(|line| line.contains("unavailable: ")).await;
    run(&url, &["watch", "--once"]).await.assert(3, "refused");
    let _server = blocking(move || {
        server.start_again();
        server
    })
    .await;
    watch.until(|line| line.contains("keys 0")).await;
}

#[tokio::test]
async fn watch_of_a_file_has_no_rates() {
    let dir = tempfile::tempdir().unwrap();
    let url = sqlite_url(dir.path());
    run(&url, &["migrate"]).await.assert(0, "made");
    let mut watch = Watch::start(&url, &[]);
    watch.until(|_| true).await;
    let second = watch.until(|_| true).await;
    assert!(second.contains("keys 0") && !second.contains("/s"), "{second}");
    let once = run(&url, &["watch", "--once", "--json"]).await;
    assert_eq!(once.json()[0]["rates_per_second"], Value::Null);
}

/// A command that reads does not make a table again that was dropped.
#[tokio::test]
async fn dropped_table_stays_dropped() {
    let schema = Schema::fresh();
    let url = schema.url();
    run(&url, &["migrate"]).await.assert(0, "made");
    let mut watch = Watch::start(&url, &[]);
    watch.until(|line| line.contains("keys 0")).await;
    let mut connection = PgConnection::connect(&url).await.unwrap();
    let drop = "DROP TABLE webhook_deliveries, webhook_deliveries_schema";
    sqlx::raw_sql(drop).execute(&mut connection).await.unwrap();
    let ended = tokio::time::timeout(Duration::from_secs(60), watch.process.wait()).await;
    assert_eq!(ended.expect("the command ends").unwrap().code(), Some(4));
    run(&url, &["stats"]).await.assert(4, "the store has no table");
    run(&url, &["migrate", "--check"]).await.assert(1, "missing");
}

/// A lock that another session holds ends no wait; `--timeout` does.
#[tokio::test]
async fn locked_table_is_waited_for_until_the_timeout() {
    let schema = Schema::fresh();
    let url = schema.url();
    run(&url, &["migrate"]).await.assert(0, "made");
    let mut connection = PgConnection::connect(&url).await.unwrap();
    let mut lock = connection.begin().await.unwrap();
    let sql = "LOCK TABLE webhook_deliveries_schema IN ACCESS EXCLUSIVE MODE";
    sqlx::raw_sql(sql).execute(&mut *lock).await.unwrap();
    for args in [&["get", "test", "a"][..], &["stats"], &["migrate", "--check"], &["watch"]] {
        let ran = run(&url, &[args, &["--timeout", "300ms"]].concat()).await;
        ran.assert(3, "the store timed out");
    }
    let ran = run(&url, &["doctor", "--timeout", "300ms"]).await;
    ran.assert(1, "error    table         cannot be read: the store timed out");
    lock.rollback().await.unwrap();
    run(&url, &["stats", "--timeout", "10s"]).await.assert(0, "keys");
}

/// The counts of the rates wait for a lock of the catalog, and no other statement of `watch` does.
#[tokio::test]
async fn watch_goes_on_when_its_rates_are_locked() {
    let server = blocking(Server::start).await;
    let url = server.url();
    run(&url, &["migrate"]).await.assert(0, "made");
    let mut watch = Watch::start(&url, &["--timeout", "300ms"]);
    watch.until(|line| line.contains("new ")).await;
    let mut connection = PgConnection::connect(&url).await.unwrap();
    let mut lock = connection.begin().await.unwrap();
    let sql = "LOCK TABLE pg_inherits IN ACCESS EXCLUSIVE MODE";
    sqlx::raw_sql(sql).execute(&mut *lock).await.unwrap();
    watch.until(|line| line.contains("unavailable: the store timed out")).await;
    lock.rollback().await.unwrap();
    watch.until(|line| line.contains("keys 0")).await;
}
