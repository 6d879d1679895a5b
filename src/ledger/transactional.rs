//! [`Transactional`]: the key becomes permanent in the handler's own COMMIT.
//!
//! It is a lease that demands a completion. After a success of the handler, one of these holds:
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
use std::time::Duration;

use super::contract::{Begin, BeginContext, CanReplay, Ledger, Sealed};
use super::lease::{Lease, LeaseClaim};
use super::retry::PendingWrites;
use crate::adapter::contract::DedupAdapter;
use crate::delivery::{Delivery, Verdict};
use crate::error::{ConfigError, ConfigErrorKind, StoreError};
use crate::key::{Event, Keys};

/// Completes a key in the transaction that has its handler's writes: each effect in it exists exactly once.
///
/// [`DedupLayer::transactional`](crate::DedupLayer::transactional) selects it.
pub struct Transactional(Arc<Lease>);

impl Transactional {
    pub(crate) fn new(adapter: Arc<dyn DedupAdapter>) -> Self {
        Self(Arc::new(Lease::strict(adapter)))
    }
}

impl fmt::Debug for Transactional {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transactional").finish_non_exhaustive()
    }
}

impl Sealed for Transactional {}

impl Ledger for Transactional {
    type Claim = LeaseClaim;

    fn begin(
        self: &Arc<Self>,
        keys: &Keys,
        context: &BeginContext,
    ) -> impl Future<Output = Result<Begin<Self::Claim>, StoreError>> + Send {
        self.0.begin(keys, context)
    }

    fn record(
        self: &Arc<Self>,
        keys: &Keys,
        context: &BeginContext,
    ) -> impl Future<Output = Result<(), StoreError>> + Send {
        self.0.record(keys, context)
    }

    fn unenforced(&self, events: &[Event], verdict: Verdict, claim: Option<&Delivery>) -> Delivery {
        self.0.unenforced(events, verdict, claim)
    }

    fn check(
        &self,
        has_second_identity: bool,
        lease: Duration,
        retention: Duration,
    ) -> Result<(), ConfigError> {
        self.0.check(has_second_identity, lease, retention)?;
        if self.0.abilities().completion {
            return Ok(());
        }
        let rule = "the adapter completes no events in a handler's transaction";
        Err(ConfigError::new(ConfigErrorKind::Unsupported, rule))
    }

    fn stores_data(&self) -> bool {
        self.0.stores_data()
    }

    fn pending_writes(&self) -> PendingWrites {
        self.0.pending_writes()
    }
}

impl CanReplay for Transactional {}
