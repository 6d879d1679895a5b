//! The examples `redis` and `queue_consumer`, on one server.

use std::time::SystemTime;

use sqlx::{Connection, SqliteConnection};
use tower_dedup::DedupKey;
use tower_dedup::adapter::connect;
use tower_dedup::adapter::maintenance::ForgetReply;

use super::programs::{example, piped};
use super::quickstart::{payment, post, signature};
use super::server::{Answer, Server, answer, duplicate, first};
use support::redis::{fresh_prefix, shared, with_prefix};
use support::sqlite_url;

const SECRET: &str = "whsec_the_secret_of_this_test";

async fn deliver(server: &Server, id: &str, amount: i64) -> Answer {
    let body = payment(id, amount);
    let signature = signature(SECRET, SystemTime::now(), &body);
    let request = post(server, body).header("stripe-signature", signature);
    answer(&request.send().await.unwrap())
}

#[tokio::test]
async fn redis_books_each_payment_once_and_shares_its_keys_with_queue_consumer() {
    let dir = tempfile::tempdir().unwrap();
    let file = sqlite_url(dir.path());
    let bookings = Server::spawn(example("idempotency").args(["--store", &file])).await;
    let store = with_prefix(shared(), &fresh_prefix());
    let mut command = example("redis");
    command.env("REDIS_URL", &store).env("STRIPE_WEBHOOK_SECRET", SECRET);
    command.env("BOOKINGS_URL", &bookings.address).env("BOOKINGS_TOKEN", "key-of-alice");
    let server = Server::spawn_with_env(&mut command).await;

    let forged = post(&server, payment("evt_1", 42)).header("stripe-signature", "t=1,v1=00");
    assert_eq!(answer(&forged.send().await.unwrap()), (401, None));
    assert_eq!(deliver(&server, "evt_1", 42).await, first());
    assert_eq!(deliver(&server, "evt_1", 42).await, duplicate());
    // The other service refuses it: every delivery runs.
    assert_eq!(deliver(&server, "evt_2", 0).await, (502, None));
    assert_eq!(deliver(&server, "evt_2", 0).await, (502, None));
    // A second run of the handler makes the same call.
    let key = DedupKey::new("stripe", "evt_1").unwrap();
    let forgotten = connect(&store).await.unwrap().forget(&key).await.unwrap();
    assert_eq!(forgotten, ForgetReply::Removed);
    assert_eq!(deliver(&server, "evt_1", 42).await, first());

    let messages = [("evt_1", 42), ("evt_3", 7), ("evt_3", 7)];
    let line = |(id, amount)| format!("{{\"id\":\"{id}\",\"amount\":{amount}}}\n");
    let messages: String = messages.into_iter().map(line).collect();
    let mut consumer = example("queue_consumer");
    let (succeeded, said) = piped(consumer.env("DATABASE_URL", &store), &messages).await;
    assert!(succeeded, "{said}");
    assert_eq!(said, "duplicate: evt_1\nonce: evt_3, 7\nduplicate: evt_3\n");
    assert_eq!(deliver(&server, "evt_3", 7).await, duplicate());

    server.interrupt().await;
    bookings.end().await;
    let mut connection = SqliteConnection::connect(&file).await.unwrap();
    let rows = sqlx::query_scalar("SELECT amount FROM payments").fetch_all(&mut connection);
    let amounts: Vec<i64> = rows.await.unwrap();
    assert_eq!(amounts, [42]);
}
