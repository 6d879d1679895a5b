//! A GitHub receiver on Postgres: verified, each push once, in the transaction of its row.

use std::{env, time::Duration};

use axum::{Json, Router, extract::State, routing::post};
use serde_json::Value;
use tokio::signal::{self, ctrl_c};
use tower_dedup::adapter::PostgresAdapter;
use tower_dedup::sqlx::{self, PgPool};
use tower_dedup::verify::VerifyLayer;
use tower_dedup::{BoxError, CommitError, DedupLayer, Delivery, provider::GITHUB};

// In one message, so in one transaction. Without the lock, Postgres refuses one of two processes that make a table at
// once. A service has migrations instead.
const CREATE: &str = "SELECT pg_advisory_xact_lock(1);
    CREATE TABLE IF NOT EXISTS pushes (delivery TEXT, branch TEXT, head TEXT)";
const INSERT: &str = "INSERT INTO pushes (delivery, branch, head) VALUES ($1, $2, $3)";

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    tracing_subscriber::fmt::init();
    let secret = env::var("GITHUB_WEBHOOK_SECRET").map_err(|_| "set GITHUB_WEBHOOK_SECRET")?;
    let url = env::var("DATABASE_URL").map_err(|_| "set DATABASE_URL to postgres://…")?;
    let listen = env::var("LISTEN").unwrap_or("127.0.0.1:3000".to_owned());
    let pool = PgPool::connect(&url).await?;
    sqlx::raw_sql(CREATE).execute(&pool).await?;

    let verify = VerifyLayer::new(GITHUB.verifier(&secret)?);
    // GitHub does not sign the id, and sends real events with equal bytes: the guide's page on keys has both cases.
    let dedup = DedupLayer::transactional(GITHUB, PostgresAdapter::new(pool.clone()));
    let dedup = dedup.require_verified();
    // A handler that hangs is rolled back, and its key is free again. GitHub waits 10 s in all.
    let dedup = dedup.handler_timeout(Duration::from_secs(3));
    let handle = dedup.handle();
    // The first layer is the outermost: a forged request uses up no id. The layer answers the ping.
    let app = Router::new().route("/webhooks/github", post(on_event).layer((verify, dedup)));
    let app = app.with_state(pool);
    let listener = tokio::net::TcpListener::bind(&listen).await?;
    #[cfg(unix)] // SIGTERM ends a container.
    let mut terminate = signal::unix::signal(signal::unix::SignalKind::terminate())?;
    #[cfg(windows)]
    let mut terminate = signal::windows::ctrl_close()?;
    let stop = async move { tokio::select!(_ = ctrl_c() => {}, _ = terminate.recv() => {}) };
    println!("listening on http://{}/webhooks/github", listener.local_addr()?);
    axum::serve(listener, app).with_graceful_shutdown(stop).await?;
    // GitHub sends no event again by itself, so let the running handlers end.
    tokio::time::timeout(Duration::from_secs(25), handle.drain()).await?;
    Ok(())
}

async fn on_event(
    State(pool): State<PgPool>,
    event: Delivery,
    body: Json<Value>,
) -> Result<(), CommitError> {
    // A push, by the signed body: the header with the event is not signed.
    let (Some(branch), Some(head)) = (body["ref"].as_str(), body["after"].as_str()) else {
        event.nothing_to_write();
        return Ok(());
    };
    let mut tx = event.begin(&pool).await?;
    let insert = sqlx::query(INSERT).bind(event.id()).bind(branch).bind(head);
    insert.execute(&mut *tx).await?; // an error rolls back, and releases the key
    tx.commit().await // the key and the push
}
