//! Every schedule of a few threads over one table.
//!
//! The lock is one that hands control to a scheduler, which goes through all interleavings of the
//! calls of two or three threads: between any two uses of a lock everybody else may come first.

use std::sync::Arc;
use std::time::Duration;

use shuttle::scheduler::DfsScheduler;
use shuttle::sync::Mutex;
use shuttle::{Config, Runner, thread};

use super::super::contract::{
    CallTerms, Claimed, Completed, EntryState, Forgotten, Released, Renewed, Token,
};
use super::fingerprint::Keyed;
use super::shard::{SHARD_KEYS, Shard};
use super::store::AtCapacity;
use super::table::Table;
use crate::key::DedupKey;

type Explored = Table<Mutex<Shard>>;

const LEASE: Duration = Duration::from_secs(10);

/// The same shards in every schedule, or the schedules would not be the same.
fn keyed() -> Keyed {
    Keyed::new([7; 16], [3, 5, 7].map(|part| u128::MAX / part))
}

fn table(capacity: usize) -> Arc<Explored> {
    Arc::new(Table::new(capacity, keyed()))
}

/// A table of several shards, and a key in each of two of them.
fn two_shards() -> (Arc<Explored>, [DedupKey; 2]) {
    let table = table(4 * SHARD_KEYS);
    let shard = |key: &DedupKey| table.shard_of(key);
    let one = key("one");
    let other = (0..).map(|id| key(&id.to_string())).find(|key| shard(key) != shard(&one));
    let mut keys = [one, other.unwrap()];
    keys.sort_by_key(shard);
    (table, keys)
}

fn key(id: &str) -> DedupKey {
    DedupKey::new("n", id).unwrap()
}

fn terms(token: u8) -> CallTerms {
    CallTerms::on_completion(Token::from([token; 16]), Duration::from_secs(100), LEASE)
}

fn complete_at_once(token: u8) -> CallTerms {
    CallTerms::on_claim(Token::from([token; 16]), Duration::from_secs(100))
}

const FIRST: Claimed = Claimed::first(1, false);

/// Runs `each` as the threads 1 to `threads`, in every order of their steps, and hands `check`
/// what they answered.
fn explore<T: Send + 'static>(
    threads: u8,
    table: fn() -> Arc<Explored>,
    each: fn(&Explored, u8) -> T,
    check: fn(&Explored, Vec<T>),
) {
    let run = move || {
        let table = table();
        let others: Vec<_> = (1..threads)
            .map(|thread| {
                let table = Arc::clone(&table);
                thread::spawn(move || each(&table, thread))
            })
            .collect();
        // A thread that only waits is one more to schedule.
        let own = each(&table, threads);
        let joined = others.into_iter().map(|thread| thread.join().unwrap());
        check(&table, joined.chain([own]).collect());
    };
    let scheduler = DfsScheduler::new(None, false);
    let schedules = Runner::new(scheduler, Config::new()).run(run);
    assert!(schedules > 1, "nothing was explored");
}

fn is_complete(table: &Explored, key: &DedupKey) -> bool {
    let entry = table.get(key);
    entry.is_some_and(|entry| matches!(entry.state, EntryState::Complete { .. }))
}

#[test]
fn one_of_three_callers_is_first() {
    fn each(table: &Explored, thread: u8) -> bool {
        let keys = [key("a")];
        if thread == 3 {
            return table.claim(&keys, &complete_at_once(thread)).unwrap() == [FIRST];
        }
        let claimed = table.claim(&keys, &terms(thread)).unwrap();
        if claimed != [Claimed::first(1, false)] {
            return false;
        }
        assert_eq!(table.complete(&keys, &terms(thread)).unwrap(), [Completed::Held]);
        true
    }
    explore(
        3,
        || table(1),
        each,
        |table, firsts| {
            assert_eq!(firsts.iter().filter(|first| **first).count(), 1, "{firsts:?}");
            assert!(is_complete(table, &key("a")));
            assert_eq!(table.count(), 1);
        },
    );
}

#[test]
fn sets_that_overlap_are_claimed_in_one_step_whatever_their_order() {
    fn each(table: &Explored, thread: u8) -> Vec<Claimed> {
        let (_, mut keys) = two_shards();
        if thread == 2 {
            keys.reverse();
        }
        table.claim(&keys, &terms(thread)).unwrap()
    }
    explore(
        2,
        || two_shards().0,
        each,
        |_, answers| {
            let first = vec![Claimed::first(1, false); 2];
            let in_flight = vec![Claimed::InFlight; 2];
            let one_each = [[first.clone(), in_flight.clone()], [in_flight, first]];
            assert!(one_each.iter().any(|expected| answers == *expected), "{answers:?}");
        },
    );
}

#[test]
fn a_completion_is_never_lost_to_a_takeover_that_fails() {
    fn lapsed() -> Arc<Explored> {
        let table = table(1);
        table.claim(&[key("a")], &terms(1)).unwrap();
        table.clock.advance(LEASE);
        table
    }
    fn each(table: &Explored, thread: u8) {
        let (keys, mine) = ([key("a")], terms(thread));
        if thread == 1 {
            let completed = table.complete(&keys, &mine).unwrap();
            assert_ne!(completed, [Completed::Inserted]);
            return;
        }
        if let [Claimed::First { takeover, .. }] = table.claim(&keys, &mine).unwrap()[..] {
            assert!(takeover);
            // Unless it was completed meanwhile.
            let released = table.release(&keys, &mine).unwrap();
            assert!(released == [Released::Released] || is_complete(table, &keys[0]));
        }
    }
    explore(2, lapsed, each, |table, _| assert!(is_complete(table, &key("a"))));
}

#[test]
fn an_undone_record_leaves_the_key_to_one_other() {
    fn each(table: &Explored, thread: u8) -> Claimed {
        let (keys, mine) = ([key("a")], complete_at_once(thread));
        let claimed = table.claim(&keys, &mine).unwrap().remove(0);
        if thread == 1 {
            // A caller that gives up undoes what it may have done.
            table.release(&keys, &mine).unwrap();
        }
        claimed
    }
    explore(
        3,
        || table(1),
        each,
        |table, answers| {
            let others = answers[1..].iter().filter(|answer| **answer == FIRST).count();
            assert!(others <= 1, "{answers:?}");
            // Nobody is told "duplicate" of a key that nobody but the first ever recorded.
            assert_eq!(is_complete(table, &key("a")), others == 1, "{answers:?}");
            assert!(others == 1 || answers[0] == FIRST, "{answers:?}");
        },
    );
}

#[test]
fn a_live_lease_is_neither_purged_nor_evicted_nor_forgotten() {
    fn full() -> Arc<Explored> {
        let mut table = Table::new(2, keyed());
        table.at_capacity = AtCapacity::EvictOldest;
        table.claim(&[key("old")], &complete_at_once(0)).unwrap();
        Arc::new(table)
    }
    fn each(table: &Explored, thread: u8) {
        let keys = [key("a")];
        if thread == 1 {
            // It outlives its retention, which is over at once.
            let brief = CallTerms::on_completion(Token::from([1; 16]), Duration::ZERO, LEASE);
            assert_eq!(table.claim(&keys, &brief).unwrap(), [Claimed::first(1, false)]);
            assert_eq!(table.renew(&keys, &brief).unwrap(), [Renewed::Held]);
            assert_eq!(table.complete(&keys, &brief).unwrap(), [Completed::Held]);
            return;
        }
        for id in ["x", "y"] {
            table.claim(&[key(id)], &complete_at_once(thread)).unwrap();
        }
        if thread == 2 && table.forget(&keys[0]) == Forgotten::InFlight {
            table.purge(10);
        }
    }
    explore(2, full, each, |table, _| assert!(table.count() <= 2));
}

#[test]
fn a_renewal_beside_a_purge_holds_the_lease() {
    fn lapsed() -> Arc<Explored> {
        let table = table(4);
        let brief = CallTerms::on_completion(Token::from([1; 16]), Duration::ZERO, LEASE);
        table.claim(&[key("a")], &brief).unwrap();
        table.clock.advance(LEASE);
        table
    }
    fn each(table: &Explored, thread: u8) -> bool {
        let (keys, mine) = ([key("a")], terms(thread));
        match thread {
            1 => table.renew(&keys, &mine).unwrap() == [Renewed::Held],
            2 => table.purge(1) == 0,
            _ => table.claim(&keys, &mine).unwrap() == [Claimed::first(1, false)],
        }
    }
    explore(3, lapsed, each, |table, answers| {
        // Whoever came first has it.
        assert_ne!(answers[0], answers[2], "{answers:?}");
        assert_eq!(table.claim(&[key("a")], &terms(9)).unwrap(), [Claimed::InFlight]);
        assert_eq!(table.count(), 1);
    });
}
