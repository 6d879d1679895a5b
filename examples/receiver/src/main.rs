//! A webhook receiver: a route for every preset, one store, and a table of effects.
//!
//! ```text
//! cargo run --example receiver
//! cargo run --example receiver -- --listen 127.0.0.1:8080 --store memory: --ledger on-arrival
//! cargo run --example receiver -- --store postgres://… --ledger transactional
//! cargo run --example receiver -- --store redis://127.0.0.1:6379 --effects sqlite://effects.db
//! cargo run --example receiver -- --inbox
//! ```
//!
//! `scripts/postgres` and `scripts/redis` start a server, and print its URL.
//!
//! Every preset of [`provider::ALL`] has a route with its name and methods: `/webhooks/github`,
//! `/webhooks/standard-webhooks` and so on. The effect of an event is one row in the table `effects` of
//! the same store. The handler writes one row per run, and `GET /effects` counts the rows of every key.
//! The same delivery twice gets 200 twice, and has one effect.
//!
//! `--effects URL` keeps the effects in another database. A store that loses keys then loses no effects,
//! so an event that ran twice shows as two rows. Redis has no table: with it, the default is the file
//! `effects.db`, which the receivers of one folder share.
//!
//! `GET /metrics` is for Prometheus. Whoever reaches the receiver reads `/effects` and `/metrics`, so `--listen` is loopback
//! by default.
//!
//! # Inbox
//!
//! With `--inbox`, a delivery is stored before it is handled, and handled again until it has succeeded
//! ([`guide::inbox`](tower_dedup::guide::inbox)), without the sender. The table is in the store's Postgres; with another
//! store, in the file `inbox.db` of the current folder; or in the database of `--inbox URL`. A failed event runs again after
//! 1, 2, 4, 8 and 16 s. Then it is parked (`tower-dedup inbox`). A handler that runs for longer than 5 s is answered
//! `stored`. If a receiver dies, another one runs its events after 60 s, or `--lease-seconds`. It needs a ledger that
//! releases what fails: not `on-arrival`.
//!
//! # Signatures
//!
//! If the environment has a secret for a sender, the receiver verifies that sender's requests, and
//! answers 401 to invalid ones. It trusts the other senders.
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
//! A second delivery is a duplicate. With another body, the answer is 401, and the id is not used up.
//! With another id, the handler *runs*, because GitHub does not sign the id: see
//! [`guide::verification`](tower_dedup::guide::verification).
//!
//! - The variable is `WEBHOOK_SECRET_` and the preset's name in capitals, with `_` for `-`. Its value is
//!   the secret as the sender shows it, including `whsec_`. The receiver exits on a secret that it cannot
//!   use, and lists the variables that it knows. So no route is unverified by mistake.
//! - To change a secret, put the old one into the same variable with `_PREVIOUS` at the end, until the
//!   sender uses the new one.
//! - The receiver answers the handshakes of Slack, Twitch, Discord, Microsoft Graph and Event Grid, and of Zoom if it has
//!   the secret.
//! - Secrets are no options, because every user of the machine can read the command line of a process.
//! - Twilio, Square and HubSpot sign the public URL, which a server behind a proxy does not see.
//!   `--public-url https://hooks.example.com` sets the part before the path.
//!
//! # Log
//!
//! `RUST_LOG` filters the log on stderr. `LOG_FORMAT=json` makes each record a line of JSON.
//!
//! # Misbehaviour
//!
//! Four query parameters make the handler misbehave:
//!
//! - `delay_ms=5000` makes it slow. Deliver the event again during the run: the second delivery waits
//!   for two seconds and gets 503, `x-dedup-result: in-flight`. Or hang up: the handler runs to its end.
//!   Or `kill -9` the receiver, start it again, and deliver again. Under `lease` and
//!   `transactional`, the event is in flight until the lease lapses (`--lease-seconds 5`), then a takeover
//!   runs.
//! - `delay_after_ms=5000` makes it slow after its effect. `kill -9` the receiver in this time, and deliver again: the
//!   event has two effects under `lease`, and one under `transactional`, where nothing was committed.
//! - `fail=500` responds with that status (400 to 599), and has no effect. The retry runs at once.
//! - `fail_runs=2` makes only the first two runs of an event fail: with 500, or the status of `fail`. With `--inbox`, the third
//!   run comes by itself.
//!
//! Under `transactional`, the handler begins its transaction after `delay_ms`, so a slow handler holds no connection and
//! no lock. It commits after `delay_after_ms`. `fail` comes after the write, which is rolled back.
//!
//! SIGTERM and Ctrl-C stop the receiver in order: it refuses new connections, runs every handler to its
//! end, and closes the store.

mod effects;
mod inbox;
mod metrics;
mod secrets;
#[path = "../../shared/mod.rs"]
mod shared;

use std::collections::BTreeMap;
use std::env;
use std::error::Error;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

use axum::extract::{Query, State};
use axum::handler::Handler;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodFilter, MethodRouter, get};
use axum::{Json, Router};
use clap::{Parser, ValueEnum};
use effects::{Effect, Effects, Table, bounded};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use shared::{in_one_line, stop_signal};
use sqlx::{Postgres, Sqlite};
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout, timeout_at};
use tower_dedup::adapter::maintenance::MaintenanceAdapter;
use tower_dedup::adapter::{self, PostgresAdapter, SqliteAdapter};
use tower_dedup::ledger::Ledger;
use tower_dedup::verify::{Verifier, VerifyLayer};
use tower_dedup::{CommitError, DedupHandle, DedupLayer, Delivery, provider};

/// The time limit of a shutdown.
const SHUTDOWN: Duration = Duration::from_secs(30);
/// How long a shutdown waits for a client that does not finish its request.
const LAST_REQUESTS: Duration = Duration::from_secs(5);
/// How long a shutdown waits for the last responses to leave.
const LAST_RESPONSES: Duration = Duration::from_secs(1);

/// Receives webhooks and makes each event take effect once.
///
/// Verifies every sender with a secret in the environment, for example `WEBHOOK_SECRET_GITHUB`.
#[derive(Debug, Parser)]
struct Options {
    /// The address to listen on.
    #[arg(long, default_value = "127.0.0.1:3000")]
    listen: SocketAddr,
    /// The store for the keys: `memory:`, `sqlite://FILE`, `postgres://…`, `redis://…`,
    /// `redis+sentinel://…` or `redis+cluster://…`.
    #[arg(long, default_value = "sqlite://dedup.db")]
    store: String,
    /// The database for the effects: `sqlite://FILE` or `postgres://…` [default: the store; for Redis,
    /// `sqlite://effects.db`].
    #[arg(long, value_name = "URL")]
    effects: Option<String>,
    /// When a key becomes permanent.
    #[arg(long, value_enum, default_value = "lease")]
    ledger: LedgerKind,
    /// Stores each delivery before it is handled, and handles it again until it has succeeded: in this database
    /// (`sqlite://FILE` or `postgres://…`), without a URL in the store's Postgres, else in the file `inbox.db`.
    #[arg(long, value_name = "URL", num_args = 0..=1, default_missing_value = "")]
    inbox: Option<String>,
    /// The lease: how long an event of a dead receiver stays in flight [default: 60; under `transactional` 10].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    lease_seconds: Option<u64>,
    /// The public URL of this receiver, without the path, for senders that sign the URL.
    #[arg(long, value_name = "URL", value_parser = public_url)]
    public_url: Option<String>,
}

fn public_url(text: &str) -> Result<String, String> {
    let after_scheme = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
    match after_scheme {
        Some(rest) if !rest.is_empty() && !rest.contains(['?', '#']) => Ok(text.to_owned()),
        _ => Err("a public URL looks like https://hooks.example.com".to_owned()),
    }
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum LedgerKind {
    /// After the handler has succeeded: loses no event.
    Lease,
    /// Before the handler runs: runs no event twice.
    OnArrival,
    /// In one transaction with the handler's writes: does neither.
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
    let effects = effects_url(&options)?;
    let metrics = metrics::install()?;
    let verifiers = secrets::verifiers(env::vars_os(), options.public_url.as_deref())?;
    let routes = Routes { lease: options.lease_seconds.map(Duration::from_secs), verifiers };
    let inbox = match &options.inbox {
        Some(_) if matches!(options.ledger, LedgerKind::OnArrival) => {
            return Err(
                "--inbox needs a ledger that releases what fails: leave --ledger on-arrival out"
                    .into(),
            );
        }
        Some(place) => Some(inbox::connect(place, url, options.lease_seconds).await?),
        None => None,
    };
    type Store = Box<dyn MaintenanceAdapter>;
    let (store, (webhooks, handles)): (Store, _) = match options.ledger {
        LedgerKind::Lease => {
            let store = adapter::connect(url).await?;
            let layer = |preset| DedupLayer::new(preset, store.clone());
            (Box::new(store.clone()), routes.over(layer, inbox::with(inbox.as_ref()), receive))
        }
        LedgerKind::OnArrival => {
            let store = adapter::connect(url).await?;
            let layer = |preset| DedupLayer::on_arrival(preset, store.clone());
            (Box::new(store.clone()), routes.over(layer, inbox::without, receive))
        }
        // The type of the transaction depends on the database, and so does the handler.
        LedgerKind::Transactional if url.starts_with("sqlite:") => {
            let store = SqliteAdapter::connect(url).await?;
            let layer = |preset| DedupLayer::transactional(preset, store.clone());
            let layered = inbox::with(inbox.as_ref());
            (Box::new(store.clone()), routes.over(layer, layered, receive_in::<Sqlite>))
        }
        LedgerKind::Transactional if url.starts_with("postgres") => {
            let store = PostgresAdapter::connect(url).await?;
            // If a proxy falls silent, the handler waits for its connection no longer.
            let bound = Duration::from_secs(20);
            let layer =
                |preset| DedupLayer::transactional(preset, store.clone()).handler_timeout(bound);
            let layered = inbox::with(inbox.as_ref());
            (Box::new(store.clone()), routes.over(layer, layered, receive_in::<Postgres>))
        }
        LedgerKind::Transactional => {
            return Err("--ledger transactional needs a database: \
                 --store sqlite://FILE or postgres://…"
                .into());
        }
    };
    // The first call creates the table, and fails if the store does not work.
    store.stats().await?;
    let effects = Effects::connect(effects).await?;
    let webhooks = webhooks.with_state(effects.clone());
    let (stop_loop, loop_stopped) = oneshot::channel::<()>();
    // The webhooks alone: whoever can write to the table can call the routes that the loop has.
    let redeliveries = inbox.as_ref().map(|inbox| {
        tokio::spawn(inbox.run(webhooks.clone(), async {
            let _ = loop_stopped.await;
        }))
    });
    let effects_route = Router::new().route("/effects", get(list_effects));
    let app =
        webhooks.merge(effects_route.with_state(effects.clone())).merge(metrics::routes(metrics));

    let stop_signal = stop_signal()?;
    let listener = TcpListener::bind(options.listen)
        .await
        .map_err(|error| format!("cannot listen on {}: {error}", options.listen))?;
    let address = listener.local_addr()?;
    let (stop, stopped) = oneshot::channel::<()>();
    let server = axum::serve(listener, app).with_graceful_shutdown(async {
        let _ = stopped.await;
    });
    let mut server = tokio::spawn(server.into_future());
    greet(address, &routes);

    stop_signal.await;
    tracing::info!("stopping");
    let deadline = Instant::now() + SHUTDOWN;
    drop((stop, stop_loop));
    // The server closes idle connections at once, and waits for those with a request.
    let mut served = timeout(LAST_REQUESTS, &mut server).await.is_ok();
    if let (Some(inbox), Some(redeliveries)) = (&inbox, redeliveries) {
        let ended = async { (redeliveries.await, inbox.drain().await) };
        if timeout_at(deadline, ended).await.is_err() {
            tracing::warn!("exiting with rows of the inbox running: another receiver takes them");
        }
    }
    // `drain` waits for every handler, including those whose client has hung up, and for pending writes.
    for (route, handle) in &handles {
        if timeout_at(deadline, handle.drain()).await.is_err() {
            match (handle.running(), handle.waiting()) {
                (0, 0) => tracing::warn!(route, "exiting with writes pending"),
                (running, waiting) => {
                    tracing::warn!(route, running, waiting, "exiting with deliveries running");
                }
            }
        }
    }
    served = served || timeout(LAST_RESPONSES, &mut server).await.is_ok();
    if !served {
        tracing::warn!("exiting with connections open");
    }
    store.close().await;
    effects.close().await;
    tracing::info!("stopped");
    Ok(())
}

/// Returns the URL of the database for the effects. Effects in a file are right for receivers of one
/// machine only; several machines name a Postgres.
fn effects_url(options: &Options) -> Result<&str, String> {
    match &options.effects {
        None if ["redis", "valkey"].iter().any(|it| options.store.starts_with(it)) => {
            Ok("sqlite://effects.db")
        }
        None => Ok(&options.store),
        Some(_) if matches!(options.ledger, LedgerKind::Transactional) => {
            Err("--ledger transactional writes the effects to the store: leave --effects out"
                .into())
        }
        Some(url) if url.starts_with("sqlite:") || url.starts_with("postgres") => Ok(url),
        Some(_) => Err("--effects needs a database: sqlite://FILE or postgres://…".into()),
    }
}

/// The settings of the routes.
struct Routes {
    /// `None` for the ledger's own.
    lease: Option<Duration>,
    /// The verifiers of the senders with a secret, by name.
    verifiers: BTreeMap<&'static str, Verifier>,
}

/// The handles that drain the routes, by name.
type Handles = Vec<(&'static str, DedupHandle)>;

impl Routes {
    /// Returns a router with one route per preset, all over one store.
    fn over<L, H, T>(
        &self,
        layer: impl Fn(provider::Preset) -> DedupLayer<L>,
        layered: impl Fn(
            MethodRouter<Effects>,
            DedupLayer<L>,
            Option<VerifyLayer>,
        ) -> MethodRouter<Effects>,
        handler: H,
    ) -> (Router<Effects>, Handles)
    where
        L: Ledger,
        H: Handler<T, Effects> + Copy,
        T: 'static,
    {
        let (mut router, mut handles) = (Router::new(), Vec::new());
        for preset in provider::ALL {
            let mut dedup = layer(*preset);
            if let Some(lease) = self.lease {
                dedup = dedup.lease(lease);
            }
            let verifier = self.verifiers.get(preset.name());
            if verifier.is_some() {
                dedup = dedup.require_verified();
            }
            handles.push((preset.name(), dedup.handle()));
            let mut route = MethodRouter::new();
            for method in preset.methods() {
                let filter = MethodFilter::try_from(method.clone()).expect("a usual method");
                route = route.on(filter, handler);
            }
            if let Some(echo) = secrets::echo(preset) {
                route = route.layer(echo);
            }
            let verify = verifier.map(|verifier| VerifyLayer::new(verifier.clone()));
            let route = layered(route, dedup, verify);
            router = router.route(&format!("/webhooks/{}", preset.name()), route);
        }
        (router, handles)
    }
}

/// The query parameters that make the handler misbehave.
#[derive(Debug, Deserialize)]
struct Misbehaviour {
    #[serde(default)]
    delay_ms: u64,
    #[serde(default)]
    delay_after_ms: u64,
    #[serde(default, deserialize_with = "failure")]
    fail: Option<StatusCode>,
    fail_runs: Option<u32>,
}

/// Reads a status that is no success: a success acknowledges the event without its effect.
fn failure<'de, D: Deserializer<'de>>(status: D) -> Result<Option<StatusCode>, D::Error> {
    let status = StatusCode::from_u16(u16::deserialize(status)?).ok();
    match status.filter(|status| status.is_client_error() || status.is_server_error()) {
        None => Err(D::Error::custom("a status of 400 to 599 is needed")),
        failure => Ok(failure),
    }
}

impl Misbehaviour {
    async fn delay(&self) {
        tokio::time::sleep(Duration::from_millis(self.delay_ms)).await;
    }

    async fn delay_after(&self) {
        tokio::time::sleep(Duration::from_millis(self.delay_after_ms)).await;
    }

    /// Fails every run, or the first runs of an event.
    fn fail(&self, delivery: Option<&Delivery>) -> Result<(), StatusCode> {
        let attempt = delivery.map_or(1, Delivery::attempt);
        match (self.fail, self.fail_runs) {
            (None, None) => Ok(()),
            (_, Some(runs)) if attempt > runs => Ok(()),
            (status, _) => Err(status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)),
        }
    }
}

/// The handler: runs for the first delivery of an event, and for each retry until it succeeds. A request without an
/// event has no `Delivery`. A multi-event delivery has several keys.
async fn receive(
    State(effects): State<Effects>,
    Query(misbehaviour): Query<Misbehaviour>,
    delivery: Option<Delivery>,
) -> Result<(), StatusCode> {
    misbehaviour.delay().await;
    misbehaviour.fail(delivery.as_ref())?;
    if let Some(delivery) = delivery {
        for key in delivery.keys() {
            effects.add(key, delivery.attempt()).await.map_err(|error| failed(&error))?;
        }
        misbehaviour.delay_after().await;
    }
    Ok(())
}

/// The handler under the transactional ledger: its writes commit together with the keys. A request without keys
/// writes nothing.
async fn receive_in<DB: Table>(
    State(effects): State<Effects>,
    Query(misbehaviour): Query<Misbehaviour>,
    delivery: Option<Delivery>,
) -> Result<(), Response> {
    let refused = |error: CommitError| error.into_response();
    misbehaviour.delay().await;
    match (delivery, DB::pool(&effects)) {
        (Some(delivery), Some(pool)) => {
            let mut tx = delivery.begin(pool).await.map_err(refused)?;
            for key in delivery.keys() {
                let added = bounded(DB::add(&mut tx, key, delivery.attempt())).await;
                added.map_err(|error| refused(error.into()))?;
            }
            // After the writes, which are rolled back.
            misbehaviour.fail(Some(&delivery)).map_err(IntoResponse::into_response)?;
            misbehaviour.delay_after().await;
            tx.commit().await.map_err(refused)?;
        }
        _ => misbehaviour.fail(None).map_err(IntoResponse::into_response)?,
    }
    Ok(())
}

async fn list_effects(State(effects): State<Effects>) -> Result<Json<Vec<Effect>>, StatusCode> {
    effects.list().await.map(Json).map_err(|error| failed(&error))
}

/// Logs the error. The 500 makes the sender retry.
fn failed(error: &sqlx::Error) -> StatusCode {
    tracing::error!(error = in_one_line(error), "the effects could not be written or read");
    StatusCode::INTERNAL_SERVER_ERROR
}

/// Prints what to try. A closed stdout is no error.
fn greet(address: SocketAddr, routes: &Routes) {
    let verified: Vec<_> = routes.verifiers.keys().copied().collect();
    let _ = writeln!(
        io::stdout(),
        "listening on http://{address}\n\
         verified: {}\n\
         deliver an event, and once more:\n  \
         curl -i http://{address}/webhooks/standard-webhooks -H 'webhook-id: msg_1' \
         -d '{{\"paid\": 42}}'\n\
         then see what took effect:\n  \
         curl http://{address}/effects",
        if verified.is_empty() { "no sender".to_owned() } else { verified.join(", ") },
    );
}
