//! What the memory adapter takes and gives back, and what happens at the edges of its capacity.
#![expect(clippy::unwrap_used, reason = "what cannot be unwrapped fails the test")]

use std::time::Duration;

use allocation_counter::AllocationInfo;
use futures_util::FutureExt;
use tower_dedup::adapter::{
    AtCapacity, CallTerms, Claimed, Completed, DedupAdapter, Fetch, MaintenanceAdapter,
    MemoryAdapter, PURGE_GRACE, Token,
};
use tower_dedup::{DedupKey, Error, ErrorKind};

use crate::support::{FIRST, on_claim};

const KEYS: usize = 100_000;
const RETENTION: Duration = Duration::from_secs(1_000);

fn key(id: usize) -> DedupKey {
    DedupKey::new("memory", &format!("evt_{id:020}")).unwrap()
}

fn keys(ids: std::ops::Range<usize>) -> Vec<DedupKey> {
    ids.map(key).collect()
}

fn terms() -> CallTerms {
    CallTerms::on_completion(Token::random(), RETENTION, Duration::from_secs(10))
}

fn now<T>(call: impl Future<Output = T>) -> T {
    call.now_or_never().expect("memory never waits")
}

fn record(adapter: &MemoryAdapter, keys: &[DedupKey]) -> Result<Vec<Claimed>, Error> {
    now(adapter.claim(keys, &on_claim(&terms())))
}

fn is_full<T>(answer: Result<T, Error>) -> bool {
    answer.is_err_and(|error| error.kind() == ErrorKind::Full)
}

fn measure(run: impl FnOnce()) -> AllocationInfo {
    allocation_counter::measure(run)
}

fn roomy() -> MemoryAdapter {
    // Shards are not filled alike.
    MemoryAdapter::with_capacity(KEYS + KEYS / 10)
}

#[test]
fn a_complete_key_takes_64_bytes_at_most() {
    let adapter = roomy();
    // Neither is anything left of claims.
    let info = measure(|| {
        for id in 0..KEYS {
            let (keys, mine) = ([key(id)], terms());
            assert_eq!(now(adapter.claim(&keys, &mine)).unwrap(), [Claimed::first(1, false)]);
            assert_eq!(now(adapter.complete(&keys, &mine)).unwrap(), [Completed::Held]);
        }
    });
    assert_eq!(now(adapter.count()).unwrap(), KEYS as u64);
    let bytes = info.bytes_current as f64 / KEYS as f64;
    assert!((48.0..64.0).contains(&bytes), "{bytes}");
}

#[test]
fn a_burst_of_claims_leaves_nothing_behind_once_they_are_complete() {
    let adapter = roomy();
    let mine = terms();
    let info = measure(|| {
        let keys = keys(0..KEYS);
        for keys in keys.chunks(4_096) {
            now(adapter.claim(keys, &mine)).unwrap();
        }
        for keys in keys.chunks(1_000) {
            assert_eq!(now(adapter.complete(keys, &mine)).unwrap(), [Completed::Held; 1_000]);
        }
    });
    let bytes = info.bytes_current as f64 / KEYS as f64;
    assert!((48.0..64.0).contains(&bytes), "{bytes}");
}

#[test]
fn what_has_expired_gives_its_memory_back_cycle_after_cycle() {
    let adapter = roomy();
    let cycle = |start: usize| {
        let info = measure(|| {
            for id in start..start + KEYS {
                record(&adapter, &[key(id)]).unwrap();
            }
            adapter.advance(RETENTION + PURGE_GRACE);
            assert_eq!(now(adapter.purge(u32::MAX)).unwrap(), KEYS as u64);
        });
        assert!(info.bytes_max < 64 * KEYS as u64, "{}", info.bytes_max);
        info.bytes_current
    };
    // A chunk of each shard stays, after the first.
    let left = [0, KEYS, 2 * KEYS].map(cycle);
    assert!(left[0] > 0 && left[0].unsigned_abs() < 2 * KEYS as u64, "{left:?}");
    assert_eq!(left[1..], [0, 0], "{left:?}");
}

#[test]
fn a_store_that_is_only_written_to_reuses_what_has_expired() {
    let adapter = roomy();
    let fill = |start: usize| {
        let info = measure(|| {
            for id in start..start + KEYS {
                record(&adapter, &[key(id)]).unwrap();
            }
        });
        adapter.advance(RETENTION);
        info.bytes_current
    };
    // Shards are not filled alike in every cycle.
    let most = fill(0) / 20;
    for cycle in 1..4 {
        let grown = fill(cycle * KEYS);
        assert!(grown < most, "{cycle}: {grown}");
    }
}

#[test]
fn a_call_allocates_its_answer_and_little_else() {
    let (adapter, keys) = (roomy(), keys(0..10_000));
    // Between two calls that make room for more.
    let allocations = |call: &dyn Fn(&[DedupKey])| {
        measure(|| keys.chunks(1).for_each(call)).count_total as f64 / keys.len() as f64
    };
    let mine = terms();
    let claims = allocations(&|key| drop(now(adapter.claim(key, &mine))));
    let completions = allocations(&|key| drop(now(adapter.complete(key, &mine))));
    let duplicates = allocations(&|key| drop(record(&adapter, key)));
    assert!(claims < 1.2 && completions < 1.1, "{claims} {completions}");
    assert_eq!(duplicates.to_bits(), 1_f64.to_bits());
}

#[test]
fn the_smallest_stores_hold_what_they_say() {
    for (asked, held) in [(0, 1), (1, 1), (2, 2), (17, 17), (2_047, 2_047)] {
        let adapter = MemoryAdapter::with_capacity(asked);
        for id in 0..held {
            assert_eq!(record(&adapter, &[key(id)]).unwrap(), [FIRST], "{asked} {id}");
        }
        assert!(is_full(record(&adapter, &[key(held)])), "{asked}");
        assert!(is_full(now(adapter.claim(&[key(held)], &terms()))), "{asked}");
        assert!(is_full(now(adapter.renew(&[key(held)], &terms()))), "{asked}");
        assert!(is_full(now(adapter.complete(&[key(held)], &terms()))), "{asked}");
        // What is there is served.
        let again = record(&adapter, &[key(0)]).unwrap();
        assert!(matches!(again[..], [Claimed::Duplicate(_)]), "{asked}");
    }
}

#[test]
fn shards_of_any_number_hold_nearly_what_they_say() {
    for capacity in [2_048, 5_000, 20_000, 100_000] {
        let adapter = MemoryAdapter::with_capacity(capacity);
        let first_refused =
            (0..=capacity).find(|id| is_full(record(&adapter, &[key(*id)]))).unwrap();
        assert!(first_refused > capacity * 85 / 100, "{capacity}: {first_refused}");
    }
}

#[test]
fn a_set_that_fits_exactly_is_taken_and_one_more_is_not() {
    for at_capacity in [AtCapacity::Refuse, AtCapacity::EvictOldest] {
        let adapter = MemoryAdapter::with_capacity(8).at_capacity(at_capacity);
        assert!(is_full(record(&adapter, &keys(0..9))), "{at_capacity:?}");
        assert_eq!(now(adapter.count()).unwrap(), 0);
        assert_eq!(record(&adapter, &keys(0..8)).unwrap(), [FIRST; 8]);
        // Seven of it are known, and only those.
        let refused = is_full(record(&adapter, &keys(1..9)));
        assert_eq!(refused, at_capacity == AtCapacity::Refuse);
        let known = (0..9).filter(|id| now(adapter.get(&key(*id))).unwrap().is_some());
        let expected = if refused { 0..8 } else { 1..9 };
        assert_eq!(known.collect::<Vec<_>>(), expected.collect::<Vec<_>>());
    }
}

#[test]
fn a_set_that_does_not_fit_evicts_nobody() {
    let adapter = MemoryAdapter::with_capacity(4).at_capacity(AtCapacity::EvictOldest);
    record(&adapter, &keys(0..3)).unwrap();
    now(adapter.claim(&[key(3)], &terms())).unwrap();
    // Three could go for four.
    assert!(is_full(record(&adapter, &keys(10..14))));
    assert!(is_full(now(adapter.claim(&keys(10..14), &terms()))));
    for id in 0..4 {
        assert!(now(adapter.get(&key(id))).unwrap().is_some(), "{id}");
    }
    assert_eq!(record(&adapter, &keys(10..13)).unwrap(), [FIRST; 3]);
    assert_eq!(now(adapter.claim(&[key(3)], &terms())).unwrap(), [Claimed::InFlight]);
}

#[test]
fn a_set_evicts_none_of_its_own_keys() {
    let adapter = MemoryAdapter::with_capacity(4).at_capacity(AtCapacity::EvictOldest);
    for id in 0..4 {
        record(&adapter, &[key(id)]).unwrap();
    }
    // The oldest is one of the set.
    let answers = record(&adapter, &[key(0), key(10)]).unwrap();
    assert!(matches!(answers[..], [Claimed::Duplicate(_), FIRST]), "{answers:?}");
    assert!(now(adapter.get(&key(1))).unwrap().is_none());
    assert_eq!(now(adapter.count()).unwrap(), 4);
}

#[test]
fn the_key_nearest_to_its_expiry_is_evicted_first() {
    let adapter = MemoryAdapter::with_capacity(6).at_capacity(AtCapacity::EvictOldest);
    let keep = |id: usize, seconds: u64| {
        let terms = CallTerms::on_claim(Token::random(), Duration::from_secs(seconds));
        assert_eq!(now(adapter.claim(&[key(id)], &on_claim(&terms))).unwrap(), [FIRST]);
    };
    for (id, seconds) in [(0, 500), (1, 100), (2, 300), (3, 600), (4, 200), (5, 400)] {
        keep(id, seconds);
    }
    for (id, evicted) in [(6, 1), (7, 4), (8, 2), (9, 5), (10, 0), (11, 3)] {
        assert!(now(adapter.get(&key(evicted))).unwrap().is_some(), "{evicted}");
        keep(id, 1_000);
        assert!(now(adapter.get(&key(evicted))).unwrap().is_none(), "{evicted}");
    }
}

#[test]
fn trap_32_the_longest_and_the_shortest_times_do_no_harm() {
    let adapter = MemoryAdapter::with_capacity(10);
    let odd = [Duration::ZERO, Duration::from_nanos(1), Duration::from_millis(1), Duration::MAX];
    let odd = odd.map(|time| [time, Duration::from_secs(600 * 365 * 86_400)]);
    for (id, retention) in odd.into_iter().flatten().enumerate() {
        for lease in odd.into_iter().flatten() {
            let keys = [key(id)];
            let mine = CallTerms::on_completion(Token::random(), retention, lease);
            now(adapter.claim(&keys, &mine)).unwrap();
            now(adapter.renew(&keys, &mine)).unwrap();
            now(adapter.get(&keys[0])).unwrap();
            now(adapter.complete(&keys, &mine)).unwrap();
            let fetching = mine.clone().with_fetch(Fetch::DigestAndResponse);
            now(adapter.claim(&keys, &fetching)).unwrap();
            now(adapter.purge(10)).unwrap();
        }
    }
    for by in [Duration::from_secs(600 * 365 * 86_400), Duration::MAX, Duration::MAX] {
        adapter.advance(by);
        now(adapter.purge(10)).unwrap();
        let recorded = record(&adapter, &[key(100)]).unwrap();
        assert!(matches!(recorded[..], [FIRST]), "{recorded:?}");
    }
    // The end of time, an hour after which never comes.
    assert_eq!(now(adapter.purge(10)).unwrap(), 0);
    assert!(now(adapter.get(&key(100))).unwrap().is_none());
}
