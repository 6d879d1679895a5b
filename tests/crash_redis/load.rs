//! Load on Redis: senders that repeat every delivery until it is acknowledged, services that count
//! their effects in this process, and the losses that the adapters report.

use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use futures_util::future::join_all;
use futures_util::stream::{self, StreamExt};
use http::{Request, Response};
use tokio::task::JoinHandle;
use tower::Layer;
use tower::util::BoxCloneSyncService;
use tower_dedup::adapter::{RedisAdapter, StoreLoss};
use tower_dedup::{DedupHandle, DedupLayer, Delivery, ResponseBody};

use crate::support::effects::answer;
use crate::support::{Body, by_header, request, result, send};

/// A run ends long before this bound. Only a test that hangs reaches it.
pub(super) const FOR_EVER: Duration = Duration::from_secs(60);
/// A service serves again this long after a fault has ended, on a busy machine.
pub(super) const RECOVERED: Duration = Duration::from_secs(15);
/// Longer than any outage here, so that no lease lapses.
const LEASE: Duration = Duration::from_secs(60);
/// Every call to the store is bounded, and a delivery makes a few. The rest is a busy machine.
const ANSWERED: Duration = Duration::from_secs(20);
const SENDERS: usize = 8;
/// The number of the run, in the handler's response.
const RUN: &str = "x-run";

type Service = BoxCloneSyncService<Request<Body>, Response<ResponseBody<Body>>, Infallible>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LedgerKind {
    Lease,
    OnArrival,
}

/// One run of a handler that took effect.
#[derive(Debug, Clone, Copy)]
struct Run {
    /// The claim was acknowledged before.
    start: SystemTime,
    /// The time of the answer. The completion was acknowledged before, or goes on in the background.
    end: SystemTime,
}

type Runs = Mutex<HashMap<String, Vec<Run>>>;

/// Senders that deliver each event until it is acknowledged.
pub(super) struct Load {
    kind: LedgerKind,
    /// Before the number of each event. The loads of one test share a server.
    tag: String,
    pub(super) adapters: Vec<RedisAdapter>,
    services: Vec<Service>,
    handles: Vec<DedupHandle>,
    runs: Arc<Runs>,
    sent: AtomicUsize,
    acknowledged: AtomicUsize,
    stop: AtomicBool,
    answers: Mutex<BTreeMap<String, usize>>,
    slowest: Mutex<Duration>,
    senders: Mutex<Vec<JoinHandle<()>>>,
}

/// What the effects of a load show, and the losses that its adapters have reported.
#[derive(Debug)]
pub(super) struct Verdict {
    /// The events that took effect more than once.
    pub(super) doubled: usize,
    pub(super) losses: Vec<StoreLoss>,
    pub(super) answers: BTreeMap<String, usize>,
}

impl Load {
    /// Starts one service per adapter, as if each one was a process, and the senders.
    ///
    /// Under a lease one handler in eight fails, and each event is delivered to two services at once. On
    /// arrival each event is delivered to one service: another process may treat a claim of unknown
    /// outcome as complete.
    pub(super) fn start(kind: LedgerKind, adapters: Vec<RedisAdapter>) -> Arc<Self> {
        Self::start_tagged(kind, adapters, "event")
    }

    /// The same, with ids that begin with this text.
    pub(super) fn start_tagged(
        kind: LedgerKind,
        adapters: Vec<RedisAdapter>,
        tag: &str,
    ) -> Arc<Self> {
        let runs: Arc<Runs> = Arc::default();
        let (services, handles) =
            adapters.iter().map(|adapter| service(kind, adapter.clone(), &runs)).unzip();
        let load = Arc::new(Self {
            tag: format!("{tag}-{kind:?}"),
            kind,
            adapters,
            services,
            handles,
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
            if let Some(run) = response.headers().get(RUN) {
                let run: usize = run.to_str().unwrap().parse().unwrap();
                self.runs.lock().unwrap().get_mut(&id).unwrap()[run].end = SystemTime::now();
            }
            if response.status() == 200 {
                self.acknowledged.fetch_add(1, Ordering::SeqCst);
                return;
            }
            pause(30).await;
        }
    }

    fn id(&self, event: usize) -> String {
        format!("{}-{event}", self.tag)
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

    /// Waits until each adapter has reported a loss that it found at this time or later.
    pub(super) async fn until_reported(&self, since: SystemTime) {
        let has_reported =
            |adapter: &RedisAdapter| adapter.losses().iter().any(|loss| loss.found_at >= since);
        let all = async {
            while !self.adapters.iter().all(has_reported) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let done = tokio::time::timeout(RECOVERED, all).await;
        assert!(done.is_ok(), "no loss is reported: {:?}", self.losses());
    }

    pub(super) fn losses(&self) -> Vec<StoreLoss> {
        self.adapters.iter().flat_map(RedisAdapter::losses).collect()
    }

    /// Ends the senders, delivers every event once more, and judges the effects: no event is lost, and
    /// every event that ran again had run while the store was losing writes, as an adapter has reported.
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

        let (runs, losses) = (self.runs.lock().unwrap(), self.losses());
        let lost: Vec<_> =
            (0..sent).map(|event| self.id(event)).filter(|id| !runs.contains_key(id)).collect();
        assert!(lost.is_empty(), "{:?}: lost {lost:?}; {losses:#?}; {answers:?}", self.kind);
        let mut doubled = 0;
        for (id, runs) in runs.iter().filter(|(_, runs)| runs.len() > 1) {
            doubled += 1;
            let mut runs = runs.clone();
            runs.sort_by_key(|run| run.start);
            // A later run begins because an earlier one, which may still run, has lost a write.
            for run in &runs[..runs.len() - 1] {
                let is_reported = losses.iter().any(|loss| overlap(run, loss));
                assert!(
                    is_reported,
                    "{:?}: {id} ran again, not reported: {runs:#?}; {losses:#?}",
                    self.kind
                );
            }
        }
        println!(
            "{:?}: {sent} events, {doubled} doubled, slowest {slowest:?}, {answers:?}",
            self.kind
        );
        for loss in &losses {
            let lasts = loss.found_at.duration_since(loss.since).unwrap_or_default();
            println!("  {} at {}, {lasts:?}", loss.kind.as_str(), loss.primary);
        }
        Verdict { doubled, losses, answers }
    }

    /// Waits until no write continues in the background. On arrival a release continues for 20 s if
    /// the store does not hold its claim; that is nothing to wait for.
    pub(super) async fn settle(&self) {
        for handle in self.handles.iter().filter(|_| self.kind == LedgerKind::Lease) {
            let drained = tokio::time::timeout(FOR_EVER, handle.drain()).await;
            assert!(drained.is_ok(), "{} writes hang", handle.pending_writes());
            assert_eq!((handle.running(), handle.pending_writes()), (0, 0));
        }
    }
}

/// A lost write of the run was acknowledged between its start and its answer. A reported loss holds the
/// writes from `since` until `found_at`.
fn overlap(run: &Run, loss: &StoreLoss) -> bool {
    run.start <= loss.found_at && loss.since <= run.end
}

pub(super) async fn pause(most: u64) {
    tokio::time::sleep(Duration::from_millis(rand::random_range(0..=most))).await;
}

fn service(kind: LedgerKind, adapter: RedisAdapter, runs: &Arc<Runs>) -> (Service, DedupHandle) {
    let runs = Arc::clone(runs);
    let handler = tower::service_fn(move |request: Request<Body>| {
        let runs = Arc::clone(&runs);
        async move {
            let start = SystemTime::now();
            let delivery: &Delivery = request.extensions().get().unwrap();
            pause(10).await;
            if kind == LedgerKind::Lease && rand::random_ratio(1, 8) {
                return Ok(answer(false));
            }
            let mut runs = runs.lock().unwrap();
            let runs = runs.entry(delivery.id().to_owned()).or_default();
            let mut response = answer(true);
            response.headers_mut().insert(RUN, runs.len().into());
            runs.push(Run { start, end: SystemTime::now() });
            Ok(response)
        }
    });
    match kind {
        LedgerKind::Lease => {
            let layer = DedupLayer::new(by_header(), adapter).lease(LEASE);
            (Service::new(layer.layer(handler)), layer.handle())
        }
        LedgerKind::OnArrival => {
            let layer = DedupLayer::on_arrival(by_header(), adapter);
            (Service::new(layer.layer(handler)), layer.handle())
        }
    }
}
