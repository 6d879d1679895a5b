//! [`Claims`]: claims the keys of a delivery, and releases in the background what it may hold.

use std::future::Future;
use std::mem::take;
use std::sync::Arc;
use std::time::Duration;

use super::arrival::Doubt;
use super::call::{self, Calls};
use super::contract::Permanent;
use super::resolve::{Answered, Reply, Resolution, error, first_identity, is_first, resolve};
use super::retry::{RetryJob, Write};
use super::shared::Shared;
use crate::adapter::contract::{ClaimReply, Seen};
use crate::error::StoreError;
use crate::key::{DedupKey, Event, List};

/// The claims of one delivery. If it is dropped, all keys that it may hold are released in the background.
///
/// A call of unknown outcome may hold its key, and so may a call whose future was dropped.
pub(super) struct Claims<'l> {
    shared: &'l Shared,
    pub(super) calls: Calls,
    /// The events to claim.
    events: List<Event>,
    /// The keys that may be held, without those that the last call claims.
    pub(super) held: List<DedupKey>,
    /// The keys that the last call claims.
    asked: List<DedupKey>,
    /// Boxed, because most ledgers have none.
    doubt: Option<Box<Doubt>>,
}

impl<'l> Claims<'l> {
    /// Makes the claims of these events, for a delivery that holds these keys.
    pub(super) fn new(
        shared: &'l Shared,
        calls: Calls,
        events: List<Event>,
        held: List<DedupKey>,
    ) -> Self {
        Self { shared, calls, events, held, asked: List::new(), doubt: None }
    }

    /// Claims the identities of the events. From then on, only the keys that are to be released are held.
    ///
    /// # Errors
    ///
    /// No event runs, and a claim has failed.
    #[expect(clippy::manual_async_fn, reason = "an `async fn` stores its arguments twice")]
    pub(super) fn resolve(
        &mut self,
    ) -> impl Future<Output = Result<Resolution, StoreError>> + Send {
        async move {
            self.asked = self.events.iter().map(first_identity).cloned().collect();
            let first = self.claim().await;
            // Most deliveries carry one event with one identity, which is new.
            if let ([Ok(ClaimReply::First { attempt, takeover })], [event]) =
                (&*first, &*self.events)
                && event.second_identity().is_none()
            {
                let (attempt, takeover) = (*attempt, *takeover);
                let (new, held) = (take(&mut self.events), take(&mut self.asked));
                return Ok(Resolution { new, held, attempt, takeover, ..Default::default() });
            }
            let mut replies = first.into_iter();
            // A missing reply claims nothing.
            let mut reply = || replies.next().unwrap_or(Ok(ClaimReply::InFlight));
            let events = take(&mut self.events).into_iter();
            let mut answered: Vec<_> =
                events.map(|event| Answered::first(event, reply())).collect();
            // Boxed, as is the release, because most events have one identity.
            if answered.iter().any(Answered::leads_to_key) {
                Box::pin(self.claim_keys(&mut answered)).await;
            }
            let resolution = self.conclude(answered)?;
            if resolution.new.is_empty() && !self.held.is_empty() {
                // Whoever runs nothing holds nothing. A release that fails continues in the background.
                let _ = Box::pin(self.finish()).await;
            }
            Ok(resolution)
        }
    }

    /// Claims the keys after their second identities.
    async fn claim_keys(&mut self, answered: &mut [Answered]) {
        self.held = answered.iter().flat_map(Answered::may_be_held).cloned().collect();
        let later = answered.iter().filter(|it| it.leads_to_key());
        self.asked = later.map(|it| it.event.key().clone()).collect();
        let mut replies = self.claim().await.into_iter();
        for later in answered.iter_mut().filter(|it| it.leads_to_key()) {
            later.key = replies.next();
        }
    }

    /// Claims the keys that are asked for, each by a call of its own. A key that is complete for this process is not
    /// claimed, nor is a key on arrival that could not be released.
    #[expect(clippy::manual_async_fn, reason = "an `async fn` stores its arguments twice")]
    fn claim(&mut self) -> impl Future<Output = List<Reply>> + Send {
        async move {
            let pending = self.shared.completing.split(&mut self.asked);
            if self.shared.permanent == Permanent::OnArrival {
                match Doubt::begin(self.shared, &self.asked, self.calls.terms.token()) {
                    Ok(doubt) => self.doubt = Some(Box::new(doubt)),
                    Err(error) => return self.asked.iter().map(|_| Err(error.clone())).collect(),
                }
            }
            let mut replies = self.calls.claim(&self.asked).await;
            if let Some(doubt) = &self.doubt {
                doubt.apply(self.shared, &self.asked, &mut replies);
            }
            // Such an event is complete, as far as this process knows.
            for (at, key, terms) in pending {
                let stored = terms.stored_data_for(&key).unwrap_or_default();
                let seen = Seen::new(Duration::ZERO).with_stored(Arc::new(stored));
                replies.insert(at, Ok(ClaimReply::Duplicate(seen)));
            }
            if replies.iter().flatten().any(|reply| !is_first(reply)) {
                // Of another delivery. None of these events runs unprotected.
                self.calls.terms.note_duplicate();
            }
            replies
        }
    }

    /// Resolves the replies.
    fn conclude(&mut self, answered: Vec<Answered>) -> Result<Resolution, StoreError> {
        let Calls { terms, meters, .. } = &self.calls;
        let mut resolution = resolve(&answered, terms, meters);
        (self.held, self.asked) = (take(&mut resolution.release), List::new());
        let failed = error(&answered).filter(|_| resolution.new.is_empty());
        let Some(error) = failed else { return Ok(resolution) };
        if !self.calls.fails_open(&error) {
            return Err(error);
        }
        self.held.clear();
        let events = answered.into_iter().map(|answered| answered.event).collect();
        Ok(Resolution::unprotected(events, &error, &self.calls.meters))
    }

    /// Releases the keys. The release continues in the background if it fails, or if this future is dropped.
    pub(super) async fn finish(&mut self) -> Result<(), StoreError> {
        call::all(self.calls.release(&self.held).await)?;
        self.held.clear();
        Ok(())
    }

    /// Writes these keys in the background.
    pub(super) fn repeat(&mut self, write: Write, keys: List<DedupKey>) {
        let mut doubt = self.doubt.take();
        let slot = doubt.as_mut().and_then(|doubt| doubt.slot.take());
        let job = RetryJob { write, calls: self.calls.clone(), keys };
        self.shared.background.repeat(slot, job, doubt);
    }
}

impl Drop for Claims<'_> {
    fn drop(&mut self) {
        if self.held.is_empty() && self.asked.is_empty() {
            return;
        }
        let mut keys = take(&mut self.held);
        keys.append(&mut self.asked);
        if let Some(doubt) = &mut self.doubt {
            doubt.release(self.shared, &keys);
        }
        self.repeat(Write::Release, keys);
    }
}
