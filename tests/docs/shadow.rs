//! The query of the guide for layers in shadow finds a wrong key in real log records.

use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};

use http::Request;
use http_body_util::Full;
use tower::Layer;
use tower_dedup::adapter::MemoryAdapter;
use tower_dedup::{DedupLayer, KeyExtractor, LogIds, Mode, key};

use crate::support::{Body, Handler, send};

#[derive(Clone, Default)]
struct File(Arc<Mutex<Vec<u8>>>);

impl Write for File {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Writes the log of a layer in shadow with this key to `app.log`. The events are two orders, each
/// created, paid, and paid again because of a retry, and a request without a body.
async fn write_log(dir: &Path, key: KeyExtractor) {
    let log = File::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt().json().with_writer(move || writer.clone()).finish();
    crate::support::log::ask_all_subscribers();
    let _guard = tracing::subscriber::set_default(subscriber);
    let handler = Handler::default();
    let layer =
        DedupLayer::new(key, MemoryAdapter::new()).mode(Mode::Shadow).log_ids(LogIds::Hashed);
    let service = layer.layer(handler.service());
    for body in [
        r#"{"event": "e1", "order": "o1", "is": "created"}"#,
        r#"{"event": "e2", "order": "o2", "is": "created"}"#,
        r#"{"event": "e3", "order": "o1", "is": "paid"}"#,
        r#"{"event": "e4", "order": "o2", "is": "paid"}"#,
        r#"{"event": "e4", "order": "o2", "is": "paid"}"#,
        "",
    ] {
        let request: Request<Body> = Request::post("/").body(Full::from(body)).unwrap();
        assert_eq!(send(&service, request).await.status(), 200);
    }
    assert_eq!(handler.runs(), 6);
    std::fs::write(dir.join("app.log"), &*log.0.lock().unwrap()).unwrap();
}

/// Returns the lines that the query prints: the number, the namespace and the id, in the order of the ids.
fn query(dir: &Path) -> Vec<String> {
    let page = include_str!("../../src/docs/production.md");
    let query = page.split("```sh\n").nth(1).and_then(|rest| rest.split("```").next());
    let query = query.expect("the query");
    let ran = Command::new("sh").args(["-c", query]).current_dir(dir).output().unwrap();
    assert!(ran.status.success() && ran.stderr.is_empty(), "{ran:?}");
    let lines = String::from_utf8(ran.stdout).unwrap();
    let mut lines: Vec<_> = lines.lines().map(|line| line.trim().to_owned()).collect();
    lines.sort();
    lines
}

#[tokio::test]
async fn query_finds_a_key_of_two_events() {
    for (key, found) in [("/order", &["o1", "o2"][..]), ("/event", &[])] {
        let dir = tempfile::tempdir().unwrap();
        write_log(dir.path(), key::json(key).namespace("acme")).await;
        let id = |id| tower_dedup::DedupKey::new("acme", id).unwrap().log_id();
        let mut expected: Vec<_> =
            found.iter().map(|order| format!("2 acme {}", id(order))).collect();
        expected.sort();
        assert_eq!(query(dir.path()), expected);
    }
}
