//! [`Claims`]: claims the keys of a delivery, and releases in the background what it may hold.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

use super::call;
use super::contract::{Begin, BeginContext};
use super::pending::{Pending, PendingGuard};
use super::resolve::{KeyState, Resolution, States, resolve_claims};
use super::retry::{RetryJob, RetryPool, Write};
use crate::adapter::contract::{CallTerms, ClaimReply, DedupAdapter, Seen};
use crate::error::Error;
use crate::key::{DedupKey, Event, List};

/// The claims of one delivery. If it is dropped, all keys that it may hold are released in the background.
///
/// A call of unknown outcome may hold its key, and so may a call whose future was dropped.
pub(super) struct Claims<'l> {
    adapter: &'l Arc<dyn DedupAdapter>,
    pool: &'l RetryPool,
    /// The keys that may be held, without those that the last call claims.
    pub(super) held: List<DedupKey>,
    /// The keys that the last call claims.
    asked: List<DedupKey>,
    pub(super) terms: CallTerms,
    pub(super) store_timeout: Duration,
    /// What this process knows of keys that are complete in the store. Boxed, because most ledgers have none.
    pub(super) doubt: Option<Box<Doubt<'l>>>,
    /// The keys that are complete for this process, and are not claimed, with the terms of their completion.
    pub(super) completing: Option<&'l Pending<CallTerms>>,
}

/// A key that is complete in the store is in flight if its claim may be released, because its handler never ran.
pub(super) struct Doubt<'l> {
    /// A slot of the pool, which must not refuse the release.
    pub(super) slot: Option<OwnedSemaphorePermit>,
    /// Contains the keys to release until they are released.
    pub(super) releasing: &'l Arc<Pending>,
    /// The removals from `releasing` before the delivery. If there was one meanwhile, any key may have been released.
    pub(super) removals: usize,
    /// When each delivery of this process has begun that claims second identities.
    pub(super) claiming: Option<PendingGuard<Instant>>,
}

/// The replies of a step, and the keys that were not asked for because their completion is pending, with its terms.
type Claimed = (List<Result<ClaimReply, Error>>, Vec<(DedupKey, CallTerms)>);

impl Doubt<'_> {
    fn apply(&self, states: &mut States) {
        for (key, state) in states.iter_mut() {
            let KeyState::Duplicate(seen) = &state else { continue };
            let is_released =
                self.releasing.contains(key) || self.releasing.removals() != self.removals;
            let claiming = self.claiming.as_ref().filter(|guard| guard.keys().contains(key));
            // Another delivery may have completed this second identity, and may release it.
            let is_shared = |guard: &PendingGuard<Instant>| {
                guard.is_known(key, |since| seen.age <= since.elapsed())
            };
            if is_released || claiming.is_some_and(is_shared) {
                *state = KeyState::InFlight;
            }
        }
    }
}

impl<'l> Claims<'l> {
    pub(super) fn new(
        adapter: &'l Arc<dyn DedupAdapter>,
        pool: &'l RetryPool,
        terms: CallTerms,
        store_timeout: Duration,
    ) -> Self {
        let (held, asked) = (List::new(), List::new());
        let (doubt, completing) = (None, None);
        Self { adapter, pool, held, asked, terms, store_timeout, doubt, completing }
    }

    /// Claims the identities of these events, beginning with those that are `first`. If there are new events, `start`
    /// makes their claim.
    pub(super) fn begin<C: Send>(
        mut self,
        events: List<Event>,
        first: List<DedupKey>,
        context: &BeginContext,
        start: impl FnOnce(&mut Self, &mut Resolution) -> Begin<C> + Send,
    ) -> impl Future<Output = Result<Begin<C>, Error>> + Send {
        self.asked = first;
        async move {
            let first = {
                let claimed = self.claim().await;
                // Most deliveries carry one event with one identity, which is new.
                if let ([Ok(ClaimReply::First { attempt, takeover })], [event]) =
                    (&*claimed.0, &*events)
                    && event.second_identity().is_none()
                {
                    let (held, run) = (std::mem::take(&mut self.asked), (*attempt, *takeover));
                    return Ok(start(&mut self, &mut Resolution::first(events, held, run)));
                }
                self.states(claimed)
            };
            if events.iter().all(|event| event.second_identity().is_none()) {
                return self.conclude(events, first, States::default(), context, start);
            }
            // Boxed, because most events have one identity.
            let later_step = Box::pin(async move {
                let later = self.claim_later(&events, &first).await;
                let begun = self.conclude(events, first, later, context, start);
                if begun.as_ref().is_ok_and(Begin::runs_nothing) && !self.held.is_empty() {
                    // A release that fails continues in the background.
                    let _ = self.finish().await;
                }
                begun
            });
            later_step.await
        }
    }

    /// Claims the keys that are asked for, each by a call of its own. Returns with the replies the keys that are
    /// complete for this process.
    #[expect(clippy::manual_async_fn, reason = "an `async fn` stores its arguments twice")]
    fn claim(&mut self) -> impl Future<Output = Claimed> + Send {
        async move {
            let pending = match self.completing {
                Some(completing) => completing.split(&mut self.asked),
                None => Vec::new(),
            };
            let (adapter, bound) = (&**self.adapter, self.store_timeout);
            (call::claim(adapter, &self.asked, &self.terms, bound).await, pending)
        }
    }

    /// Returns the states of the keys that were asked for, and of those that are pending.
    fn states(&self, (replies, pending): Claimed) -> States {
        // The event of a key whose completion is pending is complete, as far as this process knows.
        let complete = |(key, terms): (DedupKey, CallTerms)| {
            let stored = terms.stored_data_for(&key).unwrap_or_default();
            let seen = Seen::new(Duration::ZERO).with_stored(Arc::new(stored));
            (key, KeyState::Duplicate(seen))
        };
        let pending = pending.into_iter().map(complete);
        let mut states = States::new(&self.asked, replies, pending);
        if let Some(doubt) = &self.doubt {
            doubt.apply(&mut states);
        }
        states
    }

    /// Claims the keys of events whose second identities were claimed, or are complete for these keys.
    async fn claim_later(&mut self, events: &[Event], first: &States) -> States {
        let later = first.later_keys(events, &self.terms);
        if later.is_empty() {
            return States::default();
        }
        self.held = first.may_be_held().cloned().collect();
        self.asked = later;
        let claimed = self.claim().await;
        self.states(claimed)
    }

    /// Makes the claim of the events that run. From now on, only the keys that are to be released are held.
    fn conclude<C>(
        &mut self,
        events: List<Event>,
        first: States,
        later: States,
        context: &BeginContext,
        start: impl FnOnce(&mut Self, &mut Resolution) -> Begin<C>,
    ) -> Result<Begin<C>, Error> {
        let mut resolution = resolve_claims(events, first, later, &self.terms, context);
        self.held = std::mem::take(&mut resolution.release);
        self.asked.clear();
        if resolution.new.is_empty() {
            return resolution.without_new();
        }
        Ok(start(self, &mut resolution))
    }

    /// Releases the keys. The release continues in the background if it fails, or if this future is dropped.
    pub(super) async fn finish(self) -> Result<(), Error> {
        let (keys, _guard) = self.releasing();
        // Dropped before the guard, so that there is no moment without one.
        let mut claims = self;
        let (adapter, bound) = (&**claims.adapter, claims.store_timeout);
        call::all(call::release(adapter, &keys, &claims.terms, bound).await)?;
        claims.held.clear();
        Ok(())
    }

    pub(super) fn take_slot(&mut self) -> Option<OwnedSemaphorePermit> {
        self.doubt.as_mut().and_then(|doubt| doubt.slot.take())
    }

    pub(super) fn job(&self, write: Write, keys: Arc<[DedupKey]>) -> RetryJob {
        let (adapter, terms) = (Arc::clone(self.adapter), self.terms.clone());
        RetryJob { write, adapter, keys, terms, store_timeout: self.store_timeout }
    }

    /// Returns all keys that may be held. A key that is complete at once is in flight until they are released, or the
    /// guard is dropped.
    fn releasing(&self) -> (Arc<[DedupKey]>, Option<PendingGuard>) {
        let keys: Arc<[_]> = self.held.iter().chain(&self.asked).cloned().collect();
        let releasing = self.doubt.as_ref().map(|doubt| doubt.releasing);
        let guard = releasing.map(|releasing| releasing.add(Arc::clone(&keys), ()));
        (keys, guard)
    }
}

impl Drop for Claims<'_> {
    fn drop(&mut self) {
        if self.held.is_empty() && self.asked.is_empty() {
            return;
        }
        let (keys, guard) = self.releasing();
        self.pool.repeat(self.take_slot(), self.job(Write::Release, keys), guard);
    }
}
