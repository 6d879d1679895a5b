//! What the layer costs: an axum route with the layer and the memory adapter, over the same bare
//! route, in process, with a body of 1 KiB.
//!
//! `cargo bench --bench layer`, under a minute. Each call is a new event (the dear case: a
//! duplicate never reaches the handler), made from inside a spawned task, as a server makes it.
//! Nothing in it waits, so it gets no task of its own; a delivery that waits pays for one, some
//! 0.4 µs. The two are measured in turn, in samples of 10,000 calls, so that a machine whose speed
//! drifts slows both; the figures are medians over the samples.
//!
//! Under `cargo test` it makes a hundred calls.

use std::hint::black_box;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::routing::post;
use criterion::Criterion;
use http::{HeaderValue, Request};
use tokio::runtime::Runtime;
use tower::ServiceExt;
use tower_dedup::adapter::{AtCapacity, MemoryAdapter};
use tower_dedup::{DedupLayer, key};

#[path = "shared/mod.rs"]
mod shared;

use shared::ratios::{begin, tell};
use shared::rounds::median;
use shared::run::{Length, Run};

/// Bounds the table, so that it is the layer that is measured and not this machine's caches.
const KEYS: usize = 10_000;

fn routes() -> Router {
    Router::new().route("/hook", post(async |body: bytes::Bytes| body.len().to_string()))
}

/// With its state, as `axum::serve` runs it: without, a router wraps its layers around the handler
/// anew for every call.
fn bare() -> Router {
    routes().with_state(())
}

fn layered() -> Router {
    let adapter = MemoryAdapter::with_capacity(KEYS).at_capacity(AtCapacity::EvictOldest);
    let layer = DedupLayer::new(key::header("webhook-id").namespace("bench"), adapter);
    routes().layer(layer).with_state(())
}

/// The body is shared, as a server's is that came in one buffer: both routes get it for nothing.
static BODY: [u8; 1_024] = [b'x'; 1_024];

fn request(id: u64) -> Request<Body> {
    let mut request = Request::post("/hook").body(Body::from(&BODY[..])).unwrap();
    let id = HeaderValue::from_str(&format!("msg_{id:020}")).unwrap();
    request.headers_mut().insert("webhook-id", id);
    request
}

/// The time of `calls` calls, made one after the other inside a spawned task.
fn time(runtime: &Runtime, app: &Router, first_id: u64, calls: u64) -> Duration {
    let app = app.clone();
    let run = async move {
        let start = Instant::now();
        for id in first_id..first_id + calls {
            // Making the request is part of both.
            let response = app.clone().oneshot(request(id)).await.unwrap();
            assert_eq!(response.status(), 200);
            black_box(response);
        }
        start.elapsed()
    };
    runtime.block_on(async { tokio::spawn(run).await.unwrap() })
}

fn main() {
    // Criterion has options of its own, and says which it does not know.
    let run = Run::from_args_beside_criterion();
    if !run.wants(&["layer_ns"]) {
        return;
    }
    let (calls, samples) = match run.length {
        Length::Full => (10_000_u32, 60),
        Length::Quick => (10_000, 20),
        Length::Test => (100, 1),
    };
    // One worker: on a server that is worth measuring no worker sleeps. With an idle one beside it,
    // what is measured is the kernel waking it up.
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let (bare, layered) = (bare(), layered());
    let mut next_id = 0;
    let mut ids = |calls: u64| {
        next_id += calls;
        next_id - calls
    };

    // Each by itself, with criterion's statistics.
    let mut criterion = Criterion::default().configure_from_args().sample_size(20);
    let mut group = criterion.benchmark_group("layer_ns");
    for (name, app) in [("bare", &bare), ("layered", &layered)] {
        group.bench_function(name, |bencher| {
            bencher.iter_custom(|calls| time(&runtime, app, ids(calls), calls));
        });
    }
    group.finish();
    criterion.final_summary();

    // In turn, for the difference.
    let mut per_call = |app| {
        let time = time(&runtime, app, ids(calls.into()), calls.into());
        time.as_secs_f64() * 1e9 / f64::from(calls)
    };
    let both: Vec<[f64; 2]> = (0..samples).map(|_| [per_call(&bare), per_call(&layered)]).collect();
    let added: Vec<f64> = both.iter().map(|[bare, layered]| layered - bare).collect();
    let [bare, layered] = [0, 1].map(|side| median(both.iter().map(|sample| sample[side])));
    begin(&run, "what the layer adds to a call of an axum route, 1 KiB");
    tell(&run, "layer_ns", &added, &format!("{layered:.0} ns over {bare:.0} ns"));
}
