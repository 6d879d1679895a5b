//! Tenants of a sender in-house, on one route: each has its own secret, and its own keys.

use std::env;

use axum::{Router, body::Bytes, routing::post};
use tower_dedup::adapter::SqliteAdapter;
use tower_dedup::sqlx::{self, SqlitePool};
use tower_dedup::verify::{Part, Scheme, VerifyLayer};
use tower_dedup::{BoxError, DedupLayer, Delivery, key};

const CREATE: &str = "CREATE TABLE IF NOT EXISTS tenants (name TEXT PRIMARY KEY, secret TEXT)";
const SECRET: &str = "SELECT secret FROM tenants WHERE name = $1";
/// `x-signature: sha256=…`, the HMAC-SHA256 of `<x-time>.<body>` in hexadecimal.
const IN_HOUSE: Scheme =
    Scheme::hmac_sha256("x-signature", &[Part::Seconds("x-time"), Part::Text("."), Part::Body])
        .prefix("sha256=");

fn hooks(pool: SqlitePool, store: SqliteAdapter) -> Router {
    let verify = VerifyLayer::select(move |head| {
        let pool = pool.clone();
        async move {
            let row = sqlx::query_scalar(SECRET).bind(tenant(head.uri.path()));
            let Some::<String>(secret) = row.fetch_optional(&pool).await? else { return Ok(None) };
            Ok(Some(IN_HOUSE.verifier(secret)?))
        }
    });
    let key =
        key::json("/id").namespace("hooks").namespace_by(|request| tenant(request.uri().path()));
    let dedup = DedupLayer::new(key, store).require_verified();
    let layers = (verify.named("in-house"), dedup);
    Router::new().route("/hooks/{tenant}", post(on_event).layer(layers))
}

/// Reads the raw path, as both closures see it. What is encoded in it, `%61cme`, is nobody's name.
fn tenant(path: &str) -> Option<String> {
    path.strip_prefix("/hooks/").map(str::to_owned)
}

async fn on_event(event: Delivery, body: Bytes) {
    println!("{} {}: {} bytes", event.key().namespace(), event.id(), body.len());
}

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    tracing_subscriber::fmt::init();
    let url = env::var("DATABASE_URL").unwrap_or("sqlite://tenants.db".to_owned());
    let listen = env::var("LISTEN").unwrap_or("127.0.0.1:3000".to_owned());
    let store = SqliteAdapter::connect(&url).await?; // makes the file
    let pool = SqlitePool::connect(&url).await?;
    sqlx::raw_sql(CREATE).execute(&pool).await?;
    let listener = tokio::net::TcpListener::bind(&listen).await?;
    println!("listening on http://{}/hooks", listener.local_addr()?);
    let stop = async { _ = tokio::signal::ctrl_c().await };
    axum::serve(listener, hooks(pool, store)).with_graceful_shutdown(stop).await?;
    Ok(())
}
