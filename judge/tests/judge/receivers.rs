//! The receivers, and the trials that each must fail.

use std::env;
use std::path::PathBuf;
use std::process::Stdio;

use support::postgres::{Schema, free_port};
use support::redis::{fresh_prefix, shared, with_prefix};
use support::sqlite_url;
use tokio::process::Command;

use crate::table::Verdicts;

/// Base64 of 24 bytes, for Standard Webhooks.
const SECRET: &str = "whsec_a2tra2tra2tra2tra2tra2tra2tra2tra2tr";

#[derive(Debug, Clone, Copy)]
pub(crate) enum Receiver {
    /// A design of `examples/wrong.rs`.
    Wrong(&'static str),
    /// `tests/receivers/tutorial.py`.
    Tutorial,
    /// The example `receiver`.
    Ours { store: &'static str, ledger: &'static str },
}

use Receiver::{Ours, Tutorial, Wrong};

#[derive(Debug)]
pub(crate) struct Case {
    pub(crate) receiver: Receiver,
    pub(crate) fails: &'static [&'static str],
}

const fn case(receiver: Receiver, fails: &'static [&'static str]) -> Case {
    Case { receiver, fails }
}

const fn ours(store: &'static str, ledger: &'static str, fails: &'static [&'static str]) -> Case {
    case(Ours { store, ledger }, fails)
}

/// On arrival, an event is lost with its run, and a duplicate is told 200 meanwhile.
const ON_ARRIVAL: &[&str] = &["failure-then-retry", "kill-in", "second-while-first-runs"];
/// A lease repeats an event after a death.
const LEASE: &[&str] = &["kill-in"];

pub(crate) const CASES: &[Case] = &[
    ours("sqlite", "transactional", &[]),
    ours("postgres", "transactional", &[]),
    ours("sqlite", "lease", LEASE),
    ours("postgres", "lease", LEASE),
    ours("redis", "lease", LEASE),
    ours("memory", "lease", &["kill-in", "kill-after"]),
    ours("sqlite", "on-arrival", ON_ARRIVAL),
    ours("postgres", "on-arrival", ON_ARRIVAL),
    ours("redis", "on-arrival", ON_ARRIVAL),
    ours(
        "memory",
        "on-arrival",
        &["failure-then-retry", "second-while-first-runs", "kill-in", "kill-after"],
    ),
    case(Wrong("right"), &[]),
    case(Wrong("no-deduplication"), &[]),
    case(
        Wrong("check-then-insert"),
        &["two-at-once", "sixteen-at-once", "second-while-first-runs"],
    ),
    case(
        Wrong("insert-before"),
        &["second-while-first-runs", "failure-then-retry", "hang-up", "kill-in"],
    ),
    case(
        Wrong("insert-after"),
        &["two-at-once", "sixteen-at-once", "second-while-first-runs", "hang-up", "kill-in"],
    ),
    case(Wrong("answer-first"), &["second-while-first-runs", "failure-then-retry", "kill-after"]),
    case(Wrong("conflict"), &["first-and-second", "two-at-once", "sixteen-at-once"]),
    case(Wrong("ok-in-flight"), &["second-while-first-runs"]),
    case(Wrong("memory"), &["kill-in", "kill-after"]),
    case(Wrong("body-digest"), &["equal-bytes", "other-body-same-id"]),
    case(
        Wrong("no-signature"),
        &["signature-forged", "signature-missing", "signature-stale", "signature-doubled"],
    ),
    case(Wrong("any-time"), &["signature-stale"]),
    case(
        Wrong("signature-after"),
        &["signature-forged", "signature-missing", "signature-stale", "signature-doubled"],
    ),
    case(Wrong("key-before-body"), &[]),
    case(Wrong("default-id"), &["id-empty"]),
    case(Wrong("truncated-id"), &["id-long"]),
    case(Tutorial, &["two-at-once", "sixteen-at-once", "second-while-first-runs", "kill-in"]),
];

/// Returns the program of an example, in quotes for a shell.
fn example(name: &str) -> String {
    let test = env::current_exe().unwrap();
    let path = test.ancestors().nth(2).unwrap().join("examples").join(name);
    assert!(path.exists(), "{} is missing: cargo build --examples --profile test", path.display());
    format!("'{}'", path.display())
}

impl Case {
    pub(crate) fn name(&self) -> String {
        match self.receiver {
            Wrong(design) => design.to_owned(),
            Tutorial => "tutorial.py".to_owned(),
            Ours { store, ledger } => format!("{store} {ledger}"),
        }
    }

    pub(crate) async fn judge(&self) -> Verdicts {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| -> PathBuf {
            let path = dir.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        let database = dir.path().join("events.db");
        let address = format!("127.0.0.1:{}", free_port());
        let schema = matches!(self.receiver, Ours { store: "postgres", .. }).then(Schema::fresh);
        let (sender, path, start) = match self.receiver {
            Wrong(design) => {
                let start = format!(
                    "exec {} {design} --listen {address} --database '{}'",
                    example("wrong"),
                    database.display()
                );
                ("standard-webhooks", "/webhook", start)
            }
            Tutorial => {
                let program = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/receivers/tutorial.py");
                let database = database.display();
                let start =
                    format!("exec python3 '{program}' --listen {address} --database '{database}'");
                ("github", "/webhook", start)
            }
            Ours { store, ledger } => {
                let sqlite = sqlite_url(dir.path());
                let url = match store {
                    "memory" => "memory:".to_owned(),
                    "sqlite" => sqlite.clone(),
                    "postgres" => schema.as_ref().unwrap().url(),
                    _ => with_prefix(shared(), &fresh_prefix()),
                };
                let mut start = format!("exec {} --listen {address}", example("receiver"));
                start += &format!(" --store '{url}' --ledger {ledger} --lease-seconds 2");
                if matches!(store, "memory" | "redis") {
                    start += &format!(" --effects '{sqlite}'");
                }
                ("standard-webhooks", "/webhooks/standard-webhooks", start)
            }
        };
        let request = |query: &str| {
            format!("POST {path}?{query} HTTP/1.1\ncontent-type: application/json\n\n{{\"n\":1}}")
        };
        let mut judge = Command::new(env!("CARGO_BIN_EXE_tower-dedup-judge"));
        judge.arg(format!("http://{address}{path}")).args(["--sender", sender, "--json"]);
        judge.args(["--secret-env", "JUDGE_SECRET", "--patience", "10s"]);
        judge.args(["--count-url", &format!("http://{address}/effects")]).args(["--start", &start]);
        judge.arg("--slow").arg(file("slow", &request("delay_ms=700&delay_after_ms=500")));
        judge.arg("--failing").arg(file("failing", &request("fail_runs=1")));
        judge.arg("--log").arg(dir.path().join("log"));
        for name in ["JUDGE_SECRET", "WEBHOOK_SECRET", "WEBHOOK_SECRET_STANDARD_WEBHOOKS"] {
            judge.env(name, SECRET);
        }
        let judge = judge.env_remove("RUST_LOG").stdin(Stdio::null()).kill_on_drop(true);
        let output = judge.output().await.unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let log = std::fs::read_to_string(dir.path().join("log")).unwrap_or_default();
        let verdicts = Verdicts::read(&output.stdout);
        let code = if verdicts.failed().next().is_some() { 1 } else { 0 };
        assert_eq!(output.status.code(), Some(code), "{}: {said}\n{log}", self.name());
        verdicts
    }
}
