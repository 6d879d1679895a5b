//! The rules, many callers at a time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::join_all;

use super::{LEASE, RETENTION, is_duplicate, key, new_receipt};
use crate::adapter::{Claimed, DedupAdapter, LeaseAdapter, Maintain, Recorded};
use crate::conformance::Store;
use crate::key::DedupKey;

const WORKERS: usize = 16;
const ROUNDS: usize = 60;

/// Runs `attempt` in 16 tasks at once, for 60 rounds, and asserts one winner a round.
async fn race<A, F>(adapter: Arc<A>, attempt: impl Fn(Arc<A>, usize) -> F + Send + Sync + 'static)
where
    A: Send + Sync + 'static,
    F: Future<Output = bool> + Send + 'static,
{
    let attempt = Arc::new(attempt);
    let winners: Arc<Vec<AtomicU32>> = Arc::new((0..ROUNDS).map(|_| AtomicU32::new(0)).collect());
    let tasks = (0..WORKERS).map(|_| {
        let (adapter, attempt, winners) =
            (Arc::clone(&adapter), Arc::clone(&attempt), Arc::clone(&winners));
        tokio::spawn(async move {
            for round in 0..ROUNDS {
                if attempt(Arc::clone(&adapter), round).await {
                    winners[round].fetch_add(1, Ordering::Relaxed);
                }
            }
        })
    });
    for task in join_all(tasks).await {
        task.expect("a worker");
    }
    let winners: Vec<u32> = winners.iter().map(|wins| wins.load(Ordering::Relaxed)).collect();
    assert!(winners.iter().all(|wins| *wins == 1), "winners by round: {winners:?}");
}

/// 16 workers, 60 rounds: one claim is granted a round.
pub async fn workers_race_for_claims<S: Store>(store: S) {
    race(store.adapter(), |adapter, round| async move {
        let claimed = adapter.claim(&[key(&round.to_string())], &new_receipt()).await.unwrap();
        matches!(claimed[..], [Claimed::First { .. }])
    })
    .await;
}

/// 16 workers, 60 rounds: one record is first a round.
pub async fn workers_race_for_records<S: Store>(store: S) {
    race(store.adapter(), |adapter, round| async move {
        let recorded = adapter.record(&[key(&round.to_string())], &new_receipt()).await.unwrap();
        recorded == [Recorded::First]
    })
    .await;
}

/// 16 workers, 60 lapsed leases: one takes each over.
pub async fn workers_race_for_a_lapsed_lease<S: Store>(store: S) {
    let adapter = store.adapter();
    for round in 0..ROUNDS {
        adapter.claim(&[key(&round.to_string())], &new_receipt()).await.unwrap();
    }
    store.advance(LEASE).await;
    race(adapter, |adapter, round| async move {
        let claimed = adapter.claim(&[key(&round.to_string())], &new_receipt()).await.unwrap();
        claimed == [Claimed::first(2, true)]
    })
    .await;
}

/// Sets that overlap, from many workers at once: nobody deadlocks, and each key is granted once.
pub async fn overlapping_sets_do_not_deadlock<S: Store>(store: S) {
    let adapter = store.adapter();
    let granted: Arc<Vec<AtomicU32>> = Arc::new((0..40).map(|_| AtomicU32::new(0)).collect());
    let tasks = (0..WORKERS).map(|worker| {
        let (adapter, granted) = (Arc::clone(&adapter), Arc::clone(&granted));
        tokio::spawn(async move {
            for start in 0..32 {
                let first = (start * 7 + worker * 3) % 32;
                let ids: Vec<usize> = (first..first + 8).collect();
                let mut keys: Vec<(DedupKey, usize)> =
                    ids.iter().map(|id| (key(&format!("{id:02}")), *id)).collect();
                keys.sort();
                let set: Vec<DedupKey> = keys.iter().map(|(key, _)| key.clone()).collect();
                let claimed = adapter.claim(&set, &new_receipt()).await.unwrap();
                for (answer, (_, id)) in claimed.iter().zip(&keys) {
                    if matches!(answer, Claimed::First { .. }) {
                        granted[*id].fetch_add(1, Ordering::Relaxed);
                    }
                }
            }
        })
    });
    let all = tokio::time::timeout(Duration::from_secs(60), join_all(tasks)).await;
    for task in all.expect("no deadlock") {
        task.expect("a worker");
    }
    let granted: Vec<u32> = granted.iter().map(|times| times.load(Ordering::Relaxed)).collect();
    assert!(granted.iter().all(|times| *times <= 1), "{granted:?}");
    assert!(granted.iter().filter(|times| **times == 1).count() >= 32, "{granted:?}");
}

/// A call that was dropped half-way, at any point, can be undone by its token.
pub async fn dropped_calls_can_be_undone<S: Store>(store: S) {
    let adapter = store.adapter();
    for polls in 0..24_usize {
        let keys = [key(&format!("dropped-{polls}"))];
        let mine = new_receipt();
        {
            let mut claim = Box::pin(adapter.claim(&keys, &mine));
            for _ in 0..polls {
                if futures_util::poll!(claim.as_mut()).is_ready() {
                    break;
                }
                tokio::time::sleep(Duration::from_micros(200)).await;
            }
        }
        // The statement may still be on its way: a release may come too early, and is repeated.
        let free = async {
            loop {
                adapter.release(&keys, &mine).await.unwrap();
                let next = new_receipt();
                let claimed = adapter.claim(&keys, &next).await.unwrap();
                if matches!(claimed[..], [Claimed::First { .. }]) {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), free).await.expect("the key is free again");
    }
    // A future that is dropped without having been polled has done nothing.
    let keys = [key("never-polled")];
    drop(adapter.claim(&keys, &new_receipt()));
    assert_eq!(adapter.get(&keys[0]).await.unwrap(), None);
    // And the store still serves.
    assert!(adapter.count().now_or_never().is_none_or(|count| count.is_ok()));
    assert_eq!(adapter.record(&keys, &new_receipt()).await.unwrap(), [Recorded::First]);
}

/// Purge beside claims: both get on, and no live key is lost.
pub async fn purge_runs_beside_claims<S: Store>(store: S) {
    let adapter = store.adapter();
    let mut old: Vec<DedupKey> = (0..500).map(|id| key(&format!("old-{id}"))).collect();
    old.sort();
    adapter.record(&old, &new_receipt()).await.unwrap();
    store.advance(RETENTION).await;
    let purging = {
        let adapter = Arc::clone(&adapter);
        // A store may clear expired keys away by itself as well.
        tokio::spawn(async move {
            while adapter.purge(20).await.unwrap() > 0 {
                tokio::task::yield_now().await;
            }
        })
    };
    let mut live = Vec::new();
    for id in 0..100 {
        let (keys, mine) = ([key(&format!("live-{id}"))], new_receipt());
        adapter.claim(&keys, &mine).await.unwrap();
        if id % 2 == 0 {
            adapter.complete(&keys, &mine).await.unwrap();
        }
        live.push(keys);
    }
    let purged = tokio::time::timeout(Duration::from_secs(60), purging).await;
    purged.expect("purging ends").expect("a purge");
    assert_eq!(adapter.count().await.unwrap(), live.len() as u64);
    for (id, keys) in live.iter().enumerate() {
        let again = adapter.claim(keys, &new_receipt()).await.unwrap();
        if id % 2 == 0 {
            assert!(is_duplicate(&again), "{id}: {again:?}");
        } else {
            assert_eq!(again, [Claimed::InFlight], "{id}");
        }
    }
}
