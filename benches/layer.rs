//! The cost of the layer: an axum route with the layer and the memory adapter, against the bare
//! route. Both run in process, with a body of 1 KiB.
//!
//! `cargo bench --bench layer` takes less than a minute. Each call is a new event, the expensive case,
//! because a duplicate never reaches the handler. The calls run inside a spawned task, as in a server.
//! No call waits, so none gets a task of its own; a delivery that waits pays about 0.4 µs more. The two
//! routes are measured in turn, in samples of 10,000 calls, so a change in machine speed affects both.
//! The figures are medians over the samples.
//!
//! Under `cargo test`, it makes 100 calls.

use std::hint::black_box;
use std::time::{Duration, Instant};

use axum::Router;
use criterion::Criterion;
use tokio::runtime::Runtime;
use tower::ServiceExt;

#[path = "measure/routes.rs"]
mod routes;
#[path = "shared/mod.rs"]
mod shared;

use routes::{bare, layered, request};
use shared::ratios::{heading, report};
use shared::rounds::median;
use shared::run::{Length, Run};

/// Returns the time of `calls` calls, one after another inside a spawned task.
fn time(runtime: &Runtime, app: &Router, first_id: u64, calls: u64) -> Duration {
    let app = app.clone();
    let run = async move {
        let start = Instant::now();
        for id in first_id..first_id + calls {
            // Both routes pay for building the request.
            let response = app.clone().oneshot(request(id)).await.unwrap();
            assert_eq!(response.status(), 200);
            black_box(response);
        }
        start.elapsed()
    };
    runtime.block_on(async { tokio::spawn(run).await.unwrap() })
}

fn main() {
    // Criterion parses its own options, and rejects unknown ones.
    let run = Run::from_args_beside_criterion();
    if !run.wants(&["layer_ns"]) {
        return;
    }
    let (calls, samples) = match run.length {
        Length::Full => (10_000_u32, 60),
        Length::Quick => (10_000, 20),
        Length::Test => (100, 1),
    };
    // One worker, because the workers of a busy server do not sleep. With a second, idle worker, the
    // figure would include the kernel's wake-ups.
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let (bare, layered) = (bare(), layered());
    let mut next_id = 0;
    let mut ids = |calls: u64| {
        next_id += calls;
        next_id - calls
    };

    // Each route alone, with criterion's statistics.
    let mut criterion = Criterion::default().configure_from_args().sample_size(20);
    let mut group = criterion.benchmark_group("layer_ns");
    for (name, app) in [("bare", &bare), ("layered", &layered)] {
        group.bench_function(name, |bencher| {
            bencher.iter_custom(|calls| time(&runtime, app, ids(calls), calls));
        });
    }
    group.finish();
    criterion.final_summary();

    // Both routes in turn, for the difference.
    let mut per_call = |app| {
        let time = time(&runtime, app, ids(calls.into()), calls.into());
        time.as_secs_f64() * 1e9 / f64::from(calls)
    };
    let both: Vec<[f64; 2]> = (0..samples).map(|_| [per_call(&bare), per_call(&layered)]).collect();
    let added: Vec<f64> = both.iter().map(|[bare, layered]| layered - bare).collect();
    let [bare, layered] = [0, 1].map(|side| median(both.iter().map(|sample| sample[side])));
    heading(&run, "what the layer adds to a call of an axum route, 1 KiB");
    report(&run, "layer_ns", &added, &format!("{layered:.0} ns over {bare:.0} ns"));
}
