//! Faults of one Redis server under load: it is flushed, restarts with its data and without, and has no memory left.

use std::time::{Duration, Instant};

use super::failover::{end, go_on, loads, recover};
use super::load::{RECOVERED, Verdict, suspicions, until_suspected};
use support::redis::Server;

fn assert_undisturbed(verdict: &Verdict) {
    assert_eq!((verdict.doubled, verdict.missing), (0, 0), "{verdict:#?}");
}

/// Returns how often the server was suspected of a loss.
fn suspected(server: &Server) -> usize {
    suspicions(&[server.address()])
}

/// The claims that a flush has met are told when they are completed.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn flushall_under_load_is_reported_and_loses_no_event() {
    let server = Server::start();
    let loads = loads(&server.url()).await;
    let begun = Instant::now();
    while loads[0].missing() == 0 {
        go_on(&loads).await;
        server.run::<()>(&["FLUSHALL"]);
        recover(&loads).await;
        assert!(begun.elapsed() < RECOVERED, "no claim is missing");
    }
    for verdict in end(&loads).await {
        assert!(verdict.doubled > 0, "no acknowledged write was lost: {verdict:#?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn restart_without_data_under_load_is_reported_and_loses_no_event() {
    let server = Server::start();
    let loads = loads(&server.url()).await;
    for _ in 0..2 {
        go_on(&loads).await;
        let before = suspected(&server);
        server.restart_empty();
        recover(&loads).await;
        until_suspected(&[server.address()], before).await;
    }
    for verdict in end(&loads).await {
        assert!(verdict.doubled > 0, "no acknowledged write was lost: {verdict:#?}");
    }
}

/// With `appendfsync always` the server has every write that it has acknowledged.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn restart_from_an_append_only_file_under_load_loses_and_doubles_nothing() {
    let server = Server::start_with(&["appendonly yes", "appendfsync always"]);
    let loads = loads(&server.url()).await;
    for _ in 0..3 {
        go_on(&loads).await;
        server.kill();
        // Deliveries meet the outage, and some of them wait until it ends.
        tokio::time::sleep(Duration::from_millis(500)).await;
        server.start_again();
        recover(&loads).await;
    }
    for verdict in end(&loads).await {
        assert_undisturbed(&verdict);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn full_memory_under_load_loses_and_doubles_nothing() {
    let server = Server::start();
    let loads = loads(&server.url()).await;
    for _ in 0..2 {
        go_on(&loads).await;
        server.run::<()>(&["CONFIG", "SET", "maxmemory", "1"]);
        tokio::time::sleep(Duration::from_millis(500)).await;
        server.run::<()>(&["CONFIG", "SET", "maxmemory", "0"]);
        recover(&loads).await;
    }
    for verdict in end(&loads).await {
        assert_undisturbed(&verdict);
        assert!(verdict.answers.contains_key("503 unavailable"), "{verdict:#?}");
    }
}
