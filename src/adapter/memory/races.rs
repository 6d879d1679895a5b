//! Every schedule of a few threads over one table.
//!
//! The table is compiled a second time, over a mutex that hands control to a scheduler. The
//! scheduler explores all interleavings of the calls of two or three threads.

use std::sync::Arc;
use std::time::Duration;

use shuttle::scheduler::DfsScheduler;
use shuttle::{Config, Runner, thread};

use super::{clock, pressure, row, shard};
use crate::adapter::replies::{Claimed, Completed, EntryState, Forgotten, Released, Renewed};
use crate::adapter::terms::{CallTerms, Token};
use crate::key::DedupKey;
use row::KeyHasher;
use table::{AtCapacity, Table};

#[path = "table.rs"]
#[allow(dead_code, unreachable_pub, reason = "only the model uses this copy")]
mod table;

mod sync {
    pub(super) use shuttle::sync::{Mutex, MutexGuard};
}

const LEASE: Duration = Duration::from_secs(10);
const FIRST: Claimed = Claimed::first(1, false);

/// The same in every schedule: keys have to be in the same shards.
const SECRET: [u8; 16] = [7; 16];

fn table(capacity: usize) -> Arc<Table> {
    Arc::new(Table::new(capacity, KeyHasher::new(SECRET)))
}

fn one_key() -> Arc<Table> {
    table(1)
}

fn many_shards() -> Arc<Table> {
    table(4_096)
}

/// Returns a key in each of two shards of [`many_shards`].
fn two_keys() -> [DedupKey; 2] {
    let (hasher, shards) = (KeyHasher::new(SECRET), many_shards().shards());
    let shard = |key: &DedupKey| hasher.fingerprint(key).shard(shards);
    let one = key("one");
    let other = (0..).map(|id| key(&id.to_string())).find(|key| shard(key) != shard(&one));
    let mut keys = [one, other.unwrap()];
    keys.sort_by_key(shard);
    keys
}

fn key(id: &str) -> DedupKey {
    DedupKey::new("n", id).unwrap()
}

fn terms(token: u8) -> CallTerms {
    CallTerms::on_completion(Token::from([token; 16]), Duration::from_secs(100), LEASE)
}

fn on_claim(token: u8) -> CallTerms {
    CallTerms::on_claim(Token::from([token; 16]), Duration::from_secs(100))
}

/// The terms of token 1, whose retention ends at once.
fn brief() -> CallTerms {
    CallTerms::on_completion(Token::from([1; 16]), Duration::ZERO, LEASE)
}

/// Runs `each` as the threads 1 to `threads`, in every order of their steps, and passes the results
/// to `check`.
fn explore<T: Send + 'static>(
    threads: u8,
    table: fn() -> Arc<Table>,
    each: fn(&Table, u8) -> T,
    check: fn(&Table, Vec<T>),
) {
    let run = move || {
        let table = table();
        let others: Vec<_> = (1..threads)
            .map(|thread| {
                let table = Arc::clone(&table);
                thread::spawn(move || each(&table, thread))
            })
            .collect();
        // A main thread that only waits would be one more to schedule.
        let own = each(&table, threads);
        let joined = others.into_iter().map(|thread| thread.join().unwrap());
        check(&table, joined.chain([own]).collect());
    };
    let scheduler = DfsScheduler::new(None, false);
    let schedules = Runner::new(scheduler, Config::new()).run(run);
    assert!(schedules > 1, "nothing was explored");
}

fn is_complete(table: &Table, key: &DedupKey) -> bool {
    let entry = table.get(key);
    entry.is_some_and(|entry| matches!(entry.state, EntryState::Complete { .. }))
}

#[test]
fn three_callers_have_one_first() {
    fn each(table: &Table, thread: u8) -> bool {
        let keys = [key("a")];
        if thread == 3 {
            return table.claim(&keys, &on_claim(thread)).unwrap() == [FIRST];
        }
        let claimed = table.claim(&keys, &terms(thread)).unwrap();
        if claimed != [FIRST] {
            return false;
        }
        assert_eq!(table.complete(&keys, &terms(thread)).unwrap(), [Completed::Held]);
        true
    }
    explore(3, one_key, each, |table, firsts| {
        assert_eq!(firsts.iter().filter(|first| **first).count(), 1, "{firsts:?}");
        assert!(is_complete(table, &key("a")));
        assert_eq!(table.stats().rows, 1);
    });
}

#[test]
fn overlapping_calls_are_atomic_whatever_the_order_of_their_keys() {
    fn each(table: &Table, thread: u8) -> Vec<Claimed> {
        let mut keys = two_keys();
        if thread == 2 {
            keys.reverse();
        }
        table.claim(&keys, &terms(thread)).unwrap()
    }
    explore(2, many_shards, each, |_, replies| {
        let first = vec![FIRST; 2];
        let in_flight = vec![Claimed::InFlight; 2];
        let one_each = [[first.clone(), in_flight.clone()], [in_flight, first]];
        assert!(one_each.iter().any(|expected| replies == *expected), "{replies:?}");
    });
}

#[test]
fn completion_survives_a_takeover_that_fails() {
    fn lapsed() -> Arc<Table> {
        let table = table(1);
        table.claim(&[key("a")], &terms(1)).unwrap();
        table.clock.advance(LEASE);
        table
    }
    fn each(table: &Table, thread: u8) {
        let (keys, mine) = ([key("a")], terms(thread));
        if thread == 1 {
            let completed = table.complete(&keys, &mine).unwrap();
            assert_ne!(completed, [Completed::Inserted]);
            return;
        }
        if let [Claimed::First { takeover, .. }] = table.claim(&keys, &mine).unwrap()[..] {
            assert!(takeover);
            table.release(&keys, &mine).unwrap();
        }
    }
    explore(2, lapsed, each, |table, _| assert!(is_complete(table, &key("a"))));
}

#[test]
fn released_on_arrival_claim_leaves_the_key_to_one_other() {
    fn each(table: &Table, thread: u8) -> Claimed {
        let (keys, mine) = ([key("a")], on_claim(thread));
        let claimed = table.claim(&keys, &mine).unwrap().remove(0);
        if thread == 1 {
            // A caller whose call timed out releases the key.
            table.release(&keys, &mine).unwrap();
        }
        claimed
    }
    explore(3, one_key, each, |table, replies| {
        let others = replies[1..].iter().filter(|reply| **reply == FIRST).count();
        assert!(others <= 1, "{replies:?}");
        // The key is complete only if one of the others claimed it.
        assert_eq!(is_complete(table, &key("a")), others == 1, "{replies:?}");
        assert!(others == 1 || replies[0] == FIRST, "{replies:?}");
    });
}

#[test]
fn live_lease_is_not_purged_evicted_or_forgotten() {
    fn full() -> Arc<Table> {
        let mut table = Table::new(2, KeyHasher::new(SECRET));
        table.at_capacity = AtCapacity::EvictOldest;
        table.claim(&[key("old")], &on_claim(0)).unwrap();
        Arc::new(table)
    }
    fn each(table: &Table, thread: u8) {
        let keys = [key("a")];
        if thread == 1 {
            assert_eq!(table.claim(&keys, &brief()).unwrap(), [FIRST]);
            assert_eq!(table.renew(&keys, &brief()).unwrap(), [Renewed::Held]);
            assert_eq!(table.complete(&keys, &brief()).unwrap(), [Completed::Held]);
            return;
        }
        for id in ["x", "y"] {
            table.claim(&[key(id)], &on_claim(thread)).unwrap();
        }
        if thread == 2 && table.forget(&keys[0]) == Forgotten::InFlight {
            table.purge(10);
        }
    }
    explore(2, full, each, |table, _| assert!(table.stats().rows <= 2));
}

#[test]
fn renewal_during_a_purge_keeps_the_lease() {
    fn lapsed() -> Arc<Table> {
        let table = table(4);
        table.claim(&[key("a")], &brief()).unwrap();
        table.clock.advance(LEASE);
        table
    }
    fn each(table: &Table, thread: u8) -> bool {
        let (keys, mine) = ([key("a")], terms(thread));
        match thread {
            1 => table.renew(&keys, &mine).unwrap() == [Renewed::Held],
            2 => table.purge(1) == 0,
            _ => table.claim(&keys, &mine).unwrap() == [FIRST],
        }
    }
    explore(3, lapsed, each, |table, replies| {
        // The first of the two calls has the key.
        assert_ne!(replies[0], replies[2], "{replies:?}");
        assert_eq!(table.claim(&[key("a")], &terms(9)).unwrap(), [Claimed::InFlight]);
        assert_eq!(table.stats().rows, 1);
    });
}
