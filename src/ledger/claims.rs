//! [`Claims`]: claims the keys of a delivery, and releases in the background what it may hold.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::OwnedSemaphorePermit;

use super::arrival::Doubt;
use super::call;
use super::contract::{Begin, Permanent, fails_open};
use super::resolve::{Replies, Reply, Resolution, resolve};
use super::retry::{RetryJob, Write};
use super::shared::Shared;
use crate::adapter::contract::{CallTerms, ClaimReply, Seen};
use crate::error::StoreError;
use crate::key::{DedupKey, Event, List};

/// The claims of one delivery. If it is dropped, all keys that it may hold are released in the background.
///
/// A call of unknown outcome may hold its key, and so may a call whose future was dropped.
pub(super) struct Claims<'l> {
    shared: &'l Shared,
    /// The keys that may be held, without those that the last call claims.
    held: List<DedupKey>,
    /// The keys that the last call claims.
    asked: List<DedupKey>,
    pub(super) terms: CallTerms,
    pub(super) store_timeout: &'l Duration,
    /// Boxed, because most ledgers have none.
    doubt: Option<Box<Doubt>>,
}

/// The replies of a step, and the keys that were not asked for because their completion is pending, with its terms.
type Claimed = (List<Reply>, Vec<(DedupKey, CallTerms)>);

impl<'l> Claims<'l> {
    /// Makes the claims of a delivery that holds these keys, and asks for those.
    pub(super) fn new(
        shared: &'l Shared,
        terms: CallTerms,
        store_timeout: &'l Duration,
        held: List<DedupKey>,
        asked: List<DedupKey>,
    ) -> Self {
        Self { shared, held, asked, terms, store_timeout, doubt: None }
    }

    /// Claims the identities of these events. From then on, only the keys that are to be released are held. `start`
    /// begins the delivery: a verdict as the output would be moved four times.
    #[expect(clippy::manual_async_fn, reason = "an `async fn` stores its arguments twice")]
    pub(super) fn begin<C: Send>(
        mut self,
        events: List<Event>,
        start: impl FnOnce(&mut Self, &mut Resolution) -> Begin<C> + Send,
    ) -> impl Future<Output = Result<Begin<C>, StoreError>> + Send {
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
    /// complete for this process. On arrival, a key that could not be released is not claimed.
    #[expect(clippy::manual_async_fn, reason = "an `async fn` stores its arguments twice")]
    fn claim(&mut self) -> impl Future<Output = Claimed> + Send {
        async move {
            let pending = self.shared.completing.split(&mut self.asked);
            if self.shared.permanent == Permanent::OnArrival {
                match Doubt::begin(self.shared, &self.asked) {
                    Ok(doubt) => self.doubt = Some(Box::new(doubt)),
                    Err(error) => {
                        let refused = self.asked.iter().map(|_| Err(error.clone()));
                        return (refused.collect(), pending);
                    }
                }
            }
            let (adapter, bound) = (&*self.shared.adapter, *self.store_timeout);
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
            doubt.apply(self.shared, &mut added);
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
        let mut resolution = resolve(&events, &replies, &self.terms);
        self.held = std::mem::take(&mut resolution.release);
        self.asked.clear();
        match replies.into_error() {
            Some(error) if have_failed && fails_open(&self.terms, &error) => {
                self.held.clear();
                Ok(Resolution::unprotected(events, &error))
            }
            Some(error) if resolution.new.is_empty() => Err(error),
            _ => Ok(resolution),
        }
    }

    /// Releases the keys. The release continues in the background if it fails, or if this future is dropped.
    pub(super) async fn finish(&mut self) -> Result<(), StoreError> {
        let keys = self.releasing();
        let (adapter, bound) = (&*self.shared.adapter, *self.store_timeout);
        call::all(call::release(adapter, &keys, &self.terms, bound).await)?;
        self.held.clear();
        Ok(())
    }

    /// Claims these keys as soon as the store replies, for a delivery that runs before.
    pub(super) fn claim_in_background(&mut self, keys: &[DedupKey]) {
        let slot = self.slot();
        self.shared.releases.repeat(slot, self.job(Write::Claim, keys.into()), ());
    }

    fn slot(&mut self) -> Option<OwnedSemaphorePermit> {
        self.doubt.as_mut()?.slot.take()
    }

    fn job(&self, write: Write, keys: Arc<[DedupKey]>) -> RetryJob {
        let (adapter, terms) = (Arc::clone(&self.shared.adapter), self.terms.clone());
        RetryJob { write, adapter, keys, terms, store_timeout: *self.store_timeout }
    }

    /// Returns all keys that may be held. A key that is complete at once is in flight from now on.
    fn releasing(&mut self) -> Arc<[DedupKey]> {
        let keys: Arc<[_]> = self.held.iter().chain(&self.asked).cloned().collect();
        if let Some(doubt) = &mut self.doubt {
            doubt.release(self.shared, &keys);
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
        let (slot, doubt) = (self.slot(), self.doubt.take());
        self.shared.releases.repeat(slot, self.job(Write::Release, keys), doubt);
    }
}
