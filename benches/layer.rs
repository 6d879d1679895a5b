//! The cost of the layer with the memory adapter: an axum route with it, the same route with `axum-idempotent` and its
//! store in memory, and the bare route. All run in process, with a body of 1 KiB.
//!
//! `cargo bench --bench layer` takes less than a minute. Each call is a new event, the expensive case,
//! because a duplicate never reaches the handler. The calls run inside a spawned task, as in a server.
//! No call waits, so none gets a task of its own; a delivery that waits pays about 0.4 µs more. The
//! routes are measured in turn, in samples of 10,000 calls, so a change in machine speed affects all. Each sample
//! begins with empty stores. The figures are medians over the samples.
//!
//! `axum-idempotent` does less: it stores the response after the handler, and claims nothing before. So concurrent
//! duplicates run.
//!
//! Under `cargo test`, it makes 100 calls.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::body::Body;
use axum::routing::post;
use axum_idempotent::{IdempotentLayer, IdempotentOptions};
use http::{HeaderValue, Request};
use ruts::store::moka::MokaStore;
use ruts::{CookieOptions, SessionLayer};
use tokio::runtime::Runtime;
use tower::ServiceExt;
use tower_cookies::CookieManagerLayer;
use tower_dedup::adapter::MemoryAdapter;
use tower_dedup::{DedupLayer, key};

#[path = "shared/mod.rs"]
mod shared;

use shared::ratios::report;
use shared::rounds::median;
use shared::run::{Length, Run};

const NAMES: [&str; 2] = ["layer_ns", "layer_over_axum_idempotent"];
const HEADER: &str = "webhook-id";
/// More than a sample has.
const KEYS: u32 = 20_000;

fn routes() -> Router {
    Router::new().route("/hook", post(async |body: bytes::Bytes| body.len().to_string()))
}

fn layered() -> Router {
    let adapter = MemoryAdapter::with_capacity(KEYS as usize);
    routes().layer(DedupLayer::new(key::header(HEADER).namespace("bench"), adapter))
}

fn idempotent() -> Router {
    let options = IdempotentOptions::default().use_idempotency_key_header(Some(HEADER), true);
    let session =
        SessionLayer::new(Arc::new(MokaStore::builder().max_capacity(KEYS.into()).build()));
    routes()
        .layer(IdempotentLayer::<MokaStore>::new(options.expire_after(86_400)))
        .layer(session.with_cookie_options(CookieOptions::build().name("session")))
        .layer(CookieManagerLayer::new())
}

/// A static body, so that no route pays for it.
static BODY: [u8; 1_024] = [b'x'; 1_024];

fn request(id: u32) -> Request<Body> {
    let mut request = Request::post("/hook").body(Body::from(&BODY[..])).unwrap();
    let event = HeaderValue::from_str(&format!("msg_{id:020}")).unwrap();
    request.headers_mut().insert(HEADER, event);
    // `axum-idempotent` stores responses for requests with a session only. The time of a call grows with the responses
    // of its session, so each event has its own.
    let session = HeaderValue::from_str(&format!("session={id:021}A")).unwrap();
    request.headers_mut().insert("cookie", session);
    request
}

/// Asserts that a router recognises a duplicate, and marks it by this header.
async fn check(app: Router, header: &str) {
    for is_duplicate in [false, true] {
        let response = app.clone().oneshot(request(0)).await.unwrap();
        assert_eq!(response.headers().contains_key(header), is_duplicate, "{header}");
    }
}

/// Returns the nanoseconds of a call, of `calls` calls one after another inside a spawned task.
fn time(runtime: &Runtime, app: Router, calls: u32) -> f64 {
    // With its state, as under `axum::serve`. A router without state applies its layers again on every call.
    let app: Router = app.with_state(());
    let run = async move {
        let start = Instant::now();
        for id in 0..calls {
            // Every route pays for building the request.
            let response = app.clone().oneshot(request(id)).await.unwrap();
            assert_eq!(response.status(), 200);
            black_box(response);
        }
        start.elapsed().as_secs_f64() * 1e9 / f64::from(calls)
    };
    runtime.block_on(async { tokio::spawn(run).await.unwrap() })
}

fn main() {
    let run = Run::from_args();
    if !run.wants(&NAMES) {
        return;
    }
    let (calls, samples) = match run.length {
        Length::Full => (10_000, 60),
        Length::Quick => (10_000, 20),
        Length::Test => (100, 1),
    };
    // One worker, because the workers of a busy server do not sleep. With a second, idle worker, the
    // figure would include the kernel's wake-ups.
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    runtime.block_on(check(layered(), "x-dedup-result"));
    runtime.block_on(check(idempotent(), "idempotency-replayed"));
    let sample = || [routes(), layered(), idempotent()].map(|app| time(&runtime, app, calls));
    if !run.is_test() {
        sample();
    }
    let all: Vec<[f64; 3]> = (0..samples).map(|_| sample()).collect();
    let added: Vec<_> = all.iter().map(|[bare, ours, _]| ours - bare).collect();
    let ratios: Vec<_> =
        all.iter().map(|[bare, ours, other]| (ours - bare) / (other - bare)).collect();
    let [bare, ours, other] = [0, 1, 2].map(|side| median(all.iter().map(|sample| sample[side])));
    report(&run, NAMES[0], &added, &format!("{ours:.0} ns less {bare:.0} ns"));
    let note = format!("{:.0} ns over {:.0} ns", ours - bare, other - bare);
    report(&run, NAMES[1], &ratios, &note);
}
