//! The warnings about a table that is full, or nearly full.
//!
//! They are logged after the locks of the shards are released, because a subscriber may be slow.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::observe;

const MINUTE_MS: u64 = 60_000;
const HOUR_MS: u64 = 60 * MINUTE_MS;

/// Evictions, and shards that become nearly full, during one call.
#[derive(Default)]
pub(super) struct Pressure {
    /// The number of evicted keys that had not expired.
    evicted: u64,
    /// The time since the first claim of the youngest evicted key.
    age_ms: u64,
    /// Whether a shard has become fuller than four fifths.
    pub(super) nearly_full: bool,
}

impl Pressure {
    pub(super) fn add_evicted(&mut self, age_ms: u64) {
        self.add(&Self { evicted: 1, age_ms, nearly_full: false });
    }

    pub(super) fn add(&mut self, other: &Self) {
        if other.evicted > 0 {
            let is_first = self.evicted == 0;
            self.age_ms = if is_first { other.age_ms } else { self.age_ms.min(other.age_ms) };
            self.evicted += other.evicted;
        }
        self.nearly_full |= other.nearly_full;
    }
}

/// Counts evictions and limits how often warnings are logged.
#[derive(Default)]
pub(super) struct Gauge {
    /// Since the last warning.
    evicted: AtomicU64,
    /// When the next warning may be logged, on the table's clock.
    next_evicted_ms: AtomicU64,
    next_nearly_full_ms: AtomicU64,
}

impl Gauge {
    pub(super) fn report(&self, pressure: &Pressure, now: u64) {
        if pressure.nearly_full && is_due(&self.next_nearly_full_ms, now, HOUR_MS) {
            observe::nearly_full();
        }
        if pressure.evicted == 0 {
            return;
        }
        observe::evicted(pressure.evicted);
        self.evicted.fetch_add(pressure.evicted, Ordering::Relaxed);
        if is_due(&self.next_evicted_ms, now, MINUTE_MS) {
            let keys = self.evicted.swap(0, Ordering::Relaxed);
            observe::evicting(keys, Duration::from_millis(pressure.age_ms));
        }
    }
}

/// Returns `true` if a warning is due, and delays the next one by `pause`.
fn is_due(next: &AtomicU64, now: u64, pause: u64) -> bool {
    let at = next.load(Ordering::Relaxed);
    let then = now.saturating_add(pause);
    now >= at && next.compare_exchange(at, then, Ordering::Relaxed, Ordering::Relaxed).is_ok()
}
