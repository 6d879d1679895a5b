//! The examples as a reader runs them: processes that get HTTP requests.
//!
//! `cargo test` builds the examples. `cargo test --test examples` does not: it runs the programs of
//! the last build.

use std::env::consts::EXE_SUFFIX;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use serde_json::json;
use tokio::io::AsyncWriteExt;
use tokio::process::Command;
use tower_dedup::provider;

use crate::server::{Server, answer, duplicate, effect, eventually, first, program};
use support::postgres::Schema;
use support::redis::{fresh_prefix, shared, with_prefix};
use support::sqlite_url;

pub(super) fn example(name: &str) -> Command {
    let test = std::env::current_exe().unwrap();
    let profile = test.ancestors().nth(2).unwrap();
    let path: PathBuf = profile.join("examples").join(format!("{name}{EXE_SUFFIX}"));
    assert!(path.exists(), "{} is missing: cargo build --examples --profile test", path.display());
    program(&path)
}

/// Runs an example to its end. Returns whether it succeeded, and its output.
pub(super) async fn run(command: &mut Command) -> (bool, String) {
    let output = tokio::time::timeout(Duration::from_secs(60), command.output()).await;
    let output = output.unwrap_or_else(|_| panic!("{command:?} does not end")).unwrap();
    let said = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8(said).unwrap())
}

/// Runs a command to its end with this input. Returns whether it succeeded, and what it printed.
pub(super) async fn piped(command: &mut Command, input: &str) -> (bool, String) {
    let mut process = command.stdin(Stdio::piped()).spawn().unwrap();
    let mut stdin = process.stdin.take().unwrap();
    stdin.write_all(input.as_bytes()).await.unwrap();
    drop(stdin);
    let output = tokio::time::timeout(Duration::from_secs(60), process.wait_with_output());
    let output = output.await.unwrap_or_else(|_| panic!("{command:?} does not end")).unwrap();
    (output.status.success(), String::from_utf8(output.stdout).unwrap())
}

/// Starts an example that serves.
pub(super) async fn start(name: &str, args: &[&str]) -> Server {
    Server::spawn(example(name).args(args)).await
}

/// Two receivers on one store: every event takes effect once.
async fn receivers(store: &str, ledger: &str) {
    receivers_with(&["--store", store, "--ledger", ledger], ledger).await;
}

async fn receivers_with(args: &[&str], ledger: &str) {
    // The receivers start together and race to create their tables.
    let start = || start("receiver", args);
    let (one, other) = tokio::join!(start(), start());
    assert_eq!(one.deliver("msg_1", "").await, first());
    assert_eq!(other.deliver("msg_1", "").await, duplicate());
    assert_eq!(one.deliver("msg_2", "?fail=500").await, (500, None));
    let mut expected = vec![effect("msg_1", 1)];
    assert_eq!(one.get("/effects").await, json!(expected), "a failed handler leaves no effect");
    if ledger == "on-arrival" {
        assert_eq!(other.deliver("msg_2", "").await, duplicate());
    } else {
        assert_eq!(other.deliver("msg_2", "").await, first());
        expected.push(effect("msg_2", 1));
    }
    assert_eq!(other.get("/effects").await, json!(expected));

    let urls =
        [&one, &other].map(|server| format!("{}/webhooks/standard-webhooks", server.address));
    let storm = ["--url", &urls[0], "--url", &urls[1], "--keys", "40", "--copies", "9"];
    let (succeeded, said) = run(example("storm").args(storm)).await;
    assert!(succeeded, "{said}");
    one.stop().await;
    other.stop().await;
}

#[tokio::test]
async fn receivers_on_postgres_transactional() {
    receivers(&Schema::fresh().url(), "transactional").await;
}

#[tokio::test]
async fn receivers_on_sqlite_transactional() {
    let dir = tempfile::tempdir().unwrap();
    let url = sqlite_url(dir.path());
    receivers(&url, "transactional").await;
}

/// The effects are not in the store: a store that has lost its keys shows.
#[tokio::test]
async fn receivers_on_redis_keep_their_effects_elsewhere() {
    let dir = tempfile::tempdir().unwrap();
    let effects = sqlite_url(dir.path());
    for ledger in ["lease", "on-arrival"] {
        let store = with_prefix(shared(), &fresh_prefix());
        let schema = Schema::fresh();
        let effects = if ledger == "lease" { effects.clone() } else { schema.url() };
        let args = ["--store", &store, "--ledger", ledger, "--effects", &effects];
        receivers_with(&args, ledger).await;
        let effects = ["--store", "memory:", "--effects", &effects];
        let receiver = start("receiver", &effects).await;
        assert_eq!(receiver.deliver("msg_1", "").await, first());
        let counted = receiver.get("/effects").await;
        assert!(counted.as_array().unwrap().contains(&effect("msg_1", 2)), "{counted}");
        receiver.stop().await;
    }
}

#[tokio::test]
async fn receiver_refuses_what_it_cannot_do() {
    let store = with_prefix(shared(), &fresh_prefix());
    let memory = ["--store", "memory:"];
    let secret = |sender| Some((sender, "secret"));
    for (args, secret, why) in [
        (&["--store", &*store, "--effects", &*store][..], None, "--effects needs a database"),
        (&["--store", &*store, "--ledger", "transactional"], None, "needs a database"),
        (&["--store", "memory:", "--ledger", "transactional"], None, "needs a database"),
        (&["--ledger", "transactional", "--effects", "sqlite://e.db"], None, "leave --effects out"),
        (&["--inbox", "--ledger", "on-arrival"], None, "--inbox needs a ledger that releases"),
        (&["--inbox", "redis://127.0.0.1"], None, "--inbox needs a database"),
        // A route that was meant to be verified would pass every request.
        (&memory, secret("WEBHOOK_SECRET_NOBODY"), "it knows WEBHOOK_SECRET_STANDARD_WEBHOOKS, "),
        (&memory, secret("WEBHOOK_SECRET_github"), "cannot verify such a sender"),
        (&memory, secret("WEBHOOK_SECRET_STANDARD_WEBHOOKS"), "base64"),
        (&memory, secret("WEBHOOK_SECRET_TWILIO"), "set --public-url"),
    ] {
        let mut receiver = example("receiver");
        let dir = tempfile::tempdir().unwrap();
        receiver.current_dir(dir.path()).args(args).args(["--listen", "127.0.0.1:0"]).envs(secret);
        let (succeeded, said) = run(&mut receiver).await;
        assert!(!succeeded && said.contains(why), "{said}");
    }
}

/// Without options the store is a file in the current folder, and a restart opens it again.
#[tokio::test]
async fn receiver_without_options_remembers_across_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let start = async || Server::spawn(example("receiver").current_dir(dir.path())).await;
    let receiver = start().await;
    assert_eq!(receiver.deliver("msg_1", "").await, first());
    receiver.stop().await;
    let receiver = start().await;
    assert_eq!(receiver.deliver("msg_1", "").await, duplicate());
    assert_eq!(receiver.get("/effects").await, json!([effect("msg_1", 1)]));
    receiver.stop().await;
}

/// The documentation of `receiver` holds on every ledger. A forged request claims no key, and a
/// sender without a secret is not verified.
#[tokio::test]
async fn receiver_verifies_senders_that_have_a_secret() {
    for ledger in ["lease", "on-arrival", "transactional"] {
        let dir = tempfile::tempdir().unwrap();
        let mut receiver = example("receiver");
        receiver.current_dir(dir.path()).args(["--ledger", ledger]);
        // While a secret changes, both are valid.
        receiver
            .env("WEBHOOK_SECRET_GITHUB", "new")
            .env("WEBHOOK_SECRET_GITHUB_PREVIOUS", "mysecret");
        let receiver = Server::spawn(&mut receiver).await;
        // On another stream than the address.
        eventually(|| receiver.said().contains("verified: github\n")).await;
        let deliver = async |id: &str, body: &'static str| {
            let request = receiver.post("/webhooks/github").header("x-github-delivery", id).header(
                "x-hub-signature-256",
                "sha256=4864d2759938a15468b5df9ade20bf161da9b4f737ea61794142f3484236bda3",
            );
            answer(&request.body(body).send().await.unwrap())
        };
        assert_eq!(deliver("72d3162e", "{}").await, (401, None));
        assert_eq!(receiver.get("/effects").await, json!([]));
        assert_eq!(deliver("72d3162e", r#"{"foo":"bar"}"#).await, first());
        assert_eq!(deliver("72d3162e", r#"{"foo":"bar"}"#).await, duplicate());
        assert_eq!(deliver("72d3162e", "{}").await, (401, None));
        // The id is not signed.
        assert_eq!(deliver("another", r#"{"foo":"bar"}"#).await, first());
        assert_eq!(receiver.deliver("msg_1", "").await, first());
        assert_eq!(receiver.get("/effects").await.as_array().map(Vec::len), Some(3));
        receiver.stop().await;
    }
}

/// A request that is no event, or whose sender is unknown, reaches the handler or is refused.
#[tokio::test]
async fn receiver_has_a_route_for_every_preset() {
    for ledger in ["lease", "transactional"] {
        let dir = tempfile::tempdir().unwrap();
        let mut receiver = example("receiver");
        let receiver = receiver.current_dir(dir.path()).args(["--ledger", ledger]);
        let receiver = Server::spawn(receiver).await;
        for preset in provider::ALL {
            for method in preset.methods() {
                let path = format!("{}/webhooks/{}", receiver.address, preset.name());
                let request = receiver.client.request(method.clone(), path).body("{}");
                let status = request.send().await.unwrap().status().as_u16();
                assert!([200, 400].contains(&status), "{method} {}: {status}", preset.name());
            }
        }
        assert_eq!(answer(&receiver.post("/webhooks/standard").send().await.unwrap()).0, 404);
        let challenge = r#"{"type": "url_verification", "challenge": "3eZbrw1a"}"#;
        let echo = receiver.post("/webhooks/slack").body(challenge).send().await.unwrap();
        assert_eq!((echo.status().as_u16(), &*echo.text().await.unwrap()), (200, "3eZbrw1a"));
        receiver.stop().await;
    }
}

#[tokio::test]
async fn metrics_of_the_receiver_are_what_prometheus_reads() {
    let receiver = start("receiver", &["--store", "memory:"]).await;
    assert_eq!(receiver.deliver("msg_1", "").await, first());
    assert_eq!(receiver.deliver("msg_1", "").await, duplicate());
    let answer = receiver.request("/metrics").send().await.unwrap();
    assert_eq!(answer.headers()["content-type"], "text/plain; version=0.0.4");
    let text = answer.text().await.unwrap();
    for expected in [
        r#"tower_dedup_deliveries_total{namespace="standard-webhooks",outcome="duplicate"} 1"#,
        "# HELP tower_dedup_deliveries_total Deliveries by outcome",
        "# TYPE tower_dedup_delivery_duration_seconds histogram",
    ] {
        assert!(text.lines().any(|line| line == expected), "{expected}: {text}");
    }
    receiver.stop().await;
}
