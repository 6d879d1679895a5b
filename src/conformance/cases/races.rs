//! Concurrent calls, dropped calls and calls that hang.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{join_all, maybe_done};
use tokio::task::JoinHandle;

use super::super::driver::{
    FIRST, LEASE, RETENTION, claim_all, complete_at_once, is_duplicate, key, leased, rows, story,
};
use super::super::store::{Maintained, Store};
use crate::adapter::contract::{CallTerms, ClaimReply, CompleteReply, DedupAdapter, RenewReply};
use crate::adapter::inspect::{MaintenanceAdapter, PURGE_GRACE};
use crate::key::DedupKey;

const WORKERS: usize = 16;
const ROUNDS: usize = 60;

/// Runs `attempt` in 16 tasks for 60 rounds. It returns the numbers of the keys that its task has won. Asserts that each
/// of 60 keys has one winner.
async fn race<A, F, W>(
    adapter: Arc<A>,
    attempt: impl Fn(Arc<A>, usize, usize) -> F + Clone + Send + 'static,
) where
    A: Send + Sync + ?Sized + 'static,
    F: Future<Output = W> + Send + 'static,
    W: IntoIterator<Item = usize>,
{
    let tasks = (0..WORKERS).map(|worker| {
        let (adapter, attempt) = (Arc::clone(&adapter), attempt.clone());
        tokio::spawn(async move {
            let mut won = Vec::new();
            for round in 0..ROUNDS {
                won.extend(attempt(Arc::clone(&adapter), worker, round).await);
            }
            won
        })
    });
    let mut won = all_end(tasks).await.concat();
    won.sort_unstable();
    assert!(won.iter().copied().eq(0..ROUNDS), "won: {won:?}");
}

async fn all_end<T>(tasks: impl Iterator<Item = JoinHandle<T>>) -> Vec<T> {
    let all = tokio::time::timeout(Duration::from_secs(60), join_all(tasks)).await;
    all.expect("no deadlock").into_iter().map(|ended| ended.expect("a worker")).collect()
}

/// Returns the number if the claim is first, of any attempt: a second winner may have counted the first one.
fn won(number: usize, claimed: &ClaimReply) -> Option<usize> {
    matches!(claimed, ClaimReply::First { .. }).then_some(number)
}

/// 16 workers claim 60 keys under a lease: each key is first once.
pub(super) async fn workers_racing_for_a_lease_have_one_winner<S: Store>(store: S) {
    race(store.adapter(), |adapter, _, round| claim_one(adapter, round, leased())).await;
}

/// 16 workers claim 60 keys that are complete at once: each key is first once.
pub(super) async fn workers_racing_for_a_claim_complete_at_once_have_one_winner<S: Store>(
    store: S,
) {
    race(store.adapter(), |adapter, _, round| claim_one(adapter, round, complete_at_once())).await;
}

async fn claim_one<A: DedupAdapter + ?Sized>(
    adapter: Arc<A>,
    round: usize,
    terms: CallTerms,
) -> Option<usize> {
    won(round, &adapter.claim(&key(&round.to_string()), &terms).await.unwrap())
}

/// 16 workers claim 60 keys whose lease lapsed: each key is taken over once.
pub(super) async fn workers_racing_for_a_lapsed_lease_have_one_winner<S: Store>(store: S) {
    let adapter = store.adapter();
    for round in 0..ROUNDS {
        adapter.claim(&key(&round.to_string()), &leased()).await.unwrap();
    }
    store.advance(LEASE).await;
    race(adapter, |adapter, _, round| async move {
        let claimed = adapter.claim(&key(&round.to_string()), &leased()).await.unwrap();
        let is_taken = claimed == ClaimReply::first(2, true);
        assert!(is_taken || claimed == ClaimReply::InFlight, "taken over again: {claimed:?}");
        won(round, &claimed)
    })
    .await;
}

/// Workers claim overlapping keys, eight at the same time. No call deadlocks, and each key is first once.
pub(super) async fn claims_of_overlapping_keys_have_one_winner_for_each<S: Store>(store: S) {
    race(store.adapter(), |adapter, worker, round| async move {
        let numbers: Vec<usize> =
            (0..8).map(|next| (7 * round + 3 * worker + next) % ROUNDS).collect();
        let keys: Vec<DedupKey> = numbers.iter().map(|number| key(&number.to_string())).collect();
        let claimed = claim_all(&*adapter, &keys, &leased()).await;
        let won =
            numbers.into_iter().zip(&claimed).filter_map(|(number, claimed)| won(number, claimed));
        won.collect::<Vec<_>>()
    })
    .await;
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

/// 64 calls of each kind that hang, because no task polls them, block no other call: later calls of every kind succeed
/// within 20 s. So do the hanging calls once they are polled again.
pub(super) async fn hanging_calls_block_no_other_call<S: Maintained>(store: S) {
    const BOUND: Duration = Duration::from_secs(20);
    const CALLS: usize = 64;
    let adapter = store.adapter();
    for polls in [1, 4] {
        let key = |name: &str| key(&format!("{name}-{polls}"));
        let (mine, other) = (leased(), leased());
        let numbered =
            |name: &str| -> Vec<_> { (0..CALLS).map(|n| key(&format!("{name} {n}"))).collect() };
        let (held, claimed) = (numbered("held"), numbered("claimed"));
        claim_all(&*adapter, &held, &mine).await;
        let mut claims: Vec<_> =
            claimed.iter().map(|key| maybe_done(adapter.claim(key, &other))).collect();
        let mut renewals: Vec<_> =
            held.iter().map(|key| maybe_done(adapter.renew(key, &mine))).collect();
        for _ in 0..polls {
            for claim in &mut claims {
                let _ = futures_util::poll!(claim);
            }
            for renewal in &mut renewals {
                let _ = futures_util::poll!(renewal);
            }
            tokio::time::sleep(Duration::from_micros(200)).await;
        }
        let later = async {
            let (terms, free, at_once) = (leased(), key("free"), key("at once"));
            assert_eq!(adapter.claim(&at_once, &complete_at_once()).await.unwrap(), FIRST);
            let first = adapter.claim(&free, &terms).await.unwrap();
            assert!(matches!(first, ClaimReply::First { .. }), "{first:?}");
            assert_eq!(adapter.renew(&free, &terms).await.unwrap(), RenewReply::Held);
            assert_eq!(adapter.complete(&free, &terms).await.unwrap(), CompleteReply::Held);
            assert!(adapter.get(&free).await.unwrap().is_some());
            adapter.purge(10).await.unwrap();
        };
        let bounded = tokio::time::timeout(BOUND, later).await;
        bounded.expect("later calls do not wait for 128 calls that nobody polls");
        let rest = async {
            join_all(&mut claims).await;
            join_all(&mut renewals).await;
        };
        tokio::time::timeout(BOUND, rest).await.expect("hanging calls end");
        for claim in &mut claims {
            let claim = Pin::new(claim).take_output().expect("it has ended").unwrap();
            assert!(matches!(claim, ClaimReply::First { .. }), "{polls} polls: {claim:?}");
        }
        for renewal in &mut renewals {
            let renewal = Pin::new(renewal).take_output().expect("it has ended").unwrap();
            assert_eq!(renewal, RenewReply::Held, "{polls} polls");
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
        // The first renewal may still hold the row.
        assert_ne!(adapter.renew(&keys, &mine).await.unwrap(), RenewReply::Lost);
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
    const STORIES: [&str; 5] = [
        "a claim 1; b claim -; a complete H; b claim D",
        "a claim 1; a release; a complete L; a release",
        "a once 1; b undo; a undo; b once 1",
        "a renew H; b renew L; c once -; a complete H",
        "a complete I; b complete L; b claim D; a renew L",
    ];
    let store = Arc::new(store);
    let tasks = (0..2 * WORKERS).map(|worker| {
        let store = Arc::clone(&store);
        tokio::spawn(async move {
            for round in 0..ROUNDS / 4 {
                let calls = STORIES[(worker + round) % STORIES.len()];
                story(&*store, &format!("{worker}-{round}"), calls).await;
            }
        })
    });
    all_end(tasks).await;
}

/// Purges run beside claims, after purges that were dropped at any await. Every expired key is deleted, and no live key.
pub(super) async fn purges_run_beside_claims_and_after_dropped_purges<S: Maintained>(store: S) {
    let adapter = store.adapter();
    let old: Vec<DedupKey> = (0..500).map(|id| key(&format!("old-{id}"))).collect();
    claim_all(&*adapter, &old, &complete_at_once()).await;
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
    let mut live = Vec::new();
    for id in 0..100 {
        let (keys, mine) = (key(&format!("live-{id}")), leased());
        adapter.claim(&keys, &mine).await.unwrap();
        if id % 2 == 0 {
            adapter.complete(&keys, &mine).await.unwrap();
        }
        live.push(keys);
    }
    let purged = async {
        while rows(&adapter).await > live.len() as u64 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), purged).await.expect("all is purged");
    assert!(!purging.is_finished(), "no purge fails");
    purging.abort();
    for (id, keys) in live.iter().enumerate() {
        let again = adapter.claim(keys, &leased()).await.unwrap();
        if id % 2 == 0 {
            assert!(is_duplicate(&again), "{id}: {again:?}");
        } else {
            assert_eq!(again, ClaimReply::InFlight, "{id}");
        }
    }
}
