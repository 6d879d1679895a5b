//! How SQL adapters purge in the background: start of the rounds, and counts.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tower_dedup::adapter::Purging;
use tower_dedup::adapter::contract::{CallTerms, ClaimReply, DedupAdapter, StoreFuture};
use tower_dedup::adapter::maintenance::{Entry, ForgetReply, MaintenanceAdapter, Stats};
use tower_dedup::internals::purge;
use tower_dedup::{DedupKey, StoreError, StoreErrorKind};

use super::observed::{measured, observed, value};

const INTERVAL: Duration = Duration::from_secs(600);

/// One portion: how long it takes, and how many keys it deletes.
type Step = (Duration, Result<u64, StoreErrorKind>);

/// A store that purges by a script, and deletes nothing after its end.
#[derive(Default)]
struct Scripted {
    script: Mutex<VecDeque<Step>>,
    begun_at: Mutex<Vec<Instant>>,
    begun: Notify,
}

impl Scripted {
    fn new(script: impl IntoIterator<Item = Step>) -> Arc<Self> {
        Arc::new(Self { script: Mutex::new(script.into_iter().collect()), ..Self::default() })
    }

    /// Waits for `count` portions. Returns when each began.
    async fn portions(&self, count: usize) -> Vec<Instant> {
        loop {
            let begun = self.begun_at.lock().unwrap().clone();
            if begun.len() >= count {
                return begun;
            }
            self.begun.notified().await;
        }
    }
}

impl DedupAdapter for Scripted {
    fn claim<'a>(&'a self, _: &'a DedupKey, _: &'a CallTerms) -> StoreFuture<'a, ClaimReply> {
        unreachable!("the purger never claims")
    }

    fn release<'a>(&'a self, _: &'a DedupKey, _: &'a CallTerms) -> StoreFuture<'a, ()> {
        unreachable!("the purger never releases")
    }
}

impl MaintenanceAdapter for Scripted {
    fn purge(&self, _: u32) -> StoreFuture<'_, u64> {
        Box::pin(async {
            self.begun_at.lock().unwrap().push(Instant::now());
            self.begun.notify_one();
            let step = self.script.lock().unwrap().pop_front();
            let (takes, purged) = step.unwrap_or((Duration::ZERO, Ok(0)));
            tokio::time::sleep(takes).await;
            purged.map_err(|kind| StoreError::new(kind, "purging"))
        })
    }

    fn forget<'a>(&'a self, _: &'a DedupKey) -> StoreFuture<'a, ForgetReply> {
        unreachable!("the purger never forgets")
    }

    fn get<'a>(&'a self, _: &'a DedupKey) -> StoreFuture<'a, Option<Entry>> {
        unreachable!("the purger never reads a key")
    }

    fn stats(&self) -> StoreFuture<'_, Stats> {
        Box::pin(async { Ok(Stats::default()) })
    }

    fn close(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(async {})
    }
}

fn purging() -> Purging {
    Purging::new().every(INTERVAL).keys_per_statement(100)
}

fn purger(store: &Arc<Scripted>) -> JoinHandle<()> {
    tokio::spawn(purge(purging(), Arc::clone(store)))
}

fn pauses(begun_at: &[Instant]) -> Vec<f64> {
    begun_at.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64()).collect()
}

#[tokio::test(start_paused = true)]
async fn the_first_round_starts_within_a_minute_and_the_next_after_the_interval() {
    let mut firsts = Vec::new();
    for _ in 0..20 {
        let (store, started) = (Scripted::new([]), Instant::now());
        let purger = purger(&store);
        let begun = store.portions(2).await;
        let first = (begun[0] - started).as_secs_f64();
        assert!(first <= 61.0, "{first}");
        firsts.push(first);
        let pause = pauses(&begun)[0];
        assert!((539.0..=661.0).contains(&pause), "{pause}");
        purger.abort();
    }
    // Purgers that start together do not purge together.
    firsts.sort_by(f64::total_cmp);
    assert!(firsts[19] - firsts[0] > 5.0, "{firsts:?}");
    // A short interval is the bound of the first round, too.
    let (store, started) = (Scripted::new([]), Instant::now());
    let purger = tokio::spawn(purge(purging().every(Duration::from_secs(2)), Arc::clone(&store)));
    assert!(store.portions(1).await[0] - started <= Duration::from_secs(3));
    purger.abort();
}

#[tokio::test(start_paused = true)]
async fn a_failed_round_is_repeated_after_a_second_and_then_in_doubling_pauses() {
    let ways = [Err(StoreErrorKind::Refused), Err(StoreErrorKind::Unavailable)];
    let fails = ways.into_iter().cycle().take(14).map(|way| (Duration::ZERO, way));
    let store = Scripted::new(fails);
    let purger = purger(&store);
    let pauses = pauses(&store.portions(16).await);
    for (at, pause) in pauses.iter().enumerate() {
        // After a successful round, the interval holds again.
        let expected = 600_f64.min(2_f64.powi(i32::try_from(at).unwrap()));
        let expected = if at < 14 { expected } else { 600.0 };
        assert!((0.89 * expected..=1.12 * expected).contains(pause), "{at}: {pauses:?}");
    }
    purger.abort();
}

/// It waits for a statement for 30 s, and the pause after a fault is a second.
#[tokio::test(start_paused = true)]
async fn a_full_statement_is_repeated_at_once_and_one_that_is_not_full_ends_the_round() {
    let full = [(3, 100), (1, 100), (2, 99), (0, 0)];
    let interval = 541.0..=663.0;
    for (took, expected) in
        [(&[(600, 0)][..], &[30.9..=31.2][..]), (&full, &[2.9..=3.1, 0.9..=1.1, interval])]
    {
        let script = took.iter().map(|(seconds, keys)| (Duration::from_secs(*seconds), Ok(*keys)));
        let store = Scripted::new(script);
        let purger = purger(&store);
        let pauses = pauses(&store.portions(expected.len() + 1).await);
        let is_expected = pauses.iter().zip(expected).all(|(pause, range)| range.contains(pause));
        assert!(is_expected, "{pauses:?}");
        purger.abort();
    }
}

#[test]
fn rows_deleted_by_a_failing_round_are_counted() {
    observed(async |_, snapshotter| {
        let fails = Err(StoreErrorKind::Unavailable);
        let store = Scripted::new([Ok(100), Ok(100), fails, Ok(7)].map(|it| (Duration::ZERO, it)));
        let purger = purger(&store);
        store.portions(5).await;
        purger.abort();
        assert_eq!(value(&measured(&snapshotter), "tower_dedup_purged_total", &[]), 207.0);
    });
}
