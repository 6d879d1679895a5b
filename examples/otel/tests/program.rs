//! The example as a reader runs it: a process that sends its spans to a collector.

use std::future::IntoFuture;
use std::path::Path;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::routing::post;
use tokio::net::TcpListener;
use tokio::process::Command;

use server::{Server, answer, duplicate, first, program};

#[path = "../../../tests/examples/server.rs"]
mod server;

type Posted = Arc<Mutex<Vec<u8>>>;

async fn collect(State(posted): State<Posted>, body: Bytes) {
    posted.lock().unwrap().extend_from_slice(&body);
}

fn example(endpoint: &str) -> Command {
    let mut command = program(Path::new(env!("CARGO_BIN_EXE_otel")));
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("OTEL_") {
            command.env_remove(name);
        }
    }
    command.env("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint).env("NO_PROXY", "127.0.0.1");
    command
}

#[tokio::test]
async fn shutdown_sends_spans_and_outcomes_to_the_collector() {
    let posted = Posted::default();
    let collector = Router::new().route("/v1/traces", post(collect)).with_state(posted.clone());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(axum::serve(listener, collector).into_future());

    // Only the shutdown sends spans, not the interval.
    let mut program = example(&endpoint);
    let server = Server::spawn_with_env(program.env("OTEL_BSP_SCHEDULE_DELAY", "600000")).await;
    for expected in [first(), duplicate()] {
        let request = server.post("").header("webhook-id", "msg_1").body("paid");
        assert_eq!(answer(&request.send().await.unwrap()), expected);
    }
    server.interrupt().await;

    let posted = posted.lock().unwrap();
    let count = |field: &[u8]| posted.windows(field.len()).filter(|bytes| *bytes == field).count();
    // Fields of protobuf: a tag, the length, the text.
    assert_eq!(count(b"\x2a\x08delivery"), 2, "names of spans");
    assert_eq!(count(b"\x0a\x07outcome\x12\x0b\x0a\x09completed"), 1);
    assert_eq!(count(b"\x0a\x07outcome\x12\x0b\x0a\x09duplicate"), 1);
    assert_ne!(count(b"\x2a\x05store"), 0);
}

#[tokio::test]
async fn invalid_endpoint_is_an_error_that_names_the_variable() {
    let output = example("collector:4318").output().await.unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && error.contains("OTEL_EXPORTER_OTLP_ENDPOINT"), "{error}");
}
