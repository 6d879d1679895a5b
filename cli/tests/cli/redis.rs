//! The commands on Redis: one server, Sentinel and Cluster.

use std::time::Duration;

use crate::command::{doctor, run};
use crate::keys::fill;
use support::cluster::blocking;
use support::redis::{Cluster, SentinelSet, Server, fresh_prefix, keys_of, shared, with_prefix};

/// Returns a URL with a fresh prefix for each topology.
async fn topologies() -> [String; 3] {
    let [sentinel, cluster] =
        blocking(|| [SentinelSet::shared().url(), Cluster::shared().url()]).await;
    [shared().to_owned(), sentinel, cluster].map(|url| with_prefix(&url, &fresh_prefix()))
}

#[tokio::test]
async fn every_topology_is_opened_by_its_url() {
    for url in topologies().await {
        fill(&url).await;
        assert_eq!(run(&url, &["list", "--json"]).await.json().len(), 4, "{url}");
        let purged = run(&url, &["purge"]).await;
        purged.assert(0, "the store deletes expired keys by itself\npurged  0");
    }
}

#[tokio::test]
async fn store_without_a_table_needs_no_migration() {
    let url = with_prefix(shared(), &fresh_prefix());
    for args in [&["migrate"][..], &["migrate", "--check"], &["migrate"]] {
        run(&url, args).await.assert(0, "a Redis store has no table");
    }
    let migration = run(&url, &["migrate", "--json"]).await.json().remove(0);
    assert_eq!(migration["state"], "current");
    // It needs no server, and prints SQL.
    let printed = run("redis://127.0.0.1:1", &["migrate", "--print"]).await;
    let text = "-- a Redis store has no table: there is nothing to make\n";
    assert_eq!((printed.code, &*printed.stdout), (0, text));
    run("redis://127.0.0.1:1", &["migrate", "--check"]).await.assert(3, "");
}

#[tokio::test]
async fn doctor_describes_every_topology_and_leaves_no_key() {
    let prefix = fresh_prefix();
    let url = with_prefix(shared(), &prefix);
    let one = doctor(&url).await;
    one.assert_finding("tls", "ok", "none, and the server is on this machine");
    one.assert_finding("rights", "ok", "claims, releases, lists");
    one.assert_finding(
        "durability",
        "warning",
        "there is no append-only file -> set appendonly yes",
    );
    run(&url, &["list"]).await.assert(0, "no keys\n");
    // The rows that fence its claims are expired, and Redis deletes them.
    let left = blocking(move || {
        let mut connection = support::redis::connection(shared()).unwrap();
        let keys = keys_of(&mut connection, &prefix).unwrap();
        let left = |key| redis::cmd("PTTL").arg(key).query::<u64>(&mut connection).unwrap();
        keys.into_iter().map(left).collect::<Vec<_>>()
    });
    let left = left.await;
    assert!(left.len() == 16 && left.iter().all(|ms| *ms <= 3_600_000), "{left:?}");

    let [_, sentinel, cluster] = topologies().await;
    doctor(&sentinel).await.assert_finding("durability", "warning", "");
    let cluster = doctor(&cluster).await;
    assert_eq!(cluster.code, 0, "{cluster:?}");
    for check in ["memory", "durability"] {
        let findings = cluster.json().into_iter().filter(|finding| finding["check"] == check);
        assert_eq!(findings.count(), 3, "{cluster:?}");
    }
}

#[tokio::test]
async fn doctor_finds_what_a_server_lacks() {
    let server = blocking(|| {
        Server::start_with(&["appendonly yes", "maxmemory 64mb", "maxmemory-policy allkeys-lru"])
    })
    .await;
    let url = server.url();
    let evicting = doctor(&url).await;
    evicting.assert_finding("memory", "error", "allkeys-lru -> set maxmemory-policy noeviction");
    evicting.assert_finding("durability", "ok", "append-only file");
    // The other commands work beside it. It has left nothing but expired rows.
    let stats = &run(&url, &["stats", "--json"]).await.json()[0];
    let counts = ["rows", "in_flight", "lapsed", "released", "complete", "expired"];
    assert_eq!(counts.map(|name| stats[name].as_u64().unwrap()), [16, 0, 0, 0, 0, 16]);

    server.run::<()>(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]);
    doctor(&url).await.assert_finding("memory", "ok", "noeviction");
    let used: u64 = server.info("used_memory").unwrap().parse().unwrap();
    server.run::<()>(&["CONFIG", "SET", "maxmemory", &(used + 200_000).to_string()]);
    doctor(&url).await.assert_finding("memory", "warning", "refuses new events with 503");
    server.run::<()>(&["CONFIG", "SET", "maxmemory", "1"]);
    doctor(&url).await.assert_finding("rights", "error", "a claim fails");
}

#[tokio::test]
async fn doctor_finds_a_replica() {
    let (replica, _primary) = blocking(|| {
        let primary = Server::start();
        let replica = Server::start();
        replica.run::<()>(&["REPLICAOF", "127.0.0.1", &primary.port().to_string()]);
        (replica, primary)
    })
    .await;
    let doctor = async || run(&replica.url(), &["doctor", "--json", "--timeout", "5s"]).await;
    let mut ran = doctor().await;
    for _ in 0..4 {
        // On a busy machine, an attempt of the claim may be under way when its time is up.
        if ran.said().contains("claiming keys: the store timed out") {
            ran = doctor().await;
        }
    }
    ran.assert_finding("rights", "error", "a read only replica");
}

/// A server that accepts connections and never replies ends no wait; `--timeout` does.
#[tokio::test]
async fn silent_server_is_waited_for_until_the_timeout() {
    let server = blocking(Server::start).await;
    let url = server.url();
    run(&url, &["stats"]).await.assert(0, "rows       0");
    server.stop();
    for args in [&["get", "test", "a"][..], &["stats"], &["doctor"], &["migrate", "--check"]] {
        let begun = std::time::Instant::now();
        run(&url, &[args, &["--timeout", "300ms"]].concat()).await.assert(3, "");
        assert!(begun.elapsed() < Duration::from_secs(10), "{args:?}");
    }
    server.cont();
}
