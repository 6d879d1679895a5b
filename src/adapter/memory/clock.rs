//! [`Clock`]: the adapter's time.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

/// The end of time, some 8,900 years after the start: no time of a table is later.
pub(super) const END: u64 = (1 << 48) - 1;
/// How far a test can set the clock back.
const YEAR: Duration = Duration::from_secs(365 * 86_400);

/// Milliseconds since one year before the adapter was created.
///
/// 1. The clock is monotonic, so a change of the wall clock expires no key and ends no lease. It
///    goes back only if a test calls [`set_back`](Self::set_back).
/// 2. It reads [`tokio::time::Instant::now`]. Without tokio's feature `test-util` that is the
///    standard library's clock, with and without a runtime. With the feature it follows
///    `tokio::time::pause` on the threads of the paused runtime. Other threads still read real time,
///    so a test with paused time must use the adapter on its own runtime only.
pub(super) struct Clock {
    start: Instant,
    offset_ms: AtomicU64,
}

impl Clock {
    pub(super) fn new() -> Self {
        Self { start: Instant::now(), offset_ms: AtomicU64::new(ms(YEAR)) }
    }

    pub(super) fn now(&self) -> u64 {
        after(self.offset_ms.load(Ordering::Relaxed), self.start.elapsed())
    }

    pub(super) fn advance(&self, by: Duration) {
        self.shift(|offset| after(offset, by));
    }

    pub(super) fn set_back(&self, by: Duration) {
        self.shift(|offset| offset.saturating_sub(ms(by)));
    }

    fn shift(&self, change: impl Fn(u64) -> u64) {
        let change = |offset| Some(change(offset));
        // `change` always returns a value, so the update never fails.
        let _ = self.offset_ms.fetch_update(Ordering::Relaxed, Ordering::Relaxed, change);
    }

    /// Returns the wall-clock time of `at`; the present where the platform cannot express it.
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

/// Returns the time `duration` after `at`.
pub(super) fn after(at: u64, duration: Duration) -> u64 {
    at.saturating_add(ms(duration)).min(END)
}

pub(super) fn ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
