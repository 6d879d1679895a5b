//! Three senders on one store, each verified, each with a namespace of its own.
//!
//! GitHub's id is in a header (`X-GitHub-Delivery`), Twilio's in a form (`MessageSid`), and Stripe's in the
//! JSON body. The presets know where, and what is signed.

use std::{env, time::Duration};

use axum::routing::{MethodRouter, post};
use axum::{Router, body::Bytes};
use tokio::signal::{self, ctrl_c};
use tower_dedup::adapter::SqliteAdapter;
use tower_dedup::provider::{GITHUB, Preset, STRIPE, TWILIO};
use tower_dedup::verify::{Verifier, VerifyLayer};
use tower_dedup::{BoxError, DedupHandle, DedupLayer, Delivery};

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    tracing_subscriber::fmt::init();
    let url = env::var("DATABASE_URL").unwrap_or("sqlite://providers.db".to_owned());
    let listen = env::var("LISTEN").unwrap_or("127.0.0.1:3000".to_owned());
    let github = GITHUB.verifier(&set("GITHUB_WEBHOOK_SECRET")?)?;
    let stripe = STRIPE.verifier(&set("STRIPE_WEBHOOK_SECRET")?)?;
    // Twilio signs the URL that it calls: PUBLIC_URL is `https://example.com`, without a path.
    let twilio = TWILIO.verifier_at(&set("PUBLIC_URL")?, &set("TWILIO_AUTH_TOKEN")?)?;

    let store = SqliteAdapter::connect(&url).await?;
    let (on_github, of_github) = route(github, GITHUB, &store);
    let (on_stripe, of_stripe) = route(stripe, STRIPE, &store);
    let (on_twilio, of_twilio) = route(twilio, TWILIO, &store);
    let app = Router::new()
        .route("/webhooks/github", on_github)
        .route("/webhooks/stripe", on_stripe)
        .route("/webhooks/twilio", on_twilio);
    let listener = tokio::net::TcpListener::bind(&listen).await?;
    #[cfg(unix)] // SIGTERM ends a container.
    let mut terminate = signal::unix::signal(signal::unix::SignalKind::terminate())?;
    #[cfg(windows)]
    let mut terminate = signal::windows::ctrl_close()?;
    let stop = async move { tokio::select!(_ = ctrl_c() => {}, _ = terminate.recv() => {}) };
    println!("listening on http://{}/webhooks", listener.local_addr()?);
    axum::serve(listener, app).with_graceful_shutdown(stop).await?;
    // Handlers whose client has hung up.
    for handle in [of_github, of_stripe, of_twilio] {
        tokio::time::timeout(Duration::from_secs(25), handle.drain()).await?;
    }
    Ok(())
}

fn set(variable: &str) -> Result<String, String> {
    env::var(variable).map_err(|_| format!("set {variable}"))
}

fn route(verifier: Verifier, sender: Preset, store: &SqliteAdapter) -> (MethodRouter, DedupHandle) {
    let dedup = DedupLayer::new(sender, store.clone()).require_verified();
    let handle = dedup.handle();
    (post(on_event).layer((VerifyLayer::new(verifier), dedup)), handle)
}

async fn on_event(event: Delivery, body: Bytes) {
    let (sender, kind) = (event.key().namespace(), event.event_type().unwrap_or("event"));
    println!("{sender} {} {kind}: {} bytes", event.id(), body.len());
}
