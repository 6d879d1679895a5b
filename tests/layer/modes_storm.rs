//! Modes under load: shadow and off change no response, and a switch while deliveries run loses and doubles nothing.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::join_all;
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
use crate::support::{Body, Faulty, by_header, dedup_key, faulty, request, result, send};

/// The status, the headers and the body, or the text of the error or panic.
type Got = Result<(u16, HeaderMap, Vec<u8>), String>;

/// Returns requests for each behaviour of the handler under each key: twice under a key of its own, with one payload
/// and with another, under the key of all others, and without a key that counts.
fn requests() -> Vec<Request<Body>> {
    let ways = ["200", "slow", "204", "404", "500", "panic", "error", "complete", "release"];
    let mut requests = Vec::new();
    for way in ways {
        for (ids, payload) in [
            (&[way][..], "one"),
            (&[way], "one"),
            (&[way], "two"),
            (&["shared"], "one"),
            (&["get"], "one"),
            (&[], "one"),
            (&[""], "one"),
            (&[way, "another"], "one"),
        ] {
            let mut request = Request::post("/hook").header("x-do", way);
            for id in ids {
                let key = format!("\"{id}\"");
                request = request.header("webhook-id", *id).header("idempotency-key", key);
            }
            let mut request = request.body(Full::from(payload)).unwrap();
            if ids == ["get"] {
                *request.method_mut() = Method::GET;
            }
            requests.push(request);
        }
    }
    requests
}

/// Does what the request says.
async fn handle(request: Request<Body>, runs: Arc<AtomicUsize>) -> Result<Response<Body>, String> {
    runs.fetch_add(1, Ordering::SeqCst);
    let way = request.headers()["x-do"].to_str().unwrap();
    let mut response = Response::new(Full::from(format!("handled {way}")));
    let (status, disposition) = match way {
        "panic" => panic!("it panics"),
        "error" => return Err("it fails".to_owned()),
        "slow" => {
            tokio::time::sleep(Duration::from_millis(50)).await;
            (200, None)
        }
        "complete" => (500, Some(Disposition::Complete)),
        "release" => (200, Some(Disposition::Release)),
        status => (status.parse().unwrap(), None),
    };
    *response.status_mut() = status.try_into().unwrap();
    if let Some(disposition) = disposition {
        response.extensions_mut().insert(disposition);
    }
    Ok(response)
}

/// Delivers all requests at once.
async fn deliver_all<S, B>(service: &S) -> Vec<Got>
where
    S: Service<Request<Body>, Response = Response<B>, Error = String> + Clone,
    B: http_body::Body<Error: std::fmt::Debug>,
{
    let deliver = async |request| {
        let returned = AssertUnwindSafe(service.clone().oneshot(request)).catch_unwind().await;
        let response =
            returned.map_err(|panic| format!("{:?}", panic.downcast_ref::<&str>()))??;
        assert!(response.extensions().get::<DedupAnswer>().is_none());
        let (head, body) = response.into_parts();
        let body = body.collect().await.unwrap().to_bytes().to_vec();
        Ok((head.status.as_u16(), head.headers, body))
    };
    join_all(requests().into_iter().map(deliver)).await
}

/// Each policy of the layer would answer in the handler's place, if the layer enforced.
async fn changes_no_response<L: Ledger>(layer: DedupLayer<L>, store: &Faulty<MemoryAdapter>) {
    let runs = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&runs);
    let handler = tower::service_fn(move |request| handle(request, Arc::clone(&count)));
    let expected = deliver_all(&handler).await;

    let (log, _guard) = Log::of_this_thread();
    let layer = layer
        .max_running(16)
        .max_waiting(1)
        .handler_timeout(Duration::from_millis(1))
        .on_in_flight(OnInFlight::Reject)
        .compare_payload(key::body_digest(), OnMismatch::Refuse)
        .store_timeout(Duration::from_millis(30));
    let (handle, service) = (layer.handle(), layer.layer(handler));
    handle.set_mode(Mode::Off);
    assert_eq!(deliver_all(&service).await, expected);
    assert_eq!((store.calls(StoreCall::Claim), log.all("delivery").len()), (0, 0));

    handle.set_mode(Mode::Shadow);
    use Fault::{ExecuteAndFail, Fail, Hang, LoseReply, Panic};
    // The events, their retries, and retries while the writes of the faults are pending.
    const N: Fault = Fault::None;
    for fault in [N, N, Fail, Hang, LoseReply, ExecuteAndFail, Panic, N] {
        store.set_all(fault);
        assert_eq!(deliver_all(&service).await, expected, "{fault:?}");
    }
    store.set_all(Fault::None);
    tokio::time::timeout(Duration::from_secs(3_600), handle.drain()).await.expect("drained");
    assert_eq!((handle.running(), handle.waiting(), handle.pending_writes()), (0, 0, 0));
    assert_eq!(runs.load(Ordering::SeqCst), 10 * requests().len(), "each request ran once");
    let records = log.all("delivery");
    let verdicts: BTreeSet<_> =
        records.iter().filter_map(|record| record.get("verdict")).map(String::as_str).collect();
    let all =
        ["duplicate", "first", "in_flight", "mismatch", "no_key", "overloaded", "unavailable"];
    assert_eq!(verdicts, all.into());
}

#[tokio::test(start_paused = true)]
async fn shadow_and_off_change_no_response() {
    let store = || faulty(MemoryAdapter::new());
    let lease = store();
    let layer = DedupLayer::new(by_header(), Arc::clone(&lease)).replay(Replay::new());
    changes_no_response(layer, &lease).await;
    let open = store();
    let layer = DedupLayer::new(by_header(), Arc::clone(&open));
    changes_no_response(layer.on_unavailable(OnUnavailable::FailOpen), &open).await;
    let arrival = store();
    let layer = DedupLayer::on_arrival(by_header(), Arc::clone(&arrival));
    changes_no_response(layer, &arrival).await;
    let keyed = store();
    let scope = key::from_fn(|_| Ok(Some("alice".to_owned())));
    changes_no_response(DedupLayer::idempotency_key(scope, Arc::clone(&keyed)), &keyed).await;
}

/// The runs of one event.
#[derive(Debug, Default, Clone)]
struct EventRuns {
    all: usize,
    /// Runs that ended in 200, with the verdict `first`.
    first: usize,
    /// Other runs that ended in 200.
    other: usize,
}

/// Two senders deliver each event until it has two 2xx. A third of the runs fail.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn switch_under_load_loses_and_doubles_nothing() {
    const EVENTS: usize = 3_000;
    let store = Arc::new(MemoryAdapter::new());
    let runs = Arc::new(Mutex::new(vec![EventRuns::default(); EVENTS]));
    let noted = Arc::clone(&runs);
    let handler = tower::service_fn(move |request: Request<Body>| {
        let runs = Arc::clone(&noted);
        async move {
            let delivery = request.extensions().get::<Delivery>().unwrap();
            let event: usize = delivery.id().parse().unwrap();
            match rand::random_range(0..3) {
                0 => {}
                1 => tokio::task::yield_now().await,
                _ => tokio::time::sleep(Duration::from_millis(1)).await,
            }
            let is_success = rand::random_range(0..3) > 0;
            let mut runs = runs.lock().unwrap();
            let (runs, verdict) = (&mut runs[event], delivery.verdict());
            runs.all += 1;
            runs.first += usize::from(is_success && verdict == Verdict::First);
            runs.other += usize::from(is_success && verdict != Verdict::First);
            let mut response = Response::new(Body::default());
            *response.status_mut() = if is_success { 200 } else { 500 }.try_into().unwrap();
            Ok::<_, Infallible>(response)
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
    let senders = (0..64).map(|sender| {
        let service = service.clone();
        tokio::spawn(async move {
            let (mut deliveries, mut duplicates) = (0, 0);
            for event in (sender / 2..EVENTS).step_by(32) {
                let mut acknowledged = 0;
                while acknowledged < 2 {
                    let response = send(&service, request(&event.to_string())).await;
                    deliveries += 1;
                    duplicates += usize::from(result(&response) == Some("duplicate"));
                    acknowledged += usize::from(response.status() == 200);
                }
            }
            (deliveries, duplicates)
        })
    });
    let sent: Vec<_> = join_all(senders).await.into_iter().map(Result::unwrap).collect();
    ended.store(true, Ordering::Relaxed);
    let switches = switch.await.unwrap();
    assert!(switches > 20, "{switches} switches");
    handle.drain().await;
    assert_eq!((handle.running(), handle.waiting(), handle.pending_writes()), (0, 0, 0));

    let (mut all_runs, mut firsts) = (0, 0);
    let runs = runs.lock().unwrap().clone();
    for (id, event) in runs.into_iter().enumerate() {
        // A run without a claim is the choice of shadow and off. No event has two claimed successes.
        assert!(event.first <= 1, "{id} was doubled: {event:?}");
        assert!(event.first + event.other >= 1, "{id} was lost: {event:?}");
        let entry = store.get(&dedup_key(&id.to_string())).await.unwrap();
        let is_complete = match entry.map(|entry| entry.state) {
            Some(KeyState::Complete) => true,
            Some(KeyState::InFlight) => panic!("{id} was left unsettled"),
            _ => false,
        };
        assert_eq!(is_complete, event.first == 1, "{id}: {event:?}");
        all_runs += event.all;
        firsts += event.first;
    }
    let deliveries: usize = sent.iter().map(|(deliveries, _)| deliveries).sum();
    let duplicates: usize = sent.iter().map(|(_, duplicates)| duplicates).sum();
    assert_eq!(all_runs + duplicates, deliveries, "each delivery ran or was a duplicate");
    assert!(firsts > 0 && duplicates > 0 && firsts < deliveries);
}
