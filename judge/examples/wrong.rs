//! Receivers that are wrong by design, as people write them by hand, and one that is right: for the tests of the judge.
//!
//! ```text
//! cargo run -p tower-dedup-judge --example wrong -- insert-before --listen 127.0.0.1:3000 --database events.db
//! ```
//!
//! Each design is one handler below, without `tower-dedup`. A delivery is a `POST /webhook` as of Standard Webhooks. Its
//! secret is in `WEBHOOK_SECRET`. The effect of an event is a row. `GET /effects` counts the rows of each id.
//!
//! As with the example `receiver`, `?delay_ms=500` makes an event slow before its effect, `?delay_after_ms=500` after
//! it, and `?fail_runs=1` makes its first run fail.

use std::collections::{HashMap, HashSet};
use std::error::Error;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::body::Bytes;
use axum::extract::{FromRequest, Query, Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get, post};
use axum::{Json, Router};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use clap::{Parser, ValueEnum};
use hmac::{Hmac, KeyInit, Mac};
use serde::Deserialize;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions};
use sqlx::{Executor, Sqlite, SqlitePool, Transaction};
use tokio::net::TcpListener;
use tokio::time::timeout;

type Answer = Result<StatusCode, StatusCode>;

const OK: Answer = Ok(StatusCode::OK);

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Design {
    Right,
    NoDeduplication,
    CheckThenInsert,
    InsertBefore,
    InsertAfter,
    AnswerFirst,
    Conflict,
    OkInFlight,
    Memory,
    BodyDigest,
    NoSignature,
    SignatureAfter,
    AnyTime,
    KeyBeforeBody,
    DefaultId,
    TruncatedId,
    FoldedId,
    HighestId,
    FixedBuffer,
    RateLimit,
    UnverifiedLater,
    QueuedTwice,
}

impl Design {
    fn route(self) -> MethodRouter<App> {
        match self {
            Self::Right => post(right),
            Self::NoDeduplication => post(no_deduplication),
            Self::CheckThenInsert => post(check_then_insert),
            Self::InsertBefore => post(insert_before),
            Self::InsertAfter => post(insert_after),
            Self::AnswerFirst => post(answer_first),
            Self::Conflict => post(conflict),
            Self::OkInFlight => post(ok_in_flight),
            Self::Memory => post(memory),
            Self::BodyDigest => post(body_digest),
            Self::NoSignature => post(no_signature),
            Self::SignatureAfter => post(signature_after),
            Self::AnyTime => post(any_time),
            Self::KeyBeforeBody => post(key_before_body),
            Self::DefaultId => post(default_id),
            Self::TruncatedId => post(truncated_id),
            Self::FoldedId => post(folded_id),
            Self::HighestId => post(highest_id),
            Self::FixedBuffer => post(fixed_buffer),
            Self::RateLimit => post(rate_limit),
            Self::UnverifiedLater => post(unverified_later),
            Self::QueuedTwice => post(queued_twice),
        }
    }
}

/// The right one: a unique key, inserted in the transaction of the effect. Each other design lacks a part of it.
async fn right(State(app): State<App>, delivery: Delivery) -> Answer {
    delivery.verify(&app)?;
    let id = delivery.id()?;
    delivery.work(&app).await?;
    app.once(&id, &id).await?;
    delivery.finish().await
}

/// The sender delivers each event once, does it not?
async fn no_deduplication(State(app): State<App>, delivery: Delivery) -> Answer {
    delivery.verify(&app)?;
    let id = delivery.id()?;
    delivery.work(&app).await?;
    app.effect(&app.database, &id).await?;
    delivery.finish().await
}

/// Key and effect commit together, but the decision is older than the transaction.
async fn check_then_insert(State(app): State<App>, delivery: Delivery) -> Answer {
    delivery.verify(&app)?;
    let id = delivery.id()?;
    if app.has(&id).await? {
        return OK;
    }
    // A task, so that the work does not end where the client hangs up: its retry comes in the middle.
    let run = tokio::spawn(async move {
        delivery.work(&app).await?;
        let mut transaction = app.begin().await?;
        app.insert(&mut *transaction, &id).await?;
        app.effect(&mut *transaction, &id).await?;
        transaction.commit().await.map_err(failed)?;
        delivery.finish().await
    });
    run.await.unwrap_or(Err(StatusCode::INTERNAL_SERVER_ERROR))
}

/// The key is there before the work, and stays if the work does not end.
async fn insert_before(State(app): State<App>, delivery: Delivery) -> Answer {
    delivery.verify(&app)?;
    let id = delivery.id()?;
    if !app.insert(&app.database, &id).await? {
        return OK;
    }
    delivery.work(&app).await?;
    app.effect(&app.database, &id).await?;
    delivery.finish().await
}

/// The effect is there before the key: the charge, a slow receipt, then the key.
async fn insert_after(State(app): State<App>, delivery: Delivery) -> Answer {
    delivery.verify(&app)?;
    let id = delivery.id()?;
    if app.has(&id).await? {
        return OK;
    }
    delivery.work(&app).await?;
    app.effect(&app.database, &id).await?;
    delivery.finish().await?;
    app.insert(&app.database, &id).await?;
    OK
}

/// "Answer quickly, process later", in a task that dies with the process.
async fn answer_first(State(app): State<App>, delivery: Delivery) -> Answer {
    delivery.verify(&app)?;
    let id = delivery.id()?;
    tokio::spawn(async move {
        delivery.work(&app).await?;
        app.once(&id, &id).await?;
        delivery.finish().await
    });
    OK
}

/// A duplicate is a conflict, so the sender delivers it again until it gives up.
async fn conflict(State(app): State<App>, delivery: Delivery) -> Answer {
    delivery.verify(&app)?;
    let id = delivery.id()?;
    delivery.work(&app).await?;
    if !app.once(&id, &id).await? {
        return Err(StatusCode::CONFLICT);
    }
    delivery.finish().await
}

/// The second delivery is told that all is well while the first may still fail.
async fn ok_in_flight(State(app): State<App>, delivery: Delivery) -> Answer {
    delivery.verify(&app)?;
    let id = delivery.id()?;
    if !app.claim(&id) {
        return OK;
    }
    // A task, so that the work does not end where the client hangs up.
    let run = tokio::spawn(async move {
        let done = async {
            delivery.work(&app).await?;
            app.once(&id, &id).await?;
            delivery.finish().await
        };
        let done = done.await;
        app.release(&id);
        done
    });
    run.await.unwrap_or(Err(StatusCode::INTERNAL_SERVER_ERROR))
}

/// All is right until the process ends.
async fn memory(State(app): State<App>, delivery: Delivery) -> Answer {
    delivery.verify(&app)?;
    let id = delivery.id()?;
    if !app.claim(&id) {
        return Err(StatusCode::SERVICE_UNAVAILABLE);
    }
    let run = tokio::spawn(async move {
        let done = async {
            // After the claim: until then, another delivery may be done.
            if app.done.lock().unwrap().contains(&id) {
                return OK;
            }
            delivery.work(&app).await?;
            app.effect(&app.database, &id).await?;
            app.done.lock().unwrap().insert(id.clone());
            delivery.finish().await
        };
        let done = done.await;
        app.release(&id);
        done
    });
    run.await.unwrap_or(Err(StatusCode::INTERNAL_SERVER_ERROR))
}

/// The key is a digest of the parsed body: two events with equal data are one, and an event whose body changes is two.
async fn body_digest(State(app): State<App>, delivery: Delivery) -> Answer {
    delivery.verify(&app)?;
    let id = delivery.id()?;
    let body: Value =
        serde_json::from_slice(&delivery.body).map_err(|_| StatusCode::BAD_REQUEST)?;
    let key = BASE64_STANDARD.encode(Sha256::digest(body.to_string()));
    delivery.work(&app).await?;
    app.once(&key, &id).await?;
    delivery.finish().await
}

/// Whoever knows the URL is the sender.
async fn no_signature(State(app): State<App>, delivery: Delivery) -> Answer {
    let id = delivery.id()?;
    delivery.work(&app).await?;
    app.once(&id, &id).await?;
    delivery.finish().await
}

/// The signature of an old delivery is valid for ever.
async fn any_time(State(app): State<App>, delivery: Delivery) -> Answer {
    if !delivery.is_signed(&app) {
        return Err(StatusCode::UNAUTHORIZED);
    }
    let id = delivery.id()?;
    delivery.work(&app).await?;
    app.once(&id, &id).await?;
    delivery.finish().await
}

/// A forged delivery uses up the id of the genuine one: the table has each delivery that came.
async fn signature_after(State(app): State<App>, delivery: Delivery) -> Answer {
    let id = delivery.id()?;
    let verified = delivery.verify(&app);
    if verified.is_ok() {
        delivery.work(&app).await?;
    }
    let mut transaction = app.begin().await?;
    if app.insert(&mut *transaction, &id).await? && verified.is_ok() {
        app.effect(&mut *transaction, &id).await?;
    }
    transaction.commit().await.map_err(failed)?;
    verified?;
    delivery.finish().await
}

/// A broken request uses up the id of the whole one, as in a middleware that reads the headers only.
async fn key_before_body(State(app): State<App>, request: Request) -> Answer {
    let id = id_of(request.headers()).ok_or(StatusCode::BAD_REQUEST)?;
    if !app.insert(&app.database, &id).await? {
        return OK;
    }
    let read = timeout(Duration::from_secs(1), Delivery::from_request(request, &app)).await;
    let delivery = read.map_err(|_| StatusCode::REQUEST_TIMEOUT)?;
    let delivery = delivery.map_err(|refused| refused.status())?;
    delivery.verify(&app)?;
    delivery.work(&app).await?;
    app.effect(&app.database, &id).await?;
    delivery.finish().await
}

/// An id that is missing, or is no ASCII, is the empty one: all these events are one.
async fn default_id(State(app): State<App>, delivery: Delivery) -> Answer {
    delivery.verify(&app)?;
    let id = delivery.id().unwrap_or_default();
    delivery.work(&app).await?;
    app.once(&id, &id).await?;
    delivery.finish().await
}

/// As a column `VARCHAR(255)` of a database that cuts what is longer.
async fn truncated_id(State(app): State<App>, delivery: Delivery) -> Answer {
    delivery.verify(&app)?;
    let id = delivery.id()?;
    delivery.work(&app).await?;
    app.once(&id[..id.len().min(255)], &id).await?;
    delivery.finish().await
}

/// As a column with a collation that ignores case, which MySQL has by default.
async fn folded_id(State(app): State<App>, delivery: Delivery) -> Answer {
    delivery.verify(&app)?;
    let id = delivery.id()?;
    delivery.work(&app).await?;
    app.once(&id.to_lowercase(), &id).await?;
    delivery.finish().await
}

/// Ids grow, so one that is lower than the highest is old: an event that comes late is lost.
async fn highest_id(State(app): State<App>, delivery: Delivery) -> Answer {
    delivery.verify(&app)?;
    let id = delivery.id()?;
    let highest = sqlx::query_scalar("SELECT max(id) FROM processed WHERE length(id) = length($1)");
    let highest: Option<String> =
        highest.bind(&id).fetch_one(&app.database).await.map_err(failed)?;
    if highest.is_some_and(|highest| id < highest) {
        return OK;
    }
    delivery.work(&app).await?;
    app.once(&id, &id).await?;
    delivery.finish().await
}

/// An id that is longer than its buffer ends the process.
async fn fixed_buffer(State(app): State<App>, delivery: Delivery) -> Answer {
    delivery.verify(&app)?;
    let id = delivery.id()?;
    if id.len() > 4096 {
        std::process::abort();
    }
    delivery.work(&app).await?;
    app.once(&id, &id).await?;
    delivery.finish().await
}

/// Whoever knows the URL is the sender, but the first delivery of each event comes too early.
async fn rate_limit(State(app): State<App>, delivery: Delivery) -> Answer {
    let id = delivery.id()?;
    if app.claim(&id) {
        return Err(StatusCode::TOO_MANY_REQUESTS);
    }
    delivery.work(&app).await?;
    app.once(&id, &id).await?;
    delivery.finish().await
}

/// Right, but asks for a repetition of what it does not verify.
async fn unverified_later(State(app): State<App>, delivery: Delivery) -> Answer {
    delivery.verify(&app).map_err(|_| StatusCode::SERVICE_UNAVAILABLE)?;
    let id = delivery.id()?;
    delivery.work(&app).await?;
    app.once(&id, &id).await?;
    delivery.finish().await
}

/// Nobody acknowledges the job, so the queue hands it out again after its visibility timeout.
async fn queued_twice(State(app): State<App>, delivery: Delivery) -> Answer {
    delivery.verify(&app)?;
    let id = delivery.id()?;
    delivery.work(&app).await?;
    if app.once(&id, &id).await? {
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_secs(2)).await;
            app.effect(&app.database, &id).await
        });
    }
    delivery.finish().await
}

/// What all designs share.
#[derive(Debug, Clone)]
struct App {
    database: SqlitePool,
    secret: Arc<[u8]>,
    /// The events that run in this process.
    running: Arc<Mutex<HashSet<String>>>,
    /// The events that this process has handled, as [`memory`] knows them.
    done: Arc<Mutex<HashSet<String>>>,
    /// How often the work of each id has begun.
    runs: Arc<Mutex<HashMap<String, u32>>>,
}

impl App {
    async fn open(database: &Path, secret: &str) -> Result<Self, Box<dyn Error>> {
        let options = SqliteConnectOptions::new().filename(database).create_if_missing(true);
        let options = options.journal_mode(SqliteJournalMode::Wal);
        let database = SqlitePoolOptions::new().max_connections(8).connect_with(options).await?;
        database.execute("CREATE TABLE IF NOT EXISTS processed (id TEXT PRIMARY KEY)").await?;
        database.execute("CREATE TABLE IF NOT EXISTS effects (id TEXT NOT NULL)").await?;
        let secret = BASE64_STANDARD.decode(secret.strip_prefix("whsec_").unwrap_or(secret))?;
        let (running, done, runs) = Default::default();
        Ok(Self { database, secret: secret.into(), running, done, runs })
    }

    async fn begin(&self) -> Result<Transaction<'static, Sqlite>, StatusCode> {
        self.database.begin_with("BEGIN IMMEDIATE").await.map_err(failed)
    }

    /// Returns whether the table has this key.
    async fn has(&self, key: &str) -> Result<bool, StatusCode> {
        let row = sqlx::query("SELECT 1 FROM processed WHERE id = $1").bind(key);
        let row = row.fetch_optional(&self.database).await.map_err(failed)?;
        Ok(row.is_some())
    }

    /// Inserts a key. Returns `false` if the table has it.
    async fn insert(
        &self,
        connection: impl Executor<'_, Database = Sqlite>,
        key: &str,
    ) -> Result<bool, StatusCode> {
        let insert = sqlx::query("INSERT INTO processed VALUES ($1) ON CONFLICT DO NOTHING");
        let done = insert.bind(key).execute(connection).await.map_err(failed)?;
        Ok(done.rows_affected() == 1)
    }

    async fn effect(
        &self,
        connection: impl Executor<'_, Database = Sqlite>,
        id: &str,
    ) -> Result<(), StatusCode> {
        let insert = sqlx::query("INSERT INTO effects VALUES ($1)").bind(id);
        insert.execute(connection).await.map(drop).map_err(failed)
    }

    /// Inserts the key, and if it is new the effect, in one transaction.
    async fn once(&self, key: &str, id: &str) -> Result<bool, StatusCode> {
        let mut transaction = self.begin().await?;
        let is_new = self.insert(&mut *transaction, key).await?;
        if is_new {
            self.effect(&mut *transaction, id).await?;
        }
        transaction.commit().await.map_err(failed)?;
        Ok(is_new)
    }

    /// Returns `false` if the event runs in this process.
    fn claim(&self, id: &str) -> bool {
        self.running.lock().unwrap().insert(id.to_owned())
    }

    fn release(&self, id: &str) {
        self.running.lock().unwrap().remove(id);
    }
}

#[expect(clippy::needless_pass_by_value, reason = "for `map_err`")]
fn failed(error: sqlx::Error) -> StatusCode {
    eprintln!("{error}");
    StatusCode::INTERNAL_SERVER_ERROR
}

/// A request of Standard Webhooks.
#[derive(Debug)]
struct Delivery {
    headers: HeaderMap,
    body: Bytes,
    misbehaviour: Misbehaviour,
}

#[derive(Debug, Deserialize)]
struct Misbehaviour {
    #[serde(default)]
    delay_ms: u64,
    #[serde(default)]
    delay_after_ms: u64,
    #[serde(default)]
    fail_runs: u32,
}

impl<S: Send + Sync> FromRequest<S> for Delivery {
    type Rejection = Response;

    async fn from_request(request: Request, state: &S) -> Result<Self, Response> {
        let query = Query::try_from_uri(request.uri());
        let Query(misbehaviour) = query.map_err(IntoResponse::into_response)?;
        let headers = request.headers().clone();
        let body = Bytes::from_request(request, state).await;
        let body = body.map_err(IntoResponse::into_response)?;
        Ok(Self { headers, body, misbehaviour })
    }
}

/// Returns the id, if there is one in ASCII.
fn id_of(headers: &HeaderMap) -> Option<String> {
    let id = headers.get("webhook-id")?.to_str().ok()?;
    (!id.is_empty()).then(|| id.to_owned())
}

impl Delivery {
    fn id(&self) -> Result<String, StatusCode> {
        id_of(&self.headers).ok_or(StatusCode::BAD_REQUEST)
    }

    fn header(&self, name: &str) -> &[u8] {
        self.headers.get(name).map_or(&[], HeaderValue::as_bytes)
    }

    fn verify(&self, app: &App) -> Result<(), StatusCode> {
        let is_genuine = self.is_recent() && self.is_signed(app);
        if is_genuine { Ok(()) } else { Err(StatusCode::UNAUTHORIZED) }
    }

    fn is_recent(&self) -> bool {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs();
        let time = str::from_utf8(self.header("webhook-timestamp"));
        time.ok().and_then(|time| time.parse().ok()).is_some_and(|time| now.abs_diff(time) <= 300)
    }

    fn is_signed(&self, app: &App) -> bool {
        let mut mac = Hmac::<Sha256>::new_from_slice(&app.secret).expect("any length");
        let [id, time] = ["webhook-id", "webhook-timestamp"].map(|name| self.header(name));
        mac.update(&[id, b".", time, b".", &self.body].concat());
        let signatures = str::from_utf8(self.header("webhook-signature")).unwrap_or_default();
        signatures.split(' ').any(|signature| {
            let signature = signature.strip_prefix("v1,").unwrap_or_default();
            let signature = BASE64_STANDARD.decode(signature).unwrap_or_default();
            mac.clone().verify_slice(&signature).is_ok()
        })
    }

    /// Works for a moment, in which another delivery may come. Fails if the request says so.
    async fn work(&self, app: &App) -> Result<(), StatusCode> {
        let run = {
            let mut runs = app.runs.lock().unwrap();
            let run = runs.entry(self.id().unwrap_or_default()).or_default();
            *run += 1;
            *run
        };
        tokio::time::sleep(Duration::from_millis(self.misbehaviour.delay_ms.max(20))).await;
        let fails = run <= self.misbehaviour.fail_runs;
        if fails { Err(StatusCode::INTERNAL_SERVER_ERROR) } else { Ok(()) }
    }

    /// What is left to do after the effect.
    async fn finish(&self) -> Answer {
        tokio::time::sleep(Duration::from_millis(self.misbehaviour.delay_after_ms)).await;
        OK
    }
}

async fn effects(State(app): State<App>) -> Result<Json<Vec<Value>>, StatusCode> {
    let count = sqlx::query_as("SELECT id, count(*) FROM effects GROUP BY id ORDER BY id");
    let rows: Vec<(String, i64)> = count.fetch_all(&app.database).await.map_err(failed)?;
    Ok(Json(rows.into_iter().map(|(id, count)| json!({ "id": id, "count": count })).collect()))
}

#[derive(Debug, Parser)]
struct Options {
    design: Design,
    /// The address to listen on.
    #[arg(long, default_value = "127.0.0.1:3000")]
    listen: SocketAddr,
    /// The SQLite file of keys and effects.
    #[arg(long, default_value = "wrong.db")]
    database: PathBuf,
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::parse();
    let app = App::open(&options.database, &std::env::var("WEBHOOK_SECRET")?).await?;
    let router = Router::new().route("/webhook", options.design.route());
    let router = router.route("/effects", get(effects)).with_state(app);
    let listener = TcpListener::bind(options.listen).await?;
    println!("listening on http://{}", listener.local_addr()?);
    Ok(axum::serve(listener, router).await?)
}
