//! The ledger, and the claim that a delivery holds while its handler runs.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::super::call;
use super::super::claims::Claims;
use super::super::contract::{
    Begin, BeginContext, CanReplay, CanShadow, Claim, FailOpen, HandlerSuccess, Ledger, Sealed,
};
use super::super::pending::Pending;
use super::super::resolve::{States, fails_open, flatten, has_second_identity, identities};
use super::super::retry::{PendingWrites, RetryJob, RetryPool};
use super::renewal::{HeldLease, LeaseTerms, RenewalGuard, Renewals};
use crate::adapter::contract::{Abilities, CallTerms, CompleteReply, DedupAdapter};
use crate::delivery::{Delivery, Inner, Protection};
use crate::error::{ConfigError, ConfigErrorKind, Error};
use crate::key::{DedupKey, Event, Keys, List};
use crate::observe;

/// After this time, a completion is not repeated. Until then its lease is renewed too, because a store
/// may take renewals and no completions.
const COMPLETION_BOUND: Duration = Duration::from_secs(600);

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
    renewals: Arc<Renewals>,
    /// Keys that succeeded in this process and are not completed in the store yet.
    completing: Arc<Pending>,
    completions: RetryPool,
    /// Separate from `completions`, because an outage leads to many releases. A refused release blocks
    /// a key for a lease; a refused completion runs an event twice.
    releases: RetryPool,
}

/// A claim that begins, and `true` if the caller must yield.
type Concluded = Result<(Begin<LeaseClaim>, bool), Error>;

impl Lease {
    pub(crate) fn new(adapter: Arc<dyn DedupAdapter>) -> Self {
        Self {
            abilities: adapter.abilities(),
            adapter,
            renewals: Arc::default(),
            completing: Arc::default(),
            completions: RetryPool::new(MOST_COMPLETIONS),
            releases: RetryPool::new(MOST_RELEASES),
        }
    }

    #[cfg(feature = "testing")]
    pub(crate) fn adapter(&self) -> &dyn DedupAdapter {
        &*self.adapter
    }

    /// Goes on after the first step, for events with second identities.
    async fn go_on(
        self: &Arc<Self>,
        mut claims: Claims<'_>,
        events: List<Event>,
        first: States,
        context: &BeginContext,
        claimed_at: Instant,
    ) -> Concluded {
        let later = claims.claim_later(&events, &first).await;
        let concluded = self.conclude(&mut claims, events, first, later, context, claimed_at);
        if concluded.as_ref().is_ok_and(|(begin, _)| begin.runs_nothing()) {
            claims.finish().await;
        }
        concluded
    }

    /// Makes the claim of the events that run. What is to be released is left in `claims`.
    fn conclude(
        self: &Arc<Self>,
        claims: &mut Claims<'_>,
        events: List<Event>,
        mut first: States,
        mut later: States,
        context: &BeginContext,
        claimed_at: Instant,
    ) -> Concluded {
        let (terms, store_timeout) = (claims.terms.clone(), claims.store_timeout);
        if let Some(error) = fails_open(&mut first, &mut later, context) {
            claims.disarm();
            return Ok((self.unprotected(events, terms, store_timeout, &error), false));
        }
        let mut resolution = claims.resolve(events, first, later);
        if resolution.new.is_empty() {
            return resolution.without_new().map(|begin| (begin, false));
        }
        resolution.report_run();
        let (in_flight, mismatch) = (resolution.in_flight, resolution.mismatch);
        let lease = LeaseTerms::new(std::mem::take(&mut resolution.held), terms, store_timeout);
        let lease = resolution.delivery(Protection::Claimed, lease);
        let renewed = Arc::clone(&lease);
        let (renewal, yields) = self.renewals.start_renewal(&self.adapter, renewed, claimed_at);
        let delivery = Arc::clone(&lease).into();
        let claim = LeaseClaim::new(self, lease, renewal);
        Ok((Begin::First { claim, delivery, in_flight, mismatch }, yields))
    }

    /// Lets the handler run, although the store has not replied.
    fn unprotected(
        self: &Arc<Self>,
        events: List<Event>,
        terms: CallTerms,
        store_timeout: Duration,
        error: &Error,
    ) -> Begin<LeaseClaim> {
        let lease = LeaseTerms::new(identities(&events), terms, store_timeout);
        let lease = Arc::new(Inner::new(events, (1, false), Protection::Unprotected, None, lease));
        let delivery = Delivery::from(Arc::clone(&lease));
        observe::unprotected(delivery.key(), error);
        let claim = LeaseClaim::new(self, lease, None);
        Begin::First { claim, delivery, in_flight: false, mismatch: false }
    }

    /// Completes in the background. Until the job has ended, this process treats the keys as complete,
    /// and `renewal` renews their lease.
    fn spawn_complete(
        &self,
        terms: CallTerms,
        lease: Arc<HeldLease>,
        renewal: Option<RenewalGuard>,
    ) {
        let job = RetryJob {
            operation: "complete",
            adapter: Arc::clone(&self.adapter),
            keys: lease.of_ledger.keys().into(),
            terms,
            store_timeout: lease.of_ledger.store_timeout,
            bound: COMPLETION_BOUND,
            repeats: |_| true,
        };
        let stored_data_for = |key: &_| job.terms.stored_data_for(key);
        let pending = self.completing.add_with(Arc::clone(&job.keys), stored_data_for);
        // An unprotected delivery has claimed nothing.
        let is_claimed = renewal.is_some();
        self.completions.repeat(None, job, (pending, renewal), move |job| {
            let lease = Arc::clone(&lease);
            Box::pin(async move {
                let mut all = Ok(());
                // Every key has its turn: one that the store refuses delays no other.
                for keys in job.keys.chunks(call::MOST_IN_BACKGROUND) {
                    let replies =
                        call::complete(&*job.adapter, keys, &job.terms, job.store_timeout).await;
                    report(keys, &replies, is_claimed, &lease);
                    all = all.and(call::all(replies).map(drop));
                }
                all
            })
        });
    }

    /// Returns the claims of a delivery.
    fn claims(&self, terms: CallTerms, store_timeout: Duration) -> Claims<'_> {
        Claims {
            adapter: &self.adapter,
            pool: &self.releases,
            held: List::new(),
            asked: List::new(),
            terms,
            store_timeout,
            slot: None,
            releasing: None,
            completing: Some(&self.completing),
        }
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

    async fn begin(
        self: &Arc<Self>,
        keys: &Keys,
        context: &BeginContext,
    ) -> Result<Begin<Self::Claim>, Error> {
        if keys.is_empty() {
            return Ok(Begin::WithoutKey(None));
        }
        let (events, first) = flatten(keys);
        let terms = context.leased_terms(&events, self.abilities);
        let claimed_at = Instant::now();
        let mut claims = self.claims(terms, context.store_timeout);
        let first = claims.claim(first).await;
        let (begin, yields) = if has_second_identity(&events) {
            // Boxed, because most events have one identity.
            Box::pin(self.go_on(claims, events, first, context, claimed_at)).await?
        } else {
            self.conclude(&mut claims, events, first, States::default(), context, claimed_at)?
        };
        if yields {
            tokio::task::yield_now().await;
        }
        Ok(begin)
    }

    fn check(&self) -> Result<(), ConfigError> {
        let has_leases = self.abilities.leases;
        let rule = "the adapter does not support leases";
        if has_leases { Ok(()) } else { Err(ConfigError::new(ConfigErrorKind::Unsupported, rule)) }
    }

    fn stores_data(&self) -> bool {
        self.abilities.stored_data
    }

    fn pending_writes(&self) -> PendingWrites {
        PendingWrites::of(&[&self.completions, &self.releases])
    }
}

impl FailOpen for Lease {}

impl CanShadow for Lease {}

impl CanReplay for Lease {}

/// Reports claims that the store has lost, and lost leases, unless the delivery knew before.
fn report(
    keys: &[DedupKey],
    replies: &[Result<CompleteReply, Error>],
    is_claimed: bool,
    lease: &HeldLease,
) {
    let with = |completed| {
        let replies = keys.iter().zip(replies);
        let replies = replies.filter(move |(_, reply)| matches!(reply, Ok(it) if *it == completed));
        replies.map(|(key, _)| key)
    };
    if is_claimed {
        with(CompleteReply::Inserted).for_each(observe::claim_missing);
    }
    let mut lost = with(CompleteReply::LeaseLost).peekable();
    if lost.peek().is_some() && lease.mark_lease_lost() {
        lost.for_each(observe::lease_lost);
    }
}

/// The claim of a delivery under a lease.
///
/// If it is dropped, its end continues in the background: a success is completed, and anything else is
/// released.
pub struct LeaseClaim {
    ledger: Arc<Lease>,
    lease: Arc<HeldLease>,
    /// `None` once the store needs no further call.
    held: Option<Held>,
}

struct Held {
    /// `None` if the delivery runs unprotected.
    renewal: Option<RenewalGuard>,
    left: Left,
}

/// The calls that the end of a claim still needs.
enum Left {
    /// The handler has not succeeded.
    Release,
    /// The handler succeeded. Contains the terms of the completion if a response is stored.
    Completion(Option<Box<CallTerms>>),
}

impl LeaseClaim {
    fn new(ledger: &Arc<Lease>, lease: Arc<HeldLease>, renewal: Option<RenewalGuard>) -> Self {
        let held = Some(Held { renewal, left: Left::Release });
        Self { ledger: Arc::clone(ledger), lease, held }
    }
}

impl Claim for LeaseClaim {
    /// Completes the keys in one attempt, or else in the background. Returns no error, because the
    /// handler succeeded.
    #[expect(clippy::manual_async_fn, reason = "an `async fn` stores its arguments twice")]
    fn commit(
        mut self,
        success: &HandlerSuccess,
    ) -> impl Future<Output = Result<(), Error>> + Send {
        async move {
            let Some(held) = &mut self.held else { return Ok(()) };
            let lease = &self.lease.of_ledger;
            lease.mark_handler_ended();
            // Boxed, because most layers store no response.
            let with_response = success.terms(&lease.terms).map(Box::new);
            // From here on, a claim that is dropped completes in the background.
            held.left = Left::Completion(with_response.clone());
            let terms = with_response.as_deref().unwrap_or(&lease.terms);
            let is_claimed = held.renewal.is_some();
            let (adapter, keys) = (&*self.ledger.adapter, lease.keys());
            let replies = call::complete(adapter, keys, terms, lease.store_timeout).await;
            report(keys, &replies, is_claimed, &self.lease);
            if replies.iter().all(Result::is_ok) {
                drop(self.held.take());
            }
            Ok(())
        }
    }

    async fn rollback(mut self) -> Result<(), Error> {
        let Some(held) = &mut self.held else { return Ok(()) };
        // The renewal ends before the release, because a renewal after it would report a lost lease.
        drop(held.renewal.take());
        let lease = &self.lease.of_ledger;
        // A claim that is dropped from here on, or whose release fails, is released in the background.
        let adapter = &*self.ledger.adapter;
        call::all(call::release(adapter, lease.keys(), &lease.terms, lease.store_timeout).await)?;
        self.held = None;
        Ok(())
    }
}

impl Drop for LeaseClaim {
    fn drop(&mut self) {
        let Some(Held { renewal, left }) = self.held.take() else { return };
        let (ledger, lease) = (&self.ledger, &self.lease.of_ledger);
        let (keys, store_timeout) = (lease.keys(), lease.store_timeout);
        match left {
            Left::Release => {
                drop(renewal);
                // Released when it is dropped.
                ledger.claims(lease.terms.clone(), store_timeout).held = keys.into();
            }
            Left::Completion(with_response) => {
                let terms = with_response.map_or_else(|| lease.terms.clone(), |boxed| *boxed);
                ledger.spawn_complete(terms, Arc::clone(&self.lease), renewal);
            }
        }
    }
}

impl fmt::Debug for LeaseClaim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaseClaim")
            .field("keys", &self.lease.of_ledger.keys())
            .finish_non_exhaustive()
    }
}
