//! The API of the example `idempotency`, with requests over HTTP.

use futures_util::future::join_all;
use reqwest::{RequestBuilder, Response};
use serde_json::Value;
use sqlx::{Connection, SqliteConnection};

use super::programs::example;
use super::server::Server;
use support::sqlite_url;

const UUID: &str = "\"8e03978e-40d5-43e8-bc93-6894a57f9324\"";

async fn start(store: &str) -> Server {
    Server::spawn(example("idempotency").args(["--store", store])).await
}

/// A payment of this client.
fn order(server: &Server, client: &str, amount: i64) -> RequestBuilder {
    let request = server.post("").bearer_auth(format!("key-of-{client}"));
    request.json(&serde_json::json!({ "amount": amount }))
}

async fn pay(server: &Server, client: &str, key: &str, amount: i64) -> Response {
    order(server, client, amount).header("idempotency-key", key).send().await.unwrap()
}

/// Returns the location, the body, and whether the response is replayed.
async fn paid(response: Response) -> (String, Value, bool) {
    assert_eq!(response.status(), 201);
    let location = response.headers()["location"].to_str().unwrap().to_owned();
    let is_replayed = response.headers().contains_key("idempotent-replayed");
    (location, response.json().await.unwrap(), is_replayed)
}

/// Returns the status, and the fragment of the problem's type.
async fn problem(response: Response) -> (u16, String) {
    assert_eq!(response.headers()["content-type"], "application/problem+json");
    let status = response.status().as_u16();
    let body: Value = response.json().await.unwrap();
    assert_eq!(body["status"], status);
    let (page, kind) = body["type"].as_str().unwrap().split_once('#').unwrap();
    assert_eq!(page, "https://api.example.com/docs/idempotency");
    (status, kind.to_owned())
}

#[tokio::test]
async fn idempotency_runs_each_payment_once() {
    let dir = tempfile::tempdir().unwrap();
    let url = sqlite_url(dir.path());
    let server = start(&url).await;
    let one = |is_replayed| {
        let payment = serde_json::json!({ "id": 1, "amount": 42 });
        ("/payments/1".to_owned(), payment, is_replayed)
    };
    assert_eq!(paid(pay(&server, "alice", UUID, 42).await).await, one(false));
    assert_eq!(paid(pay(&server, "alice", UUID, 42).await).await, one(true));
    assert_eq!(paid(pay(&server, "alice", UUID.trim_matches('"'), 42).await).await, one(true));
    let (location, _, is_replayed) = paid(pay(&server, "bob", UUID, 42).await).await;
    assert_eq!((&*location, is_replayed), ("/payments/2", false));

    let other = pay(&server, "alice", UUID, 43).await;
    assert_eq!(problem(other).await, (422, "mismatch".to_owned()));
    let missing = order(&server, "alice", 42).send().await.unwrap();
    assert_eq!(problem(missing).await, (400, "invalid-key".to_owned()));
    let malformed = pay(&server, "alice", "\"", 42).await;
    assert_eq!(problem(malformed).await, (400, "invalid-key".to_owned()));
    assert_eq!(pay(&server, "eve", UUID, 42).await.status(), 401);
    // A refused payment is rolled back with its key.
    for _ in 0..2 {
        let refused = pay(&server, "alice", "refused", 0).await;
        assert_eq!(refused.status(), 422);
        assert!(!refused.headers().contains_key("x-dedup-result"));
    }

    let copies = join_all((0..16).map(|_| pay(&server, "bob", "copies", 7))).await;
    let is_first = |copy: &&Response| {
        copy.status() == 201 && !copy.headers().contains_key("idempotent-replayed")
    };
    assert_eq!(copies.iter().filter(is_first).count(), 1, "{copies:?}");
    assert!(copies.iter().all(|copy| [201, 409].contains(&copy.status().as_u16())), "{copies:?}");
    server.interrupt().await;

    let server = start(&url).await;
    assert_eq!(paid(pay(&server, "alice", UUID, 42).await).await, one(true));
    server.end().await;
    let mut connection = SqliteConnection::connect(&url).await.unwrap();
    let rows: Vec<(String, i64)> = sqlx::query_as("SELECT payer, amount FROM payments ORDER BY id")
        .fetch_all(&mut connection)
        .await
        .unwrap();
    let row = |payer: &str, amount| (payer.to_owned(), amount);
    assert_eq!(rows, [row("alice", 42), row("bob", 42), row("bob", 7)]);
}
