//! The examples with an inbox: the receiver with `--inbox`, and `github_inbox`.

use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use sqlx::{Connection, PgConnection, SqliteConnection};

use super::programs::example;
use super::senders::{PUSH, SECRET, from_github, sent};
use super::server::{Answer, Server, duplicate, effect, first};
use support::cluster::until_true;
use support::postgres::Schema;
use support::sqlite_url;

fn stored() -> Answer {
    (200, Some("stored".to_owned()))
}

/// Starts a receiver in a folder.
async fn receiver(folder: &Path, args: &[&str]) -> Server {
    Server::spawn(example("receiver").current_dir(folder).args(args)).await
}

/// Waits until these are the effects of the receiver.
async fn until_effects(receiver: &Server, expected: &Value) {
    for _ in 0..2_000 {
        if receiver.get("/effects").await == *expected {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("not {expected}: {}", receiver.said());
}

/// Waits until an event has left the inbox: as long as it is there, its deliveries are *stored*.
async fn until_left(receiver: &Server, id: &str) {
    loop {
        match receiver.deliver(id, "").await {
            answer if answer == duplicate() => return,
            answer => assert_eq!(answer, stored()),
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn inbox(folder: &Path, args: &[&str]) {
    let receiver = receiver(folder, args).await;
    assert_eq!(receiver.deliver("msg_1", "").await, first());
    until_left(&receiver, "msg_1").await;
    assert_eq!(receiver.deliver("msg_2", "?fail_runs=1").await, stored());
    // Nobody is told *stored* of what the handler never takes.
    assert_eq!(receiver.deliver("msg_3", "?fail=422").await, (422, None));
    until_effects(&receiver, &json!([effect("msg_1", 1), effect("msg_2", 1)])).await;
    until_left(&receiver, "msg_2").await;
    receiver.stop().await;
}

#[tokio::test]
async fn receiver_with_an_inbox_in_a_file() {
    let dir = tempfile::tempdir().unwrap();
    inbox(dir.path(), &["--store", "memory:", "--inbox"]).await;
    assert!(dir.path().join("inbox.db").exists());
}

#[tokio::test]
async fn receiver_with_an_inbox_in_the_postgres_of_its_store() {
    let (dir, schema) = (tempfile::tempdir().unwrap(), Schema::fresh());
    let url = schema.url();
    inbox(dir.path(), &["--inbox", "--store", &url, "--ledger", "transactional"]).await;
    let mut connection = PgConnection::connect(&url).await.unwrap();
    let rows = sqlx::query_scalar("SELECT count(*) FROM webhook_inbox");
    let rows: i64 = rows.fetch_one(&mut connection).await.unwrap();
    assert_eq!(rows, 1, "the refused event is parked");
}

/// The sender delivers once, and the process dies while its handler runs.
#[cfg(unix)]
#[tokio::test]
async fn receiver_that_is_killed_in_its_handler_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (store, inbox) = (sqlite_url(dir.path()), dir.path().join("other.db"));
    let inbox = format!("sqlite://{}", inbox.display());
    let args = ["--store", &store, "--inbox", &inbox, "--lease-seconds", "1"];
    let killed = receiver(dir.path(), &args).await;
    let delivery = killed.post("/webhooks/standard-webhooks?delay_ms=1000");
    let delivery = tokio::spawn(delivery.header("webhook-id", "msg_1").send());
    let mut table = SqliteConnection::connect(&inbox).await.unwrap();
    let stored = "SELECT count(*) FROM webhook_inbox";
    while sqlx::query_scalar::<_, i64>(stored).fetch_one(&mut table).await.unwrap() == 0 {
        assert!(!delivery.is_finished(), "{}", killed.said());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    drop(killed); // SIGKILL
    assert!(delivery.await.unwrap().is_err(), "the sender got no answer");
    let next = receiver(dir.path(), &args).await;
    assert_eq!(next.get("/effects").await, json!([]));
    until_effects(&next, &json!([effect("msg_1", 1)])).await;
    next.stop().await;
}

#[tokio::test]
async fn receiver_fails_the_first_runs_only() {
    let dir = tempfile::tempdir().unwrap();
    let receiver = receiver(dir.path(), &["--store", "memory:"]).await;
    for (id, query, status) in
        [("msg_1", "?fail_runs=2", 500), ("msg_2", "?fail_runs=2&fail=503", 503)]
    {
        for _ in 0..2 {
            assert_eq!(receiver.deliver(id, query).await, (status, None));
        }
        assert_eq!(receiver.deliver(id, query).await, first());
    }
    receiver.stop().await;
}

/// GitHub sends each delivery once.
#[tokio::test]
async fn github_inbox_handles_a_push_until_its_row_is_committed() {
    let schema = Schema::fresh();
    let mut command = example("github_inbox");
    command.env("DATABASE_URL", schema.url()).env("GITHUB_WEBHOOK_SECRET", SECRET);
    let server = Server::spawn_with_env(&mut command).await;
    let push = async |id: &str| sent(from_github(&server, "", "push", id, PUSH)).await;

    let ping = include_str!("../payloads/github/ping.payload.json");
    let handshake = (200, Some("handshake".to_owned()));
    assert_eq!(sent(from_github(&server, "", "ping", "g0", ping)).await, handshake);
    let forged = from_github(&server, "", "push", "g1", PUSH).body(PUSH.replace("main", "other"));
    assert_eq!(sent(forged).await, (401, None));
    assert_eq!(push("g1").await, first());
    let mut connection = PgConnection::connect(&schema.url()).await.unwrap();
    let handled = |pushes| {
        format!(
            "SELECT NOT EXISTS (SELECT 1 FROM webhook_inbox) AND (SELECT count(*) FROM pushes) = {pushes}"
        )
    };
    until_true(&mut connection, &handled(1)).await;
    assert_eq!(push("g1").await, duplicate());
    sqlx::raw_sql("ALTER TABLE pushes RENAME TO away").execute(&mut connection).await.unwrap();
    assert_eq!(push("g2").await, stored());
    let again = "ALTER TABLE away RENAME TO pushes; UPDATE webhook_inbox SET due = now()";
    sqlx::raw_sql(again).execute(&mut connection).await.unwrap();
    until_true(&mut connection, &handled(2)).await;
    assert_eq!(push("g2").await, duplicate());
    server.end().await;
}
