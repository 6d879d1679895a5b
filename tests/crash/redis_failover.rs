//! Primaries that are killed under load, with Sentinel and in a cluster. The service serves again without
//! a restart. No event is lost. What runs again had been acknowledged in a time that the adapters report.

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tower_dedup::adapter::{LossKind, RedisAdapter, RedisOptions};

use super::redis_load::{LedgerKind, Load, RECOVERED, Verdict};
use crate::support::redis::{Cluster, SentinelSet, Server};

/// Every other primary is cut from its replicas for this time before it dies, so that it has acknowledged
/// writes that they never receive. Nobody takes it for dead in this time.
const CUT: Duration = Duration::from_millis(500);

/// Primaries that are replaced when they die.
trait Primaries: Sync {
    fn url(&self) -> String;
    fn servers(&self) -> &[Server];
    /// Returns a primary: another one each turn, if there are several.
    fn primary(&self, turn: usize) -> usize;
    /// Cuts a primary from the other servers.
    fn cut(&self, primary: usize);
    fn heal(&self, primary: usize);
    /// Starts a killed primary as a replica of its successor, and waits until it follows.
    fn restart(&self, number: usize) -> impl Future<Output = ()> + Send;
}

impl Primaries for SentinelSet {
    fn url(&self) -> String {
        self.url()
    }

    fn servers(&self) -> &[Server] {
        self.servers()
    }

    fn primary(&self, _: usize) -> usize {
        self.primary().expect("the Sentinels agree")
    }

    fn cut(&self, primary: usize) {
        self.cut_from_peers(primary);
    }

    fn heal(&self, primary: usize) {
        self.heal(primary);
    }

    async fn restart(&self, number: usize) {
        self.restart_as_replica(number).await;
        self.settled(2).await;
    }
}

impl Primaries for Cluster {
    fn url(&self) -> String {
        self.url()
    }

    fn servers(&self) -> &[Server] {
        self.nodes()
    }

    fn primary(&self, turn: usize) -> usize {
        self.owner_of([0, 8_000, 16_000][turn % 3]).expect("the nodes agree")
    }

    fn cut(&self, primary: usize) {
        self.cut_from_peers(primary);
    }

    fn heal(&self, _: usize) {
        self.heal();
    }

    async fn restart(&self, number: usize) {
        self.nodes()[number].start_again();
        self.settled().await;
    }
}

/// Adapters look for losses often, so that they report short times.
fn often() -> RedisOptions {
    RedisOptions::new().follow_every(Some(Duration::from_millis(200)))
}

pub(super) async fn adapters(url: &str, count: usize) -> Vec<RedisAdapter> {
    adapters_with(url, count, often()).await
}

async fn adapters_with(url: &str, count: usize, options: RedisOptions) -> Vec<RedisAdapter> {
    let mut adapters = Vec::new();
    for _ in 0..count {
        adapters.push(RedisAdapter::connect_with(url, options.clone()).await.unwrap());
    }
    adapters
}

/// Starts a load of each ledger, with two adapters each.
pub(super) async fn loads(url: &str) -> [Arc<Load>; 2] {
    loads_with(url, often()).await
}

async fn loads_with(url: &str, options: RedisOptions) -> [Arc<Load>; 2] {
    let lease = adapters_with(url, 2, options.clone()).await;
    let arrival = adapters_with(url, 2, options).await;
    [Load::start(LedgerKind::Lease, lease), Load::start(LedgerKind::OnArrival, arrival)]
}

/// Waits until both loads have delivered for a while.
pub(super) async fn go_on(loads: &[Arc<Load>; 2]) {
    tokio::join!(loads[0].until_acknowledged(100), loads[1].until_acknowledged(100));
}

/// Waits until new events are acknowledged under both ledgers. Returns how long that took.
pub(super) async fn recover(loads: &[Arc<Load>; 2]) -> Duration {
    let took = tokio::join!(loads[0].deliver_new(32), loads[1].deliver_new(32));
    let took = took.0.max(took.1);
    assert!(took < RECOVERED, "serves again after {took:?}: {:?}", loads[0].answers());
    took
}

/// Ends both loads.
pub(super) async fn end(loads: &[Arc<Load>; 2]) -> [Verdict; 2] {
    let (lease, arrival) = tokio::join!(loads[0].end(), loads[1].end());
    [lease, arrival]
}

/// Kills primaries under load, one after the other.
async fn killed(primaries: &impl Primaries, kills: usize, options: RedisOptions) -> [Verdict; 2] {
    let loads = loads_with(&primaries.url(), options).await;
    let mut recovered = Vec::new();
    for turn in 0..kills {
        go_on(&loads).await;
        let primary = primaries.primary(turn);
        let is_cut = turn % 2 == 0;
        if is_cut {
            primaries.cut(primary);
            tokio::time::sleep(CUT).await;
        }
        let killed_at = SystemTime::now();
        primaries.servers()[primary].kill();
        if is_cut {
            primaries.heal(primary);
        }
        recovered.push(recover(&loads).await);
        tokio::join!(loads[0].until_told(killed_at), loads[1].until_told(killed_at));
        primaries.restart(primary).await;
    }
    println!("recovered after {recovered:?}");
    let verdicts = end(&loads).await;
    for verdict in &verdicts {
        assert!(verdict.answers.contains_key("503 unavailable"), "{verdict:#?}");
    }
    verdicts
}

async fn killed_five_times(primaries: &impl Primaries) {
    for verdict in killed(primaries, 5, often()).await {
        assert!(verdict.doubled > 0, "no acknowledged write was lost: {verdict:#?}");
        let proven = verdict.losses.iter().any(|loss| loss.kind == LossKind::Rewound);
        assert!(proven, "no loss is proven: {:#?}", verdict.losses);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn sentinel_primary_killed_five_times_loses_no_event_and_tells_what_runs_again() {
    killed_five_times(&SentinelSet::start_linked(&[])).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn cluster_primary_killed_five_times_loses_no_event_and_tells_what_runs_again() {
    killed_five_times(&Cluster::start_linked(&[])).await;
}

/// A write counts once a replica has it, and the replica with the most writes is promoted.
async fn killed_with_wait_replicas(primaries: &impl Primaries) {
    let options = often().wait_replicas(1, Duration::from_millis(500));
    for verdict in killed(primaries, 3, options).await {
        assert_eq!(verdict.doubled, 0, "{verdict:#?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn sentinel_primary_killed_with_wait_replicas_loses_and_doubles_nothing() {
    killed_with_wait_replicas(&SentinelSet::start_linked(&[])).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn cluster_primary_killed_with_wait_replicas_loses_and_doubles_nothing() {
    killed_with_wait_replicas(&Cluster::start_linked(&[])).await;
}
