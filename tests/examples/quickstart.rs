//! The example `quickstart`, on both databases.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::future::join_all;
use reqwest::RequestBuilder;
use sqlx::{AssertSqlSafe, Connection, PgConnection, SqliteConnection};

use super::programs::example;
use super::senders::hmac_sha256;
use super::server::{Answer, Server, answer, duplicate, first};
use support::postgres::Schema;
use support::sqlite_url;

const SECRET: &str = "whsec_the_secret_of_this_test";
/// The secret before it was replaced.
const OLD_SECRET: &str = "whsec_the_old_secret_of_this_test";
const UNVERIFIED: Answer = (401, None);
const PAYMENTS: &str = "SELECT event_id, amount FROM payments ORDER BY event_id";

async fn start(store: &str) -> Server {
    let mut command = example("quickstart");
    command.env("DATABASE_URL", store).env("STRIPE_WEBHOOK_SECRET", SECRET).env("RUST_LOG", "info");
    command.env("STRIPE_WEBHOOK_SECRET_PREVIOUS", OLD_SECRET);
    Server::spawn_with_env(&mut command).await
}

fn event(id: &str, event_type: &str, amount: i64) -> String {
    format!(r#"{{"id":"{id}","type":"{event_type}","data":{{"object":{{"amount":{amount}}}}}}}"#)
}

pub(super) fn payment(id: &str, amount: i64) -> String {
    event(id, "payment_intent.succeeded", amount)
}

/// Returns the value of `Stripe-Signature`.
pub(super) fn signature(secret: &str, at: SystemTime, body: &str) -> String {
    let time = at.duration_since(UNIX_EPOCH).unwrap().as_secs();
    format!("t={time},v1={}", hmac_sha256(secret, &format!("{time}.{body}")))
}

pub(super) fn post(server: &Server, body: String) -> RequestBuilder {
    server.post("").header("content-type", "application/json; charset=utf-8").body(body)
}

/// Delivers to the path that the program prints.
async fn deliver(server: &Server, body: String, signature: String) -> Answer {
    let request = post(server, body).header("stripe-signature", signature);
    answer(&request.send().await.unwrap())
}

async fn signed(server: &Server, body: String) -> Answer {
    let signature = signature(SECRET, SystemTime::now(), &body);
    deliver(server, body, signature).await
}

/// First, retry, forged, tampered, replayed, concurrent; then another process on the same store.
async fn receives_each_event_once(store: &str) {
    let (server, now) = (start(store).await, SystemTime::now());
    let body = payment("evt_1", 4_200);
    let forged = signature("whsec_another", now, &body);
    assert_eq!(deliver(&server, body.clone(), forged).await, UNVERIFIED);
    let genuine = signature(SECRET, now, &body);
    assert_eq!(deliver(&server, payment("evt_1", 1), genuine.clone()).await, UNVERIFIED);
    let old = signature(SECRET, now - Duration::from_secs(600), &body);
    assert_eq!(deliver(&server, body.clone(), old).await, UNVERIFIED);
    let unsigned = post(&server, body.clone()).send().await.unwrap();
    assert_eq!(answer(&unsigned), UNVERIFIED);
    assert!(unsigned.bytes().await.unwrap().is_empty());

    // None of these has used up the id.
    assert_eq!(deliver(&server, body.clone(), genuine.clone()).await, first());
    assert_eq!(deliver(&server, body.clone(), genuine).await, duplicate());
    let by_old_secret = signature(OLD_SECRET, now, &body);
    assert_eq!(deliver(&server, body.clone(), by_old_secret).await, duplicate());
    // A retry is signed at its own time.
    assert_eq!(signed(&server, body.clone()).await, duplicate());

    let copies = join_all((0..16).map(|_| signed(&server, payment("evt_2", 7)))).await;
    assert_eq!(copies.iter().filter(|answer| **answer == first()).count(), 1, "{copies:?}");
    assert!(copies.iter().all(|(status, _)| [200, 503].contains(status)), "{copies:?}");
    let without_amount = r#"{"id":"evt_3","type":"payment_intent.succeeded","data":{"object":{}}}"#;
    assert_eq!(signed(&server, without_amount.to_owned()).await, first());
    // Of one payment, Stripe sends several events that have its amount. One of them is the payment.
    for event_type in [
        "payment_intent.created",
        "payment_intent.payment_failed",
        "charge.succeeded",
        "refund.created",
    ] {
        let other = event(&format!("evt_{event_type}"), event_type, 4_200);
        assert_eq!(signed(&server, other.clone()).await, first());
        assert_eq!(signed(&server, other).await, duplicate());
    }
    server.interrupt().await;

    let server = start(store).await;
    assert_eq!(signed(&server, body).await, duplicate());
    server.end().await;
}

fn expected() -> Vec<(String, Option<i64>)> {
    let row = |id: &str, amount| (id.to_owned(), amount);
    vec![row("evt_1", Some(4_200)), row("evt_2", Some(7)), row("evt_3", None)]
}

/// Both find no table, and make it at once.
#[tokio::test]
async fn processes_that_start_together_make_one_table() {
    for (name, table) in
        [("quickstart", "payments"), ("github", "pushes"), ("github_inbox", "pushes")]
    {
        let schema = Schema::fresh();
        let url = schema.url();
        let connect = async || PgConnection::connect(&url).await.unwrap();
        let [mut connection, mut monitor] = [connect().await, connect().await];
        // The transaction holds both between their look and their creation.
        let mut made = connection.begin().await.unwrap();
        let create = format!("CREATE TABLE {table} (event_id TEXT, amount BIGINT)");
        sqlx::raw_sql(AssertSqlSafe(create)).execute(&mut *made).await.unwrap();
        let start = async || {
            let mut command = example(name);
            command.env("DATABASE_URL", &url);
            command.env("STRIPE_WEBHOOK_SECRET", SECRET).env("GITHUB_WEBHOOK_SECRET", SECRET);
            Server::spawn_with_env(&mut command).await
        };
        let roll_back = async {
            let waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'
                 AND datname = current_database() AND query LIKE ANY (ARRAY['%CREATE TABLE%', '%advisory%'])";
            while sqlx::query_scalar::<_, i64>(waiting).fetch_one(&mut monitor).await.unwrap() < 2 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            made.rollback().await.unwrap();
        };
        let (one, two, ()) = tokio::join!(start(), start(), roll_back);
        one.end().await;
        two.end().await;
    }
}

#[tokio::test]
async fn quickstart_on_sqlite_receives_each_event_once() {
    let dir = tempfile::tempdir().unwrap();
    let url = sqlite_url(dir.path());
    receives_each_event_once(&url).await;
    let mut connection = SqliteConnection::connect(&url).await.unwrap();
    let rows: Vec<(String, Option<i64>)> =
        sqlx::query_as(PAYMENTS).fetch_all(&mut connection).await.unwrap();
    assert_eq!(rows, expected());
}

#[tokio::test]
async fn quickstart_on_postgres_receives_each_event_once() {
    let schema = Schema::fresh();
    receives_each_event_once(&schema.url()).await;
    let mut connection = PgConnection::connect(&schema.url()).await.unwrap();
    let rows: Vec<(String, Option<i64>)> =
        sqlx::query_as(PAYMENTS).fetch_all(&mut connection).await.unwrap();
    assert_eq!(rows, expected());
}
