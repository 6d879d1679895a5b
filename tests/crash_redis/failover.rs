//! Primaries that are killed under load, with Sentinel and in a cluster. The service serves again without
//! a restart. Under a lease, and with `wait_replicas`, no event is lost. Each failover is told.

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tower_dedup::adapter::contract::DedupAdapter;
use tower_dedup::adapter::maintenance::MaintenanceAdapter;
use tower_dedup::adapter::{RedisAdapter, RedisOptions};

use super::load::{LedgerKind, Load, RECOVERED, Verdict, suspicions, until_suspected};
use support::redis::{Cluster, SentinelSet, Server};
use support::{dedup_key, terms};

/// Every other primary has lost its replicas for this time before it dies, so that it has acknowledged
/// writes that they never receive. Nobody takes the replicas for dead in this time.
const ALONE: Duration = Duration::from_millis(500);

/// Primaries that are replaced when they die.
pub(super) trait Primaries: Sync {
    fn url(&self) -> String;
    /// Returns the addresses that clients know the servers by.
    fn addresses(&self) -> Vec<String>;
    fn servers(&self) -> &[Server];
    /// Returns a primary, and its replicas: another one each turn, if there are several.
    fn primary(&self, turn: usize) -> (usize, Vec<usize>);
    /// Waits until a killed primary has a successor.
    fn replaced(&self, number: usize) -> impl Future<Output = ()> + Send;
    /// Starts a killed primary as a replica of its successor. Waits until it follows, and until the failover
    /// has ended everywhere: the next one may not begin before.
    fn restart(&self, number: usize) -> impl Future<Output = ()> + Send;
    /// Waits until all servers follow one primary, or one of each slot.
    fn settle(&self) -> impl Future<Output = ()> + Send;
}

impl Primaries for SentinelSet {
    fn url(&self) -> String {
        self.url()
    }

    fn addresses(&self) -> Vec<String> {
        (0..3).map(|number| format!("127.0.0.1:{}", self.port(number))).collect()
    }

    fn servers(&self) -> &[Server] {
        self.servers()
    }

    fn primary(&self, _: usize) -> (usize, Vec<usize>) {
        let primary = self.primary_by_role().expect("a primary");
        (primary, (0..3).filter(|number| *number != primary).collect())
    }

    async fn replaced(&self, number: usize) {
        self.failover_from(number).await;
    }

    async fn restart(&self, number: usize) {
        self.restart_as_replica(number).await;
    }

    async fn settle(&self) {
        self.settled(2).await;
    }
}

impl Primaries for Cluster {
    fn url(&self) -> String {
        self.url()
    }

    fn addresses(&self) -> Vec<String> {
        (0..6).map(|number| format!("127.0.0.1:{}", self.port(number))).collect()
    }

    fn servers(&self) -> &[Server] {
        self.nodes()
    }

    fn primary(&self, turn: usize) -> (usize, Vec<usize>) {
        let primary = self.owner_of([0, 8_000, 16_000][turn % 3]).expect("the nodes agree");
        let words = ["CLUSTER", "REPLICAS", &self.ids()[primary]];
        let replicas: Vec<String> = self.nodes()[primary].run(&words);
        let is_replica = |id: &String| replicas.iter().any(|line| line.starts_with(&**id));
        (primary, (0..6).filter(|number| is_replica(&self.ids()[*number])).collect())
    }

    async fn replaced(&self, number: usize) {
        let begun = Instant::now();
        while !self.serves_all()
            || [0, 8_000, 16_000].map(|slot| self.owner_of(slot)).contains(&Some(number))
        {
            assert!(begun.elapsed() < RECOVERED, "no failover");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn restart(&self, number: usize) {
        self.nodes()[number].start_again();
        self.settled().await;
    }

    async fn settle(&self) {
        self.settled().await;
    }
}

pub(super) async fn adapters(url: &str, count: usize) -> Vec<RedisAdapter> {
    adapters_with(url, count, RedisOptions::new()).await
}

/// A write counts once a replica has it.
pub(super) fn durable() -> RedisOptions {
    RedisOptions::new().wait_replicas(1, Duration::from_millis(500))
}

pub(super) async fn adapters_with(
    url: &str,
    count: usize,
    options: RedisOptions,
) -> Vec<RedisAdapter> {
    let mut adapters = Vec::new();
    for _ in 0..count {
        adapters.push(RedisAdapter::connect_with(url, options.clone()).await.unwrap());
    }
    adapters
}

/// Starts a load of each ledger, with two adapters each.
pub(super) async fn loads(url: &str) -> [Arc<Load>; 2] {
    loads_with(url, RedisOptions::new()).await
}

async fn loads_with(url: &str, options: RedisOptions) -> [Arc<Load>; 2] {
    let lease = adapters_with(url, 2, options.clone()).await;
    let arrival = adapters_with(url, 2, options).await;
    [Load::start(LedgerKind::Lease, lease), Load::start(LedgerKind::OnArrival, arrival)]
}

/// Waits until both loads have delivered for a while.
pub(super) async fn go_on(loads: &[Arc<Load>; 2]) {
    tokio::join!(loads[0].until_acknowledged(60), loads[1].until_acknowledged(60));
}

/// Waits until new events are acknowledged under both ledgers. Returns how long that took.
pub(super) async fn recover(loads: &[Arc<Load>; 2]) -> Duration {
    let took = tokio::join!(loads[0].deliver_new(32), loads[1].deliver_new(32));
    let took = took.0.max(took.1);
    assert!(took < RECOVERED, "serves again after {took:?}: {:?}", loads[0].answers());
    took
}

/// Ends both loads. No event was lost.
pub(super) async fn end(loads: &[Arc<Load>; 2]) -> [Verdict; 2] {
    let verdicts = end_with_failovers(loads).await;
    assert!(verdicts[1].lost.is_empty(), "{:#?}", verdicts[1]);
    verdicts
}

/// Ends both loads. On arrival, a failover may have lost releases, and with them events.
pub(super) async fn end_with_failovers(loads: &[Arc<Load>; 2]) -> [Verdict; 2] {
    let (lease, arrival) = tokio::join!(loads[0].end(), loads[1].end());
    assert!(lease.lost.is_empty(), "{lease:#?}");
    [lease, arrival]
}

/// Kills primaries under load, one after the other.
async fn killed(
    primaries: &impl Primaries,
    kills: usize,
    waits_for_replicas: bool,
) -> [Verdict; 2] {
    let options = if waits_for_replicas { durable() } else { RedisOptions::new() };
    let addresses = primaries.addresses();
    let loads = loads_with(&primaries.url(), options).await;
    let mut recovered = Vec::new();
    for turn in 0..kills {
        // Senders may still wait for the releases of the last turn.
        recover(&loads).await;
        let (primary, replicas) = primaries.primary(turn);
        let servers = primaries.servers();
        let alone = if turn % 2 == 0 { &replicas[..] } else { &[] };
        if !alone.is_empty() {
            alone.iter().for_each(|replica| servers[*replica].stop());
            // They would read later what is in the buffers of their connections.
            servers[primary].run::<()>(&["CLIENT", "KILL", "TYPE", "replica"]);
            tokio::time::sleep(ALONE).await;
        }
        let before = suspicions(&addresses);
        servers[primary].kill();
        alone.iter().for_each(|replica| servers[*replica].cont());
        if waits_for_replicas {
            // A primary without any replica serves nobody.
            primaries.replaced(primary).await;
            primaries.restart(primary).await;
        }
        recovered.push(recover(&loads).await);
        until_suspected(&addresses, before).await;
        if !waits_for_replicas {
            primaries.restart(primary).await;
        }
    }
    println!("recovered after {recovered:?}");
    let verdicts =
        if waits_for_replicas { end(&loads).await } else { end_with_failovers(&loads).await };
    for verdict in &verdicts {
        assert!(verdict.answers.contains_key("503 unavailable"), "{verdict:#?}");
    }
    verdicts
}

async fn killed_five_times(primaries: &impl Primaries) {
    for verdict in killed(primaries, 5, false).await {
        assert!(verdict.doubled > 0, "no acknowledged write was lost: {verdict:#?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn sentinel_primary_killed_five_times_loses_no_event_and_reports_what_runs_again() {
    killed_five_times(&SentinelSet::start()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn cluster_primary_killed_five_times_loses_no_event_and_reports_what_runs_again() {
    killed_five_times(&Cluster::start()).await;
}

/// New connections know nothing of a primary that they cannot reach. They do not prove that no primary has changed, and
/// the numbers of the others are not those of the store.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn cluster_failover_that_no_call_has_met_is_told_by_a_later_one() {
    let cluster = Cluster::start();
    // The calls that fail end before the failover.
    let bound = Duration::from_millis(200);
    let options = RedisOptions::new().call_timeout(bound).response_timeout(bound);
    let connected = async || adapters_with(&cluster.url(), 1, options.clone()).await.remove(0);
    let adapter = connected().await;
    let claim = async |slot| {
        let id = Cluster::id_in_slot("dedup", &rand::random::<u32>().to_string(), slot);
        adapter.claim(&dedup_key(&id), &terms()).await
    };
    for (slot, other) in [(0, 8_000), (8_000, 16_000), (16_000, 0)] {
        let primary = cluster.owner_of(slot).expect("an owner");
        let before = suspicions(&cluster.addresses());
        cluster.nodes()[primary].kill();
        let stats = connected().await.stats().await;
        stats.expect_err("numbers of two primaries of three");
        claim(slot).await.expect_err("a dead primary");
        // Because a call has failed, these open connections.
        for _ in 0..4 {
            let _ = claim(other).await;
            tokio::time::sleep(bound / 2).await;
        }
        cluster.replaced(primary).await;
        let begun = Instant::now();
        while suspicions(&cluster.addresses()) == before {
            assert!(begun.elapsed() < RECOVERED, "the failover was not told");
            let _ = claim(slot).await;
            tokio::time::sleep(bound / 2).await;
        }
        cluster.restart(primary).await;
    }
}

/// A write counts once a replica has it, and the replica with the most writes is promoted. Not so if a
/// primary is replaced that lives: on a busy machine it may be taken for dead.
async fn killed_with_wait_replicas(primaries: &impl Primaries) {
    const KILLS: usize = 2;
    for verdict in killed(primaries, KILLS, true).await {
        // Each of the four adapters tells each failover once, and no other one.
        let failovers = suspicions(&primaries.addresses()) / 4;
        assert!(verdict.doubled == 0 || failovers > KILLS, "{verdict:#?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn sentinel_primary_killed_with_wait_replicas_loses_and_doubles_nothing() {
    killed_with_wait_replicas(&SentinelSet::start()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn cluster_primary_killed_with_wait_replicas_loses_and_doubles_nothing() {
    killed_with_wait_replicas(&Cluster::start()).await;
}
