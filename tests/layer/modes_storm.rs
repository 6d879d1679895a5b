//! Modes under load: shadow and off change no response of a storm with failures, and a switch while
//! deliveries run loses and doubles nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::{FutureExt, StreamExt, stream};
use http::{HeaderMap, Method, Request, Response};
use http_body_util::{BodyExt, Full};
use tower::{Layer, Service, ServiceExt};
use tower_dedup::adapter::MemoryAdapter;
use tower_dedup::adapter::inspect::{KeyState, MaintenanceAdapter};
use tower_dedup::ledger::Ledger;
use tower_dedup::testing::{Fault, StoreCall};
use tower_dedup::{
    DedupAnswer, DedupLayer, Delivery, Disposition, Mode, OnInFlight, OnMismatch, OnUnavailable,
    Replay, Verdict, key,
};

use crate::support::log::Log;
use crate::support::{Body, Faulty, by_header, dedup_key, faulty, result};

type Store = Arc<Faulty<MemoryAdapter>>;

const DELIVERIES: usize = 4_000;
const AT_ONCE: usize = 48;
const IDS: usize = 300;

/// What a client gets: the status, the headers and the body, or the text of the error or panic.
type Got = Result<(u16, HeaderMap, Vec<u8>), String>;

/// Returns a number that depends on both arguments only.
fn mixed(number: usize, salt: usize) -> usize {
    number.wrapping_add(salt.wrapping_mul(0x9E37_79B9)).wrapping_mul(0x85EB_CA6B) >> 7
}

/// Returns a request whose number says everything about it: its key, which may be bad, its payload, and
/// what the handler does with it.
fn numbered(number: usize) -> Request<Body> {
    const WAYS: [&str; 12] = [
        "200", "200", "200", "slow", "204", "404", "500", "503", "panic", "error", "complete",
        "release",
    ];
    let id = format!("evt_{}", mixed(number, 1) % IDS);
    let mut request = Request::post("/hook")
        .header("x-number", number)
        .header("x-do", WAYS[mixed(number, 2) % WAYS.len()])
        .body(Full::from(format!("payload {}", mixed(number, 3) % 2)))
        .unwrap();
    let headers = request.headers_mut();
    match mixed(number, 4) % 20 {
        0 => {}
        1 => {
            headers.append("webhook-id", id.parse().unwrap());
            headers.append("webhook-id", "another".parse().unwrap());
        }
        2 => drop(headers.insert("webhook-id", "".parse().unwrap())),
        3 => drop(headers.insert("webhook-id", b"\xff".as_slice().try_into().unwrap())),
        4 => {
            headers.insert("webhook-id", id.parse().unwrap());
            *request.method_mut() = Method::GET;
        }
        _ => drop(headers.insert("webhook-id", id.parse().unwrap())),
    }
    let key = format!("\"{}\"", mixed(number, 1) % IDS);
    if !mixed(number, 5).is_multiple_of(20) {
        request.headers_mut().insert("idempotency-key", key.parse().unwrap());
    }
    request
}

/// A handler that does what the request says, and counts its runs by the request's number.
#[derive(Clone, Default)]
struct Numbered(Arc<Mutex<BTreeMap<usize, usize>>>);

impl Numbered {
    async fn run(self, request: Request<Body>) -> Result<Response<Body>, String> {
        let number = &request.headers()["x-number"];
        let way = request.headers()["x-do"].to_str().unwrap().to_owned();
        let text = number.to_str().unwrap().to_owned();
        let index: usize = text.parse().unwrap();
        *self.0.lock().unwrap().entry(index).or_default() += 1;
        let response = |status: u16| {
            let builder = Response::builder().status(status).header("x-number", &text);
            builder.body(Full::from(format!("handled {text}"))).unwrap()
        };
        match &*way {
            "panic" => panic!("panicked at {text}"),
            "error" => Err(format!("failed at {text}")),
            "slow" => {
                tokio::time::sleep(Duration::from_millis(20 + (index % 100) as u64)).await;
                Ok(response(200))
            }
            "complete" | "release" => {
                let (status, disposition) = match &*way {
                    "complete" => (500, Disposition::Complete),
                    _ => (200, Disposition::Release),
                };
                let mut response = response(status);
                response.extensions_mut().insert(disposition);
                Ok(response)
            }
            status => Ok(response(status.parse().unwrap())),
        }
    }

    fn service(
        &self,
    ) -> impl Service<
        Request<Body>,
        Response = Response<Body>,
        Error = String,
        Future = impl Future<Output = Result<Response<Body>, String>> + Send,
    > + Clone
    + Send
    + 'static {
        let handler = self.clone();
        tower::service_fn(move |request| handler.clone().run(request))
    }

    /// Checks that every request ran once, and forgets the runs.
    #[track_caller]
    fn ran_all_once(&self) {
        let runs = std::mem::take(&mut *self.0.lock().unwrap());
        assert_eq!(runs.len(), DELIVERIES);
        assert!(runs.values().all(|runs| *runs == 1), "a request ran twice");
    }
}

/// Delivers all requests, `AT_ONCE` of them concurrently.
async fn deliver_all<S, B>(service: S) -> Vec<Got>
where
    S: Service<Request<Body>, Response = Response<B>, Error = String> + Clone,
    B: http_body::Body<Error: std::fmt::Debug>,
{
    let deliver = |number| {
        let call = service.clone().oneshot(numbered(number));
        async move {
            let returned = AssertUnwindSafe(call).catch_unwind().await;
            let response = returned.map_err(|panic| {
                let text = panic.downcast_ref::<String>().cloned();
                format!("panic: {}", text.expect("the handler's panic"))
            })??;
            assert!(response.extensions().get::<DedupAnswer>().is_none());
            let (head, body) = response.into_parts();
            let body = body.collect().await.unwrap().to_bytes().to_vec();
            Ok((head.status.as_u16(), head.headers, body))
        }
    };
    let mut got: Vec<(usize, Got)> = stream::iter(0..DELIVERIES)
        .map(|number| deliver(number).map(move |got| (number, got)))
        .buffer_unordered(AT_ONCE)
        .collect()
        .await;
    got.sort_by_key(|(number, _)| *number);
    got.into_iter().map(|(_, got)| got).collect()
}

/// Gives the store one fault after another, until the result is dropped.
fn faults(store: &Store) -> tokio::task::JoinHandle<()> {
    const FAULTS: [Fault; 9] = [
        Fault::None,
        Fault::Fail,
        Fault::None,
        Fault::Hang,
        Fault::LoseReply,
        Fault::None,
        Fault::None,
        Fault::ExecuteAndFail,
        Fault::Panic,
    ];
    let store = Arc::clone(store);
    tokio::spawn(async move {
        for fault in FAULTS.iter().cycle() {
            store.set_all(*fault);
            tokio::time::sleep(Duration::from_millis(60)).await;
        }
    })
}

/// Sends the storm to the bare handler, to the layer in off and to the layer in shadow.
async fn storm<L: Ledger>(layer: DedupLayer<L>, store: Store, namespace: &str) {
    let (log, _guard) = Log::of_this_thread();
    let handler = Numbered::default();
    let expected = deliver_all(handler.service()).await;
    handler.ran_all_once();

    let layer = layer.store_timeout(Duration::from_millis(30));
    let (handle, service) = (layer.handle(), layer.layer(handler.service()));
    handle.set_mode(Mode::Off);
    let failing = faults(&store);
    assert!(deliver_all(service.clone()).await == expected, "off changed a response");
    handler.ran_all_once();
    assert_eq!(store.calls(StoreCall::Claim), 0);
    assert!(log.all("delivery").is_empty());

    handle.set_mode(Mode::Shadow);
    let got = deliver_all(service.clone()).await;
    for (number, (got, expected)) in got.iter().zip(&expected).enumerate() {
        assert_eq!(got, expected, "shadow changed the response to {number}");
    }
    handler.ran_all_once();

    failing.abort();
    let _ = failing.await;
    store.set_all(Fault::None);
    tokio::time::timeout(Duration::from_secs(3_600), handle.drain()).await.expect("drained");
    assert_eq!((handle.running(), handle.waiting(), handle.pending_writes()), (0, 0, 0));

    let records = log.all("delivery");
    let in_shadow = records.iter().filter(|record| record.contains_key("verdict"));
    let mut verdicts: BTreeMap<String, usize> = BTreeMap::new();
    for record in in_shadow {
        assert_eq!(record["namespace"], namespace);
        *verdicts.entry(record["verdict"].clone()).or_default() += 1;
    }
    let bypassed = records.iter().filter(|record| record["outcome"] == "bypass").count();
    let not_deduplicated = (0..DELIVERIES).filter(|number| mixed(*number, 4) % 20 == 4).count();
    let judged: usize = verdicts.values().sum();
    assert_eq!(judged + not_deduplicated, DELIVERIES, "{bypassed} bypassed: {verdicts:?}");
    let names: BTreeSet<&str> = verdicts.keys().map(String::as_str).collect();
    let all =
        ["duplicate", "first", "in_flight", "mismatch", "no_key", "overloaded", "unavailable"];
    assert_eq!(names, all.into(), "{verdicts:?}");
}

/// A layer whose every policy answers in the handler's place, if it enforces.
fn strict<L: Ledger>(layer: DedupLayer<L>) -> DedupLayer<L> {
    layer
        .max_running(AT_ONCE / 2)
        .max_waiting(1)
        .handler_timeout(Duration::from_millis(1))
        .on_in_flight(OnInFlight::Reject)
        .compare_payload(key::body_digest(), OnMismatch::Refuse)
}

#[tokio::test(start_paused = true)]
async fn storm_gets_the_handlers_responses_under_a_lease() {
    let store = faulty(MemoryAdapter::new());
    let layer = strict(DedupLayer::new(by_header(), Arc::clone(&store))).replay(Replay::new());
    storm(layer, store, "test").await;
}

#[tokio::test(start_paused = true)]
async fn storm_gets_the_handlers_responses_from_a_layer_that_fails_open() {
    let store = faulty(MemoryAdapter::new());
    let layer = strict(DedupLayer::new(by_header(), Arc::clone(&store)));
    storm(layer.on_unavailable(OnUnavailable::FailOpen), store, "test").await;
}

#[tokio::test(start_paused = true)]
async fn storm_gets_the_handlers_responses_on_arrival() {
    let store = faulty(MemoryAdapter::new());
    let layer = strict(DedupLayer::on_arrival(by_header(), Arc::clone(&store)));
    storm(layer, store, "test").await;
}

#[tokio::test(start_paused = true)]
async fn storm_gets_the_handlers_responses_from_a_layer_for_idempotency_keys() {
    let store = faulty(MemoryAdapter::new());
    let scope = key::from_fn(|_| Ok(Some("alice".to_owned())));
    let layer = DedupLayer::idempotency_key(scope, Arc::clone(&store)).max_running(AT_ONCE / 2);
    storm(layer, store, "idempotency-key").await;
}

/// The runs of one event.
#[derive(Debug, Default, Clone)]
struct EventRuns {
    all: usize,
    /// Runs that ended in 200, with the verdict `first`.
    first: usize,
    /// Other runs that ended in 200.
    other: usize,
    off: usize,
}

/// The facts about deliveries that were made while the mode changed.
struct Switched {
    events: Vec<EventRuns>,
    duplicates: usize,
    deliveries: usize,
    switches: usize,
    store: Arc<MemoryAdapter>,
}

/// Delivers each event until it gets a 2xx, and once more, from two senders at once. Meanwhile the mode
/// changes all the time. A third of the runs fail.
async fn switched(events: usize) -> Switched {
    let store = Arc::new(MemoryAdapter::new());
    let runs = Arc::new(Mutex::new(vec![EventRuns::default(); events]));
    let number = Arc::new(AtomicUsize::new(0));
    let noted = Arc::clone(&runs);
    let handler = tower::service_fn(move |request: Request<Body>| {
        let (runs, run) = (Arc::clone(&noted), number.fetch_add(1, Ordering::Relaxed));
        async move {
            let delivery = request.extensions().get::<Delivery>().unwrap();
            let event: usize = delivery.id().parse().unwrap();
            match mixed(run, 6) % 3 {
                0 => {}
                1 => tokio::task::yield_now().await,
                _ => tokio::time::sleep(Duration::from_millis(1)).await,
            }
            let is_success = !mixed(run, 7).is_multiple_of(3);
            let mut runs = runs.lock().unwrap();
            let (runs, verdict) = (&mut runs[event], delivery.verdict());
            runs.all += 1;
            runs.off += usize::from(verdict == Verdict::Off);
            runs.first += usize::from(is_success && verdict == Verdict::First);
            runs.other += usize::from(is_success && verdict != Verdict::First);
            let mut response = Response::new(Body::default());
            *response.status_mut() = if is_success { 200 } else { 500 }.try_into().unwrap();
            Ok::<_, std::convert::Infallible>(response)
        }
    });
    let wait = OnInFlight::Wait(Duration::from_secs(60));
    let layer = DedupLayer::new(by_header(), Arc::clone(&store)).on_in_flight(wait);
    let (handle, service) = (layer.handle(), layer.layer(handler));

    let ended = Arc::new(AtomicBool::new(false));
    let switch = tokio::spawn({
        let (handle, ended) = (handle.clone(), Arc::clone(&ended));
        async move {
            let mut switches = 0;
            let modes = [Mode::Shadow, Mode::Enforce, Mode::Off, Mode::Enforce, Mode::Shadow];
            for mode in modes.into_iter().cycle().take_while(|_| !ended.load(Ordering::Relaxed)) {
                handle.set_mode(mode);
                switches += 1;
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            switches
        }
    });
    let senders = stream::iter(0..2 * events).map(|sender| {
        let service = service.clone();
        tokio::spawn(async move {
            let (mut deliveries, mut duplicates, mut acknowledged) = (0, 0, 0);
            while acknowledged < 2 {
                let request = crate::support::request(&(sender / 2).to_string());
                let response = crate::support::send(&service, request).await;
                deliveries += 1;
                duplicates += usize::from(result(&response) == Some("duplicate"));
                acknowledged += usize::from(response.status() == 200);
            }
            (deliveries, duplicates)
        })
    });
    let sent: Vec<_> = senders.buffer_unordered(64).map(Result::unwrap).collect().await;
    ended.store(true, Ordering::Relaxed);
    let switches = switch.await.unwrap();
    handle.drain().await;
    assert_eq!((handle.running(), handle.waiting(), handle.pending_writes()), (0, 0, 0));
    let events = runs.lock().unwrap().clone();
    let deliveries = sent.iter().map(|(deliveries, _)| deliveries).sum();
    let duplicates = sent.iter().map(|(_, duplicates)| duplicates).sum();
    Switched { events, duplicates, deliveries, switches, store }
}

impl Switched {
    async fn check(&self) {
        assert!(self.switches > 20, "{} switches", self.switches);
        for (id, event) in self.events.iter().enumerate() {
            // A run without a claim is the choice of shadow and off. No event has two claimed successes.
            assert!(event.first <= 1, "{id} was doubled: {event:?}");
            assert!(event.first + event.other >= 1, "{id} was lost: {event:?}");
            let entry = self.store.get(&dedup_key(&id.to_string())).await.unwrap();
            let is_complete = match entry.map(|entry| entry.state) {
                Some(KeyState::Complete) => true,
                Some(KeyState::InFlight) => panic!("{id} was left unsettled"),
                _ => false,
            };
            assert_eq!(is_complete, event.first == 1, "{id}: {event:?}");
        }
        let runs: usize = self.events.iter().map(|event| event.all).sum();
        assert_eq!(runs + self.duplicates, self.deliveries, "each delivery ran or was a duplicate");
        let first: usize = self.events.iter().map(|event| event.first).sum();
        assert!(first > 0 && self.duplicates > 0 && first < self.deliveries);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn switch_under_load_loses_and_doubles_nothing() {
    switched(3_000).await.check().await;
}

/// On one thread, whose log records are counted too.
#[tokio::test]
async fn every_delivery_is_reported_while_the_mode_changes() {
    let (log, _guard) = Log::of_this_thread();
    let switched = switched(1_000).await;
    switched.check().await;
    let records = log.all("delivery");
    let count = |outcome: &str, in_shadow: bool| {
        let is = |record: &&BTreeMap<_, _>| {
            record["outcome"] == outcome && record.contains_key("verdict") == in_shadow
        };
        records.iter().filter(is).count()
    };
    let ran = |in_shadow| count("completed", in_shadow) + count("failed", in_shadow);
    let sum = |of: fn(&EventRuns) -> usize| switched.events.iter().map(of).sum::<usize>();
    assert!(ran(true) > 0 && ran(false) > 0 && sum(|event| event.off) > 0);
    assert_eq!(ran(true) + ran(false) + sum(|event| event.off), sum(|event| event.all));
    assert_eq!(count("duplicate", false), switched.duplicates);
    assert_eq!(count("duplicate", true), 0, "the outcome is the handler's");
    // Each first success completed its event: no other record is `completed` under `Enforce`.
    let first_in_shadow = records.iter().filter(|record| {
        record["outcome"] == "completed" && record.get("verdict").is_some_and(|is| is == "first")
    });
    assert_eq!(count("completed", false) + first_in_shadow.count(), sum(|event| event.first));
}
