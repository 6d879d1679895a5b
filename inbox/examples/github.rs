//! A GitHub receiver that loses no push, although GitHub delivers each event once: verified, stored before it is handled,
//! and handled again until its row is committed.
//!
//! ```text
//! GITHUB_WEBHOOK_SECRET=mysecret DATABASE_URL=postgres://… \
//!     cargo run -p tower-dedup-inbox --features postgres,verify --example github_inbox
//! ```

use std::{env, time::Duration};

use axum::{Json, Router, extract::State, routing::post};
use serde_json::Value;
use tokio::signal::{self, ctrl_c};
use tokio::sync::oneshot;
use tower_dedup::adapter::PostgresAdapter;
use tower_dedup::sqlx::{self, PgPool};
use tower_dedup::verify::VerifyLayer;
use tower_dedup::{BoxError, CommitError, DedupLayer, Delivery, provider::GITHUB};
use tower_dedup_inbox::Inbox;

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
    let inbox = Inbox::postgres(pool.clone(), "github-receiver");
    inbox.migrate().await?;

    let verify = VerifyLayer::new(GITHUB.verifier(&secret)?);
    let dedup = DedupLayer::transactional(GITHUB, PostgresAdapter::new(pool.clone()));
    // A handler that hangs is rolled back, and runs again. GitHub is answered after 5 s in any case.
    let dedup = dedup.require_verified().handler_timeout(Duration::from_secs(20));
    let handle = dedup.handle();
    // The verification is a part of the inbox, because a redelivery is not verified again.
    let route = post(on_event).layer(inbox.around(dedup).verified_by(verify));
    let app = Router::new().route("/webhooks/github", route).with_state(pool);
    let (stop_loop, stopped) = oneshot::channel::<()>();
    let redeliveries = tokio::spawn(inbox.run(app.clone(), async { _ = stopped.await }));

    let listener = tokio::net::TcpListener::bind(&listen).await?;
    #[cfg(unix)] // SIGTERM ends a container.
    let mut terminate = signal::unix::signal(signal::unix::SignalKind::terminate())?;
    #[cfg(windows)]
    let mut terminate = signal::windows::ctrl_close()?;
    let stop = async move { tokio::select!(_ = ctrl_c() => {}, _ = terminate.recv() => {}) };
    println!("listening on http://{}/webhooks/github", listener.local_addr()?);
    axum::serve(listener, app).with_graceful_shutdown(stop).await?;
    // Let the running handlers end. A row that is left is taken by the next process.
    drop(stop_loop);
    let ended = async {
        redeliveries.await?;
        inbox.drain().await;
        handle.drain().await;
        Ok(())
    };
    tokio::time::timeout(Duration::from_secs(25), ended).await?
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
    insert.execute(&mut *tx).await?; // an error rolls back, and the event runs again
    tx.commit().await // the key and the push
}
