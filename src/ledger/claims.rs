//! [`Claims`]: claims the keys of a delivery, and releases in the background what it may hold.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::OwnedSemaphorePermit;
use tokio::time::timeout;

use super::call;
use super::pending::Pending;
use super::resolve::{KeyState, Resolution, States, resolve_claims};
use super::retry::{RetryJob, RetryPool};
use crate::adapter::contract::{CallTerms, DedupAdapter, Permanence, Seen};
use crate::error::Error;
use crate::key::{DedupKey, Event, List};

/// After this time, the release of a key that is complete at once is not repeated.
pub(super) const RELEASE_BOUND: Duration = Duration::from_secs(600);

/// The claims of one delivery. If it is dropped, all keys that it may hold are released in the background.
///
/// A call of unknown outcome may hold its key, and so may a call whose future was dropped.
pub(super) struct Claims<'l> {
    pub(super) adapter: &'l Arc<dyn DedupAdapter>,
    pub(super) pool: &'l RetryPool,
    /// The keys that may be held, without those that the last call claims.
    pub(super) held: List<DedupKey>,
    /// The keys that the last call claims.
    pub(super) asked: List<DedupKey>,
    pub(super) terms: CallTerms,
    pub(super) store_timeout: Duration,
    /// A slot of the pool, if the pool must not refuse the release.
    pub(super) slot: Option<OwnedSemaphorePermit>,
    /// Contains the keys until they are released.
    pub(super) releasing: Option<&'l Arc<Pending>>,
    /// The keys that are complete for this process, and are not claimed.
    pub(super) completing: Option<&'l Pending>,
}

impl Claims<'_> {
    /// Claims these keys, each by a call of its own.
    #[expect(clippy::manual_async_fn, reason = "an `async fn` stores its arguments twice")]
    pub(super) fn claim(&mut self, keys: List<DedupKey>) -> impl Future<Output = States> + Send {
        async move {
            let (asked, pending) = match self.completing {
                Some(completing) => completing.split(keys),
                None => (keys, Vec::new()),
            };
            self.asked = asked;
            let (adapter, bound) = (&**self.adapter, self.store_timeout);
            let replies = call::claim(adapter, &self.asked, &self.terms, bound).await;
            // The event of a key whose completion is pending is complete, as far as this process knows.
            let complete = |(key, stored)| {
                let seen = Seen::new(Duration::ZERO).with_stored(stored);
                (key, KeyState::Duplicate(seen))
            };
            let pending = pending.into_iter().map(complete);
            States::new(self.asked.clone(), replies, pending)
        }
    }

    /// Claims the keys of events whose second identities were claimed, or are complete for these keys.
    pub(super) async fn claim_later(&mut self, events: &[Event], first: &States) -> States {
        let later = first.later_keys(events);
        if later.is_empty() {
            return States::default();
        }
        self.held = first.may_be_held().cloned().collect();
        self.claim(later).await
    }

    /// Resolves the claims. From now on, only the keys that are to be released are held.
    pub(super) fn resolve(
        &mut self,
        events: List<Event>,
        first: States,
        later: States,
    ) -> Resolution {
        let mut resolution = resolve_claims(events, first, later, &self.terms);
        self.held = std::mem::take(&mut resolution.release);
        self.asked.clear();
        resolution
    }

    /// Lets all keys stay as they are. Returns the slot of the release.
    pub(super) fn disarm(&mut self) -> Option<OwnedSemaphorePermit> {
        self.held.clear();
        self.asked.clear();
        self.slot.take()
    }

    /// Releases the keys, within `store_timeout`. The release continues in the background if it has not
    /// succeeded then, or if this future is dropped.
    pub(super) async fn finish(self) {
        if self.held.is_empty() {
            return;
        }
        let job = self.job();
        let _guard = self.releasing.map(|releasing| releasing.add(Arc::clone(&job.keys)));
        // Dropped before the guard, so that there is no moment without one.
        let mut claims = self;
        if let Ok(Ok(())) = timeout(claims.store_timeout, release_all(&job)).await {
            claims.held.clear();
        }
    }

    fn job(&self) -> RetryJob {
        RetryJob {
            operation: "release",
            adapter: Arc::clone(self.adapter),
            keys: self.held.iter().chain(&self.asked).cloned().collect(),
            terms: self.terms.clone(),
            store_timeout: self.store_timeout,
            bound: match self.terms.permanence() {
                Permanence::OnClaim => RELEASE_BOUND,
                // The lease has lapsed then.
                Permanence::OnCompletion { lease } => lease,
            },
            repeats: Error::is_transient,
        }
    }
}

/// Releases the keys, a few at a time. Every key has its turn. Returns an error after which the release is repeated,
/// if there is one.
async fn release_all(job: &RetryJob) -> Result<(), Error> {
    let mut errors = Vec::new();
    for keys in job.keys.chunks(call::MOST_IN_BACKGROUND) {
        let released = call::release(&*job.adapter, keys, &job.terms, job.store_timeout).await;
        errors.extend(released.into_iter().filter_map(Result::err));
    }
    let repeated = errors.iter().position(job.repeats).unwrap_or_default();
    if errors.is_empty() { Ok(()) } else { Err(errors.swap_remove(repeated)) }
}

impl Drop for Claims<'_> {
    fn drop(&mut self) {
        if self.held.is_empty() && self.asked.is_empty() {
            return;
        }
        let job = self.job();
        let guard = self.releasing.map(|releasing| releasing.add(Arc::clone(&job.keys)));
        self.pool.repeat(self.slot.take(), job, guard, |job| Box::pin(release_all(job)));
    }
}
