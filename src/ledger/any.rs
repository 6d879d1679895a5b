//! [`AnyLedger`]: begins the deliveries of one ledger.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::task::TaskTracker;

use super::call;
use super::claims::Claims;
use super::contract::{Begin, BeginContext, Ledger, Permanent};
use super::held::LeaseTerms;
use super::lease::Claim;
use super::renewal::RenewalGuard;
use super::resolve::{Resolution, flatten};
use super::shared::Shared;
use super::times::Times;
use crate::adapter::contract::{DedupAdapter, Permanence};
use crate::delivery::{Delivery, Verdict};
use crate::error::{ConfigError, ConfigErrorKind, StoreError, StoreErrorKind, check};
use crate::key::{Event, Keys, List};

/// A ledger of each kind. Cloning makes another handle to the same ledger.
#[derive(Clone)]
pub(crate) struct AnyLedger(Arc<Shared>);

impl AnyLedger {
    /// Makes the ledger of this kind over a store.
    pub(crate) fn of<L: Ledger>(adapter: impl DedupAdapter) -> Self {
        Self(Arc::new(Shared::new(L::PERMANENT, Arc::new(adapter))))
    }

    #[cfg(feature = "testing")]
    pub(crate) fn adapter(&self) -> &dyn DedupAdapter {
        &*self.0.adapter
    }

    /// Begins a delivery of these keys. Without a key, it returns [`Begin::WithoutKey`], and asks no store.
    ///
    /// If the future is dropped, the keys that it may have claimed are released in the background.
    ///
    /// # Errors
    ///
    /// The store did not reply, and the context does not fail open. The keys that the call may have
    /// claimed are released in the background.
    #[expect(clippy::manual_async_fn, reason = "an `async fn` stores its arguments twice")]
    pub(crate) fn begin(
        &self,
        keys: &Keys,
        context: &BeginContext,
    ) -> impl Future<Output = Result<Begin<Claim>, StoreError>> + Send {
        async move {
            if keys.is_empty() {
                return Ok(Begin::WithoutKey);
            }
            let shared = &self.0;
            let on_arrival = shared.permanent == Permanent::OnArrival;
            if on_arrival && keys.events().iter().any(|event| event.second_identity().is_some()) {
                let context = "claiming on arrival an event with a second identity";
                return Err(StoreError::new(StoreErrorKind::Config, context));
            }
            let (events, first) = flatten(keys);
            let claimed_at = Instant::now();
            let mut terms = context.terms(&events, shared.abilities);
            if on_arrival {
                terms.permanence = Permanence::OnClaim;
            }
            let claims = Claims::new(shared, terms, &context.store_timeout, List::new(), first);
            let start = move |claims: &mut Claims<'_>, resolution: &mut Resolution| {
                let is_claimed = !resolution.is_unprotected;
                if on_arrival {
                    if !is_claimed {
                        claims.claim_in_background(&resolution.held);
                    }
                    return resolution.begin(|_| (), |_| None);
                }
                let (terms, timeout) = (claims.terms.clone(), *claims.store_timeout);
                let of_ledger = |held| LeaseTerms::new(held, terms, timeout, &shared.adapter);
                resolution.begin(of_ledger, |lease| {
                    let renewals = &shared.renewals;
                    let start = || renewals.start(&shared.adapter, Arc::clone(&lease), claimed_at);
                    let renewal = is_claimed.then(start).flatten();
                    Some(Claim::new(Arc::clone(shared), lease, renewal))
                })
            };
            let begun = claims.begin(events, start).await?;
            let is = |of: fn(&RenewalGuard) -> bool| match &begun {
                Begin::First { claim: Some(claim), .. } => claim.renewal.as_ref().is_some_and(of),
                _ => false,
            };
            // Another delivery may have run the events. Dropped, the claim is released.
            if is(|renewal| renewal.has_lapsed) {
                let context = "claiming keys, whose lease was over before the reply";
                return Err(StoreError::new(StoreErrorKind::Timeout, context));
            }
            if !is(|renewal| renewal.must_yield) {
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

    /// Completes the identities of a request that the layer answers itself: no event of its may run later. One call for
    /// each, because a completion counts whoever holds the lease. The rows name no other key, so no event is complete
    /// with them. On arrival, no request has an identity of its content.
    ///
    /// # Errors
    ///
    /// The store did not reply.
    pub(crate) async fn record(&self, keys: &Keys, times: &Times) -> Result<(), StoreError> {
        let Shared { permanent, adapter, abilities, .. } = &*self.0;
        if *permanent == Permanent::OnArrival {
            return Ok(());
        }
        let mut context = BeginContext::of(times, Duration::ZERO);
        let itself = |event: &Event| (event.key().clone(), event.key().sha256());
        if abilities.stored_data {
            context.terms = context.terms.with_payloads(keys.events().iter().map(itself));
        }
        let (terms, (_, identities)) = (context.terms(keys.events(), *abilities), flatten(keys));
        let completed = call::complete(&**adapter, &identities, &terms, times.store_timeout).await;
        call::all(completed).map(drop)
    }

    /// Makes the delivery of all events of a request that the handler runs under every verdict. `claim` is the delivery
    /// of the claim, if there is one.
    pub(crate) fn unenforced(
        &self,
        events: &[Event],
        verdict: Verdict,
        claim: Option<&Delivery>,
    ) -> Delivery {
        let events = events.into();
        if self.0.permanent == Permanent::OnArrival {
            return Delivery::unenforced(events, verdict, claim, ());
        }
        let held = LeaseTerms::nothing(&self.0.adapter);
        Delivery::unenforced(events, verdict, claim, held)
    }

    /// # Errors
    ///
    /// An adapter that lacks an ability which the ledger needs, or keys or times that it does not take.
    pub(crate) fn check(
        &self,
        times: &Times,
        has_second_identity: bool,
    ) -> Result<(), ConfigError> {
        let Shared { permanent, abilities, .. } = &*self.0;
        let needs = |is_met: bool, rule| {
            if is_met { Ok(()) } else { Err(ConfigError::new(ConfigErrorKind::Unsupported, rule)) }
        };
        if *permanent == Permanent::OnArrival {
            let rule = "one identity of an event on arrival, and not a second one";
            return needs(!has_second_identity, rule);
        }
        needs(abilities.leases, "the adapter does not support leases")?;
        // A row that expires before its lease is over tells no takeover, and counts no attempts.
        let Times { retention, lease, .. } = times;
        check(retention >= lease, "retention", "at least the lease", retention)?;
        let completes = *permanent == Permanent::Lease || abilities.completion;
        needs(completes, "the adapter completes no events in a handler's transaction")
    }

    /// Returns `true` if the adapter stores payload digests and responses.
    pub(crate) fn stores_data(&self) -> bool {
        self.0.abilities.stored_data
    }

    /// Returns the writes that continue in the background.
    #[must_use]
    pub(crate) fn pending_writes(&self) -> &TaskTracker {
        &self.0.tasks
    }
}

impl fmt::Debug for AnyLedger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("AnyLedger").field(&self.0.permanent).finish()
    }
}
