//! [`Claims`]: claims the keys of a delivery, and releases in the background what it may hold.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

use super::call;
use super::contract::{Begin, fails_open};
use super::pending::{Pending, PendingGuard};
use super::resolve::{Replies, Reply, Resolution, resolve};
use super::retry::{RetryJob, RetryPool, Write};
use crate::adapter::contract::{CallTerms, ClaimReply, DedupAdapter, Seen};
use crate::error::StoreError;
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
    pub(super) store_timeout: &'l Duration,
    /// What this process knows of keys that are complete in the store. Boxed, because most ledgers have none.
    pub(super) doubt: Option<Box<Doubt<'l>>>,
    /// The keys that are complete for this process, and are not claimed, with the terms of their completion.
    pub(super) completing: Option<&'l Pending<CallTerms>>,
}

/// A key that is complete in the store is in flight while the claim that completed it has no reply, or may be released:
/// its handler may never run.
pub(super) struct Doubt<'l> {
    /// A slot of the pool, which must not refuse the release.
    pub(super) slot: Option<OwnedSemaphorePermit>,
    /// Contains the keys to release until they are released.
    pub(super) releasing: &'l Arc<Pending>,
    pub(super) guard: Option<PendingGuard>,
    /// Contains the keys whose claims have no reply, with the times at which these were made.
    pub(super) claiming: &'l Arc<Pending<Instant>>,
    /// The keys of these claims. Dropped after [`Claims`] has added them to `releasing`, if they are to be released.
    pub(super) own: PendingGuard<Instant>,
    /// The removals from `releasing` before the delivery. If there was one meanwhile, any key may have been released.
    pub(super) removals: usize,
}

/// The replies of a step, and the keys that were not asked for because their completion is pending, with its terms.
type Claimed = (List<Reply>, Vec<(DedupKey, CallTerms)>);

impl Doubt<'_> {
    fn apply(&self, replies: &mut [(DedupKey, Reply)]) {
        for (key, reply) in replies {
            let Ok(ClaimReply::Duplicate(seen)) = &reply else { continue };
            // A row that is older than a claim was not written by it.
            let may_be_by = |claimed_at: &Instant| claimed_at.elapsed() >= seen.age;
            if self.claiming.any_beside(key, &self.own, may_be_by)
                || self.releasing.contains(key)
                || self.releasing.removals() != self.removals
            {
                *reply = Ok(ClaimReply::InFlight);
            }
        }
    }
}

impl<'l> Claims<'l> {
    pub(super) fn new(
        adapter: &'l Arc<dyn DedupAdapter>,
        pool: &'l RetryPool,
        terms: CallTerms,
        store_timeout: &'l Duration,
    ) -> Self {
        let (held, asked) = (List::new(), List::new());
        let (doubt, completing) = (None, None);
        Self { adapter, pool, held, asked, terms, store_timeout, doubt, completing }
    }

    /// Claims the identities of these events, beginning with those that are `first`. From then on, only the keys that
    /// are to be released are held. `start` begins the delivery: a verdict as the output would be moved four times.
    pub(super) fn begin<C: Send>(
        mut self,
        events: List<Event>,
        first: List<DedupKey>,
        start: impl FnOnce(&mut Self, &mut Resolution) -> Begin<C> + Send,
    ) -> impl Future<Output = Result<Begin<C>, StoreError>> + Send {
        self.asked = first;
        async move {
            let (mut replies, mut have_failed) = {
                let claimed = self.claim().await;
                // Most deliveries carry one event with one identity, which is new.
                if let ([Ok(ClaimReply::First { attempt, takeover })], [event]) =
                    (&*claimed.0, &*events)
                    && event.second_identity().is_none()
                {
                    let (held, run) = (std::mem::take(&mut self.asked), (*attempt, *takeover));
                    return Ok(start(&mut self, &mut Resolution::first(events, held, run)));
                }
                self.add(Replies::default(), claimed)
            };
            if events.iter().all(|event| event.second_identity().is_none()) {
                let mut resolution = self.conclude(events, replies, have_failed)?;
                return Ok(start(&mut self, &mut resolution));
            }
            // Boxed, because most events have one identity.
            let later_step = Box::pin(async move {
                let later = replies.later_keys(&events);
                if !later.is_empty() {
                    let are_claimed = replies.are_first();
                    (self.held, self.asked) = (replies.may_be_held(), later);
                    let claimed = self.claim().await;
                    (replies, have_failed) = self.add(replies, claimed);
                    have_failed &= are_claimed;
                }
                let mut resolution = self.conclude(events, replies, have_failed)?;
                if resolution.new.is_empty() && !self.held.is_empty() {
                    // A release that fails continues in the background.
                    let _ = self.finish().await;
                }
                Ok(start(&mut self, &mut resolution))
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
            let (adapter, bound) = (&**self.adapter, *self.store_timeout);
            (call::claim(adapter, &self.asked, &self.terms, bound).await, pending)
        }
    }

    /// Adds the replies for the keys that were asked for, and for those that are pending. Returns with them `true` if
    /// all claims have failed.
    fn add(&self, mut replies: Replies, (of_store, pending): Claimed) -> (Replies, bool) {
        let have_failed = pending.is_empty() && of_store.iter().all(Result::is_err);
        // The event of a key whose completion is pending is complete, as far as this process knows.
        let complete = |(key, terms): (DedupKey, CallTerms)| {
            let stored = terms.stored_data_for(&key).unwrap_or_default();
            let seen = Seen::new(Duration::ZERO).with_stored(Arc::new(stored));
            (key, Ok(ClaimReply::Duplicate(seen)))
        };
        let asked = self.asked.iter().cloned().zip(of_store);
        let mut added: List<_> = asked.chain(pending.into_iter().map(complete)).collect();
        if let Some(doubt) = &self.doubt {
            doubt.apply(&mut added);
        }
        replies.add(added);
        (replies, have_failed)
    }

    /// Resolves the replies. `have_failed` is `true` if no claim of the last step has a reply, and the step before has
    /// claimed all.
    fn conclude(
        &mut self,
        events: List<Event>,
        replies: Replies,
        have_failed: bool,
    ) -> Result<Resolution, StoreError> {
        let open = replies.error().filter(|error| have_failed && fails_open(&self.terms, error));
        let mut resolution = match open {
            Some(error) => Resolution::unprotected(events, error),
            None => resolve(&events, &replies, &self.terms),
        };
        self.held = std::mem::take(&mut resolution.release);
        self.asked.clear();
        match replies.into_error() {
            Some(error) if resolution.new.is_empty() => Err(error),
            _ => Ok(resolution),
        }
    }

    /// Releases the keys. The release continues in the background if it fails, or if this future is dropped.
    pub(super) async fn finish(&mut self) -> Result<(), StoreError> {
        let keys = self.releasing();
        let (adapter, bound) = (&**self.adapter, *self.store_timeout);
        call::all(call::release(adapter, &keys, &self.terms, bound).await)?;
        self.held.clear();
        Ok(())
    }

    pub(super) fn take_slot(&mut self) -> Option<OwnedSemaphorePermit> {
        self.doubt.as_mut().and_then(|doubt| doubt.slot.take())
    }

    pub(super) fn job(&self, write: Write, keys: Arc<[DedupKey]>) -> RetryJob {
        let (adapter, terms) = (Arc::clone(self.adapter), self.terms.clone());
        RetryJob { write, adapter, keys, terms, store_timeout: *self.store_timeout }
    }

    /// Returns all keys that may be held. A key that is complete at once is in flight from now on.
    fn releasing(&mut self) -> Arc<[DedupKey]> {
        let keys: Arc<[_]> = self.held.iter().chain(&self.asked).cloned().collect();
        if let Some(doubt) = &mut self.doubt {
            // Added before the guard of an earlier call is dropped, so that there is no moment without one.
            doubt.guard = Some(doubt.releasing.add(Arc::clone(&keys), ()));
        }
        keys
    }
}

impl Drop for Claims<'_> {
    fn drop(&mut self) {
        if self.held.is_empty() && self.asked.is_empty() {
            return;
        }
        let keys = self.releasing();
        let guard = self.doubt.as_mut().and_then(|doubt| doubt.guard.take());
        self.pool.repeat(self.take_slot(), self.job(Write::Release, keys), guard);
    }
}
