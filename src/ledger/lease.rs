//! Under a lease: the key becomes permanent when the handler has succeeded.
//!
//! 1. A delivery claims its keys under a lease, which is renewed while the handler runs. If the process
//!    dies, the lease lapses. The retry then runs, flagged as a takeover.
//! 2. Success is success. After the handler's success, the answer is the handler's: the completion
//!    counts whichever delivery holds the lease by then. If the store does not reply, the completion
//!    continues in the background. Until it has ended, this process treats the key as complete and
//!    renews its lease.
//! 3. The keys of a handler that fails are released at once, so that the retry runs at once.
//! 4. A claim whose reply was lost is released by its token. Once the release has returned, the claim has no
//!    effect any more, however late it arrives. A release that fails is repeated for 10 min. No slot is
//!    reserved for it before the claim: one that finds none leaves its key to the lease.
//! 5. A claim that fails because stored data is unreadable is released too: the store has executed it.
//! 6. A runtime that shuts down drops its deliveries and starts no task. So their keys are not
//!    released: the leases lapse, as if the process had died.
//!
//! # In the handler's own COMMIT
//!
//! The transactional ledger is a lease that demands a completion. After a success of the handler, one of these holds:
//!
//! 1. A [`DedupTx`](crate::DedupTx) has committed the events.
//! 2. The handler has said [`nothing_to_write`](crate::Delivery::nothing_to_write): the ledger completes the events.
//! 3. The store says that all events are complete by the token of the claim: another driver has completed them.
//!
//! Otherwise the events are released, and the answer is 500: nothing is lost. If a process dies, its lease lapses, and
//! the retry runs. Safety does not depend on the lease: of two runs of an event, the second cannot commit.

use std::fmt;
use std::future::Future;
use std::sync::Arc;

use super::call;
use super::claims::Claims;
use super::contract::{Begin, HandlerSuccess, Permanent};
use super::held::{COMMITTED, ENDED, HeldLease, NOTHING, REFUSED, STORED};
use super::renewal::{RenewalGuard, report};
use super::resolve::{Replies, resolve};
use super::retry::{RetryJob, Write};
use super::shared::Shared;
use crate::adapter::contract::{CallTerms, Seen};
use crate::error::{StoreError, StoreErrorKind};
use crate::key::List;

/// The claim of a delivery that runs under a lease.
///
/// If it is dropped, its end continues in the background: a success is completed, and anything else is
/// released.
pub(crate) struct Claim {
    shared: Arc<Shared>,
    lease: Arc<HeldLease>,
    /// `None` if the delivery runs unprotected.
    pub(super) renewal: Option<RenewalGuard>,
    left: Left,
}

/// The calls that the end of a claim still needs.
enum Left {
    Nothing,
    /// The handler has not succeeded.
    Release,
    /// The handler succeeded. Contains the terms of the completion if a response is stored.
    Completion(Option<Box<CallTerms>>),
}

impl Claim {
    pub(super) fn new(
        shared: Arc<Shared>,
        lease: Arc<HeldLease>,
        renewal: Option<RenewalGuard>,
    ) -> Self {
        Self { shared, lease, renewal, left: Left::Release }
    }

    /// Completes the keys of a success in one attempt, or else in the background. Returns no error then, because the
    /// handler succeeded. Keys that the handler's transaction has completed are only given the response.
    ///
    /// Returns when the events were seen, if another delivery has completed them.
    ///
    /// # Errors
    ///
    /// No transaction of the handler's has completed the keys, or the store does not say. The layer answers 500 or 503.
    #[expect(clippy::manual_async_fn, reason = "an `async fn` stores its arguments twice")]
    pub(crate) fn commit(
        mut self,
        success: &HandlerSuccess,
    ) -> impl Future<Output = Result<Option<Seen>, StoreError>> + Send {
        async move {
            let lease = &self.lease.of_ledger;
            lease.set(ENDED);
            let mut is_committed = lease.is(COMMITTED);
            let is_strict = self.shared.permanent == Permanent::Transactional;
            if is_strict && !is_committed && !lease.is(NOTHING) {
                // Boxed, because only handlers with another driver come here.
                is_committed = Box::pin(self.are_complete()).await?;
                if !is_committed {
                    return Box::pin(self.refuse()).await;
                }
            }
            if is_committed && (success.response.is_none() || lease.is(STORED)) {
                self.settle();
                return Ok(None);
            }
            // Boxed, because most layers store no response.
            let with_response = success.response.clone();
            let with_response =
                with_response.map(|response| Box::new(lease.terms.clone().with_response(response)));
            // From here on, a claim that is dropped completes in the background.
            self.left = Left::Completion(with_response.clone());
            let terms = with_response.as_deref().unwrap_or(&lease.terms);
            let (adapter, keys) = (&*self.shared.adapter, &lease.keys);
            let replies = call::complete(adapter, keys, terms, lease.store_timeout).await;
            report(keys, &replies, self.renewal.is_some(), &self.lease);
            if replies.iter().all(Result::is_ok) {
                self.settle();
            }
            Ok(None)
        }
    }

    fn settle(&mut self) {
        self.left = Left::Nothing;
    }

    /// Releases the keys, because the handler failed. Returns when the events were seen, if the handler failed because
    /// another delivery has completed them.
    ///
    /// # Errors
    ///
    /// The store did not reply. The error is for logs only, because the answer is the handler's failure.
    pub(crate) async fn rollback(mut self) -> Result<Option<Seen>, StoreError> {
        let seen = self.completed_by_another().await;
        self.release().finish().await?;
        Ok(seen)
    }

    /// Returns `true` if the handler's transaction has completed all keys.
    async fn are_complete(&self) -> Result<bool, StoreError> {
        let (adapter, lease) = (&*self.shared.adapter, &self.lease.of_ledger);
        let read = call::is_complete(adapter, &lease.keys, &lease.terms, lease.store_timeout);
        Ok(call::all(read.await)?.iter().all(|is_complete| *is_complete))
    }

    /// Releases the keys of a success that has completed nothing.
    async fn refuse(&mut self) -> Result<Option<Seen>, StoreError> {
        let seen = self.completed_by_another().await;
        // An error of the release is not the cause.
        let _ = self.release().finish().await;
        let context = "committing: no transaction of the handler has completed the event";
        let error = || StoreError::new(StoreErrorKind::Transaction, context);
        seen.map(Some).ok_or_else(error)
    }

    /// If a completion was refused, claims the keys again before they are released, by the same token. A claim that
    /// still holds its key is repeated, and counts no attempt.
    async fn completed_by_another(&self) -> Option<Seen> {
        let (adapter, lease) = (&*self.shared.adapter, &self.lease.of_ledger);
        // A completion after the commit is refused by the events' own completion.
        if !lease.is(REFUSED) || lease.is(COMMITTED) {
            return None;
        }
        let claimed = call::claim(adapter, &lease.keys, &lease.terms, lease.store_timeout).await;
        let mut replies = Replies::default();
        replies.add(lease.keys.iter().cloned().zip(claimed));
        let mut resolution = resolve(self.lease.events(), &replies, &lease.terms);
        match resolution.new.is_empty().then(|| resolution.without_new::<()>()) {
            Some(Begin::Duplicate(seen)) => Some(seen),
            _ => None,
        }
    }

    /// Returns the claims that hold the keys. The renewal ends before, because a renewal after the release would
    /// report a lost lease.
    fn release(&mut self) -> Claims<'_> {
        self.lease.of_ledger.set(ENDED);
        (self.renewal, self.left) = (None, Left::Nothing);
        let lease = &self.lease.of_ledger;
        let (terms, keys) = (lease.terms.clone(), lease.keys.clone());
        Claims::new(&self.shared, terms, &lease.store_timeout, keys, List::new())
    }

    /// Completes in the background. Until the job has ended, this process treats the keys as complete,
    /// and renews their lease.
    fn complete_in_background(&mut self, terms: CallTerms) {
        let (lease, renewal) = (Arc::clone(&self.lease), self.renewal.take());
        let keys: Arc<[_]> = (*lease.of_ledger.keys).into();
        let pending = self.shared.completing.add(Arc::clone(&keys), terms.clone());
        let adapter = Arc::clone(&self.shared.adapter);
        let store_timeout = lease.of_ledger.store_timeout;
        let write = Write::Complete { lease, is_claimed: renewal.is_some() };
        let job = RetryJob { write, adapter, keys, terms, store_timeout };
        self.shared.completions.repeat(None, job, (pending, renewal));
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        match std::mem::replace(&mut self.left, Left::Nothing) {
            Left::Nothing => {}
            Left::Release => drop(self.release()),
            Left::Completion(with_response) => {
                let terms = &self.lease.of_ledger.terms;
                let terms = with_response.map_or_else(|| terms.clone(), |boxed| *boxed);
                self.complete_in_background(terms);
            }
        }
    }
}

impl fmt::Debug for Claim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Claim").field("keys", &self.lease.of_ledger.keys).finish_non_exhaustive()
    }
}
