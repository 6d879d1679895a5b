//! The connections of the Redis adapter: they break, fall silent and are refused.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tokio::time::{sleep, timeout};
use tower_dedup::adapter::{
    Claimed, DedupAdapter, MaintenanceAdapter, RedisAdapter, RedisConnection, RedisOptions,
};
use tower_dedup::{ConfigError, ErrorKind};

use super::redis_calls::{attempt, claim, config_error, connect, options};
use crate::support::log::Log;
use crate::support::proxy::{Cut, Proxy};
use crate::support::redis::{Server, fresh_prefix, shared, wait_until};
use crate::support::{dedup_key, on_claim, terms};

/// The adapter's default bound of a call, and something for a busy machine.
const CALL: Duration = Duration::from_millis(1_800);
const SLACK: Duration = Duration::from_millis(700);

async fn refused(url: &str) -> ConfigError {
    let error = RedisAdapter::connect_with(url, options()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config, "{error:?}");
    config_error(&error).clone()
}

/// Closes all connections of clients.
fn disconnect(server: &Server) {
    // The command closes its own connection too.
    let _ = server.ask::<()>(&["CLIENT", "KILL", "TYPE", "normal"]);
}

#[tokio::test]
async fn connecting_to_a_server_that_is_down_fails_at_once() {
    let server = Server::start();
    server.kill();
    let begun = Instant::now();
    let error = RedisAdapter::connect(&server.url()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(begun.elapsed() < Duration::from_secs(1));
}

#[tokio::test]
async fn calls_work_again_after_the_server_was_killed_and_restarted() {
    let server = Server::start_with(&["appendonly yes", "appendfsync always"]);
    let (adapter, terms) = (connect(&server.url()).await, terms());
    assert_eq!(attempt(claim(&adapter, "a", &terms).await), 1);
    server.kill();
    let begun = Instant::now();
    let error = claim(&adapter, "b", &terms).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(begun.elapsed() < CALL + SLACK, "{:?}", begun.elapsed());
    server.start_again();
    assert_eq!(attempt(claim(&adapter, "b", &terms).await), 1);
    assert!(matches!(claim(&adapter, "a", &self::terms()).await.unwrap(), Claimed::InFlight));
}

#[tokio::test]
async fn stopped_server_costs_each_call_one_bound() {
    let server = Server::start();
    let adapter = connect(&server.url()).await;
    claim(&adapter, "a", &terms()).await.unwrap();
    server.stop();
    let begun = Instant::now();
    let ids: Vec<_> = (0..50).map(|number| format!("b{number}")).collect();
    let terms = terms();
    for claimed in join_all(ids.iter().map(|id| claim(&adapter, id, &terms))).await {
        assert_eq!(claimed.unwrap_err().kind(), ErrorKind::Timeout);
    }
    assert!(begun.elapsed() < CALL + SLACK, "{:?}", begun.elapsed());
    server.cont();
    let begun = Instant::now();
    for claimed in join_all(ids.iter().map(|id| claim(&adapter, id, &terms))).await {
        assert_eq!(attempt(claimed), 1);
    }
    assert!(begun.elapsed() < CALL + SLACK, "{:?}", begun.elapsed());
}

#[tokio::test]
async fn call_on_a_connection_that_fell_silent_gets_another_one_within_its_bound() {
    let server = Server::start();
    let proxy = Proxy::to("127.0.0.1", server.port()).await;
    let adapter = connect(&format!("redis://127.0.0.1:{}", proxy.port())).await;
    claim(&adapter, "a", &terms()).await.unwrap();
    proxy.silence();
    let begun = Instant::now();
    assert_eq!(attempt(claim(&adapter, "b", &terms()).await), 1);
    assert!(begun.elapsed() < CALL, "{:?}", begun.elapsed());
    let begun = Instant::now();
    claim(&adapter, "c", &terms()).await.unwrap();
    assert!(begun.elapsed() < Duration::from_millis(500), "{:?}", begun.elapsed());
}

#[tokio::test]
async fn connection_that_fell_silent_is_dropped_although_its_callers_go_early() {
    let server = Server::start();
    let proxy = Proxy::to("127.0.0.1", server.port()).await;
    let adapter = connect(&format!("redis://127.0.0.1:{}", proxy.port())).await;
    claim(&adapter, "a", &terms()).await.unwrap();
    proxy.silence();
    let (begun, terms) = (Instant::now(), terms());
    // Shorter than the response timeout.
    while timeout(Duration::from_millis(300), claim(&adapter, "b", &terms)).await.is_err() {
        assert!(begun.elapsed() < CALL + SLACK, "the connection stays");
    }
    assert!(begun.elapsed() >= Duration::from_millis(600), "{:?}", begun.elapsed());
}

#[tokio::test]
async fn caller_that_goes_while_the_connection_opens_leaves_no_trace() {
    let server = Server::start();
    let adapter = connect(&server.url()).await;
    let terms = terms();
    disconnect(&server);
    server.stop();
    for _ in 0..20 {
        let _ = timeout(Duration::from_millis(10), claim(&adapter, "a", &terms)).await;
    }
    server.cont();
    assert_eq!(attempt(claim(&adapter, "a", &terms).await), 1);
}

#[tokio::test]
async fn repeated_call_whose_reply_was_lost_gets_its_own_claim() {
    let server = Server::start();
    let proxy = Proxy::to("127.0.0.1", server.port()).await;
    let adapter = connect(&format!("redis://127.0.0.1:{}", proxy.port())).await;
    claim(&adapter, "warm", &terms()).await.unwrap();
    for cut in [Cut::Lost, Cut::Unanswered, Cut::Abandoned, Cut::Silent, Cut::SilentUnanswered] {
        let (id, terms) = (format!("{cut:?}"), terms());
        proxy.set(0, cut);
        assert_eq!(attempt(claim(&adapter, &id, &terms).await), 1, "{cut:?}");
        assert!(proxy.sprung().unwrap().contains("EVALSHA"), "{cut:?}");
        let claimed = claim(&adapter, &id, &self::terms()).await.unwrap();
        assert!(matches!(claimed, Claimed::InFlight), "{cut:?}: {claimed:?}");
    }
}

#[tokio::test]
async fn refusal_after_a_lost_reply_leaves_the_outcome_unknown() {
    let (server, other) = (Server::start(), Server::start());
    let proxy = Proxy::to("127.0.0.1", server.port()).await;
    let adapter = connect(&format!("redis://127.0.0.1:{}", proxy.port())).await;
    claim(&adapter, "warm", &terms()).await.unwrap();
    let (terms, port) = (terms(), other.port().to_string());
    proxy.set(0, Cut::SilentUnanswered);
    let (claimed, ()) = tokio::join!(claim(&adapter, "a", &terms), async {
        sleep(Duration::from_millis(300)).await;
        server.run::<()>(&["REPLICAOF", "127.0.0.1", &port]);
    });
    let error = claimed.unwrap_err();
    // The key was claimed. `Refused` would say that nothing was stored.
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error:?}");
}

#[test]
fn connection_that_a_dead_runtime_was_opening_is_opened_by_another_runtime() {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (server, terms) = (Server::start(), terms());
    let first = runtime();
    let adapter = first.block_on(connect(&server.url()));
    disconnect(&server);
    server.stop();
    let bound = Duration::from_millis(100);
    first.block_on(async {
        timeout(bound, claim(&adapter, "a", &terms)).await.unwrap_err();
    });
    drop(first);
    server.cont();
    let second = runtime();
    assert_eq!(attempt(second.block_on(claim(&adapter, "a", &terms))), 1);
    // Its connection ends with its runtime.
    drop(second);
    assert_eq!(attempt(runtime().block_on(claim(&adapter, "a", &terms))), 1);
}

#[tokio::test]
async fn forgotten_scripts_are_sent_again() {
    let server = Server::start();
    let adapter = connect(&server.url()).await;
    let terms = terms();
    assert_eq!(attempt(claim(&adapter, "a", &terms).await), 1);
    server.run::<()>(&["SCRIPT", "FLUSH"]);
    assert_eq!(attempt(claim(&adapter, "a", &terms).await), 1);
}

#[tokio::test]
async fn replica_refuses_until_it_is_a_primary_again() {
    let (server, other) = (Server::start(), Server::start());
    let adapter = connect(&server.url()).await;
    let (terms, port) = (terms(), other.port().to_string());
    server.run::<()>(&["REPLICAOF", "127.0.0.1", &port]);
    let mut kinds = Vec::new();
    // A try that is under way when the time of a call is up makes that call's outcome unknown.
    while !kinds.contains(&ErrorKind::Refused) && kinds.len() < 5 {
        let begun = Instant::now();
        kinds.push(claim(&adapter, "a", &terms).await.unwrap_err().kind());
        assert!(begun.elapsed() < CALL + SLACK, "{:?}", begun.elapsed());
    }
    let (last, earlier) = kinds.split_last().unwrap();
    assert_eq!(*last, ErrorKind::Refused);
    assert!(earlier.iter().all(|kind| *kind == ErrorKind::Timeout), "{earlier:?}");
    // A call that waits for the end of the failover succeeds.
    let (claimed, ()) = tokio::join!(claim(&adapter, "a", &terms), async {
        sleep(Duration::from_millis(500)).await;
        server.run::<()>(&["REPLICAOF", "NO", "ONE"]);
    });
    assert_eq!(attempt(claimed), 1);
}

#[tokio::test]
async fn server_that_evicts_is_refused_unless_it_is_accepted_by_name() {
    let server = Server::start_with(&["maxmemory 100mb", "maxmemory-policy allkeys-lru"]);
    assert_eq!(refused(&server.url()).await, ConfigError::RedisEvictsKeys);
    let accepted = options().evictable(true);
    let adapter = RedisAdapter::connect_with(&server.url(), accepted).await.unwrap();
    assert_eq!(attempt(claim(&adapter, "a", &terms()).await), 1);
}

#[tokio::test]
async fn server_that_begins_to_evict_refuses_calls_until_it_is_mended() {
    let (log, _guard) = Log::of_this_thread();
    let server = Server::start_with(&["maxmemory 100mb"]);
    let (adapter, terms) = (connect(&server.url()).await, terms());
    assert_eq!(attempt(claim(&adapter, "a", &terms).await), 1);
    let policy = |policy| server.run::<()>(&["CONFIG", "SET", "maxmemory-policy", policy]);
    policy("volatile-ttl");
    disconnect(&server);
    // This call may have reached the server before the connection ended.
    claim(&adapter, "b", &terms).await.unwrap_err();
    for _ in 0..10 {
        let error = claim(&adapter, "b", &terms).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Refused);
        assert!(error.is_transient());
        assert_eq!(config_error(&error), &ConfigError::RedisEvictsKeys);
    }
    assert_eq!(log.beginning("the Redis server may not be used").len(), 1);
    policy("noeviction");
    sleep(Duration::from_millis(1_100)).await;
    assert_eq!(attempt(claim(&adapter, "b", &terms).await), 1);
}

#[tokio::test]
async fn follower_finds_a_server_that_begins_to_evict() {
    let server = Server::start_with(&["maxmemory 100mb"]);
    let often = options().follow_every(Some(Duration::from_millis(100)));
    let adapter = RedisAdapter::connect_with(&server.url(), often).await.unwrap();
    let terms = terms();
    assert_eq!(attempt(claim(&adapter, "a", &terms).await), 1);
    server.run::<()>(&["CONFIG", "SET", "maxmemory-policy", "volatile-ttl"]);
    sleep(Duration::from_secs(1)).await;
    let error = claim(&adapter, "b", &terms).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused, "{error:?}");
}

#[tokio::test]
async fn server_of_another_kind_names_the_scheme() {
    let server = Server::start_with(&["cluster-enabled yes"]);
    let scheme = |error| match error {
        ConfigError::WrongRedisScheme { scheme, .. } => scheme,
        other => panic!("{other:?}"),
    };
    assert_eq!(scheme(refused(&server.url()).await), "redis+cluster");
    let single = Server::start();
    let cluster = format!("redis+cluster://{}", single.address());
    assert_eq!(scheme(refused(&cluster).await), "redis");
}

#[tokio::test]
async fn password_and_database_are_those_of_the_url() {
    let server = Server::start();
    server.run::<()>(&["CONFIG", "SET", "requirepass", "p@ss:w/rd"]);
    let url = format!("redis://:p%40ss%3Aw%2Frd@{}/3", server.address());
    let adapter = connect(&url).await;
    assert_eq!(attempt(claim(&adapter, "a", &terms()).await), 1);
    let mut client = redis::Client::open(url).unwrap().get_connection().unwrap();
    assert_eq!(redis::cmd("DBSIZE").query::<u32>(&mut client).unwrap(), 1);

    let wrong = format!("redis://:secret@{}", server.address());
    let error = RedisAdapter::connect(&wrong).await.unwrap_err();
    let text = format!("{error} {error:?}");
    assert!(!text.contains("secret") && !text.contains("p@ss"), "{text}");
}

#[tokio::test]
async fn server_that_refuses_info_is_used() {
    let server = Server::start();
    let prefix = fresh_prefix();
    let keys = format!("~{prefix}:*");
    // The rights that the guide names, without INFO.
    let user = ["ACL", "SETUSER", "app", "on", ">pw", &keys, "+evalsha", "+eval", "+get"];
    server.run::<()>(&[&user[..], &["+set", "+pexpireat", "+time"]].concat());
    let options = RedisOptions::new().prefix(&prefix).follow_every(None);
    let url = format!("redis://app:pw@{}", server.address());
    let adapter = RedisAdapter::connect_with(&url, options).await.unwrap();
    assert_eq!(attempt(claim(&adapter, "a", &terms()).await), 1);
}

#[tokio::test]
async fn closed_adapter_refuses_calls() {
    let server = Server::start();
    let adapter = connect(&server.url()).await;
    claim(&adapter, "a", &terms()).await.unwrap();
    adapter.close().await;
    let error = claim(&adapter, "b", &terms()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    wait_until("closed connections", || {
        let clients: String = server.run(&["CLIENT", "LIST", "TYPE", "normal"]);
        (clients.lines().count() == 1).then_some(())
    })
    .await;
}

async fn own(connection: impl Into<RedisConnection>) -> RedisAdapter {
    let adapter = RedisAdapter::with_options(connection, options()).unwrap();
    let terms = terms();
    assert_eq!(attempt(claim(&adapter, "a", &terms).await), 1);
    assert_eq!(attempt(claim(&adapter, "a", &terms).await), 1);
    let claimed = claim(&adapter, "a", &self::terms()).await.unwrap();
    assert!(matches!(claimed, Claimed::InFlight), "{claimed:?}");
    let arrival = on_claim(&self::terms());
    claim(&adapter, "b", &arrival).await.unwrap();
    adapter.release(&dedup_key("b"), &arrival).await.unwrap();
    adapter
}

#[tokio::test]
async fn connection_of_the_user_works_and_stays_open() {
    let client = redis::Client::open(shared()).unwrap();
    let mut connection = client.get_multiplexed_async_connection().await.unwrap();
    let adapter = own(connection.clone()).await;
    adapter.close().await;
    let error = claim(&adapter, "c", &terms()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    redis::cmd("PING").query_async::<String>(&mut connection).await.unwrap();
}

#[tokio::test]
async fn connection_of_the_user_that_broke_fails_at_once() {
    let server = Server::start();
    let client = redis::Client::open(server.url()).unwrap();
    let adapter = own(client.get_multiplexed_async_connection().await.unwrap()).await;
    let managed = own(client.get_connection_manager().await.unwrap()).await;
    disconnect(&server);
    for _ in 0..3 {
        let begun = Instant::now();
        let error = claim(&adapter, "c", &terms()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert!(begun.elapsed() < Duration::from_millis(500), "{:?}", begun.elapsed());
    }
    assert_eq!(attempt(claim(&managed, "c", &terms()).await), 1);
}

#[tokio::test]
async fn server_of_the_users_connection_is_checked_before_the_first_call() {
    let server = Server::start_with(&["maxmemory 100mb", "maxmemory-policy allkeys-lru"]);
    let client = redis::Client::open(server.url()).unwrap();
    let connection = client.get_multiplexed_async_connection().await.unwrap();
    let adapter = RedisAdapter::with_options(connection, options()).unwrap();
    let error = claim(&adapter, "a", &terms()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused);
    assert_eq!(config_error(&error), &ConfigError::RedisEvictsKeys);
}
