//! Compositions with axum routers.

use std::sync::Arc;

use axum::Router;
use axum::extract::Request as AxumRequest;
use axum::middleware::{Next, from_fn};
use bytes::Bytes;
use http_body_util::Full;
use tower::{Layer, ServiceBuilder};
use tower_dedup::adapter::inspect::MaintenanceAdapter;
use tower_dedup::{DedupLayer, Verified, key};

use super::{BODY, Handler, dedup, delivers_once, duplicate, full, handled, send, store};

#[tokio::test]
async fn router_layer() {
    let handler = Handler::default();
    let app = handler.router().layer(dedup(&store()));
    delivers_once::<_, axum::body::Body, _>(app, &handler).await;
}

#[tokio::test]
async fn router_route_layer() {
    let handler = Handler::default();
    let app = handler.router().route_layer(dedup(&store()));
    delivers_once::<_, axum::body::Body, _>(app, &handler).await;
}

#[tokio::test]
async fn method_router_layer() {
    let handler = Handler::default();
    let route = axum::routing::any_service(handler.service()).layer(dedup(&store()));
    let app = Router::<()>::new().route("/hook", route);
    delivers_once::<_, axum::body::Body, _>(app, &handler).await;
}

#[tokio::test]
async fn router_nested_inside_and_outside() {
    let handler = Handler::default();
    let inside = Router::new().route("/", handler.route()).layer(dedup(&store()));
    delivers_once::<_, axum::body::Body, _>(Router::new().nest("/hook", inside), &handler).await;

    let handler = Handler::default();
    let inside = Router::new().route("/", handler.route());
    let app = Router::new().nest("/hook", inside).layer(dedup(&store()));
    delivers_once::<_, axum::body::Body, _>(app, &handler).await;
}

#[tokio::test]
async fn nested_service() {
    let handler = Handler::default();
    let service = dedup(&store()).layer(handler.service());
    let app = Router::<()>::new().nest_service("/hook", service);
    delivers_once::<_, axum::body::Body, _>(app, &handler).await;
}

#[tokio::test]
async fn from_fn_outside() {
    async fn verify(mut request: AxumRequest, next: Next) -> axum::response::Response {
        request.extensions_mut().insert(Verified);
        next.run(request).await
    }
    let handler = Handler::default();
    let app = handler.router().layer(dedup(&store()).require_verified()).layer(from_fn(verify));
    delivers_once::<_, axum::body::Body, _>(app, &handler).await;
}

async fn untouched(request: AxumRequest, next: Next) -> axum::response::Response {
    next.run(request).await
}

#[tokio::test]
async fn from_fn_inside_behind_a_router() {
    let handler = Handler::default();
    let app = handler.router().layer(from_fn(untouched)).layer(dedup(&store()));
    delivers_once::<_, axum::body::Body, _>(app, &handler).await;
}

#[tokio::test]
async fn from_fn_directly_inside_takes_the_body_of_axum() {
    let handler = Handler::default();
    let inside = ServiceBuilder::new()
        .layer(dedup(&store()).inner_body::<axum::body::Body>())
        .layer(from_fn(untouched));
    let app = handler.router().layer(inside);
    delivers_once::<_, axum::body::Body, _>(app, &handler).await;
}

#[tokio::test]
async fn two_dedup_layers_nested_with_keys_of_their_own() {
    let (handler, store) = (Handler::default(), store());
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

#[tokio::test]
async fn a_store_chosen_at_run_time() {
    let handler = Handler::default();
    let store: Arc<dyn MaintenanceAdapter> =
        tower_dedup::adapter::connect("memory:").await.unwrap();
    let dedup = DedupLayer::new(key::header("x-id").namespace("acme"), store);
    delivers_once::<_, axum::body::Body, _>(handler.router().layer(dedup), &handler).await;
}
