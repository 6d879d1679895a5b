//! The times of a delivery: its bounds, its deadlines, and the pauses between its claims.

use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};

use crate::error::{ConfigError, NOT_ZERO, check};

const DAY: Duration = Duration::from_secs(86_400);

/// The shortest lease. A busy process may renew a shorter lease too late.
const MIN_LEASE: Duration = Duration::from_millis(100);

/// The lease of the transactional ledger by default: the retry after a dead process runs sooner,
/// and of two runs of an event the second cannot commit.
pub(crate) const TRANSACTIONAL_LEASE: Duration = Duration::from_secs(10);

/// The times that a layer and a deduplicator set.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Times {
    pub(crate) retention: Duration,
    /// How long a claim holds without a renewal.
    pub(crate) lease: Duration,
    /// The bound on every call to the store.
    pub(crate) store_timeout: Duration,
    pub(crate) handler_timeout: Option<Duration>,
}

impl Default for Times {
    fn default() -> Self {
        Self {
            retention: 30 * DAY,
            lease: Duration::from_secs(60),
            store_timeout: Duration::from_secs(2),
            handler_timeout: None,
        }
    }
}

/// A store adds a retention to its clock, and a ledger adds a part of a lease, which is no longer.
const LONGEST_RETENTION: Duration = Duration::from_secs(1_000 * 365 * 86_400);

/// A longer call would keep its sender, and a permit of `max_running`, waiting for a store that
/// does not reply.
const LONGEST_STORE_TIMEOUT: Duration = Duration::from_secs(30);

impl Times {
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        let Self { retention, lease, store_timeout, handler_timeout } = *self;
        check(!retention.is_zero(), "retention", NOT_ZERO, &retention)?;
        check(retention <= LONGEST_RETENTION, "retention", "at most 1,000 years", &retention)?;
        check(lease >= MIN_LEASE, "lease", "at least 100 ms", &lease)?;
        let is_bound = !store_timeout.is_zero() && store_timeout <= LONGEST_STORE_TIMEOUT;
        let rule = "longer than zero and at most 30 s";
        check(is_bound, "store_timeout", rule, &store_timeout)?;
        let bound = handler_timeout.unwrap_or(Duration::MAX);
        check(!bound.is_zero(), "handler_timeout", NOT_ZERO, &bound)
    }
}

/// The delays of [`poll_delays`].
pub(crate) type PollDelays = ExponentialBackoff;

/// Returns the delays after which a waiting delivery claims its event again, without end: first 2
/// to 4 ms, each base 1.5 times the one before, at last 250 to 500 ms. These are 16 claims in a
/// wait of 2 s.
///
/// A delivery in another process wakes no delivery in this one. Within one process, the layer wakes
/// the deliveries that wait. Most handlers are short, so the first delays are.
pub(crate) fn poll_delays() -> PollDelays {
    delays(Duration::from_millis(2), Duration::from_millis(250), 1.5)
}

/// Returns delays without end, each base `factor` times the one before. A delay is up to twice its
/// base, so that those who wait for one event do not call together.
pub(super) fn delays(first: Duration, longest: Duration, factor: f32) -> ExponentialBackoff {
    let delays = ExponentialBuilder::new().with_min_delay(first).with_max_delay(longest);
    delays.with_factor(factor).with_jitter().without_max_times().build()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn polls_are_early_then_rare_and_at_most_20_in_a_wait() {
        let ms = |ms| Duration::from_millis(ms);
        for delays in (0..100).map(|_| poll_delays().take(20).collect::<Vec<_>>()) {
            assert!((ms(2)..=ms(4)).contains(&delays[0]), "{delays:?}");
            assert!((ms(3)..=ms(6)).contains(&delays[1]), "{delays:?}");
            let last = &delays[12..];
            assert!(last.iter().all(|delay| (ms(250)..=ms(500)).contains(delay)), "{delays:?}");
            let (ten, twenty) = (delays[..10].iter().sum(), delays.iter().sum());
            assert!((ten..twenty).contains(&ms(2_000)), "{delays:?}");
        }
    }

    /// Deliveries that begin to wait at once do not claim together, not even for the first time.
    #[test]
    fn polls_of_many_waiting_deliveries_are_spread() {
        for polls in [1, 6] {
            let poll = || poll_delays().take(polls).sum();
            let mut polls: Vec<Duration> = (0..256).map(|_| poll()).collect();
            polls.sort_unstable();
            let half = polls[192] - polls[64];
            assert!(half > polls[128] / 10, "half of them come within {half:?}: {polls:?}");
        }
    }
}
