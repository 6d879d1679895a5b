//! An inbox around the layer, against the layer without it, on one Postgres server with durable commits.
//!
//! `cargo bench --bench inbox` takes two minutes, or half a minute with `--quick`. It starts its own server. Each side is a
//! router with one route, called in process by 64 callers, and has a schema of its own. The handler writes one row, in a
//! transaction that completes its event. The inbox has its table in the schema of its keys, and its loop runs. Before
//! every measurement, the table of the keys is filled with 10,000 rows.
//!
//! Under `cargo test`, it calls the layer with the memory adapter, and starts no server.

use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{Request, StatusCode};
use axum::routing::{MethodRouter, post};
use bytes::Bytes;
use sqlx::PgPool;
use tower::ServiceExt;
use tower_dedup::adapter::{MemoryAdapter, PostgresAdapter};
use tower_dedup::ledger::Transactional;
use tower_dedup::{CommitError, DedupLayer, Delivery, KeyExtractor, key};
use tower_dedup_inbox::Inbox;

#[path = "shared/mod.rs"]
mod shared;

use shared::calls::{NAMESPACE, fresh_id};
use shared::compare::{Bed, compare};
use shared::database::{Database, FEW, Schema, fill};
use shared::one_by_one;
use shared::run::{Run, runtime};

/// The figures, and the sizes of their bodies in bytes.
const FIGURES: [(&str, usize); 2] = [("inbox_64", 1_000), ("inbox_50k_64", 50_000)];

fn main() {
    let run = Run::from_args();
    if run.is_test() {
        return runtime().block_on(test(&run));
    }
    if !FIGURES.iter().any(|(name, _)| run.wants(&[name])) {
        return;
    }
    let database = Database::start();
    runtime().block_on(async {
        let sides = Sides::new(&database).await;
        for (name, size) in FIGURES {
            let [ours, without] = &sides.apps;
            let body = incompressible(size);
            let sender = |app: &Router| Sender { app: app.clone(), body: body.clone() };
            compare(&run, &sides, name, sender(ours), sender(without)).await;
            sides.check_rows(name).await;
        }
    });
}

/// The layer with an inbox around it, and the layer alone.
struct Sides<'a> {
    database: &'a Database,
    apps: [Router; 2],
    pools: [PgPool; 2],
    _schemas: [Schema; 2],
}

impl Bed for Sides<'_> {
    async fn reset(&self, side: usize) {
        fill(&self.pools[side], FEW).await;
    }

    async fn cpu(&self) -> Option<Duration> {
        self.database.cpu()
    }
}

impl<'a> Sides<'a> {
    async fn new(database: &'a Database) -> Self {
        let (schema, adapter) = database.adapter().await;
        let pool = effects(&schema).await;
        let inbox = Inbox::postgres(pool.clone(), "bench");
        inbox.migrate().await.expect("a table");
        let ours = app(&pool, post(on_event).layer(inbox.around(dedup(adapter))));
        tokio::spawn(inbox.run(ours.clone(), pending()));
        let (other, adapter) = database.adapter().await;
        let others = effects(&other).await;
        let without = app(&others, post(on_event).layer(dedup(adapter)));
        Self { database, apps: [ours, without], pools: [pool, others], _schemas: [schema, other] }
    }
}

impl Sides<'_> {
    /// A delivery whose row the table does not store in time goes to the layer without one: too fast for a figure.
    async fn check_rows(&self, name: &str) {
        let counts =
            "SELECT (SELECT count(*) FROM effects), (SELECT last_value FROM webhook_inbox_seq_seq)";
        let counts = sqlx::query_as(counts).fetch_one(&self.pools[0]).await;
        let (events, rows): (i64, i64) = counts.expect("counts");
        if rows < events {
            println!("{name}: only {rows} of {events} events had a row: measure again");
        }
        let clear = "TRUNCATE effects; TRUNCATE webhook_inbox RESTART IDENTITY";
        sqlx::raw_sql(clear).execute(&self.pools[0]).await.expect("empty tables");
    }
}

/// Returns the pool of the handlers, with their table.
async fn effects(schema: &Schema) -> PgPool {
    let pool = one_by_one::pool(&schema.url()).await;
    let table = sqlx::raw_sql("CREATE TABLE effects (id text NOT NULL, amount int8)");
    table.execute(&pool).await.expect("a table");
    pool
}

fn by_id() -> KeyExtractor {
    key::header("webhook-id").namespace(NAMESPACE)
}

fn dedup(adapter: PostgresAdapter) -> DedupLayer<Transactional> {
    DedupLayer::transactional(by_id(), adapter)
}

fn app(pool: &PgPool, route: MethodRouter<PgPool>) -> Router {
    Router::new().route("/hook", route).with_state(pool.clone())
}

async fn on_event(State(pool): State<PgPool>, event: Delivery) -> Result<StatusCode, CommitError> {
    let mut tx = event.begin(&pool).await?;
    let insert = sqlx::query("INSERT INTO effects VALUES ($1, 42)").bind(event.id());
    insert.execute(&mut *tx).await?;
    tx.commit().await?;
    Ok(StatusCode::OK)
}

/// Returns text that Postgres stores as it is: a body that compresses would hide what its bytes cost.
fn incompressible(size: usize) -> Bytes {
    let digit = |_| b"0123456789abcdef"[rand::random_range(0..16)];
    (0..size).map(digit).collect::<Vec<u8>>().into()
}

/// A caller that delivers new events.
#[derive(Clone)]
struct Sender {
    app: Router,
    body: Bytes,
}

impl shared::rounds::Caller for Sender {
    async fn call(&mut self) {
        let request = Request::post("/hook")
            .header("webhook-id", fresh_id())
            .header("content-type", "application/json")
            .header("user-agent", "sender/1.0");
        let request = request.body(Body::from(self.body.clone())).expect("a request");
        let response = self.app.clone().oneshot(request).await.expect("a response");
        assert_eq!(response.status(), StatusCode::OK);
        // *Stored* would be an answer before the end of the event.
        assert!(!response.headers().contains_key("x-dedup-result"), "{response:?}");
    }
}

/// The memory adapter on both sides.
struct InMemory;

impl Bed for InMemory {
    async fn reset(&self, _: usize) {}

    async fn cpu(&self) -> Option<Duration> {
        None
    }
}

/// Runs one short round.
async fn test(run: &Run) {
    let dedup = DedupLayer::new(by_id(), Arc::new(MemoryAdapter::new()));
    let app = Router::new().route("/hook", post(async || StatusCode::OK).layer(dedup));
    let sender = Sender { app: app.with_state(()), body: incompressible(1) };
    compare(run, &InMemory, FIGURES[0].0, sender.clone(), sender).await;
}
