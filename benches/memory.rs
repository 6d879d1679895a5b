//! The cost of a new key in the memory adapter and in `moka`, in time and bytes: `cargo bench --bench memory`, under a
//! minute.
//!
//! 1. Both insert 1,000,000 keys and return atomically whether each is new. A key is the text of an
//!    event, and has its own token and retention. For moka that is the entry API of a cache whose
//!    entries have their own time to live.
//! 2. They take turns of 100,000 keys, so a change in machine speed affects both. Keys, tokens and
//!    terms are made just before, as in a server, and are not measured. Time counts from the empty
//!    store on, growth included. It is the CPU time of one thread, which other processes affect little.
//! 3. Bytes are allocated bytes less freed bytes. They are counted in a second run, not while time is
//!    measured.
//!
//! The counting allocator costs about two nanoseconds for each allocation where it does not count.
//!
//! Under `cargo test` it does nothing: `tests/stores/memory.rs` counts bytes and allocations.

use std::hint::black_box;
use std::ops::Range;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use moka::Expiry;
use moka::sync::Cache;
use rustix::time::{ClockId, clock_gettime};
use tower_dedup::DedupKey;
use tower_dedup::adapter::MemoryAdapter;
use tower_dedup::adapter::contract::{CallTerms, ClaimReply, DedupAdapter, Token};

#[path = "shared/mod.rs"]
mod shared;

use shared::calls::RETENTION;
use shared::ratios::report;
use shared::run::Run;

const NAMES: [&str; 3] = ["memory_insert_ns", "memory_over_moka", "memory_bytes"];
const KEYS: usize = 1_000_000;
/// How many keys one of them gets before the other's turn.
const TURN: usize = 100_000;
/// How many keys are made before they are claimed.
const BLOCK: usize = 200;

fn main() {
    let run = Run::from_args();
    if run.is_test() || !run.wants(&NAMES) {
        return;
    }
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    allocation_counter::opt_out(|| {
        let (adapter, cache) = (adapter(), cache());
        for start in (0..KEYS).step_by(TURN) {
            ours.push(claim(&adapter, start..start + TURN));
            theirs.push(enter(&cache, start..start + TURN));
        }
    });
    // The median would leave out the turns in which a store grows.
    let mean =
        |turns: &[Duration]| turns.iter().sum::<Duration>().as_secs_f64() * 1e9 / KEYS as f64;
    let [ours, theirs] = [mean(&ours), mean(&theirs)];
    report(&run, NAMES[0], &[ours], "a key");
    report(&run, NAMES[1], &[theirs / ours], &format!("{theirs:.0} ns in moka"));
    let ours = bytes(|| {
        let adapter = adapter();
        claim(&adapter, 0..KEYS);
        adapter
    });
    let theirs = bytes(|| {
        let cache = cache();
        enter(&cache, 0..KEYS);
        cache.run_pending_tasks();
        cache
    });
    report(&run, NAMES[2], &[ours], &format!("{theirs:.0} B in moka"));
}

/// Returns the CPU time of this thread.
fn clock() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::try_from(time).expect("a time after its beginning")
}

fn adapter() -> MemoryAdapter {
    // Shards fill unevenly: at its capacity an adapter has begun to refuse keys.
    MemoryAdapter::with_capacity(KEYS + KEYS / 10)
}

/// Ids as senders make them.
fn id(number: usize) -> String {
    format!("evt_{:024x}", (number as u128).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060))
}

/// Claims keys, and returns the time that this takes.
fn claim(adapter: &MemoryAdapter, keys: Range<usize>) -> Duration {
    let terms = || CallTerms::on_claim(Token::random(), RETENTION);
    in_blocks(
        keys,
        |number| (DedupKey::new("stripe", &id(number)).expect("a key"), terms()),
        |it| {
            let claimed = adapter.claim(&it.0, &it.1).now_or_never();
            assert_eq!(claimed.expect("no wait").expect("room"), ClaimReply::first(1, false));
            it
        },
    )
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

fn cache() -> Cache<String, Value> {
    Cache::builder().max_capacity(2 * KEYS as u64).expire_after(OwnRetention).build()
}

/// Does the same in moka.
fn enter(cache: &Cache<String, Value>, keys: Range<usize>) -> Duration {
    let value = || Value { token: Token::random(), retention: RETENTION };
    in_blocks(
        keys,
        |number| (format!("stripe:{}", id(number)), value()),
        |(key, value)| {
            let entry = cache.entry(key).or_insert(value);
            assert!(entry.is_fresh());
            black_box(entry.into_value().token);
        },
    )
}

/// Makes the keys of each block, then uses them. Returns the time of the uses, without that of dropping their results.
fn in_blocks<T, U>(
    keys: Range<usize>,
    make: impl Fn(usize) -> T,
    mut with_each: impl FnMut(T) -> U,
) -> Duration {
    let mut total = Duration::ZERO;
    for start in keys.clone().step_by(BLOCK) {
        let block: Vec<T> = (start..keys.end.min(start + BLOCK)).map(&make).collect();
        let start = clock();
        let used: Vec<U> = block.into_iter().map(&mut with_each).collect();
        total += clock() - start;
        drop(used);
    }
    total
}

/// Returns the bytes of a key in a store.
fn bytes<T>(fill: impl FnOnce() -> T) -> f64 {
    let mut store = None;
    let info = allocation_counter::measure(|| store = Some(fill()));
    info.bytes_current as f64 / KEYS as f64
}
