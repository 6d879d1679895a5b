//! The examples `github` and `providers`, and what each example says that cannot start. The requests are
//! signed by the crate `hmac` as the senders' documentation says, and not by this crate.

use std::process::Stdio;
use std::time::{Duration, SystemTime};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use hmac::{Hmac, KeyInit, Mac};
use reqwest::RequestBuilder;
use sha1::Sha1;
use sha2::Sha256;
use sqlx::{Connection, PgConnection};

use super::programs::example;
use super::quickstart;
use super::server::{Answer, Server, answer, duplicate, first};
use support::postgres::Schema;
use support::sqlite_url;

pub(super) const SECRET: &str = "the_secret_of_this_test";
const PUBLIC_URL: &str = "https://hooks.example.com";
pub(super) const PUSH: &str = r#"{"ref":"refs/heads/main","after":"6113728f27ae"}"#;
const UNVERIFIED: Answer = (401, None);

/// Returns the code in hexadecimal digits.
pub(super) fn hmac_sha256(secret: &str, text: &str) -> String {
    let mut mac = Hmac::<Sha256>::new_from_slice(secret.as_bytes()).unwrap();
    mac.update(text.as_bytes());
    base16ct::lower::encode_string(&mac.finalize().into_bytes())
}

pub(super) fn from_github(
    server: &Server,
    path: &str,
    event: &str,
    id: &str,
    body: &'static str,
) -> RequestBuilder {
    let request = server.post(path).header("content-type", "application/json");
    let request = request.header("x-github-event", event).header("x-github-delivery", id);
    request
        .header("x-hub-signature-256", format!("sha256={}", hmac_sha256(SECRET, body)))
        .body(body)
}

pub(super) async fn sent(request: RequestBuilder) -> Answer {
    answer(&request.send().await.unwrap())
}

#[tokio::test]
async fn github_answers_the_ping_and_writes_each_push_once() {
    let schema = Schema::fresh();
    let mut command = example("github");
    command.env("DATABASE_URL", schema.url()).env("GITHUB_WEBHOOK_SECRET", SECRET);
    let server = Server::spawn_with_env(&mut command).await;

    let ping = include_str!("../payloads/github/ping.payload.json");
    let handshake = (200, Some("handshake".to_owned()));
    assert_eq!(sent(from_github(&server, "", "ping", "g0", ping)).await, handshake);
    let forged = from_github(&server, "", "push", "g1", PUSH).body(PUSH.replace("main", "other"));
    assert_eq!(sent(forged).await, UNVERIFIED);
    // The header with the event is not signed, so the body decides.
    assert_eq!(sent(from_github(&server, "", "star", "g1", PUSH)).await, first());
    assert_eq!(sent(from_github(&server, "", "push", "g1", PUSH)).await, duplicate());
    // A real event may have the bytes of another: an equal `workflow_dispatch`, for example.
    assert_eq!(sent(from_github(&server, "", "push", "g2", PUSH)).await, first());
    let star = r#"{"action":"created"}"#;
    assert_eq!(sent(from_github(&server, "", "push", "g3", star)).await, first());
    server.interrupt().await;

    let mut connection = PgConnection::connect(&schema.url()).await.unwrap();
    let rows: Vec<(String, String, String)> =
        sqlx::query_as("SELECT delivery, branch, head FROM pushes ORDER BY delivery")
            .fetch_all(&mut connection)
            .await
            .unwrap();
    let row = |id: &str| [id, "refs/heads/main", "6113728f27ae"].map(str::to_owned).into();
    assert_eq!(rows, [row("g1"), row("g2")]);
}

/// Starts `providers`. The paths of requests begin with `/webhooks`.
pub(super) async fn start_providers(store: &str) -> Server {
    let mut command = example("providers");
    command.env("DATABASE_URL", store).env("PUBLIC_URL", PUBLIC_URL);
    for variable in ["GITHUB_WEBHOOK_SECRET", "STRIPE_WEBHOOK_SECRET", "TWILIO_AUTH_TOKEN"] {
        command.env(variable, SECRET);
    }
    let mut server = Server::spawn_with_env(&mut command).await;
    server.address.truncate(server.address.len() - "/webhooks".len());
    server
}

pub(super) async fn deliver_push(server: &Server, id: &str) -> Answer {
    sent(from_github(server, "/webhooks/github", "push", id, PUSH)).await
}

pub(super) async fn deliver_to_stripe(server: &Server, id: &str) -> Answer {
    let event = format!(r#"{{"id":"{id}","type":"charge.succeeded"}}"#);
    let signature = quickstart::signature(SECRET, SystemTime::now(), &event);
    let stripe = server.post("/webhooks/stripe").header("stripe-signature", signature);
    sent(stripe.body(event)).await
}

#[tokio::test]
async fn providers_have_one_store_and_a_namespace_each() {
    let dir = tempfile::tempdir().unwrap();
    let store = sqlite_url(dir.path());
    // One id for all three: each sender has its own namespace.
    let deliver = async |server: &Server| {
        let mut mac = Hmac::<Sha1>::new_from_slice(SECRET.as_bytes()).unwrap();
        mac.update(format!("{PUBLIC_URL}/webhooks/twilioMessageSidevt_1").as_bytes());
        let signature = BASE64_STANDARD.encode(mac.finalize().into_bytes());
        let twilio = server.post("/webhooks/twilio").header("x-twilio-signature", signature);
        let twilio = twilio.form(&[("MessageSid", "evt_1")]);
        [
            deliver_push(server, "evt_1").await,
            deliver_to_stripe(server, "evt_1").await,
            sent(twilio).await,
        ]
    };
    let server = start_providers(&store).await;
    assert_eq!(deliver(&server).await, [first(), first(), first()]);
    assert_eq!(deliver(&server).await, [duplicate(), duplicate(), duplicate()]);
    let said = server.interrupt().await;
    for run in ["github evt_1 push: 48 bytes", "stripe evt_1 charge", "twilio |evt_1| event"] {
        assert_eq!(said.matches(run).count(), 1, "{run}: {said}");
    }
    let server = start_providers(&store).await;
    assert_eq!(deliver(&server).await, [duplicate(), duplicate(), duplicate()]);
    server.end().await;
}

/// Runs an example that cannot start. Returns what it says.
async fn refused(name: &str, variables: &[(&str, &str)]) -> String {
    let mut command = example(name);
    let command = command.stdin(Stdio::null()).envs(variables.iter().copied()).output();
    let output = tokio::time::timeout(Duration::from_secs(60), command).await.unwrap().unwrap();
    assert!(!output.status.success(), "{name}");
    String::from_utf8(output.stderr).unwrap()
}

#[tokio::test]
async fn examples_say_which_variable_to_set() {
    let secret = |variable| (variable, SECRET);
    let (github, stripe) = (secret("GITHUB_WEBHOOK_SECRET"), secret("STRIPE_WEBHOOK_SECRET"));
    let (url, token) = (("BOOKINGS_URL", PUBLIC_URL), secret("BOOKINGS_TOKEN"));
    let cases = [
        ("quickstart", vec![], "set STRIPE_WEBHOOK_SECRET"),
        ("github", vec![], "set GITHUB_WEBHOOK_SECRET"),
        ("github", vec![github], "set DATABASE_URL"),
        ("github_inbox", vec![], "set GITHUB_WEBHOOK_SECRET"),
        ("github_inbox", vec![github], "set DATABASE_URL"),
        ("providers", vec![], "set GITHUB_WEBHOOK_SECRET"),
        ("providers", vec![github], "set STRIPE_WEBHOOK_SECRET"),
        ("providers", vec![github, stripe], "set PUBLIC_URL"),
        ("redis", vec![], "set STRIPE_WEBHOOK_SECRET"),
        ("redis", vec![stripe], "set BOOKINGS_URL"),
        ("redis", vec![stripe, url, token], "set REDIS_URL"),
        ("catch_up", vec![], "usage: catch_up stripe|github [--run]"),
        ("admin", vec![], "set ADMIN_TOKEN"),
        ("admin", vec![("ADMIN_TOKEN", "")], "set ADMIN_TOKEN"),
        ("admin", vec![secret("ADMIN_TOKEN")], "set DATABASE_URL"),
    ];
    for (name, variables, said) in cases {
        let output = refused(name, &variables).await;
        assert!(output.contains(said) && !output.contains("panicked"), "{name}: {output}");
    }
}
