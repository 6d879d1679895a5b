//! The times of a delivery: its bounds, its deadlines, and the pauses between its claims.

use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBuilder};
use tokio::time::Instant;

use crate::error::{ConfigError, NOT_ZERO, check};

const DAY: Duration = Duration::from_secs(86_400);

/// The shortest lease. A busy process may renew a shorter lease too late.
const MIN_LEASE: Duration = Duration::from_millis(100);

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

impl Times {
    pub(crate) fn set_retention(&mut self, retention: Duration) -> Result<(), ConfigError> {
        check(!retention.is_zero(), "retention", NOT_ZERO)?;
        self.retention = retention;
        Ok(())
    }

    pub(crate) fn set_lease(&mut self, lease: Duration) -> Result<(), ConfigError> {
        check(lease >= MIN_LEASE, "lease", "at least 100 ms")?;
        self.lease = lease;
        Ok(())
    }

    pub(crate) fn set_store_timeout(&mut self, bound: Duration) -> Result<(), ConfigError> {
        check(!bound.is_zero(), "store_timeout", NOT_ZERO)?;
        self.store_timeout = bound;
        Ok(())
    }

    pub(crate) fn set_handler_timeout(&mut self, bound: Duration) -> Result<(), ConfigError> {
        check(!bound.is_zero(), "handler_timeout", NOT_ZERO)?;
        self.handler_timeout = Some(bound);
        Ok(())
    }
}

/// Returns the instant `bound` from now; a day from now for a longer bound, because an extreme bound
/// would overflow.
pub(crate) fn deadline_in(bound: Duration) -> Instant {
    Instant::now() + bound.min(DAY)
}

/// Returns the delays after which a waiting delivery claims its event again, without end.
///
/// A delivery in another process wakes no delivery in this one. Within one process, the layer wakes
/// the deliveries that wait.
pub(crate) fn poll_delays() -> impl Iterator<Item = Duration> + Send {
    const FIRST: Duration = Duration::from_millis(20);
    const LONGEST: Duration = Duration::from_millis(250);
    let delays = ExponentialBuilder::new().with_min_delay(FIRST).with_max_delay(LONGEST);
    delays.with_jitter().without_max_times().build()
}
