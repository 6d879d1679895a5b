//! The memory adapter: what a new key costs in time and memory, and what it costs in a moka cache.
//!
//! `cargo bench --bench memory_over_moka`, under a minute. One thread puts 1,000,000 new keys in,
//! with a time to live, and is told of each whether it was new. The keys themselves are made
//! beforehand, in chunks. The time is that of the whole filling by the key, so what a table costs to
//! grow is in it. Memory is what the process has more of afterwards, by the kernel's count, in a
//! process that does nothing else.
//!
//! Under `cargo test` it does the same with 1,000 keys.

use std::process::Command;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use moka::sync::Cache;
use tower_dedup::DedupKey;
use tower_dedup::adapter::{DedupAdapter, MemoryAdapter, Receipt, Recorded, Token};

#[path = "shared/mod.rs"]
mod shared;

use shared::calls::{fresh_key, receipt};
use shared::goals::grouped;
use shared::ratios::{begin, skipped, tell};
use shared::rounds::{in_turn, median};
use shared::run::{Run, runtime};

const KEYS: usize = 1_000_000;
const CHUNK: usize = 1_000;
const MONTH: Duration = Duration::from_secs(30 * 86_400);
/// Says to a process of this bench what to fill, and to print the bytes that it took.
const CHILD: &str = "TOWER_DEDUP_BENCH_FILL";

fn main() {
    match std::env::var(CHILD).as_deref() {
        Ok("ours") => return print_bytes(fill_ours),
        Ok("moka") => return print_bytes(fill_moka),
        _ => {}
    }
    let run = Run::from_args();
    let keys = if run.is_test() { 1_000 } else { KEYS };
    if run.wants(&["memory_insert_ns", "memory_over_moka"]) {
        let rounds: Vec<[f64; 2]> = runtime().block_on(in_turn(&run, async |which| {
            let took = if which == 0 { fill_ours(keys).0 } else { fill_moka(keys).0 };
            by_key(took.as_secs_f64() * 1e9, keys)
        }));
        begin(&run, "new keys in memory, up to 1,000,000, one thread");
        let ours: Vec<f64> = rounds.iter().map(|round| round[0]).collect();
        let ratios: Vec<f64> = rounds.iter().map(|[ours, moka]| moka / ours).collect();
        let moka = grouped(median(rounds.iter().map(|round| round[1])));
        tell(&run, "memory_insert_ns", &ours, "a key");
        let note = format!("{moka} ns over {} ns", grouped(median(ours.iter().copied())));
        tell(&run, "memory_over_moka", &ratios, &note);
    }
    if run.wants(&["memory_bytes"]) {
        match (bytes(&run, "ours"), bytes(&run, "moka")) {
            (Some(ours), Some(moka)) => {
                let moka = grouped(median(moka));
                tell(&run, "memory_bytes", &ours, &format!("a key; moka takes {moka} B"));
            }
            _ => {
                skipped("memory_bytes", "here: the memory of a process is read from Linux's /proc");
            }
        }
    }
}

/// The time to put this many new keys in, and what they are in, which goes when it is let go.
fn fill_ours(keys: usize) -> (Duration, MemoryAdapter) {
    // Its shards fill unevenly.
    let adapter = MemoryAdapter::with_capacity(keys + keys / 10);
    let put = async |chunk: &[(DedupKey, Receipt)]| {
        for (key, receipt) in chunk {
            let recorded = adapter.record(std::slice::from_ref(key), receipt).await;
            assert_eq!(recorded.expect("room for a key"), [Recorded::First]);
        }
    };
    let mut took = Duration::ZERO;
    chunks(keys, |chunk| {
        let start = Instant::now();
        put(chunk).now_or_never().expect("a store that never waits");
        took += start.elapsed();
    });
    (took, adapter)
}

/// As somebody uses it who looks for an event in it and puts it in, in one step.
fn fill_moka(keys: usize) -> (Duration, Cache<DedupKey, ()>) {
    let capacity = u64::try_from(keys + keys / 10).expect("a capacity");
    let cache = Cache::builder().max_capacity(capacity).time_to_live(MONTH).build();
    let mut took = Duration::ZERO;
    chunks(keys, |chunk| {
        let start = Instant::now();
        for (key, _) in chunk {
            assert!(cache.entry(key.clone()).or_insert(()).is_fresh());
        }
        took += start.elapsed();
    });
    // What it has put off is part of the price.
    let start = Instant::now();
    cache.run_pending_tasks();
    took += start.elapsed();
    (took, cache)
}

/// Keys, with the receipts that a ledger makes for them.
fn chunks(keys: usize, mut put: impl FnMut(&[(DedupKey, Receipt)])) {
    let fresh = || (fresh_key(), receipt(Token::random()));
    for _ in 0..keys / CHUNK {
        let chunk: Vec<_> = std::iter::repeat_with(fresh).take(CHUNK).collect();
        put(&chunk);
    }
}

/// What a process of its own says, once for every round; `None` where it cannot know.
fn bytes(run: &Run, what: &str) -> Option<Vec<f64>> {
    resident()?;
    let rounds = if run.is_test() { 1 } else { 3 };
    let ask = |_| {
        let keys = if run.is_test() { 1_000 } else { KEYS };
        let this = std::env::current_exe().expect("the path of this bench");
        let answer = Command::new(this).env(CHILD, what).arg(keys.to_string()).output();
        let answer = answer.expect("a process of this bench");
        assert!(answer.status.success(), "{}", String::from_utf8_lossy(&answer.stderr));
        String::from_utf8_lossy(&answer.stdout).trim().parse().expect("a number of bytes")
    };
    Some((0..rounds).map(ask).collect())
}

/// The other side of [`bytes`].
fn print_bytes<T>(fill: impl FnOnce(usize) -> (Duration, T)) {
    let keys: usize = std::env::args().nth(1).and_then(|keys| keys.parse().ok()).expect("how many");
    // What making keys and measuring takes is there before.
    chunks(CHUNK, |_| {});
    let before = resident().expect("Linux");
    let (_, filled) = fill(keys);
    let bytes = resident().expect("Linux") - before;
    drop(filled);
    println!("{}", by_key(bytes, keys));
}

/// The memory of this process, in bytes.
fn resident() -> Option<f64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kilobytes: f64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kilobytes * 1_024.0)
}

fn by_key(all: f64, keys: usize) -> f64 {
    let keys = u32::try_from(keys).expect("some millions at most");
    all / f64::from(keys)
}
