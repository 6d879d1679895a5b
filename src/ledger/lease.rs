//! [`Lease`]: the key becomes permanent when the handler has succeeded.
//!
//! 1. A delivery claims its keys under a lease, which is renewed while the handler runs. A process
//!    that dies leaves a lease that lapses: the retry runs, flagged as a takeover.
//! 2. Success is success. Once the handler has succeeded, its answer is the answer: the completion
//!    is recorded whoever holds the lease by then, and if the store does not answer, in the
//!    background. Meanwhile this process answers the key as complete, and keeps its lease.
//! 3. A handler that failed has its keys released at once, so that the retry runs at once.
//! 4. A claim whose answer was lost is released by its token. The claim may still be on its way to
//!    the store, so a store that knows nothing of it is asked again for some seconds; one that does
//!    not answer, until the lease would have lapsed.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use http::Extensions;
use tokio::time::Instant;

use super::call::{store_call, undone};
use super::fold::{Answer, Folded, fold, granted, identities, plan};
use super::pending::Pending;
use super::recall::{Recaller, Recalls, Replays, recall};
use super::renewal::{HeldLease, RenewalGuard, Renewals};
use super::retry::{Background, RetryJob, RetryResult};
use super::{Begin, BeginContext, Claim, FailOpen, HandlerSuccess, Ledger, Remainder};
use crate::adapter::{
    CallTerms, Claimed, Completed, LeaseAdapter, Recall, Released, Seen, StoredResponse,
};
use crate::delivery::Delivery;
use crate::error::Error;
use crate::key::{DedupKey, Keys, List};
use crate::observe;

/// For how long a completion is tried again in the background. While it is, the lease is renewed
/// too, so that a store which takes renewals but no completions sees no second handler.
const COMPLETION_BOUND: Duration = Duration::from_secs(600);

/// How many of each may be under way in the background.
const MOST_COMPLETIONS: usize = 16_384;
const MOST_RELEASES: usize = 4_096;

/// For how long a store that answers is asked for a claim that it knows nothing of, at least. One
/// that arrives later still blocks its key for a lease, and loses nothing.
const RELEASE_PATIENCE: Duration = Duration::from_secs(5);

/// Claims under a lease, completes after success: no event is lost, and none runs twice while no
/// process and no store dies.
///
/// Cloning makes another handle to the same ledger.
pub struct Lease<A>(Arc<Inner<A>>);

struct Inner<A> {
    adapter: Arc<A>,
    renewals: Arc<Renewals>,
    /// What has succeeded in this process, and is not recorded yet.
    completing: Arc<Pending>,
    /// Apart from the releases, which an outage makes many of: losing one blocks a key for a
    /// lease, but losing a completion runs an event twice.
    completions: Background,
    releases: Background,
}

impl<A> Lease<A> {
    /// A ledger over this store.
    #[must_use]
    pub fn new(adapter: A) -> Self {
        Self(Arc::new(Inner {
            adapter: Arc::new(adapter),
            renewals: Arc::default(),
            completing: Arc::default(),
            completions: Background::new(MOST_COMPLETIONS),
            releases: Background::new(MOST_RELEASES),
        }))
    }

    /// The store.
    #[must_use]
    pub fn adapter(&self) -> &A {
        &self.0.adapter
    }
}

impl<A> Clone for Lease<A> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<A: fmt::Debug> fmt::Debug for Lease<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease").field("adapter", &self.0.adapter).finish_non_exhaustive()
    }
}

impl<A: LeaseAdapter> Ledger for Lease<A> {
    type Claim = LeaseClaim<A>;

    async fn begin(
        &self,
        keys: &Keys,
        context: &BeginContext,
    ) -> Result<Begin<Self::Claim>, Error> {
        let inner = &self.0;
        let (events, flat) = plan(keys);
        // What has succeeded here, and is not recorded yet, is complete for this process.
        let rest = inner.completing.rest(&flat);
        let asked = rest.as_deref().unwrap_or(&flat);
        let asked_at = Instant::now();
        let mut unheld = Unheld { inner, keys: Cow::Borrowed(asked), context };
        let claimed =
            if asked.is_empty() { Ok(Vec::new()) } else { inner.claim(asked, context).await };
        let claimed = match claimed {
            Ok(claimed) => claimed,
            Err(error) if context.fail_open && rest.is_none() => {
                unheld.disarm();
                observe::unprotected(keys.first(), &error);
                let delivery = Delivery::unprotected(events.into());
                let lease = HeldLease::new(flat, context.terms(), context.store_timeout, delivery);
                let claim = LeaseClaim::new(inner, Arc::new(lease), None);
                return Ok(Begin::first(claim, Remainder::default()));
            }
            Err(error) => {
                if !error.is_unknown() {
                    unheld.disarm();
                }
                return Err(error);
            }
        };
        let mut answers = answers(&flat, asked, claimed);
        let response = if context.recaller.is_some() {
            unheld.keys = Cow::Owned(granted(&flat, &answers));
            let here = |key: &DedupKey| inner.completing.kept(key);
            // Boxed, for most layers do without.
            let recalled = Box::pin(recall(context, &events, &flat, &mut answers, here));
            recalled.await?
        } else {
            None
        };
        unheld.disarm();
        let folded = fold(events, &flat, &answers);
        let (begin, yields) = inner.begin_with(folded, response, asked_at, context);
        if yields {
            tokio::task::yield_now().await;
        }
        Ok(begin)
    }

    fn background(&self) -> usize {
        self.0.completions.count() + self.0.releases.count()
    }

    async fn drain(&self) {
        self.0.completions.drain().await;
        self.0.releases.drain().await;
    }
}

impl<A: LeaseAdapter> FailOpen for Lease<A> {}

impl<A: LeaseAdapter + Recall> Recalls for Lease<A> {
    fn recaller(&self) -> Recaller {
        Recaller::new(Arc::clone(&self.0.adapter))
    }
}

impl<A: LeaseAdapter + Recall> Replays for Lease<A> {}

impl<A: LeaseAdapter> Inner<A> {
    async fn claim(
        &self,
        keys: &[DedupKey],
        context: &BeginContext,
    ) -> Result<Vec<Claimed>, Error> {
        let terms = context.terms();
        let call = Box::pin(async { self.adapter.claim(keys, &terms).await });
        store_call("claim", context.store_timeout, keys.len(), call).await
    }

    /// Answers whether to yield as well.
    fn begin_with(
        self: &Arc<Self>,
        mut folded: Folded,
        response: Option<Arc<StoredResponse>>,
        asked_at: Instant,
        context: &BeginContext,
    ) -> (Begin<LeaseClaim<A>>, bool) {
        let (terms, store_timeout) = (context.terms(), context.store_timeout);
        let (give_back, keep) =
            (std::mem::take(&mut folded.give_back), std::mem::take(&mut folded.keep));
        if !give_back.is_empty() {
            self.release_behind(&give_back, terms.clone(), store_timeout);
        }
        if !keep.is_empty() {
            self.complete_behind(&keep, terms.clone(), store_timeout, None, None);
        }
        if folded.new.is_empty() {
            return (folded.without_any_new(response), false);
        }
        let (keys, others) = (folded.held(), folded.others());
        let delivery = Delivery::of(folded.new, folded.attempt, folded.takeover);
        if folded.takeover
            && let Some(key) = delivery.key()
        {
            observe::takeover(key, folded.attempt);
        }
        let lease = Arc::new(HeldLease::new(keys, terms, store_timeout, delivery));
        let (kept, yields) = self.renewals.keep(&self.adapter, Arc::clone(&lease), asked_at);
        (Begin::first(LeaseClaim::new(self, lease, kept), others), yields)
    }

    /// One attempt. Answers whether all leases were held to the end.
    async fn complete(
        &self,
        keys: &[DedupKey],
        terms: &CallTerms,
        store_timeout: Duration,
    ) -> Result<Vec<Completed>, Error> {
        let call = Box::pin(async { self.adapter.complete(keys, terms).await });
        store_call("complete", store_timeout, keys.len(), call).await
    }

    /// Completes in the background; until it has, or gives up, this process answers the keys as
    /// complete, and `kept` keeps their lease. `delivery` is told if it was lost.
    fn complete_behind(
        self: &Arc<Self>,
        keys: &[DedupKey],
        terms: CallTerms,
        store_timeout: Duration,
        kept: Option<RenewalGuard>,
        delivery: Option<Delivery>,
    ) {
        let keys: Arc<[DedupKey]> = keys.into();
        let completing =
            self.completing.add_with(Arc::clone(&keys), |key| terms.stored_data_for(key));
        let until_then = (completing, kept);
        let (inner, first) = (Arc::clone(self), keys.first().cloned());
        let attempt = move || {
            let (inner, keys) = (Arc::clone(&inner), Arc::clone(&keys));
            let (delivery, terms) = (delivery.clone(), terms.clone());
            async move {
                match inner.complete(&keys, &terms, store_timeout).await {
                    Ok(answers) => {
                        if let Some(delivery) = &delivery {
                            tell_lost(&keys, &answers, delivery);
                        }
                        RetryResult::Done
                    }
                    Err(_) => RetryResult::Again,
                }
            }
        };
        let work = RetryJob {
            operation: "complete",
            key: first,
            bound: COMPLETION_BOUND,
            patience: COMPLETION_BOUND,
        };
        self.completions.repeat(work, attempt, until_then);
    }

    /// Completes, in the background, what a handler that failed has marked as done, and keeps its
    /// lease meanwhile.
    fn complete_done_behind(self: &Arc<Self>, done: &[DedupKey], of: &HeldLease) {
        if done.is_empty() {
            return;
        }
        let (terms, delivery) = (of.terms.clone(), of.delivery.clone());
        let keys = done.to_vec().into();
        let lease = HeldLease::new(keys, terms.clone(), of.store_timeout, delivery.clone());
        lease.settle();
        // No handler follows that could block anything.
        let (kept, _) = self.renewals.keep(&self.adapter, Arc::new(lease), Instant::now());
        self.complete_behind(done, terms, of.store_timeout, kept, Some(delivery));
    }

    async fn release(
        &self,
        keys: &[DedupKey],
        terms: &CallTerms,
        store_timeout: Duration,
    ) -> Result<Vec<Released>, Error> {
        let call = Box::pin(async { self.adapter.release(keys, terms).await });
        store_call("release", store_timeout, keys.len(), call).await
    }

    /// Releases in the background, until the store says that all are released or the lease would
    /// have lapsed anyway.
    fn release_behind(
        self: &Arc<Self>,
        keys: &[DedupKey],
        terms: CallTerms,
        store_timeout: Duration,
    ) {
        let (inner, first) = (Arc::clone(self), keys.first().cloned());
        let keys: Arc<[DedupKey]> = keys.into();
        let patience = RELEASE_PATIENCE.max(store_timeout.saturating_mul(2));
        let work = RetryJob { operation: "release", key: first, bound: terms.lease(), patience };
        let attempt = move || {
            let (inner, keys) = (Arc::clone(&inner), Arc::clone(&keys));
            let terms = terms.clone();
            async move { undone(inner.release(&keys, &terms, store_timeout).await) }
        };
        self.releases.repeat(work, attempt, ());
    }
}

/// What the store has granted, or may have granted, to a delivery that does not hold it yet:
/// released if the delivery ends before it does.
struct Unheld<'b, A: LeaseAdapter> {
    inner: &'b Arc<Inner<A>>,
    keys: Cow<'b, [DedupKey]>,
    context: &'b BeginContext,
}

impl<A: LeaseAdapter> Unheld<'_, A> {
    /// The store has granted nothing, or somebody else holds it now.
    fn disarm(mut self) {
        self.keys = Cow::default();
    }
}

impl<A: LeaseAdapter> Drop for Unheld<'_, A> {
    fn drop(&mut self) {
        if !self.keys.is_empty() {
            let context = self.context;
            self.inner.release_behind(&self.keys, context.terms(), context.store_timeout);
        }
    }
}

/// Counts the leases that were lost, unless the handler was told before.
fn tell_lost(keys: &[DedupKey], answers: &[Completed], delivery: &Delivery) {
    let lost = keys.iter().zip(answers).filter(|(_, answer)| **answer == Completed::LeaseLost);
    let mut lost = lost.map(|(key, _)| key).peekable();
    if lost.peek().is_some() && delivery.mark_lease_lost() {
        lost.for_each(observe::lease_lost);
    }
}

/// What the store answers for all keys: for those that it was not asked for, "complete".
fn answers(flat: &[DedupKey], asked: &[DedupKey], claimed: Vec<Claimed>) -> List<Answer> {
    if let ([_], [claimed]) = (flat, &*claimed) {
        return List::one((*claimed).into());
    }
    let mut claimed = asked.iter().zip(claimed);
    let mut next = claimed.next();
    let answers = flat.iter().map(|key| match next {
        // Both lists are in the order of `flat`.
        Some((asked, answer)) if asked == key => {
            next = claimed.next();
            answer.into()
        }
        _ => Answer::Duplicate(Seen::new(Duration::ZERO)),
    });
    answers.collect::<Vec<_>>().into()
}

/// A delivery under a lease.
///
/// Dropped at any time, what is left to do is done in the background: a success is completed, and
/// of a handler that did not succeed, what it has marked as done is completed and the rest released.
pub struct LeaseClaim<A: LeaseAdapter> {
    inner: Arc<Inner<A>>,
    delivery: Delivery,
    /// Taken once the store has done what is left to do.
    held: Option<Held>,
}

struct Held {
    lease: Arc<HeldLease>,
    /// None if the delivery runs unprotected.
    kept: Option<RenewalGuard>,
    left: Left,
}

/// What is left to do when a claim ends.
enum Left {
    /// The handler has not ended: what it has marked as done decides.
    Undecided,
    /// It has succeeded. With the terms of its response, if that is stored.
    Completion(Option<Box<CallTerms>>),
    /// It has failed.
    Release(Vec<DedupKey>),
}

impl<A: LeaseAdapter> LeaseClaim<A> {
    fn new(inner: &Arc<Inner<A>>, lease: Arc<HeldLease>, kept: Option<RenewalGuard>) -> Self {
        let (inner, delivery) = (Arc::clone(inner), lease.delivery.clone());
        Self { inner, delivery, held: Some(Held { lease, kept, left: Left::Undecided }) }
    }
}

/// The keys that a handler has marked as done, with all identities of their events, and the others.
fn by_done(delivery: &Delivery) -> (Vec<DedupKey>, Vec<DedupKey>) {
    let (done, rest): (Vec<_>, Vec<_>) =
        delivery.events().iter().partition(|event| delivery.is_done(event.key()));
    (identities(done), identities(rest))
}

impl<A: LeaseAdapter> Claim for LeaseClaim<A> {
    fn delivery(&self) -> &Delivery {
        &self.delivery
    }

    fn attach(&self, _: &mut Extensions) {}

    /// One attempt, then the background. Never an error: what the handler did, it did.
    #[expect(clippy::manual_async_fn, reason = "an `async fn` has room for its arguments twice")]
    fn commit(
        mut self,
        outcome: &HandlerSuccess,
    ) -> impl Future<Output = Result<(), Error>> + Send {
        async move {
            let Some(held) = &mut self.held else { return Ok(()) };
            let lease = Arc::clone(&held.lease);
            lease.settle();
            // Boxed, for most layers keep no response.
            let with_response = match outcome.completes(&lease.terms) {
                Cow::Borrowed(_) => None,
                Cow::Owned(terms) => Some(Box::new(terms)),
            };
            // From here on, a claim that is dropped completes in the background.
            held.left = Left::Completion(with_response.clone());
            let terms = with_response.as_deref().unwrap_or(&lease.terms);
            let (keys, store_timeout) = (lease.keys(), lease.store_timeout);
            if let Ok(answers) = self.inner.complete(keys, terms, store_timeout).await {
                self.held = None;
                tell_lost(keys, &answers, &self.delivery);
            }
            Ok(())
        }
    }

    async fn rollback(mut self) -> Result<(), Error> {
        let Some(held) = &mut self.held else { return Ok(()) };
        // Before the release, or a renewal could cross it and look like a lost lease.
        drop(held.kept.take());
        let lease = Arc::clone(&held.lease);
        let HeldLease { terms, store_timeout, delivery, .. } = &*lease;
        let (done, rest) = by_done(delivery);
        let mut outcome = Ok(());
        if !done.is_empty() {
            match self.inner.complete(&done, terms, *store_timeout).await {
                Ok(answers) => tell_lost(&done, &answers, delivery),
                Err(error) => {
                    self.inner.complete_done_behind(&done, &lease);
                    outcome = Err(error);
                }
            }
        }
        if rest.is_empty() {
            self.held = None;
            return outcome;
        }
        // From here on, a claim that is dropped releases these in the background.
        if let Some(held) = &mut self.held {
            held.left = Left::Release(rest.clone());
        }
        match self.inner.release(&rest, terms, *store_timeout).await {
            // The claim of an unprotected delivery may be on its way still.
            Ok(_) if !delivery.is_unprotected() => self.held = None,
            released => outcome = outcome.and(released.map(drop)),
        }
        outcome
    }
}

impl<A: LeaseAdapter> Drop for LeaseClaim<A> {
    fn drop(&mut self) {
        let Some(Held { lease, kept, left }) = self.held.take() else { return };
        let (inner, store_timeout) = (&self.inner, lease.store_timeout);
        let rest = match left {
            Left::Completion(with_response) => {
                let terms = with_response.map_or_else(|| lease.terms.clone(), |boxed| *boxed);
                let told = Some(self.delivery.clone());
                inner.complete_behind(lease.keys(), terms, store_timeout, kept, told);
                return;
            }
            Left::Release(rest) => rest,
            Left::Undecided => {
                let (done, rest) = by_done(&lease.delivery);
                inner.complete_done_behind(&done, &lease);
                rest
            }
        };
        drop(kept);
        if !rest.is_empty() {
            inner.release_behind(&rest, lease.terms.clone(), store_timeout);
        }
    }
}

impl<A: LeaseAdapter> fmt::Debug for LeaseClaim<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaseClaim").field("delivery", &self.delivery).finish_non_exhaustive()
    }
}
