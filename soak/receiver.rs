//! A receiver: the process that is killed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::{get, post};
use axum::serve::ListenerExt;
use axum::{Extension, Router};
use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};
use serde::{Deserialize, Serialize};
use sqlx::postgres::PgPoolOptions;
use sqlx::{AssertSqlSafe, Pool, Postgres, Sqlite, SqlitePool};
use tower_dedup::adapter::contract::{DedupAdapter, TransactionAdapter};
use tower_dedup::adapter::{PostgresAdapter, RedisAdapter, SqliteAdapter};
use tower_dedup::ledger::Ledger;
use tower_dedup::{DedupHandle, DedupLayer, Delivery};

use crate::effects::{self, Effect, EffectWriter};
use crate::row::{LedgerKind, Row};
use support::by_header;

/// The environment variable with the setup of a receiver.
pub(crate) const SETUP: &str = "TOWER_DEDUP_SOAK_RECEIVER";
/// The line that a receiver prints when it listens.
pub(crate) const LISTENS: &str = "listens";

/// Short, so that the events of a killed receiver do not wait for long.
pub(crate) const LEASE: Duration = Duration::from_secs(3);
pub(crate) const BODY_LIMIT: usize = 16 * 1_024;
const BODY_TIMEOUT: Duration = Duration::from_secs(1);
const HANDLER_TIMEOUT: Duration = Duration::from_secs(5);
/// Three receivers with this many connections each, and those that are silent, stay below the server's
/// `max_connections`.
const CONNECTIONS: u32 = 12;
/// A new receiver waits so long for its store.
const STARTS: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Setup {
    pub(crate) row: Row,
    /// Of the store.
    pub(crate) url: String,
    /// Of the database of the effects.
    pub(crate) effects: String,
    pub(crate) port: u16,
    /// The number of the process.
    pub(crate) receiver: u32,
    pub(crate) seed: u64,
}

struct App {
    setup: Setup,
    /// The number of runs, so that the runs of one event differ.
    runs: AtomicU64,
    effects: EffectWriter,
}

pub(crate) fn run(setup: &str) {
    let setup: Setup = serde_json::from_str(setup).expect("a setup");
    // Ends with its parent, which may be killed too.
    std::thread::spawn(|| {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        std::process::exit(0);
    });
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime").block_on(serve(setup));
}

async fn serve(setup: Setup) {
    let port = setup.port;
    let row = setup.row;
    let effects = EffectWriter::start(setup.effects.clone());
    let url = setup.url.clone();
    let app = Arc::new(App { setup, runs: AtomicU64::new(0), effects });
    let router = match url.split_once(':').expect("a URL").0 {
        "sqlite" => {
            let adapter = until_ok(|| SqliteAdapter::connect(&url)).await;
            match row.ledger {
                LedgerKind::Transactional => {
                    let pool = until_ok(|| SqlitePool::connect(&url)).await;
                    within(app, adapter, post(write_sqlite).layer(Extension(pool)))
                }
                _ => beside(app, adapter),
            }
        }
        "postgres" => {
            let pool = PgPoolOptions::new().max_connections(CONNECTIONS);
            let pool = pool.acquire_timeout(Duration::from_secs(2));
            // As the guide says: handlers use no connection to a server that was demoted.
            let pool = pool.before_acquire(|connection, _| {
                Box::pin(async move {
                    let read_only = sqlx::query_scalar("SHOW transaction_read_only");
                    let read_only: String = read_only.fetch_one(connection).await?;
                    Ok(read_only == "off")
                })
            });
            let pool = pool.connect_lazy(&url).expect("a URL");
            let adapter = PostgresAdapter::new(pool.clone());
            match row.ledger {
                LedgerKind::Transactional => {
                    within(app, adapter, post(write_postgres).layer(Extension(pool)))
                }
                _ => beside(app, adapter),
            }
        }
        _ => {
            let adapter = until_ok(|| RedisAdapter::connect(&url)).await;
            beside(app, adapter)
        }
    };
    let listener = until_ok(|| tokio::net::TcpListener::bind(("127.0.0.1", port))).await;
    println!("{LISTENS}");
    let listener = listener.tap_io(|stream| drop(stream.set_nodelay(true)));
    axum::serve(listener, router).await.expect("a server that runs");
}

/// Repeats `connect` until it succeeds, for a minute at most: the store may be away, and the port in use.
async fn until_ok<T, E: std::fmt::Debug>(connect: impl AsyncFn() -> Result<T, E>) -> T {
    let begun = tokio::time::Instant::now();
    loop {
        match connect().await {
            Ok(connected) => return connected,
            Err(error) => {
                assert!(begun.elapsed() < STARTS, "neither a store nor a port: {error:?}");
            }
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Handlers that write on a connection of their own.
fn beside(app: Arc<App>, adapter: impl DedupAdapter) -> Router {
    let hook = post(handle);
    match app.setup.row.ledger {
        LedgerKind::OnArrival => router(app, DedupLayer::on_arrival(by_header(), adapter), hook),
        _ => router(app, DedupLayer::new(by_header(), adapter).lease(LEASE), hook),
    }
}

/// Handlers that write in a transaction that completes their delivery.
fn within(app: Arc<App>, adapter: impl TransactionAdapter, hook: Hook) -> Router {
    let layer = DedupLayer::transactional(by_header(), adapter).lease(LEASE);
    // Behind the link, which stays up, the server ends an idle transaction by this.
    router(app, layer.handler_timeout(HANDLER_TIMEOUT), hook)
}

type Hook = axum::routing::MethodRouter<Arc<App>>;

fn router<L: Ledger>(app: Arc<App>, layer: DedupLayer<L>, hook: Hook) -> Router {
    let layer = layer.body_limit(BODY_LIMIT).body_timeout(BODY_TIMEOUT);
    let handle = layer.handle();
    Router::new()
        .route("/hook", hook.layer(layer))
        .route("/drain", get(async move || drain(handle).await))
        .with_state(app)
}

/// Waits until no handler runs and no write is pending.
async fn drain(handle: DedupHandle) {
    handle.drain().await;
}

/// Returns the number of an event of the soak, or `None` for an id of a hostile request.
fn event_of(delivery: &Delivery) -> Option<u64> {
    delivery.id().strip_prefix("event-")?.parse().ok()
}

impl App {
    fn effect(&self, event: u64, delivery: &Delivery) -> Effect {
        Effect {
            event,
            receiver: self.setup.receiver,
            attempt: delivery.attempt(),
            takeover: delivery.is_takeover(),
        }
    }

    /// Returns the draws of one run.
    fn draws(&self, event: u64) -> StdRng {
        let run = self.runs.fetch_add(1, Ordering::Relaxed);
        StdRng::seed_from_u64(self.setup.seed ^ (event << 20) ^ run)
    }

    /// Returns whether a run fails: one in 64, unless its event would be lost.
    fn fails(&self, draws: &mut impl Rng) -> bool {
        self.setup.row.ledger != LedgerKind::OnArrival && draws.random_ratio(1, 64)
    }
}

/// Waits in one of 16 runs, so that handlers run when the process or its store dies.
async fn pause(draws: &mut impl Rng) {
    if draws.random_ratio(1, 16) {
        tokio::time::sleep(Duration::from_millis(draws.random_range(0..=20))).await;
    }
}

async fn handle(State(app): State<Arc<App>>, delivery: Delivery) -> StatusCode {
    let Some(event) = event_of(&delivery) else { return StatusCode::OK };
    let mut draws = app.draws(event);
    pause(&mut draws).await;
    if app.fails(&mut draws) {
        return StatusCode::INTERNAL_SERVER_ERROR;
    }
    app.effects.write(app.effect(event, &delivery)).await;
    pause(&mut draws).await;
    StatusCode::OK
}

macro_rules! write_in_transaction {
    ($name:ident, $database:ty, $now:expr) => {
        async fn $name(
            State(app): State<Arc<App>>,
            delivery: Delivery,
            Extension(pool): Extension<Pool<$database>>,
        ) -> StatusCode {
            let Some(event) = event_of(&delivery) else {
                delivery.nothing_to_write();
                return StatusCode::OK;
            };
            let mut draws = app.draws(event);
            pause(&mut draws).await;
            let sql = effects::insert([&app.effect(event, &delivery)], $now);
            let Ok(mut tx) = delivery.begin(&pool).await else {
                return StatusCode::INTERNAL_SERVER_ERROR;
            };
            let written = sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut *tx).await;
            pause(&mut draws).await;
            // Rolled back.
            if written.is_err() || app.fails(&mut draws) || tx.commit().await.is_err() {
                return StatusCode::INTERNAL_SERVER_ERROR;
            }
            StatusCode::OK
        }
    };
}

write_in_transaction!(write_postgres, Postgres, effects::POSTGRES_NOW);
write_in_transaction!(write_sqlite, Sqlite, effects::SQLITE_NOW);
