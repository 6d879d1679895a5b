//! [`Gauge`]: the warnings about a table that is full, or nearly full.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::observe;

const MINUTE_MS: u64 = 60_000;
const HOUR_MS: u64 = 60 * MINUTE_MS;

/// The fill of a shard that a new row reports.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Pressure {
    /// The age of the live key that was evicted for the row.
    pub(super) evicted_age_ms: Option<u64>,
    /// Whether the shard has become fuller than four fifths.
    pub(super) nearly_full: bool,
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
    /// Reports the pressure, after the lock of the shard is released: a subscriber may be slow, or call the
    /// store.
    pub(super) fn report(&self, pressure: Pressure, now: u64) {
        if pressure.nearly_full && is_due(&self.next_nearly_full_ms, now, HOUR_MS) {
            observe::nearly_full();
        }
        let Some(age_ms) = pressure.evicted_age_ms else { return };
        observe::evicted(1);
        self.evicted.fetch_add(1, Ordering::Relaxed);
        if is_due(&self.next_evicted_ms, now, MINUTE_MS) {
            let keys = self.evicted.swap(0, Ordering::Relaxed);
            observe::evicting(keys, Duration::from_millis(age_ms));
        }
    }
}

/// Returns `true` if a warning is due, and delays the next one by `pause`.
fn is_due(next: &AtomicU64, now: u64, pause: u64) -> bool {
    let at = next.load(Ordering::Relaxed);
    let then = now.saturating_add(pause);
    now >= at && next.compare_exchange(at, then, Ordering::Relaxed, Ordering::Relaxed).is_ok()
}
