//! Compositions with plain services and tower layers.

use bytes::Bytes;
use http::Request;
use http_body_util::Full;
use tower::util::{BoxCloneService, BoxCloneSyncService};
use tower::{Layer, Service, ServiceBuilder, ServiceExt};

use super::{
    BODY, Handler, answer, dedup, delivers_once, duplicate, full, handled, own, send, soon,
};
use support::memory;

#[tokio::test]
async fn plain_and_boxed_services() {
    let handler = Handler::default();
    let service = dedup(&memory()).layer(handler.service());
    delivers_once::<_, Full<Bytes>, _>(service, &handler).await;

    let handler = Handler::default();
    let inner = BoxCloneSyncService::new(handler.service::<Full<Bytes>>());
    let service = BoxCloneSyncService::new(dedup(&memory()).layer(inner));
    delivers_once::<_, Full<Bytes>, _>(service, &handler).await;

    // A service that is not `Sync`.
    let handler = Handler::default();
    let inner = BoxCloneService::new(handler.service::<Full<Bytes>>());
    let service = BoxCloneService::new(dedup(&memory()).layer(inner));
    delivers_once::<_, Full<Bytes>, _>(service, &handler).await;
}

#[tokio::test]
async fn service_that_is_ready_is_the_one_that_is_called() {
    // One permit, and one service that is called again and again. A clone of it would be called
    // without `poll_ready`, and panic.
    let handler = Handler::default();
    let mut service = ServiceBuilder::new()
        .layer(dedup(&memory()).body_limit(BODY.len()))
        .concurrency_limit(1)
        .service(handler.service::<Full<Bytes>>());
    for (id, body, expected) in [
        ("evt_1", BODY, handled()),
        ("evt_1", BODY, duplicate()),
        // A request that does not reach the inner service returns its permit.
        ("evt_2", &[b'x'; BODY.len() + 1], own(413, "too-large")),
        ("", BODY, own(400, "invalid-key")),
        ("evt_3", BODY, handled()),
    ] {
        let ready = ServiceExt::<Request<Full<Bytes>>>::ready(&mut service);
        let response = soon(ready).await.unwrap().call(full(id, body));
        assert_eq!(answer(response.await.unwrap()).await, expected, "{id}");
    }
    assert_eq!(handler.bodies(), [BODY, BODY]);
}

#[tokio::test]
async fn a_body_of_one_buffer_is_not_copied() {
    let handler = Handler::default();
    let sent = Bytes::from(BODY.to_vec());
    let service = dedup(&memory()).layer(handler.service::<Full<Bytes>>());
    let request = full("evt_1", b"").map(|_| Full::new(sent.clone()));
    assert_eq!(send(&service, request).await, handled());
    assert_eq!(handler.bodies()[0].as_ptr(), sent.as_ptr());

    let app = handler.router().layer(dedup(&memory()));
    let request = full("evt_1", b"").map(|_| axum::body::Body::from(sent.clone()));
    assert_eq!(send(&app, request).await, handled());
    assert_eq!(handler.bodies()[1].as_ptr(), sent.as_ptr());
}
