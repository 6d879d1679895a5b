//! A Stripe receiver: verified, each event once, in the transaction of its payment.

use std::{env, time::Duration};

use axum::{Json, Router, extract::State, routing::post};
use serde_json::Value;
use tokio::signal::{self, ctrl_c};
use tower_dedup::adapter::{PostgresAdapter, SqliteAdapter};
use tower_dedup::sqlx::{self, PgPool, SqlitePool};
use tower_dedup::verify::VerifyLayer;
use tower_dedup::{BoxError, CommitError, DedupLayer, Delivery, provider::STRIPE};

const CREATE: &str = "CREATE TABLE IF NOT EXISTS payments (event_id TEXT NOT NULL, amount BIGINT)";
// Of two processes that make a table at once, Postgres refuses one. A service has migrations instead.
const LOCK: &str = "SELECT pg_advisory_xact_lock(1)";
const INSERT: &str = "INSERT INTO payments (event_id, amount) VALUES ($1, $2)";
/// An error rolls back, and the retry runs.
type Handled = Result<(), CommitError>;

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
    // Keep the branch of your database. They differ in the type of the handler's pool.
    let (dedup, route) = if url.starts_with("postgres") {
        let pool = PgPool::connect(&url).await?;
        let mut tx = pool.begin().await?;
        sqlx::raw_sql(LOCK).execute(&mut *tx).await?;
        sqlx::raw_sql(CREATE).execute(&mut *tx).await?;
        tx.commit().await?;
        let dedup = DedupLayer::transactional(STRIPE, PostgresAdapter::new(pool.clone()));
        (dedup, post(on_postgres).with_state(pool))
    } else {
        let store = SqliteAdapter::connect(&url).await?; // makes the file
        let pool = SqlitePool::connect(&url).await?;
        sqlx::raw_sql(CREATE).execute(&pool).await?;
        (DedupLayer::transactional(STRIPE, store), post(on_sqlite).with_state(pool))
    };
    // A handler that hangs is rolled back after this time, and its key is free again.
    let dedup = dedup.require_verified().handler_timeout(Duration::from_secs(20));
    let handle = dedup.handle();
    // Of a tuple, the first layer is the outermost: a forged request uses up no id.
    let route = route.layer((verify, dedup));
    let app = Router::new().route("/webhooks/stripe", route);
    let listener = tokio::net::TcpListener::bind(&listen).await?;
    #[cfg(unix)] // SIGTERM ends a container.
    let mut terminate = signal::unix::signal(signal::unix::SignalKind::terminate())?;
    #[cfg(windows)]
    let mut terminate = signal::windows::ctrl_close()?;
    let stop = async move { tokio::select!(_ = ctrl_c() => {}, _ = terminate.recv() => {}) };
    println!("listening on http://{}/webhooks/stripe", listener.local_addr()?);
    axum::serve(listener, app).with_graceful_shutdown(stop).await?;
    // Deliveries whose client has hung up. What is killed here is rolled back, and Stripe sends it again.
    tokio::time::timeout(Duration::from_secs(30), handle.drain()).await?;
    Ok(())
}

async fn on_postgres(State(pool): State<PgPool>, event: Delivery, body: Json<Value>) -> Handled {
    let Some("payment_intent.succeeded") = body["type"].as_str() else { return ignored(&event) };
    let mut tx = event.begin(&pool).await?;
    sqlx::query(INSERT).bind(event.id()).bind(amount(&body)).execute(&mut *tx).await?;
    tx.commit().await // the key and the payment
}

async fn on_sqlite(State(pool): State<SqlitePool>, event: Delivery, body: Json<Value>) -> Handled {
    let Some("payment_intent.succeeded") = body["type"].as_str() else { return ignored(&event) };
    let mut tx = event.begin(&pool).await?;
    sqlx::query(INSERT).bind(event.id()).bind(amount(&body)).execute(&mut *tx).await?;
    tx.commit().await // the key and the payment
}

fn amount(event: &Value) -> Option<i64> {
    event.pointer("/data/object/amount")?.as_i64()
}

fn ignored(event: &Delivery) -> Handled {
    event.nothing_to_write(); // else a success without a commit is an error
    Ok(())
}
