//! The example as a reader runs it: a process that gets HTTP requests.

use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use sqlx::{Connection, PgConnection};

use server::{Answer, Server, answer, duplicate, eventually, program};
use support::postgres::Schema;

#[path = "../../../tests/examples/server.rs"]
mod server;

const KEY: &[u8] = b"what ack_fast is told to ask for";

/// Delivers to `ack_fast`, signed at this time with this key.
async fn deliver_signed(
    server: &Server,
    id: &str,
    body: &str,
    at: SystemTime,
    key: &[u8],
) -> Answer {
    let time = at.duration_since(UNIX_EPOCH).unwrap().as_secs();
    let mut mac = Hmac::<Sha256>::new_from_slice(key).unwrap();
    mac.update(format!("{id}.{time}.{body}").as_bytes());
    let signature = STANDARD.encode(mac.finalize().into_bytes());
    let request = server
        .post("/webhooks")
        .header("webhook-id", id)
        .header("webhook-timestamp", time)
        .header("webhook-signature", format!("v1,{signature}"))
        .header("content-type", "application/json")
        .body(body.to_owned());
    answer(&request.send().await.unwrap())
}

#[tokio::test]
async fn ack_fast_runs_the_job_of_every_event_once_and_keeps_dead_letters() {
    let path = Path::new(env!("CARGO_BIN_EXE_ack_fast"));
    let schema = Schema::fresh();
    let (url, name) = (schema.url(), schema.name());
    let secret = format!("whsec_{}", STANDARD.encode(KEY));
    let args = ["--database-url", &url, "--jobs-schema", name, "--max-attempts=2"];
    let secret = ("WEBHOOK_SECRET_STANDARD_WEBHOOKS", secret);
    let server = Server::spawn(program(path).args(args).env(secret.0, secret.1)).await;
    let now = SystemTime::now();

    // A request without a signature, or with an old one, claims no key.
    let unverified = (401, None);
    let body = r#"{"paid": 42}"#;
    assert_eq!(deliver_signed(&server, "msg_1", body, now, b"another key").await, unverified);
    let old = now - Duration::from_secs(10 * 60);
    assert_eq!(deliver_signed(&server, "msg_1", body, old, KEY).await, unverified);
    let unsigned = server.post("/webhooks").header("webhook-id", "msg_1").send().await.unwrap();
    assert_eq!(answer(&unsigned), unverified);
    let mut connection = PgConnection::connect(&url).await.unwrap();
    let keys = sqlx::query_scalar("SELECT count(*) FROM webhook_deliveries");
    let keys: i64 = keys.fetch_one(&mut connection).await.unwrap();
    assert_eq!(keys, 0);

    // The key and the job are committed together. If the job cannot be enqueued, the event can be
    // delivered again.
    assert_eq!(deliver_signed(&server, "msg_1", "no JSON", now, KEY).await, (400, None));
    assert_eq!(deliver_signed(&server, "msg_1", body, now, KEY).await, (202, None));
    assert_eq!(deliver_signed(&server, "msg_1", body, now, KEY).await, duplicate());
    assert_eq!(deliver_signed(&server, "msg_2", r#"{"fail": 1}"#, now, KEY).await, (202, None));
    assert_eq!(deliver_signed(&server, "msg_3", r#"{"fail": 9}"#, now, KEY).await, (202, None));

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
