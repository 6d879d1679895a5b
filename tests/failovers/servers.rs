//! The servers that other tests use: topologies come up, fail over and heal.

use std::time::Duration;

use crate::support::redis::{
    Cluster, SentinelSet, Server, command, connection, fresh_prefix, keys_of, shared, wait_until,
};
use crate::support::time_travel::shift_redis;

#[test]
fn server_keeps_its_port_and_loses_its_data_only_when_told() {
    let server = Server::start_with(&["appendonly yes", "appendfsync always"]);
    server.run::<()>(&["SET", "a", "1"]);
    server.restart();
    assert_eq!(server.run::<String>(&["GET", "a"]), "1");
    server.restart_empty();
    assert_eq!(server.run::<Option<String>>(&["GET", "a"]), None);
    assert!(server.version() >= (6, 2, 0));
}

#[test]
fn stopped_server_is_silent_until_it_continues() {
    let server = Server::start();
    server.run::<()>(&["SET", "a", "1"]);
    let mut connection = server.connection().unwrap();
    connection.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    server.stop();
    let error = command(&["GET", "a"]).query::<String>(&mut connection).unwrap_err();
    assert!(error.is_timeout(), "{error}");
    server.cont();
    assert_eq!(server.run::<String>(&["GET", "a"]), "1");
}

#[test]
fn tests_of_one_server_see_their_own_keys() {
    let (mut connection, prefix) = (connection(shared()).unwrap(), fresh_prefix());
    let key = format!("{prefix}:test:1");
    command(&["SET", &key, "1"]).query::<()>(&mut connection).unwrap();
    assert!(keys_of(&mut connection, &prefix).unwrap().contains(key.as_bytes()));
    assert!(keys_of(&mut connection, &fresh_prefix()).unwrap().is_empty());
    command(&["DEL", &key]).query::<()>(&mut connection).unwrap();
}

#[tokio::test]
async fn sentinel_promotes_a_replica_when_the_primary_is_killed() {
    let set = SentinelSet::start();
    set.servers()[0].run::<()>(&["SET", "a", "1"]);
    set.servers()[0].run::<u32>(&["WAIT", "2", "1000"]);
    assert_eq!(set.kill_primary(), 0);
    let new = set.failover_from(0).await;
    assert_eq!(set.servers()[new].run::<String>(&["GET", "a"]), "1");
    // A pause of a busy machine may have made another server the primary since. Each has the data.
    let primary = set.restart_as_replica(0).await;
    assert_eq!(set.servers()[primary].run::<String>(&["GET", "a"]), "1");
}

#[tokio::test]
async fn sentinel_set_has_two_primaries_while_the_first_one_is_cut_off() {
    let set = SentinelSet::start_linked(&[]);
    set.cut_from_peers(0);
    let new = set.failover_from(0).await;
    for number in [0, new] {
        set.servers()[number].run::<()>(&["SET", "a", &number.to_string()]);
        // A client that comes through the link.
        let url = format!("redis://127.0.0.1:{}", set.port(number));
        let mut client = connection(&url).unwrap();
        command(&["SET", "b", "1"]).query::<()>(&mut client).unwrap();
    }
    set.heal(0);
    set.settled(2).await;
    assert_eq!(set.servers()[0].run::<String>(&["GET", "a"]), new.to_string());
}

#[tokio::test]
async fn cluster_promotes_a_replica_when_a_primary_is_killed() {
    let cluster = Cluster::start();
    let old = cluster.kill_primary_of("a").await;
    let new = cluster.failover_from(old, "a").await;
    assert_eq!(new, old + 3);
    cluster.nodes()[new].run::<()>(&["SET", "a", "1"]);
    cluster.nodes()[old].start_again();
    cluster.settled().await;
    let primary = cluster.primary_of("a").await;
    assert_eq!(cluster.nodes()[primary].run::<String>(&["GET", "a"]), "1");
}

#[tokio::test]
async fn cluster_moves_a_slot_with_its_keys() {
    let cluster = Cluster::start();
    let from = cluster.primary_of("{a}").await;
    for number in 0..100 {
        cluster.nodes()[from].run::<()>(&["SET", &format!("{{a}}{number}"), "1"]);
    }
    let to = (from + 1) % 3;
    cluster.move_slot(cluster.slot_of("{a}"), to).await;
    assert_eq!(cluster.nodes()[to].run::<String>(&["GET", "{a}99"]), "1");
    cluster.nodes()[from].ask::<String>(&["GET", "{a}99"]).unwrap_err();
}

#[tokio::test]
async fn cluster_has_two_primaries_of_a_slot_while_the_first_one_is_cut_off() {
    let cluster = Cluster::start_linked(&[]);
    let old = cluster.primary_of("a").await;
    cluster.cut_from_peers(old);
    // A node that is cut off refuses commands once it sees itself in a minority.
    cluster.nodes()[old].run::<()>(&["SET", "a", "old"]);
    let new = old + 3;
    let write = || cluster.nodes()[new].ask::<()>(&["SET", "a", "new"]).ok();
    wait_until("a primary on the other side", write).await;
    cluster.heal();
    cluster.settled().await;
    let primary = cluster.primary_of("a").await;
    assert_eq!(cluster.nodes()[primary].run::<String>(&["GET", "a"]), "new");
}

/// Returns a packed value of these times: format, flags and attempts before them, version and token after them.
fn packed(times: [u64; 3]) -> Vec<u8> {
    let times = times.iter().flat_map(|time| time.to_be_bytes()[2..].to_vec());
    [2, 0, 0, 0, 7].into_iter().chain(times).chain([9; 5 + 16]).collect()
}

#[test]
fn time_travel_moves_the_times_of_a_value_and_its_expiry() {
    let server = Server::start();
    let mut connection = server.connection().unwrap();
    let (never, expiry) = ((1 << 48) - 1, 40_000_000_000_000_u64);
    for (key, times) in [("p:n:1", [1_000, 5_000, 0]), ("p:n:2", [1_000, never, 3_000])] {
        let mut set = redis::cmd("SET");
        set.arg(key).arg(packed(times)).arg("PXAT").arg(expiry);
        set.query::<()>(&mut connection).unwrap();
    }
    shift_redis(&mut connection, "p", -600);
    assert_eq!(server.run::<Vec<u8>>(&["GET", "p:n:1"]), packed([400, 4_400, 0]));
    assert_eq!(server.run::<Vec<u8>>(&["GET", "p:n:2"]), packed([400, never, 2_400]));
    let left: u64 = server.run(&["PTTL", "p:n:1"]);
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let expires_at = u128::from(left) + now.as_millis();
    assert!(expires_at.abs_diff(u128::from(expiry - 600)) < 500, "{expires_at}");
    // An expiry in the past deletes the key.
    shift_redis(&mut connection, "p", -40_000_000_000_000);
    assert_eq!(server.run::<u8>(&["EXISTS", "p:n:1", "p:n:2"]), 0);
}
