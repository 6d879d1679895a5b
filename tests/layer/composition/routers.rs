//! Compositions with axum routers.

use std::sync::Arc;

use axum::Router;
use axum::extract::Request as AxumRequest;
use axum::middleware::{Next, from_fn};
use bytes::Bytes;
use http_body_util::Full;
use tower::{Layer, ServiceBuilder};
use tower_dedup::{DedupLayer, Verified, key};

use super::{BODY, Handler, dedup, delivers_once, duplicate, full, handled, send};
use support::memory;

async fn verify(mut request: AxumRequest, next: Next) -> axum::response::Response {
    request.extensions_mut().insert(Verified);
    next.run(request).await
}

async fn untouched(request: AxumRequest, next: Next) -> axum::response::Response {
    next.run(request).await
}

/// Where the layer stands, and a router of the handler with it.
type Place = (&'static str, fn(&Handler, DedupLayer) -> Router);

const PLACES: [Place; 9] = [
    ("a router", |handler, dedup| handler.router().layer(dedup)),
    ("its routes", |handler, dedup| handler.router().route_layer(dedup)),
    ("a method router", |handler, dedup| {
        let route = axum::routing::any_service(handler.service()).layer(dedup);
        Router::new().route("/hook", route)
    }),
    ("inside a nest", |handler, dedup| {
        Router::new().nest("/hook", Router::new().route("/", handler.route()).layer(dedup))
    }),
    ("around a nest", |handler, dedup| {
        Router::new().nest("/hook", Router::new().route("/", handler.route())).layer(dedup)
    }),
    ("a nested service", |handler, dedup| {
        Router::new().nest_service("/hook", dedup.layer(handler.service()))
    }),
    ("inside of `from_fn`", |handler, dedup| {
        handler.router().layer(dedup.require_verified()).layer(from_fn(verify))
    }),
    ("outside of `from_fn`", |handler, dedup| {
        handler.router().layer(from_fn(untouched)).layer(dedup)
    }),
    ("directly outside of `from_fn`", |handler, dedup| {
        let dedup = dedup.inner_body::<axum::body::Body>();
        handler.router().layer(ServiceBuilder::new().layer(dedup).layer(from_fn(untouched)))
    }),
];

#[tokio::test]
async fn layer_stands_wherever_a_router_takes_one() {
    for (place, router) in PLACES {
        println!("{place}");
        let handler = Handler::default();
        let app = router(&handler, dedup(&memory()));
        delivers_once::<_, axum::body::Body, _>(app, &handler).await;
    }
}

#[tokio::test]
async fn two_dedup_layers_nested_with_keys_of_their_own() {
    let (handler, store) = (Handler::default(), memory());
    let by_body = DedupLayer::on_arrival(key::body_digest().namespace("body"), Arc::clone(&store));
    let service = ServiceBuilder::new()
        .layer(dedup(&store))
        .layer(by_body)
        .service(handler.service::<Full<Bytes>>());
    assert_eq!(send(&service, full("evt_1", BODY)).await, handled());
    // Another id with the same bytes: the inner layer answers, and for the outer layer that is a
    // success.
    assert_eq!(send(&service, full("evt_2", BODY)).await, duplicate());
    assert_eq!(send(&service, full("evt_2", b"other")).await, duplicate());
    assert_eq!(send(&service, full("evt_3", b"other")).await, handled());
    assert_eq!(handler.bodies(), [BODY, &b"other"[..]]);
}
