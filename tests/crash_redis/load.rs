//! Load on Redis: senders that repeat every delivery until it is acknowledged, services that count
//! their effects in this process, and the signs of losses that the log records show.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use futures_util::stream::{self, StreamExt};
use http::{Request, Response};
use tokio::task::JoinHandle;
use tower::Layer;
use tower::util::BoxCloneSyncService;
use tower_dedup::adapter::RedisAdapter;
use tower_dedup::{DedupLayer, Delivery, ResponseBody};
use tracing_subscriber::Layer as _;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::SubscriberExt;

use support::effects::answer;
use support::log::Log;
use support::redis::Cluster;
use support::{Body, by_header, request, result, send};

/// A run ends long before this bound. Only a test that hangs reaches it.
pub(super) const FOR_EVER: Duration = Duration::from_secs(60);
/// A service serves again this long after a fault has ended, on a busy machine.
pub(super) const RECOVERED: Duration = Duration::from_secs(15);
/// Longer than any outage here, so that no lease lapses.
const LEASE: Duration = Duration::from_secs(60);
/// Every call to the store is bounded, and a delivery makes a few. The rest is a busy machine.
const ANSWERED: Duration = Duration::from_secs(20);
const SENDERS: usize = 8;

type Service = BoxCloneSyncService<Request<Body>, Response<ResponseBody<Body>>, Infallible>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LedgerKind {
    Lease,
    OnArrival,
}

/// How often the handler of each event took effect.
type Runs = Mutex<HashMap<String, usize>>;

/// The warnings and errors of all tests of this process.
static LOG: LazyLock<Log> = LazyLock::new(|| {
    let log = Log::default();
    let subscriber =
        tracing_subscriber::registry().with(log.clone().with_filter(LevelFilter::WARN));
    tracing::subscriber::set_global_default(subscriber).expect("no other subscriber");
    log
});

/// Returns how often one of these servers was suspected of a loss.
pub(super) fn suspicions(servers: &[String]) -> usize {
    let records = LOG.beginning("the store may have lost acknowledged writes");
    records.iter().filter(|record| servers.contains(&record["primary"])).count()
}

/// Waits until one of these servers is suspected more often than before.
pub(super) async fn until_suspected(servers: &[String], before: usize) {
    let told = async {
        while suspicions(servers) <= before {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(RECOVERED, told).await.expect("a suspicion");
}

/// Senders that deliver each event until it is acknowledged.
pub(super) struct Load {
    kind: LedgerKind,
    /// Before the number of each event. The loads of one test share a server.
    tag: String,
    slot: Option<u16>,
    pub(super) adapters: Vec<RedisAdapter>,
    services: Vec<Service>,
    runs: Arc<Runs>,
    sent: AtomicUsize,
    acknowledged: AtomicUsize,
    stop: AtomicBool,
    answers: Mutex<BTreeMap<String, usize>>,
    slowest: Mutex<Duration>,
    senders: Mutex<Vec<JoinHandle<()>>>,
}

/// What the effects of a load show.
#[derive(Debug)]
pub(super) struct Verdict {
    /// The events that took effect more than once.
    pub(super) doubled: usize,
    /// The events that were acknowledged and never took effect.
    pub(super) lost: Vec<String>,
    /// How many claims were gone when they were completed.
    pub(super) missing: usize,
    pub(super) answers: BTreeMap<String, usize>,
}

impl Load {
    /// Starts one service per adapter, as if each one was a process, and the senders.
    ///
    /// Under a lease one handler in eight fails, and each event is delivered to two services at once. On
    /// arrival each event is delivered to one service: another process may treat a claim of unknown
    /// outcome as complete.
    pub(super) fn start(kind: LedgerKind, adapters: Vec<RedisAdapter>) -> Arc<Self> {
        Self::start_in_slot(kind, adapters, None)
    }

    /// The same, with all keys in this slot of a cluster.
    pub(super) fn start_in_slot(
        kind: LedgerKind,
        adapters: Vec<RedisAdapter>,
        slot: Option<u16>,
    ) -> Arc<Self> {
        LazyLock::force(&LOG);
        let runs: Arc<Runs> = Arc::default();
        let services =
            adapters.iter().map(|adapter| service(kind, adapter.clone(), &runs)).collect();
        let load = Arc::new(Self {
            tag: format!("{kind:?}-{:08x}", rand::random::<u32>()),
            slot,
            kind,
            adapters,
            services,
            runs,
            sent: AtomicUsize::new(0),
            acknowledged: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            answers: Mutex::default(),
            slowest: Mutex::default(),
            senders: Mutex::default(),
        });
        let senders = (0..SENDERS).map(|_| tokio::spawn(Arc::clone(&load).sends())).collect();
        *load.senders.lock().unwrap() = senders;
        load
    }

    async fn sends(self: Arc<Self>) {
        while !self.stop.load(Ordering::SeqCst) {
            let event = self.sent.fetch_add(1, Ordering::SeqCst);
            match self.kind {
                LedgerKind::Lease => {
                    tokio::join!(self.deliver(event, 0), self.deliver(event, 1));
                }
                LedgerKind::OnArrival => self.deliver(event, 0).await,
            }
            pause(50).await;
        }
    }

    /// Delivers the event until it is acknowledged.
    async fn deliver(&self, event: usize, copy: usize) {
        let service = &self.services[(event + copy) % self.services.len()];
        let id = self.id(event);
        loop {
            let asked = Instant::now();
            let response = send(service, request(&id)).await;
            {
                let mut slowest = self.slowest.lock().unwrap();
                *slowest = asked.elapsed().max(*slowest);
            }
            let why = result(&response).unwrap_or("handler");
            let shown = format!("{} {why}", response.status().as_u16());
            *self.answers.lock().unwrap().entry(shown).or_default() += 1;
            if response.status() == 200 {
                self.acknowledged.fetch_add(1, Ordering::SeqCst);
                return;
            }
            pause(30).await;
        }
    }

    fn id(&self, event: usize) -> String {
        let id = format!("{}-{event}", self.tag);
        self.slot.map_or_else(|| id.clone(), |slot| Cluster::id_in_slot("dedup", &id, slot))
    }

    /// Delivers this many new events, each until it is acknowledged. Returns how long that took.
    pub(super) async fn deliver_new(&self, events: usize) -> Duration {
        let start = Instant::now();
        let first = self.sent.fetch_add(events, Ordering::SeqCst);
        let all = join_all((first..first + events).map(|event| self.deliver(event, 0)));
        let done = tokio::time::timeout(FOR_EVER, all).await;
        assert!(done.is_ok(), "new events are not acknowledged: {:?}", self.answers());
        start.elapsed()
    }

    /// Waits until this many more deliveries are acknowledged.
    pub(super) async fn until_acknowledged(&self, more: usize) {
        let enough = self.acknowledged.load(Ordering::SeqCst) + more;
        let all = async {
            while self.acknowledged.load(Ordering::SeqCst) < enough {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let done = tokio::time::timeout(FOR_EVER, all).await;
        assert!(done.is_ok(), "{enough} deliveries are not acknowledged: {:?}", self.answers());
    }

    pub(super) fn answers(&self) -> BTreeMap<String, usize> {
        self.answers.lock().unwrap().clone()
    }

    /// Returns how many claims of this load were gone when they were completed.
    pub(super) fn missing(&self) -> usize {
        let sent = self.sent.load(Ordering::SeqCst);
        let ids: HashSet<_> = (0..sent).map(|event| self.id(event)).collect();
        let records = LOG.beginning("the store lost a claim");
        records.iter().filter(|record| ids.contains(&record["id"])).count()
    }

    /// Ends the senders, delivers every event once more, and judges the effects.
    pub(super) async fn end(&self) -> Verdict {
        self.stop.store(true, Ordering::SeqCst);
        let senders = std::mem::take(&mut *self.senders.lock().unwrap());
        let ended = tokio::time::timeout(FOR_EVER, join_all(senders)).await;
        let ended = ended.unwrap_or_else(|_| panic!("senders hang: {:?}", self.answers()));
        for sender in ended {
            sender.unwrap();
        }
        let sent = self.sent.load(Ordering::SeqCst);
        // To another process than before.
        let again =
            stream::iter(0..sent).for_each_concurrent(4 * SENDERS, |event| self.deliver(event, 1));
        let again = tokio::time::timeout(FOR_EVER, again).await;
        assert!(again.is_ok(), "events are not acknowledged again: {:?}", self.answers());

        let known =
            ["200 handler", "200 duplicate", "500 handler", "503 in-flight", "503 unavailable"];
        let answers = self.answers();
        assert!(answers.keys().all(|answer| known.contains(&&**answer)), "{answers:?}");
        let slowest = *self.slowest.lock().unwrap();
        assert!(slowest < ANSWERED, "a delivery was answered after {slowest:?}");

        let runs = self.runs.lock().unwrap().clone();
        let ids = (0..sent).map(|event| self.id(event));
        let lost = ids.filter(|id| !runs.contains_key(id)).collect();
        let doubled = runs.values().filter(|runs| **runs > 1).count();
        let verdict = Verdict { doubled, lost, missing: self.missing(), answers };
        println!("{:?}: {sent} events, slowest {slowest:?}, {verdict:?}", self.kind);
        verdict
    }
}

pub(super) async fn pause(most: u64) {
    tokio::time::sleep(Duration::from_millis(rand::random_range(0..=most))).await;
}

fn service(kind: LedgerKind, adapter: RedisAdapter, runs: &Arc<Runs>) -> Service {
    let runs = Arc::clone(runs);
    let handler = tower::service_fn(move |request: Request<Body>| {
        let runs = Arc::clone(&runs);
        async move {
            let delivery: &Delivery = request.extensions().get().unwrap();
            pause(10).await;
            if kind == LedgerKind::Lease && rand::random_ratio(1, 8) {
                return Ok(answer(false));
            }
            *runs.lock().unwrap().entry(delivery.id().to_owned()).or_default() += 1;
            Ok(answer(true))
        }
    });
    match kind {
        LedgerKind::Lease => {
            Service::new(DedupLayer::new(by_header(), adapter).lease(LEASE).layer(handler))
        }
        LedgerKind::OnArrival => {
            Service::new(DedupLayer::on_arrival(by_header(), adapter).layer(handler))
        }
    }
}
