//! [`Purger`]: deletes expired keys, off the request path.
//!
//! 1. It deletes in batches, until a batch comes back short, and then waits for its interval.
//! 2. The interval is jittered by up to a tenth, so that replicas started together spread out.
//! 3. An error, a hang or a panic of the store ends one round, never the purger.
//! 4. Dropping the handle stops it at the next pause; [`PurgerHandle::stop`] waits for that.
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

use std::time::Duration;

use rand::RngExt;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::adapter::Maintain;
use crate::error::{Error, ErrorKind};
use crate::observe;

/// Deletes expired keys from a store, at an interval.
#[derive(Debug, Clone)]
#[must_use = "a purger does nothing until it is spawned"]
pub struct Purger<A> {
    adapter: A,
    every: Duration,
    batch: u32,
    timeout: Duration,
}

impl<A: Maintain> Purger<A> {
    /// A purger that looks every ten minutes and deletes 1,000 keys at a time.
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

    /// How long one batch may take before its round is given up.
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
        let adapter = std::sync::Arc::new(self.adapter);
        let (every, batch, timeout) = (self.every, self.batch, self.timeout);
        let task = tokio::spawn(async move {
            loop {
                let pause = every.mul_f64(rand::rng().random_range(0.9..=1.1));
                tokio::select! {
                    () = token.cancelled() => return,
                    () = tokio::time::sleep(pause) => {}
                }
                let adapter = std::sync::Arc::clone(&adapter);
                let stop = token.clone();
                // In a task of its own, so that a store that panics ends one round only.
                let round =
                    tokio::spawn(async move { purge(&*adapter, batch, timeout, &stop).await });
                match round.await {
                    Ok(Ok(0)) => {}
                    Ok(Ok(keys)) => observe::purged(keys),
                    Ok(Err(error)) => observe::purge_failed(&error),
                    Err(panic) => {
                        let error = Error::new(ErrorKind::Unavailable, "purging");
                        observe::purge_failed(&error.with_source(panic));
                    }
                }
            }
        });
        PurgerHandle { _stops: stop.drop_guard(), task }
    }
}

/// One round: batches until one comes back short. A batch under way is finished before a stop.
async fn purge(
    adapter: &impl Maintain,
    batch: u32,
    timeout: Duration,
    stop: &CancellationToken,
) -> Result<u64, Error> {
    let mut total = 0;
    loop {
        let purged = tokio::time::timeout(timeout, adapter.purge(batch))
            .await
            .unwrap_or_else(|_| Err(Error::new(ErrorKind::Timeout, "purging")))?;
        total += purged;
        if purged < u64::from(batch) || stop.is_cancelled() {
            return Ok(total);
        }
        tokio::task::yield_now().await;
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
