//! What a failover of Redis loses is reported with its window: Sentinel and Cluster.

use std::time::{Duration, SystemTime};

use tower_dedup::DedupKey;
use tower_dedup::adapter::{
    CallTerms, DedupAdapter, LossKind, MaintenanceAdapter, RedisAdapter, RedisOptions, StoreLoss,
    Token,
};

use crate::support::redis::{Cluster, SentinelSet, wait_until};

const RETENTION: Duration = Duration::from_secs(3_600);

async fn connect(url: &str) -> RedisAdapter {
    let options = RedisOptions::new().follow_every(Some(Duration::from_millis(100)));
    RedisAdapter::connect_with(url, options).await.unwrap()
}

fn key(id: usize) -> DedupKey {
    DedupKey::new("test", &id.to_string()).unwrap()
}

async fn claim(adapter: &RedisAdapter, id: usize) -> bool {
    let terms = CallTerms::on_claim(Token::random(), RETENTION);
    adapter.claim(&key(id), &terms).await.is_ok()
}

/// Claims keys until `until` returns `true`. Returns each acknowledged key, and when it was acknowledged.
async fn load(
    adapter: &RedisAdapter,
    ids: std::ops::RangeFrom<usize>,
    mut until: impl FnMut() -> bool,
) -> Vec<(usize, SystemTime)> {
    let mut acknowledged = Vec::new();
    for id in ids {
        if claim(adapter, id).await {
            acknowledged.push((id, SystemTime::now()));
        }
        if until() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    acknowledged
}

async fn lost(
    adapter: &RedisAdapter,
    acknowledged: &[(usize, SystemTime)],
) -> Vec<(usize, SystemTime)> {
    let mut lost = Vec::new();
    for &(id, at) in acknowledged {
        if adapter.get(&key(id)).await.unwrap().is_none() {
            lost.push((id, at));
        }
    }
    lost
}

/// Asserts that each lost write lies in the window of a reported loss of this kind.
fn assert_reported(lost: &[(usize, SystemTime)], losses: &[StoreLoss], kind: LossKind) {
    for (id, at) in lost {
        let covers =
            |loss: &StoreLoss| loss.kind == kind && loss.since <= *at && *at <= loss.found_at;
        assert!(losses.iter().any(covers), "{id} at {at:?}: {losses:#?}");
    }
}

fn kinds(adapter: &RedisAdapter) -> Vec<LossKind> {
    adapter.losses().iter().map(|loss| loss.kind).collect()
}

async fn seconds(seconds: u64) {
    tokio::time::sleep(Duration::from_secs(seconds)).await;
}

/// The primary is cut from the others, and goes on replying to us until Sentinel has replaced it.
#[tokio::test]
async fn writes_to_a_cut_primary_of_sentinel_are_reported_with_their_window() {
    let set = SentinelSet::start_linked(&[]);
    let adapter = connect(&set.url()).await;
    let before = load(&adapter, 0.., {
        let begun = SystemTime::now();
        move || begun.elapsed().unwrap() > Duration::from_secs(1)
    })
    .await;
    let cut_at = SystemTime::now();
    set.cut_from_peers(0);
    let during = load(&adapter, 10_000.., || !adapter.losses().is_empty()).await;
    seconds(1).await;
    let losses = adapter.losses();
    assert_eq!(kinds(&adapter), [LossKind::Rewound], "{losses:#?}");
    let lost_then = lost(&adapter, &during).await;
    assert!(lost_then.len() >= 50, "only {} writes are lost", lost_then.len());
    assert_reported(&lost_then, &losses, LossKind::Rewound);
    assert_reported(&lost(&adapter, &before).await, &losses, LossKind::Rewound);
    // The window is no longer than it must be.
    let early = cut_at.duration_since(losses[0].since).unwrap_or_default();
    assert!(early < Duration::from_secs(1), "{early:?} before the cut");
    // The old primary comes back as a replica.
    set.heal(0);
    set.settled(2).await;
    seconds(1).await;
    assert_eq!(kinds(&adapter), [LossKind::Rewound]);
    assert_eq!(adapter.stored_losses().await.unwrap().len(), 1);
}

/// `SENTINEL FAILOVER` promotes a replica while the primary goes on acknowledging writes.
#[tokio::test]
async fn writes_that_a_failover_by_command_loses_are_reported_with_their_window() {
    let set = SentinelSet::start();
    let adapter = connect(&set.url()).await;
    assert!(claim(&adapter, 0).await);
    seconds(1).await;
    let words = ["SENTINEL", "FAILOVER", set.name()];
    wait_until("a failover that begins", || set.sentinels()[0].ask::<()>(&words).ok()).await;
    let acknowledged = load(&adapter, 1.., || !adapter.losses().is_empty()).await;
    set.settled(2).await;
    seconds(1).await;
    let (lost, losses) = (lost(&adapter, &acknowledged).await, adapter.losses());
    let kind = if lost.is_empty() { losses[0].kind } else { LossKind::Rewound };
    assert_reported(&lost, &losses, kind);
    assert!(!kinds(&adapter).contains(&LossKind::Emptied), "{losses:#?}");
}

#[tokio::test]
async fn killed_primary_of_sentinel_whose_replicas_have_every_write_is_suspected() {
    let set = SentinelSet::start();
    let adapter = connect(&set.url()).await;
    assert!(claim(&adapter, 0).await);
    seconds(1).await;
    let killed = SystemTime::now();
    set.servers()[0].kill();
    set.failover_from(0).await;
    wait_until("a suspicion", || (!adapter.losses().is_empty()).then_some(())).await;
    seconds(1).await;
    let losses = adapter.losses();
    assert_eq!(kinds(&adapter), [LossKind::Suspected], "{losses:#?}");
    let window = killed.duration_since(losses[0].since).unwrap();
    assert!(window < Duration::from_secs(1), "{window:?}");
}

#[tokio::test]
async fn writes_to_a_cut_primary_of_a_cluster_are_reported_with_their_window() {
    let cluster = Cluster::start_linked(&[]);
    let adapter = connect(&cluster.url()).await;
    let before = load(&adapter, 0.., {
        let begun = SystemTime::now();
        move || begun.elapsed().unwrap() > Duration::from_secs(1)
    })
    .await;
    let cut_at = SystemTime::now();
    cluster.cut_from_peers(0);
    let during = load(&adapter, 10_000.., || !adapter.losses().is_empty()).await;
    seconds(1).await;
    let losses = adapter.losses();
    assert_eq!(kinds(&adapter), [LossKind::Rewound], "{losses:#?}");
    let lost_then = lost(&adapter, &during).await;
    assert!(lost_then.len() >= 10, "only {} writes are lost", lost_then.len());
    assert_reported(&lost_then, &losses, LossKind::Rewound);
    assert_reported(&lost(&adapter, &before).await, &losses, LossKind::Rewound);
    let early = cut_at.duration_since(losses[0].since).unwrap_or_default();
    assert!(early < Duration::from_secs(1), "{early:?} before the cut");
    cluster.heal();
    cluster.settled().await;
    seconds(3).await;
    assert_eq!(kinds(&adapter), [LossKind::Rewound]);
}

#[tokio::test]
async fn planned_failover_and_killed_primary_of_a_cluster_are_suspected_at_most() {
    let cluster = Cluster::start();
    let adapter = connect(&cluster.url()).await;
    assert!(claim(&adapter, 0).await);
    seconds(1).await;
    cluster.nodes()[3].run::<()>(&["CLUSTER", "FAILOVER"]);
    wait_until("a suspicion", || (!adapter.losses().is_empty()).then_some(())).await;
    cluster.settled().await;
    seconds(3).await;
    assert_eq!(kinds(&adapter), [LossKind::Suspected], "{:#?}", adapter.losses());
    assert_eq!(adapter.losses()[0].primary, cluster.nodes()[3].address());
    cluster.nodes()[1].kill();
    wait_until("a suspicion", || (adapter.losses().len() > 1).then_some(())).await;
    seconds(3).await;
    assert_eq!(kinds(&adapter), [LossKind::Suspected; 2], "{:#?}", adapter.losses());
    assert_eq!(adapter.losses()[1].primary, cluster.nodes()[4].address());
}

#[tokio::test]
async fn slots_that_move_are_no_loss_and_a_flush_of_one_primary_is() {
    let cluster = Cluster::start();
    let adapter = connect(&cluster.url()).await;
    assert!(claim(&adapter, 0).await);
    seconds(1).await;
    // The canary of node 0 goes along.
    let canary = || {
        let keys: Vec<String> = cluster.nodes()[0].run(&["KEYS", "dedup::canary:*"]);
        keys.into_iter().next()
    };
    let moved = wait_until("a canary", canary).await;
    cluster.move_slot(cluster.slot_of(&moved), 1).await;
    let other = wait_until("another canary", || canary().filter(|key| *key != moved)).await;
    seconds(3).await;
    assert_eq!(adapter.losses(), []);
    // The first canary comes back, and is used again with larger numbers.
    let number = |node: usize| cluster.nodes()[node].run::<u64>(&["GET", &moved]);
    let before = number(1);
    cluster.move_slot(cluster.slot_of(&moved), 0).await;
    cluster.move_slot(cluster.slot_of(&other), 1).await;
    wait_until("the first canary", || (number(0) > before).then_some(())).await;
    seconds(2).await;
    assert_eq!(adapter.losses(), []);
    cluster.nodes()[1].run::<()>(&["FLUSHALL"]);
    wait_until("a loss", || (!adapter.losses().is_empty()).then_some(())).await;
    seconds(2).await;
    let losses = adapter.losses();
    assert_eq!(kinds(&adapter), [LossKind::Emptied], "{losses:#?}");
    assert_eq!(losses[0].primary, cluster.nodes()[1].address());
    assert_eq!(adapter.stored_losses().await.unwrap().len(), 1);
}
