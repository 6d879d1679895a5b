//! [`Claims`]: claims the keys of a delivery, and releases in the background what it may hold.

use std::future::Future;
use std::mem::take;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use super::arrival::Doubt;
use super::call::{self, Calls};
use super::contract::Permanent;
use super::resolve::{Answered, Claimed, Resolution, error, first_identity, is_first, resolve};
use super::retry::{RetryJob, Write};
use super::shared::Shared;
use crate::adapter::contract::{ClaimReply, Seen};
use crate::adapter::{DuplicateNote, KeyedTerms};
use crate::error::{StoreError, StoreErrorKind};
use crate::key::{DedupKey, Event, List};

/// The claims of one delivery. If it is dropped, all keys that it may hold are released in the background.
///
/// A call of unknown outcome may hold its key, and so may a call whose future was dropped.
pub(super) struct Claims<'l> {
    shared: &'l Shared,
    pub(super) calls: Calls,
    /// The events to claim.
    events: List<Event>,
    /// The keys that may be held.
    pub(super) held: List<KeyedTerms>,
    /// Set by a store, or by a reply, that tells of another delivery: none of the events runs unprotected then. `None`
    /// if the calls do not fail open.
    note: Option<DuplicateNote>,
    /// Boxed, because most ledgers have none.
    doubt: Option<Box<Doubt>>,
}

impl<'l> Claims<'l> {
    /// Makes the claims of these events, for a delivery that holds these keys.
    pub(super) fn new(
        shared: &'l Shared,
        calls: Calls,
        events: List<Event>,
        held: List<KeyedTerms>,
    ) -> Self {
        let note = calls.fails_open.then(DuplicateNote::default);
        Self { shared, calls, events, held, note, doubt: None }
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
            let asked = self.events.iter().map(|it| self.asking(it, first_identity(it))).collect();
            let first = self.claim(asked).await;
            let rest = match self.after_first(first) {
                Step::Resolved(resolution) => return resolution,
                Step::Later(rest) => rest,
            };
            rest.await
        }
    }

    /// Apart from the future, which would store what this decides by.
    fn after_first(&mut self, first: List<Claimed>) -> Step<'_> {
        // Most deliveries carry one event with one identity, which is new.
        if let ([(_, Ok(ClaimReply::First { attempt, takeover }))], [event]) =
            (&*first, &*self.events)
            && event.second_identity().is_none()
        {
            let (attempt, takeover) = (*attempt, *takeover);
            let (new, held) = (take(&mut self.events), first.into_iter().map(|(it, _)| it));
            let held = held.collect();
            return Step::Resolved(Ok(Resolution {
                new,
                held,
                attempt,
                takeover,
                ..Default::default()
            }));
        }
        let first = take(&mut self.events).into_iter().zip(first);
        let answered: Vec<_> = first.map(|(event, it)| Answered::first(event, it)).collect();
        // Boxed, as is the release, because most events have one identity.
        if answered.iter().any(Answered::leads_to_key) {
            return Step::Later(Box::pin(self.resolve_keys(answered)));
        }
        match self.conclude(answered) {
            Ok(resolution) if self.must_release(&resolution) => {
                Step::Later(Box::pin(self.release_before(resolution)))
            }
            resolution => Step::Resolved(resolution),
        }
    }

    /// Claims the keys after their second identities.
    async fn resolve_keys(
        &mut self,
        mut answered: Vec<Answered>,
    ) -> Result<Resolution, StoreError> {
        self.held = answered.iter().flat_map(Answered::may_be_held).cloned().collect();
        let later = answered.iter().filter(|it| it.leads_to_key());
        let asked = later.map(|it| self.asking(&it.event, it.event.key())).collect();
        let mut replies = self.claim(asked).await.into_iter();
        for later in answered.iter_mut().filter(|it| it.leads_to_key()) {
            later.key = replies.next();
        }
        let resolution = self.conclude(answered)?;
        if self.must_release(&resolution) {
            self.release_before(resolution).await
        } else {
            Ok(resolution)
        }
    }

    /// Whoever runs nothing holds nothing.
    fn must_release(&self, resolution: &Resolution) -> bool {
        resolution.new.is_empty() && !self.held.is_empty()
    }

    /// Releases the keys. A release that fails continues in the background.
    async fn release_before(&mut self, resolution: Resolution) -> Result<Resolution, StoreError> {
        let _ = self.finish().await;
        Ok(resolution)
    }

    fn asking(&self, event: &Event, identity: &DedupKey) -> KeyedTerms {
        let mut asked = self.calls.keyed(event, identity);
        asked.terms.note = self.note.clone();
        asked
    }

    /// Claims these keys, each by a call of its own. A key that is complete for this process is not claimed, nor is a key
    /// on arrival that could not be released.
    fn claim(&mut self, mut asked: List<KeyedTerms>) -> impl Future<Output = List<Claimed>> + Send {
        let pending = self.shared.completing.split(&mut asked);
        let before = self.held.len();
        self.held.append(&mut asked);
        async move {
            if self.shared.permanent == Permanent::OnArrival {
                let asked = &self.held[before..];
                match Doubt::begin(self.shared, asked, self.calls.terms.token) {
                    Ok(doubt) => self.doubt = Some(Box::new(doubt)),
                    Err(error) => {
                        let asked = self.held.drain(before..);
                        return asked.map(|it| (it, Err(error.clone()))).collect();
                    }
                }
            }
            let mut replies = self.calls.claim(&self.held[before..]).await;
            if let Some(doubt) = &self.doubt {
                doubt.apply(self.shared, &self.held[before..], &mut replies);
            }
            let mut claimed: List<_> = self.held.drain(before..).zip(replies).collect();
            // Such an event is complete, as far as this process knows.
            for (at, it, stored) in pending {
                let seen = Seen::new(Duration::ZERO).with_stored(Arc::new(stored));
                claimed.insert(at, (it, Ok(ClaimReply::Duplicate(seen))));
            }
            if let Some(note) = &self.note
                && claimed.iter().flat_map(|(_, reply)| reply).any(|reply| !is_first(reply))
            {
                let _ = note.set(());
            }
            claimed
        }
    }

    /// Resolves the replies.
    fn conclude(&mut self, answered: Vec<Answered>) -> Result<Resolution, StoreError> {
        let Calls { terms, meters, .. } = &self.calls;
        let events = || answered.iter().map(|it| it.event.clone()).collect();
        let failed = error(&answered).map(|error| (error, events()));
        let mut resolution = resolve(answered, terms.fetch, meters);
        self.held = take(&mut resolution.release);
        let Some((error, events)) = failed.filter(|_| resolution.new.is_empty()) else {
            return Ok(resolution);
        };
        if !self.fails_open(&error) {
            return Err(error);
        }
        self.held.clear();
        Ok(Resolution::unprotected(events, &error, &self.calls))
    }

    /// Returns `true` if the handler runs unprotected after this error of a claim.
    ///
    /// [`StoreErrorKind::Corrupt`] never fails open: the unreadable data may belong to a duplicate. Nor does
    /// an error after a reply that tells of another delivery, or after the store has found a duplicate, when only the
    /// read of its response failed.
    fn fails_open(&self, error: &StoreError) -> bool {
        let is_unknown = self.note.as_ref().is_some_and(|note| note.get().is_none());
        is_unknown && error.kind() != StoreErrorKind::Corrupt
    }

    /// Releases the keys. The release continues in the background if it fails, or if this future is dropped.
    pub(super) async fn finish(&mut self) -> Result<(), StoreError> {
        call::all(self.calls.release(&self.held).await)?;
        self.held.clear();
        Ok(())
    }

    /// Writes these keys in the background.
    pub(super) fn repeat(&mut self, write: Write, keys: List<KeyedTerms>) {
        let mut doubt = self.doubt.take();
        let slot = doubt.as_mut().and_then(|doubt| doubt.slot.take());
        let job = RetryJob { write, calls: self.calls.clone(), keys };
        self.shared.background.repeat(slot, job, doubt);
    }
}

/// What follows the first replies.
#[expect(clippy::large_enum_variant, reason = "it is matched at once")]
enum Step<'c> {
    Resolved(Result<Resolution, StoreError>),
    Later(Pin<Box<dyn Future<Output = Result<Resolution, StoreError>> + Send + 'c>>),
}

impl Drop for Claims<'_> {
    fn drop(&mut self) {
        if self.held.is_empty() {
            return;
        }
        let keys = take(&mut self.held);
        if let Some(doubt) = &mut self.doubt {
            doubt.release(self.shared, &keys);
        }
        self.repeat(Write::Release, keys);
    }
}
