//! Deliveries that wait for an event in flight: how many, which of them claims, and what they leave to new events.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use http::{Request, Response};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tower::{Layer, Service, ServiceExt};
use tower_dedup::adapter::MemoryAdapter;
use tower_dedup::adapter::contract::DedupAdapter;
use tower_dedup::ledger::Ledger;
use tower_dedup::testing::StoreCall;
use tower_dedup::{DedupLayer, ResponseBody};

use crate::hooked::{BEFORE, Hooked};
use crate::lists::words;
use support::ledgers::Inner;
use support::log::Log;
use support::words::by_word;
use support::{
    Body, Handler, answered, by_header, dedup_key, faulty, memory, request, result, send, terms,
    until,
};

const MINUTE: Duration = Duration::from_secs(60);

/// The status, and the result if the layer has answered.
type Answer = (u16, Option<String>);

fn answer(status: u16, result: &str) -> Answer {
    (status, Some(result.to_owned()))
}

fn deliver<S, R>(service: &S, request: Request<R>) -> JoinHandle<Answer>
where
    S: Service<Request<R>, Response = Response<ResponseBody<Body>>, Error = Infallible>,
    S: Clone + Send + 'static,
    S::Future: Send,
    R: Send + 'static,
{
    let sent = service.clone().oneshot(request);
    tokio::spawn(async move {
        let response = sent.await.unwrap_or_else(|never| match never {});
        (response.status().as_u16(), result(&response).map(str::to_owned))
    })
}

async fn answers(deliveries: Vec<JoinHandle<Answer>>) -> Vec<Answer> {
    join_all(deliveries).await.into_iter().map(Result::unwrap).collect()
}

fn times(answers: &[Answer], of: &Answer) -> usize {
    answers.iter().filter(|answer| *answer == of).count()
}

/// A handler that `held` runs for the events whose id begins with `slow`, and that ends at once for others.
fn slow_or_quick(held: &Handler) -> impl Inner {
    let slow = held.service::<Body>();
    tower::service_fn(move |request: Request<Body>| {
        let is_slow = request.headers()["webhook-id"].as_bytes().starts_with(b"slow");
        let slow = slow.clone();
        async move { if is_slow { slow.oneshot(request).await } else { Ok(Response::default()) } }
    })
}

/// At most eight deliveries wait for one event, and none of them has a permit. The others are in flight, and not
/// overloaded. Another event has its own eight.
#[tokio::test]
async fn waiting_duplicates_of_one_event_leave_new_events_their_places() {
    let (log, _guard) = Log::of_this_thread();
    let (held, layer) = (Handler::default(), DedupLayer::new(by_header(), memory()));
    held.hold();
    let layer = layer.max_running(3).store_timeout(MINUTE / 2).wait(MINUTE);
    let (handle, service) = (layer.handle(), layer.layer(slow_or_quick(&held)));
    let first = deliver(&service, request("slow"));
    held.running(1).await;
    let duplicates: Vec<_> = (0..256).map(|_| deliver(&service, request("slow"))).collect();
    until(|| duplicates.iter().filter(|it| it.is_finished()).count() == 248).await;
    assert!(log.all("delivery").iter().all(|record| record["outcome"] == "in_flight"));
    assert_eq!((handle.running(), handle.waiting()), (1, 8));
    let other = [(); 2].map(|()| deliver(&service, request("slow too")));
    until(|| handle.waiting() == 9).await;
    for new in 0..24 {
        assert_eq!(answered(&send(&service, request(&new.to_string())).await), (200, None));
    }
    held.release();
    assert_eq!(first.await.unwrap(), (200, None));
    let duplicates = answers(duplicates).await;
    assert_eq!(times(&duplicates, &answer(503, "in-flight")), 248);
    assert_eq!(times(&duplicates, &answer(200, "duplicate")), 8);
    assert!(answers(other.into()).await.iter().all(|(status, _)| *status == 200));
    assert_eq!(held.runs(), 2);
}

/// Duplicates of many events that run in another process claim again and again, while no handler runs here. A claim takes
/// 50 ms.
#[tokio::test(start_paused = true)]
async fn waiting_duplicates_of_many_events_refuse_no_new_event() {
    for running in [1, 4, 32] {
        refuses_no_new_event(running, |store| DedupLayer::new(by_header(), store)).await;
        refuses_no_new_event(running, |store| DedupLayer::on_arrival(by_header(), store)).await;
    }
}

async fn refuses_no_new_event<L: Ledger>(
    running: usize,
    layer: impl FnOnce(Arc<Hooked>) -> DedupLayer<L>,
) {
    let is_slow = Arc::new(AtomicBool::new(false));
    let slow = Arc::clone(&is_slow);
    let store = Arc::new(Hooked::default().on(BEFORE, StoreCall::Claim, move |_, _| {
        let pause = Duration::from_millis(if slow.load(Ordering::SeqCst) { 50 } else { 0 });
        async move {
            tokio::time::sleep(pause).await;
            Ok(())
        }
    }));
    let (elsewhere, handler) = (terms(), Handler::default());
    let layer = layer(Arc::clone(&store)).max_running(running);
    let layer = layer.wait(MINUTE / 2);
    let (handle, service) = (layer.handle(), layer.layer(handler.service()));
    let mut duplicates = Vec::new();
    let ids: Vec<_> = (0..250).map(|number| format!("elsewhere {number}")).collect();
    for id in &ids {
        store.store.claim(&dedup_key(id), &elsewhere).await.unwrap();
        duplicates.push(deliver(&service, request(id)));
        until(|| handle.waiting() == duplicates.len()).await;
    }
    is_slow.store(true, Ordering::SeqCst);
    for new in 0..100 {
        let response = send(&service, request(&format!("new {new}"))).await;
        assert_eq!(answered(&response), (200, None), "{new}, max_running {running}");
    }
    // As many at once as may run.
    for round in 0..8 {
        let new = |number| deliver(&service, request(&format!("new {round} {number}")));
        let answers = answers((0..running).map(new).collect()).await;
        assert_eq!(times(&answers, &(200, None)), running, "{answers:?}");
    }
    assert_eq!((handler.runs(), handle.waiting()), (100 + 8 * running, ids.len()));
    is_slow.store(false, Ordering::SeqCst);
    for id in &ids {
        store.store.complete(&dedup_key(id), &elsewhere).await.unwrap();
    }
    let answers = answers(duplicates).await;
    assert_eq!(times(&answers, &answer(200, "duplicate")), ids.len());
}

/// A waiting delivery that claims again gives its permit back soon; a handler does not.
#[tokio::test(start_paused = true)]
async fn new_event_is_refused_at_once_while_handlers_have_all_permits() {
    let (store, held) = (memory(), Handler::default());
    held.hold();
    let layer = DedupLayer::new(by_header(), Arc::clone(&store)).max_running(2);
    let layer = layer.wait(MINUTE);
    let (handle, service) = (layer.handle(), layer.layer(held.service()));
    store.claim(&dedup_key("elsewhere"), &terms()).await.unwrap();
    let waits = deliver(&service, request("elsewhere"));
    until(|| handle.waiting() == 1).await;
    let runs = ["a", "b"].map(|id| deliver(&service, request(id)));
    held.running(2).await;
    for new in 0..50 {
        let start = Instant::now();
        let response = send(&service, request(&new.to_string())).await;
        assert_eq!(answered(&response), (503, Some("unavailable")));
        assert_eq!(start.elapsed(), Duration::ZERO);
        tokio::time::sleep(Duration::from_millis(17)).await;
    }
    held.release();
    assert!(answers(runs.into()).await.iter().all(|(status, _)| *status == 200));
    waits.abort();
}

/// Each delivery claims once when it comes. After that, one of those that wait claims for all.
#[tokio::test(start_paused = true)]
async fn waiters_of_one_event_claim_as_often_as_one_waiter() {
    let mut claims = Vec::new();
    for copies in [1, 40] {
        let (store, held) = (faulty(MemoryAdapter::new()), Handler::default());
        held.hold();
        let service = DedupLayer::new(by_header(), Arc::clone(&store)).layer(held.service());
        let first = deliver(&service, request("a"));
        held.running(1).await;
        let copies = (0..copies).map(|_| deliver(&service, request("a"))).collect::<Vec<_>>();
        let of_arrivals = 1 + copies.len() as u64;
        let answers = answers(copies).await;
        assert_eq!(times(&answers, &answer(503, "in-flight")), answers.len());
        claims.push(store.calls(StoreCall::Claim) - of_arrivals);
        held.release();
        assert_eq!(first.await.unwrap(), (200, None));
    }
    // The pauses are random.
    assert!(claims.iter().all(|claims| (10..=21).contains(claims)), "{claims:?}");
}

/// The event runs in another process. The delivery that claims for both gives up first.
#[tokio::test(start_paused = true)]
async fn waiter_with_the_longer_bound_goes_on_when_the_other_gives_up() {
    let (store, held) = (memory(), Handler::default());
    held.hold();
    let layer = || DedupLayer::new(by_header(), Arc::clone(&store));
    let (here, there) = (layer().layer(held.service()), layer());
    let waits = |bound| there.clone().wait(bound).layer(held.service());
    let first = deliver(&here, request("a"));
    held.running(1).await;
    let short = deliver(&waits(Duration::from_millis(300)), request("a"));
    until(|| there.handle().waiting() == 1).await;
    let long = deliver(&waits(MINUTE), request("a"));
    until(|| there.handle().waiting() == 2).await;
    assert_eq!(short.await.unwrap(), answer(503, "in-flight"));
    held.release();
    assert_eq!(first.await.unwrap(), (200, None));
    assert_eq!(long.await.unwrap(), answer(200, "duplicate"));
}

/// The delivery that claims for all runs the event, and leaves the turn to the next.
#[tokio::test(start_paused = true)]
async fn waiters_wait_on_while_one_of_them_runs_the_event_that_failed() {
    let (store, handler) = (faulty(MemoryAdapter::new()), Handler::default().then(500));
    handler.hold();
    let layer = DedupLayer::new(by_header(), Arc::clone(&store)).wait(MINUTE);
    let (handle, service) = (layer.handle(), layer.layer(handler.service()));
    let first = deliver(&service, request("a"));
    handler.running(1).await;
    let waiters: Vec<_> = (0..8).map(|_| deliver(&service, request("a"))).collect();
    until(|| handle.waiting() == 8).await;
    let claims = store.calls(StoreCall::Claim);
    handler.release();
    assert_eq!(first.await.unwrap(), (500, None));
    let answers = answers(waiters).await;
    assert_eq!((times(&answers, &(200, None)), times(&answers, &answer(200, "duplicate"))), (1, 7));
    assert_eq!(handler.runs(), 2);
    assert!(store.calls(StoreCall::Claim) - claims <= 8 + 2, "one claim each, and few between");
    handle.drain().await;
    assert_eq!((handle.running(), handle.waiting()), (0, 0));
}

/// Two lists begin with the same event, and wait for different ones.
#[tokio::test(start_paused = true)]
async fn lists_that_wait_for_different_events_do_not_wait_for_each_other() {
    let (store, handler) = (memory(), Handler::default());
    let elsewhere = terms();
    for id in ["a", "b", "c"] {
        store.claim(&dedup_key(id), &elsewhere).await.unwrap();
    }
    store.complete(&dedup_key("a"), &elsewhere).await.unwrap();
    let layer = DedupLayer::new(by_word(), Arc::clone(&store)).wait(MINUTE / 2);
    let (handle, service) = (layer.handle(), layer.layer(handler.service()));
    let waits = deliver(&service, words("a b"));
    until(|| handle.waiting() == 1).await;
    let ends = deliver(&service, words("a c"));
    until(|| handle.waiting() == 2).await;
    store.complete(&dedup_key("c"), &elsewhere).await.unwrap();
    assert_eq!(ends.await.unwrap(), answer(200, "duplicate"));
    assert_eq!(handle.waiting(), 1);
    store.complete(&dedup_key("b"), &elsewhere).await.unwrap();
    assert_eq!(waits.await.unwrap(), answer(200, "duplicate"));
    assert_eq!(handler.runs(), 0);
}
