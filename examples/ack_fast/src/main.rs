//! Acknowledge first, work later: verify, deduplicate, commit a job, respond 202.
//!
//! ```text
//! scripts/postgres                       # in another terminal: prints the URL of a database
//! cargo run -p ack_fast -- --database-url postgres://…
//! ```
//!
//! For who has a queue, or needs one: several jobs of one event, priorities, schedules, jobs that another
//! program runs. For a sender that never retries, or a handler that is slower than the sender waits, the
//! [inbox](tower_dedup::guide::inbox) is less: no job, no worker and no dead letters of your own.
//!
//! Many senders wait for a few seconds only, and some never retry. So the handler does no work: it
//! enqueues a job in the transaction that completes the event's key. Both commit before the sender sees
//! its 202, or neither does and the sender retries. A duplicate enqueues nothing.
//!
//! A worker in this process runs a job once it is committed. After a failure, it runs the job again
//! after 2.7 s, 7.4 s, 20 s and so on (eⁿ seconds after attempt n). After `--max-attempts`, the job is
//! a dead letter: the worker logs it, and it stays in the database (`GET /dead-letters`).
//!
//! Deliveries are signed with the secret in `WEBHOOK_SECRET_STANDARD_WEBHOOKS`, by default with a
//! public test secret. The program prints a shell function that signs and sends a delivery.
//! `{"fail": 2}` makes the first two attempts at its job fail, and `{"fail": 99}` makes the job a dead
//! letter. `{"work_ms": 9000}` makes the job slow. `kill -9` the program during the job and start it
//! again. It runs the job again, about ten seconds after the kill.
//!
//! The queue is [`graphile_worker`](https://docs.rs/graphile_worker). Any queue works that can enqueue
//! on your connection.

use std::env::VarError;
use std::error::Error;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use clap::Parser;
use graphile_worker::sql::add_job::single::add_job;
use graphile_worker::{
    IntoTaskHandlerResult, JobPermanentlyFail, JobSpecBuilder, Schema, TaskHandler, WorkerContext,
    WorkerOptions,
};
use serde::{Deserialize, Serialize};
use shared::{in_one_line, stop_signal};
use sqlx::Executor;
use sqlx::postgres::{PgPool, PgPoolOptions};
use tokio::net::TcpListener;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tower_dedup::adapter::PostgresAdapter;
use tower_dedup::adapter::maintenance::MaintenanceAdapter;
use tower_dedup::verify::VerifyLayer;
use tower_dedup::{CommitError, DedupLayer, Delivery, provider};

#[path = "../../shared/mod.rs"]
mod shared;

/// The worker's connections: one to listen for new jobs, the others for running jobs.
const CONNECTIONS: u32 = 5;
/// How long a delivery waits for a connection: well below the time for which its sender waits.
const ACQUIRE: Duration = Duration::from_secs(2);
/// How long a connection that comes back may take to end what was left open.
const ENDS: Duration = Duration::from_secs(1);
const BODY_LIMIT: usize = 256 * 1024;
/// The variable with the sender's secret. It is no option, because every user of the machine can read
/// options.
const SECRET: &str = "WEBHOOK_SECRET_STANDARD_WEBHOOKS";
/// The public test secret.
const TEST_SECRET: &str = "whsec_YSBzZWNyZXQgZm9yIHRyeWluZyB0aGluZ3Mgb3V0";
/// The time limit of a shutdown.
const SHUTDOWN: Duration = Duration::from_secs(30);

/// Acknowledges webhooks at once, and runs their jobs afterwards.
#[derive(Parser)]
struct Options {
    /// The database for keys and jobs: `postgres://…`.
    #[arg(long)]
    database_url: String,
    /// The address to listen on.
    #[arg(long, default_value = "127.0.0.1:3000")]
    listen: SocketAddr,
    /// How many attempts a job has.
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
        Err(VarError::NotPresent) => TEST_SECRET.to_owned(),
        secret => secret.map_err(|why| format!("{SECRET}: {why}"))?,
    };
    let verifier = provider::STANDARD_WEBHOOKS.verifier(&secret);
    let verifier = verifier.map_err(|why| format!("{SECRET}: {why}"))?;
    let verify = VerifyLayer::new(verifier).body_limit(BODY_LIMIT);
    // One pool for deliveries, and one for jobs. Neither waits for the other.
    let deliveries = PgPoolOptions::new()
        .max_connections(10)
        .acquire_timeout(ACQUIRE)
        // Of a handler that is dropped, a connection may come back on which nothing comes any more.
        .after_release(|connection, _| {
            Box::pin(async move {
                let ended = timeout(ENDS, connection.execute("BEGIN; ROLLBACK")).await;
                Ok(matches!(ended, Ok(Ok(_)))) // otherwise the connection is closed
            })
        });
    let deliveries = deliveries.connect(&options.database_url).await?;
    let keys = PostgresAdapter::new(deliveries.clone());
    keys.migrate().await?;
    let pool = PgPoolOptions::new().max_connections(CONNECTIONS);
    let pool = pool.connect(&options.database_url).await?;
    let jobs = Jobs {
        deliveries: deliveries.clone(),
        schema: Schema::new(&options.jobs_schema),
        max_attempts: options.max_attempts,
    };
    let stop = CancellationToken::new();
    let worker = WorkerOptions::default()
        .pg_pool(pool.clone())
        .schema(jobs.schema.clone())
        .concurrency(2)
        // The worker is notified of new jobs. It polls for jobs whose pause is over.
        .poll_interval(Duration::from_millis(500))
        // Otherwise the job of a process that died would never run again.
        .heartbeat_interval(Duration::from_secs(2))
        .sweep_interval(Duration::from_secs(2))
        .sweep_threshold(Duration::from_secs(10))
        .recovery_delay(Duration::ZERO)
        .listen_os_shutdown_signals(false)
        .shutdown_signal(stop.clone().cancelled_owned())
        // A running job may end within this time. A longer job is cancelled, and runs again later.
        .shutdown_grace_period(Duration::from_secs(20))
        .define_job::<OnEvent>()
        .on(JobPermanentlyFail, |dead| async move {
            tracing::error!(job = dead.job.id(), error = dead.error, "a dead letter");
        })
        .init() // creates its schema
        .await?;

    let dedup = DedupLayer::transactional(provider::STANDARD_WEBHOOKS, keys.clone())
        .body_limit(BODY_LIMIT)
        .require_verified();
    let handle = dedup.handle();
    let app = Router::new()
        // The first layer of the tuple is outermost: an unsigned request uses up no id.
        .route("/webhooks", post(enqueue).layer((verify, dedup)))
        .route("/dead-letters", get(dead_letters))
        .with_state(jobs);

    let stop_signal = stop_signal()?;
    let listener = TcpListener::bind(options.listen)
        .await
        .map_err(|error| format!("cannot listen on {}: {error}", options.listen))?;
    let address = listener.local_addr()?;
    let mut worker = tokio::spawn(async move { worker.run().await });
    let server = axum::serve(listener, app).with_graceful_shutdown(stop.clone().cancelled_owned());
    let server = tokio::spawn(server.into_future());
    greet(address, &secret);

    tokio::select! {
        () = stop_signal => {}
        // Jobs are safe in the database but do not run: exit, so that the supervisor restarts us.
        ended = &mut worker => return Err(format!("the worker has ended: {ended:?}").into()),
    }
    tracing::info!("stopping");
    stop.cancel();
    // Unfinished jobs are in the database. The next process runs them.
    let ended = timeout(SHUTDOWN, async {
        let _ = server.await;
        handle.drain().await;
        let ended = worker.await;
        keys.close().await;
        deliveries.close().await;
        pool.close().await;
        ended
    });
    if !matches!(ended.await, Ok(Ok(Ok(())))) {
        tracing::warn!(
            deliveries = handle.running(),
            "exiting before all deliveries and jobs have ended"
        );
    }
    tracing::info!("stopped");
    Ok(())
}

/// The body of a delivery.
#[derive(Debug, Serialize, Deserialize)]
struct Event {
    /// How many attempts at the job fail.
    #[serde(default)]
    fail: i16,
    /// The duration of the job.
    #[serde(default)]
    work_ms: u64,
}

/// The job of an event, as stored in the database.
#[derive(Debug, Serialize, Deserialize)]
struct OnEvent {
    key: String,
    idempotency_key: String,
    event: Event,
}

impl TaskHandler for OnEvent {
    const IDENTIFIER: &'static str = "on_event";

    /// Runs at least once: again after a failure, and after the death of a process. Write to this
    /// database in a transaction, and pass `idempotency_key` to other services. It is the same on every
    /// attempt.
    async fn run(self, context: WorkerContext) -> impl IntoTaskHandlerResult {
        let (key, attempt) = (self.key, *context.job().attempts());
        tokio::time::sleep(Duration::from_millis(self.event.work_ms)).await;
        if attempt <= self.event.fail {
            tracing::warn!(key, attempt, "the job fails");
            return Err("the event demands a failure");
        }
        tracing::info!(key, attempt, idempotency_key = self.idempotency_key, "the job is done");
        Ok(())
    }
}

#[derive(Clone)]
struct Jobs {
    deliveries: PgPool,
    schema: Schema,
    max_attempts: i16,
}

/// The handler: enqueues the job in the transaction that completes the event. The 202 leaves after the COMMIT.
async fn enqueue(
    State(jobs): State<Jobs>,
    delivery: Delivery,
    Json(event): Json<Event>,
) -> Result<StatusCode, NotEnqueued> {
    let key = delivery.key();
    let key = format!("{}/{}", key.namespace(), key.id());
    let idempotency_key = delivery.idempotency_key(OnEvent::IDENTIFIER);
    let job = OnEvent { key: key.clone(), idempotency_key, event };
    let job = serde_json::to_value(job).map_err(|error| NotEnqueued::job(&error))?;
    // The job has the event's key in the queue. If the key is forgotten and the event delivered again,
    // the new job replaces one that still waits.
    let spec = JobSpecBuilder::new().max_attempts(jobs.max_attempts).job_key(key).build();
    let mut tx = delivery.begin(&jobs.deliveries).await?;
    add_job(&mut *tx, jobs.schema, OnEvent::IDENTIFIER, job, spec, false)
        .await
        .map_err(|error| NotEnqueued::job(&error))?; // `tx` is dropped, which rolls back
    tx.commit().await?; // the key and the job
    Ok(StatusCode::ACCEPTED)
}

/// Why there is no job: the sender delivers the event again.
enum NotEnqueued {
    Transaction(CommitError),
    /// Logged.
    Job,
}

impl NotEnqueued {
    fn job(error: &dyn Error) -> Self {
        tracing::error!(error = in_one_line(error), "the job could not be enqueued");
        Self::Job
    }
}

impl From<CommitError> for NotEnqueued {
    fn from(error: CommitError) -> Self {
        Self::Transaction(error)
    }
}

impl IntoResponse for NotEnqueued {
    fn into_response(self) -> Response {
        match self {
            Self::Transaction(error) => error.into_response(),
            Self::Job => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        }
    }
}

/// A job without attempts left. This runs it again:
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
    let rows = sqlx::query_as(sqlx::AssertSqlSafe(sql)).fetch_all(&jobs.deliveries).await;
    let rows: Vec<(i64, Option<String>, i16, Option<String>)> = rows.map_err(|error| {
        tracing::error!(error = in_one_line(&error), "the dead letters could not be read");
        StatusCode::INTERNAL_SERVER_ERROR
    })?;
    let letter = |(id, key, attempts, error)| DeadLetter { id, key, attempts, error };
    Ok(Json(rows.into_iter().map(letter).collect()))
}

/// Prints what to try. A closed stdout is no error.
fn greet(address: SocketAddr, secret: &str) {
    // Prints the name of the variable, or the public test secret; never a real secret.
    let secret = if secret == TEST_SECRET { TEST_SECRET } else { &format!("${SECRET}") };
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
