//! [`Release`]: releases in the background the keys that a claim may hold.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::OwnedSemaphorePermit;
use tokio::time::timeout;

use super::call;
use super::pending::Pending;
use super::retry::{RetryJob, RetryPool};
use crate::adapter::{CallTerms, DedupAdapter};
use crate::error::Error;
use crate::key::DedupKey;

/// A store that needs 100 ms for each key, because it waits for a replica, takes 1.6 s.
const KEYS_IN_A_CALL: usize = 16;

/// A release that starts in the background when it is dropped, unless it is disarmed.
pub(super) struct Release<'l> {
    pub(super) adapter: &'l Arc<dyn DedupAdapter>,
    pub(super) pool: &'l RetryPool,
    /// Empty after the release has started or was disarmed.
    pub(super) keys: &'l [DedupKey],
    pub(super) terms: &'l CallTerms,
    pub(super) store_timeout: Duration,
    /// How long a store that does not reply is asked again.
    pub(super) bound: Duration,
    /// A slot of the pool, if the pool must not refuse this release.
    pub(super) slot: Option<OwnedSemaphorePermit>,
    /// Contains the keys until they are released.
    pub(super) releasing: Option<&'l Arc<Pending>>,
}

impl Release<'_> {
    /// Makes the drop start nothing. Returns the slot of the release.
    pub(super) fn disarm(&mut self) -> Option<OwnedSemaphorePermit> {
        self.keys = &[];
        self.slot.take()
    }

    /// Starts the release in the background, unless it has no keys.
    pub(super) fn start(&mut self) {
        if self.keys.is_empty() {
            return;
        }
        let job = self.job();
        self.keys = &[];
        let guard = self.releasing.map(|releasing| releasing.add(Arc::clone(&job.keys)));
        self.pool.repeat(self.slot.take(), job, guard, |job| Box::pin(release_all(job)));
    }

    /// Releases the keys, within `store_timeout`. The release continues in the background if it has not
    /// succeeded then, or if this future is dropped.
    pub(super) async fn finish(mut self) {
        if self.keys.is_empty() {
            return;
        }
        let job = self.job();
        let _guard = self.releasing.map(|releasing| releasing.add(Arc::clone(&job.keys)));
        if let Ok(Ok(())) = timeout(self.store_timeout, release_all(&job)).await {
            self.disarm();
        }
        // Before the guard ends.
        self.start();
    }

    fn job(&self) -> RetryJob {
        RetryJob {
            operation: "release",
            adapter: Arc::clone(self.adapter),
            keys: self.keys.into(),
            terms: self.terms.clone(),
            store_timeout: self.store_timeout,
            bound: self.bound,
            repeats: Error::is_transient,
        }
    }

    /// Disarms the release if its claim ended with an error after which nothing is claimed.
    pub(super) fn claim_failed(&mut self, error: &Error) {
        if !error.is_unknown() {
            self.disarm();
        }
    }
}

/// Releases the keys, a few in each call. A store may go through them one by one: if it could not finish
/// within `store_timeout`, the last ones would never be released. The other calls follow an error that ends the
/// release.
async fn release_all(job: &RetryJob) -> Result<(), Error> {
    let mut all = Ok(());
    for keys in job.keys.chunks(KEYS_IN_A_CALL) {
        match call::release(&*job.adapter, keys, &job.terms, job.store_timeout).await {
            Ok(()) => {}
            Err(error) if (job.repeats)(&error) => return Err(error),
            Err(error) => all = Err(error),
        }
    }
    all
}

impl Drop for Release<'_> {
    fn drop(&mut self) {
        self.start();
    }
}
