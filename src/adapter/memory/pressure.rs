//! The warnings about a table that is full, or nearly full.
//!
//! They are logged after the locks of the shards are released: a subscriber is the user's code, and
//! may be slow.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::row::RowState;
use super::shard::{Room, Shard};
use crate::observe;

const MINUTE_MS: u64 = 60_000;
const HOUR_MS: u64 = 60 * MINUTE_MS;

/// What one call has met.
#[derive(Default)]
pub(super) struct Pressure {
    /// How many keys the call has evicted before they had expired.
    evicted: u64,
    /// The time since the first claim of the youngest of them.
    age_ms: u64,
    /// Whether a shard has become fuller than four fifths.
    nearly_full: bool,
}

impl Pressure {
    /// Evicts what has to be evicted for new keys.
    pub(super) fn make_room(&mut self, shard: &mut Shard, room: &Room, capacity: usize, now: u64) {
        for slot in &room.evicted {
            let row = shard.row(*slot);
            if row.state(now) != RowState::Expired {
                let age_ms = now.saturating_sub(row.first_seen_at);
                self.age_ms = if self.evicted == 0 { age_ms } else { self.age_ms.min(age_ms) };
                self.evicted += 1;
            }
            shard.remove(*slot);
        }
        let is_nearly_full = |keys: usize| 5 * keys > 4 * capacity;
        self.nearly_full |=
            !is_nearly_full(shard.len()) && is_nearly_full(shard.len() + room.added);
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
