//! The memory adapter: its memory, its capacity and its clock.
#![expect(clippy::unwrap_used, reason = "what cannot be unwrapped fails the test")]

use std::time::Duration;

use allocation_counter::AllocationInfo;
use futures_util::FutureExt;
use tower_dedup::adapter::{
    AtCapacity, CallTerms, Claimed, Completed, DedupAdapter, Fetch, LeaseAdapter,
    MaintenanceAdapter, MemoryAdapter, PURGE_GRACE, Recall, Recorded, Token,
};
use tower_dedup::{DedupKey, Error, ErrorKind};

const KEYS: usize = 100_000;
const RETENTION: Duration = Duration::from_secs(1_000);

fn key(id: usize) -> DedupKey {
    DedupKey::new("memory", &format!("evt_{id:020}")).unwrap()
}

fn keys(ids: std::ops::Range<usize>) -> Vec<DedupKey> {
    ids.map(key).collect()
}

fn terms() -> CallTerms {
    CallTerms::new(Token::random(), RETENTION).with_lease(Duration::from_secs(10))
}

fn now<T>(call: impl Future<Output = T>) -> T {
    call.now_or_never().expect("the memory adapter never waits")
}

fn record(adapter: &MemoryAdapter, keys: &[DedupKey]) -> Result<Vec<Recorded>, Error> {
    now(adapter.record(keys, &terms()))
}

fn is_full<T>(reply: Result<T, Error>) -> bool {
    reply.is_err_and(|error| error.kind() == ErrorKind::Full)
}

fn measure(run: impl FnOnce()) -> AllocationInfo {
    allocation_counter::measure(run)
}

fn roomy() -> MemoryAdapter {
    // Shards fill unevenly.
    MemoryAdapter::with_capacity(KEYS + KEYS / 10)
}

#[test]
fn complete_key_takes_96_bytes_at_most() {
    let adapter = roomy();
    // Claims leave nothing behind.
    let info = measure(|| {
        for id in 0..KEYS {
            let (keys, mine) = ([key(id)], terms());
            assert_eq!(now(adapter.claim(&keys, &mine)).unwrap(), [Claimed::first(1, false)]);
            assert_eq!(now(adapter.complete(&keys, &mine)).unwrap(), [Completed::Held]);
        }
    });
    assert_eq!(now(adapter.count()).unwrap(), KEYS as u64);
    let bytes = info.bytes_current as f64 / KEYS as f64;
    assert!((80.0..96.0).contains(&bytes), "{bytes}");
}

#[test]
fn completed_claims_take_no_more_than_other_keys() {
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
    assert!((80.0..96.0).contains(&bytes), "{bytes}");
}

#[test]
fn purge_frees_memory_in_every_cycle() {
    let adapter = roomy();
    let cycle = |start: usize| {
        let info = measure(|| {
            for id in start..start + KEYS {
                record(&adapter, &[key(id)]).unwrap();
            }
            adapter.advance(RETENTION + PURGE_GRACE);
            assert_eq!(now(adapter.purge(u32::MAX)).unwrap(), KEYS as u64);
        });
        assert!(info.bytes_max < 96 * KEYS as u64, "{}", info.bytes_max);
        info.bytes_current
    };
    assert_eq!([0, KEYS, 2 * KEYS].map(cycle), [0, 0, 0]);
}

#[test]
fn insertions_reuse_the_memory_of_expired_keys() {
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
    // Shards fill unevenly in every cycle.
    let most = fill(0) / 20;
    for cycle in 1..4 {
        let grown = fill(cycle * KEYS);
        assert!(grown < most, "{cycle}: {grown}");
    }
}

#[test]
fn call_allocates_its_replies_and_little_else() {
    let (adapter, keys) = (roomy(), keys(0..10_000));
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
fn small_adapters_hold_exactly_their_capacity() {
    for (asked, held) in [(0, 1), (1, 1), (2, 2), (17, 17), (2_047, 2_047)] {
        let adapter = MemoryAdapter::with_capacity(asked);
        for id in 0..held {
            assert_eq!(record(&adapter, &[key(id)]).unwrap(), [Recorded::First], "{asked} {id}");
        }
        assert!(is_full(record(&adapter, &[key(held)])), "{asked}");
        assert!(is_full(now(adapter.claim(&[key(held)], &terms()))), "{asked}");
        assert!(is_full(now(adapter.renew(&[key(held)], &terms()))), "{asked}");
        assert!(is_full(now(adapter.complete(&[key(held)], &terms()))), "{asked}");
        // Known keys still get a reply.
        let again = record(&adapter, &[key(0)]).unwrap();
        assert!(matches!(again[..], [Recorded::Duplicate(_)]), "{asked}");
    }
}

#[test]
fn sharded_adapters_hold_at_least_85_per_cent_of_their_capacity() {
    for capacity in [2_048, 5_000, 20_000, 100_000] {
        let adapter = MemoryAdapter::with_capacity(capacity);
        let first_refused =
            (0..=capacity).find(|id| is_full(record(&adapter, &[key(*id)]))).unwrap();
        assert!(first_refused > capacity * 85 / 100, "{capacity}: {first_refused}");
    }
}

#[test]
fn call_that_fits_exactly_is_claimed_and_one_key_more_is_refused() {
    for at_capacity in [AtCapacity::Refuse, AtCapacity::EvictOldest] {
        let adapter = MemoryAdapter::with_capacity(8).at_capacity(at_capacity);
        assert!(is_full(record(&adapter, &keys(0..9))), "{at_capacity:?}");
        assert_eq!(now(adapter.count()).unwrap(), 0);
        assert_eq!(record(&adapter, &keys(0..8)).unwrap(), [Recorded::First; 8]);
        // Seven of these eight keys are known, and one known key is not among them.
        let refused = is_full(record(&adapter, &keys(1..9)));
        assert_eq!(refused, at_capacity == AtCapacity::Refuse);
        let known = (0..9).filter(|id| now(adapter.get(&key(*id))).unwrap().is_some());
        let expected = if refused { 0..8 } else { 1..9 };
        assert_eq!(known.collect::<Vec<_>>(), expected.collect::<Vec<_>>());
    }
}

#[test]
fn call_that_does_not_fit_evicts_nothing() {
    let adapter = MemoryAdapter::with_capacity(4).at_capacity(AtCapacity::EvictOldest);
    record(&adapter, &keys(0..3)).unwrap();
    now(adapter.claim(&[key(3)], &terms())).unwrap();
    // Three keys could be evicted for four new ones.
    assert!(is_full(record(&adapter, &keys(10..14))));
    assert!(is_full(now(adapter.claim(&keys(10..14), &terms()))));
    for id in 0..4 {
        assert!(now(adapter.get(&key(id))).unwrap().is_some(), "{id}");
    }
    assert_eq!(record(&adapter, &keys(10..13)).unwrap(), [Recorded::First; 3]);
    assert_eq!(now(adapter.claim(&[key(3)], &terms())).unwrap(), [Claimed::InFlight]);
}

#[test]
fn call_evicts_none_of_its_own_keys() {
    let adapter = MemoryAdapter::with_capacity(4).at_capacity(AtCapacity::EvictOldest);
    for id in 0..4 {
        record(&adapter, &[key(id)]).unwrap();
    }
    // The oldest key is one of the call.
    let replies = record(&adapter, &[key(0), key(10)]).unwrap();
    assert!(matches!(replies[..], [Recorded::Duplicate(_), Recorded::First]), "{replies:?}");
    assert!(now(adapter.get(&key(1))).unwrap().is_none());
    assert_eq!(now(adapter.count()).unwrap(), 4);
}

#[test]
fn eviction_takes_the_key_nearest_to_its_expiry() {
    let adapter = MemoryAdapter::with_capacity(6).at_capacity(AtCapacity::EvictOldest);
    let keep = |id: usize, seconds: u64| {
        let terms = CallTerms::new(Token::random(), Duration::from_secs(seconds));
        assert_eq!(now(adapter.record(&[key(id)], &terms)).unwrap(), [Recorded::First]);
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
fn extreme_times_do_not_panic_and_expire_in_order() {
    let adapter = MemoryAdapter::with_capacity(10);
    let odd = [Duration::ZERO, Duration::from_nanos(1), Duration::from_millis(1), Duration::MAX];
    let odd = odd.map(|time| [time, Duration::from_secs(600 * 365 * 86_400)]);
    for (id, retention) in odd.into_iter().flatten().enumerate() {
        for lease in odd.into_iter().flatten() {
            let (keys, mine) = ([key(id)], CallTerms::new(Token::random(), retention));
            let mine = mine.with_lease(lease);
            now(adapter.claim(&keys, &mine)).unwrap();
            now(adapter.renew(&keys, &mine)).unwrap();
            now(adapter.get(&keys[0])).unwrap();
            now(adapter.complete(&keys, &mine)).unwrap();
            now(adapter.recall(&keys, Fetch::DigestAndResponse)).unwrap();
            now(adapter.purge(10)).unwrap();
        }
    }
    for by in [Duration::from_secs(600 * 365 * 86_400), Duration::MAX, Duration::MAX] {
        adapter.advance(by);
        now(adapter.purge(10)).unwrap();
        let recorded = record(&adapter, &[key(100)]).unwrap();
        assert!(matches!(recorded[..], [Recorded::First]), "{recorded:?}");
    }
    // The clock stands at its maximum, so the purge's grace never passes.
    assert_eq!(now(adapter.purge(10)).unwrap(), 0);
    assert!(now(adapter.get(&key(100))).unwrap().is_none());
}

#[tokio::test(start_paused = true)]
async fn leases_and_retention_follow_paused_time() {
    let adapter = MemoryAdapter::new();
    let (keys, mine) = ([key(0)], terms());
    adapter.claim(&keys, &mine).await.unwrap();
    tokio::time::advance(mine.lease() - Duration::from_millis(1)).await;
    assert_eq!(adapter.claim(&keys, &terms()).await.unwrap(), [Claimed::InFlight]);
    tokio::time::sleep(Duration::from_millis(1)).await;
    assert_eq!(adapter.claim(&keys, &terms()).await.unwrap(), [Claimed::first(2, true)]);
    adapter.complete(&keys, &mine).await.unwrap();
    // A claim sets `expires_at` anew, so the retention counts from the takeover.
    tokio::time::advance(RETENTION - Duration::from_millis(1)).await;
    assert!(matches!(adapter.claim(&keys, &terms()).await.unwrap()[..], [Claimed::Duplicate(_)]));
    tokio::time::advance(Duration::from_millis(1)).await;
    assert_eq!(adapter.claim(&keys, &terms()).await.unwrap(), [Claimed::first(1, false)]);
}

#[tokio::test(start_paused = true)]
async fn paused_time_stands_still_for_leases() {
    let adapter = MemoryAdapter::new();
    let brief = CallTerms::new(Token::random(), RETENTION).with_lease(Duration::from_millis(1));
    adapter.claim(&[key(0)], &brief).await.unwrap();
    // Real time passes; paused time does not.
    std::thread::sleep(Duration::from_millis(5));
    assert_eq!(adapter.claim(&[key(0)], &terms()).await.unwrap(), [Claimed::InFlight]);
    adapter.advance(Duration::from_millis(1));
    assert_eq!(adapter.claim(&[key(0)], &terms()).await.unwrap(), [Claimed::first(2, true)]);
}

#[test]
fn threads_without_a_runtime_use_real_time() {
    let adapter = MemoryAdapter::new();
    let brief = CallTerms::new(Token::random(), RETENTION).with_lease(Duration::from_millis(1));
    now(adapter.claim(&[key(0)], &brief)).unwrap();
    std::thread::sleep(Duration::from_millis(2));
    assert_eq!(now(adapter.claim(&[key(0)], &terms())).unwrap(), [Claimed::first(2, true)]);
}
