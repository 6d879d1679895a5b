//! Concurrent calls, dropped calls and calls that hang.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{join_all, maybe_done};
use tokio::task::JoinHandle;
use tower_dedup::DedupKey;
use tower_dedup::adapter::contract::{
    CallTerms, ClaimReply, CompleteReply, DedupAdapter, RenewReply,
};
use tower_dedup::adapter::maintenance::{MaintenanceAdapter, PURGE_GRACE};

use crate::case::Case;
use crate::driver::{
    FIRST, LEASE, RETENTION, claim_all, complete_all, complete_at_once, is_duplicate, key, leased,
    reply, rows, story,
};

const WORKERS: usize = 16;
const ROUNDS: usize = 60;

/// 16 tasks claim keys for 60 rounds, those of a round at the same time. Asserts that each of 60 keys has one winner.
async fn race(
    store: Case,
    terms: fn() -> CallTerms,
    numbers: fn(worker: usize, round: usize) -> Vec<usize>,
) {
    let tasks = (0..WORKERS).map(|worker| {
        let adapter = store.adapter();
        tokio::spawn(async move {
            let mut won = Vec::new();
            for round in 0..ROUNDS {
                let numbers = numbers(worker, round);
                let keys: Vec<_> = numbers.iter().map(|number| key(&number.to_string())).collect();
                let claimed = claim_all(&adapter, &keys, &terms()).await;
                // Of any attempt: a second winner may have counted the first one.
                won.extend(numbers.into_iter().zip(claimed).filter(|(_, it)| is_first(it)));
            }
            won
        })
    });
    let mut won = all_end(tasks).await.concat();
    won.sort_unstable_by_key(|(number, _)| *number);
    assert!(won.iter().map(|(number, _)| *number).eq(0..ROUNDS), "won: {won:?}");
}

fn is_first(claimed: &ClaimReply) -> bool {
    matches!(claimed, ClaimReply::First { .. })
}

async fn all_end<T>(tasks: impl Iterator<Item = JoinHandle<T>>) -> Vec<T> {
    let all = tokio::time::timeout(Duration::from_secs(120), join_all(tasks)).await;
    all.expect("no deadlock").into_iter().map(|ended| ended.expect("a worker")).collect()
}

/// 16 workers claim 60 keys under a lease: each key is first once.
pub(super) async fn workers_racing_for_a_lease_have_one_winner(store: Case) {
    race(store, leased, |_, round| vec![round]).await;
}

/// 16 workers claim 60 keys that are complete at once: each key is first once.
pub(super) async fn workers_racing_for_a_claim_complete_at_once_have_one_winner(store: Case) {
    race(store, complete_at_once, |_, round| vec![round]).await;
}

/// 16 workers claim 60 keys whose lease lapsed: each key is taken over once.
pub(super) async fn workers_racing_for_a_lapsed_lease_have_one_winner(store: Case) {
    let keys: Vec<_> = (0..ROUNDS).map(|round| key(&round.to_string())).collect();
    claim_all(&store.adapter(), &keys, &leased()).await;
    store.advance(LEASE).await;
    race(store, leased, |_, round| vec![round]).await;
}

/// Workers claim overlapping keys, eight at the same time. No call deadlocks, and each key is first once.
pub(super) async fn claims_of_overlapping_keys_have_one_winner_for_each(store: Case) {
    race(store, leased, |worker, round| {
        (0..8).map(|next| (7 * round + 3 * worker + next) % ROUNDS).collect()
    })
    .await;
}

/// 64 calls of each kind that hang, because no task polls them, block no other call: later calls of every kind succeed
/// within 20 s. So do the hanging calls once they are polled again.
pub(super) async fn hanging_calls_block_no_other_call(store: Case) {
    const BOUND: Duration = Duration::from_secs(20);
    let adapter = store.adapter();
    for polls in [1, 4] {
        let numbered = |name| {
            let keys = (0..64).map(|number| key(&format!("{name} {number}, {polls} polls")));
            keys.collect::<Vec<_>>()
        };
        let (mine, held, claimed) = (leased(), numbered("held"), numbered("claimed"));
        claim_all(&adapter, &held, &mine).await;
        let (held, claimed) =
            (held.iter().map(|it| ("renew", it)), claimed.iter().map(|it| ("claim", it)));
        let call = |(call, key)| maybe_done(Box::pin(reply(&adapter, call, key, &mine)));
        let mut hanging: Vec<_> = held.chain(claimed).map(call).collect();
        for _ in 0..polls {
            for call in &mut hanging {
                let _ = futures_util::poll!(call);
            }
            tokio::time::sleep(Duration::from_micros(200)).await;
        }
        let later = async {
            story(&store, "a once 1").await;
            story(&store, "a claim 1; a renew H; a complete H").await;
            adapter.get(&key("free")).await.unwrap();
            adapter.purge(10).await.unwrap();
        };
        let bounded = tokio::time::timeout(BOUND, later).await;
        bounded.expect("later calls do not wait for 128 calls that nobody polls");
        let rest = tokio::time::timeout(BOUND, join_all(&mut hanging)).await;
        rest.expect("hanging calls end");
        for (number, call) in hanging.iter_mut().enumerate() {
            let reply = Pin::new(call).take_output().expect("it has ended");
            assert_eq!(reply, if number < 64 { "H" } else { "1" }, "{polls} polls");
        }
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

/// Drops a claim, and another one's release, at any await. Asserts that the release that follows frees the key.
async fn release_after_a_drop(store: &Case, terms: fn() -> CallTerms) {
    let adapter = store.adapter();
    for polls in 0..24_usize {
        let keys = ["claim", "release"].map(|call| key(&format!("{call}, {polls} polls")));
        let mine = terms();
        dropped_after(polls, adapter.claim(&keys[0], &mine)).await;
        adapter.claim(&keys[1], &mine).await.unwrap();
        dropped_after(polls, adapter.release(&keys[1], &mine)).await;
        for key in &keys {
            // The dropped call may reach the store after the release, which is a fence.
            adapter.release(key, &mine).await.unwrap();
            let claimed = adapter.claim(key, &terms()).await.unwrap();
            assert!(is_first(&claimed), "{:?}: {claimed:?}", key.id());
        }
    }
    // A future that was never polled claims nothing.
    drop(adapter.claim(&key("never polled"), &terms()));
    assert_eq!(adapter.claim(&key("never polled"), &terms()).await.unwrap(), FIRST);
}

/// A claim that is dropped at any await can be released by its token.
pub(super) async fn dropped_claim_can_be_released(store: Case) {
    release_after_a_drop(&store, leased).await;
}

/// After a claim that is complete at once, or its release, is dropped at any await, the token can still release the key.
pub(super) async fn dropped_claim_complete_at_once_can_be_released(store: Case) {
    release_after_a_drop(&store, complete_at_once).await;
}

/// A renewal or completion that is dropped at any await can be repeated. No other token claims the key
/// in between.
pub(super) async fn dropped_completion_can_be_repeated(store: Case) {
    let adapter = store.adapter();
    for polls in 0..24_usize {
        let (keys, mine) = (key(&format!("dropped-{polls}")), leased());
        adapter.claim(&keys, &mine).await.unwrap();
        dropped_after(polls, adapter.renew(&keys, &mine)).await;
        // The first renewal may still hold the row.
        assert_ne!(adapter.renew(&keys, &mine).await.unwrap(), RenewReply::Lost);
        dropped_after(polls, adapter.complete(&keys, &mine)).await;
        let claimed = adapter.claim(&keys, &leased()).await.unwrap();
        assert!(!is_first(&claimed), "{polls}: {claimed:?}");
        assert_eq!(adapter.complete(&keys, &mine).await.unwrap(), CompleteReply::Held);
        assert!(is_duplicate(&adapter.claim(&keys, &leased()).await.unwrap()));
        // A release after the completion changes nothing.
        dropped_after(polls, adapter.release(&keys, &mine)).await;
        assert!(is_duplicate(&adapter.claim(&keys, &leased()).await.unwrap()));
    }
}

/// 2,048 callers make calls of all kinds at the same time, each for a key of its own. Each call returns the reply of its own
/// key, with any other calls in its batch.
pub(super) async fn calls_of_2048_callers_reply_for_their_own_keys(store: Case) {
    const STORIES: [&str; 5] = [
        "a claim 1; b claim -; a complete H; b claim D",
        "a claim 1; a release; b claim 2; a complete L; a release",
        "a once 1; b undo; a undo; b once 1",
        "a renew H; b renew L; c once -; a complete H",
        "a complete I; b complete L; b claim D; a renew L",
    ];
    let store = Arc::new(store);
    let tasks = (0..32).map(|_| {
        let store = Arc::clone(&store);
        tokio::spawn(async move {
            let calls = STORIES.into_iter().cycle().take(64);
            join_all(calls.map(|calls| story(&store, calls))).await;
        })
    });
    all_end(tasks).await;
}

/// Purges run beside claims, after purges that were dropped at any await. Every expired key is deleted, and no live key.
pub(super) async fn purges_run_beside_claims_and_after_dropped_purges(store: Case) {
    let (adapter, mine) = (store.adapter(), leased());
    let old: Vec<DedupKey> = (0..500).map(|id| key(&format!("old-{id}"))).collect();
    claim_all(&adapter, &old, &complete_at_once()).await;
    store.advance(RETENTION + PURGE_GRACE).await;
    for polls in 0..12 {
        dropped_after(polls, adapter.purge(10)).await;
    }
    let purging = {
        let adapter = Arc::clone(&adapter);
        // A dropped call may reach the store late, and leave a call no key to delete.
        tokio::spawn(async move {
            loop {
                adapter.purge(20).await.unwrap();
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        })
    };
    let live: Vec<DedupKey> = (0..100).map(|id| key(&format!("live-{id}"))).collect();
    let (complete, in_flight) = live.split_at(50);
    for key in &live {
        adapter.claim(key, &mine).await.unwrap();
    }
    complete_all(&adapter, complete, &mine).await;
    let purged = async {
        while rows(&adapter).await > live.len() as u64 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), purged).await.expect("all is purged");
    assert!(!purging.is_finished(), "no purge fails");
    purging.abort();
    assert!(claim_all(&adapter, complete, &leased()).await.iter().all(is_duplicate));
    let again = claim_all(&adapter, in_flight, &leased()).await;
    assert!(again.iter().all(|again| *again == ClaimReply::InFlight), "{again:?}");
}
