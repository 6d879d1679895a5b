//! An API whose clients repeat a request safely: `POST /payments` with an `Idempotency-Key`.
//!
//! Two clients have API keys: `Authorization: Bearer key-of-alice`, and `key-of-bob`.

use std::time::Duration;

use axum::body::Bytes;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json, Router, routing::post};
use clap::Parser;
use serde::Deserialize;
use serde_json::json;
use sqlx::{SqlitePool, sqlite::SqliteConnectOptions};
use tokio::signal::{self, ctrl_c};
use tower_dedup::adapter::SqliteAdapter;
use tower_dedup::adapter::contract::StoredResponse;
use tower_dedup::{BoxError, CommitError, DedupLayer, Delivery, key};

const CREATE: &str = "CREATE TABLE IF NOT EXISTS payments
    (id INTEGER PRIMARY KEY, payer TEXT NOT NULL, amount BIGINT NOT NULL)";
const INSERT: &str = "INSERT INTO payments (payer, amount) VALUES ($1, $2) RETURNING id";

#[derive(Parser)]
struct Options {
    #[arg(long, default_value = "127.0.0.1:3000")]
    listen: String,
    /// `sqlite://FILE`
    #[arg(long, default_value = "sqlite://payments.db")]
    store: String,
}

/// The client, as the API knows it. Its API key may change.
#[derive(Clone)]
struct Principal(&'static str);

#[derive(Deserialize)]
struct Order {
    amount: i64,
}

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    tracing_subscriber::fmt::init();
    let Options { listen, store } = Options::parse();
    let file = store.parse::<SqliteConnectOptions>()?.create_if_missing(true);
    let pool = SqlitePool::connect_with(file).await?;
    sqlx::raw_sql(CREATE).execute(&pool).await?;

    let scope = key::from_fn(|request| {
        Ok(request.extensions().get::<Principal>().map(|principal| principal.0.to_owned()))
    });
    // The payment, its key and the response are in one database, so they commit together.
    let idempotency =
        DedupLayer::transactional_idempotency_key(scope, SqliteAdapter::new(pool.clone()))
            .problem_docs("https://api.example.com/docs/idempotency");
    let handle = idempotency.handle();
    // The first layer is the outermost: it sets the scope.
    let create = post(create).layer((from_fn(authenticate), idempotency));
    let app = Router::new().route("/payments", create).with_state(pool);

    let listener = tokio::net::TcpListener::bind(listen).await?;
    #[cfg(unix)] // SIGTERM ends a container.
    let mut terminate = signal::unix::signal(signal::unix::SignalKind::terminate())?;
    #[cfg(windows)]
    let mut terminate = signal::windows::ctrl_close()?;
    let stop = async move { tokio::select!(_ = ctrl_c() => {}, _ = terminate.recv() => {}) };
    println!("listening on http://{}/payments", listener.local_addr()?);
    axum::serve(listener, app).with_graceful_shutdown(stop).await?;
    // Handlers whose client has hung up.
    tokio::time::timeout(Duration::from_secs(25), handle.drain()).await?;
    Ok(())
}

async fn authenticate(mut request: Request, next: Next) -> Response {
    let credentials = request.headers().get(header::AUTHORIZATION).map(|value| value.as_bytes());
    let principal = match credentials {
        Some(b"Bearer key-of-alice") => Principal("alice"),
        Some(b"Bearer key-of-bob") => Principal("bob"),
        _ => return StatusCode::UNAUTHORIZED.into_response(),
    };
    request.extensions_mut().insert(principal);
    next.run(request).await
}

async fn create(
    State(pool): State<SqlitePool>,
    Extension(payer): Extension<Principal>,
    request: Delivery,
    Json(Order { amount }): Json<Order>,
) -> Result<Response, CommitError> {
    if amount <= 0 {
        return Ok(StatusCode::UNPROCESSABLE_ENTITY.into_response());
    }
    let mut tx = request.begin(&pool).await?;
    let insert = sqlx::query_scalar(INSERT).bind(payer.0).bind(amount);
    let id: i64 = insert.fetch_one(&mut *tx).await?; // an error rolls back; the repetition runs again
    let mut headers = HeaderMap::new();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(header::LOCATION, format!("/payments/{id}").parse().expect("ASCII"));
    let body = Bytes::from(json!({ "id": id, "amount": amount }).to_string());
    // In the same COMMIT: also after a crash, a repetition gets this response.
    request.set_response(StoredResponse::new(StatusCode::CREATED, headers.clone(), body.clone()));
    tx.commit().await?;
    Ok((StatusCode::CREATED, headers, body).into_response())
}
