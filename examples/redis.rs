//! A Stripe receiver on Redis, whose handler books each payment with another service.
//!
//! If the process dies during the call, the handler runs again. Then the other service sees the same
//! idempotency key, and answers as it did the first time.

use std::{env, time::Duration};

use axum::{Json, Router, extract::State, http::StatusCode, routing::post};
use serde_json::{Value, json};
use tokio::signal::{self, ctrl_c};
use tower_dedup::adapter::RedisAdapter;
use tower_dedup::verify::VerifyLayer;
use tower_dedup::{BoxError, DedupLayer, Delivery, provider::STRIPE};

#[derive(Clone)]
struct Bookings {
    client: reqwest::Client,
    url: String,
    token: String,
}

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    tracing_subscriber::fmt::init();
    let verify = VerifyLayer::new(STRIPE.verifier(set("STRIPE_WEBHOOK_SECRET")?)?);
    let (url, token) = (set("BOOKINGS_URL")?, set("BOOKINGS_TOKEN")?);
    let store = RedisAdapter::connect(&set("REDIS_URL")?).await?;
    let listen = env::var("LISTEN").unwrap_or("127.0.0.1:3000".to_owned());
    let client = reqwest::Client::builder().timeout(Duration::from_secs(5)).build()?;

    let dedup = DedupLayer::new(STRIPE, store).require_verified();
    let handle = dedup.handle();
    let app = Router::new()
        .route("/webhooks/stripe", post(on_event).layer((verify, dedup)))
        .with_state(Bookings { client, url, token });
    let listener = tokio::net::TcpListener::bind(&listen).await?;
    #[cfg(unix)] // SIGTERM ends a container.
    let mut terminate = signal::unix::signal(signal::unix::SignalKind::terminate())?;
    #[cfg(windows)]
    let mut terminate = signal::windows::ctrl_close()?;
    let stop = async move { tokio::select!(_ = ctrl_c() => {}, _ = terminate.recv() => {}) };
    println!("listening on http://{}/webhooks/stripe", listener.local_addr()?);
    axum::serve(listener, app).with_graceful_shutdown(stop).await?;
    tokio::time::timeout(Duration::from_secs(30), handle.drain()).await?;
    Ok(())
}

fn set(variable: &str) -> Result<String, String> {
    env::var(variable).map_err(|_| format!("set {variable}"))
}

async fn on_event(
    State(Bookings { client, url, token }): State<Bookings>,
    event: Delivery,
    body: Json<Value>,
) -> StatusCode {
    let Some("payment_intent.succeeded") = event.event_type() else { return StatusCode::OK };
    let booking = json!({ "amount": body["data"]["object"]["amount"] });
    // The same key on every attempt of this event.
    let call = client.post(url).bearer_auth(token).json(&booking);
    let call = call.header("idempotency-key", event.idempotency_key("book"));
    match call.send().await.and_then(reqwest::Response::error_for_status) {
        Ok(_) => StatusCode::OK,
        Err(error) => {
            tracing::error!(%error, "booking a payment");
            StatusCode::BAD_GATEWAY // the key is released, and Stripe sends the event again
        }
    }
}
