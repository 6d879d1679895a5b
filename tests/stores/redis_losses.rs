//! Losses of one Redis server, and of a primary with Sentinel, are reported.

use std::time::{Duration, SystemTime};

use tower_dedup::DedupKey;
use tower_dedup::adapter::{
    CallTerms, DedupAdapter, LossKind, MaintenanceAdapter, RedisAdapter, RedisOptions, StoreLoss,
    Token,
};

use crate::support::log::Log;
use crate::support::redis::{Server, fresh_prefix, keys_of, wait_until, with_prefix};

const RETENTION: Duration = Duration::from_secs(3_600);

fn options() -> RedisOptions {
    RedisOptions::new().follow_every(Some(Duration::from_millis(100)))
}

fn key(id: usize) -> DedupKey {
    DedupKey::new("test", &id.to_string()).unwrap()
}

async fn claim(adapter: &RedisAdapter, id: usize) -> bool {
    let terms = CallTerms::on_claim(Token::random(), RETENTION);
    adapter.claim(&key(id), &terms).await.is_ok()
}

/// Returns an adapter whose follower has polled several times.
async fn followed(server: &Server, options: RedisOptions) -> RedisAdapter {
    let adapter = RedisAdapter::connect_with(&server.url(), options).await.unwrap();
    assert!(claim(&adapter, 0).await);
    polls(server, 5).await;
    adapter
}

/// The canaries of a server: their keys and numbers.
fn canaries(server: &Server) -> Vec<u64> {
    let read = || {
        let mut connection = server.connection().ok()?;
        let keys = keys_of(&mut connection, "dedup").ok()?;
        let canaries = keys.into_iter().filter(|key| key.starts_with(b"dedup::canary:"));
        Some(
            canaries
                .filter_map(|key| redis::cmd("GET").arg(key).query(&mut connection).ok())
                .collect(),
        )
    };
    read().unwrap_or_default()
}

/// Waits for this many polls.
async fn polls(server: &Server, times: u64) {
    let before = canaries(server).into_iter().max().unwrap_or(0);
    wait_until("polls", || canaries(server).iter().any(|now| *now >= before + times).then_some(()))
        .await;
}

async fn loss(adapter: &RedisAdapter) -> StoreLoss {
    wait_until("a loss", || adapter.losses().pop()).await
}

fn kinds(adapter: &RedisAdapter) -> Vec<LossKind> {
    adapter.losses().iter().map(|loss| loss.kind).collect()
}

#[tokio::test]
async fn flush_is_reported_once_each_time_and_stored() {
    let server = Server::start();
    let (log, _guard) = Log::of_this_thread();
    let adapter = followed(&server, options()).await;
    assert_eq!(adapter.losses(), []);
    assert_eq!(adapter.stored_losses().await.unwrap(), []);
    for times in 1..=2 {
        let before = SystemTime::now();
        server.run::<()>(&["FLUSHALL"]);
        wait_until("a loss", || (adapter.losses().len() == times).then_some(())).await;
        let found = loss(&adapter).await;
        assert_eq!(
            (found.kind, found.primary.as_str()),
            (LossKind::Emptied, server.address().as_str())
        );
        assert_eq!(found.since, SystemTime::UNIX_EPOCH);
        assert!(found.last_intact <= before && before <= found.found_at, "{found:?}");
        assert!(before.duration_since(found.last_intact).unwrap() < Duration::from_secs(5));
        polls(&server, 5).await;
        assert_eq!(adapter.losses().len(), times);
        let stored = adapter.stored_losses().await.unwrap();
        // The second flush takes the first record with it.
        assert_eq!(stored.len(), 1);
        assert_eq!(stored[0].loss.kind, LossKind::Emptied);
        assert!(
            found.found_at.duration_since(stored[0].loss.found_at).unwrap()
                < Duration::from_millis(1)
        );
    }
    let records = log.beginning("the store lost acknowledged writes");
    assert_eq!(records.len(), 2);
    assert_eq!((records[0]["kind"].as_str(), records[0]["since_ms"].as_str()), ("emptied", "0"));
    assert_eq!(records[0]["primary"], server.address());
    assert!(server.run::<i64>(&["PTTL", "dedup::losses"]) > 29 * 86_400_000);
}

#[tokio::test]
async fn restart_without_data_is_reported_as_emptied() {
    let server = Server::start();
    let adapter = followed(&server, options()).await;
    server.restart_empty();
    assert_eq!(loss(&adapter).await.kind, LossKind::Emptied);
    polls(&server, 3).await;
    assert_eq!(kinds(&adapter), [LossKind::Emptied]);
}

#[tokio::test]
async fn restart_with_all_data_is_suspected() {
    let server = Server::start_with(&["appendonly yes", "appendfsync always"]);
    let adapter = followed(&server, options()).await;
    let before = SystemTime::now();
    server.restart();
    let found = loss(&adapter).await;
    assert_eq!(found.kind, LossKind::Suspected);
    assert!(found.since <= before, "{found:?}");
    assert!(before.duration_since(found.since).unwrap() < Duration::from_secs(2), "{found:?}");
    polls(&server, 3).await;
    assert_eq!(kinds(&adapter), [LossKind::Suspected]);
}

#[tokio::test]
async fn restart_with_older_data_is_reported_with_its_window() {
    let server = Server::start();
    let adapter = followed(&server, options()).await;
    let before = SystemTime::now();
    server.run::<()>(&["SAVE"]);
    let after = SystemTime::now();
    let mut claimed = Vec::new();
    for id in 1..100 {
        assert!(claim(&adapter, id).await);
        claimed.push((id, SystemTime::now()));
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    polls(&server, 3).await;
    server.restart();
    let found = loss(&adapter).await;
    assert_eq!(found.kind, LossKind::Rewound);
    assert!(found.since <= after, "{found:?}");
    assert!(before.duration_since(found.since).unwrap_or_default() < Duration::from_secs(2));
    for (id, at) in claimed {
        assert!(adapter.get(&key(id)).await.unwrap().is_none());
        assert!(found.since <= at && at <= found.found_at, "{id}");
    }
    polls(&server, 3).await;
    assert_eq!(kinds(&adapter), [LossKind::Rewound]);
}

/// A number that a new primary took under the old primary's id would bound what the failover has lost.
#[tokio::test]
async fn primary_of_another_replication_id_takes_no_number() {
    let script = include_str!("../../src/adapter/redis/lua/canary.lua");
    let server = Server::start();
    let check = |expected: &str, number: &str, id: &str| -> i64 {
        server.run(&["EVAL", script, "1", "canary", "0", expected, number, "60000", id])
    };
    let canary = || server.run::<Option<u64>>(&["GET", "canary"]);
    let id = server.info("master_replid").unwrap();
    let other = "0123456789012345678901234567890123456789";
    assert_eq!((check("0", "1", other), canary()), (-2, None));
    assert_eq!((check("0", "2", &id), canary()), (-1, Some(2)));
    assert_eq!((check("2", "3", other), canary()), (-2, Some(2)));
    assert_eq!((check("2", "4", &id), canary()), (2, Some(4)));
    // `INFO` is refused: the id is unknown.
    assert_eq!((check("4", "5", ""), canary()), (4, Some(5)));
    // An older number stays, and a larger one.
    assert_eq!((check("6", "7", &id), canary()), (5, Some(5)));
    assert_eq!((check("0", "3", &id), canary()), (5, Some(5)));
}

#[tokio::test]
async fn eviction_is_reported() {
    let server = Server::start_with(&["maxmemory 4mb", "maxmemory-policy volatile-ttl"]);
    let adapter = followed(&server, options().evictable(true)).await;
    let value = "x".repeat(10_000);
    // Keys that expire soon go first, so that the canary stays.
    let fill = || {
        let name = format!("other-{}", fresh_prefix());
        server.run::<()>(&["SET", &name, &value, "EX", "60"]);
    };
    wait_until("an eviction", || {
        for _ in 0..50 {
            fill();
        }
        (server.info("evicted_keys")? != "0").then_some(())
    })
    .await;
    let found = loss(&adapter).await;
    assert_eq!((found.kind, found.since), (LossKind::Evicted, SystemTime::UNIX_EPOCH));
    // The minute in which no further one is reported.
    for _ in 0..50 {
        fill();
    }
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(kinds(&adapter), [LossKind::Evicted]);
}

#[tokio::test]
async fn flush_is_reported_where_info_is_refused() {
    let server = Server::start();
    server.run::<()>(&["ACL", "SETUSER", "app", "on", ">secret", "allkeys", "+@all", "-info"]);
    let url = format!("redis://app:secret@{}", server.address());
    let adapter = RedisAdapter::connect_with(&url, options()).await.unwrap();
    assert!(claim(&adapter, 0).await);
    polls(&server, 3).await;
    server.run::<()>(&["FLUSHALL"]);
    assert_eq!(loss(&adapter).await.kind, LossKind::Emptied);
    polls(&server, 3).await;
    assert_eq!(kinds(&adapter), [LossKind::Emptied]);
}

#[tokio::test]
async fn processes_with_one_store_find_a_loss_each_and_other_prefixes_are_apart() {
    let server = Server::start();
    let first = followed(&server, options()).await;
    let second = followed(&server, options()).await;
    let other = with_prefix(&server.url(), "other");
    let other = RedisAdapter::connect_with(&other, options()).await.unwrap();
    server.run::<()>(&["FLUSHALL"]);
    for adapter in [&first, &second] {
        assert_eq!(loss(adapter).await.kind, LossKind::Emptied);
    }
    polls(&server, 3).await;
    let stored = first.stored_losses().await.unwrap();
    assert_eq!(stored.len(), 2);
    assert_ne!(stored[0].process, stored[1].process);
    assert_eq!(stored, second.stored_losses().await.unwrap());
    assert_eq!(other.stored_losses().await.unwrap(), []);
}

/// The store is silent for a while, and loses nothing.
#[tokio::test]
async fn outage_is_logged_once_and_is_no_loss() {
    let server = Server::start();
    let (log, _guard) = Log::of_this_thread();
    let options = options().call_timeout(Duration::from_millis(500));
    let adapter = followed(&server, options.response_timeout(Duration::from_millis(300))).await;
    server.stop();
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(log.beginning("losses of the store are not followed").len(), 1);
    server.cont();
    wait_until("polls", || {
        (log.beginning("losses of the store are followed again").len() == 1).then_some(())
    })
    .await;
    polls(&server, 3).await;
    assert_eq!(adapter.losses(), []);
    assert_eq!(log.beginning("losses of the store are not followed").len(), 1);
}

#[tokio::test]
async fn follower_ends_with_the_last_handle_and_with_close() {
    let server = Server::start();
    let ends = async || {
        tokio::time::sleep(Duration::from_millis(300)).await;
        let before = canaries(&server);
        tokio::time::sleep(Duration::from_millis(700)).await;
        assert_eq!(canaries(&server), before);
    };
    let adapter = followed(&server, options()).await;
    let clone = adapter.clone();
    drop(adapter);
    polls(&server, 3).await;
    drop(clone);
    ends().await;
    let adapter = followed(&server, options()).await;
    adapter.close().await;
    ends().await;
    assert!(!claim(&adapter, 1).await);
    ends().await;
}

#[test]
fn follower_starts_again_on_another_runtime() {
    let server = Server::start();
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let adapter = runtime().block_on(followed(&server, options()));
    runtime().block_on(async {
        assert!(claim(&adapter, 1).await);
        polls(&server, 3).await;
        server.run::<()>(&["FLUSHALL"]);
        assert_eq!(loss(&adapter).await.kind, LossKind::Emptied);
    });
}

#[tokio::test]
async fn nothing_is_followed_if_it_is_off() {
    let server = Server::start();
    let options = RedisOptions::new().follow_every(None);
    let adapter = RedisAdapter::connect_with(&server.url(), options).await.unwrap();
    assert!(claim(&adapter, 0).await);
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(canaries(&server).is_empty());
}
