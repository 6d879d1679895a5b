//! A receiver of webhooks: a route for every preset, one store, and a ledger of what took effect.
//!
//! ```text
//! cargo run --example receiver
//! cargo run --example receiver -- --listen 127.0.0.1:8080 --store memory: --ledger on-arrival
//! cargo run --example receiver -- --store postgres://… --ledger transactional
//! ```
//!
//! `scripts/postgres` starts a server to try the last one with, and prints its URL.
//!
//! Every preset of [`provider::ALL`] has a route: `/webhooks/standard-webhooks`,
//! `/webhooks/github` and so on, by its name and methods. The effect of an event is one row in the
//! table `effects` of the same store, written each time that the handler runs; `GET /effects`
//! counts them for every key. The same delivery twice is two answers of 200 and one effect.
//!
//! # Signatures
//!
//! A sender whose secret is in the environment is verified, and answered 401 if that fails. The
//! others are taken at their word.
//!
//! ```text
//! WEBHOOK_SECRET_GITHUB=mysecret cargo run --example receiver
//!
//! # The signature is `printf %s "$body" | openssl dgst -sha256 -hmac mysecret`.
//! curl -i http://127.0.0.1:3000/webhooks/github -H 'X-GitHub-Delivery: 72d3162e' \
//!   -H 'X-Hub-Signature-256: sha256=4864d2759938a15468b5df9ade20bf161da9b4f737ea61794142f3484236bda3' \
//!   -d '{"foo":"bar"}'
//! ```
//!
//! Once more it is a duplicate; with another body it is a 401, and its id is not used up; with
//! another id it *runs*, since GitHub does not sign the id: see
//! [`guide::verification`](tower_dedup::guide::verification).
//!
//! - The variable is `WEBHOOK_SECRET_` and the preset's name in capitals, with `_` for `-`. Its
//!   value is what the sender shows: `whsec_…` and all. A secret that the receiver has no use for
//!   ends it at once, with a list of those it has: nobody should believe a route to be verified
//!   that is not.
//! - To change a secret, put the old one into the same variable with `_PREVIOUS` at the end until
//!   the sender has changed too.
//! - Secrets are no options: every user of the machine can read the command line of a process.
//! - Twilio signs the URL that it was told, which a server behind a proxy does not see:
//!   `--public-url https://hooks.example.com` says what comes before the path.
//!
//! # Misbehaviour
//!
//! Two query parameters make the handler misbehave, so that the rest can be watched by hand:
//!
//! - `delay_ms=5000` makes it slow. Deliver the event again meanwhile: the second delivery waits
//!   for two seconds and is then answered 503, `x-dedup-result: in-flight`. Or hang up: the
//!   handler finishes without you. Or `kill -9` the receiver, start it again and deliver again:
//!   under `lease`, in flight until the lease has lapsed (`--lease-seconds 5`), then a takeover;
//!   under `transactional`, it runs at once, as if nothing had been.
//! - `fail=500` answers that status and leaves no effect. The retry runs at once.
//!
//! Under `transactional`, a delivery that runs holds its transaction. On Postgres that is one of
//! ten connections; on SQLite it is the file, so handlers run one after the other.
//!
//! SIGTERM and Ctrl-C end it in order: no new connections, then every running handler to its end,
//! then the store.

mod effects;
mod handshake;
mod secrets;
#[path = "../shared/mod.rs"]
mod shared;

use std::collections::BTreeMap;
use std::env;
use std::error::Error;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::{Query, State};
use axum::handler::Handler;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodFilter, MethodRouter, get};
use axum::{Json, Router};
use clap::{Parser, ValueEnum};
use effects::{Effect, Effects, Table, bounded};
use serde::Deserialize;
use shared::signature::Check;
use shared::verify::VerifyLayer;
use shared::{in_one_line, told_to_stop};
use sqlx::{Postgres, Sqlite};
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout, timeout_at};
use tower_dedup::adapter::{self, MaintenanceAdapter, PostgresAdapter, SqliteAdapter};
use tower_dedup::ledger::Ledger;
use tower_dedup::{DedupHandle, DedupLayer, DedupTx, Delivery, Purger, provider};

/// How long a shutdown may take in all.
const SHUTDOWN: Duration = Duration::from_secs(30);
/// How long a shutdown waits for a client that neither sends the rest of its request nor goes.
const LAST_REQUESTS: Duration = Duration::from_secs(5);
/// How long the last answers may take to leave.
const LAST_ANSWERS: Duration = Duration::from_secs(1);

/// Receives webhooks and lets each take effect once.
///
/// A sender whose secret is in the environment is verified: `WEBHOOK_SECRET_GITHUB`, for one.
#[derive(Debug, Parser)]
struct Options {
    /// The address to listen on.
    #[arg(long, default_value = "127.0.0.1:3000")]
    listen: SocketAddr,
    /// Where keys and effects are kept: `memory:`, `sqlite://FILE` or `postgres://…`.
    #[arg(long, default_value = "sqlite://dedup.db")]
    store: String,
    /// When a key becomes permanent.
    #[arg(long, value_enum, default_value = "lease")]
    ledger: LedgerKind,
    /// How long the event of a receiver that died waits for its retry to run, under `lease`.
    #[arg(long, value_name = "N", default_value_t = 60)]
    lease_seconds: u64,
    /// Where senders find this receiver, without the path: for those that sign the URL.
    #[arg(long, value_name = "URL", value_parser = public_url)]
    public_url: Option<String>,
}

fn public_url(text: &str) -> Result<String, String> {
    let after_scheme = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
    match after_scheme {
        Some(rest) if !rest.is_empty() && !rest.contains(['?', '#']) => Ok(text.to_owned()),
        _ => Err("it looks like this: https://hooks.example.com".to_owned()),
    }
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum LedgerKind {
    /// After the handler has succeeded: no event is lost.
    Lease,
    /// Before the handler runs: no event runs twice.
    OnArrival,
    /// In one transaction with what the handler writes: neither.
    Transactional,
}

#[tokio::main]
async fn main() -> ExitCode {
    shared::log("receiver=info,tower_dedup=info");
    match run(Options::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", in_one_line(&*error));
            ExitCode::FAILURE
        }
    }
}

async fn run(options: Options) -> Result<(), Box<dyn Error>> {
    let url = options.store.as_str();
    let checks = secrets::checks(env::vars_os(), options.public_url.as_deref())?;
    let routes = Routes { lease: Duration::from_secs(options.lease_seconds), checks };
    let (store, (webhooks, handles)): (Arc<dyn MaintenanceAdapter>, _) = match options.ledger {
        LedgerKind::Lease => {
            let store = adapter::connect(url).await?;
            (store.clone(), routes.over(|preset| DedupLayer::new(preset, store.clone()), receive))
        }
        LedgerKind::OnArrival => {
            let store = adapter::connect(url).await?;
            (
                store.clone(),
                routes.over(|preset| DedupLayer::on_arrival(preset, store.clone()), receive),
            )
        }
        // A transaction is of one kind of database, and so is the handler that takes it.
        LedgerKind::Transactional if url.starts_with("sqlite:") => {
            let store = SqliteAdapter::connect(url).await?;
            let layer = |preset| DedupLayer::transactional(preset, store.clone());
            (Arc::new(store.clone()), routes.over(layer, receive_in::<Sqlite>))
        }
        LedgerKind::Transactional if url.starts_with("postgres") => {
            let store = PostgresAdapter::connect(url).await?;
            let layer = |preset| DedupLayer::transactional(preset, store.clone());
            (Arc::new(store.clone()), routes.over(layer, receive_in::<Postgres>))
        }
        LedgerKind::Transactional => {
            return Err("--ledger transactional needs a database: \
                 --store sqlite://FILE or postgres://…"
                .into());
        }
    };
    // The first call makes the table: a store that cannot be used is found out now.
    store.count().await?;
    let effects = Effects::connect(url).await?;
    let app = webhooks.route("/effects", get(list_effects)).with_state(effects.clone());

    let told_to_stop = told_to_stop()?;
    let listener = TcpListener::bind(options.listen)
        .await
        .map_err(|error| format!("cannot listen on {}: {error}", options.listen))?;
    let address = listener.local_addr()?;
    let purger = Purger::new(store.clone()).spawn();
    let (stop, stopped) = oneshot::channel::<()>();
    let server = axum::serve(listener, app).with_graceful_shutdown(async {
        let _ = stopped.await;
    });
    let mut server = tokio::spawn(server.into_future());
    greet(address, &routes);

    told_to_stop.await;
    tracing::info!("stopping");
    let deadline = Instant::now() + SHUTDOWN;
    drop(stop);
    // Idle connections are closed at once; one that is in the middle of a request is waited for.
    let mut served = timeout(LAST_REQUESTS, &mut server).await.is_ok();
    // Handlers run to their end, those included whose client has hung up; then what the store has
    // not taken yet is tried again.
    for (route, handle) in &handles {
        if timeout_at(deadline, handle.drain()).await.is_err() {
            match (handle.running(), handle.waiting()) {
                (0, 0) => tracing::warn!(route, "left with the store still to be told"),
                (running, waiting) => tracing::warn!(route, running, waiting, "left with handlers"),
            }
        }
    }
    served = served || timeout(LAST_ANSWERS, &mut server).await.is_ok();
    if !served {
        tracing::warn!("leaving with connections open");
    }
    purger.stop().await;
    store.close().await;
    effects.close().await;
    tracing::info!("stopped");
    Ok(())
}

/// What the routes are made of.
struct Routes {
    lease: Duration,
    /// By the names of the senders that are verified.
    checks: BTreeMap<&'static str, Check>,
}

/// What waits for the deliveries of each route.
type Handles = Vec<(&'static str, DedupHandle)>;

impl Routes {
    /// One route for every sender, each with the sender's own key, all over one store.
    fn over<L, H, T>(
        &self,
        layer: impl Fn(provider::Preset) -> DedupLayer<L>,
        handler: H,
    ) -> (Router<Effects>, Handles)
    where
        L: Ledger,
        H: Handler<T, Effects> + Copy,
        T: 'static,
    {
        let (mut router, mut handles) = (Router::new(), Vec::new());
        for preset in provider::ALL {
            let mut dedup = layer(*preset).lease(self.lease);
            let check = self.checks.get(preset.name());
            if check.is_some() {
                dedup = dedup.require_verified();
            }
            handles.push((preset.name(), dedup.handle()));
            let mut route = MethodRouter::new();
            for method in preset.methods() {
                let filter = MethodFilter::try_from(method.clone()).expect("a usual method");
                route = route.on(filter, handler);
            }
            route = route.layer(dedup);
            if let Some(check) = check {
                // Added last, it is outermost: nobody uses an id up without a signature.
                route = route.layer(VerifyLayer::new(Arc::clone(check)));
            }
            router = router.route(&format!("/webhooks/{}", preset.name()), route);
        }
        (router, handles)
    }
}

/// How the handler is asked to misbehave.
#[derive(Debug, Deserialize)]
struct ByHand {
    #[serde(default)]
    delay_ms: u64,
    fail: Option<u16>,
}

impl ByHand {
    async fn misbehave(&self) -> Result<(), StatusCode> {
        tokio::time::sleep(Duration::from_millis(self.delay_ms)).await;
        match self.fail.map(StatusCode::from_u16) {
            None => Ok(()),
            Some(status) => Err(status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)),
        }
    }
}

/// The handler: runs for the first delivery of an event only, and again until it succeeds. A
/// handshake is no event and comes without a delivery; a batch is several.
async fn receive(
    State(effects): State<Effects>,
    Query(by_hand): Query<ByHand>,
    headers: HeaderMap,
    delivery: Option<Delivery>,
    body: Bytes,
) -> Result<Response, StatusCode> {
    by_hand.misbehave().await?;
    if let Some(delivery) = delivery {
        for key in delivery.keys() {
            effects.add(key, delivery.attempt()).await.map_err(|error| failed(&error))?;
            delivery.mark_done(key);
        }
    }
    Ok(answer(&headers, &body))
}

/// The handler under the transactional ledger: what it writes and the keys commit together, when
/// it has succeeded. It writes first, so that `fail` and `kill -9` have something to undo.
async fn receive_in<DB: Table>(
    Query(by_hand): Query<ByHand>,
    headers: HeaderMap,
    delivery: Option<Delivery>,
    tx: Option<DedupTx<DB>>,
    body: Bytes,
) -> Result<Response, StatusCode> {
    if let Some((delivery, mut tx)) = delivery.zip(tx) {
        for key in delivery.keys() {
            let added = bounded(DB::add(&mut tx, key, delivery.attempt())).await;
            added.map_err(|error| failed(&error))?;
        }
    }
    by_hand.misbehave().await?;
    Ok(answer(&headers, &body))
}

fn answer(headers: &HeaderMap, body: &[u8]) -> Response {
    handshake::answer(headers, body).unwrap_or_else(|| StatusCode::OK.into_response())
}

async fn list_effects(State(effects): State<Effects>) -> Result<Json<Vec<Effect>>, StatusCode> {
    effects.list().await.map(Json).map_err(|error| failed(&error))
}

/// What is not a 2xx makes the sender deliver again.
fn failed(error: &sqlx::Error) -> StatusCode {
    tracing::error!(error = in_one_line(error), "the effects could not be written or read");
    StatusCode::INTERNAL_SERVER_ERROR
}

/// Says what to try. Nobody may be reading, which is no reason to fail.
fn greet(address: SocketAddr, routes: &Routes) {
    let verified: Vec<_> = routes.checks.keys().copied().collect();
    let _ = writeln!(
        io::stdout(),
        "listening on http://{address}\n\
         verified: {}\n\
         deliver an event, and once more:\n  \
         curl -i http://{address}/webhooks/standard-webhooks -H 'webhook-id: msg_1' \
         -d '{{\"paid\": 42}}'\n\
         then see what took effect:\n  \
         curl http://{address}/effects",
        if verified.is_empty() { "nobody".to_owned() } else { verified.join(", ") },
    );
}
