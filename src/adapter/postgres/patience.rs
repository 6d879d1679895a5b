//! [`LockWait`]: for how long a batch waits for a row.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Four times the median of what the last writing statements took, COMMIT included: a row that another
/// process is committing is worth the wait, and one that a transaction holds for the length of a
/// handler is not.
///
/// A median, because a statement that has waited for a lock itself took longer than a commit takes.
#[derive(Debug, Default)]
pub(super) struct LockWait {
    median_us: AtomicU32,
}

/// As `lock_timeout` takes them, from the least to the most.
const WAITS: [(u32, &str); 4] =
    [(25_000, "25ms"), (50_000, "50ms"), (100_000, "100ms"), (u32::MAX, "250ms")];

impl LockWait {
    /// Records how long a statement that has written something took.
    pub(super) fn saw(&self, took: Duration) {
        let took = u32::try_from(took.as_micros()).unwrap_or(u32::MAX);
        let median = self.median_us.load(Ordering::Relaxed);
        // A step towards it, whatever the distance.
        let next = if took > median {
            median.saturating_add(median / 2 + 1_000)
        } else {
            median - median / 3
        };
        // Of two at once, one is not counted.
        self.median_us.store(next, Ordering::Relaxed);
    }

    pub(super) fn bound(&self) -> &'static str {
        let least = self.median_us.load(Ordering::Relaxed).saturating_mul(4);
        WAITS.iter().find(|(most, _)| least <= *most).map_or("250ms", |(_, wait)| wait)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bound_follows_the_median_of_what_statements_take() {
        let wait = LockWait::default();
        assert_eq!(wait.bound(), "25ms");
        for (took_ms, bound) in
            [(2, "25ms"), (10, "50ms"), (20, "100ms"), (60, "250ms"), (5_000, "250ms"), (1, "25ms")]
        {
            for _ in 0..60 {
                wait.saw(Duration::from_millis(took_ms));
            }
            assert_eq!(wait.bound(), bound, "{took_ms} ms");
        }
        // One slow statement does not change the bound.
        wait.saw(Duration::from_secs(3_600));
        assert_eq!(wait.bound(), "25ms");
    }
}
