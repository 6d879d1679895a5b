//! [`Purger`]: deletes expired keys, off the request path.
//!
//! 1. A round deletes in portions, until one comes back short, and then waits for its interval. After
//!    each portion it pauses for as long as the portion took, so that it takes half of the time of a
//!    connection at most.
//! 2. The first round comes within a minute after the start, or within the interval if that is
//!    shorter. Every pause is jittered, so that replicas started together spread out.
//! 3. An error, a hang or a panic of the store ends one round, never the purger, and is logged. The
//!    next round comes after a second, and after each further failure in twice the time, up to the
//!    interval. What was deleted before the failure is counted.
//! 4. Keys stay for an hour after they have expired ([`PURGE_GRACE`](crate::adapter::PURGE_GRACE)),
//!    and a round fails while the store's clock is more than an hour ahead of where the round before
//!    expected it: a clock that is wrong for a while deletes nothing.
//! 5. Dropping the handle stops it at the next pause; [`PurgerHandle::stop`] waits for that.
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

use std::sync::Arc;
use std::time::Duration;

use rand::RngExt;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::adapter::MaintenanceAdapter;
use crate::error::{Error, ErrorKind};
use crate::observe;

/// Within how much time the first round comes.
const FIRST_WITHIN: Duration = Duration::from_secs(60);
/// After how much time a round is repeated that has failed.
const FIRST_RETRY: Duration = Duration::from_secs(1);

/// Deletes expired keys from a store, at an interval.
#[derive(Debug, Clone)]
#[must_use = "a purger does nothing until it is spawned"]
pub struct Purger<A> {
    adapter: A,
    every: Duration,
    batch: u32,
    timeout: Duration,
}

impl<A: MaintenanceAdapter> Purger<A> {
    /// A purger that deletes 1,000 keys at a time, every ten minutes. Its first round comes within a
    /// minute.
    pub fn new(adapter: A) -> Self {
        let (every, timeout) = (Duration::from_secs(600), Duration::from_secs(30));
        Self { adapter, every, batch: 1_000, timeout }
    }

    /// The pause between two rounds, from a millisecond to a year.
    pub fn every(mut self, interval: Duration) -> Self {
        self.every = interval.clamp(Duration::from_millis(1), Duration::from_secs(365 * 86_400));
        self
    }

    /// How many keys one statement deletes, at least one. Small batches hold locks shortly.
    pub fn batch(mut self, keys: u32) -> Self {
        self.batch = keys.max(1);
        self
    }

    /// How long one batch may take before its round fails.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Starts it on the current runtime.
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime.
    pub fn spawn(self) -> PurgerHandle {
        let stop = CancellationToken::new();
        let token = stop.clone();
        let (every, adapter) = (self.every, Arc::new(self.adapter));
        let round = Round { adapter, batch: self.batch, timeout: self.timeout };
        let task = tokio::spawn(async move {
            let mut pause = every.min(FIRST_WITHIN).mul_f64(rand::rng().random_range(0.0..=1.0));
            let mut retry = FIRST_RETRY;
            while token.run_until_cancelled(tokio::time::sleep(pause)).await.is_some() {
                // In a task of its own, so that a store that panics ends one round only.
                let ended = tokio::spawn(round.clone().run(token.clone())).await;
                let ended = ended.unwrap_or_else(|panic| {
                    Err(Error::new(ErrorKind::Unavailable, "purging").with_source(panic))
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

/// One round.
struct Round<A> {
    adapter: Arc<A>,
    batch: u32,
    timeout: Duration,
}

impl<A> Clone for Round<A> {
    fn clone(&self) -> Self {
        Self { adapter: Arc::clone(&self.adapter), ..*self }
    }
}

impl<A: MaintenanceAdapter> Round<A> {
    /// Deletes until a portion comes back short. A portion under way is finished before a stop.
    async fn run(self, stop: CancellationToken) -> Result<(), Error> {
        loop {
            let started = Instant::now();
            let purged = tokio::time::timeout(self.timeout, self.adapter.purge(self.batch))
                .await
                .unwrap_or_else(|_| Err(Error::new(ErrorKind::Timeout, "purging")))?;
            if purged > 0 {
                observe::purged(purged);
            }
            // Others want to use the store as well.
            let pause = stop.run_until_cancelled(tokio::time::sleep(started.elapsed()));
            if purged < u64::from(self.batch) || pause.await.is_none() {
                return Ok(());
            }
        }
    }
}

/// A running [`Purger`]. Dropped, it stops the purger at its next pause.
#[derive(Debug)]
#[must_use = "dropping the handle stops the purger"]
pub struct PurgerHandle {
    _stops: tokio_util::sync::DropGuard,
    task: JoinHandle<()>,
}

impl PurgerHandle {
    /// Stops the purger and waits for the batch that is under way.
    pub async fn stop(self) {
        let Self { _stops: stops, task } = self;
        drop(stops);
        // It never panics: every round is caught above.
        let _ = task.await;
    }
}
