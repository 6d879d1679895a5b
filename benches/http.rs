//! The lease ledger on Postgres, over HTTP, against a handler that deduplicates by hand.
//!
//! `cargo bench --bench http` takes three minutes, or 25 s with `--quick`. The servers are separate processes
//! on loopback. They differ only in how they deduplicate:
//!
//! 1. Ours is an axum route in the layer, over a [`PostgresAdapter`]: a claim before the handler and
//!    a completion after it.
//! 2. The baseline's handler runs `INSERT … ON CONFLICT DO NOTHING` on a pool of ten connections. It
//!    guarantees less: an event whose handler fails is lost.
//! 3. The bare server does not deduplicate, and has no database.
//!
//! This process sends 1 KiB bodies with unique ids over 64 keep-alive connections, and waits for
//! every response. Client, servers and PostgreSQL share the machine's cores.
//!
//! `pg_concurrent_duplicate_ms` has two servers like ours, whose handler sleeps for 5 ms. This process sends
//! an event to one server, and a duplicate to the other when the handler has begun. No other delivery runs.
//!
//! Under `cargo test`, all servers have the memory adapter, over loopback in one process.

use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::State;
use axum::routing::{get, post};
use axum::serve::ListenerExt;
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use sqlx::{Executor, PgPool};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tower_dedup::adapter::contract::DedupAdapter;
use tower_dedup::adapter::{MemoryAdapter, PostgresAdapter};
use tower_dedup::{DedupLayer, key};

#[path = "shared/mod.rs"]
mod shared;

use shared::calls::{NAMESPACE, fresh_id};
use shared::database::{Database, FEW, fill};
use shared::goals::grouped;
use shared::one_by_one;
use shared::ratios::{heading, report};
use shared::rounds::{Caller, Load, in_turn, load, median};
use shared::run::{Run, runtime};

const NAMES: [&str; 2] = ["http_pg_64", "http_pg_64_of_bare"];
const CONCURRENT: &str = "pg_concurrent_duplicate_ms";
const CONNECTIONS: usize = 64;
/// How long a handler sleeps that a duplicate waits for.
const HANDLER_TIME: Duration = Duration::from_millis(5);
const TABLE: &str = "CREATE TABLE seen \
    (id text PRIMARY KEY, received_at timestamptz NOT NULL DEFAULT now())";
const INSERT: &str = "INSERT INTO seen (id) VALUES ($1) ON CONFLICT DO NOTHING";
/// Names the server that a child process of this bench runs.
const SERVER: &str = "TOWER_DEDUP_BENCH_SERVER";

fn main() {
    if let Ok(which) = std::env::var(SERVER) {
        let url = std::env::args().nth(1).expect("the URL of a database");
        return runtime().block_on(run_server(&which, &url));
    }
    let run = Run::from_args();
    if !run.wants(&NAMES) && !run.wants(&[CONCURRENT]) {
        return;
    }
    if run.is_test() {
        return runtime().block_on(test(&run));
    }
    let database = Database::start();
    runtime().block_on(async {
        if run.wants(&NAMES) {
            report_rates(&run, &rates(&run, &database).await);
        }
        if run.wants(&[CONCURRENT]) {
            let (schema, _) = database.adapter().await;
            let servers = [0, 1].map(|_| Server::start("slow", &schema.url()));
            concurrent(&run, servers.each_ref().map(|server| server.address)).await;
        }
    });
}

fn report_rates(run: &Run, rounds: &[[Load; 3]]) {
    heading(run, "requests over HTTP, over a handler with INSERT … ON CONFLICT DO NOTHING");
    let side = |side: usize| rounds.iter().map(move |round| round[side].per_second);
    let [ours, baseline, bare] = [0, 1, 2].map(|which| grouped(median(side(which))));
    let ratios = |over: usize| -> Vec<f64> {
        side(0).zip(side(over)).map(|(ours, baseline)| ours / baseline).collect()
    };
    report(run, NAMES[0], &ratios(1), &format!("{ours} over {baseline} a second"));
    report(run, NAMES[1], &ratios(2), &format!("{ours} over {bare} a second"));
}

async fn rates(run: &Run, database: &Database) -> Vec<[Load; 3]> {
    let (schema, _) = database.adapter().await;
    let pool = one_by_one::pool(&schema.url()).await;
    pool.execute(TABLE).await.expect("a table");
    let [layered, textbook, bare] =
        ["layered", "textbook", "bare"].map(|which| Server::start(which, &schema.url()));
    let fill_seen = format!(
        "INSERT INTO seen (id) SELECT 'old_' || lpad(number::text, 24, '0') \
         FROM generate_series(1, {FEW}) AS number"
    );
    in_turn(run, async |which| {
        let server = match which {
            0 => {
                fill(&pool, FEW).await;
                &layered
            }
            1 => {
                for statement in ["TRUNCATE seen", &fill_seen, "VACUUM ANALYZE seen"] {
                    pool.execute(sqlx::AssertSqlSafe(statement)).await.expect("rows");
                }
                &textbook
            }
            _ => &bare,
        };
        load(connected(server.address, CONNECTIONS).await, run.time()).await
    })
    .await
}

/// Reports the response time of duplicates that reach one server while the other runs the handler.
async fn concurrent(run: &Run, servers: [SocketAddr; 2]) {
    let mut medians = Vec::new();
    let mut count = 0;
    // One round more, as a warm-up.
    for round in 0..=run.rounds() {
        let mut times = Vec::new();
        let until = Instant::now() + run.time();
        let [mut first, mut signal] = exactly(connected(servers[0], 2).await);
        let [mut second] = exactly(connected(servers[1], 1).await);
        while times.is_empty() || Instant::now() < until {
            let id = fresh_id();
            let duplicate = async {
                signal.wait_for_handler().await;
                let start = Instant::now();
                assert_eq!(second.deliver(&id).await, "", "no handler runs for a duplicate");
                start.elapsed()
            };
            let (handled, time) = tokio::join!(first.deliver(&id), duplicate);
            assert_eq!(handled, "1024");
            times.push(time.as_secs_f64() * 1e3);
        }
        if round > 0 {
            count += times.len();
            medians.push(median(times));
        }
    }
    heading(run, "a duplicate at another process, while a handler of 5 ms runs");
    report(run, CONCURRENT, &medians, &format!("{count} duplicates"));
}

fn exactly<const N: usize>(connections: Vec<Connection>) -> [Connection; N] {
    connections.try_into().unwrap_or_else(|_| panic!("{N} connections"))
}

async fn test(run: &Run) {
    let adapter = Arc::new(MemoryAdapter::with_capacity(100_000));
    let ours = serve_here(deduplicated(routes(), Arc::clone(&adapter))).await;
    let addresses = [ours, ours, serve_here(routes()).await];
    let rounds =
        in_turn(run, async |which| load(connected(addresses[which], 2).await, run.time()).await);
    report_rates(run, &rounds.await);
    let slow = [slow(Arc::clone(&adapter)), slow(adapter)];
    let [one, two] = slow.map(serve_here);
    concurrent(run, [one.await, two.await]).await;
}

/// Starts a server in this process.
async fn serve_here(app: Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    tokio::spawn(serve(listener, app));
    address
}

// The servers

/// A server in a child process. It ends when this value is dropped, or when this process ends.
struct Server {
    process: Child,
    address: SocketAddr,
}

impl Server {
    fn start(which: &str, url: &str) -> Self {
        let this = std::env::current_exe().expect("the path of this bench");
        let mut command = Command::new(this);
        command.env(SERVER, which).arg(url).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().expect("a process of this bench");
        let mut line = String::new();
        BufReader::new(process.stdout.take().expect("a pipe"))
            .read_line(&mut line)
            .expect("a line");
        let address = line.trim().parse().expect("the address of the server");
        Self { process, address }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.process.stdin.take());
        let _ = self.process.wait();
    }
}

async fn run_server(which: &str, url: &str) {
    // The pipe closes when the bench ends, even if the bench is killed.
    std::thread::spawn(|| {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(0);
    });
    let app = match which {
        "layered" => {
            deduplicated(routes(), PostgresAdapter::connect(url).await.expect("PostgreSQL"))
        }
        "textbook" => textbook(one_by_one::pool(url).await),
        "bare" => routes(),
        "slow" => slow(PostgresAdapter::connect(url).await.expect("PostgreSQL")),
        other => panic!("unknown server `{other}`"),
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    println!("{}", listener.local_addr().expect("an address"));
    serve(listener, app).await;
}

async fn serve(listener: TcpListener, app: Router) {
    let listener = listener.tap_io(|stream| stream.set_nodelay(true).expect("a connection"));
    axum::serve(listener, app).await.expect("a server that runs");
}

/// The effect of an event, the same in both handlers.
fn handle(body: &Bytes) -> String {
    body.len().to_string()
}

/// The bare server.
fn routes() -> Router {
    Router::new().route("/hook", post(async |body: Bytes| handle(&body)))
}

fn deduplicated<A: DedupAdapter>(routes: Router, adapter: A) -> Router {
    routes.layer(DedupLayer::new(key::header("webhook-id").namespace(NAMESPACE), adapter))
}

/// A server whose handler takes time. `/begun` responds when a handler has begun: once for each handler.
fn slow<A: DedupAdapter>(adapter: A) -> Router {
    let begun = Arc::new(Notify::new());
    let notify = Arc::clone(&begun);
    let handler = async move |body: Bytes| {
        notify.notify_one();
        tokio::time::sleep(HANDLER_TIME).await;
        handle(&body)
    };
    let hook = deduplicated(Router::new().route("/hook", post(handler)), adapter);
    hook.route("/begun", get(async move || begun.notified().await))
}

fn textbook(pool: PgPool) -> Router {
    Router::new().route("/hook", post(on_event)).with_state(pool)
}

async fn on_event(
    State(pool): State<PgPool>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<String, StatusCode> {
    let id = headers.get("webhook-id").and_then(|id| id.to_str().ok());
    let id = id.ok_or(StatusCode::BAD_REQUEST)?;
    let inserted = sqlx::query(INSERT).bind(id).execute(&pool).await;
    let inserted = inserted.map_err(|_| StatusCode::SERVICE_UNAVAILABLE)?;
    if inserted.rows_affected() == 0 {
        return Ok(String::new());
    }
    Ok(handle(&body))
}

// The client

/// A keep-alive connection.
struct Connection(SendRequest<Full<Bytes>>);

async fn connected(address: SocketAddr, count: usize) -> Vec<Connection> {
    let mut connections = Vec::new();
    for _ in 0..count {
        let stream = TcpStream::connect(address).await.expect("the server");
        stream.set_nodelay(true).expect("a connection");
        let (sender, connection) = handshake(TokioIo::new(stream)).await.expect("HTTP");
        tokio::spawn(connection);
        connections.push(Connection(sender));
    }
    connections
}

impl Connection {
    /// Delivers an event, and returns the body of the response.
    async fn deliver(&mut self, id: &str) -> Bytes {
        static BODY: [u8; 1_024] = [b'x'; 1_024];
        let id = HeaderValue::from_str(id).expect("an id");
        let request = Request::post("/hook").header("webhook-id", id);
        self.send(request, Bytes::from_static(&BODY)).await
    }

    async fn wait_for_handler(&mut self) {
        self.send(Request::get("/begun"), Bytes::new()).await;
    }

    async fn send(&mut self, request: http::request::Builder, body: Bytes) -> Bytes {
        let request = request.header("host", "localhost").body(Full::new(body));
        // The last response may be read before its connection takes the next request.
        self.0.ready().await.expect("a connection");
        let response = self.0.send_request(request.expect("a request")).await.expect("a response");
        assert_eq!(response.status(), StatusCode::OK);
        response.into_body().collect().await.expect("a body").to_bytes()
    }
}

impl Caller for Connection {
    async fn call(&mut self) {
        // Only the handler sends this body. The body of a duplicate's answer is empty.
        assert_eq!(self.deliver(&fresh_id()).await, "1024");
    }
}
