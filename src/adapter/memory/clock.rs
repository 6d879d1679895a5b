//! [`Clock`]: the adapter's time.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

/// How far a test can set the clock back.
const YEAR: Duration = Duration::from_secs(365 * 86_400);

/// Milliseconds since one year before the adapter was created.
///
/// The clock is monotonic, so a change of the wall clock expires no key and ends no lease. It reads
/// [`tokio::time::Instant::now`]: with tokio's feature `test-util`, it follows `tokio::time::pause`
/// on the threads of the paused runtime.
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

    #[cfg(any(test, feature = "testing"))]
    pub(super) fn shift(&self, change: impl FnOnce(u64) -> u64) {
        let offset = self.offset_ms.load(Ordering::Relaxed);
        self.offset_ms.store(change(offset), Ordering::Relaxed);
    }
}

/// Returns the wall-clock time of `at`; the present where the platform cannot express it.
pub(super) fn wall(at: u64, now: u64) -> SystemTime {
    let (wall, distance) = (SystemTime::now(), Duration::from_millis(at.abs_diff(now)));
    let moved = if at >= now { wall.checked_add(distance) } else { wall.checked_sub(distance) };
    moved.unwrap_or(wall)
}

/// Returns the time `duration` after `at`.
pub(super) fn after(at: u64, duration: Duration) -> u64 {
    at.saturating_add(ms(duration))
}

pub(super) fn ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
