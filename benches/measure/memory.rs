//! What the memory adapter costs a new key, in time and bytes, beside `moka` doing the same.
//!
//! 1. The same work: an atomic "first or not" under a text that names the event, a token and a
//!    retention of its own, for 1,000,000 keys. Of moka that is the entry API of a cache whose
//!    entries bring their own time to live; a plain `insert`, which tells nobody who was first, is
//!    measured as well.
//! 2. In turn, 100,000 keys at a time, so that a machine whose speed drifts slows both. Making keys,
//!    tokens and call_terms is part of neither, but happens just before, as it does in a server. Time
//!    counts from the empty store on, growth included, in one thread; it is that thread's time on a
//!    processor, so that what else the machine does counts for little.
//! 3. Bytes are those the allocator was asked for, less those given back, in a run of their own:
//!    while time is measured they are not counted.
//!
//! The binary that includes this file gets the counting allocator of `allocation-counter`. Where it
//! does not count it still asks whether to, some two nanoseconds for each allocation.

use std::hint::black_box;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use moka::Expiry;
use moka::sync::Cache;
use rustix::time::{ClockId, clock_gettime};
use tower_dedup::DedupKey;
use tower_dedup::adapter::{
    CallTerms, Claimed, Completed, DedupAdapter, MaintenanceAdapter, MemoryAdapter, Token,
};

/// So many of one, then as many of the other.
const TURN: usize = 100_000;
/// So many are made before they are recorded.
const BLOCK: usize = 200;
const RETENTION: Duration = Duration::from_secs(30 * 86_400);
const LEASE: Duration = Duration::from_secs(60);

/// How long this thread has been running.
fn clock() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::try_from(time).expect("a time after its beginning")
}

/// Every result by its name: nanoseconds, bytes, counts and ratios, as the names say.
pub(crate) fn measure(keys: usize) -> Vec<(String, f64)> {
    let mut results = Vec::new();
    let mut add = |name: &str, value: f64| results.push((name.to_owned(), value));

    let [record, turnover, entry, insert] = not_counted(|| of_records(keys));
    add("memory_insert_ns", record);
    add("memory_turnover_ns", turnover);
    add("moka_entry_ns", entry);
    add("moka_insert_ns", insert);
    add("memory_over_moka", entry / record);
    add("memory_over_moka_insert", insert / record);

    let [lease, moka] = not_counted(|| of_leases(keys));
    add("memory_lease_ns", lease);
    add("moka_lease_ns", moka);
    add("memory_lease_over_moka", moka / lease);

    add("memory_longest_insert_us", not_counted(|| longest_insert(keys)));

    let ours = counted(|| filled(keys));
    let moka = counted(|| filled_moka(keys));
    add("memory_bytes", ours.bytes);
    add("memory_peak_bytes", ours.peak_bytes);
    add("moka_bytes", moka.bytes);
    add("moka_over_memory_bytes", moka.bytes / ours.bytes);

    let (claim, complete) = allocations();
    add("memory_claim_allocations", claim);
    add("memory_complete_allocations", complete);
    results
}

fn adapter(keys: usize) -> MemoryAdapter {
    // Shards are not filled alike: at its very capacity a store has begun to refuse.
    MemoryAdapter::with_capacity(keys + keys / 10)
}

/// Ids as senders make them.
fn id(number: usize) -> String {
    format!("evt_{:024x}", (number as u128).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060))
}

fn key(number: usize) -> DedupKey {
    DedupKey::new("stripe", &id(number)).expect("a key")
}

fn terms() -> CallTerms {
    CallTerms::on_completion(Token::random(), RETENTION, LEASE)
}

/// The keys of a turn, block by block.
fn blocks(start: usize) -> impl Iterator<Item = Vec<(DedupKey, CallTerms)>> {
    (start..start + TURN).step_by(BLOCK).map(block)
}

fn block(start: usize) -> Vec<(DedupKey, CallTerms)> {
    (start..start + BLOCK).map(|number| (key(number), terms())).collect()
}

/// What moka keeps with a key: who recorded it, and for how long.
#[derive(Clone)]
struct Value {
    token: Token,
    retention: Duration,
}

struct OwnRetention;

impl Expiry<String, Value> for OwnRetention {
    fn expire_after_create(&self, _: &String, value: &Value, _: Instant) -> Option<Duration> {
        Some(value.retention)
    }
}

fn cache(keys: usize) -> Cache<String, Value> {
    Cache::builder().max_capacity(2 * keys as u64).expire_after(OwnRetention).build()
}

fn moka_blocks(start: usize) -> impl Iterator<Item = Vec<(String, Value)>> {
    (start..start + TURN).step_by(BLOCK).map(moka_block)
}

fn moka_block(start: usize) -> Vec<(String, Value)> {
    let value = || Value { token: Token::random(), retention: RETENTION };
    (start..start + BLOCK).map(|number| (format!("stripe:{}", id(number)), value())).collect()
}

fn record(adapter: &MemoryAdapter, block: &[(DedupKey, CallTerms)]) -> Duration {
    let start = clock();
    for (key, terms) in block {
        let recorded = adapter
            .claim(std::slice::from_ref(key), &CallTerms::on_claim(terms.token(), RETENTION))
            .now_or_never();
        assert_eq!(recorded.expect("no wait").expect("room"), [Claimed::first(1, false)]);
    }
    clock() - start
}

fn lease(adapter: &MemoryAdapter, block: &[(DedupKey, CallTerms)]) -> Duration {
    let start = clock();
    for (key, terms) in block {
        let keys = std::slice::from_ref(key);
        let claimed = adapter.claim(keys, terms).now_or_never();
        assert_eq!(claimed.expect("no wait").expect("room"), [Claimed::first(1, false)]);
        let completed = adapter.complete(keys, terms).now_or_never();
        assert_eq!(completed.expect("no wait").expect("room"), [Completed::Held]);
    }
    clock() - start
}

fn enter(cache: &Cache<String, Value>, block: Vec<(String, Value)>) -> Duration {
    let start = clock();
    for (key, value) in block {
        let entry = cache.entry(key).or_insert(value);
        assert!(entry.is_fresh());
        black_box(entry.into_value().token);
    }
    clock() - start
}

fn enter_twice(cache: &Cache<String, Value>, block: Vec<(String, Value)>) -> Duration {
    let start = clock();
    for (key, value) in block {
        assert!(cache.entry_by_ref(&key).or_insert(value.clone()).is_fresh());
        cache.insert(key, value);
    }
    clock() - start
}

fn insert(cache: &Cache<String, Value>, block: Vec<(String, Value)>) -> Duration {
    let start = clock();
    block.into_iter().for_each(|(key, value)| cache.insert(key, value));
    clock() - start
}

fn per_key(total: Duration, keys: usize) -> f64 {
    total.as_secs_f64() * 1e9 / keys as f64
}

/// Record into an empty store, and into one whose keys have all expired; moka's entry and insert.
fn of_records(keys: usize) -> [f64; 4] {
    let (adapter, entered, inserted) = (adapter(keys), cache(keys), cache(keys));
    let mut times = [Duration::ZERO; 4];
    for start in (0..keys).step_by(TURN) {
        times[0] += blocks(start).map(|block| record(&adapter, &block)).sum::<Duration>();
        times[2] += moka_blocks(start).map(|block| enter(&entered, block)).sum::<Duration>();
        times[3] += moka_blocks(start).map(|block| insert(&inserted, block)).sum::<Duration>();
    }
    adapter.advance(RETENTION);
    for start in (keys..2 * keys).step_by(TURN) {
        times[1] += blocks(start).map(|block| record(&adapter, &block)).sum::<Duration>();
    }
    times.map(|time| per_key(time, keys))
}

/// Claim and complete; moka's entry and the insert that changes its value.
fn of_leases(keys: usize) -> [f64; 2] {
    let (adapter, cache) = (adapter(keys), cache(keys));
    let mut times = [Duration::ZERO; 2];
    for start in (0..keys).step_by(TURN) {
        times[0] += blocks(start).map(|block| lease(&adapter, &block)).sum::<Duration>();
        times[1] += moka_blocks(start).map(|block| enter_twice(&cache, block)).sum::<Duration>();
    }
    times.map(|time| per_key(time, keys))
}

/// Of three runs the shortest longest: whatever else the machine does only makes it longer.
fn longest_insert(keys: usize) -> f64 {
    let longest = (0..3).map(|_| {
        let adapter = adapter(keys);
        let mut longest = Duration::ZERO;
        for start in (0..keys).step_by(BLOCK) {
            for one in block(start).chunks(1) {
                longest = longest.max(record(&adapter, one));
            }
        }
        longest
    });
    longest.min().unwrap_or_default().as_secs_f64() * 1e6
}

fn filled(keys: usize) -> (MemoryAdapter, usize) {
    let adapter = adapter(keys);
    for start in (0..keys).step_by(BLOCK) {
        record(&adapter, &block(start));
    }
    let count = adapter.count().now_or_never().expect("no wait").expect("a count");
    (adapter, usize::try_from(count).expect("a count"))
}

fn filled_moka(keys: usize) -> (Cache<String, Value>, usize) {
    let cache = cache(keys);
    for start in (0..keys).step_by(BLOCK) {
        enter(&cache, moka_block(start));
    }
    cache.run_pending_tasks();
    let count = cache.entry_count();
    (cache, usize::try_from(count).expect("a count"))
}

struct Bytes {
    bytes: f64,
    peak_bytes: f64,
}

fn counted<T>(fill: impl FnOnce() -> (T, usize)) -> Bytes {
    let mut filled = None;
    let info = allocation_counter::measure(|| filled = Some(fill()));
    let keys = filled.expect("it was filled").1 as f64;
    Bytes { bytes: info.bytes_current as f64 / keys, peak_bytes: info.bytes_max as f64 / keys }
}

fn not_counted<T>(run: impl FnOnce() -> T) -> T {
    let mut result = None;
    allocation_counter::opt_out(|| result = Some(run()));
    result.expect("it was run")
}

/// How often a claim and a completion allocate, on the average over a store that grows.
fn allocations() -> (f64, f64) {
    let (adapter, block) = (adapter(TURN), blocks(0).flatten().collect::<Vec<_>>());
    let claims = allocation_counter::measure(|| {
        for (key, terms) in &block {
            drop(adapter.claim(std::slice::from_ref(key), terms).now_or_never());
        }
    });
    let completions = allocation_counter::measure(|| {
        for (key, terms) in &block {
            drop(adapter.complete(std::slice::from_ref(key), terms).now_or_never());
        }
    });
    let per_call = |count: u64| count as f64 / TURN as f64;
    (per_call(claims.count_total), per_call(completions.count_total))
}
