//! Answers of the layer to requests without a key and without a body.

use std::sync::Arc;

use bytes::Bytes;
use http::Request;
use http_body_util::Full;
use tower::Layer;
use tower_dedup::{DedupLayer, OnMissingKey};
use tower_dedup::{key, provider};

use crate::requests::with_body;
use crate::support::{Handler, answered, memory, rows, send};

/// Otherwise the second delivery without key and body would be a duplicate of the first.
#[tokio::test]
async fn body_digest_of_an_empty_body_is_a_missing_key() {
    let (store, handler) = (memory(), Handler::default());
    let or_body = key::header("x-id").or(key::body_digest()).namespace("n");
    let or_body = DedupLayer::new(or_body, Arc::clone(&store));
    let by_body = DedupLayer::new(key::body_digest().namespace("n"), Arc::clone(&store));
    for layer in [or_body, by_body.clone()] {
        let service = layer.layer(handler.service());
        let answer = send(&service, with_body(Full::<Bytes>::default())).await;
        assert_eq!(answered(&answer), (400, Some("invalid-key")));
    }
    assert_eq!(rows(&store).await, 0);
    let passes = by_body.on_missing_key(OnMissingKey::PassThrough).layer(handler.service());
    for runs in 1..3 {
        let answer = send(&passes, with_body(Full::<Bytes>::default())).await;
        assert_eq!((answered(&answer), handler.runs()), ((200, None), runs));
    }
    assert!(handler.deliveries().is_empty());
}

/// The content identities of a list are those of its events, so the digest of the whole body would let handled events
/// run again. The headers that decide are not signed.
#[tokio::test]
async fn list_without_its_header_is_400_under_content_identities() {
    const CE: &str = "application/cloudevents-batch+json";
    let each = key::each("/events", key::header("x-page").and(key::json("/id"))).namespace("n");
    let events = r#"{"events":[{"id":1}]}"#;
    let batch = r#"[{"source":"s","id":"1"}]"#;
    for (extractor, header, value, body) in [
        (each, "x-page", "1", events),
        (provider::CLOUDEVENTS.extractor(), "content-type", CE, batch),
    ] {
        let handler = Handler::default();
        let layer = DedupLayer::new(extractor.content_identity(), memory());
        let service = layer.layer(handler.service());
        let request = || Request::post("/").body(Full::<Bytes>::from(body)).unwrap();
        let mut complete = request();
        complete.headers_mut().insert(header, value.parse().unwrap());
        assert_eq!(answered(&send(&service, complete).await), (200, None), "{body}");
        let answer = send(&service, request()).await;
        assert_eq!(answered(&answer), (400, Some("invalid-key")), "{body}");
        assert_eq!(handler.runs(), 1);
    }
}
