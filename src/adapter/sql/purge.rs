//! [`Purging`]: how often expired keys are deleted, without any code of the user's.

use std::time::{Duration, Instant};

use rand::RngExt;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::super::contract::StoreFuture;
use super::super::maintenance::{MaintenanceAdapter, Stats};
use crate::error::{ConfigError, StoreError, StoreErrorKind, check};
use crate::observe;

/// The latest start of the first purge. The earliest is half of it: a test or a command that counts
/// rows has ended before.
const FIRST_WITHIN: Duration = Duration::from_secs(60);
/// The pause after the first purge that failed.
const FIRST_RETRY: Duration = Duration::from_secs(1);
/// How long one statement may take.
const TIMEOUT: Duration = Duration::from_secs(30);

/// How often expired keys are deleted, an hour
/// ([`PURGE_GRACE`](super::super::maintenance::PURGE_GRACE)) after they have expired. A SQL adapter
/// does so by itself, in the background.
///
/// The first call of an adapter starts a task on the runtime of that call. The task ends with the
/// adapter, with its pool and with that runtime; a later call on another runtime starts it again.
/// It purges only while that runtime is driven, and does nothing while tokio's clock is paused.
///
/// A purge repeats a statement until it deletes fewer keys than it may. Then it reads the
/// statistics for the [gauges](crate::observe#metrics). The first purge starts after 30 to 60 s, or
/// within the interval if that is shorter. Every pause is jittered, so that replicas that start
/// together do not purge together.
///
/// An error or a hang of the store ends a purge, which is tried again after 1 s, 2 s, 4 s and so
/// on, up to the interval. The first failure is logged at WARN (`purging failed`), and the next
/// ones at DEBUG, until a purge succeeds.
///
/// Replicas that share a table do not disturb each other.
///
/// # Example
///
/// ```
/// use std::time::Duration;
/// use tower_dedup::adapter::Purging;
///
/// let hourly = Purging::new().every(Duration::from_secs(3_600)).keys_per_statement(100);
/// assert_ne!(hourly, Purging::off());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub struct Purging {
    /// `None` if nothing is purged.
    every: Option<Duration>,
    keys_per_statement: u32,
}

impl Purging {
    /// Deletes up to 1,000 keys in a statement, every ten minutes. A statement that deletes 1,000
    /// keys is repeated at once.
    pub const fn new() -> Self {
        Self { every: Some(Duration::from_secs(600)), keys_per_statement: 1_000 }
    }

    /// Deletes nothing. Expired keys stay until you purge: see
    /// [`MaintenanceAdapter::purge`](super::super::maintenance::MaintenanceAdapter::purge).
    pub const fn off() -> Self {
        Self { every: None, ..Self::new() }
    }

    /// Sets the pause between two purges.
    ///
    /// A pause below 1 ms or above 365 days is invalid.
    pub fn every(self, interval: Duration) -> Self {
        Self { every: Some(interval), ..self }
    }

    /// Sets how many keys one statement deletes at most. A statement with fewer keys holds its
    /// locks for a shorter time.
    ///
    /// 0 is invalid.
    pub fn keys_per_statement(self, keys: u32) -> Self {
        Self { keys_per_statement: keys, ..self }
    }

    pub(crate) fn check(self) -> Result<(), ConfigError> {
        let pauses = Duration::from_millis(1)..=Duration::from_secs(365 * 86_400);
        let is_pause = self.every.is_none_or(|every| pauses.contains(&every));
        let every = self.every.unwrap_or_default();
        check(is_pause, "every", "from 1 ms to 365 days", &every)?;
        let keys = self.keys_per_statement;
        check(keys > 0, "keys_per_statement", "at least 1", &keys)
    }

    pub(super) fn is_off(self) -> bool {
        self.every.is_none()
    }

    /// Purges until `stop`, or until `adapter` returns `None`: it is asked before each statement.
    pub(crate) async fn run<A: MaintenanceAdapter>(
        self,
        adapter: impl Fn() -> Option<A>,
        stop: CancellationToken,
    ) {
        let Some(every) = self.every else { return };
        let mut pause = every.min(FIRST_WITHIN).mul_f64(rand::rng().random_range(0.5..=1.0));
        let (mut failed, mut retry) = (false, FIRST_RETRY);
        // For an alert on a purge that never succeeds.
        observe::set_last_purge();
        while stop.run_until_cancelled(sleep(pause)).await.is_some() {
            match self.purge(&adapter, &stop).await {
                Ok(false) => return,
                Ok(true) => (pause, failed, retry) = (every, false, FIRST_RETRY),
                // The adapter may be closed.
                Err(_) if stop.is_cancelled() => return,
                Err(error) => {
                    let report = if failed {
                        observe::records::purge_failed_again
                    } else {
                        observe::records::purge_failed
                    };
                    report(&error);
                    (pause, failed, retry) =
                        (retry.min(every), true, retry.saturating_mul(2).min(every));
                }
            }
            pause = pause.mul_f64(rand::rng().random_range(0.9..=1.1));
        }
    }

    /// Deletes every key that can be purged. Returns `false` if it was stopped before; a stop waits
    /// for the current statement.
    async fn purge<A: MaintenanceAdapter>(
        self,
        adapter: &impl Fn() -> Option<A>,
        stop: &CancellationToken,
    ) -> Result<bool, StoreError> {
        while let Some(adapter) = adapter()
            && !stop.is_cancelled()
        {
            let deleted = within(adapter.purge(self.keys_per_statement)).await?;
            if deleted > 0 {
                observe::records::purged(deleted);
            }
            if deleted < u64::from(self.keys_per_statement) {
                observe::set_last_purge();
                report(&within(adapter.stats()).await?);
                return Ok(true);
            }
        }
        Ok(false)
    }
}

impl Default for Purging {
    fn default() -> Self {
        Self::new()
    }
}

async fn within<T>(call: StoreFuture<'_, T>) -> Result<T, StoreError> {
    let called = tokio::time::timeout(TIMEOUT, call).await;
    called.unwrap_or_else(|_| Err(StoreError::new(StoreErrorKind::Timeout, "purging keys")))
}

fn report(stats: &Stats) {
    let rows = [
        ("in_flight", stats.in_flight),
        ("lapsed", stats.lapsed),
        ("released", stats.released),
        ("complete", stats.complete),
        ("expired", stats.expired),
    ];
    observe::table(rows, stats.oldest_lapsed, stats.bytes);
}

/// Returns `true` if tokio's clock is paused, as in a test. Its pauses would end at once, and the
/// store's clock does not follow it.
pub(super) fn is_clock_paused() -> bool {
    let before = Instant::now();
    let now = tokio::time::Instant::now().into_std();
    now < before || now > Instant::now()
}
