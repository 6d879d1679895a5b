//! The receivers, and the trials that each must fail.

use std::env;
use std::net::TcpListener;
use std::path::Path;
use std::process::{self, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use support::postgres::Schema;
use support::redis::{fresh_prefix, shared, with_prefix};
use tokio::process::Command;

use crate::table::Verdicts;

/// The base64 of 30 bytes, for Standard Webhooks. GitHub takes any text.
const SECRET: &str = "whsec_a2tra2tra2tra2tra2tra2tra2tra2tra2tr";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Receiver {
    /// The example `receiver`.
    Ours { store: &'static str, ledger: &'static str, inbox: bool },
    /// A design of `examples/wrong.rs`.
    ByHand(&'static str),
    /// `tests/receivers/tutorial.py`.
    Tutorial,
    /// `tests/receivers/lossy.py`, which is right, with this number of seconds until an effect shows.
    Lossy(u8),
}

/// A receiver, and the trials that it fails.
#[derive(Debug)]
pub(crate) struct Case(pub(crate) Receiver, pub(crate) &'static [&'static str]);

const fn ours(store: &'static str, ledger: &'static str, fails: &'static [&'static str]) -> Case {
    Case(Receiver::Ours { store, ledger, inbox: false }, fails)
}

const fn by_hand(design: &'static str, fails: &'static [&'static str]) -> Case {
    Case(Receiver::ByHand(design), fails)
}

/// Rows L7, A2 to A4 of `docs/guarantees.md`: a lease repeats after a death; on arrival, an event is lost with its run, and
/// its duplicate is told 200 meanwhile. A memory forgets at a death.
const LEASE: &[&str] = &["kill-in"];
const LEASE_IN_MEMORY: &[&str] = &["kill-in", "kill-after"];
const ON_ARRIVAL: &[&str] = &["second-while-first-runs", "failure-then-retry", "kill-in"];
const ON_ARRIVAL_IN_MEMORY: &[&str] =
    &["second-while-first-runs", "failure-then-retry", "kill-in", "kill-after"];

const SIGNATURES: &[&str] =
    &["signature-forged", "signature-missing", "signature-stale", "signature-doubled"];

pub(crate) const CASES: &[Case] = &[
    ours("Postgres", "transactional", &[]),
    ours("SQLite", "transactional", &[]),
    Case(Receiver::Ours { store: "SQLite", ledger: "transactional", inbox: true }, &[]),
    ours("Postgres", "lease", LEASE),
    ours("SQLite", "lease", LEASE),
    ours("Redis", "lease", LEASE),
    ours("memory", "lease", LEASE_IN_MEMORY),
    ours("Postgres", "on-arrival", ON_ARRIVAL),
    ours("SQLite", "on-arrival", ON_ARRIVAL),
    ours("Redis", "on-arrival", ON_ARRIVAL),
    ours("memory", "on-arrival", ON_ARRIVAL_IN_MEMORY),
    by_hand("right", &[]),
    by_hand(
        "no-deduplication",
        &[
            "first-and-second",
            "two-at-once",
            "sixteen-at-once",
            "second-while-first-runs",
            "signature-doubled",
            "other-body-same-id",
            "id-long",
            "id-odd",
            "body-slow",
            "body-chunked",
            "hang-up",
            "kill-in",
            "kill-after",
        ],
    ),
    by_hand(
        "check-then-insert",
        &["two-at-once", "sixteen-at-once", "second-while-first-runs", "hang-up"],
    ),
    by_hand(
        "insert-before",
        &["second-while-first-runs", "failure-then-retry", "hang-up", "kill-in"],
    ),
    by_hand(
        "insert-after",
        &["two-at-once", "sixteen-at-once", "second-while-first-runs", "hang-up", "kill-in"],
    ),
    // To answer before the effect is no fault by itself: the receiver may have stored the event.
    by_hand("answer-first", &["failure-then-retry", "kill-in", "kill-after"]),
    // Each trial that repeats an event which was handled.
    by_hand(
        "conflict",
        &[
            "first-and-second",
            "two-at-once",
            "sixteen-at-once",
            "second-while-first-runs",
            "signature-doubled",
            "body-slow",
            "body-chunked",
            "hang-up",
            "kill-in",
            "kill-after",
        ],
    ),
    by_hand("ok-in-flight", &["second-while-first-runs"]),
    by_hand("memory", &["kill-in", "kill-after"]),
    // The slow events have equal bodies, too.
    by_hand("body-digest", &["other-body-same-id", "equal-bytes", "hang-up", "kill-in"]),
    by_hand("no-signature", SIGNATURES),
    by_hand("any-time", &["signature-stale"]),
    by_hand("signature-after", SIGNATURES),
    by_hand(
        "key-before-body",
        &[
            "second-while-first-runs",
            "failure-then-retry",
            "signature-forged",
            "signature-missing",
            "signature-stale",
            "signature-doubled",
            "body-slow",
            "body-broken",
            "hang-up",
            "kill-before",
            "kill-in",
        ],
    ),
    by_hand("default-id", &["id-empty"]),
    by_hand("truncated-id", &["id-long"]),
    by_hand("folded-id", &["id-odd"]),
    by_hand("highest-id", &["order-swapped"]),
    by_hand("fixed-buffer", &["id-long"]),
    by_hand("rate-limit", SIGNATURES),
    by_hand("unverified-later", &[]),
    by_hand("queued-twice", &["late-effects"]),
    Case(
        Receiver::Tutorial,
        &[
            "two-at-once",
            "sixteen-at-once",
            "second-while-first-runs",
            "failure-then-retry",
            "id-empty",
            "hang-up",
            "kill-in",
        ],
    ),
    Case(Receiver::Lossy(0), &[]),
    Case(Receiver::Lossy(6), &[]),
];

impl Receiver {
    pub(crate) fn name(self) -> String {
        match self {
            Self::Ours { store, ledger, inbox } => {
                let inbox = if inbox { ", inbox" } else { "" };
                format!("{store}, {}{inbox}", ledger.replace('-', " "))
            }
            Self::ByHand(design) => design.to_owned(),
            Self::Tutorial => "tutorial.py".to_owned(),
            Self::Lossy(0) => "lossy.py".to_owned(),
            Self::Lossy(seconds) => format!("lossy.py --late {seconds}"),
        }
    }

    /// The only trials of this receiver: the verdicts of the others depend on which of several events is first, are unknown,
    /// or take a long time.
    fn only(self) -> &'static [&'static str] {
        match self {
            Self::ByHand("highest-id") => &["order-swapped"],
            Self::ByHand("rate-limit" | "unverified-later") => SIGNATURES,
            // The slow body gives the queue its time.
            Self::ByHand("queued-twice") => &["first-and-second", "body-slow", "late-effects"],
            Self::Lossy(1..) => &["signature-missing", "id-long", "body-chunked"],
            _ => &[],
        }
    }

    /// The trials that say nothing about this receiver.
    pub(crate) fn untold(self) -> &'static [&'static str] {
        match self {
            // It does not say why it refuses.
            Self::ByHand("unverified-later") => SIGNATURES,
            _ if !self.only().is_empty() => &[],
            // GitHub signs no time.
            Self::Tutorial => &["an-hour-later", "signature-stale"],
            _ => &["an-hour-later"],
        }
    }

    /// Runs the judge on the receiver.
    pub(crate) async fn judge(self) -> Verdicts {
        let dir = tempfile::tempdir().unwrap();
        let place = Place::new(self, dir.path());
        let file = |name: &str, text: String| {
            let path = dir.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        let delivery = |query: &str| {
            let path = place.path;
            let body = format!(r#"{{"of":"{query}"}}"#);
            format!("POST {path}?{query} HTTP/1.1\ncontent-type: application/json\n\n{body}")
        };
        let log = file("log", String::new());
        let mut judge = Command::new(env!("CARGO_BIN_EXE_tower-dedup-judge"));
        judge.arg(format!("http://{}{}", place.address, place.path)).arg("--json");
        judge.args(["--sender", place.sender, "--secret-env", "JUDGE_SECRET"]);
        judge.args(&place.count).args(["--start", &place.start]).arg("--log").arg(&log);
        judge.arg("--slow").arg(file("slow", delivery("delay_ms=600&delay_after_ms=600")));
        judge.arg("--failing").arg(file("failing", delivery("fail_runs=1")));
        judge.args(["--patience", place.patience]);
        for trial in self.only() {
            judge.args(["--only", trial]);
        }
        for name in ["JUDGE_SECRET", "WEBHOOK_SECRET", "WEBHOOK_SECRET_STANDARD_WEBHOOKS"] {
            judge.env(name, SECRET);
        }
        let judge = judge.env_remove("RUST_LOG").stdin(Stdio::null()).kill_on_drop(true);
        let output = judge.output().await.unwrap();
        let verdicts = Verdicts::read(&output.stdout);
        let code = i32::from(verdicts.are("fail").next().is_some());
        if output.status.code() != Some(code) {
            let said = String::from_utf8_lossy(&output.stderr);
            let log = std::fs::read_to_string(log).unwrap();
            panic!("{}: {}\n{said}\n{log}", self.name(), output.status);
        }
        verdicts
    }
}

/// Where a receiver runs, and what the judge is told of it.
struct Place {
    address: String,
    path: &'static str,
    sender: &'static str,
    /// The command of `--start`.
    start: String,
    count: [String; 2],
    patience: &'static str,
    /// Removed in the end.
    _schema: Option<Schema>,
}

impl Place {
    fn new(receiver: Receiver, dir: &Path) -> Self {
        let host = if matches!(receiver, Receiver::Lossy(_)) { "[::1]" } else { "127.0.0.1" };
        let address = format!("{host}:{}", port());
        let dir = dir.to_str().unwrap();
        let schema =
            matches!(receiver, Receiver::Ours { store: "Postgres", .. }).then(Schema::fresh);
        let by_url = ["--count-url".to_owned(), format!("http://{address}/effects")];
        let (sender, path, start, count) = match receiver {
            Receiver::Ours { store, ledger, inbox } => {
                let sqlite = format!("sqlite://{dir}/dedup.db");
                let (url, count) = match (store, &schema) {
                    // It counts without the receiver, which the judge stops to find the moment after the effect.
                    ("Postgres", Some(schema)) => {
                        let from = format!("FROM {}.effects GROUP BY id", schema.name());
                        let url = schema.database_url();
                        let count = format!("psql -AtXc 'SELECT id, count(*) {from}' '{url}'");
                        (schema.url(), ["--count".to_owned(), count])
                    }
                    ("SQLite", _) => (sqlite.clone(), by_url),
                    ("Redis", _) => (with_prefix(shared(), &fresh_prefix()), by_url),
                    _ => ("memory:".to_owned(), by_url),
                };
                let mut start = format!("exec {}", example("receiver"));
                start += &format!(" --store '{url}' --ledger {ledger} --lease-seconds 2");
                if matches!(store, "memory" | "Redis") {
                    start += &format!(" --effects '{sqlite}'");
                }
                if inbox {
                    start += &format!(" --inbox 'sqlite://{dir}/inbox.db'");
                }
                ("standard-webhooks", "/webhooks/standard-webhooks", start, count)
            }
            Receiver::ByHand(design) => {
                let start = format!("exec {} {design} --database '{dir}/e.db'", example("wrong"));
                ("standard-webhooks", "/webhook", start, by_url)
            }
            Receiver::Tutorial => {
                let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/receivers/tutorial.py");
                let start = format!("exec python3 '{file}' --database '{dir}/events.db'");
                ("github", "/webhook", start, by_url)
            }
            Receiver::Lossy(seconds) => {
                let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/receivers/lossy.py");
                let start = format!("exec python3 '{file}' --database '{dir}/events.db'");
                let start = format!("{start} --late {seconds}");
                ("standard-webhooks", "/webhook", start, by_url)
            }
        };
        let start = format!("{start} --listen {address}");
        // Without a lease, what has no effect soon has none.
        let has_lease = matches!(receiver, Receiver::Ours { ledger, .. } if ledger != "on-arrival");
        let patience = match receiver {
            Receiver::Lossy(1..) => "30s",
            _ if has_lease => "10s",
            _ => "3s",
        };
        Self { address, path, sender, start, count, patience, _schema: schema }
    }
}

/// Returns a port that no other test takes while its receiver is dead: [`support`] takes those from 15,000 on.
fn port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let first = process::id() % 100 * 50;
    let next = || 10_000 + (first + NEXT.fetch_add(1, Ordering::Relaxed)) % 5_000;
    let mut ports = std::iter::repeat_with(next).filter_map(|port| u16::try_from(port).ok());
    ports.find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok()).expect("a free port")
}

/// Returns the program of an example, in quotes for a shell.
pub(crate) fn example(name: &str) -> String {
    let test = env::current_exe().unwrap();
    let path = test.ancestors().nth(2).unwrap().join("examples").join(name);
    assert!(path.exists(), "{} is missing: cargo build --examples --profile test", path.display());
    format!("'{}'", path.display())
}
