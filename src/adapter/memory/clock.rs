//! The adapter's time.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

/// By so much the clock can be set back.
const YEAR: Duration = Duration::from_secs(365 * 86_400);

/// Milliseconds since a year before the adapter was made: monotonic, so that a changed wall clock
/// neither expires keys nor lapses leases. It goes back only where a test sets it back.
pub(super) struct Clock {
    start: Instant,
    skew_ms: AtomicU64,
}

impl Clock {
    pub(super) fn new() -> Self {
        Self { start: Instant::now(), skew_ms: AtomicU64::new(ms(YEAR)) }
    }

    pub(super) fn now(&self) -> u64 {
        ms(self.start.elapsed()).saturating_add(self.skew_ms.load(Ordering::Relaxed))
    }

    pub(super) fn advance(&self, by: Duration) {
        self.skew(|skew| skew.saturating_add(ms(by)));
    }

    pub(super) fn set_back(&self, by: Duration) {
        self.skew(|skew| skew.saturating_sub(ms(by)));
    }

    fn skew(&self, change: impl Fn(u64) -> u64) {
        let change = |skew| Some(change(skew));
        // The closure never declines, so there is nothing to answer.
        let _ = self.skew_ms.fetch_update(Ordering::Relaxed, Ordering::Relaxed, change);
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
