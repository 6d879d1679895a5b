//! The examples as a reader runs them: processes that get HTTP requests.
//!
//! `cargo test` builds the examples. `cargo test --test examples` does not: it runs the programs of
//! the last build.

use std::env::consts::EXE_SUFFIX;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit, Mac};
use reqwest::{Client, RequestBuilder, Response};
use serde_json::{Value, json};
use sha2::Sha256;
use sqlx::{Connection, PgConnection, SqliteConnection};
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::{Child, Command};
use tokio::task::JoinHandle;
use tower_dedup::provider;

use crate::support::postgres::Schema;
use crate::support::redis::{fresh_prefix, shared, with_prefix};
use crate::support::sqlite_url;

const KEY: &[u8] = b"what ack_fast is told to ask for";

pub(super) fn example(name: &str) -> Command {
    let test = std::env::current_exe().unwrap();
    let profile = test.ancestors().nth(2).unwrap();
    let path: PathBuf = profile.join("examples").join(format!("{name}{EXE_SUFFIX}"));
    assert!(path.exists(), "{} is missing: cargo build --examples", path.display());
    let mut command = Command::new(path);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    command.env_remove("RUST_LOG");
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy().into_owned();
        if name.starts_with("WEBHOOK_SECRET_") || name == "STRIPE_WEBHOOK_SECRET" {
            command.env_remove(name);
        }
    }
    command
}

/// Runs an example to its end. Returns whether it succeeded, and its output.
pub(super) async fn run(name: &str, args: &[&str]) -> (bool, String) {
    let output = example(name).args(args).output();
    let output = tokio::time::timeout(Duration::from_secs(60), output).await;
    let output = output.unwrap_or_else(|_| panic!("{name} {args:?} does not end")).unwrap();
    let said = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8(said).unwrap())
}

/// An example that serves.
pub(super) struct Server {
    process: Child,
    address: String,
    said: Arc<Mutex<String>>,
    readers: [JoinHandle<()>; 2],
    client: Client,
}

impl Server {
    pub(super) async fn start(name: &str, args: &[&str]) -> Self {
        Self::spawn(example(name).args(args)).await
    }

    pub(super) async fn spawn(command: &mut Command) -> Self {
        let mut process = command.args(["--listen", "127.0.0.1:0"]).spawn().unwrap();
        let said = Arc::<Mutex<String>>::default();
        let readers = [
            collect(process.stdout.take().unwrap(), &said),
            collect(process.stderr.take().unwrap(), &said),
        ];
        let address = || {
            let said = said.lock().unwrap();
            let (_, rest) = said.split_once("listening on ")?;
            Some(rest.split_once('\n')?.0.to_owned())
        };
        eventually(|| address().is_some() || readers.iter().all(JoinHandle::is_finished)).await;
        let address = address().unwrap_or_else(|| panic!("{command:?}: {}", said.lock().unwrap()));
        let client = Client::builder().no_proxy().timeout(Duration::from_secs(30)).build();
        Self { process, address, said, readers, client: client.unwrap() }
    }

    fn said(&self) -> String {
        self.said.lock().unwrap().clone()
    }

    pub(super) fn post(&self, path: &str) -> RequestBuilder {
        self.client.post(format!("{}{path}", self.address))
    }

    /// A GET request.
    pub(super) fn request(&self, path: &str) -> RequestBuilder {
        self.client.get(format!("{}{path}", self.address))
    }

    pub(super) async fn get(&self, path: &str) -> Value {
        let answer = self.request(path).send().await.unwrap();
        answer.error_for_status().unwrap().json().await.unwrap()
    }

    /// Delivers to a receiver.
    pub(super) async fn deliver(&self, id: &str, query: &str) -> Answer {
        let request =
            self.post(&format!("/webhooks/standard-webhooks{query}")).header("webhook-id", id);
        answer(&request.send().await.unwrap())
    }

    /// Delivers to `ack_fast`, signed at this time with this key.
    async fn deliver_signed(&self, id: &str, body: &str, at: SystemTime, key: &[u8]) -> Answer {
        let time = at.duration_since(UNIX_EPOCH).unwrap().as_secs();
        let mut mac = Hmac::<Sha256>::new_from_slice(key).unwrap();
        mac.update(format!("{id}.{time}.{body}").as_bytes());
        let signature = STANDARD.encode(mac.finalize().into_bytes());
        let request = self
            .post("/webhooks")
            .header("webhook-id", id)
            .header("webhook-timestamp", time)
            .header("webhook-signature", format!("v1,{signature}"))
            .header("content-type", "application/json")
            .body(body.to_owned());
        answer(&request.send().await.unwrap())
    }

    /// Sends SIGKILL, and waits for the end.
    pub(super) async fn kill(mut self) {
        self.process.kill().await.unwrap();
    }

    /// Sends SIGTERM, and waits for an orderly end, which the program logs.
    pub(super) async fn stop(self) {
        let said = self.end().await;
        assert!(said.contains("stopped"), "{said}");
    }

    /// Sends SIGTERM, and waits for the end. Returns the output.
    pub(super) async fn end(mut self) -> String {
        let id = self.process.id().unwrap().to_string();
        assert!(std::process::Command::new("kill").arg(id).status().unwrap().success());
        let ended = tokio::time::timeout(Duration::from_secs(30), self.process.wait()).await;
        for reader in &mut self.readers {
            reader.await.unwrap();
        }
        assert!(ended.expect("the process ends").unwrap().success(), "{}", self.said());
        self.said()
    }
}

/// Waits for processes, which are slow on a busy machine.
async fn eventually(condition: impl Fn() -> bool) {
    let waited = tokio::time::timeout(Duration::from_secs(60), async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    waited.await.expect("the condition holds in time");
}

fn collect(
    stream: impl AsyncRead + Unpin + Send + 'static,
    said: &Arc<Mutex<String>>,
) -> JoinHandle<()> {
    let (mut lines, said) = (BufReader::new(stream).lines(), Arc::clone(said));
    tokio::spawn(async move {
        while let Ok(Some(line)) = lines.next_line().await {
            *said.lock().unwrap() += &(line + "\n");
        }
    })
}

/// The status, and the result header.
pub(super) type Answer = (u16, Option<String>);

pub(super) fn answer(response: &Response) -> Answer {
    let result = response.headers().get("x-dedup-result");
    let result = result.map(|result| result.to_str().unwrap().to_owned());
    (response.status().as_u16(), result)
}

pub(super) fn first() -> Answer {
    (200, None)
}

pub(super) fn duplicate() -> Answer {
    (200, Some("duplicate".to_owned()))
}

pub(super) fn effect(id: &str, count: u64) -> Value {
    json!({ "namespace": "standard-webhooks", "id": id, "count": count })
}

/// Two receivers on one store: every event takes effect once.
async fn receivers(store: &str, ledger: &str) {
    receivers_with(&["--store", store, "--ledger", ledger], ledger).await;
}

async fn receivers_with(args: &[&str], ledger: &str) {
    // The receivers start together and race to create their tables.
    let start = || Server::start("receiver", args);
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
    let (succeeded, said) = run("storm", &storm).await;
    assert!(succeeded, "{said}");
    one.stop().await;
    other.stop().await;
}

#[tokio::test]
async fn receivers_on_postgres_lease() {
    receivers(&Schema::fresh().url(), "lease").await;
}

#[tokio::test]
async fn receivers_on_postgres_on_arrival() {
    receivers(&Schema::fresh().url(), "on-arrival").await;
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
        let receiver = Server::start("receiver", &effects).await;
        assert_eq!(receiver.deliver("msg_1", "").await, first());
        let counted = receiver.get("/effects").await;
        assert!(counted.as_array().unwrap().contains(&effect("msg_1", 2)), "{counted}");
        receiver.stop().await;
    }
}

/// Redis has no table for effects, so they are in a file.
#[tokio::test]
async fn receiver_on_redis_has_a_file_of_effects() {
    let dir = tempfile::tempdir().unwrap();
    let store = with_prefix(shared(), &fresh_prefix());
    let start = async || {
        let mut receiver = example("receiver");
        Server::spawn(receiver.current_dir(dir.path()).args(["--store", &store])).await
    };
    let (one, other) = tokio::join!(start(), start());
    assert_eq!(one.deliver("msg_1", "").await, first());
    assert_eq!(other.deliver("msg_1", "").await, duplicate());
    assert_eq!(other.get("/effects").await, json!([effect("msg_1", 1)]));
    one.stop().await;
    other.stop().await;
    assert!(dir.path().join("effects.db").exists());
}

/// While another process writes to a file that is not in WAL mode yet, SQLite refuses the switch at once.
/// Receivers that start together on a new file are such processes.
#[tokio::test]
async fn receiver_waits_for_a_file_of_effects_that_another_process_holds() {
    let dir = tempfile::tempdir().unwrap();
    let effects = sqlite_url(dir.path());
    let mut other = SqliteConnection::connect(&format!("{effects}?mode=rwc")).await.unwrap();
    sqlx::raw_sql("PRAGMA journal_mode = DELETE; BEGIN IMMEDIATE; CREATE TABLE other (id int)")
        .execute(&mut other)
        .await
        .unwrap();
    let end = async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        sqlx::raw_sql("COMMIT").execute(&mut other).await.unwrap();
    };
    let args = ["--store", "memory:", "--effects", &effects];
    let (receiver, ()) = tokio::join!(Server::start("receiver", &args), end);
    assert_eq!(receiver.deliver("msg_1", "").await, first());
    assert_eq!(receiver.get("/effects").await, json!([effect("msg_1", 1)]));
    receiver.stop().await;
}

#[tokio::test]
async fn receiver_refuses_effects_that_it_cannot_keep() {
    let store = with_prefix(shared(), &fresh_prefix());
    for (args, why) in [
        (&["--store", &*store, "--effects", &*store][..], "--effects needs a database"),
        (&["--store", &*store, "--ledger", "transactional"], "needs a database"),
        (&["--ledger", "transactional", "--effects", "sqlite://effects.db"], "leave --effects out"),
    ] {
        let (succeeded, said) =
            run("receiver", &[args, &["--listen", "127.0.0.1:0"]].concat()).await;
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

/// A store in memory has no transaction to lend.
#[tokio::test]
async fn receiver_refuses_a_transactional_ledger_in_memory() {
    let args = ["--store", "memory:", "--ledger", "transactional", "--listen", "127.0.0.1:0"];
    let (succeeded, said) = run("receiver", &args).await;
    assert!(!succeeded && said.contains("needs a database"), "{said}");
}

/// The documentation of `receiver` holds on every ledger. A forged request claims no key, and a
/// sender without a secret is not verified.
#[tokio::test]
async fn receiver_verifies_senders_that_have_a_secret() {
    for ledger in ["lease", "on-arrival", "transactional"] {
        let dir = tempfile::tempdir().unwrap();
        let mut receiver = example("receiver");
        receiver.current_dir(dir.path()).args(["--ledger", ledger]);
        let receiver = Server::spawn(receiver.env("WEBHOOK_SECRET_GITHUB", "mysecret")).await;
        assert!(receiver.said().contains("verified: github\n"), "{}", receiver.said());
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
        // Every route answers a challenge with its text. Other requests run.
        let challenge = r#"{"type": "url_verification", "challenge": "3eZbrw1a"}"#;
        let request = receiver.post("/webhooks/standard-webhooks").header("webhook-id", "msg_1");
        let echo = request.body(challenge).send().await.unwrap();
        assert_eq!((echo.status().as_u16(), &*echo.text().await.unwrap()), (200, "3eZbrw1a"));
        receiver.stop().await;
    }
}

/// A receiver exits if it cannot use a secret, because its operator believes that it verifies.
#[tokio::test]
async fn receiver_refuses_a_secret_that_it_cannot_use() {
    for (variable, secret, why) in [
        ("WEBHOOK_SECRET_GITHUP", "s3cret", "it knows WEBHOOK_SECRET_STANDARD_WEBHOOKS"),
        ("WEBHOOK_SECRET_GITHUB", "", "the secret is empty"),
        ("WEBHOOK_SECRET_TWILIO", "s3cret", "--public-url"),
    ] {
        let mut receiver = example("receiver");
        receiver.args(["--store", "memory:", "--listen", "127.0.0.1:0"]).env(variable, secret);
        let output = tokio::time::timeout(Duration::from_secs(60), receiver.output());
        let output = output.await.expect("the process ends").unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && said.contains(why), "{said}");
        assert!(!said.contains("s3cret"), "{said}");
    }
}

/// After a SIGKILL the transactional ledger's retry runs at once. The killed run leaves no row
/// behind.
#[tokio::test]
async fn receiver_that_is_killed_leaves_nothing_of_its_transaction() {
    let schema = Schema::fresh();
    let url = schema.url();
    let args = ["--store", &url, "--ledger", "transactional"];
    let killed = Server::start("receiver", &args).await;
    let slow =
        killed.post("/webhooks/standard-webhooks?delay_ms=60000").header("webhook-id", "msg_1");
    let slow = tokio::spawn(slow.send());
    // The handler of the killed process has written: an idle transaction locks its row.
    let mut connection = PgConnection::connect(&url).await.unwrap();
    let sql = "SELECT count(*) FROM pg_stat_activity AS a JOIN pg_locks AS l USING (pid) \
               WHERE a.state = 'idle in transaction' AND l.granted \
               AND l.relation = 'effects'::regclass AND l.mode = 'RowExclusiveLock'";
    loop {
        let open: i64 = sqlx::query_scalar(sql).fetch_one(&mut connection).await.unwrap();
        if open == 1 {
            break;
        }
        assert!(!slow.is_finished(), "{}", killed.said());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    killed.kill().await;
    assert!(slow.await.unwrap().is_err(), "the connection was cut");

    let receiver = Server::start("receiver", &args).await;
    assert_eq!(receiver.deliver("msg_1", "").await, first());
    assert_eq!(receiver.get("/effects").await, json!([effect("msg_1", 1)]));
    receiver.stop().await;
}

#[tokio::test]
async fn ack_fast_runs_the_job_of_every_event_once_and_keeps_dead_letters() {
    let schema = Schema::fresh();
    let (url, name) = (schema.url(), schema.name());
    let secret = format!("whsec_{}", STANDARD.encode(KEY));
    let args = ["--database-url", &url, "--jobs-schema", name, "--max-attempts=2"];
    let secret = ("WEBHOOK_SECRET_STANDARD_WEBHOOKS", secret);
    let server = Server::spawn(example("ack_fast").args(args).env(secret.0, secret.1)).await;
    let now = SystemTime::now();

    // A request without a signature, or with an old one, claims no key.
    let unverified = (401, None);
    let body = r#"{"paid": 42}"#;
    assert_eq!(server.deliver_signed("msg_1", body, now, b"another key").await, unverified);
    let old = now - Duration::from_secs(10 * 60);
    assert_eq!(server.deliver_signed("msg_1", body, old, KEY).await, unverified);
    let unsigned = server.post("/webhooks").header("webhook-id", "msg_1").send().await.unwrap();
    assert_eq!(answer(&unsigned), unverified);
    let mut connection = PgConnection::connect(&url).await.unwrap();
    let keys = sqlx::query_scalar("SELECT count(*) FROM webhook_deliveries");
    let keys: i64 = keys.fetch_one(&mut connection).await.unwrap();
    assert_eq!(keys, 0);

    // The key and the job are committed together. If the job cannot be enqueued, the event can be
    // delivered again.
    assert_eq!(server.deliver_signed("msg_1", "no JSON", now, KEY).await, (400, None));
    assert_eq!(server.deliver_signed("msg_1", body, now, KEY).await, (202, None));
    assert_eq!(server.deliver_signed("msg_1", body, now, KEY).await, duplicate());
    assert_eq!(server.deliver_signed("msg_2", r#"{"fail": 1}"#, now, KEY).await, (202, None));
    assert_eq!(server.deliver_signed("msg_3", r#"{"fail": 9}"#, now, KEY).await, (202, None));

    let done = |id: &str| {
        let said = server.said();
        let job = format!("standard-webhooks/{id}\"");
        said.lines().filter(|line| line.contains("is done") && line.contains(&job)).count()
    };
    eventually(|| done("msg_2") == 1 && server.said().contains("a dead letter")).await;
    assert_eq!((done("msg_1"), done("msg_3")), (1, 0));
    let letters = server.get("/dead-letters").await;
    assert_eq!(letters.as_array().map(Vec::len), Some(1), "{letters}");
    assert_eq!(letters[0]["key"], "standard-webhooks/msg_3");
    assert_eq!(letters[0]["attempts"], 2);
    // Every other job has run and is deleted. The queue deletes a job after the job has logged its end.
    let left = format!("SELECT count(*) FROM {name}.jobs");
    let jobs = async |connection: &mut PgConnection| -> i64 {
        let left = sqlx::query_scalar(sqlx::AssertSqlSafe(left.clone()));
        left.fetch_one(connection).await.unwrap()
    };
    let deleted = tokio::time::timeout(Duration::from_secs(60), async {
        while jobs(&mut connection).await > 1 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    deleted.await.expect("the jobs that have run are deleted");
    assert_eq!(jobs(&mut connection).await, 1);
    server.stop().await;
}
