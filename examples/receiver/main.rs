//! A receiver of webhooks: four senders, one store, and a ledger of what took effect.
//!
//! ```text
//! cargo run --example receiver
//! cargo run --example receiver -- --listen 127.0.0.1:8080 --store memory: --ledger on-arrival
//! cargo run --example receiver -- --store postgres://… --ledger transactional
//! ```
//!
//! `scripts/postgres` starts a server to try the last one with, and prints its URL.
//!
//! It takes deliveries at `/webhooks/standard`, `/webhooks/github`, `/webhooks/stripe` and
//! `/webhooks/twilio`. The effect of a delivery is one row in the table `effects` of the same
//! store, written each time that the handler runs; `GET /effects` counts them for every key. The
//! same delivery twice is two answers of 200 and one effect.
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
#[path = "../shared/mod.rs"]
mod shared;

use std::error::Error;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Query, State};
use axum::handler::Handler;
use axum::http::{Method, StatusCode};
use axum::routing::{get, post};
use axum::{Json, Router};
use clap::{Parser, ValueEnum};
use effects::{Effect, Effects, Table};
use serde::Deserialize;
use shared::{in_one_line, told_to_stop};
use sqlx::{Postgres, Sqlite};
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout, timeout_at};
use tower_dedup::adapter::{self, DynAdapter, Maintain, PostgresAdapter, SqliteAdapter};
use tower_dedup::ledger::{ArrivalLedger, LeaseLedger, Ledger, TransactionLedger};
use tower_dedup::{DedupHandle, DedupLayer, DedupTx, Delivery, Purger, provider};

/// How long a shutdown may take in all.
const SHUTDOWN: Duration = Duration::from_secs(30);
/// How long a shutdown waits for a client that neither sends the rest of its request nor goes.
const LAST_REQUESTS: Duration = Duration::from_secs(5);
/// How long the last answers may take to leave.
const LAST_ANSWERS: Duration = Duration::from_secs(1);

/// Receives webhooks and lets each take effect once.
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
    let lease = Duration::from_secs(options.lease_seconds);
    let (store, (webhooks, handles)): (Arc<dyn DynAdapter>, _) = match options.ledger {
        LedgerKind::Lease => {
            let store = adapter::connect(url).await?;
            (store.clone(), webhooks(&LeaseLedger::new(store), receive, lease))
        }
        LedgerKind::OnArrival => {
            let store = adapter::connect(url).await?;
            (store.clone(), webhooks(&ArrivalLedger::new(store), receive, lease))
        }
        // A transaction is of one kind of database, and so is the handler that takes it.
        LedgerKind::Transactional if url.starts_with("sqlite:") => {
            let store = SqliteAdapter::connect(url).await?;
            let ledger = TransactionLedger::new(store.clone());
            (Arc::new(store), webhooks(&ledger, receive_in::<Sqlite>, lease))
        }
        LedgerKind::Transactional if url.starts_with("postgres") => {
            let store = PostgresAdapter::connect(url).await?;
            let ledger = TransactionLedger::new(store.clone());
            (Arc::new(store), webhooks(&ledger, receive_in::<Postgres>, lease))
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
    greet(address);

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

/// One route for every sender, each with the sender's own key, all over one ledger.
fn webhooks<L, H, T>(
    ledger: &L,
    handler: H,
    lease: Duration,
) -> (Router<Effects>, Vec<(&'static str, DedupHandle)>)
where
    L: Ledger + Clone,
    H: Handler<T, Effects> + Copy,
    T: 'static,
{
    let senders = [
        ("/webhooks/standard", provider::STANDARD_WEBHOOKS),
        ("/webhooks/github", provider::GITHUB),
        ("/webhooks/stripe", provider::STRIPE),
        ("/webhooks/twilio", provider::TWILIO),
    ];
    let (mut router, mut handles) = (Router::new(), Vec::new());
    for (path, preset) in senders {
        let dedup = DedupLayer::with_ledger(preset, ledger.clone()).lease(lease);
        handles.push((path, dedup.handle()));
        let mut route = post(handler);
        if preset.methods().contains(&Method::GET) {
            route = route.get(handler);
        }
        // A layer that verifies the sender's signature belongs outside: `.layer(dedup)` first,
        // then `.layer(verify)`.
        router = router.route(path, route.layer(dedup));
    }
    (router, handles)
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

/// The handler: runs for the first delivery of an event only, and again until it succeeds.
async fn receive(
    State(effects): State<Effects>,
    Query(by_hand): Query<ByHand>,
    delivery: Delivery,
) -> Result<(), StatusCode> {
    by_hand.misbehave().await?;
    for key in delivery.keys() {
        effects.add(key, delivery.attempt()).await.map_err(|error| failed(&error))?;
    }
    Ok(())
}

/// The handler under the transactional ledger: what it writes and the keys commit together, when
/// it has succeeded. It writes first, so that `fail` and `kill -9` have something to undo.
async fn receive_in<DB: Table>(
    Query(by_hand): Query<ByHand>,
    delivery: Delivery,
    mut tx: DedupTx<DB>,
) -> Result<(), StatusCode> {
    for key in delivery.keys() {
        DB::add(&mut tx, key, delivery.attempt()).await.map_err(|error| failed(&error))?;
    }
    by_hand.misbehave().await
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
fn greet(address: SocketAddr) {
    let _ = writeln!(
        io::stdout(),
        "listening on http://{address}\n\
         deliver an event, and once more:\n  \
         curl -i http://{address}/webhooks/standard -H 'webhook-id: msg_1' -d '{{\"paid\": 42}}'\n\
         then see what took effect:\n  \
         curl http://{address}/effects"
    );
}
