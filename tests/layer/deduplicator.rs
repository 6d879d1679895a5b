//! `Deduplicator`: keys after a dropped future, and leases of several runtimes.

use std::convert::Infallible;
use std::future::{pending, ready};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use tower_dedup::adapter::contract::{CallTerms, ClaimReply, DedupAdapter, Fetch, Token};
use tower_dedup::adapter::maintenance::{KeyState, MaintenanceAdapter};
use tower_dedup::key::Event;
use tower_dedup::ledger::Ledger;
use tower_dedup::testing::{Fault, StoreCall};
use tower_dedup::{Deduplicator, Delivery, RunError, RunOutcome, StoreError, StoreErrorKind};

use crate::hooked::{BEFORE, Hooked, NO_STORED_DATA};
use crate::metrics::work;
use support::log::Log;
use support::{FaultyStore, dedup_key, faulty_memory as store, polled, until};

const HOUR: Duration = Duration::from_secs(3_600);

fn worker(store: &FaultyStore) -> Deduplicator {
    Deduplicator::new(Arc::clone(store))
}

/// Waits for the ledger's writes in the background.
async fn drained<L: Ledger>(worker: &Deduplicator<L>) {
    tokio::time::timeout(Duration::from_secs(30), worker.drain()).await.expect("drained");
}

async fn delivery_of(worker: &Deduplicator<impl Ledger>, id: &str) -> RunOutcome<Delivery> {
    let key = dedup_key(id);
    worker.run(&key, async |delivery| Ok::<_, ()>(delivery)).await.unwrap()
}

#[track_caller]
fn assert_runs(ran: &RunOutcome<Delivery>) {
    let RunOutcome::First(delivery) = ran else { panic!("{ran:?}") };
    assert!(!delivery.is_takeover(), "released, not lapsed");
}

#[tokio::test(start_paused = true)]
async fn deduplicator_dropped_at_any_moment_completes_or_frees_its_key() {
    use StoreCall::{Claim, Complete, Release};
    for (call, fault, polls, way, completes) in [
        (Claim, Fault::LoseReply, 1, "", false),
        (Claim, Fault::None, 2, "hangs", false),
        (Complete, Fault::Hang, 2, "", true),
        (Complete, Fault::LoseReply, 2, "", true),
        (Release, Fault::Hang, 2, "fails", false),
    ] {
        let (store, key) = (store(), dedup_key("a"));
        let worker = worker(&store);
        store.set(call, fault);
        let run = worker.run(&key, async |_| work(way).await);
        assert!(polled(run, polls, false).await.is_none(), "{call:?} {fault:?}");
        assert_eq!(store.calls(call), 1);
        if completes {
            assert!(matches!(delivery_of(&worker, "a").await, RunOutcome::Duplicate(_)));
        }
        store.set(call, Fault::None);
        drained(&worker).await;
        let state = store.get(&key).await.unwrap().unwrap().state;
        assert_eq!(matches!(state, KeyState::Complete), completes, "{call:?} {fault:?}");
        if !completes {
            assert_runs(&delivery_of(&worker, "a").await);
        }
    }
}

/// A run whose handler never ends.
type Endless = BoxFuture<'static, ()>;

async fn begun(worker: &Deduplicator, event: impl Into<Event>) -> Endless {
    let (worker, event) = (worker.clone(), event.into());
    let mut run: Endless = Box::pin(async move {
        let _ = worker.run(event, async |_| pending::<Result<(), ()>>().await).await;
    });
    // The first claim of a ledger yields once.
    for _ in 0..2 {
        assert!(futures_util::poll!(run.as_mut()).is_pending());
    }
    run
}

#[tokio::test]
async fn run_that_is_dropped_releases_all_identities() {
    let store = store();
    let worker = worker(&store);
    let twin = Event::new(dedup_key("a")).with_alias(dedup_key("a2"));
    drop(begun(&worker, twin).await);
    drained(&worker).await;
    for id in ["a", "a2"] {
        let entry = store.get(&dedup_key(id)).await.unwrap();
        assert_eq!(entry.map(|entry| entry.state), Some(KeyState::Released), "{id}");
    }
}

/// The record names the error.
#[tokio::test(start_paused = true)]
async fn release_that_never_succeeds_is_reported() {
    let store = store();
    store.set(StoreCall::Release, Fault::ExecuteAndFail);
    let lease = worker(&store);
    drop(begun(&lease, &dedup_key("a")).await);
    gives_up(&lease).await;
    let on_arrival = Deduplicator::on_arrival(Arc::clone(&store));
    store.set(StoreCall::Claim, Fault::LoseReply);
    assert!(polled(delivery_of(&on_arrival, "b"), 1, false).await.is_none());
    gives_up(&on_arrival).await;
}

async fn gives_up(worker: &Deduplicator<impl Ledger>) {
    let (log, _guard) = Log::of_this_thread();
    assert_eq!(worker.pending_writes(), 1);
    worker.drain().await;
    assert_eq!(worker.pending_writes(), 0);
    let record = log.last("gave up in the background");
    assert_eq!(record["level"], "ERROR");
    assert!(record["error"].starts_with("calling a faulty adapter"), "{record:?}");
}

#[tokio::test]
async fn run_dropped_outside_a_runtime_is_reported_and_does_not_panic() {
    let run = begun(&worker(&store()), &dedup_key("a")).await;
    let reported = std::thread::spawn(move || {
        let (log, _guard) = Log::of_this_thread();
        drop(run);
        log.beginning("gave up at once")
    });
    let reported = reported.join().unwrap();
    assert!(!reported.is_empty() && reported.iter().all(|record| record["level"] == "ERROR"));
}

/// Only the key that is being released is in flight meanwhile.
#[tokio::test(start_paused = true)]
async fn on_arrival_run_dropped_while_it_claims_holds_no_other_key_and_frees_its_own() {
    let store = store();
    let worker = Deduplicator::on_arrival(Arc::clone(&store));
    assert!(matches!(delivery_of(&worker, "b").await, RunOutcome::First(_)));
    store.set(StoreCall::Release, Fault::Hang);
    store.set(StoreCall::Claim, Fault::LoseReply);
    assert!(polled(delivery_of(&worker, "a"), 1, false).await.is_none());
    store.set(StoreCall::Claim, Fault::None);
    assert!(matches!(delivery_of(&worker, "a").await, RunOutcome::InFlight));
    let other = delivery_of(&worker, "b").await;
    assert!(matches!(other, RunOutcome::Duplicate { .. }), "{other:?}");
    store.set(StoreCall::Release, Fault::None);
    drained(&worker).await;
    // Otherwise this would be a duplicate of a run that never happened.
    assert_runs(&delivery_of(&worker, "a").await);
}

/// A subscriber is the user's code. It may end a delivery while it handles the record of a lost
/// lease.
#[test]
fn subscriber_that_drops_a_run_when_a_lease_is_lost_does_not_deadlock() {
    let (ended, waits) = mpsc::channel();
    std::thread::spawn(move || {
        use tracing_subscriber::layer::SubscriberExt;
        let dropped = DropsRunOnWarning::default();
        let subscriber = tracing_subscriber::registry().with(dropped.clone());
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_all().start_paused(true).build().unwrap();
        tracing::subscriber::with_default(subscriber, || {
            runtime.block_on(lose_a_lease(&dropped.0));
        });
        ended.send(()).unwrap();
    });
    waits.recv_timeout(Duration::from_secs(30)).expect("no deadlock");
}

async fn lose_a_lease(dropped: &Mutex<Option<Endless>>) {
    let (store, key) = (store(), dedup_key("a"));
    // Both runs have one ledger.
    let worker = worker(&store).lease(HOUR);
    *dropped.lock().unwrap() = Some(begun(&worker, &dedup_key("dropped")).await);
    store.set(StoreCall::Renew, Fault::Fail);
    let loses = worker.clone().lease(Duration::from_millis(100));
    let run = loses.run(&key, async |delivery| {
        until(|| delivery.lease_lost() && dropped.lock().unwrap().is_none()).await;
        Ok::<_, ()>(())
    });
    let other = async {
        let terms = CallTerms::on_completion(Token::random(), HOUR, HOUR);
        while !matches!(store.claim(&key, &terms).await.unwrap(), ClaimReply::First { .. }) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        store.set(StoreCall::Renew, Fault::None);
    };
    let (ran, ()) = tokio::join!(run, other);
    assert!(matches!(ran, Ok(RunOutcome::First(()))), "{ran:?}");
}

#[derive(Clone, Default)]
struct DropsRunOnWarning(Arc<Mutex<Option<Endless>>>);

impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for DropsRunOnWarning {
    fn on_event(&self, event: &tracing::Event<'_>, _: tracing_subscriber::layer::Context<'_, S>) {
        if *event.metadata().level() == tracing::Level::WARN {
            let run = self.0.lock().unwrap().take();
            drop(run);
        }
    }
}

/// Runs until it is woken, and then ends with `result`.
async fn held(wake: &tokio::sync::Notify, result: Result<(), ()>) -> Result<(), ()> {
    wake.notified().await;
    result
}

#[tokio::test(start_paused = true)]
async fn run_waits_for_an_event_that_another_call_runs() {
    for (first, expected_runs) in [(Ok(()), 0), (Err(()), 1)] {
        let (dedup, start) = (Deduplicator::new(store()), tokio::time::Instant::now());
        let (key, wake, runs) = (dedup_key("a"), tokio::sync::Notify::new(), AtomicUsize::new(0));
        let running = dedup.run(&key, async |_| held(&wake, first).await);
        let patient = dedup.clone().wait(HOUR);
        let waiting = patient.run(&key, async |_| {
            runs.fetch_add(1, Ordering::SeqCst);
            Ok::<_, ()>(())
        });
        let at_once = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            let other = dedup.run(&key, async |_| Ok::<_, ()>(())).await;
            assert!(matches!(other, Ok(RunOutcome::InFlight)), "{other:?}");
            wake.notify_one();
        };
        let (_, waited, ()) = tokio::join!(running, waiting, at_once);
        assert_eq!(start.elapsed(), Duration::from_secs(1), "woken, before its next poll");
        assert_eq!(runs.load(Ordering::SeqCst), expected_runs);
        assert_eq!(matches!(waited, Ok(RunOutcome::First(()))), expected_runs == 1, "{waited:?}");
        assert_eq!(matches!(waited, Ok(RunOutcome::Duplicate(_))), expected_runs == 0);
    }
}

#[tokio::test]
async fn deduplicator_with_an_invalid_setting_runs_nothing() {
    let dedup = || Deduplicator::new(store());
    assert!(dedup().lease(Duration::from_millis(100)).checked().is_ok());
    for invalid in [
        dedup().retention(Duration::ZERO),
        dedup().lease(Duration::from_millis(99)),
        dedup().store_timeout(Duration::ZERO),
        dedup().store_timeout(Duration::from_millis(30_001)),
        dedup().handler_timeout(Duration::ZERO),
    ] {
        let ran = invalid
            .run(tower_dedup::DedupKey::new("n", "a").unwrap(), async |_| Ok::<_, Infallible>(()))
            .await;
        let Err(RunError::Store(error)) = ran else { panic!("{ran:?}") };
        assert_eq!(error.kind(), StoreErrorKind::Config);
        assert!(invalid.checked().is_err());
    }
}

#[tokio::test]
async fn store_of_keys_only_compares_no_payload() {
    let mut store = Hooked::default().on(BEFORE, StoreCall::Claim, |_, terms| {
        assert_eq!(terms.fetch(), Fetch::Nothing);
        ready(Ok(()))
    });
    store.lacks = Some(NO_STORED_DATA);
    let worker = Deduplicator::new(store);
    let run = async |event: Event| worker.run(event, async |_| Ok::<_, Infallible>(())).await;
    assert!(matches!(run(Event::new(dedup_key("a"))).await, Ok(RunOutcome::First(()))));
    let error =
        run(Event::new(dedup_key("b")).with_payload(Bytes::from("payload"))).await.unwrap_err();
    let source = std::error::Error::source(&error).and_then(|it| it.downcast_ref::<StoreError>());
    assert_eq!(source.map(StoreError::kind), Some(StoreErrorKind::Unsupported), "{error:?}");
}
