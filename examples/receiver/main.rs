//! A receiver of webhooks: four senders, one store, and a ledger of what took effect.
//!
//! ```text
//! cargo run --example receiver
//! cargo run --example receiver -- --listen 127.0.0.1:8080 --store memory: --ledger on-arrival
//! ```
//!
//! It takes deliveries at `/webhooks/standard`, `/webhooks/github`, `/webhooks/stripe` and
//! `/webhooks/twilio`. The effect of a delivery is one row in the table `effects` of the same
//! store, written each time that the handler runs; `GET /effects` counts them for every key. The
//! same delivery twice is two answers of 200 and one effect.
//!
//! Two query parameters make the handler misbehave, so that the rest can be watched by hand:
//!
//! - `delay_ms=5000` sleeps first. Deliver the event again meanwhile: the second delivery waits
//!   for two seconds and is then answered 503, `x-dedup-result: in-flight`. Or hang up: the
//!   handler finishes without you. Or `kill -9` the receiver, start it again and deliver again: in
//!   flight until the lease has lapsed (`--lease-seconds 5`), then a takeover.
//! - `fail=500` answers that status and leaves no effect. The retry runs at once.
//!
//! SIGTERM and Ctrl-C end it in order: no new connections, then every running handler to its end,
//! then the store.

use std::collections::BTreeMap;
use std::error::Error;
use std::future::Future;
use std::io::{self, IsTerminal, Write};
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Query, State};
use axum::http::{Method, StatusCode};
use axum::routing::{get, post};
use axum::{Json, Router};
use clap::{Parser, ValueEnum};
use serde::{Deserialize, Serialize};
use sqlx::sqlite::{SqliteConnectOptions, SqlitePool, SqlitePoolOptions, SqliteSynchronous};
use tokio::net::TcpListener;
use tokio::sync::{Mutex, oneshot};
use tokio::time::{Instant, timeout, timeout_at};
use tower_dedup::adapter::{self, Maintain};
use tower_dedup::ledger::{ArrivalLedger, LeaseLedger, Ledger};
use tower_dedup::{DedupHandle, DedupKey, DedupLayer, Delivery, Purger, provider};
use tracing_subscriber::EnvFilter;

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
    /// Where keys and effects are kept: `memory:` or `sqlite://FILE`.
    #[arg(long, default_value = "sqlite://dedup.db")]
    store: String,
    /// When a key becomes permanent.
    #[arg(long, value_enum, default_value = "lease")]
    ledger: LedgerKind,
    /// How long the event of a receiver that died waits for its retry to run.
    #[arg(long, value_name = "N", default_value_t = 60)]
    lease_seconds: u64,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum LedgerKind {
    /// After the handler has succeeded: no event is lost.
    Lease,
    /// Before the handler runs: no event runs twice.
    OnArrival,
}

#[tokio::main]
async fn main() -> ExitCode {
    let filter = EnvFilter::try_from_default_env();
    let filter = filter.unwrap_or_else(|_| EnvFilter::new("receiver=info,tower_dedup=info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        .init();
    match run(Options::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", in_one_line(&*error));
            ExitCode::FAILURE
        }
    }
}

async fn run(options: Options) -> Result<(), Box<dyn Error>> {
    let store = adapter::connect(&options.store).await?;
    // The first call makes the table: a store that cannot be used is found out now.
    store.count().await?;
    let effects = Effects::connect(&options.store).await?;

    let lease = Duration::from_secs(options.lease_seconds);
    let (webhooks, handles) = match options.ledger {
        LedgerKind::Lease => webhooks(&LeaseLedger::new(store.clone()), lease),
        LedgerKind::OnArrival => webhooks(&ArrivalLedger::new(store.clone()), lease),
    };
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
fn webhooks<L: Ledger + Clone>(
    ledger: &L,
    lease: Duration,
) -> (Router<Effects>, Vec<(&'static str, DedupHandle)>) {
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
        let mut route = post(receive);
        if preset.methods().contains(&Method::GET) {
            route = route.get(receive);
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

/// The handler: runs for the first delivery of an event only, and again until it succeeds.
async fn receive(
    State(effects): State<Effects>,
    Query(by_hand): Query<ByHand>,
    delivery: Delivery,
) -> Result<(), StatusCode> {
    tokio::time::sleep(Duration::from_millis(by_hand.delay_ms)).await;
    if let Some(status) = by_hand.fail {
        return Err(StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR));
    }
    for key in delivery.keys() {
        // What is not a 2xx makes the sender deliver again.
        effects.add(key, delivery.attempt()).await.map_err(|error| {
            tracing::error!(error = in_one_line(&error), "the effect could not be written");
            StatusCode::INTERNAL_SERVER_ERROR
        })?;
    }
    Ok(())
}

async fn list_effects(State(effects): State<Effects>) -> Result<Json<Vec<Effect>>, StatusCode> {
    effects.list().await.map(Json).map_err(|error| {
        tracing::error!(error = in_one_line(&error), "the effects could not be read");
        StatusCode::INTERNAL_SERVER_ERROR
    })
}

/// What the handlers did: one row for every time that one ran.
#[derive(Debug, Clone)]
enum Effects {
    Memory(Arc<Mutex<BTreeMap<(String, String), i64>>>),
    Sqlite(SqlitePool),
}

/// How often the handler ran for one key; 1, if all is well.
#[derive(Debug, Serialize)]
struct Effect {
    namespace: String,
    id: String,
    count: i64,
}

impl Effects {
    async fn connect(url: &str) -> Result<Self, sqlx::Error> {
        if url.starts_with("memory:") {
            return Ok(Self::Memory(Arc::default()));
        }
        // The adapter has made the file, in WAL mode.
        let options = url.parse::<SqliteConnectOptions>()?.synchronous(SqliteSynchronous::Full);
        let pool = SqlitePoolOptions::new().max_connections(1).connect_with(options).await?;
        sqlx::query(
            "CREATE TABLE IF NOT EXISTS effects (\
             namespace TEXT NOT NULL, id TEXT NOT NULL, attempt INTEGER NOT NULL, \
             at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP)",
        )
        .execute(&pool)
        .await?;
        Ok(Self::Sqlite(pool))
    }

    async fn add(&self, key: &DedupKey, attempt: u32) -> Result<(), sqlx::Error> {
        match self {
            Self::Memory(counts) => {
                let key = (key.namespace().to_owned(), key.id().to_owned());
                *counts.lock().await.entry(key).or_default() += 1;
            }
            Self::Sqlite(pool) => {
                sqlx::query("INSERT INTO effects (namespace, id, attempt) VALUES (?, ?, ?)")
                    .bind(key.namespace())
                    .bind(key.id())
                    .bind(attempt)
                    .execute(pool)
                    .await?;
            }
        }
        Ok(())
    }

    async fn list(&self) -> Result<Vec<Effect>, sqlx::Error> {
        let rows: Vec<(String, String, i64)> = match self {
            Self::Memory(counts) => {
                let counts = counts.lock().await;
                counts.iter().map(|((space, id), n)| (space.clone(), id.clone(), *n)).collect()
            }
            Self::Sqlite(pool) => {
                sqlx::query_as(
                    "SELECT namespace, id, count(*) FROM effects \
                     GROUP BY namespace, id ORDER BY namespace, id",
                )
                .fetch_all(pool)
                .await?
            }
        };
        let effect = |(namespace, id, count)| Effect { namespace, id, count };
        Ok(rows.into_iter().map(effect).collect())
    }

    async fn close(&self) {
        if let Self::Sqlite(pool) = self {
            pool.close().await;
        }
    }
}

/// Ends with SIGTERM or Ctrl-C, which are listened for from the call on.
fn told_to_stop() -> io::Result<impl Future<Output = ()>> {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        Ok(async move {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
        })
    }
    #[cfg(not(unix))]
    Ok(async {
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
    })
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

/// The error and its causes, without those that only repeat what has been said.
fn in_one_line(error: &dyn Error) -> String {
    let mut line = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let text = cause.to_string();
        if !line.contains(&text) {
            line.push_str(": ");
            line.push_str(&text);
        }
        next = cause.source();
    }
    line
}
