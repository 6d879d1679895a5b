//! The stages of one delivery: run, wait, answer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use http::StatusCode;
use tower::{Layer, ServiceExt};
use tower_dedup::adapter::MemoryAdapter;
use tower_dedup::adapter::maintenance::{KeyState, MaintenanceAdapter};
use tower_dedup::testing::{Fault, StoreCall};
use tower_dedup::{DedupAnswer, DedupLayer, OnUnavailable};

use support::log::Log;
use support::{
    Handler, answered, by_header, dedup_key, faulty, memory, request, result, send, spawn_send,
    state, until,
};

/// A failure of any kind frees the key, by one call.
#[tokio::test]
async fn delivery_after_a_failure_runs() {
    for failure in [500, 503, 400, 404, 302, 0, 1] {
        let handler = Handler::default().then(failure);
        let adapter = faulty(MemoryAdapter::new());
        let layer = DedupLayer::new(by_header(), Arc::clone(&adapter));
        let service = layer.layer(handler.fallible());
        let attempt = tokio::spawn(service.clone().oneshot(request("a"))).await;
        match failure {
            0 => assert!(attempt.unwrap_err().is_panic()),
            1 => assert_eq!(attempt.unwrap().unwrap_err(), "the handler was told to fail"),
            status => assert_eq!(attempt.unwrap().unwrap().status().as_u16(), status),
        }
        assert_eq!(state(&adapter, "a").await, Some(KeyState::Released), "{failure}");
        layer.handle().drain().await;
        assert_eq!(adapter.calls(StoreCall::Release), 1, "{failure}");

        let retry = service.clone().oneshot(request("a")).await.unwrap();
        assert_eq!(answered(&retry), (200, None), "{failure}");
        assert_eq!((handler.last().attempt(), handler.last().is_takeover()), (2, false));
        let third = service.oneshot(request("a")).await.unwrap();
        assert_eq!(result(&third), Some("duplicate"), "{failure}");
        assert_eq!(handler.runs(), 2);
    }
}

#[tokio::test]
async fn success_is_what_the_policy_says() {
    let handler = Handler::default().then(422).then(200);
    let service = DedupLayer::new(by_header(), memory())
        .success_when(|response| response.status == StatusCode::UNPROCESSABLE_ENTITY)
        .layer(handler.service());
    assert_eq!(send(&service, request("a")).await.status(), 422);
    assert_eq!(result(&send(&service, request("a")).await), Some("duplicate"));
    assert_eq!(send(&service, request("b")).await.status(), 200);
    assert_eq!(result(&send(&service, request("b")).await), None);
}

/// A delivery that arrives while the first one runs never gets 200 before the first has succeeded.
#[tokio::test(start_paused = true)]
async fn duplicate_of_a_run_that_fails_is_never_200() {
    for wait in [Duration::ZERO, Duration::from_millis(100)] {
        let handler = Handler::default().then(500);
        handler.hold();
        let service = DedupLayer::new(by_header(), memory()).wait(wait).layer(handler.service());
        let first = spawn_send(&service, request("a"));
        handler.running(1).await;
        for _ in 0..3 {
            let twin = send(&service, request("a")).await;
            assert_eq!(answered(&twin), (503, Some("in-flight")));
            assert_eq!(twin.headers()["retry-after"], "5");
        }
        handler.release();
        assert_eq!(first.await.unwrap(), 500);
        assert_eq!(handler.runs(), 1);
        assert_eq!(result(&send(&service, request("a")).await), None);
    }
}

/// A waiting duplicate gets 200 when the first delivery succeeds, and runs the handler when it
/// fails.
#[tokio::test]
async fn waiting_duplicate_is_answered_by_the_end_of_the_first_run() {
    for (first_status, runs, told, on_unavailable) in [
        (200, 1, Some("duplicate"), OnUnavailable::FailClosed),
        (200, 1, Some("duplicate"), OnUnavailable::FailOpen),
        (500, 2, None, OnUnavailable::FailClosed),
        (500, 2, None, OnUnavailable::FailOpen),
    ] {
        let handler = Handler::default().then(first_status);
        handler.hold();
        let layer = DedupLayer::new(by_header(), memory())
            .wait(Duration::from_secs(10))
            .on_unavailable(on_unavailable);
        let (handle, service) = (layer.handle(), layer.layer(handler.service()));
        let start = |id: &'static str| {
            let service = service.clone();
            tokio::spawn(async move { send(&service, request(id)).await })
        };
        let first = start("a");
        handler.running(1).await;
        let twin = start("a");
        until(|| handle.waiting() == 1).await;
        handler.release();
        let woken = Instant::now();
        assert_eq!(first.await.unwrap().status().as_u16(), first_status);
        let twin = twin.await.unwrap();
        assert_eq!(answered(&twin), (200, told));
        assert!(woken.elapsed() < Duration::from_secs(5), "woken, not timed out");
        assert_eq!(handler.runs(), runs);
        until(|| handle.waiting() == 0 && handle.running() == 0).await;
    }
}

/// The client disconnects while the handler runs. The handler finishes, and the retry gets 200.
#[tokio::test]
async fn client_that_disconnects_does_not_stop_its_handler() {
    let (adapter, handler) = (memory(), Handler::default());
    handler.hold();
    let layer = DedupLayer::new(by_header(), Arc::clone(&adapter));
    let (handle, service) = (layer.handle(), layer.layer(handler.service()));
    let client = tokio::spawn(service.clone().oneshot(request("a")));
    handler.running(1).await;
    client.abort();
    assert!(client.await.unwrap_err().is_cancelled());
    handler.release();
    handle.drain().await;
    assert_eq!(state(&adapter, "a").await, Some(KeyState::Complete));
    assert_eq!(result(&send(&service, request("a")).await), Some("duplicate"));
    assert_eq!(handler.runs(), 1);
}

/// More deliveries than `max_running`: the rest gets 503, whether or not the clients of the first are still there.
#[tokio::test]
async fn max_running_holds_even_if_clients_disconnect() {
    let handler = Handler::default();
    handler.hold();
    let layer = DedupLayer::new(by_header(), memory()).max_running(4);
    let (handle, service) = (layer.handle(), layer.layer(handler.service()));
    for (running, id) in (1..).zip(["a", "b", "c", "d"]) {
        let client = spawn_send(&service, request(id));
        handler.running(running).await;
        client.abort();
    }
    for _ in 0..20 {
        let refused = send(&service, request("e")).await;
        assert_eq!(answered(&refused), (503, Some("unavailable")));
        assert_eq!(refused.headers()["retry-after"], "30");
    }
    assert_eq!((handle.running(), handler.runs()), (4, 4));
    handler.release();
    handle.drain().await;
    assert_eq!(handle.running(), 0);
    // A delivery that was refused was not recorded: it runs now.
    assert_eq!(result(&send(&service, request("e")).await), None);
}

/// A runtime that shuts down drops the task: the client gets 503, and nothing panics. The runtime runs
/// no release, so the lease stays until it lapses.
#[test]
fn shutdown_of_the_runtime_is_503_and_leaves_the_lease() {
    let (adapter, handler) = (memory(), Handler::default());
    handler.hold();
    let service = DedupLayer::new(by_header(), Arc::clone(&adapter)).layer(handler.service());
    let servers = tokio::runtime::Runtime::new().unwrap();
    let mut future = Box::pin(service.oneshot(request("a")));
    servers.block_on(async {
        assert!(futures_util::poll!(future.as_mut()).is_pending());
        handler.running(1).await;
    });
    servers.shutdown_background();
    let client = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let answer = client.block_on(future).unwrap();
    assert_eq!(answered(&answer), (503, Some("unavailable")));
    let entry = client.block_on(adapter.get(&dedup_key("a"))).unwrap().unwrap();
    assert!(matches!(entry.state, KeyState::InFlight), "{:?}", entry.state);
}

#[tokio::test]
async fn on_arrival_event_runs_at_most_once() {
    for failure in [500, 0] {
        let handler = Handler::default().then(failure);
        let service = DedupLayer::on_arrival(by_header(), memory()).layer(handler.service());
        let first = spawn_send(&service, request("a"));
        let _ = first.await;
        assert_eq!(result(&send(&service, request("a")).await), Some("duplicate"));
        assert_eq!(handler.runs(), 1);
    }
    // A duplicate gets 200 while the first delivery still runs.
    let handler = Handler::default();
    handler.hold();
    let service = DedupLayer::on_arrival(by_header(), memory()).layer(handler.service());
    let first = spawn_send(&service, request("a"));
    handler.running(1).await;
    assert_eq!(result(&send(&service, request("a")).await), Some("duplicate"));
    handler.release();
    assert_eq!(first.await.unwrap(), 200);
}

/// A renewal after the completion finds no lease. No other delivery has it.
#[tokio::test(start_paused = true)]
async fn completion_without_a_reply_is_no_lost_lease() {
    let (log, _guard) = Log::of_this_thread();
    let store = faulty(MemoryAdapter::new());
    let layer = DedupLayer::new(by_header(), Arc::clone(&store)).lease(Duration::from_secs(3));
    let service = layer.layer(Handler::default().service());
    store.set(StoreCall::Complete, Fault::ExecuteAndFail);
    assert_eq!(send(&service, request("a")).await.status(), 200);
    tokio::time::sleep(Duration::from_secs(10)).await;
    store.set(StoreCall::Complete, Fault::None);
    layer.handle().drain().await;
    assert!(store.calls(StoreCall::Renew) > 0, "no renewal came after the completion");
    assert!(log.beginning("lease lost").is_empty(), "{:?}", log.beginning("lease lost"));
}

/// Another delivery runs the event, so a store that fails does not start it again.
#[tokio::test(start_paused = true)]
async fn waiting_delivery_is_not_run_because_the_store_fails() {
    for (on_unavailable, expected) in [
        (OnUnavailable::FailClosed, DedupAnswer::Unavailable),
        (OnUnavailable::FailOpen, DedupAnswer::InFlight),
    ] {
        let (store, handler) = (faulty(MemoryAdapter::new()), Handler::default());
        handler.hold();
        let wait = Duration::from_secs(10);
        let layer = DedupLayer::new(by_header(), Arc::clone(&store)).wait(wait);
        let layer = layer.on_unavailable(on_unavailable);
        let service = layer.layer(handler.service());
        let first = tokio::spawn(service.clone().oneshot(request("a")));
        handler.running(1).await;
        let waits = tokio::spawn(service.oneshot(request("a")));
        until(|| layer.handle().waiting() == 1).await;
        store.set(StoreCall::Claim, Fault::Fail);
        let answer = tokio::time::timeout(Duration::from_secs(60), waits).await;
        let answer = answer.expect("it runs beside the first").unwrap().unwrap();
        assert_eq!(answer.extensions().get(), Some(&expected));
        assert_eq!((answer.status(), handler.runs()), (StatusCode::SERVICE_UNAVAILABLE, 1));
        handler.release();
        assert_eq!(first.await.unwrap().unwrap().status(), 200);
    }
}

#[tokio::test(start_paused = true)]
async fn store_is_let_go_within_a_second_of_the_last_lease() {
    let (store, handler) = (memory(), Handler::default());
    let service = DedupLayer::new(by_header(), Arc::clone(&store)).layer(handler.service());
    assert_eq!(send(&service, request("a")).await.status(), 200);
    // A delivery that the handler keeps holds the store, too.
    drop((service, handler));
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(Arc::strong_count(&store), 1, "a task holds the store");
}
