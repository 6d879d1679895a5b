//! Compositions with layers of tower-http.

use std::convert::Infallible;
use std::io::Write;

use bytes::Bytes;
use flate2::write::GzEncoder;
use http::{HeaderValue, Request, header};
use http_body_util::Full;
use tower::ServiceBuilder;
use tower_dedup::{DedupLayer, key};
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::compression::CompressionLayer;
use tower_http::decompression::RequestDecompressionLayer;
use tower_http::limit::RequestBodyLimitLayer;
use tower_http::trace::TraceLayer;

use super::{
    BODY, Handler, dedup, delivers_once, delivery, duplicate, full, handled, own, send, streaming,
};
use support::{memory, rows};

#[tokio::test]
async fn the_usual_stack_around_a_router_and_around_a_service() {
    macro_rules! stack {
        () => {
            ServiceBuilder::new()
                .layer(TraceLayer::new_for_http())
                .layer(CatchPanicLayer::new())
                .layer(RequestBodyLimitLayer::new(64 * 1024))
                .layer(RequestDecompressionLayer::new())
                .layer(dedup(&memory()))
                .layer(CompressionLayer::new())
        };
    }
    let handler = Handler::default();
    delivers_once::<_, axum::body::Body, _>(handler.router().layer(stack!()), &handler).await;
    let handler = Handler::default();
    delivers_once::<_, Full<Bytes>, _>(stack!().service(handler.service()), &handler).await;
}

fn gzip(bytes: &[u8], level: u32) -> Bytes {
    let mut encoder = GzEncoder::new(Vec::new(), flate2::Compression::new(level));
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap().into()
}

fn gzipped(id: &str, body: Bytes) -> Request<Full<Bytes>> {
    let mut request = delivery(id, b"");
    request.headers_mut().insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    *request.body_mut() = Full::new(body);
    request
}

#[tokio::test]
async fn request_decompression_outside() {
    let (handler, store) = (Handler::default(), memory());
    let by_body = key::header("x-id").or(key::body_digest()).namespace("acme");
    let by_body = DedupLayer::new(by_body, std::sync::Arc::clone(&store));
    let service = ServiceBuilder::new()
        .layer(RequestDecompressionLayer::new())
        .layer(by_body)
        .service(handler.service::<Full<Bytes>>());
    assert_eq!(send(&service, gzipped("evt_1", gzip(BODY, 9))).await, handled());
    assert_eq!(send(&service, gzipped("evt_1", gzip(BODY, 0))).await, duplicate());
    assert_eq!(send(&service, full("evt_1", BODY)).await, duplicate());
    assert_eq!(handler.bodies(), [BODY]);

    // A digest covers the bytes that the handler gets, however they were compressed.
    let no_id = |mut request: Request<Full<Bytes>>| {
        request.headers_mut().remove("x-id");
        request
    };
    assert_eq!(send(&service, no_id(gzipped("", gzip(BODY, 9)))).await, handled());
    assert_eq!(send(&service, no_id(gzipped("", gzip(BODY, 0)))).await, duplicate());

    // Half an upload claims nothing.
    let count = rows(&store).await;
    let half = gzip(BODY, 9).split_to(20);
    let broken = own(400, "broken-body");
    assert_eq!(send(&service, gzipped("evt_2", half)).await, broken);
    assert_eq!(rows(&store).await, count);
    assert_eq!(send(&service, gzipped("evt_2", gzip(BODY, 9))).await, handled());
}

#[tokio::test]
async fn a_body_over_the_limit_of_an_outer_layer_is_413_and_claims_nothing() {
    let (handler, store) = (Handler::default(), memory());
    let service = ServiceBuilder::new()
        .layer(RequestBodyLimitLayer::new(BODY.len()))
        .layer(dedup(&store))
        .service(handler.service::<Full<Bytes>>());
    const LONGER: &[u8] = &[b'x'; BODY.len() + 1];
    let stream = |body: &'static [u8]| {
        let chunks = body.chunks(3).map(|chunk| Ok::<_, Infallible>(Bytes::from_static(chunk)));
        let body = axum::body::Body::from_stream(futures_util::stream::iter(chunks));
        streaming("evt_1", b"").map(|_| body)
    };

    // The length is announced: the outer layer refuses the request without reading its body.
    let mut announced = streaming("evt_1", LONGER);
    announced.headers_mut().insert(header::CONTENT_LENGTH, HeaderValue::from(LONGER.len()));
    let refused = send(&service, announced).await;
    assert_eq!((refused.0, refused.1), (413, None));

    // Otherwise the limit is found while the body is read.
    let too_large = own(413, "too-large");
    assert_eq!(send(&service, stream(LONGER)).await, too_large);
    assert_eq!((handler.bodies().len(), rows(&store).await), (0, 0));

    // No id was used up, and a body at the limit fits.
    assert_eq!(send(&service, stream(BODY)).await, handled());
    assert_eq!(send(&service, stream(BODY)).await, duplicate());
    assert_eq!(handler.bodies(), [BODY]);
}
