//! Faults of one Redis server under load: it is flushed, restarts with its data and without, is silent,
//! and has no memory left.

use std::time::{Duration, Instant};

use tower_dedup::StoreErrorKind;
use tower_dedup::adapter::RedisAdapter;
use tower_dedup::adapter::contract::{CallTerms, CompleteReply, DedupAdapter, Token};
use tower_dedup::adapter::inspect::MaintenanceAdapter;

use super::failover::{adapters, end, go_on, loads, recover};
use super::load::{RECOVERED, Verdict, suspicions, until_suspected};
use crate::support::redis::Server;
use crate::support::{FIRST, dedup_key, on_claim, terms};

fn assert_undisturbed(verdict: &Verdict) {
    assert_eq!((verdict.doubled, verdict.missing), (0, 0), "{verdict:#?}");
}

/// Returns how often the server was suspected of a loss.
fn suspected(server: &Server) -> usize {
    suspicions(&[server.address()])
}

/// The server forgets the scripts again and again. No delivery notices.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn script_flush_in_a_loop_under_load_fails_no_call() {
    let server = Server::start();
    let loads = loads(&server.url()).await;
    let mut connection = server.connection().unwrap();
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(2) {
        redis::cmd("SCRIPT").arg("FLUSH").exec(&mut connection).unwrap();
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    for verdict in end(&loads).await {
        assert_undisturbed(&verdict);
        assert!(!verdict.answers.contains_key("503 unavailable"), "{verdict:#?}");
    }
    assert_eq!(suspected(&server), 0);
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

/// Calls end with typed errors within their bounds, and the deliveries get 503. Commands that the server
/// has received before execute once it goes on; their tokens are released.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn silent_server_fails_calls_in_time_and_serves_again() {
    let server = Server::start();
    let loads = loads(&server.url()).await;
    go_on(&loads).await;
    let adapter = &loads[0].adapters[0];
    server.stop();
    for id in ["silent-1", "silent-2"] {
        assert_fails_in_time(adapter, id).await;
    }
    server.cont();
    recover(&loads).await;
    // What was sent before is executed by now, and the adapters have not opened new connections forever.
    let clients: usize = server.info("connected_clients").unwrap().parse().unwrap();
    assert!(clients <= 20, "{clients} connections of four adapters");
    let verdicts = end(&loads).await;
    loads[0].settle().await;
    for verdict in verdicts {
        assert_undisturbed(&verdict);
        assert!(verdict.answers.contains_key("503 unavailable"), "{verdict:#?}");
    }
}

/// Asserts that a call ends by itself, although the server is silent.
pub(super) async fn assert_fails_in_time(adapter: &RedisAdapter, id: &str) {
    let start = Instant::now();
    let claim = adapter.claim(&dedup_key(id), &terms()).await;
    let took = start.elapsed();
    let kind = claim.unwrap_err().kind();
    assert!(matches!(kind, StoreErrorKind::Timeout | StoreErrorKind::Unavailable), "{kind:?}");
    assert!(took < Duration::from_secs(5), "the call ended after {took:?}");
}

/// Claims are refused at `maxmemory`; what ends a claim goes through.
#[tokio::test]
async fn completions_and_releases_go_through_when_memory_is_full() {
    let server = Server::start();
    let adapter = RedisAdapter::connect(&server.url()).await.unwrap();
    let on_completion = terms();
    let at_once = CallTerms::on_claim(Token::random(), on_completion.retention());
    let (complete, release, undo) = (dedup_key("c"), dedup_key("r"), dedup_key("u"));
    assert_eq!(adapter.claim(&complete, &on_completion).await.unwrap(), FIRST);
    assert_eq!(adapter.claim(&release, &on_completion).await.unwrap(), FIRST);
    assert_eq!(adapter.claim(&undo, &at_once).await.unwrap(), FIRST);

    server.run::<()>(&["CONFIG", "SET", "maxmemory", "1"]);
    for new in [terms(), on_claim(&terms())] {
        let refused = adapter.claim(&dedup_key("new"), &new).await.unwrap_err();
        assert_eq!(refused.kind(), StoreErrorKind::Full);
    }
    let completed = adapter.complete(&complete, &on_completion).await.unwrap();
    assert_eq!(completed, CompleteReply::Held);
    let inserted = adapter.complete(&dedup_key("lost"), &on_completion).await.unwrap();
    assert_eq!(inserted, CompleteReply::Inserted);
    adapter.release(&release, &on_completion).await.unwrap();
    adapter.release(&undo, &at_once).await.unwrap();
    adapter.release(&dedup_key("fence"), &at_once).await.unwrap();
    server.run::<()>(&["CONFIG", "SET", "maxmemory", "0"]);
    assert_eq!(adapter.claim(&dedup_key("new"), &terms()).await.unwrap(), FIRST);
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

/// Every task of an adapter ends with it, also of one that was silenced in the middle.
#[test]
fn closed_adapter_leaves_no_task_behind() {
    let server = Server::start();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    runtime.block_on(async {
        let adapter = adapters(&server.url(), 1).await.remove(0);
        assert_eq!(adapter.claim(&dedup_key("a"), &terms()).await.unwrap(), FIRST);
        server.stop();
        assert_fails_in_time(&adapter, "b").await;
        server.cont();
        adapter.close().await;
        let start = Instant::now();
        while tokio::runtime::Handle::current().metrics().num_alive_tasks() > 0 {
            assert!(start.elapsed() < Duration::from_secs(10), "tasks are left");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    let clients = server.info("connected_clients").unwrap();
    // The one that asks.
    assert_eq!(clients, "1");
}
