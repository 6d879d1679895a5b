//! [`Purging`]: how often expired keys are deleted, and the loop that deletes them.
//!
//! The loop belongs to a SQL adapter, or to a [`Purger`](crate::Purger).
//!
//! 1. A round deletes in portions until the store says that the round is complete. Then the loop waits
//!    for the interval, or for nine times the length of the round if that is longer, up to six hours.
//!    So the rounds over a large table take a tenth of the time. After each portion the loop pauses for
//!    as long as the portion took, and for half a second at least unless the portion was full. So it
//!    uses a connection for half of the time at most, and a walk through a large table reads a bounded
//!    number of bytes a second.
//! 2. The first round starts within a minute, or within the interval if that is shorter. Every pause is
//!    jittered, so that replicas that start together do not purge together.
//! 3. An error, a hang or a panic of the store ends one round; the loop goes on. The next round starts
//!    after a second. After each further failure the pause doubles, up to the interval. Portions that
//!    were deleted before the failure are counted.
//! 4. The first failure is logged at WARN, and the next ones at DEBUG. If no portion succeeds for three
//!    intervals, or three of the longer pauses, that is logged at WARN once. After a round that
//!    succeeds, both may be logged again.

use std::sync::Arc;
use std::time::Duration;

use rand::RngExt;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::contract::StoreFuture;
use super::inspection::{Purged, Stats};
use crate::error::{ConfigError, Error, ErrorKind, check, valid};
use crate::observe::{self, TableCounts};

/// The latest start of the first round. The earliest is half of it: a test or a command that counts rows
/// has ended before.
const FIRST_WITHIN: Duration = Duration::from_secs(60);
/// The limits of the pause between two rounds.
const SHORTEST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(365 * 86_400);
/// The pause after the first failed round.
const FIRST_RETRY: Duration = Duration::from_secs(1);
/// How many times longer than a round the pause after it is, at least.
const PAUSE_PER_ROUND: u32 = 9;
/// The longest pause because of a long round, if the interval is shorter.
const LONGEST_PAUSE_OF_ROUND: Duration = Duration::from_secs(6 * 3_600);
/// After how many intervals without a successful portion the loop warns.
const STUCK_AFTER: u32 = 3;
/// The shortest pause after a portion that was not full. Such a portion has read a bounded part of the
/// table, so this bounds how much of it a second reads.
const STEP_PAUSE: Duration = Duration::from_millis(500);
/// How long one statement may take by default.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(30);

/// How often a SQL adapter deletes its expired keys. It does so by itself, in the background.
///
/// The first call of an adapter starts a task on the runtime of that call. The task ends with the
/// adapter, with its pool and with that runtime; a later call on another runtime starts it again. It
/// purges only while that runtime is driven, and does nothing while tokio's clock is paused.
///
/// Replicas that share a table do not disturb each other, and neither does a
/// [`Purger`](crate::Purger) over the same adapter.
///
/// # Example
///
/// ```
/// use std::time::Duration;
/// use tower_dedup::adapter::Purging;
///
/// let hourly = Purging::new().every(Duration::from_secs(3_600)).keys_per_statement(100);
/// assert_ne!(hourly, Purging::off());
/// assert!(hourly.try_every(Duration::ZERO).is_err());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub struct Purging {
    /// `None` if nothing is purged.
    every: Option<Duration>,
    keys_per_statement: u32,
}

impl Purging {
    /// Deletes up to 1,000 keys in a statement, every ten minutes; in a large table less often, because
    /// the pause is at least nine times as long as the round before it, up to six hours.
    pub const fn new() -> Self {
        Self { every: Some(Duration::from_secs(600)), keys_per_statement: 1_000 }
    }

    /// Deletes nothing. Expired keys stay until you purge: see
    /// [`MaintenanceAdapter::purge`](super::MaintenanceAdapter::purge).
    pub const fn off() -> Self {
        Self { every: None, ..Self::new() }
    }

    /// Sets the pause between two rounds.
    ///
    /// # Panics
    ///
    /// For a pause below 1 ms or above 365 days: see [`try_every`](Self::try_every).
    #[track_caller]
    pub fn every(self, interval: Duration) -> Self {
        valid(self.try_every(interval))
    }

    /// Sets the pause between two rounds, for a value from a file.
    ///
    /// # Errors
    ///
    /// [`ConfigError::InvalidSetting`] for a pause below 1 ms or above 365 days.
    pub fn try_every(self, interval: Duration) -> Result<Self, ConfigError> {
        let is_valid = (SHORTEST_PAUSE..=LONGEST_PAUSE).contains(&interval);
        check(is_valid, "every", "from 1 ms to 365 days")?;
        Ok(Self { every: Some(interval), ..self })
    }

    /// Sets how many keys one statement deletes at most. A statement with fewer keys holds its locks
    /// for a shorter time.
    ///
    /// # Panics
    ///
    /// For 0: see [`try_keys_per_statement`](Self::try_keys_per_statement).
    #[track_caller]
    pub fn keys_per_statement(self, keys: u32) -> Self {
        valid(self.try_keys_per_statement(keys))
    }

    /// Sets how many keys one statement deletes at most, for a value from a file.
    ///
    /// # Errors
    ///
    /// [`ConfigError::InvalidSetting`] for 0.
    pub fn try_keys_per_statement(self, keys: u32) -> Result<Self, ConfigError> {
        check(keys > 0, "keys_per_statement", "at least 1")?;
        Ok(Self { keys_per_statement: keys, ..self })
    }

    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    pub(super) fn is_off(self) -> bool {
        self.every.is_none()
    }

    /// Purges until `stop`, or until `portion` returns `None`. A statement may take `timeout`.
    pub(crate) async fn run(self, timeout: Duration, portion: Portion, stop: CancellationToken) {
        let Some(every) = self.every else { return };
        let round = Round { portion, keys: self.keys_per_statement, timeout };
        let mut pause = every.min(FIRST_WITHIN).mul_f64(rand::rng().random_range(0.5..=1.0));
        let mut retry = FIRST_RETRY;
        let (mut succeeded_at, mut has_failed, mut is_stuck) = (Instant::now(), false, false);
        // The interval, or the pause after the last round if that was longer.
        let mut interval = every;
        let mut is_first = true;
        while stop.run_until_cancelled(tokio::time::sleep(pause)).await.is_some() {
            if std::mem::take(&mut is_first) {
                observe::purge_begins();
            }
            let begun_at = Instant::now();
            // A task of its own, so that a panic of the store ends this round only.
            let ended = tokio::spawn(round.clone().run(stop.clone())).await;
            let (has_succeeded, ended) = ended.unwrap_or_else(|panic| {
                let error = Error::new(ErrorKind::Unavailable, "purging keys").with_source(panic);
                (false, Err(error))
            });
            if has_succeeded {
                succeeded_at = Instant::now();
            }
            match ended {
                Ok(Ended::Gone | Ended::Stopped) => return,
                // The adapter may be closed.
                Err(_) if stop.is_cancelled() => return,
                Ok(Ended::Done) => {
                    let of_round = begun_at.elapsed().saturating_mul(PAUSE_PER_ROUND);
                    interval = every.max(of_round.min(LONGEST_PAUSE_OF_ROUND));
                    pause = interval;
                    (retry, has_failed, is_stuck) = (FIRST_RETRY, false, false);
                }
                Err(error) => {
                    observe::purge_failed(&error, !has_failed);
                    let since = succeeded_at.elapsed();
                    if !is_stuck && since >= interval.saturating_mul(STUCK_AFTER) {
                        observe::purge_stuck(&error, since);
                        is_stuck = true;
                    }
                    has_failed = true;
                    (pause, retry) = (retry.min(every), retry.saturating_mul(2).min(every));
                }
            }
            pause = pause.mul_f64(rand::rng().random_range(0.9..=1.1));
        }
    }
}

impl Default for Purging {
    fn default() -> Self {
        Self::new()
    }
}

/// Deletes at most so many keys: [`MaintenanceAdapter::purge`](super::MaintenanceAdapter::purge).
/// Returns `None` if the adapter is gone; and `Ok(None)` if its role may not purge, which it has logged.
pub(crate) type Portion =
    Arc<dyn Fn(u32) -> Option<StoreFuture<'static, Option<Purged>>> + Send + Sync>;

/// How a round ended that has not failed.
enum Ended {
    Done,
    Stopped,
    Gone,
}

#[derive(Clone)]
struct Round {
    portion: Portion,
    keys: u32,
    timeout: Duration,
}

impl Round {
    /// Deletes until the store says that the round is complete. A stop waits for the current portion.
    /// Returns whether any portion has succeeded, too.
    async fn run(self, stop: CancellationToken) -> (bool, Result<Ended, Error>) {
        let mut has_succeeded = false;
        let ended = self.portions(stop, &mut has_succeeded).await;
        (has_succeeded, ended)
    }

    async fn portions(
        self,
        stop: CancellationToken,
        has_succeeded: &mut bool,
    ) -> Result<Ended, Error> {
        loop {
            let started = Instant::now();
            let Some(portion) = (self.portion)(self.keys) else { return Ok(Ended::Gone) };
            let purged = tokio::time::timeout(self.timeout, portion)
                .await
                .unwrap_or_else(|_| Err(Error::new(ErrorKind::Timeout, "purging keys")))?;
            *has_succeeded = true;
            let Some(purged) = purged else { return Ok(Ended::Done) };
            if purged.deleted > 0 {
                observe::purged(purged.deleted);
            }
            if purged.is_round_complete {
                observe::purge_round(purged.stats.as_ref().map(counts).as_ref());
                return Ok(Ended::Done);
            }
            // Leaves the store to deliveries for the other half of the time.
            let mut pause = started.elapsed();
            if purged.deleted < u64::from(self.keys) {
                pause = pause.max(STEP_PAUSE);
            }
            if stop.run_until_cancelled(tokio::time::sleep(pause)).await.is_none() {
                return Ok(Ended::Stopped);
            }
        }
    }
}

fn counts(stats: &Stats) -> TableCounts {
    TableCounts {
        in_flight: stats.in_flight,
        lapsed: stats.lapsed,
        released: stats.released,
        complete: stats.complete,
        expired: stats.expired,
        oldest_lapsed: stats.oldest_lapsed,
        bytes: stats.bytes,
    }
}
