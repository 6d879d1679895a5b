//! Answers of the layer to requests without a key and without a body.

use bytes::Bytes;
use http::Request;
use http_body_util::Full;
use tower::Layer;
use tower_dedup::DedupLayer;
use tower_dedup::{key, provider};

use crate::support::{Handler, answered, memory, send};

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
