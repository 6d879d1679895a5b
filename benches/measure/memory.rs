//! The cost of a new key in the memory adapter and in `moka`, in time and bytes.
//!
//! 1. Both insert 1,000,000 keys and return atomically whether each is new. A key is the text of an
//!    event, and has its own token and retention. For moka that is the entry API of a cache whose
//!    entries have their own time to live. The bench also measures a plain `insert`, which does not
//!    return whether the key is new.
//! 2. They take turns of 100,000 keys, so a change in machine speed affects both. Keys, tokens and
//!    terms are made just before, as in a server, and are not measured. Time counts from the empty
//!    store on, growth included. It is the CPU time of one thread, which other processes affect little.
//! 3. Bytes are allocated bytes less freed bytes. They are counted in a second run, not while time is
//!    measured.
//!
//! The binary that includes this file gets the counting allocator of `allocation-counter`. Where that
//! does not count, it still costs about two nanoseconds for each allocation.

use std::hint::black_box;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use moka::Expiry;
use moka::sync::Cache;
use rustix::time::{ClockId, clock_gettime};
use tower_dedup::DedupKey;
use tower_dedup::adapter::MemoryAdapter;
use tower_dedup::adapter::contract::{CallTerms, ClaimReply, CompleteReply, DedupAdapter, Token};
use tower_dedup::adapter::inspect::MaintenanceAdapter;

/// How many keys one of them gets before the other's turn.
const TURN: usize = 100_000;
/// How many keys are made before they are claimed.
const BLOCK: usize = 200;
const FIRST: ClaimReply = ClaimReply::first(1, false);
const RETENTION: Duration = Duration::from_secs(30 * 86_400);
const LEASE: Duration = Duration::from_secs(60);

/// Returns the CPU time of this thread.
fn clock() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::try_from(time).expect("a time after its beginning")
}

/// Returns every result by its name: nanoseconds, bytes, counts and ratios, as the names say.
pub(crate) fn measure(keys: usize) -> Vec<(String, f64)> {
    let mut results = Vec::new();
    let mut add = |name: &str, value: f64| results.push((name.to_owned(), value));

    let [claim, turnover, entry, insert] = not_counted(|| of_claims(keys));
    add("memory_insert_ns", claim);
    add("memory_turnover_ns", turnover);
    add("moka_entry_ns", entry);
    add("moka_insert_ns", insert);
    add("memory_over_moka", entry / claim);
    add("memory_over_moka_insert", insert / claim);

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
    // Shards fill unevenly: at its capacity an adapter has begun to refuse keys.
    MemoryAdapter::with_capacity(keys + keys / 10)
}

/// Ids as senders make them.
fn id(number: usize) -> String {
    format!("evt_{:024x}", (number as u128).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060))
}

fn key(number: usize) -> DedupKey {
    DedupKey::new("stripe", &id(number)).expect("a key")
}

fn on_claim() -> CallTerms {
    CallTerms::on_claim(Token::random(), RETENTION)
}

fn on_completion() -> CallTerms {
    CallTerms::on_completion(Token::random(), RETENTION, LEASE)
}

type Block = Vec<(DedupKey, CallTerms)>;

/// The keys of a turn, block by block.
fn blocks(start: usize, terms: fn() -> CallTerms) -> impl Iterator<Item = Block> {
    (start..start + TURN).step_by(BLOCK).map(move |start| block(start, terms))
}

fn block(start: usize, terms: fn() -> CallTerms) -> Block {
    (start..start + BLOCK).map(|number| (key(number), terms())).collect()
}

/// The value of a key in moka: who claimed it, and for how long.
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

fn claim(adapter: &MemoryAdapter, block: &[(DedupKey, CallTerms)]) -> Duration {
    let start = clock();
    for (key, terms) in block {
        let claimed = adapter.claim(key, terms).now_or_never();
        assert_eq!(claimed.expect("no wait").expect("room"), FIRST);
    }
    clock() - start
}

fn lease(adapter: &MemoryAdapter, block: &[(DedupKey, CallTerms)]) -> Duration {
    let start = clock();
    for (key, terms) in block {
        let claimed = adapter.claim(key, terms).now_or_never();
        assert_eq!(claimed.expect("no wait").expect("room"), FIRST);
        let completed = adapter.complete(key, terms).now_or_never();
        assert_eq!(completed.expect("no wait").expect("room"), CompleteReply::Held);
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

/// Claims into an empty adapter, and into one whose keys have all expired; moka's entry and insert.
fn of_claims(keys: usize) -> [f64; 4] {
    let (adapter, entered, inserted) = (adapter(keys), cache(keys), cache(keys));
    let mut times = [Duration::ZERO; 4];
    for start in (0..keys).step_by(TURN) {
        times[0] += blocks(start, on_claim).map(|block| claim(&adapter, &block)).sum::<Duration>();
        times[2] += moka_blocks(start).map(|block| enter(&entered, block)).sum::<Duration>();
        times[3] += moka_blocks(start).map(|block| insert(&inserted, block)).sum::<Duration>();
    }
    adapter.advance(RETENTION);
    for start in (keys..2 * keys).step_by(TURN) {
        times[1] += blocks(start, on_claim).map(|block| claim(&adapter, &block)).sum::<Duration>();
    }
    times.map(|time| per_key(time, keys))
}

/// Claims and completions; moka's entry, and the insert that changes its value.
fn of_leases(keys: usize) -> [f64; 2] {
    let (adapter, cache) = (adapter(keys), cache(keys));
    let mut times = [Duration::ZERO; 2];
    for start in (0..keys).step_by(TURN) {
        times[0] +=
            blocks(start, on_completion).map(|block| lease(&adapter, &block)).sum::<Duration>();
        times[1] += moka_blocks(start).map(|block| enter_twice(&cache, block)).sum::<Duration>();
    }
    times.map(|time| per_key(time, keys))
}

/// Returns the longest insertion of the best of three runs: other processes only make it longer.
fn longest_insert(keys: usize) -> f64 {
    let longest = (0..3).map(|_| {
        let adapter = adapter(keys);
        let mut longest = Duration::ZERO;
        for start in (0..keys).step_by(BLOCK) {
            for one in block(start, on_claim).chunks(1) {
                longest = longest.max(claim(&adapter, one));
            }
        }
        longest
    });
    longest.min().unwrap_or_default().as_secs_f64() * 1e6
}

fn filled(keys: usize) -> (MemoryAdapter, usize) {
    let adapter = adapter(keys);
    for start in (0..keys).step_by(BLOCK) {
        claim(&adapter, &block(start, on_claim));
    }
    let stats = adapter.stats().now_or_never().expect("no wait").expect("statistics");
    (adapter, usize::try_from(stats.rows).expect("a count"))
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

/// Returns how often a claim and a completion allocate, on average while the adapter grows.
fn allocations() -> (f64, f64) {
    let (adapter, block) = (adapter(TURN), blocks(0, on_completion).flatten().collect::<Vec<_>>());
    let claims = allocation_counter::measure(|| {
        for (key, terms) in &block {
            drop(adapter.claim(key, terms).now_or_never());
        }
    });
    let completions = allocation_counter::measure(|| {
        for (key, terms) in &block {
            drop(adapter.complete(key, terms).now_or_never());
        }
    });
    let per_call = |count: u64| count as f64 / TURN as f64;
    (per_call(claims.count_total), per_call(completions.count_total))
}
