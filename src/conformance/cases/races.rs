//! Concurrent calls, dropped calls and calls that hang.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::join_all;

use super::super::driver::{
    FIRST, LEASE, RETENTION, claim_all, complete_at_once, is_duplicate, key, leased, rows,
};
use super::super::store::{Maintained, Store};
use crate::adapter::contract::{CallTerms, ClaimReply, CompleteReply, DedupAdapter, RenewReply};
use crate::adapter::inspect::{MaintenanceAdapter, PURGE_GRACE};
use crate::key::DedupKey;

const WORKERS: usize = 16;
const ROUNDS: usize = 60;

/// Runs `attempt` in 16 tasks for 60 rounds, and asserts that each round has one winner.
async fn race<A, F>(adapter: Arc<A>, attempt: impl Fn(Arc<A>, usize) -> F + Send + Sync + 'static)
where
    A: Send + Sync + ?Sized + 'static,
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

/// 16 workers claim 60 keys under a lease: each key is first once.
pub(super) async fn workers_racing_for_a_lease_have_one_winner<S: Store>(store: S) {
    race(store.adapter(), |adapter, round| is_first(adapter, round, leased())).await;
}

/// 16 workers claim 60 keys that are complete at once: each key is first once.
pub(super) async fn workers_racing_for_a_claim_complete_at_once_have_one_winner<S: Store>(
    store: S,
) {
    race(store.adapter(), |adapter, round| is_first(adapter, round, complete_at_once())).await;
}

async fn is_first<A: DedupAdapter + ?Sized>(
    adapter: Arc<A>,
    round: usize,
    terms: CallTerms,
) -> bool {
    let claimed = adapter.claim(&key(&round.to_string()), &terms).await.unwrap();
    // Of any attempt: a second winner may have counted the first one.
    matches!(claimed, ClaimReply::First { .. })
}

/// 16 workers claim 60 keys whose lease lapsed: each key is taken over once.
pub(super) async fn workers_racing_for_a_lapsed_lease_have_one_winner<S: Store>(store: S) {
    let adapter = store.adapter();
    for round in 0..ROUNDS {
        adapter.claim(&key(&round.to_string()), &leased()).await.unwrap();
    }
    store.advance(LEASE).await;
    race(adapter, |adapter, round| async move {
        let claimed = adapter.claim(&key(&round.to_string()), &leased()).await.unwrap();
        let is_taken = claimed == ClaimReply::first(2, true);
        assert!(is_taken || claimed == ClaimReply::InFlight, "taken over again: {claimed:?}");
        is_taken
    })
    .await;
}

/// Workers claim overlapping keys, several at the same time. No call deadlocks, and no key is first
/// twice.
pub(super) async fn claims_of_overlapping_keys_do_not_deadlock<S: Store>(store: S) {
    let adapter = store.adapter();
    let firsts: Arc<Vec<AtomicU32>> = Arc::new((0..40).map(|_| AtomicU32::new(0)).collect());
    let tasks = (0..WORKERS).map(|worker| {
        let (adapter, firsts) = (Arc::clone(&adapter), Arc::clone(&firsts));
        tokio::spawn(async move {
            for start in 0..32 {
                let first = (start * 7 + worker * 3) % 32;
                let keys: Vec<DedupKey> =
                    (first..first + 8).map(|id| key(&id.to_string())).collect();
                let claimed = claim_all(&*adapter, &keys, &leased()).await;
                for (reply, times) in claimed.iter().zip(&firsts[first..]) {
                    if matches!(reply, ClaimReply::First { .. }) {
                        times.fetch_add(1, Ordering::Relaxed);
                    }
                }
            }
        })
    });
    let all = tokio::time::timeout(Duration::from_secs(60), join_all(tasks)).await;
    for task in all.expect("no deadlock") {
        task.expect("a worker");
    }
    let firsts: Vec<u32> = firsts.iter().map(|times| times.load(Ordering::Relaxed)).collect();
    assert!(firsts.iter().all(|times| *times <= 1), "{firsts:?}");
    assert!(firsts.iter().filter(|times| **times == 1).count() >= 32, "{firsts:?}");
}

/// A claim that is dropped at any await can be released by its token.
pub(super) async fn dropped_claim_can_be_released<S: Maintained>(store: S) {
    let adapter = store.adapter();
    for polls in 0..24_usize {
        let keys = key(&format!("dropped-{polls}"));
        let mine = leased();
        dropped_after(polls, adapter.claim(&keys, &mine)).await;
        // The claim may reach the store after the release, which is a fence.
        adapter.release(&keys, &mine).await.unwrap();
        let claimed = adapter.claim(&keys, &leased()).await.unwrap();
        assert!(matches!(claimed, ClaimReply::First { .. }), "{polls}: {claimed:?}");
    }
    // A future that was never polled claims nothing.
    let keys = key("never-polled");
    drop(adapter.claim(&keys, &leased()));
    assert_eq!(adapter.get(&keys).await.unwrap(), None);
    // The store still replies.
    assert!(adapter.stats().now_or_never().is_none_or(|stats| stats.is_ok()));
    assert_eq!(adapter.claim(&keys, &complete_at_once()).await.unwrap(), FIRST);
}

/// Calls that hang, because no task polls them, block no other call. Later calls of every kind
/// succeed within 20 s. So do the hanging calls once they are polled again.
pub(super) async fn hanging_calls_block_no_other_call<S: Maintained>(store: S) {
    const BOUND: Duration = Duration::from_secs(20);
    let adapter = store.adapter();
    for polls in 1..12_usize {
        let key = |name: &str| key(&format!("{name}-{polls}"));
        let (mine, held, at_once) = (leased(), key("held"), key("at once"));
        adapter.claim(&held, &mine).await.unwrap();
        let (claimed, other) = (key("claimed"), leased());
        let mut claim = Box::pin(adapter.claim(&claimed, &other));
        let mut renew = Box::pin(adapter.renew(&held, &mine));
        let mut hangs = (true, true);
        for _ in 0..polls {
            hangs.0 = hangs.0 && futures_util::poll!(claim.as_mut()).is_pending();
            hangs.1 = hangs.1 && futures_util::poll!(renew.as_mut()).is_pending();
            tokio::time::sleep(Duration::from_micros(200)).await;
        }
        let later = async {
            let (terms, free) = (leased(), key("free"));
            assert_eq!(adapter.claim(&at_once, &complete_at_once()).await.unwrap(), FIRST);
            let first = adapter.claim(&free, &terms).await.unwrap();
            assert!(matches!(first, ClaimReply::First { .. }), "{first:?}");
            assert_eq!(adapter.renew(&free, &terms).await.unwrap(), RenewReply::Held);
            assert_eq!(adapter.complete(&free, &terms).await.unwrap(), CompleteReply::Held);
            assert!(adapter.get(&free).await.unwrap().is_some());
            adapter.purge(10).await.unwrap();
        };
        tokio::time::timeout(BOUND, later).await.expect("later calls do not wait");
        let rest = async {
            if hangs.0 {
                let claimed = claim.await.unwrap();
                assert!(matches!(claimed, ClaimReply::First { .. }), "{claimed:?}");
            }
            if hangs.1 {
                assert_eq!(renew.await.unwrap(), RenewReply::Held);
            }
        };
        tokio::time::timeout(BOUND, rest).await.expect("hanging calls end");
    }
}

/// Polls a call this number of times, then drops it.
async fn dropped_after<F: Future>(polls: usize, call: F) {
    let mut call = Box::pin(call);
    for _ in 0..polls {
        if futures_util::poll!(call.as_mut()).is_ready() {
            break;
        }
        tokio::time::sleep(Duration::from_micros(200)).await;
    }
}

/// After a claim that is complete at once, or its release, is dropped at any await, the token can
/// still release the key.
pub(super) async fn dropped_claim_complete_at_once_can_be_released<S: Store>(store: S) {
    let adapter = store.adapter();
    for polls in 0..24_usize {
        let (keys, mine) = (key(&format!("dropped-{polls}")), complete_at_once());
        dropped_after(polls, adapter.claim(&keys, &mine)).await;
        adapter.release(&keys, &mine).await.unwrap();
        assert_eq!(adapter.claim(&keys, &complete_at_once()).await.unwrap(), FIRST, "{polls}");

        let (keys, mine) = (key(&format!("undone-{polls}")), complete_at_once());
        adapter.claim(&keys, &mine).await.unwrap();
        dropped_after(polls, adapter.release(&keys, &mine)).await;
        adapter.release(&keys, &mine).await.unwrap();
        assert_eq!(adapter.claim(&keys, &complete_at_once()).await.unwrap(), FIRST, "{polls}");
    }
}

/// A renewal or completion that is dropped at any await can be repeated. No other token claims the key
/// in between.
pub(super) async fn dropped_completion_can_be_repeated<S: Store>(store: S) {
    let adapter = store.adapter();
    for polls in 0..24_usize {
        let (keys, mine) = (key(&format!("dropped-{polls}")), leased());
        adapter.claim(&keys, &mine).await.unwrap();
        dropped_after(polls, adapter.renew(&keys, &mine)).await;
        assert_eq!(adapter.renew(&keys, &mine).await.unwrap(), RenewReply::Held);
        dropped_after(polls, adapter.complete(&keys, &mine)).await;
        match adapter.claim(&keys, &leased()).await.unwrap() {
            ClaimReply::InFlight | ClaimReply::Duplicate(_) => {}
            ref other => panic!("{polls}: {other:?}"),
        }
        assert_eq!(adapter.complete(&keys, &mine).await.unwrap(), CompleteReply::Held);
        assert!(is_duplicate(&adapter.claim(&keys, &leased()).await.unwrap()));
        // A release after the completion changes nothing.
        dropped_after(polls, adapter.release(&keys, &mine)).await;
        assert!(is_duplicate(&adapter.claim(&keys, &leased()).await.unwrap()));
    }
}

/// Calls of all kinds run at the same time, each on a key of its own. Each call returns the reply of
/// its own key, with any other calls in its batch.
pub(super) async fn concurrent_calls_of_all_kinds_reply_for_their_own_keys<S: Store>(store: S) {
    let adapter = store.adapter();
    let tasks = (0..2 * WORKERS).map(|worker| {
        let adapter = Arc::clone(&adapter);
        tokio::spawn(async move {
            for round in 0..ROUNDS / 4 {
                let keys = key(&format!("{worker}-{round}"));
                one_of_all_kinds(&*adapter, &keys, worker + round).await;
            }
        })
    });
    let all = tokio::time::timeout(Duration::from_secs(60), join_all(tasks)).await;
    for task in all.expect("no deadlock") {
        task.expect("a worker");
    }
}

async fn one_of_all_kinds<A: DedupAdapter + ?Sized>(adapter: &A, keys: &DedupKey, kind: usize) {
    let (mine, theirs) = (leased(), leased());
    match kind % 5 {
        0 => {
            assert_eq!(adapter.claim(keys, &mine).await.unwrap(), FIRST);
            assert_eq!(adapter.claim(keys, &theirs).await.unwrap(), ClaimReply::InFlight);
            assert_eq!(adapter.complete(keys, &mine).await.unwrap(), CompleteReply::Held);
            assert!(is_duplicate(&adapter.claim(keys, &theirs).await.unwrap()));
        }
        1 => {
            adapter.claim(keys, &mine).await.unwrap();
            adapter.release(keys, &mine).await.unwrap();
            assert_eq!(adapter.complete(keys, &mine).await.unwrap(), CompleteReply::LeaseLost);
            adapter.release(keys, &mine).await.unwrap();
        }
        2 => {
            let (mine, theirs) = (complete_at_once(), complete_at_once());
            assert_eq!(adapter.claim(keys, &mine).await.unwrap(), FIRST);
            adapter.release(keys, &theirs).await.unwrap();
            adapter.release(keys, &mine).await.unwrap();
            assert_eq!(adapter.claim(keys, &theirs).await.unwrap(), FIRST);
        }
        3 => {
            assert_eq!(adapter.renew(keys, &mine).await.unwrap(), RenewReply::Held);
            assert_eq!(adapter.renew(keys, &theirs).await.unwrap(), RenewReply::Lost);
            assert_eq!(
                adapter.claim(keys, &complete_at_once()).await.unwrap(),
                ClaimReply::InFlight
            );
            assert_eq!(adapter.complete(keys, &mine).await.unwrap(), CompleteReply::Held);
        }
        _ => {
            assert_eq!(adapter.complete(keys, &mine).await.unwrap(), CompleteReply::Inserted);
            assert_eq!(adapter.complete(keys, &theirs).await.unwrap(), CompleteReply::LeaseLost);
            assert!(is_duplicate(&adapter.claim(keys, &theirs).await.unwrap()));
            assert_eq!(adapter.renew(keys, &mine).await.unwrap(), RenewReply::Lost);
        }
    }
}

/// After a purge is dropped at any await, the next purge deletes the remaining keys.
pub(super) async fn purge_continues_after_a_dropped_call<S: Maintained>(store: S) {
    let adapter = store.adapter();
    let old: Vec<DedupKey> = (0..300).map(|id| key(&format!("old-{id}"))).collect();
    claim_all(&*adapter, &old, &complete_at_once()).await;
    store.advance(RETENTION + PURGE_GRACE).await;
    adapter.claim(&key("fresh"), &complete_at_once()).await.unwrap();
    for polls in 0..12 {
        dropped_after(polls, adapter.purge(10)).await;
    }
    // A dropped call may reach the store late.
    let rest = async {
        while rows(&adapter).await > 1 {
            adapter.purge(10).await.unwrap();
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), rest).await.expect("the rest is purged");
    let fresh = adapter.claim(&key("fresh"), &complete_at_once()).await.unwrap();
    assert!(is_duplicate(&fresh), "{fresh:?}");
}

/// A purge and claims run at the same time. Both end, and no live key is deleted.
pub(super) async fn purge_runs_beside_claims<S: Maintained>(store: S) {
    let adapter = store.adapter();
    let old: Vec<DedupKey> = (0..500).map(|id| key(&format!("old-{id}"))).collect();
    claim_all(&*adapter, &old, &complete_at_once()).await;
    store.advance(RETENTION + PURGE_GRACE).await;
    let purging = {
        let adapter = Arc::clone(&adapter);
        // A store may also delete expired keys by itself.
        tokio::spawn(async move {
            while adapter.purge(20).await.unwrap() > 0 {
                tokio::task::yield_now().await;
            }
        })
    };
    let mut live = Vec::new();
    for id in 0..100 {
        let (keys, mine) = (key(&format!("live-{id}")), leased());
        adapter.claim(&keys, &mine).await.unwrap();
        if id % 2 == 0 {
            adapter.complete(&keys, &mine).await.unwrap();
        }
        live.push(keys);
    }
    let purged = tokio::time::timeout(Duration::from_secs(60), purging).await;
    purged.expect("purging ends").expect("a purge");
    assert_eq!(rows(&adapter).await, live.len() as u64);
    for (id, keys) in live.iter().enumerate() {
        let again = adapter.claim(keys, &leased()).await.unwrap();
        if id % 2 == 0 {
            assert!(is_duplicate(&again), "{id}: {again:?}");
        } else {
            assert_eq!(again, ClaimReply::InFlight, "{id}");
        }
    }
}
