//! Routes for operators, behind a bearer token: list, show and forget keys.

use std::{env, sync::Arc};

use axum::extract::{Path, Query, Request, State};
use axum::http::{StatusCode, header::AUTHORIZATION};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router, routing::get};
use chrono::{DateTime, SecondsFormat, Utc};
use serde::Deserialize;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tokio::signal::{self, ctrl_c};
use tower_dedup::adapter;
use tower_dedup::adapter::maintenance::{Entry, ForgetReply, ListFilter, MaintenanceAdapter};
use tower_dedup::{BoxError, DedupKey, StoreError, StoreErrorKind};

type Store = Arc<dyn MaintenanceAdapter>;
type Token = sha2::digest::Output<Sha256>;

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    tracing_subscriber::fmt::init();
    let token = env::var("ADMIN_TOKEN").ok().filter(|token| !token.is_empty());
    let token = token.ok_or("set ADMIN_TOKEN")?;
    let store = env::var("DATABASE_URL").map_err(|_| "set DATABASE_URL")?;
    let listen = env::var("LISTEN").unwrap_or("127.0.0.1:3000".to_owned());
    let app = Router::new()
        .route("/keys", get(list))
        .route("/keys/{namespace}/{id}", get(show).delete(forget))
        .with_state(adapter::connect(&store).await?)
        .layer(from_fn_with_state(Sha256::digest(format!("Bearer {token}")), authenticate));
    let listener = tokio::net::TcpListener::bind(&listen).await?;
    #[cfg(unix)] // SIGTERM ends a container.
    let mut terminate = signal::unix::signal(signal::unix::SignalKind::terminate())?;
    #[cfg(windows)]
    let mut terminate = signal::windows::ctrl_close()?;
    let stop = async move { tokio::select!(_ = ctrl_c() => {}, _ = terminate.recv() => {}) };
    println!("listening on http://{}/keys", listener.local_addr()?);
    axum::serve(listener, app).with_graceful_shutdown(stop).await?;
    Ok(())
}

/// Compares digests, so that the time of the comparison tells nothing about the token.
async fn authenticate(State(token): State<Token>, request: Request, next: Next) -> Response {
    let given = request.headers().get(AUTHORIZATION).map(|given| Sha256::digest(given.as_bytes()));
    if given == Some(token) {
        next.run(request).await
    } else {
        StatusCode::UNAUTHORIZED.into_response()
    }
}

#[derive(Deserialize)]
struct Filter {
    namespace: Option<String>,
    /// `in-flight`, `lapsed`, `released` or `complete`.
    state: Option<String>,
    /// A part of the id.
    id: Option<String>,
    /// The `next` of the portion before.
    after: Option<String>,
}

async fn list(
    State(store): State<Store>,
    Query(query): Query<Filter>,
) -> Result<Json<Value>, StatusCode> {
    let mut filter = ListFilter::default();
    filter.namespace = query.namespace;
    filter.id_part = query.id;
    filter.state = query.state.map(|state| state.parse()).transpose().map_err(failed)?;
    let portion = store.list(&filter, query.after.as_deref(), 100).await.map_err(failed)?;
    let keys: Vec<_> = portion.keys.iter().map(|(key, entry)| shown(key, entry)).collect();
    Ok(Json(json!({ "keys": keys, "next": portion.next.map(|next| next.to_string()) })))
}

async fn show(
    State(store): State<Store>,
    Path((namespace, id)): Path<(String, String)>,
) -> Result<Json<Value>, StatusCode> {
    let key = DedupKey::new(&namespace, &id).map_err(|_| StatusCode::BAD_REQUEST)?;
    let entry = store.get(&key).await.map_err(failed)?.ok_or(StatusCode::NOT_FOUND)?;
    Ok(Json(shown(&key, &entry)))
}

/// Lets the event run again when it is delivered the next time, unless another id was handled with the same body: see
/// the record `same body`.
async fn forget(
    State(store): State<Store>,
    Path((namespace, id)): Path<(String, String)>,
) -> Result<StatusCode, StatusCode> {
    let key = DedupKey::new(&namespace, &id).map_err(|_| StatusCode::BAD_REQUEST)?;
    let forgotten = store.forget(&key).await.map_err(failed)?;
    tracing::info!(?key, ?forgotten, "an operator forgets a key");
    Ok(match forgotten {
        ForgetReply::Removed => StatusCode::NO_CONTENT,
        ForgetReply::InFlight => StatusCode::CONFLICT,
        _ => StatusCode::NOT_FOUND,
    })
}

/// A stored response stays out: its headers and body may be personal data.
fn shown(key: &DedupKey, entry: &Entry) -> Value {
    let utc = |time| DateTime::<Utc>::from(time).to_rfc3339_opts(SecondsFormat::Secs, true);
    json!({ "namespace": key.namespace(), "id": key.id(), "entry": {
        "state": entry.state.to_string(),
        "event_type": entry.event_type,
        "attempts": entry.attempts,
        "takeover": entry.takeover,
        "first_seen_at": utc(entry.first_seen_at),
        "expires_at": utc(entry.expires_at),
        "lease_until": entry.lease_until.map(utc),
        "completed_at": entry.completed_at.map(utc),
    } })
}

#[expect(clippy::needless_pass_by_value, reason = "the form of `map_err`")]
fn failed(error: StoreError) -> StatusCode {
    tracing::error!(%error, "an operator's request");
    match error.kind() {
        StoreErrorKind::Refused => StatusCode::BAD_REQUEST, // no such state, or a cursor of another store
        _ => StatusCode::SERVICE_UNAVAILABLE,
    }
}
