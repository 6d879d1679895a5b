//! Acknowledge now, work later: verify, deduplicate, write a job down, answer 202.
//!
//! ```text
//! scripts/postgres                       # in another terminal: prints the URL of a database
//! cargo run --example ack_fast -- --database-url postgres://…
//! ```
//!
//! Many senders wait for a few seconds only, and some never retry. So the handler does no work: it
//! enqueues a job, in the transaction that also records the event's key. Both commit before the
//! sender sees its 202, or neither does and the sender comes again; a duplicate enqueues nothing.
//!
//! A worker in this process runs the job, as soon as it is committed. One that fails is run again
//! after 2.7 s, 7.4 s, 20 s and so on (e to the power of its attempts); after `--max-attempts` it is
//! a dead letter, which is logged and stays in the database: `GET /dead-letters`.
//!
//! Deliveries are signed with the secret in `WEBHOOK_SECRET_STANDARD_WEBHOOKS`, or, without one,
//! with a secret that everybody knows. The program prints a shell function that signs and sends a
//! delivery. `{"fail": 2}` makes the first two attempts at its job fail, `{"fail": 99}` makes a dead
//! letter of it. `{"work_ms": 9000}` makes it slow: `kill -9` the program meanwhile and start it
//! again, and it runs the job again, some ten seconds after the death.
//!
//! The queue is [`graphile_worker`](https://docs.rs/graphile_worker): any queue will do that takes
//! a connection of yours to enqueue on.

use std::env::VarError;
use std::error::Error;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::{get, post};
use axum::{Json, Router};
use clap::Parser;
use graphile_worker::sql::add_job::single::add_job;
use graphile_worker::{
    IntoTaskHandlerResult, JobPermanentlyFail, JobSpecBuilder, Schema, TaskHandler, WorkerContext,
    WorkerOptions,
};
use serde::{Deserialize, Serialize};
use shared::signature::Scheme;
use shared::verify::VerifyLayer;
use shared::{in_one_line, told_to_stop};
use sqlx::postgres::{PgPool, PgPoolOptions, Postgres};
use tokio::net::TcpListener;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tower_dedup::adapter::{MaintenanceAdapter, PostgresAdapter};
use tower_dedup::{DedupLayer, DedupTx, Delivery, provider};

mod shared;

/// What the worker needs: one to hear of new jobs, and some for those that run.
const CONNECTIONS: u32 = 5;
const BODY_LIMIT: usize = 256 * 1024;
/// What the sender signs with. Not an option: every user of the machine can read those.
const SECRET: &str = "WEBHOOK_SECRET_STANDARD_WEBHOOKS";
/// For trying things out. Everybody knows it.
const NO_SECRET: &str = "whsec_YSBzZWNyZXQgZm9yIHRyeWluZyB0aGluZ3Mgb3V0";
/// How long a shutdown may take in all.
const SHUTDOWN: Duration = Duration::from_secs(30);

/// Acknowledges webhooks at once, and does their work afterwards.
#[derive(Parser)]
struct Options {
    /// Where keys and jobs are kept: `postgres://…`.
    #[arg(long)]
    database_url: String,
    /// The address to listen on.
    #[arg(long, default_value = "127.0.0.1:3000")]
    listen: SocketAddr,
    /// How often a job is tried.
    #[arg(long, value_name = "N", default_value_t = 5)]
    max_attempts: i16,
    /// The database schema of the job queue.
    #[arg(long, default_value = "graphile_worker")]
    jobs_schema: String,
}

#[tokio::main]
async fn main() -> ExitCode {
    shared::log("ack_fast=info,tower_dedup=info");
    match run(Options::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", in_one_line(&*error));
            ExitCode::FAILURE
        }
    }
}

async fn run(options: Options) -> Result<(), Box<dyn Error>> {
    let secret = match std::env::var(SECRET) {
        Err(VarError::NotPresent) => NO_SECRET.to_owned(),
        secret => secret.map_err(|why| format!("{SECRET}: {why}"))?,
    };
    let check = Scheme::StandardWebhooks.check(&secret, None);
    let check = check.map_err(|why| format!("{SECRET}: {why}"))?;
    let verify = VerifyLayer::new(check).body_limit(BODY_LIMIT);
    // A pool for deliveries, each of which holds a connection while it runs, and one for jobs:
    // neither waits for the other.
    let keys = PostgresAdapter::connect(&options.database_url).await?;
    keys.migrate().await?;
    let pool = PgPoolOptions::new().max_connections(CONNECTIONS);
    let pool = pool.connect(&options.database_url).await?;
    let jobs = Jobs {
        pool: pool.clone(),
        schema: Schema::new(&options.jobs_schema),
        max_attempts: options.max_attempts,
    };
    let stop = CancellationToken::new();
    let worker = WorkerOptions::default()
        .pg_pool(pool.clone())
        .schema(jobs.schema.clone())
        .concurrency(2)
        // It is told of new jobs; this is how soon it finds one whose pause is over.
        .poll_interval(Duration::from_millis(500))
        // Without these, the job of a process that died would wait for ever.
        .heartbeat_interval(Duration::from_secs(2))
        .sweep_interval(Duration::from_secs(2))
        .sweep_threshold(Duration::from_secs(10))
        .recovery_delay(Duration::ZERO)
        .listen_os_shutdown_signals(false)
        .shutdown_signal(stop.clone().cancelled_owned())
        // A job that runs may end; one that takes longer is cut off, and run again later.
        .shutdown_grace_period(Duration::from_secs(20))
        .define_job::<OnEvent>()
        .on(JobPermanentlyFail, |dead| async move {
            tracing::error!(job = dead.job.id(), error = dead.error, "a dead letter");
        })
        .init() // makes its schema, too
        .await?;

    let dedup = DedupLayer::transactional(provider::STANDARD_WEBHOOKS, keys.clone())
        .body_limit(BODY_LIMIT)
        .require_verified();
    let handle = dedup.handle();
    let app = Router::new()
        // What is named first is outermost: nobody uses an id up without a signature.
        .route("/webhooks", post(enqueue).layer((verify, dedup)))
        .route("/dead-letters", get(dead_letters))
        .with_state(jobs);

    let told_to_stop = told_to_stop()?;
    let listener = TcpListener::bind(options.listen)
        .await
        .map_err(|error| format!("cannot listen on {}: {error}", options.listen))?;
    let address = listener.local_addr()?;
    let mut worker = tokio::spawn(async move { worker.run().await });
    let server = axum::serve(listener, app).with_graceful_shutdown(stop.clone().cancelled_owned());
    let server = tokio::spawn(server.into_future());
    greet(address, &secret);

    tokio::select! {
        () = told_to_stop => {}
        // Nothing is lost, but nothing gets done either: let whoever started us do so again.
        ended = &mut worker => return Err(format!("the worker has ended: {ended:?}").into()),
    }
    tracing::info!("stopping");
    stop.cancel();
    // What is not done yet is in the database. The next process does it.
    let ended = timeout(SHUTDOWN, async {
        let _ = server.await;
        handle.drain().await;
        let ended = worker.await;
        keys.close().await;
        pool.close().await;
        ended
    });
    if !matches!(ended.await, Ok(Ok(Ok(())))) {
        tracing::warn!(deliveries = handle.running(), "leaving before everything has ended");
    }
    tracing::info!("stopped");
    Ok(())
}

/// What the sender sends.
#[derive(Debug, Serialize, Deserialize)]
struct Event {
    /// How many attempts at its job are to fail.
    #[serde(default)]
    fail: i16,
    /// How long its job takes.
    #[serde(default)]
    work_ms: u64,
}

/// What is to be done about it, as it is kept in the database.
#[derive(Debug, Serialize, Deserialize)]
struct OnEvent {
    key: String,
    idempotency_key: String,
    event: Event,
}

impl TaskHandler for OnEvent {
    const IDENTIFIER: &'static str = "on_event";

    /// Runs at least once: again after a failure, and after the death of a process. What it does
    /// in this database belongs in a transaction; what it asks of another service carries
    /// `idempotency_key`, which is the same each time.
    async fn run(self, context: WorkerContext) -> impl IntoTaskHandlerResult {
        let (key, attempt) = (self.key, *context.job().attempts());
        tokio::time::sleep(Duration::from_millis(self.event.work_ms)).await;
        if attempt <= self.event.fail {
            tracing::warn!(key, attempt, "the job fails");
            return Err("told to fail");
        }
        tracing::info!(key, attempt, idempotency_key = self.idempotency_key, "the job is done");
        Ok(())
    }
}

#[derive(Clone)]
struct Jobs {
    pool: PgPool,
    schema: Schema,
    max_attempts: i16,
}

/// The handler: writes the job down, in the transaction that records the key. It commits when a 2xx
/// is on its way, and rolls back otherwise.
async fn enqueue(
    State(jobs): State<Jobs>,
    delivery: Delivery,
    mut tx: DedupTx<Postgres>,
    Json(event): Json<Event>,
) -> Result<StatusCode, StatusCode> {
    let failed = |error: &dyn Error| {
        tracing::error!(error = in_one_line(error), "the job could not be enqueued");
        StatusCode::INTERNAL_SERVER_ERROR
    };
    let key = delivery.key();
    let key = format!("{}/{}", key.namespace(), key.id());
    let idempotency_key = delivery.idempotency_key(OnEvent::IDENTIFIER);
    let job = OnEvent { key: key.clone(), idempotency_key, event };
    let job = serde_json::to_value(job).map_err(|error| failed(&error))?;
    // The queue knows the job by the event's key, too. Should the key be forgotten and the event
    // delivered again, the new job takes the place of one that is still waiting.
    let spec = JobSpecBuilder::new().max_attempts(jobs.max_attempts).job_key(key).build();
    add_job(&mut *tx, jobs.schema, OnEvent::IDENTIFIER, job, spec, false)
        .await
        .map_err(|error| failed(&error))?;
    Ok(StatusCode::ACCEPTED)
}

/// A job that has failed too often. It is tried again by
/// `SELECT graphile_worker.reschedule_jobs(ARRAY[id], attempts => 0, run_at => now())`.
#[derive(Serialize)]
struct DeadLetter {
    id: i64,
    key: Option<String>,
    attempts: i16,
    error: Option<String>,
}

async fn dead_letters(State(jobs): State<Jobs>) -> Result<Json<Vec<DeadLetter>>, StatusCode> {
    let sql = format!(
        "SELECT id, key, attempts, last_error FROM {} \
         WHERE attempts >= max_attempts AND locked_at IS NULL ORDER BY id",
        jobs.schema.identifier("jobs") // quoted
    );
    let rows = sqlx::query_as(sqlx::AssertSqlSafe(sql)).fetch_all(&jobs.pool).await;
    let rows: Vec<(i64, Option<String>, i16, Option<String>)> = rows.map_err(|error| {
        tracing::error!(error = in_one_line(&error), "the dead letters could not be read");
        StatusCode::INTERNAL_SERVER_ERROR
    })?;
    let letter = |(id, key, attempts, error)| DeadLetter { id, key, attempts, error };
    Ok(Json(rows.into_iter().map(letter).collect()))
}

/// Says what to try. Nobody may be reading, which is no reason to fail.
fn greet(address: SocketAddr, secret: &str) {
    // The shell has the secret already, or it is no secret.
    let secret = if secret == NO_SECRET { NO_SECRET } else { &format!("${SECRET}") };
    let _ = writeln!(
        io::stdout(),
        r#"listening on http://{address}
paste this into a shell, then deliver an event, and once more:
  deliver() {{
    time=$(date +%s)
    secret="{secret}"
    key=$(printf %s "${{secret#whsec_}}" | base64 -d | od -An -v -tx1 | tr -d ' \n')
    signature=$(printf %s "$1.$time.$2" |
      openssl dgst -sha256 -mac HMAC -macopt "hexkey:$key" -binary | base64)
    curl -i http://{address}/webhooks -H "webhook-id: $1" -H "webhook-timestamp: $time" \
      -H "webhook-signature: v1,$signature" -H 'content-type: application/json' -d "$2"
  }}
  deliver msg_1 '{{"paid": 42}}'
one whose job is retried, and one whose job never succeeds:
  deliver msg_2 '{{"fail": 1}}'
  deliver msg_3 '{{"fail": 99}}'
  curl http://{address}/dead-letters"#
    );
}
