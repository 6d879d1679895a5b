//! The warnings about a table that is nearly full, or full.
//!
//! Nothing is logged under a shard's lock: a subscriber is code of the user's, and may be slow.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::order::Slot;
use super::row::Standing;
use super::shard::Shard;
use crate::observe;

const MINUTE_MS: u64 = 60_000;
const HOUR_MS: u64 = 60 * MINUTE_MS;

/// What one call has met.
#[derive(Default)]
pub(super) struct Pressure {
    /// How many keys it has evicted that had not expired.
    evicted: u64,
    /// For how long the youngest of them had been known.
    age_ms: u64,
    /// Whether a shard has become fuller than four fifths.
    nearly_full: bool,
}

impl Pressure {
    pub(super) fn evict(&mut self, shard: &mut Shard, slots: &[Slot], now: u64) {
        for slot in slots {
            let row = shard.row(*slot);
            if row.standing(now) != Standing::Expired {
                let age_ms = now.saturating_sub(row.first_seen_at);
                self.age_ms = if self.evicted == 0 { age_ms } else { self.age_ms.min(age_ms) };
                self.evicted += 1;
            }
            shard.remove(*slot);
        }
    }

    /// A shard that has so many keys gets so many more. Shards fill alike.
    pub(super) fn fill(&mut self, before: usize, added: usize, capacity: usize) {
        let is_nearly_full = |keys: usize| 5 * keys > 4 * capacity;
        self.nearly_full |= !is_nearly_full(before) && is_nearly_full(before + added);
    }
}

/// What the next warnings count, and when they are due.
#[derive(Default)]
pub(super) struct Gauge {
    /// Since the last warning.
    evicted: AtomicU64,
    /// From when on the next warning may be given, on the table's clock.
    next_evicted_ms: AtomicU64,
    next_nearly_full_ms: AtomicU64,
}

impl Gauge {
    pub(super) fn note(&self, met: &Pressure, now: u64) {
        if met.nearly_full && is_due(&self.next_nearly_full_ms, now, HOUR_MS) {
            observe::nearly_full();
        }
        if met.evicted == 0 {
            return;
        }
        observe::evicted(met.evicted);
        self.evicted.fetch_add(met.evicted, Ordering::Relaxed);
        if is_due(&self.next_evicted_ms, now, MINUTE_MS) {
            let keys = self.evicted.swap(0, Ordering::Relaxed);
            observe::evicting(keys, Duration::from_millis(met.age_ms));
        }
    }
}

/// Returns `true` if a warning is due, and puts the next one off for so long.
fn is_due(next: &AtomicU64, now: u64, pause: u64) -> bool {
    let at = next.load(Ordering::Relaxed);
    let then = now.saturating_add(pause);
    now >= at && next.compare_exchange(at, then, Ordering::Relaxed, Ordering::Relaxed).is_ok()
}
