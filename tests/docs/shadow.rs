//! The query of the guide for layers in shadow finds a wrong key in real log records.

use std::fs::File;
use std::process::Command;
use std::sync::Mutex;

use http::Request;
use tower::Layer;
use tower_dedup::adapter::MemoryAdapter;
use tower_dedup::{DedupKey, DedupLayer, LogIds, Mode, key};

use support::{Body, Handler, send};

/// The events are two orders, each created, paid, and paid again because of a retry, and a request without a body. The
/// query prints the number, the namespace and the id of each key of two events.
#[tokio::test]
async fn query_finds_a_key_of_two_events() {
    let page = include_str!("../../src/docs/production.md");
    let query = page.split("```sh\n").nth(1).and_then(|rest| rest.split("```").next());
    for (key, found) in [("/order", &["o1", "o2"][..]), ("/event", &[])] {
        let dir = tempfile::tempdir().unwrap();
        let log = Mutex::new(File::create(dir.path().join("app.log")).unwrap());
        let subscriber = tracing_subscriber::fmt().json().with_writer(log).finish();
        support::log::ask_all_subscribers();
        let _guard = tracing::subscriber::set_default(subscriber);
        let (keys, handler) = (key::json(key).namespace("acme"), Handler::default());
        let layer = DedupLayer::new(keys, MemoryAdapter::new()).log_ids(LogIds::Hashed);
        let service = layer.mode(Mode::Shadow).layer(handler.service());
        for body in [
            r#"{"event": "e1", "order": "o1", "is": "created"}"#,
            r#"{"event": "e2", "order": "o2", "is": "created"}"#,
            r#"{"event": "e3", "order": "o1", "is": "paid"}"#,
            r#"{"event": "e4", "order": "o2", "is": "paid"}"#,
            r#"{"event": "e4", "order": "o2", "is": "paid"}"#,
            "",
        ] {
            let request = Request::post("/").body(Body::from(body)).unwrap();
            assert_eq!(send(&service, request).await.status(), 200);
        }
        assert_eq!(handler.runs(), 6);
        let id = |id: &&str| DedupKey::new("acme", id).unwrap().log_id();
        let mut expected: Vec<_> = found.iter().map(|it| format!("2 acme {}", id(it))).collect();
        expected.sort();
        let ran = Command::new("sh").args(["-c", query.unwrap()]).current_dir(dir.path()).output();
        let ran = ran.unwrap();
        assert!(ran.status.success() && ran.stderr.is_empty(), "{ran:?}");
        let lines = String::from_utf8(ran.stdout).unwrap();
        let mut lines: Vec<_> = lines.lines().map(str::trim).collect();
        lines.sort_unstable();
        assert_eq!(lines, expected);
    }
}
