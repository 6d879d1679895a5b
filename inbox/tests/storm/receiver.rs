//! A receiver: the process that is killed. The parent writes its [`Setup`] into the environment.

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{Request, StatusCode};
use axum::routing::{MethodRouter, post};
use rand::RngExt;
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;
use tower::util::MapRequestLayer;
use tower_dedup::adapter::PostgresAdapter;
use tower_dedup::verify::{Refusal, VerifyLayer};
use tower_dedup::{BoxError, DedupLayer, Delivery, KeyExtractor, key};
use tower_dedup_inbox::{Inbox, Releases};

/// The environment variable with the setup of a receiver.
pub(crate) const SETUP: &str = "TOWER_DEDUP_STORM_RECEIVER";
/// The line that a receiver prints when it listens.
pub(crate) const LISTENS: &str = "the receiver listens";
/// The header with the time until which a signature is accepted, in milliseconds since 1970.
pub(crate) const SIGNED_UNTIL: &str = "x-signature-until";
/// The ids of events that always fail begin so.
pub(crate) const POISON: &str = "poison";
/// The ids of the newer version's keys, where their form has changed, begin so.
pub(crate) const REKEYED: &str = "v2.";

const SERVICE: &str = "storm";
const TURN: Duration = Duration::from_secs(3);
const LEASE: Duration = Duration::from_secs(3);
const DELAYS: [Duration; 15] = [Duration::from_millis(300); 15];
const ANSWER_WITHIN: Duration = Duration::from_millis(250);

#[derive(Debug, Clone)]
pub(crate) struct Setup {
    pub(crate) port: u16,
    pub(crate) is_transactional: bool,
    /// The newer version of the application, which differs in its routes.
    pub(crate) is_newer: bool,
    /// Of the keys and the effects.
    pub(crate) keys: String,
    /// The URL of the inbox's database, or its file.
    pub(crate) table: String,
}

impl fmt::Display for Setup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { port, is_transactional, is_newer, keys, table } = self;
        write!(f, "{port}\n{is_transactional}\n{is_newer}\n{keys}\n{table}")
    }
}

impl Setup {
    fn parse(text: &str) -> Self {
        let mut lines = text.lines();
        let mut next = || lines.next().expect("a line").to_owned();
        let (port, is_transactional) = (next().parse().unwrap(), next() == "true");
        Self { port, is_transactional, is_newer: next() == "true", keys: next(), table: next() }
    }

    pub(crate) fn inbox(&self) -> Inbox {
        let inbox = if self.table.starts_with("postgres") {
            let pool = PgPoolOptions::new().max_connections(1).connect_lazy(&self.table);
            Inbox::postgres(pool.expect("a URL"), SERVICE)
        } else {
            Inbox::sqlite(&self.table, SERVICE)
        };
        inbox.delays(DELAYS).turn(TURN).answer_within(ANSWER_WITHIN)
    }
}

pub(crate) fn run(setup: &str) {
    let setup = Setup::parse(setup);
    // Ends with its parent, which may be killed too.
    std::thread::spawn(|| {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        std::process::exit(0);
    });
    std::panic::set_hook(Box::new(|panic| {
        if panic.payload_as_str() != Some(ON_PURPOSE) {
            eprintln!("{panic}");
        }
    }));
    if std::env::var_os("RUST_LOG").is_some() {
        tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    }
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime").block_on(serve(setup));
}

async fn serve(setup: Setup) {
    let pool = PgPoolOptions::new().max_connections(12).acquire_timeout(Duration::from_secs(2));
    let pool = pool.connect_lazy(&setup.keys).expect("a URL");
    let store = PostgresAdapter::new(pool.clone());
    let inbox = setup.inbox();
    let routes = if setup.is_transactional {
        routes(&setup, &inbox, |keys| DedupLayer::transactional(keys, store.clone()))
    } else {
        routes(&setup, &inbox, |keys| DedupLayer::new(keys, store.clone()))
    };
    let app = routes.with_state(App { pool, is_transactional: setup.is_transactional });
    let listener = loop {
        // A killed receiver may still have the port.
        match tokio::net::TcpListener::bind(("127.0.0.1", setup.port)).await {
            Ok(listener) => break listener,
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    };
    println!("\n{LISTENS}");
    let (stop, stopped) = tokio::sync::watch::channel(());
    let until_stopped = || {
        let mut stopped = stopped.clone();
        async move { drop(stopped.changed().await) }
    };
    let running = tokio::spawn(inbox.run(app.clone(), until_stopped()));
    tokio::spawn(async move {
        let terminate = tokio::signal::unix::SignalKind::terminate();
        tokio::signal::unix::signal(terminate).expect("a signal").recv().await;
        stop.send_replace(());
    });
    let serve = axum::serve(listener, app).with_graceful_shutdown(until_stopped());
    serve.await.expect("a server that runs");
    running.await.expect("a loop that ends");
    inbox.drain().await;
    std::process::exit(0);
}

fn id(namespace: &str) -> KeyExtractor {
    key::header("webhook-id").namespace(namespace)
}

fn routes<L: Releases>(
    setup: &Setup,
    inbox: &Inbox,
    dedup: impl Fn(KeyExtractor) -> DedupLayer<L>,
) -> Router<App> {
    let around = |keys| inbox.around(dedup(keys).lease(LEASE));
    let hook = |keys| -> MethodRouter<App> { post(on_event).layer(around(keys)) };
    let signed = around(id("signed")).verified_by(VerifyLayer::from_fn(is_fresh).named("storm"));
    let routes = Router::new()
        .route("/hook", hook(id("hook")))
        .route("/list", hook(key::each("/e", key::json("/id")).namespace("list")))
        .route("/signed", post(on_event).layer(signed));
    if setup.is_newer {
        // It loses the mark of a redelivery.
        let lossy = MapRequestLayer::new(|request: Request<Body>| {
            let (head, body) = request.into_parts();
            let mut rebuilt = Request::new(body);
            *rebuilt.method_mut() = head.method;
            *rebuilt.uri_mut() = head.uri;
            *rebuilt.headers_mut() = head.headers;
            rebuilt
        });
        routes
            .route("/lossy", hook(id("lossy")).layer(lossy))
            .route("/renamed", hook(id("renamed-2")))
            .route("/rekeyed", hook(key::json("/id").namespace("rekeyed")))
    } else {
        routes
            .route("/lossy", hook(id("lossy")))
            .route("/renamed", hook(id("renamed")))
            .route("/rekeyed", hook(id("rekeyed")))
            // The newer version has no such route, and a layer of this namespace.
            .route("/left_out", hook(id("hook")))
    }
}

/// Accepts a signature for a time, as senders' schemes do: a redelivery comes too late.
fn is_fresh(head: &http::request::Parts, _: &[u8], now: SystemTime) -> Result<(), Refusal> {
    let until = head.headers.get(SIGNED_UNTIL).and_then(|until| until.to_str().ok()?.parse().ok());
    let now = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
    if until.is_some_and(|until: u128| now <= until) { Ok(()) } else { Err(Refusal::OutOfTime) }
}

#[derive(Clone)]
struct App {
    pool: PgPool,
    is_transactional: bool,
}

const INSERT: &str = "INSERT INTO effects (id) SELECT unnest($1::text[])";
const ON_PURPOSE: &str = "on purpose";

/// Writes the effects of its events. One run of five fails; some take longer than a sender or a turn waits.
async fn on_event(State(app): State<App>, event: Delivery) -> Result<StatusCode, StatusCode> {
    let failure = |_: BoxError| StatusCode::INTERNAL_SERVER_ERROR;
    let id = |key: &str| key.strip_prefix(REKEYED).unwrap_or(key).to_owned();
    let ids: Vec<String> = event.keys().map(|key| id(key.id())).collect();
    if rand::rng().random_ratio(1, 20) {
        let pause = if rand::rng().random_ratio(1, 20) { 4_000 } else { 600 };
        tokio::time::sleep(Duration::from_millis(pause)).await;
    }
    let draw = rand::rng().random_range(0..100);
    match draw {
        _ if ids[0].starts_with(POISON) => return Err(StatusCode::INTERNAL_SERVER_ERROR),
        0..7 => return Err(StatusCode::INTERNAL_SERVER_ERROR),
        7..13 => panic!("{ON_PURPOSE}"),
        13 => return Err(StatusCode::UNPROCESSABLE_ENTITY),
        14..17 if app.is_transactional => return Ok(StatusCode::OK),
        14..20 if !app.is_transactional => return Err(StatusCode::BAD_GATEWAY),
        _ => {}
    }
    if !app.is_transactional {
        let written = sqlx::query(INSERT).bind(ids).execute(&app.pool).await;
        return written.map(|_| StatusCode::OK).map_err(|error| failure(error.into()));
    }
    let mut transaction = event.begin(&app.pool).await.map_err(|error| failure(error.into()))?;
    let written = sqlx::query(INSERT).bind(ids).execute(&mut *transaction).await;
    written.map_err(|error| failure(error.into()))?;
    if (17..20).contains(&draw) {
        // Rolled back.
        return Ok(StatusCode::OK);
    }
    transaction.commit().await.map_err(|error| failure(error.into()))?;
    Ok(StatusCode::OK)
}
