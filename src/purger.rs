//! [`Purger`]: deletes expired keys in the background.
//!
//! 1. A round deletes in portions until a portion is not full, then waits for its interval. After
//!    each portion the purger pauses for as long as the portion took. So it uses a connection for
//!    half of the time at most.
//! 2. The first round starts within a minute, or within the interval if that is shorter. Every
//!    pause is jittered, so that replicas that start together do not purge together.
//! 3. An error, a hang or a panic of the store ends one round and is logged; the purger goes on.
//!    The next round starts after a second. After each further failure the pause doubles, up to the
//!    interval. Portions that were deleted before the failure are counted.
//! 4. Expired keys stay for another hour ([`PURGE_GRACE`](crate::adapter::PURGE_GRACE)). A round
//!    fails while the store's clock is more than an hour ahead of its expected time. So a clock that
//!    is wrong for a while deletes nothing.
//! 5. If the handle is dropped, the purger stops at its next pause. [`PurgerHandle::stop`] waits for
//!    that.
//!
//! # Example
//!
//! ```
//! # tokio::runtime::Runtime::new().unwrap().block_on(async {
//! use std::sync::Arc;
//! use std::time::Duration;
//! use tower_dedup::Purger;
//! use tower_dedup::adapter::MemoryAdapter;
//!
//! let adapter = Arc::new(MemoryAdapter::new());
//! let purger = Purger::new(Arc::clone(&adapter)).every(Duration::from_secs(600)).spawn();
//! // … serve …
//! purger.stop().await;
//! # });
//! ```

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use rand::RngExt;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::adapter::MaintenanceAdapter;
use crate::error::{ConfigError, Error, ErrorKind, check, valid};
use crate::observe;

/// The latest start of the first round.
const FIRST_WITHIN: Duration = Duration::from_secs(60);
/// The limits of the pause between two rounds.
const SHORTEST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(365 * 86_400);
/// The pause after the first failed round.
const FIRST_RETRY: Duration = Duration::from_secs(1);

/// Deletes expired keys from a store, at an interval.
#[derive(Clone)]
#[must_use = "a purger does nothing until it is spawned"]
pub struct Purger {
    round: Round,
    every: Duration,
}

impl Purger {
    /// Makes a purger that deletes 1,000 keys in a statement, every ten minutes. A statement may
    /// take 30 seconds.
    pub fn new(adapter: impl MaintenanceAdapter) -> Self {
        let (adapter, timeout) = (Arc::new(adapter), Duration::from_secs(30));
        let round = Round { adapter, keys_per_statement: 1_000, timeout };
        Self { round, every: Duration::from_secs(600) }
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
        Ok(Self { every: interval, ..self })
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
    pub fn try_keys_per_statement(mut self, keys: u32) -> Result<Self, ConfigError> {
        check(keys > 0, "keys_per_statement", "at least 1")?;
        self.round.keys_per_statement = keys;
        Ok(self)
    }

    /// Sets how long one statement may take before its round fails.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.round.timeout = timeout;
        self
    }

    /// Starts the purger on the current runtime.
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime.
    pub fn spawn(self) -> PurgerHandle {
        let stop = CancellationToken::new();
        let token = stop.clone();
        let Self { round, every } = self;
        let task = tokio::spawn(async move {
            let mut pause = every.min(FIRST_WITHIN).mul_f64(rand::rng().random_range(0.0..=1.0));
            let mut retry = FIRST_RETRY;
            while token.run_until_cancelled(tokio::time::sleep(pause)).await.is_some() {
                // A task of its own, so that a panic of the store ends this round only.
                let ended = tokio::spawn(round.clone().run(token.clone())).await;
                let ended = ended.unwrap_or_else(|panic| {
                    Err(Error::new(ErrorKind::Unavailable, "purging keys").with_source(panic))
                });
                (pause, retry) = match ended {
                    Ok(()) => (every, FIRST_RETRY),
                    Err(error) => {
                        observe::purge_failed(&error);
                        (retry.min(every), retry.saturating_mul(2).min(every))
                    }
                };
                pause = pause.mul_f64(rand::rng().random_range(0.9..=1.1));
            }
        });
        PurgerHandle { _stops: stop.drop_guard(), task }
    }
}

impl fmt::Debug for Purger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Purger").field("every", &self.every).finish_non_exhaustive()
    }
}

/// One round of a purger.
#[derive(Clone)]
struct Round {
    adapter: Arc<dyn MaintenanceAdapter>,
    keys_per_statement: u32,
    timeout: Duration,
}

impl Round {
    /// Deletes until a portion is not full. A stop waits for the current portion.
    async fn run(self, stop: CancellationToken) -> Result<(), Error> {
        loop {
            let started = Instant::now();
            let purged =
                tokio::time::timeout(self.timeout, self.adapter.purge(self.keys_per_statement))
                    .await
                    .unwrap_or_else(|_| Err(Error::new(ErrorKind::Timeout, "purging keys")))?;
            if purged > 0 {
                observe::purged(purged);
            }
            // Leaves the store to deliveries for the other half of the time.
            let pause = stop.run_until_cancelled(tokio::time::sleep(started.elapsed()));
            if purged < u64::from(self.keys_per_statement) || pause.await.is_none() {
                return Ok(());
            }
        }
    }
}

/// A running [`Purger`], which stops at its next pause if the handle is dropped.
#[derive(Debug)]
#[must_use = "dropping the handle stops the purger"]
pub struct PurgerHandle {
    _stops: tokio_util::sync::DropGuard,
    task: JoinHandle<()>,
}

impl PurgerHandle {
    /// Stops the purger and waits for its current statement.
    pub async fn stop(self) {
        let Self { _stops: stops, task } = self;
        drop(stops);
        // The task never panics, because every round runs in its own task.
        let _ = task.await;
    }
}
