//! The allocations of the layer: an axum route with the layer and the memory adapter, less those of the bare
//! route. Both are the routes of the bench `layer`.
//!
//! `cargo bench --bench allocations` takes a second. It is not a part of `layer`, because the counting
//! allocator takes time. Each call is a new event, with 1 KiB body, as in `layer`. The adapter is full, so
//! that it does not grow meanwhile.
//!
//! Under `cargo test`, it counts the same.

use std::hint::black_box;

use allocation_counter::measure;
use axum::Router;
use tokio::runtime::Runtime;
use tower::ServiceExt;

#[path = "measure/routes.rs"]
mod routes;
#[path = "shared/mod.rs"]
mod shared;

use routes::{bare, layered, request};
use shared::ratios::{heading, report};
use shared::run::Run;

const NAME: &str = "layer_allocations";
const WARM_UP: u64 = 20_000;
const CALLS: u32 = 1_000;

fn main() {
    let run = Run::from_args();
    if !run.wants(&[NAME]) {
        return;
    }
    let [layered, bare] = [layered(), bare()].map(|app| allocations(&app));
    heading(&run, "allocations that the layer adds to a call of an axum route, 1 KiB");
    report(&run, NAME, &[layered - bare], &format!("{layered:.2} less {bare:.2}"));
}

/// Returns the allocations of a call.
fn allocations(app: &Router) -> f64 {
    // It polls on this thread, whose allocations are counted.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.expect("a runtime");
    calls(&runtime, app, 0..WARM_UP);
    let counted = measure(|| calls(&runtime, app, WARM_UP..WARM_UP + u64::from(CALLS)));
    #[expect(clippy::cast_precision_loss, reason = "far fewer than 2⁵² allocations")]
    let all = counted.count_total as f64;
    all / f64::from(CALLS)
}

fn calls(runtime: &Runtime, app: &Router, ids: std::ops::Range<u64>) {
    let app = app.clone();
    runtime.block_on(async {
        let all = async move {
            for id in ids {
                let response = app.clone().oneshot(request(id)).await.expect("a response");
                assert_eq!(response.status(), 200);
                black_box(response);
            }
        };
        tokio::spawn(all).await.expect("calls that end");
    });
}
