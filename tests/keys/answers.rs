//! Answers of the layer to requests without a key and without a body.

use std::sync::Arc;

use bytes::Bytes;
use http_body_util::Full;
use tower::Layer;
use tower_dedup::key;
use tower_dedup::{DedupLayer, OnMissingKey};

use crate::requests::with_body;
use crate::support::{Handler, answered, memory, rows, send};

/// Otherwise the second delivery without key and body would be a duplicate of the first.
#[tokio::test]
async fn body_digest_of_an_empty_body_is_a_missing_key() {
    let (store, handler) = (memory(), Handler::default());
    let by_header = DedupLayer::new(key::header("x-id").namespace("n"), Arc::clone(&store));
    let by_body = DedupLayer::new(key::body_digest().namespace("n"), Arc::clone(&store));
    for layer in [by_header.on_missing_key(OnMissingKey::BodyDigest), by_body.clone()] {
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
