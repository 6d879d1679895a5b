//! A Stripe receiver: verified, each event once, in the transaction of its payment.

use axum::{Router, body::Bytes, http::StatusCode, routing::post};
use clap::Parser;
use serde_json::Value;
use tokio::signal::unix::{SignalKind, signal};
use tower_dedup::adapter::{PostgresAdapter, SqliteAdapter};
use tower_dedup::sqlx::{self, PgPool, Postgres, Sqlite, SqlitePool, sqlite::SqliteConnectOptions};
use tower_dedup::verify::VerifyLayer;
use tower_dedup::{BoxError, DedupLayer, DedupTx, Delivery, provider::STRIPE};

const CREATE: &str = "CREATE TABLE IF NOT EXISTS payments (event_id TEXT NOT NULL, amount BIGINT)";
const INSERT: &str = "INSERT INTO payments (event_id, amount) VALUES ($1, $2)";

#[derive(Parser)]
struct Options {
    #[arg(long, default_value = "127.0.0.1:3000")]
    listen: String,
    /// `sqlite://FILE` or `postgres://USER@HOST/DATABASE`
    #[arg(long, default_value = "sqlite://quickstart.db")]
    store: String,
}

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    tracing_subscriber::fmt::init();
    let Options { listen, store } = Options::parse();
    let secret = std::env::var("STRIPE_WEBHOOK_SECRET").map_err(|_| "set STRIPE_WEBHOOK_SECRET")?;
    let verify = VerifyLayer::new(STRIPE.verifier(&secret)?);
    // Keep the branch of your database. They differ in the type of the handler's transaction.
    let (route, handle) = if store.starts_with("postgres") {
        let pool = PgPool::connect(&store).await?;
        sqlx::raw_sql(CREATE).execute(&pool).await?;
        let store = PostgresAdapter::new(pool);
        let dedup = DedupLayer::transactional(STRIPE, store).require_verified();
        let handle = dedup.handle();
        // Of a tuple, the first layer is the outermost: a forged request uses up no id.
        (post(on_postgres).layer((verify, dedup)), handle)
    } else {
        let file = store.parse::<SqliteConnectOptions>()?.create_if_missing(true);
        let pool = SqlitePool::connect_with(file).await?;
        sqlx::raw_sql(CREATE).execute(&pool).await?;
        let store = SqliteAdapter::new(pool);
        let dedup = DedupLayer::transactional(STRIPE, store).require_verified();
        let handle = dedup.handle();
        (post(on_sqlite).layer((verify, dedup)), handle)
    };
    let app = Router::new().route("/webhooks/stripe", route);
    let listener = tokio::net::TcpListener::bind(listen).await?;
    println!("listening on http://{}/webhooks/stripe", listener.local_addr()?);
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let stop = async move {
        tokio::select! { _ = term.recv() => {}, _ = int.recv() => {} }
    };
    axum::serve(listener, app).with_graceful_shutdown(stop).await?;
    tokio::time::timeout(std::time::Duration::from_secs(30), handle.drain()).await?;
    Ok(())
}

async fn on_postgres(mut tx: DedupTx<Postgres>, event: Delivery, body: Bytes) -> StatusCode {
    let Some("payment_intent.succeeded") = event.event_type() else { return StatusCode::OK };
    let insert = sqlx::query(INSERT).bind(event.id()).bind(amount(&body));
    status(insert.execute(&mut *tx).await.err())
}

async fn on_sqlite(mut tx: DedupTx<Sqlite>, event: Delivery, body: Bytes) -> StatusCode {
    let Some("payment_intent.succeeded") = event.event_type() else { return StatusCode::OK };
    let insert = sqlx::query(INSERT).bind(event.id()).bind(amount(&body));
    status(insert.execute(&mut *tx).await.err())
}

fn amount(event: &[u8]) -> Option<i64> {
    serde_json::from_slice::<Value>(event).ok()?.pointer("/data/object/amount")?.as_i64()
}

fn status(error: Option<sqlx::Error>) -> StatusCode {
    let Some(error) = error else { return StatusCode::OK }; // committed with the key
    tracing::error!(%error, "writing a payment");
    StatusCode::INTERNAL_SERVER_ERROR // rolled back with the key: the retry runs
}
