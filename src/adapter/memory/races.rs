//! Every schedule of a few threads over one adapter.
//!
//! The adapter is compiled a second time, over a mutex that hands control to a scheduler. The
//! scheduler explores all interleavings of the calls of two or three threads.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use shuttle::scheduler::DfsScheduler;
use shuttle::{Config, Runner, thread};

use super::{clock, gauge, row, shard};
use crate::adapter::contract::{DedupAdapter, StoreFuture};
use crate::adapter::inspect::{ForgetReply, KeyState, MaintenanceAdapter};
use crate::adapter::replies::{ClaimReply, CompleteReply, RenewReply};
use crate::adapter::terms::{CallTerms, Token};
use crate::key::DedupKey;
use adapter::MemoryAdapter;
use shard::AtCapacity;

#[path = "adapter.rs"]
#[allow(dead_code, unreachable_pub, reason = "only the model uses this copy")]
mod adapter;

mod sync {
    pub(super) use shuttle::sync::{Mutex, MutexGuard};
}

const LEASE: Duration = Duration::from_secs(10);
const RETENTION: Duration = Duration::from_secs(100);
const FIRST: ClaimReply = ClaimReply::first(1, false);

/// With the same secret, keys are in the same shards in every schedule.
fn store(capacity: usize) -> MemoryAdapter {
    MemoryAdapter::with_secret(capacity, [7; 16])
}

fn one_key() -> MemoryAdapter {
    store(1)
}

fn key(id: &str) -> DedupKey {
    DedupKey::new("n", id).unwrap()
}

fn terms(token: u8) -> CallTerms {
    CallTerms::on_completion(Token::from([token; 16]), RETENTION, LEASE)
}

fn on_claim(token: u8) -> CallTerms {
    CallTerms::on_claim(Token::from([token; 16]), RETENTION)
}

/// The terms of token 1, whose retention ends at once.
fn brief() -> CallTerms {
    CallTerms::on_completion(Token::from([1; 16]), Duration::ZERO, LEASE)
}

fn now<T>(call: StoreFuture<'_, T>) -> T {
    call.now_or_never().expect("no wait").unwrap()
}

fn claim(store: &MemoryAdapter, id: &str, terms: &CallTerms) -> ClaimReply {
    now(store.claim(&key(id), terms))
}

fn is_complete(store: &MemoryAdapter, id: &str) -> bool {
    let entry = now(store.get(&key(id)));
    entry.is_some_and(|entry| matches!(entry.state, KeyState::Complete))
}

fn rows(store: &MemoryAdapter) -> u64 {
    now(store.stats()).rows
}

/// Runs `each` as the threads 1 to `threads`, in every order of their steps, and passes the results
/// to `check`.
fn explore<T: Send + 'static>(
    threads: u8,
    store: fn() -> MemoryAdapter,
    each: fn(&MemoryAdapter, u8) -> T,
    check: fn(&MemoryAdapter, Vec<T>),
) {
    let run = move || {
        let store = Arc::new(store());
        let others: Vec<_> = (1..threads)
            .map(|thread| {
                let store = Arc::clone(&store);
                thread::spawn(move || each(&store, thread))
            })
            .collect();
        // A main thread that only waits would be one more to schedule.
        let own = each(&store, threads);
        let joined = others.into_iter().map(|thread| thread.join().unwrap());
        check(&store, joined.chain([own]).collect());
    };
    let scheduler = DfsScheduler::new(None, false);
    let schedules = Runner::new(scheduler, Config::new()).run(run);
    assert!(schedules > 1, "nothing was explored");
}

#[test]
fn three_callers_have_one_first() {
    fn each(store: &MemoryAdapter, thread: u8) -> bool {
        if thread == 3 {
            return claim(store, "a", &on_claim(thread)) == FIRST;
        }
        if claim(store, "a", &terms(thread)) != FIRST {
            return false;
        }
        assert_eq!(now(store.complete(&key("a"), &terms(thread))), CompleteReply::Held);
        true
    }
    explore(3, one_key, each, |store, firsts| {
        assert_eq!(firsts.iter().filter(|first| **first).count(), 1, "{firsts:?}");
        assert!(is_complete(store, "a"));
        assert_eq!(rows(store), 1);
    });
}

#[test]
fn completion_survives_a_takeover_that_fails() {
    fn lapsed() -> MemoryAdapter {
        let store = one_key();
        claim(&store, "a", &terms(1));
        store.advance(LEASE);
        store
    }
    fn each(store: &MemoryAdapter, thread: u8) {
        let (keys, mine) = (key("a"), terms(thread));
        if thread == 1 {
            assert_ne!(now(store.complete(&keys, &mine)), CompleteReply::Inserted);
            return;
        }
        if let ClaimReply::First { takeover, .. } = claim(store, "a", &mine) {
            assert!(takeover);
            now(store.release(&keys, &mine));
        }
    }
    explore(2, lapsed, each, |store, _| assert!(is_complete(store, "a")));
}

#[test]
fn released_on_arrival_claim_leaves_the_key_to_one_other() {
    fn each(store: &MemoryAdapter, thread: u8) -> ClaimReply {
        let claimed = claim(store, "a", &on_claim(thread));
        if thread == 1 {
            // A caller whose call timed out releases the key.
            now(store.release(&key("a"), &on_claim(thread)));
        }
        claimed
    }
    explore(3, one_key, each, |store, replies| {
        let others = replies[1..].iter().filter(|reply| **reply == FIRST).count();
        assert!(others <= 1, "{replies:?}");
        // The key is complete only if one of the others claimed it.
        assert_eq!(is_complete(store, "a"), others == 1, "{replies:?}");
        assert!(others == 1 || replies[0] == FIRST, "{replies:?}");
    });
}

#[test]
fn live_lease_is_not_purged_evicted_or_forgotten() {
    fn full() -> MemoryAdapter {
        let store = store(2).at_capacity(AtCapacity::EvictOldest);
        claim(&store, "old", &on_claim(0));
        store
    }
    fn each(store: &MemoryAdapter, thread: u8) {
        let live = key("a");
        if thread == 1 {
            assert_eq!(claim(store, "a", &brief()), FIRST);
            assert_eq!(now(store.renew(&live, &brief())), RenewReply::Held);
            assert_eq!(now(store.complete(&live, &brief())), CompleteReply::Held);
            return;
        }
        for id in ["x", "y"] {
            claim(store, id, &on_claim(thread));
        }
        if thread == 2 && now(store.forget(&live)) == ForgetReply::InFlight {
            now(store.purge(10));
        }
    }
    explore(2, full, each, |store, _| assert!(rows(store) <= 2));
}

#[test]
fn renewal_during_a_purge_keeps_the_lease() {
    fn lapsed() -> MemoryAdapter {
        let store = store(4);
        claim(&store, "a", &brief());
        store.advance(LEASE);
        store
    }
    fn each(store: &MemoryAdapter, thread: u8) -> bool {
        match thread {
            1 => now(store.renew(&key("a"), &terms(thread))) == RenewReply::Held,
            2 => now(store.purge(1)) == 0,
            _ => claim(store, "a", &terms(thread)) == FIRST,
        }
    }
    explore(3, lapsed, each, |store, replies| {
        // The first of the two calls has the key.
        assert_ne!(replies[0], replies[2], "{replies:?}");
        assert_eq!(claim(store, "a", &terms(9)), ClaimReply::InFlight);
        assert_eq!(rows(store), 1);
    });
}
