//! A store hangs, fails, or loses replies. No event is lost, no key stays blocked, and the layer
//! recovers without a restart.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;
use tower::Layer;
use tower_dedup::adapter::contract::{ClaimReply, DedupAdapter};
use tower_dedup::adapter::maintenance::{KeyState, MaintenanceAdapter};
use tower_dedup::ledger::OnArrival;
use tower_dedup::testing::{Fault, StoreCall};
use tower_dedup::{DedupHandle, DedupLayer, OnUnavailable, StoreError, StoreErrorKind};

use crate::hooked::{AFTER, BEFORE, Hooked};
use support::log::Log;
use support::{
    FaultyStore, Handler, answered, by_header, dedup_key, faulty_memory as store, request, result,
    send, spawn_send, state, terms, until, until_async,
};

pub(crate) const SOON: Duration = Duration::from_millis(100);

fn lease(store: &FaultyStore) -> DedupLayer {
    DedupLayer::new(by_header(), Arc::clone(store)).store_timeout(SOON)
}

fn arrival(store: &FaultyStore) -> DedupLayer<OnArrival> {
    DedupLayer::on_arrival(by_header(), Arc::clone(store)).store_timeout(SOON)
}

/// A layer of either ledger with these settings and a short lease, around a handler: the service, and its handle.
macro_rules! either {
    ($on_arrival:expr, $store:expr, |$layer:ident| $set:expr, $handler:expr) => {
        either!($on_arrival, by_header(), $store, |$layer| $set, $handler)
    };
    ($on_arrival:expr, $key:expr, $store:expr, |$layer:ident| $set:expr, $handler:expr) => {{
        use tower::util::BoxCloneSyncService as Boxed;
        let (key, store, soon) = ($key, Arc::clone(&$store), crate::faults::SOON);
        if $on_arrival {
            let $layer = DedupLayer::on_arrival(key, store).store_timeout(soon);
            let layer = $set;
            (Boxed::new(layer.layer($handler.service())), layer.handle())
        } else {
            let $layer = DedupLayer::new(key, store).store_timeout(soon).lease(soon);
            let layer = $set;
            (Boxed::new(layer.layer($handler.service())), layer.handle())
        }
    }};
}
pub(crate) use either;

/// Waits for the writes in the background.
pub(crate) async fn drained(handle: &DedupHandle) {
    tokio::time::timeout(Duration::from_secs(20), handle.drain()).await.expect("drained");
}

async fn becomes_complete(store: &FaultyStore, id: &str) {
    until_async(async || state(store, id).await == Some(KeyState::Complete)).await;
}

/// The reply of a claim comes after its lease, in which another delivery has run the event.
#[tokio::test(start_paused = true)]
async fn run_never_begins_after_its_lease() {
    let ms = Duration::from_millis;
    let claims = AtomicUsize::new(0);
    let store = Hooked::default().on(AFTER, StoreCall::Claim, move |_, _| {
        let is_late = claims.fetch_add(1, Ordering::SeqCst) == 0;
        async move {
            tokio::time::sleep(if is_late { ms(1_800) } else { ms(1) }).await;
            Ok(())
        }
    });
    let handler = Handler::default();
    let layer = DedupLayer::new(by_header(), Arc::new(store)).lease(ms(1_000));
    let service = layer.layer(handler.service());
    let first = spawn_send(&service, request("a"));
    tokio::time::sleep(ms(1_200)).await;
    assert_eq!(answered(&send(&service, request("a")).await), (200, None));
    assert!(handler.last().is_takeover());
    assert_eq!(first.await.unwrap(), 503);
    assert_eq!(handler.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn store_that_fails_hangs_or_loses_its_reply_is_503_in_time() {
    for fault in [Fault::Fail, Fault::Hang, Fault::LoseReply] {
        let (store, handler) = (store(), Handler::default());
        let (lease, arrival) =
            (lease(&store).layer(handler.service()), arrival(&store).layer(handler.service()));
        store.set_all(fault);
        let started = Instant::now();
        let refused = send(&lease, request("a")).await;
        assert_eq!(answered(&refused), (503, Some("unavailable")));
        assert_eq!(refused.headers()["retry-after"], "30");
        let refused = send(&arrival, request("b")).await;
        assert_eq!(answered(&refused), (503, Some("unavailable")));
        assert!(started.elapsed() < Duration::from_secs(2), "{fault:?}");
        assert_eq!(handler.runs(), 0);
        // The store recovers, and the sender retries.
        store.set_all(Fault::None);
        assert_eq!(send(&lease, request("c")).await.status(), 200);
        assert_eq!(send(&arrival, request("d")).await.status(), 200);
    }
}

/// The store executed a claim, and its reply was lost. The layer releases the claim by its token, and the retry runs:
/// before the lease of 60 s lapses, and on arrival in place of a duplicate of a run that never happened.
#[tokio::test(start_paused = true)]
async fn claim_whose_reply_was_lost_does_not_block_its_key() {
    let store = store();
    for on_arrival in [false, true] {
        let handler = Handler::default();
        let (service, handle) = either!(on_arrival, store, |layer| layer, handler);
        let id = on_arrival.to_string();
        store.set(StoreCall::Claim, Fault::LoseReply);
        assert_eq!(send(&service, request(&id)).await.status(), 503);
        store.set(StoreCall::Claim, Fault::None);
        // The drain ends after the claim was released.
        drained(&handle).await;
        assert_eq!(answered(&send(&service, request(&id)).await), (200, None));
        assert_eq!(handler.runs(), 1);
        assert!(!handler.last().is_takeover(), "released, not lapsed");
    }
}

/// After success the answer is the handler's. The completion is repeated in the background. Until
/// it is stored, this process answers duplicates from memory.
#[tokio::test(start_paused = true)]
async fn success_is_answered_even_if_the_store_goes_away() {
    for fault in [Fault::Fail, Fault::Hang, Fault::LoseReply] {
        let (store, handler) = (store(), Handler::default());
        let layer = lease(&store).lease(Duration::from_millis(300));
        let (handle, service) = (layer.handle(), layer.layer(handler.service()));
        store.set(StoreCall::Complete, fault);
        let started = Instant::now();
        let first = send(&service, request("a")).await;
        assert_eq!(answered(&first), (200, None), "{fault:?}");
        assert!(started.elapsed() < Duration::from_secs(2), "one attempt only");
        for _ in 0..5 {
            // The five rounds take 750 ms. The lease of 300 ms is renewed until the completion is
            // stored.
            tokio::time::sleep(Duration::from_millis(150)).await;
            assert_eq!(result(&send(&service, request("a")).await), Some("duplicate"));
            let claimed = store.get_ref().claim(&dedup_key("a"), &terms()).await.unwrap();
            let is_first = matches!(claimed, ClaimReply::First { .. });
            assert!(!is_first, "{fault:?}: another process may not run it");
        }
        store.set(StoreCall::Complete, Fault::None);
        becomes_complete(&store, "a").await;
        drained(&handle).await;
        assert_eq!(handler.runs(), 1);
    }
}

/// On arrival the key is complete already: a later fault of the store changes nothing.
#[tokio::test(start_paused = true)]
async fn on_arrival_store_gets_no_call_after_the_handler() {
    for (status, fault) in [(200, Fault::Fail), (200, Fault::Hang), (500, Fault::Hang)] {
        let (store, handler) = (store(), Handler::default().then(status));
        handler.hold();
        let layer = arrival(&store);
        let (handle, service) = (layer.handle(), layer.layer(handler.service()));
        let first = spawn_send(&service, request("a"));
        handler.running(1).await;
        store.set_all(fault);
        handler.release();
        assert_eq!(first.await.unwrap().as_u16(), status, "{fault:?}");
        assert_eq!(handle.pending_writes(), 0);
        store.set_all(Fault::None);
        assert_eq!(result(&send(&service, request("a")).await), Some("duplicate"));
    }
}

#[tokio::test(start_paused = true)]
async fn fail_open_runs_unprotected_and_completes_when_the_store_is_back() {
    for fault in [Fault::Fail, Fault::Hang, Fault::LoseReply] {
        for on_arrival in [false, true] {
            let (store, handler) = (store(), Handler::default());
            let open = OnUnavailable::FailOpen;
            let layer = either!(on_arrival, store, |layer| layer.on_unavailable(open), handler);
            let (service, handle) = layer;
            store.set_all(fault);
            assert_eq!(send(&service, request("a")).await.status(), 200);
            assert!(handler.last().is_unprotected());
            store.set_all(Fault::None);
            drained(&handle).await;
            assert_eq!(state(&store, "a").await, Some(KeyState::Complete), "{fault:?}");
            assert_eq!(result(&send(&service, request("a")).await), Some("duplicate"));
        }
    }
}

/// The lease of a long handler is renewed, although some renewals fail.
#[tokio::test(start_paused = true)]
async fn handler_that_outlives_its_lease_keeps_it() {
    let (store, handler) = (store(), Handler::default());
    handler.hold();
    let layer = lease(&store).lease(Duration::from_millis(600)).wait(Duration::ZERO);
    let service = layer.layer(handler.service());
    let first = spawn_send(&service, request("a"));
    handler.running(1).await;
    let started = Instant::now();
    let mut round = 0;
    while started.elapsed() < Duration::from_secs(2) {
        // One renewal in three fails; the next attempt follows soon.
        store.set(StoreCall::Renew, if round % 3 == 0 { Fault::Fail } else { Fault::None });
        round += 1;
        let twin = tokio::time::timeout(SOON * 100, send(&service, request("a"))).await;
        assert_eq!(result(&twin.expect("the lease has lapsed")), Some("in-flight"));
        tokio::time::sleep(Duration::from_millis(25)).await;
    }
    assert!(!handler.last().lease_lost());
    handler.release();
    assert_eq!(first.await.unwrap(), 200);
    assert_eq!(handler.runs(), 1);
    assert!(store.calls(StoreCall::Renew) >= 4, "{}", store.calls(StoreCall::Renew));
}

/// A held row is no lost lease. It is asked again at a twelfth of the lease, because it may be free by then.
#[tokio::test(start_paused = true)]
async fn lease_of_a_held_row_is_not_lost_and_is_renewed_again_soon() {
    let renewals = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&renewals);
    let mut store = Hooked::default().on(BEFORE, StoreCall::Renew, move |_, _| {
        count.fetch_add(1, Ordering::Relaxed);
        async { Ok(()) }
    });
    store.is_held = true;
    let handler = Handler::default();
    handler.hold();
    let layer = DedupLayer::new(by_header(), store).lease(Duration::from_secs(12));
    let run = spawn_send(&layer.layer(handler.service()), request("a"));
    handler.running(1).await;
    tokio::time::sleep(Duration::from_millis(6_500)).await;
    // At 4, 5 and 6 s.
    assert_eq!(renewals.load(Ordering::Relaxed), 3);
    assert!(!handler.last().lease_lost());
    handler.release();
    assert_eq!(run.await.unwrap(), 200);
}

/// The renewal runs in another task, so a handler that blocks its thread does not lose its lease.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn handler_that_blocks_its_thread_keeps_its_lease() {
    let store = store();
    let (release, released) = std::sync::mpsc::channel();
    let released = Arc::new(Mutex::new(released));
    let blocking = tower::service_fn(move |_: http::Request<support::Body>| {
        let released = Arc::clone(&released);
        async move {
            released.lock().unwrap().recv().unwrap();
            Ok::<_, std::convert::Infallible>(http::Response::new(support::Body::default()))
        }
    });
    let service = lease(&store).lease(Duration::from_millis(900)).layer(blocking);
    let run = spawn_send(&service, request("a"));
    until(|| store.calls(StoreCall::Renew) >= 3).await;
    let twin = store.get_ref().claim(&dedup_key("a"), &terms()).await.unwrap();
    assert_eq!(twin, ClaimReply::InFlight);
    release.send(()).unwrap();
    assert_eq!(run.await.unwrap(), 200);
}

/// One layer serves two runtimes of one thread each. Nobody drives the first one, as while a handler blocks it.
#[test]
fn blocked_runtime_delays_no_renewal_of_another_runtime() {
    let (store, handler) = (store(), Handler::default());
    let service = lease(&store)
        // A third of it is longer than the sweeper sleeps.
        .lease(Duration::from_millis(900))
        .wait(Duration::ZERO)
        .layer(handler.service());
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (blocked, driven) = (runtime(), runtime());
    blocked.block_on(async { assert_eq!(send(&service, request("quick")).await.status(), 200) });
    handler.hold();
    driven.block_on(async {
        let run = spawn_send(&service, request("a"));
        until(|| store.calls(StoreCall::Renew) >= 3).await;
        assert_eq!(result(&send(&service, request("a")).await), Some("in-flight"));
        handler.release();
        assert_eq!(run.await.unwrap(), 200);
    });
    assert!(!handler.last().lease_lost());
    assert_eq!(handler.runs(), 2);
}

/// A handler can see that its lease is lost. Its success is stored nevertheless. Its failure
/// releases nothing.
#[tokio::test(start_paused = true)]
async fn lost_lease_is_reported_and_undoes_nothing() {
    for status in [200, 500] {
        let (store, handler) = (store(), Handler::default().then(status));
        handler.hold();
        let service = lease(&store).lease(Duration::from_millis(300)).layer(handler.service());
        // The store gets no renewals for a while, and another process takes over.
        store.set(StoreCall::Renew, Fault::Fail);
        let late = tokio::spawn(async move { send(&service, request("a")).await.status() });
        handler.running(1).await;
        store.get_ref().advance(Duration::from_secs(1));
        let keys = dedup_key("a");
        let taken = store.get_ref().claim(&keys, &terms()).await.unwrap();
        assert_eq!(taken, ClaimReply::first(2, true));
        assert!(!handler.last().lease_lost());
        store.set(StoreCall::Renew, Fault::None);
        let delivery = handler.last();
        until(|| delivery.lease_lost()).await;
        handler.release();
        assert_eq!(late.await.unwrap(), status);
        let kept = if status == 200 { KeyState::Complete } else { KeyState::InFlight };
        assert_eq!(state(&store, "a").await, Some(kept));
    }
}

/// A store that panics counts as a store that fails: no success is lost.
#[tokio::test(start_paused = true)]
async fn adapter_that_panics_is_a_store_that_fails() {
    let (store, handler) = (store(), Handler::default());
    let layer = lease(&store).lease(Duration::from_millis(300));
    let (handle, service) = (layer.handle(), layer.layer(handler.service()));
    store.set(StoreCall::Claim, Fault::Panic);
    assert_eq!(result(&send(&service, request("a")).await), Some("unavailable"));
    store.set(StoreCall::Claim, Fault::None);
    store.set(StoreCall::Renew, Fault::Panic);
    store.set(StoreCall::Complete, Fault::Panic);
    assert_eq!(result(&send(&service, request("a")).await), None);
    store.set(StoreCall::Renew, Fault::None);
    // This is after the first lease. A renewal comes after a third of it.
    let renewed = store.calls(StoreCall::Renew);
    until(|| store.calls(StoreCall::Renew) >= renewed + 4).await;
    assert_eq!(result(&send(&service, request("a")).await), Some("duplicate"));
    store.set(StoreCall::Complete, Fault::None);
    drained(&handle).await;
    assert_eq!(state(&store, "a").await, Some(KeyState::Complete));
    assert_eq!((handle.running(), handle.pending_writes(), handler.runs()), (0, 0, 1));
}

/// On arrival, the outcome of a claim is unknown, and its release is pending. A delivery of its
/// event is not answered as a duplicate, because the handler never ran.
#[tokio::test(start_paused = true)]
async fn retry_during_a_release_is_never_200() {
    let (store, handler) = (store(), Handler::default());
    let layer = arrival(&store).wait(Duration::ZERO);
    let (handle, service) = (layer.handle(), layer.layer(handler.service()));
    store.set(StoreCall::Claim, Fault::LoseReply);
    store.set(StoreCall::Release, Fault::Fail);
    assert_eq!(send(&service, request("a")).await.status(), 503);
    store.set(StoreCall::Claim, Fault::None);
    for _ in 0..5 {
        assert_eq!(result(&send(&service, request("a")).await), Some("in-flight"));
    }
    assert_eq!(handle.pending_writes(), 1);
    store.set(StoreCall::Release, Fault::None);
    drained(&handle).await;
    assert_eq!(result(&send(&service, request("a")).await), None);
    assert_eq!(handler.runs(), 1);
}

/// Sends one delivery to a layer of either ledger. Returns its status, and the layer's handle.
async fn delivered<A: DedupAdapter>(store: &Arc<A>, on_arrival: bool) -> (u16, DedupHandle) {
    let (service, handle) = either!(on_arrival, store, |layer| layer, Handler::default());
    (send(&service, request("a")).await.status().as_u16(), handle)
}

/// How many releases fail: the delivery's own one, and repetitions.
const FAILED_RELEASES: usize = 4;

/// The error may be that of a pooler, which is right the next time. Only a store that has no releases stays so.
#[tokio::test(start_paused = true)]
async fn release_is_repeated_after_every_error_but_unsupported() {
    for kind in [
        StoreErrorKind::Unavailable,
        StoreErrorKind::Timeout,
        StoreErrorKind::Refused,
        StoreErrorKind::Full,
        StoreErrorKind::Overloaded,
        StoreErrorKind::Corrupt,
        StoreErrorKind::Config,
        StoreErrorKind::Unsupported,
    ] {
        for on_arrival in [true, false] {
            let releases = Arc::new(AtomicUsize::new(0));
            let count = Arc::clone(&releases);
            let store = Hooked::default().on(BEFORE, StoreCall::Release, move |_, _| {
                let is_refused = count.fetch_add(1, Ordering::SeqCst) < FAILED_RELEASES;
                let refused = is_refused.then(|| StoreError::new(kind, "releasing keys"));
                async { refused.map_or(Ok(()), Err) }
            });
            let lost = async || Err(StoreError::new(StoreErrorKind::Unavailable, "claiming keys"));
            let store = Arc::new(store.on(AFTER, StoreCall::Claim, move |_, _| lost()));
            let (status, handle) = delivered(&store, on_arrival).await;
            assert_eq!(status, 503);
            handle.drain().await;
            let entry = store.store.get(&dedup_key("a")).await.unwrap();
            let state = entry.map(|entry| entry.state);
            let releases = releases.load(Ordering::SeqCst);
            if kind == StoreErrorKind::Unsupported {
                assert_eq!(releases, 1, "{kind:?} {on_arrival}");
            } else {
                // On arrival, a released key is new.
                let released = (!on_arrival).then_some(KeyState::Released);
                assert_eq!((releases, state), (FAILED_RELEASES + 1, released), "{kind:?}");
            }
        }
    }
}

/// Also under a lease that is short: the claim may reach the store late, and would hold the key for another lease.
#[tokio::test(start_paused = true)]
async fn release_is_repeated_for_ten_minutes() {
    for on_arrival in [true, false] {
        for (minutes, is_released) in [(9, true), (11, false)] {
            let store = store();
            store.set(StoreCall::Claim, Fault::LoseReply);
            store.set(StoreCall::Release, Fault::Fail);
            let (status, handle) = delivered(&store, on_arrival).await;
            assert_eq!(status, 503);
            tokio::time::sleep(Duration::from_secs(60 * minutes)).await;
            assert_eq!(handle.pending_writes(), usize::from(is_released), "{on_arrival}");
            let calls = store.calls(StoreCall::Release);
            store.set_all(Fault::None);
            handle.drain().await;
            assert_eq!(store.calls(StoreCall::Release) - calls, u64::from(is_released));
        }
    }
}

/// An unprotected run that fails frees its key, which the store has claimed.
#[tokio::test(start_paused = true)]
async fn unprotected_failure_leaves_no_claim_behind() {
    let (store, handler) = (store(), Handler::default().then(500));
    let layer = lease(&store).on_unavailable(OnUnavailable::FailOpen).wait(Duration::ZERO);
    let (handle, service) = (layer.handle(), layer.layer(handler.service()));
    store.set(StoreCall::Claim, Fault::LoseReply);
    assert_eq!(send(&service, request("a")).await.status(), 500);
    store.set(StoreCall::Claim, Fault::None);
    drained(&handle).await;
    assert_eq!(state(&store, "a").await, Some(KeyState::Released));
}

/// Settings at the ends of their ranges work.
#[tokio::test]
async fn extreme_settings_do_no_harm() {
    const LONGEST: Duration = Duration::from_secs(1_000 * 365 * 86_400);
    let (store, handler) = (store(), Handler::default());
    let extreme = DedupLayer::new(by_header(), Arc::clone(&store))
        .store_timeout(Duration::from_secs(30))
        .lease(LONGEST)
        .retention(LONGEST)
        .body_timeout(Duration::MAX)
        .body_limit(usize::MAX)
        .max_running(usize::MAX)
        .max_waiting(usize::MAX)
        .max_keys(usize::MAX)
        .retry_after_in_flight(Duration::MAX)
        .retry_after_unavailable(Duration::MAX)
        .wait(Duration::MAX);
    let service = extreme.layer(handler.service());
    store.set(StoreCall::Claim, Fault::Fail);
    assert_eq!(send(&service, request("a")).await.status(), 503);
    store.set(StoreCall::Claim, Fault::None);
    assert_eq!(send(&service, request("b")).await.status(), 200);
    assert_eq!(result(&send(&service, request("b")).await), Some("duplicate"));
    let least = DedupLayer::new(by_header(), Arc::clone(&store))
        .lease(Duration::from_millis(100))
        .retention(Duration::from_millis(100))
        .wait(Duration::ZERO);
    assert_eq!(send(&least.layer(handler.service()), request("c")).await.status(), 200);
    store.get_ref().advance(Duration::MAX);
    store.get_ref().advance(Duration::MAX);
    assert_eq!(send(&service, request("d")).await.status(), 200);
}

/// An outage causes many releases. They are bounded, and do not delay a completion.
#[tokio::test(start_paused = true)]
async fn pending_writes_are_bounded() {
    let (store, handler) = (store(), Handler::default());
    handler.hold();
    let layer = lease(&store).store_timeout(Duration::from_millis(20)).max_running(10_000);
    let (handle, service) = (layer.handle(), layer.layer(handler.service()));
    let success = spawn_send(&service, request("success"));
    handler.running(1).await;
    store.set_all(Fault::Hang);
    let deliveries = (0..6_000).map(|n| {
        let service = service.clone();
        tokio::spawn(async move { send(&service, request(&n.to_string())).await.status() })
    });
    for delivery in deliveries.collect::<Vec<_>>() {
        assert_eq!(delivery.await.unwrap(), 503);
    }
    let tasks = tokio::runtime::Handle::current().metrics().num_alive_tasks();
    assert!(tasks <= 4_200, "{tasks}");
    assert_eq!(handle.running(), 1);
    handler.release();
    assert_eq!(success.await.unwrap(), 200);
    store.set_all(Fault::None);
    becomes_complete(&store, "success").await;
    assert_eq!(send(&service, request("a")).await.status(), 200);
}

/// *Completed* about an event that never ran would end the search for it.
#[tokio::test(start_paused = true)]
async fn background_write_is_recorded_as_what_it_did() {
    use StoreCall::{Claim, Complete, Release};
    let (completed, released) = ("completed in the background", "released in the background");
    for (is_arrival, handled, call, fault, status, message, operation) in [
        (false, 200, Complete, Fault::Fail, 200, completed, "complete"),
        (false, 500, Release, Fault::Fail, 500, released, "release"),
        (false, 200, Claim, Fault::LoseReply, 503, released, "release"),
        (true, 200, Claim, Fault::LoseReply, 503, released, "release"),
        (true, 200, Claim, Fault::Fail, 200, "claimed in the background", "claim"),
    ] {
        let (log, _guard) = Log::of_this_thread();
        let (store, handler) = (store(), Handler::default().then(handled));
        store.set(call, fault);
        let opens = is_arrival && fault == Fault::Fail;
        let policy = if opens { OnUnavailable::FailOpen } else { OnUnavailable::FailClosed };
        let layer = either!(is_arrival, store, |layer| layer.on_unavailable(policy), handler);
        let (service, handle) = layer;
        assert_eq!(send(&service, request("a")).await.status(), status);
        store.set_all(Fault::None);
        handle.drain().await;
        let records = log.beginning("");
        let records = records.iter().filter(|record| record["message"].contains("background"));
        let records: Vec<_> =
            records.map(|record| (&*record["message"], &*record["operation"])).collect();
        assert_eq!(records, [(message, operation)]);
    }
}

/// The task that renews the leases ends with the last of them.
#[tokio::test(start_paused = true)]
async fn no_task_is_left_when_no_delivery_runs() {
    let service = DedupLayer::new(by_header(), store()).layer(Handler::default().service());
    send(&service, request("a")).await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(tokio::runtime::Handle::current().metrics().num_alive_tasks(), 0);
}
