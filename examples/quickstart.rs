//! A Stripe receiver: verified, each event once, in the transaction of its payment.

use std::{env, time::Duration};

use axum::{Json, Router, http::StatusCode, routing::post};
use serde_json::Value;
use tower_dedup::adapter::{PostgresAdapter, SqliteAdapter};
use tower_dedup::sqlx::{self, Connection, PgConnection, Postgres, Sqlite, SqliteConnection};
use tower_dedup::verify::VerifyLayer;
use tower_dedup::{BoxError, DedupLayer, DedupTx, Delivery, provider::STRIPE};

const CREATE: &str = "CREATE TABLE IF NOT EXISTS payments (event_id TEXT NOT NULL, amount BIGINT)";
const INSERT: &str = "INSERT INTO payments (event_id, amount) VALUES ($1, $2)";

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    tracing_subscriber::fmt::init();
    let secret = env::var("STRIPE_WEBHOOK_SECRET").map_err(|_| "set STRIPE_WEBHOOK_SECRET")?;
    let url = env::var("DATABASE_URL").unwrap_or("sqlite://quickstart.db".to_owned());
    let listen = env::var("LISTEN").unwrap_or("127.0.0.1:3000".to_owned());
    let mut verifier = STRIPE.verifier(&secret)?;
    // While one secret replaces the other, either signs.
    if let Ok(old) = env::var("STRIPE_WEBHOOK_SECRET_PREVIOUS") {
        verifier = verifier.or_secret(old)?;
    }
    let verify = VerifyLayer::new(verifier);
    // A handler that hangs is rolled back after this time, and its key is free again.
    let bound = Duration::from_secs(20);
    // Keep the branch of your database. They differ in the type of the handler's transaction.
    let (route, handle) = if url.starts_with("postgres") {
        let store = PostgresAdapter::connect(&url).await?;
        sqlx::raw_sql(CREATE).execute(&mut PgConnection::connect(&url).await?).await?;
        let dedup =
            DedupLayer::transactional(STRIPE, store).require_verified().handler_timeout(bound);
        let handle = dedup.handle();
        // Of a tuple, the first layer is the outermost: a forged request uses up no id.
        (post(on_postgres).layer((verify, dedup)), handle)
    } else {
        let store = SqliteAdapter::connect(&url).await?; // makes the file
        sqlx::raw_sql(CREATE).execute(&mut SqliteConnection::connect(&url).await?).await?;
        let dedup =
            DedupLayer::transactional(STRIPE, store).require_verified().handler_timeout(bound);
        let handle = dedup.handle();
        (post(on_sqlite).layer((verify, dedup)), handle)
    };
    let app = Router::new().route("/webhooks/stripe", route);
    let listener = tokio::net::TcpListener::bind(&listen).await?;
    println!("listening on http://{}/webhooks/stripe", listener.local_addr()?);
    let stop = async { _ = tokio::signal::ctrl_c().await };
    axum::serve(listener, app).with_graceful_shutdown(stop).await?;
    // Deliveries whose client has hung up. What is killed here is rolled back, and Stripe sends it again.
    tokio::time::timeout(Duration::from_secs(30), handle.drain()).await?;
    Ok(())
}

// Write by `tx` alone. Handlers that wait for a second connection of one pool can block each other.
async fn on_postgres(mut tx: DedupTx<Postgres>, event: Delivery, body: Json<Value>) -> StatusCode {
    let Some("payment_intent.succeeded") = event.event_type() else { return StatusCode::OK };
    let insert = sqlx::query(INSERT).bind(event.id()).bind(amount(&body));
    status(insert.execute(&mut *tx).await.err())
}

async fn on_sqlite(mut tx: DedupTx<Sqlite>, event: Delivery, body: Json<Value>) -> StatusCode {
    let Some("payment_intent.succeeded") = event.event_type() else { return StatusCode::OK };
    let insert = sqlx::query(INSERT).bind(event.id()).bind(amount(&body));
    status(insert.execute(&mut *tx).await.err())
}

fn amount(event: &Value) -> Option<i64> {
    event.pointer("/data/object/amount")?.as_i64()
}

fn status(error: Option<sqlx::Error>) -> StatusCode {
    let Some(error) = error else { return StatusCode::OK }; // committed with the key
    tracing::error!(%error, "writing a payment");
    StatusCode::INTERNAL_SERVER_ERROR // rolled back with the key: the retry runs
}
