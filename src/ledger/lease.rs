//! [`Lease`]: the key becomes permanent when the handler has succeeded.
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

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::call;
use super::claims::Claims;
use super::contract::{
    Begin, BeginContext, CanReplay, Claim, FailOpen, HandlerSuccess, Ledger, Sealed,
};
use super::held::{HeldLease, LeaseTerms};
use super::pending::Pending;
use super::renewal::{RenewalGuard, Renewals, report};
use super::resolve::{Resolution, flatten};
use super::retry::{PendingWrites, RetryJob, RetryPool, Write};
use crate::adapter::contract::{Abilities, CallTerms, DedupAdapter};
use crate::delivery::{Delivery, Verdict};
use crate::error::{ConfigError, ConfigErrorKind, StoreError, StoreErrorKind, check};
use crate::key::{Event, Keys};

/// Background writes of each kind at once.
const MOST_COMPLETIONS: usize = 16_384;
const MOST_RELEASES: usize = 4_096;

/// Claims keys under a lease, and completes them after success: no event is lost, and one runs
/// twice only if a process or the store dies in between.
///
/// [`DedupLayer::new`](crate::DedupLayer::new) selects it.
pub struct Lease {
    adapter: Arc<dyn DedupAdapter>,
    abilities: Abilities,
    /// Whether a success needs a completion in the handler's transaction.
    is_strict: bool,
    renewals: Arc<Renewals>,
    /// Keys that succeeded in this process and are not completed in the store yet.
    completing: Arc<Pending<CallTerms>>,
    completions: RetryPool,
    /// Separate from `completions`, because an outage leads to many releases. A refused release blocks
    /// a key for a lease; a refused completion runs an event twice.
    releases: RetryPool,
}

impl Lease {
    pub(crate) fn new(adapter: Arc<dyn DedupAdapter>) -> Self {
        Self {
            abilities: adapter.abilities(),
            is_strict: false,
            adapter,
            renewals: Arc::default(),
            completing: Arc::default(),
            completions: RetryPool::new(MOST_COMPLETIONS),
            releases: RetryPool::new(MOST_RELEASES),
        }
    }

    /// Demands a completion in the handler's transaction: see [`Transactional`](super::Transactional).
    pub(super) fn strict(adapter: Arc<dyn DedupAdapter>) -> Self {
        Self { is_strict: true, ..Self::new(adapter) }
    }

    pub(super) fn abilities(&self) -> Abilities {
        self.abilities
    }

    #[cfg(feature = "testing")]
    pub(crate) fn adapter(&self) -> &dyn DedupAdapter {
        &*self.adapter
    }

    /// Completes in the background. Until the job has ended, this process treats the keys as complete,
    /// and `renewal` renews their lease.
    fn spawn_complete(
        &self,
        terms: CallTerms,
        lease: Arc<HeldLease>,
        renewal: Option<RenewalGuard>,
    ) {
        let keys: Arc<[_]> = (*lease.of_ledger.keys).into();
        let pending = self.completing.add(Arc::clone(&keys), terms.clone());
        let (adapter, store_timeout) = (Arc::clone(&self.adapter), lease.of_ledger.store_timeout);
        let write = Write::Complete { lease, is_claimed: renewal.is_some() };
        let job = RetryJob { write, adapter, keys, terms, store_timeout };
        self.completions.repeat(None, job, (pending, renewal));
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease").finish_non_exhaustive()
    }
}

impl Sealed for Lease {}

impl Ledger for Lease {
    type Claim = LeaseClaim;

    #[expect(clippy::manual_async_fn, reason = "an `async fn` stores its arguments twice")]
    fn begin(
        self: &Arc<Self>,
        keys: &Keys,
        context: &BeginContext,
    ) -> impl Future<Output = Result<Begin<Self::Claim>, StoreError>> + Send {
        async move {
            if keys.is_empty() {
                return Ok(Begin::WithoutKey);
            }
            let (events, first) = flatten(keys);
            let claimed_at = Instant::now();
            let terms = context.terms(&events, self.abilities);
            let mut claims =
                Claims::new(&self.adapter, &self.releases, terms, &context.store_timeout);
            claims.completing = Some(&self.completing);
            let start = move |claims: &mut Claims<'_>, resolution: &mut Resolution| {
                let is_claimed = !resolution.is_unprotected;
                let (terms, timeout) = (claims.terms.clone(), *claims.store_timeout);
                let of_ledger = |held| LeaseTerms::new(held, terms, timeout, &self.adapter);
                resolution.begin(of_ledger, |lease| {
                    let start =
                        || self.renewals.start(&self.adapter, Arc::clone(&lease), claimed_at);
                    let renewal = is_claimed.then(start).flatten();
                    LeaseClaim { ledger: Arc::clone(self), lease, renewal, left: Left::Release }
                })
            };
            let begun = claims.begin(events, first, start).await?;
            let is = |of: fn(&RenewalGuard) -> bool| {
                let renewal = |claim: &LeaseClaim| claim.renewal.as_ref().is_some_and(of);
                matches!(&begun, Begin::First { claim, .. } if renewal(claim))
            };
            // Another delivery may have run the events. Dropped, the claim is released.
            if is(RenewalGuard::has_lapsed) {
                let context = "claiming keys, whose lease was over before the reply";
                return Err(StoreError::new(StoreErrorKind::Timeout, context));
            }
            if !is(RenewalGuard::must_yield) {
                return Ok(begun);
            }
            // Boxed, because few claims wake the sweeper.
            let yielded = Box::pin(async move {
                tokio::task::yield_now().await;
                begun
            });
            Ok(yielded.await)
        }
    }

    /// In one call: a completion counts whoever holds the lease.
    async fn record(
        self: &Arc<Self>,
        keys: &Keys,
        context: &BeginContext,
    ) -> Result<(), StoreError> {
        let (_, identities) = flatten(keys);
        let terms = context.terms(keys.events(), self.abilities);
        let bound = context.store_timeout;
        call::all(call::complete(&*self.adapter, &identities, &terms, bound).await).map(drop)
    }

    fn unenforced(&self, events: &[Event], verdict: Verdict, claim: Option<&Delivery>) -> Delivery {
        let held = LeaseTerms::nothing(&self.adapter);
        Delivery::unenforced(events.into(), verdict, claim, held)
    }

    fn check(&self, _: bool, lease: Duration, retention: Duration) -> Result<(), ConfigError> {
        if !self.abilities.leases {
            let rule = "the adapter does not support leases";
            return Err(ConfigError::new(ConfigErrorKind::Unsupported, rule));
        }
        // A row that expires before its lease is over tells no takeover, and counts no attempts.
        check(retention >= lease, "retention", "at least the lease", &retention)
    }

    fn stores_data(&self) -> bool {
        self.abilities.stored_data
    }

    fn pending_writes(&self) -> PendingWrites {
        PendingWrites::of(&[&self.completions, &self.releases])
    }
}

impl FailOpen for Lease {}

impl CanReplay for Lease {}

/// The claim of a delivery under a lease.
///
/// If it is dropped, its end continues in the background: a success is completed, and anything else is
/// released.
pub struct LeaseClaim {
    ledger: Arc<Lease>,
    lease: Arc<HeldLease>,
    /// `None` if the delivery runs unprotected.
    renewal: Option<RenewalGuard>,
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

impl LeaseClaim {
    /// Returns the claims that hold the keys. The renewal ends before, because a renewal after the release would
    /// report a lost lease.
    fn release(&mut self) -> Claims<'_> {
        self.lease.of_ledger.mark_handler_ended();
        (self.renewal, self.left) = (None, Left::Nothing);
        let (ledger, lease) = (&self.ledger, &self.lease.of_ledger);
        let terms = lease.terms.clone();
        let mut claims =
            Claims::new(&ledger.adapter, &ledger.releases, terms, &lease.store_timeout);
        claims.held = lease.keys.clone();
        claims
    }
}

impl LeaseClaim {
    /// Returns `true` if the handler's transaction has completed all keys.
    async fn are_complete(&self) -> Result<bool, StoreError> {
        let (adapter, lease) = (&*self.ledger.adapter, &self.lease.of_ledger);
        let read = call::is_complete(adapter, &lease.keys, &lease.terms, lease.store_timeout);
        Ok(call::all(read.await)?.iter().all(|is_complete| *is_complete))
    }

    /// Releases the keys of a success that has completed nothing.
    async fn refuse(&mut self) -> Result<(), StoreError> {
        // An error of the release is not the cause.
        let _ = self.release().finish().await;
        let context = "committing: no transaction of the handler has completed the event";
        Err(StoreError::new(StoreErrorKind::Transaction, context))
    }
}

impl Claim for LeaseClaim {
    /// Completes the keys in one attempt, or else in the background. Returns no error then, because the
    /// handler succeeded. Keys that the handler's transaction has completed are only given the response.
    #[expect(clippy::manual_async_fn, reason = "an `async fn` stores its arguments twice")]
    fn commit(
        mut self,
        success: &HandlerSuccess,
    ) -> impl Future<Output = Result<(), StoreError>> + Send {
        async move {
            let lease = &self.lease.of_ledger;
            lease.mark_handler_ended();
            let mut is_committed = lease.writes.are_committed();
            if self.ledger.is_strict && !is_committed && !lease.writes.are_none() {
                // Boxed, because only handlers with another driver come here.
                is_committed = Box::pin(self.are_complete()).await?;
                if !is_committed {
                    return Box::pin(self.refuse()).await;
                }
            }
            if is_committed && (success.response.is_none() || lease.writes.have_stored_response()) {
                let left = &mut self.left;
                *left = Left::Nothing;
                return Ok(());
            }
            // Boxed, because most layers store no response.
            let with_response = success.terms(&lease.terms).map(Box::new);
            // From here on, a claim that is dropped completes in the background.
            self.left = Left::Completion(with_response.clone());
            let terms = with_response.as_deref().unwrap_or(&lease.terms);
            let (adapter, keys) = (&*self.ledger.adapter, &lease.keys);
            let replies = call::complete(adapter, keys, terms, lease.store_timeout).await;
            report(keys, &replies, self.renewal.is_some(), &self.lease);
            let left = &mut self.left;
            if replies.iter().all(Result::is_ok) {
                *left = Left::Nothing;
            }
            Ok(())
        }
    }

    async fn rollback(mut self) -> Result<(), StoreError> {
        self.release().finish().await
    }
}

impl Drop for LeaseClaim {
    fn drop(&mut self) {
        match std::mem::replace(&mut self.left, Left::Nothing) {
            Left::Nothing => {}
            Left::Release => drop(self.release()),
            Left::Completion(with_response) => {
                let terms = &self.lease.of_ledger.terms;
                let terms = with_response.map_or_else(|| terms.clone(), |boxed| *boxed);
                let renewal = self.renewal.take();
                self.ledger.spawn_complete(terms, Arc::clone(&self.lease), renewal);
            }
        }
    }
}

impl fmt::Debug for LeaseClaim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaseClaim")
            .field("keys", &self.lease.of_ledger.keys)
            .finish_non_exhaustive()
    }
}
