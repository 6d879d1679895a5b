//! How often a delivery allocates memory.

use axum::Router;
use axum::body::Body;
use axum::routing::post;
use futures_util::FutureExt;
use http::Request;
use tower::ServiceExt;
use tower_dedup::DedupLayer;
use tower_dedup::adapter::MemoryAdapter;

use support::by_header;

const CALLS: usize = 1_000;

fn routes() -> Router {
    Router::new().route("/hook", post(async |body: bytes::Bytes| body.len().to_string()))
}

/// Returns the allocations of one call of `app`, each with the id of `event`.
fn allocations(app: &Router, event: impl Fn(usize) -> usize) -> f64 {
    let counted = allocation_counter::measure(|| {
        for n in 0..CALLS {
            let request = Request::post("/hook").header("webhook-id", event(n).to_string());
            let request = request.body(Body::from("payload")).unwrap();
            let response = app.clone().oneshot(request).now_or_never().expect("nothing waits");
            assert_eq!(response.unwrap().status(), 200);
        }
    });
    counted.count_total as f64 / CALLS as f64
}

/// Eight are this crate's: the text of the key, the terms of its calls, two boxes of the delivery, the `Delivery`, its box
/// in the extensions of the request, and a future for each of two calls to the store. The others are axum's boxes around
/// the layer's future and bodies, and a larger map of the extensions.
#[tokio::test]
async fn layer_adds_13_allocations_to_a_new_event_at_most() {
    // A table that grows allocates now and then.
    let adapter = MemoryAdapter::with_capacity(4 * CALLS);
    let layered = routes().layer(DedupLayer::new(by_header(), adapter)).with_state(());
    let bare = routes().with_state(());
    for n in 0..2 * CALLS {
        let request = Request::post("/hook").header("webhook-id", (n + CALLS).to_string());
        let request = request.body(Body::from("payload")).unwrap();
        // The first delivery starts the task that renews leases, and yields to it.
        assert_eq!(layered.clone().oneshot(request).await.unwrap().status(), 200);
    }
    let bare_calls = allocations(&bare, |n| n + 4 * CALLS);
    let added = allocations(&layered, |n| n + 4 * CALLS) - bare_calls;
    assert!(added < 13.1, "a new event: {added}");
    let added = allocations(&layered, |_| 4 * CALLS + CALLS / 2) - bare_calls;
    assert!(added < 9.1, "a duplicate: {added}");
}
