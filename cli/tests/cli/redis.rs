//! The commands on Redis: one server, Sentinel and Cluster.

use std::time::Duration;

use serde_json::Value;
use tower_dedup::adapter::{MaintenanceAdapter, RedisAdapter};

use crate::command::run;
use crate::support::cluster::blocking;
use crate::support::redis::{
    Cluster, SentinelSet, Server, fresh_prefix, keys_of, shared, with_prefix,
};
use crate::support::{claim_all, complete_all, sorted_keys, terms};

/// Returns a URL with a fresh prefix for each topology.
async fn topologies() -> [String; 3] {
    let [sentinel, cluster] =
        blocking(|| [SentinelSet::shared().url(), Cluster::shared().url()]).await;
    [shared().to_owned(), sentinel, cluster].map(|url| with_prefix(&url, &fresh_prefix()))
}

#[tokio::test]
async fn every_command_works_on_every_topology() {
    for url in topologies().await {
        run(&url, &["get", "test", "1"]).await.assert(1, "there is no such key\n");
        let adapter = RedisAdapter::connect(&url).await.unwrap();
        let (held, done) = (terms(), terms());
        let keys = sorted_keys("test", 40);
        claim_all(&adapter, &keys, &held).await.unwrap();
        claim_all(&adapter, &sorted_keys("done", 20), &done).await.unwrap();
        complete_all(&adapter, &sorted_keys("done", 20), &done).await.unwrap();

        let id = keys[0].id();
        run(&url, &["get", "test", id]).await.assert(0, "running, under a lease until 2");
        run(&url, &["forget", "test", id, "--yes"]).await.assert(1, "is running");
        let stats = run(&url, &["stats", "--json"]).await.json().remove(0);
        assert_eq!((&stats["rows"], &stats["in_flight"]), (&60.into(), &40.into()), "{url}");
        assert_eq!((&stats["complete"], &stats["is_exact"]), (&20.into(), &true.into()));
        let listed = run(&url, &["list", "--state", "complete", "--json"]).await.json();
        assert_eq!(listed.len(), 20, "{url}");
        let done = sorted_keys("done", 20);
        run(&url, &["forget", "test", done[0].id(), "--yes"]).await.assert(0, "forgotten");
        run(&url, &["purge"]).await.assert(0, "0 keys purged: the store deletes expired keys");
        adapter.close().await;
    }
}

#[tokio::test]
async fn store_without_a_table_needs_no_migration() {
    let url = with_prefix(shared(), &fresh_prefix());
    for args in [&["migrate"][..], &["migrate", "--check"], &["migrate"]] {
        run(&url, args).await.assert(0, "a Redis store has no table");
    }
    let migration = run(&url, &["migrate", "--json"]).await.json().remove(0);
    assert_eq!((&migration["state"], &migration["changed"]), (&"current".into(), &false.into()));
    // It needs no server, and prints SQL.
    let printed = run("redis://127.0.0.1:1", &["migrate", "--print"]).await;
    assert_eq!(
        (printed.code, &*printed.stdout),
        (0, "-- a Redis store has no table: there is nothing to make\n")
    );
    for option in ["--table", "--schema"] {
        run(&url, &["stats", option, "other"]).await.assert(2, "has no table");
    }
    run("redis://127.0.0.1:1", &["migrate", "--check"]).await.assert(3, "");
}

/// Returns the findings of `doctor` of this check.
fn findings<'a>(findings: &'a [Value], check: &str) -> Vec<&'a Value> {
    findings.iter().filter(|finding| finding["check"] == check).collect()
}

#[tokio::test]
async fn doctor_describes_every_topology_and_leaves_no_key() {
    let prefix = fresh_prefix();
    let url = with_prefix(shared(), &prefix);
    let one = run(&url, &["doctor"]).await;
    one.assert(0, "ok       tls           none, and the server is on this machine");
    one.assert(0, "ok       rights        ");
    one.assert(0, "there is no append-only file\n                       -> set appendonly yes");
    run(&url, &["list"]).await.assert(0, "no keys\n");
    // The rows that fence its claims are expired, and Redis deletes them.
    let left = blocking(move || {
        let mut connection = crate::support::redis::connection(shared()).unwrap();
        let keys = keys_of(&mut connection, &prefix).unwrap();
        let left = |key| redis::cmd("PTTL").arg(key).query::<u64>(&mut connection).unwrap();
        keys.into_iter().map(left).collect::<Vec<_>>()
    });
    let left = left.await;
    assert!(left.len() == 16 && left.iter().all(|ms| *ms <= 3_600_000), "{left:?}");

    let [_, sentinel, cluster] = topologies().await;
    let sentinel = run(&sentinel, &["doctor"]).await;
    sentinel.assert(0, "warning  durability    ");
    let cluster = run(&cluster, &["doctor", "--json"]).await;
    assert_eq!(cluster.code, 0, "{cluster:?}");
    let lines = cluster.json();
    for check in ["primary", "memory", "durability"] {
        assert_eq!(findings(&lines, check).len(), 3, "{lines:?}");
    }
}

#[tokio::test]
async fn doctor_finds_what_a_server_lacks() {
    let server = blocking(|| {
        Server::start_with(&["appendonly yes", "maxmemory 64mb", "maxmemory-policy allkeys-lru"])
    })
    .await;
    let url = server.url();
    let evicting = run(&url, &["doctor"]).await;
    evicting.assert(1, "error    memory");
    evicting.assert(1, "set maxmemory-policy noeviction");
    evicting.assert(1, "append-only file\n");
    // The other commands work beside it. It has left nothing but expired rows.
    let none =
        "keys       16\nin flight  0\nlapsed     0\nfailed     0\ncomplete   0\nexpired    16";
    run(&url, &["stats"]).await.assert(0, none);

    server.run::<()>(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]);
    run(&url, &["doctor"]).await.assert(0, "noeviction");
    let used: u64 = server.info("used_memory").unwrap().parse().unwrap();
    server.run::<()>(&["CONFIG", "SET", "maxmemory", &(used + 200_000).to_string()]);
    run(&url, &["doctor"]).await.assert(0, "a full server refuses new events with 503");
    server.run::<()>(&["CONFIG", "SET", "maxmemory", "1"]);
    run(&url, &["doctor"]).await.assert(1, "a claim fails");
}

/// A server that accepts connections and never replies ends no wait; `--timeout` does.
#[tokio::test]
async fn silent_server_is_waited_for_until_the_timeout() {
    let server = blocking(Server::start).await;
    let url = server.url();
    run(&url, &["stats"]).await.assert(0, "keys       0");
    server.stop();
    for args in [&["get", "test", "a"][..], &["stats"], &["doctor"], &["migrate", "--check"]] {
        let begun = std::time::Instant::now();
        run(&url, &[args, &["--timeout", "300ms"]].concat()).await.assert(3, "");
        assert!(begun.elapsed() < Duration::from_secs(10), "{args:?}");
    }
    server.cont();
}
