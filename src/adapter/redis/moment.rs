//! [`Moment`]: a time by both clocks of this machine.

use std::time::{Duration, Instant, SystemTime};

/// A time by both clocks. The order is that of the monotonic clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Moment {
    instant: Instant,
    wall: SystemTime,
}

impl Moment {
    pub(super) fn now() -> Self {
        // In this order: a pause between the two makes `by_clock_of` earlier, not later.
        let wall = SystemTime::now();
        Self { wall, instant: Instant::now() }
    }

    /// Returns this time by the wall clock. Returns the earlier one of two times if the clock was set
    /// between this moment and `now`.
    pub(super) fn by_clock_of(self, now: Self) -> SystemTime {
        let age = now.instant.saturating_duration_since(self.instant);
        now.wall.checked_sub(age).map_or(SystemTime::UNIX_EPOCH, |wall| wall.min(self.wall))
    }

    /// Returns the time from this moment to a later one, by the clock that says more: the monotonic clock
    /// stops while the machine sleeps, and the wall clock can be set back.
    pub(super) fn until(self, later: Self) -> Duration {
        let asleep = later.wall.duration_since(self.wall).unwrap_or_default();
        later.instant.saturating_duration_since(self.instant).max(asleep)
    }

    #[cfg(test)]
    pub(super) fn set_clock(self, wall: SystemTime) -> Self {
        Self { wall, ..self }
    }
}

#[cfg(test)]
impl std::ops::Add<Duration> for Moment {
    type Output = Self;

    fn add(self, time: Duration) -> Self {
        Self { instant: self.instant + time, wall: self.wall + time }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clock_that_is_set_names_the_earlier_time() {
        let (second, hour) = (Duration::from_secs(1), Duration::from_secs(3_600));
        let then = Moment::now();
        let now = then + 10 * second;
        let cases = [
            ("not set", now.wall, then.wall, 10 * second),
            ("set back", now.wall - hour, then.wall - hour, 10 * second),
            ("set forward", now.wall + hour, then.wall, hour + 10 * second),
        ];
        for (name, wall, expected, gap) in cases {
            let now = now.set_clock(wall);
            assert_eq!((then.by_clock_of(now), then.until(now)), (expected, gap), "{name}");
        }
    }
}
