//! Primaries that fall silent or are cut from the other servers, and come back: two servers take
//! themselves for the primary for a while. And slots that move under load.

use std::time::{Duration, Instant};

use redis::Connection;
use tower_dedup::StoreErrorKind;
use tower_dedup::adapter::RedisAdapter;
use tower_dedup::adapter::contract::DedupAdapter;

use super::failover::{
    Primaries, adapters, adapters_with, durable, end, end_with_failovers, go_on, loads, recover,
};
use super::load::{LedgerKind, Load, RECOVERED, suspicions, until_suspected};
use support::redis::{Cluster, SentinelSet};
use support::{FIRST, dedup_key, on_claim, terms, until};

/// Asserts that a call ends by itself, although the server is silent.
async fn assert_fails_in_time(adapter: &RedisAdapter, id: &str) {
    let start = Instant::now();
    let claim = adapter.claim(&dedup_key(id), &terms()).await;
    let took = start.elapsed();
    let kind = claim.unwrap_err().kind();
    assert!(matches!(kind, StoreErrorKind::Timeout | StoreErrorKind::Unavailable), "{kind:?}");
    assert!(took < Duration::from_secs(5), "the call ended after {took:?}");
}

/// The primary stops, is replaced, and goes on as if nothing had happened. While it is silent, the nodes of a cluster cannot
/// agree: the load shows when it is replaced.
async fn silent(primaries: &impl Primaries) {
    let loads = loads(&primaries.url()).await;
    go_on(&loads).await;
    let (primary, _) = primaries.primary(0);
    let before = suspicions(&primaries.addresses());
    primaries.servers()[primary].stop();
    assert_fails_in_time(&loads[0].adapters[0], &Cluster::id_in_slot("dedup", "silent", 0)).await;
    let took = recover(&loads).await;
    println!("recovered after {took:?}");
    until_suspected(&primaries.addresses(), before).await;
    primaries.servers()[primary].cont();
    primaries.settle().await;
    go_on(&loads).await;
    for verdict in end_with_failovers(&loads).await {
        assert!(verdict.answers.contains_key("503 unavailable"), "{verdict:#?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn sentinel_silent_primary_is_replaced_and_loses_no_event() {
    silent(&SentinelSet::start()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn cluster_silent_primary_is_replaced_and_loses_no_event() {
    silent(&Cluster::start()).await;
}

/// The primary is cut from its replicas and from the Sentinels. Clients still reach it, and it
/// acknowledges writes that are lost when the network heals.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn sentinel_two_primaries_lose_no_event_and_the_losing_side_reports_it() {
    let set = SentinelSet::start_linked(&[]);
    let first = adapters(&set.url(), 1).await.remove(0);
    first.claim(&dedup_key("warm"), &terms()).await.unwrap();
    let primary = set.primary().unwrap();
    let mut admin = set.servers()[primary].connection().unwrap();
    let known = clients(&mut admin);
    let second = adapters(&set.url(), 1).await.remove(0);
    let kinds = [LedgerKind::Lease, LedgerKind::OnArrival];
    let loads = kinds.map(|kind| Load::start(kind, vec![first.clone(), second.clone()]));
    go_on(&loads).await;

    let before = suspicions(&set.addresses());
    set.cut_from_peers(primary);
    set.failover_from(primary).await;
    // The second process connects again, and finds the new primary.
    for client in clients(&mut admin).into_iter().filter(|client| !known.contains(client)) {
        let _ = redis::cmd("CLIENT").arg("KILL").arg("ID").arg(client).exec(&mut admin);
    }
    go_on(&loads).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    set.heal(primary);
    set.settled(2).await;
    until_suspected(&set.addresses(), before).await;
    recover(&loads).await;
    for verdict in end_with_failovers(&loads).await {
        assert!(verdict.doubled > 0, "both primaries served: {verdict:#?}");
    }
}

/// On arrival, a lost release is the one way to lose an event. With `wait_replicas`, a release counts only once a
/// replica has it: here the new primary has the claim, and it never gets the first release.
async fn release_survives(set: &SentinelSet, isolate: impl Fn(usize), heal: impl Fn(usize)) {
    let adapter = adapters_with(&set.url(), 1, durable()).await.remove(0);
    let (key, claim) = (dedup_key("undone"), on_claim(&terms()));
    assert_eq!(adapter.claim(&key, &claim).await.unwrap(), FIRST);
    let primary = set.primary().unwrap();
    let has_claim = |number: &usize| set.servers()[*number].run(&["EXISTS", "dedup:test:undone"]);
    until(|| (0..3).all(|number| has_claim(&number))).await;

    isolate(primary);
    let unknown = adapter.release(&key, &claim).await.unwrap_err();
    assert!(unknown.is_transient(), "{unknown:?}");
    set.servers()[primary].kill();
    heal(primary);
    set.failover_from(primary).await;
    // As the layer does, which repeats a release until its outcome is known.
    let released = async { while adapter.release(&key, &claim).await.is_err() {} };
    tokio::time::timeout(RECOVERED, released).await.expect("an end");
    assert_eq!(adapter.claim(&key, &on_claim(&terms())).await.unwrap(), FIRST);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn sentinel_release_on_arrival_survives_a_primary_that_was_cut_off() {
    let set = SentinelSet::start_linked(&[]);
    release_survives(&set, |primary| set.cut_from_peers(primary), |primary| set.heal(primary))
        .await;
}

/// The primary says that it has no replica.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn sentinel_release_on_arrival_survives_a_primary_that_has_lost_its_replicas() {
    let set = SentinelSet::start();
    let others = |primary| set.servers().iter().enumerate().filter(move |(it, _)| *it != primary);
    let isolate = |primary: usize| {
        others(primary).for_each(|(_, replica)| replica.stop());
        set.servers()[primary].run::<()>(&["CLIENT", "KILL", "TYPE", "replica"]);
    };
    let heal = |primary| others(primary).for_each(|(_, replica)| replica.cont());
    release_survives(&set, isolate, heal).await;
}

fn clients(admin: &mut Connection) -> Vec<u64> {
    let list: String =
        redis::cmd("CLIENT").arg("LIST").arg("TYPE").arg("normal").query(admin).unwrap();
    let id = |line: &str| line.strip_prefix("id=")?.split(' ').next()?.parse().ok();
    list.lines().filter_map(id).collect()
}

/// One primary of a cluster is cut from all other nodes. It refuses writes after the node timeout.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn cluster_primary_in_a_minority_loses_no_event() {
    let cluster = Cluster::start_linked(&[]);
    let loads = loads(&cluster.url()).await;
    go_on(&loads).await;
    let primary = cluster.primary_of("dedup:test:a").await;
    let before = suspicions(&cluster.addresses());
    cluster.cut_from_peers(primary);
    let took = recover(&loads).await;
    println!("recovered after {took:?}");
    tokio::time::sleep(Duration::from_secs(3)).await;
    cluster.heal();
    cluster.settled().await;
    recover(&loads).await;
    until_suspected(&cluster.addresses(), before).await;
    end_with_failovers(&loads).await;
}

/// Slots move to and fro. No delivery notices, and nothing is reported as lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn slots_that_move_under_load_lose_and_double_nothing() {
    let cluster = Cluster::start();
    let url = cluster.url();
    let slot = cluster.slot_of("moves");
    let moved = async |kind| Load::start_in_slot(kind, adapters(&url, 2).await, Some(slot));
    let loads = [moved(LedgerKind::Lease).await, moved(LedgerKind::OnArrival).await];
    go_on(&loads).await;
    for _ in 0..4 {
        let from = cluster.owner_of(slot).expect("an owner");
        cluster.move_slot(slot, (from + 1) % 3).await;
        recover(&loads).await;
    }
    for verdict in end(&loads).await {
        assert_eq!((verdict.doubled, verdict.missing), (0, 0), "{verdict:#?}");
    }
    assert_eq!(suspicions(&cluster.addresses()), 0);
}
