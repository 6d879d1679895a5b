//! Under a lease: the key becomes permanent when the handler has succeeded.
//!
//! 1. A delivery claims its keys under a lease, which is renewed while the handler runs. If the
//!    process dies, the lease lapses. The retry then runs, flagged as a takeover.
//! 2. After a success, the sender gets the handler's answer. The completion takes effect even if
//!    another delivery holds the lease by then. If the store does not reply, the completion
//!    continues in the background. Until it has ended, this process treats the key as complete and
//!    renews its lease.
//! 3. The keys of a handler that fails are released at once, so that the retry runs at once.
//! 4. A claim whose reply was lost is released by its token. Once the release has returned, the
//!    claim has no effect any more, however late it arrives. A release that fails is repeated for
//!    10 min. No slot is reserved for it before the claim. A release that finds no slot leaves its
//!    key to the lease.
//! 5. A claim that fails because stored data is unreadable is released too: the store has executed
//!    it.
//! 6. A runtime that shuts down drops its deliveries and starts no task. So their keys are not
//!    released: the leases lapse, as if the process had died.
//!
//! # In the handler's own COMMIT
//!
//! The transactional ledger is a lease that requires a completion. After a success of the handler,
//! one of these holds:
//!
//! 1. A [`DedupTx`](crate::DedupTx) has committed the events.
//! 2. The handler has called [`nothing_to_write`](crate::Delivery::nothing_to_write): the ledger
//!    completes the events.
//! 3. The store says that all events are complete by the token of the claim: another driver has
//!    completed them.
//!
//! Otherwise the events are released, and the answer is 500: nothing is lost. If a process dies,
//! its lease lapses, and the retry runs. Safety does not depend on the lease: of two runs of an
//! event, the second cannot commit.
//!
//! Under [`DedupLayer::new`](crate::DedupLayer::new), the same applies to a handler that begins
//! such a transaction, or takes a statement for one. No other handler has to commit.

use std::future::Future;
use std::sync::Arc;

use tokio::time::Instant;

use super::background::{RetryJob, Write};
use super::call::Calls;
use super::contract::HandlerSuccess;
use super::held::{Effect, Held, HeldLease, report, with_response};
use super::hold::{AnyLedger, Hold};
use super::renewal::RenewalGuard;
use super::resolve::claim_all;
use crate::adapter::KeyedTerms;
use crate::adapter::contract::Seen;
use crate::error::StoreError;
use crate::key::List;

/// How a claim has ended.
pub(crate) enum Settled {
    /// The claim ended as its handler did: the events are complete, or released.
    Done,
    /// Another delivery has completed the events, which were seen then. This one has had no effect.
    CompletedElsewhere(Seen),
    /// The handler succeeded, and no transaction of it has completed the events. They are released.
    Uncommitted,
    /// The handler succeeded, and the store has failed: it has not said whether a transaction has
    /// completed the events. The release continues in the background.
    Unconfirmed(StoreError),
    /// The handler has not succeeded, and the store has failed. The release continues in the
    /// background.
    NotReleased(StoreError),
}

/// The claim of a delivery that runs under a lease.
///
/// If it is dropped, its end continues in the background: a success is completed, and anything else
/// is released.
pub(crate) struct Claim {
    ledger: Arc<AnyLedger>,
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
    /// The handler succeeded. Contains the keys of the completion if a response is stored.
    Completion(Option<Box<List<KeyedTerms>>>),
}

impl Left {
    /// Returns the keys of the completion.
    fn keys<'h>(&'h self, held: &'h Held) -> &'h List<KeyedTerms> {
        if let Self::Completion(Some(with_response)) = self { with_response } else { &held.keys }
    }
}

impl Claim {
    /// Starts the renewals of a lease, which counts from `since`.
    pub(super) fn start(ledger: &Arc<AnyLedger>, lease: Arc<HeldLease>, since: Instant) -> Self {
        let is_claimed = !lease.is_unprotected();
        let renewal =
            is_claimed.then(|| ledger.renewals.start(Arc::clone(&lease), since)).flatten();
        Self { ledger: Arc::clone(ledger), lease, renewal, left: Left::Release }
    }

    /// Releases the keys, unless the handler succeeded. Completes the keys of a success in one
    /// attempt, or else in the background. Returns no error then, because the handler succeeded.
    /// Keys that the handler's transaction has completed are only given the response.
    ///
    /// After [`Settled::Uncommitted`], the layer answers 500, and after [`Settled::Unconfirmed`]
    /// 503.
    #[expect(clippy::manual_async_fn, reason = "an `async fn` stores its arguments twice")]
    pub(crate) fn settle(
        mut self,
        success: Option<HandlerSuccess>,
    ) -> impl Future<Output = Settled> + Send {
        async move {
            self.lease.of_ledger.note(|it| it.has_ended = true);
            let Some(HandlerSuccess { response }) = success else {
                // Boxed, because most deliveries succeed and their future stays small.
                return Box::pin(self.rollback()).await;
            };
            let held = &self.lease.of_ledger;
            let effect = held.state().effect;
            let mut is_committed = effect == Effect::Committed;
            let owes_commit = match effect {
                Effect::Unsaid => held.state().demands_commit,
                Effect::Begun => true,
                Effect::NothingToWrite | Effect::Committed => false,
            };
            if owes_commit {
                // Boxed, because only handlers with another driver come here.
                is_committed = match Box::pin(held.are_complete()).await {
                    Ok(are_complete) => are_complete,
                    Err(error) => return Settled::Unconfirmed(error),
                };
                if !is_committed {
                    return match Box::pin(self.rollback()).await {
                        // An error of the release is not the cause.
                        Settled::Done | Settled::NotReleased(_) => Settled::Uncommitted,
                        settled => settled,
                    };
                }
            }
            if is_committed && !held.awaits_response() {
                self.end();
                return Settled::Done;
            }
            // From here on, a claim that is dropped completes in the background.
            let with_response = response.map(|response| with_response(&held.keys, &response));
            // Boxed, because most layers store no response.
            self.left = Left::Completion(with_response.map(Box::new));
            let replies = held.calls.complete(self.left.keys(held)).await;
            report(&held.keys, &replies, &self.lease);
            if replies.iter().all(Result::is_ok) {
                self.end();
            }
            Settled::Done
        }
    }

    fn end(&mut self) {
        self.left = Left::Nothing;
    }

    /// Releases the keys, because the handler has completed nothing.
    async fn rollback(mut self) -> Settled {
        if self.awaits_response_in_vain().await {
            // The rows are complete. Their lease ends, so that duplicates do not wait for a
            // response.
            self.left = Left::Completion(None);
            let held = &self.lease.of_ledger;
            if held.calls.complete(&held.keys).await.iter().all(Result::is_ok) {
                self.end();
            }
            return Settled::Done;
        }
        let seen = self.completed_by_another().await;
        let released = self.hold().release().await;
        match (seen, released) {
            (Some(seen), _) => Settled::CompletedElsewhere(seen),
            (None, Ok(())) => Settled::Done,
            (None, Err(error)) => Settled::NotReleased(error),
        }
    }

    /// Returns `true` if the handler has completed its keys before it failed, and their rows wait
    /// for a response.
    async fn awaits_response_in_vain(&self) -> bool {
        let held = &self.lease.of_ledger;
        held.awaits_response()
            && match held.state().effect {
                Effect::Committed => true,
                Effect::Begun => held.are_complete().await.is_ok_and(|are_complete| are_complete),
                Effect::Unsaid | Effect::NothingToWrite => false,
            }
    }

    /// If a completion was refused, claims the keys again before they are released, by the same
    /// token. A claim that still holds its key is repeated, and counts no attempt.
    async fn completed_by_another(&self) -> Option<Seen> {
        let held = &self.lease.of_ledger;
        // A completion after the commit is refused by the events' own completion.
        if !held.state().is_refused || held.state().effect == Effect::Committed {
            return None;
        }
        let calls = Calls { fails_open: false, ..held.calls.clone() };
        let mut again = Hold::new(&self.ledger, calls, List::new());
        let resolution = claim_all(&mut again, self.lease.events().into()).await;
        // This claim holds them.
        again.keep();
        let mut resolution = resolution.ok().filter(|resolution| !resolution.mismatch)?;
        resolution.all_complete()
    }

    /// Gives the keys to a hold, which releases them. The renewal ends before, because a renewal
    /// after the release would report a lost lease.
    fn hold(&mut self) -> Hold<'_> {
        let held = &self.lease.of_ledger;
        held.note(|it| it.has_ended = true);
        (self.renewal, self.left) = (None, Left::Nothing);
        Hold::new(&self.ledger, held.calls.clone(), held.keys.clone())
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let held = &self.lease.of_ledger;
        match std::mem::replace(&mut self.left, Left::Nothing) {
            Left::Nothing => {}
            Left::Release => drop(self.hold()),
            left @ Left::Completion(_) => {
                let (keys, calls) = (left.keys(held).clone(), held.calls.clone());
                let data = |it: &KeyedTerms| it.terms.stored_data().unwrap_or_default();
                let known = keys.iter().map(|it| (it.key.clone(), data(it)));
                // Until the job has ended, this process treats the keys as complete, and renews
                // their lease.
                let pending = self.ledger.completing.add(known, calls.terms.token);
                let (lease, renewal) = (Arc::clone(&self.lease), self.renewal.take());
                let job = RetryJob { write: Write::Complete(lease), calls, keys };
                self.ledger.background.repeat(None, job, (pending, renewal));
            }
        }
    }
}
