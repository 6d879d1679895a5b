//! An axum route with the layer and the memory adapter, and the same route without the layer.

use axum::Router;
use axum::body::Body;
use axum::routing::post;
use http::{HeaderValue, Request};
use tower_dedup::adapter::{AtCapacity, MemoryAdapter};
use tower_dedup::{DedupLayer, key};

/// The capacity of the adapter. It is small, so that the figure does not measure CPU cache misses.
const KEYS: usize = 10_000;

fn routes() -> Router {
    Router::new().route("/hook", post(async |body: bytes::Bytes| body.len().to_string()))
}

/// Has its state, as under `axum::serve`. A router without state applies its layers again on every
/// call.
pub(crate) fn bare() -> Router {
    routes().with_state(())
}

pub(crate) fn layered() -> Router {
    let adapter = MemoryAdapter::with_capacity(KEYS).at_capacity(AtCapacity::EvictOldest);
    let layer = DedupLayer::new(key::header("webhook-id").namespace("bench"), adapter);
    routes().layer(layer).with_state(())
}

/// A static body, so that neither route pays for it.
static BODY: [u8; 1_024] = [b'x'; 1_024];

pub(crate) fn request(id: u64) -> Request<Body> {
    let mut request = Request::post("/hook").body(Body::from(&BODY[..])).unwrap();
    let id = HeaderValue::from_str(&format!("msg_{id:020}")).unwrap();
    request.headers_mut().insert("webhook-id", id);
    request
}
