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

/// Returns the lines that the query prints: the number, the namespace, and the id or the payload.
fn query(dir: &Path, fields: &str) -> Vec<[String; 3]> {
    let page = include_str!("../../src/docs/production.md");
    let query = page.split("```sh\n").nth(1).and_then(|rest| rest.split("```").next());
    let query = query.expect("the query").replace(r"\1 \2 \3", fields);
    let ran = Command::new("sh").args(["-c", &query]).current_dir(dir).output().unwrap();
    assert!(ran.status.success() && ran.stderr.is_empty(), "{ran:?}");
    let lines = String::from_utf8(ran.stdout).unwrap();
    let words = |line: &str| {
        let mut words = line.split_whitespace().map(str::to_owned);
        std::array::from_fn(|_| words.next().expect("three words"))
    };
    lines.lines().map(words).collect()
}

#[tokio::test]
async fn query_finds_a_key_of_two_events_and_a_retry_under_another_key() {
    let number = std::sync::atomic::AtomicUsize::new(0);
    let fresh = key::from_fn(move |request| {
        let number = number.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        Ok((!request.body().is_empty()).then(|| number.to_string()))
    });
    // How many lines there are by id, and by payload.
    for (key, of_ids, of_payloads) in
        [(key::json("/order"), 2, 0), (fresh, 0, 1), (key::json("/event"), 0, 0)]
    {
        let dir = tempfile::tempdir().unwrap();
        write_log(dir.path(), key.namespace("acme")).await;
        let ids = ["o1", "o2"].map(|id| tower_dedup::DedupKey::new("acme", id).unwrap().log_id());
        let found = query(dir.path(), r"\1 \2 \3");
        assert_eq!(found.len(), of_ids, "{found:?}");
        for [payloads, namespace, id] in found {
            assert_eq!((&*payloads, &*namespace), ("2", "acme"));
            assert!(ids.contains(&id));
        }
        let found = query(dir.path(), r"\1 \3 \2");
        assert_eq!(found.iter().filter(|[ids, ..]| ids == "2").count(), of_payloads, "{found:?}");
    }
}
