//! Modes under load: shadow and off change no response, and a switch while deliveries run loses and doubles nothing.

use std::collections::BTreeSet;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::join_all;
use http::{HeaderMap, Method, Request, Response};
use http_body_util::{BodyExt, Full};
use tower::{Layer, Service, ServiceExt};
use tower_dedup::adapter::MemoryAdapter;
use tower_dedup::ledger::Ledger;
use tower_dedup::testing::{Fault, StoreCall};
use tower_dedup::{
    DedupAnswer, DedupLayer, Disposition, Mode, OnInFlight, OnMismatch, OnUnavailable, Replay, key,
};

use crate::support::log::Log;
use crate::support::{Body, Faulty, by_header, faulty};

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
