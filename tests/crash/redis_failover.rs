//! Primaries that are killed under load, with Sentinel and in a cluster. The service serves again without
//! a restart. No event is lost. What runs again had been acknowledged in a time that the adapters report.

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tower_dedup::adapter::{LossKind, RedisAdapter, RedisOptions};

use super::redis_load::{LedgerKind, Load, RECOVERED, Verdict};
use crate::support::redis::{Cluster, SentinelSet, Server};

const KILLS: usize = 5;
/// Replicas stop for this time before their primary dies, so that it has acknowledged writes that they
/// never receive. Nobody takes them for dead in this time.
const LAG: Duration = Duration::from_millis(400);

/// Primaries that are replaced when they die.
trait Primaries: Sync {
    fn url(&self) -> String;
    fn servers(&self) -> &[Server];
    /// Returns a primary, and the replicas of it. Another one each turn, if there are several.
    fn primary(&self, turn: usize) -> (usize, Vec<usize>);
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

    fn primary(&self, _: usize) -> (usize, Vec<usize>) {
        let primary = self.primary().expect("the Sentinels agree");
        (primary, (0..3).filter(|number| *number != primary).collect())
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

    fn primary(&self, turn: usize) -> (usize, Vec<usize>) {
        let slot = [0, 8_000, 16_000][turn % 3];
        let primary = self.owner_of(slot).expect("the nodes agree");
        let words = ["CLUSTER", "REPLICAS", &self.ids()[primary]];
        let replicas: Vec<String> = self.nodes()[primary].run(&words);
        let is_replica = |id: &String| replicas.iter().any(|line| line.starts_with(&**id));
        (primary, (0..6).filter(|number| is_replica(&self.ids()[*number])).collect())
    }

    async fn restart(&self, number: usize) {
        self.nodes()[number].start_again();
        self.settled().await;
    }
}

/// Connects adapters that look for losses often, so that they report short times.
pub(super) async fn adapters(url: &str, count: usize) -> Vec<RedisAdapter> {
    let options = RedisOptions::new().follow_every(Some(Duration::from_millis(200)));
    let mut adapters = Vec::new();
    for _ in 0..count {
        adapters.push(RedisAdapter::connect_with(url, options.clone()).await.unwrap());
    }
    adapters
}

/// Starts a load of each ledger, with two adapters each.
pub(super) async fn loads(url: &str) -> [Arc<Load>; 2] {
    [
        Load::start(LedgerKind::Lease, adapters(url, 2).await),
        Load::start(LedgerKind::OnArrival, adapters(url, 2).await),
    ]
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

async fn killed_five_times(primaries: &impl Primaries) {
    let loads = loads(&primaries.url()).await;
    let mut recovered = Vec::new();
    for turn in 0..KILLS {
        go_on(&loads).await;
        let (primary, replicas) = primaries.primary(turn);
        let servers = primaries.servers();
        // Every other primary dies before its replicas have received its last writes.
        let lagging = if turn % 2 == 0 { &replicas[..] } else { &[] };
        lagging.iter().for_each(|replica| servers[*replica].stop());
        if !lagging.is_empty() {
            tokio::time::sleep(LAG).await;
        }
        let killed_at = SystemTime::now();
        servers[primary].kill();
        lagging.iter().for_each(|replica| servers[*replica].cont());
        recovered.push(recover(&loads).await);
        tokio::join!(loads[0].until_told(killed_at), loads[1].until_told(killed_at));
        primaries.restart(primary).await;
    }
    println!("recovered after {recovered:?}");
    for verdict in end(&loads).await {
        assert!(verdict.doubled > 0, "no acknowledged write was lost: {verdict:#?}");
        assert!(verdict.answers.contains_key("503 unavailable"), "{verdict:#?}");
        let proven = verdict.losses.iter().any(|loss| loss.kind == LossKind::Rewound);
        assert!(proven, "no loss is proven: {:#?}", verdict.losses);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn sentinel_primary_killed_five_times_loses_no_event_and_tells_what_runs_again() {
    killed_five_times(&SentinelSet::start()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn cluster_primary_killed_five_times_loses_no_event_and_tells_what_runs_again() {
    killed_five_times(&Cluster::start()).await;
}
