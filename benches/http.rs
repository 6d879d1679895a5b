//! Over HTTP: the lease ledger on Postgres over a handler that looks after itself.
//!
//! `cargo bench --bench http`, a minute and a half, or a quarter with `--quick`. Both servers are
//! processes of their own on loopback, alike but for what makes them do an event once:
//!
//! 1. Ours is an axum route in the layer, over a [`PostgresAdapter`]: a claim before the handler and
//!    a completion after it.
//! 2. The baseline's handler does what textbooks have, `INSERT … ON CONFLICT DO NOTHING`, on a pool
//!    of ten. That is less: an event whose handler fails is lost.
//!
//! This process sends 1 KiB bodies with unique ids over 64 connections, each kept alive, and waits
//! for every answer. Client, servers and PostgreSQL share the machine's cores.
//!
//! Under `cargo test` it is the memory adapter on both sides, over loopback in one process.

use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::routing::post;
use axum::serve::ListenerExt;
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use sqlx::{Executor, PgPool};
use tokio::net::{TcpListener, TcpStream};
use tower_dedup::adapter::{DedupAdapter, MemoryAdapter, PostgresAdapter};
use tower_dedup::{DedupLayer, key};

#[path = "shared/mod.rs"]
mod shared;

use shared::calls::{NAMESPACE, fresh_id};
use shared::database::{Database, FEW, fill};
use shared::goals::grouped;
use shared::one_by_one;
use shared::ratios::{begin, tell};
use shared::rounds::{Caller, Load, in_turn, load, median};
use shared::run::{Run, runtime};

const NAME: &str = "http_pg_64";
const CONNECTIONS: usize = 64;
const TABLE: &str = "CREATE TABLE seen \
    (id text PRIMARY KEY, received_at timestamptz NOT NULL DEFAULT now())";
const INSERT: &str = "INSERT INTO seen (id) VALUES ($1) ON CONFLICT DO NOTHING";
/// Says to a process of this bench which server it is.
const SERVER: &str = "TOWER_DEDUP_BENCH_SERVER";

fn main() {
    if let Ok(which) = std::env::var(SERVER) {
        let url = std::env::args().nth(1).expect("the URL of a database");
        return runtime().block_on(be_server(&which, &url));
    }
    let run = Run::from_args();
    if !run.wants(&[NAME]) {
        return;
    }
    let rounds = if run.is_test() {
        runtime().block_on(test(&run))
    } else {
        let database = Database::start();
        runtime().block_on(measure(&run, &database))
    };
    begin(&run, "requests over HTTP, over a handler with INSERT … ON CONFLICT DO NOTHING");
    let ratios: Vec<f64> =
        rounds.iter().map(|[ours, theirs]| ours.per_second / theirs.per_second).collect();
    let [ours, theirs] =
        [0, 1].map(|side| grouped(median(rounds.iter().map(|round| round[side].per_second))));
    tell(&run, NAME, &ratios, &format!("{ours} over {theirs} a second"));
}

async fn measure(run: &Run, database: &Database) -> Vec<[Load; 2]> {
    let (schema, _) = database.adapter().await;
    let beside = one_by_one::pool(&schema.url()).await;
    beside.execute(TABLE).await.expect("a table");
    let (layered, textbook) =
        (Server::start("layered", &schema.url()), Server::start("textbook", &schema.url()));
    let fill_seen = format!(
        "INSERT INTO seen (id) SELECT 'old_' || lpad(number::text, 24, '0') \
         FROM generate_series(1, {FEW}) AS number"
    );
    in_turn(run, async |which| {
        if which == 0 {
            fill(&beside, FEW).await;
            load(connected(layered.address, CONNECTIONS).await, run.time()).await
        } else {
            for statement in ["TRUNCATE seen", &fill_seen, "VACUUM ANALYZE seen"] {
                beside.execute(sqlx::AssertSqlSafe(statement)).await.expect("rows");
            }
            load(connected(textbook.address, CONNECTIONS).await, run.time()).await
        }
    })
    .await
}

async fn test(run: &Run) -> Vec<[Load; 2]> {
    let adapter = Arc::new(MemoryAdapter::with_capacity(100_000));
    let mut addresses = Vec::new();
    for _ in 0..2 {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        addresses.push(listener.local_addr().expect("an address"));
        tokio::spawn(serve(listener, layered(Arc::clone(&adapter))));
    }
    in_turn(run, async |which| load(connected(addresses[which], 2).await, run.time()).await).await
}

// The servers

/// A server in a process of its own, which ends with this value, or with this process.
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
        let address = line.trim().parse().expect("the address that the server has");
        Self { process, address }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.process.stdin.take());
        let _ = self.process.wait();
    }
}

async fn be_server(which: &str, url: &str) {
    // The pipe breaks when the bench ends, however that ends.
    std::thread::spawn(|| {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(0);
    });
    let app = match which {
        "layered" => layered(PostgresAdapter::connect(url).await.expect("PostgreSQL")),
        "textbook" => textbook(one_by_one::pool(url).await),
        other => panic!("there is no server `{other}`"),
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    println!("{}", listener.local_addr().expect("an address"));
    serve(listener, app).await;
}

async fn serve(listener: TcpListener, app: Router) {
    let listener = listener.tap_io(|stream| stream.set_nodelay(true).expect("a connection"));
    axum::serve(listener, app).await.expect("a server that goes on");
}

/// What both handlers do with an event.
fn handle(body: &Bytes) -> String {
    body.len().to_string()
}

fn layered<A: DedupAdapter>(adapter: A) -> Router {
    let layer = DedupLayer::new(key::header("webhook-id").namespace(NAMESPACE), adapter);
    Router::new().route("/hook", post(async |body: Bytes| handle(&body))).layer(layer)
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

/// A connection that is kept alive.
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

impl Caller for Connection {
    async fn call(&mut self) {
        static BODY: [u8; 1_024] = [b'x'; 1_024];
        let id = HeaderValue::from_str(&fresh_id()).expect("an id");
        let request = Request::post("/hook").header("host", "localhost").header("webhook-id", id);
        let request = request.body(Full::new(Bytes::from_static(&BODY))).expect("a request");
        let response = self.0.send_request(request).await.expect("an answer");
        assert_eq!(response.status(), StatusCode::OK);
        let answer = response.into_body().collect().await.expect("a body").to_bytes();
        // The handler has run: a duplicate's answer is empty.
        assert_eq!(answer, "1024");
    }
}
