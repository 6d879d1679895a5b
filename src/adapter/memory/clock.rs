//! The adapter's time.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

/// Milliseconds since the adapter was made: monotonic, so that a changed wall clock neither
/// expires keys nor lapses leases.
pub(super) struct Clock {
    start: Instant,
    skew_ms: AtomicU64,
}

impl Clock {
    pub(super) fn new() -> Self {
        Self { start: Instant::now(), skew_ms: AtomicU64::new(0) }
    }

    pub(super) fn now(&self) -> u64 {
        ms(self.start.elapsed()).saturating_add(self.skew_ms.load(Ordering::Relaxed))
    }

    pub(super) fn advance(&self, by: Duration) {
        // The closure never declines, so there is nothing to answer.
        let _ = self.skew_ms.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |skew| {
            Some(skew.saturating_add(ms(by)))
        });
    }

    pub(super) fn wall(&self, at: u64) -> SystemTime {
        let (now, wall) = (self.now(), SystemTime::now());
        let moved = if at >= now {
            wall.checked_add(Duration::from_millis(at - now))
        } else {
            wall.checked_sub(Duration::from_millis(now - at))
        };
        moved.unwrap_or(wall)
    }
}

pub(super) fn ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
