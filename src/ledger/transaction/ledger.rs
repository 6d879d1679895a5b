//! The ledger, and the claim that a delivery holds while its handler runs.

use std::fmt;
use std::sync::Arc;

use http::Extensions;
use sqlx::Database;

use super::super::call::bounded;
use super::super::contract::{
    Begin, BeginContext, CanReplay, Claim, HandlerSuccess, Ledger, Sealed,
};
use super::super::pending::{Pending, PendingGuard};
use super::super::resolve::{Replies, flatten, identities, resolve};
use super::super::retry::PendingWrites;
use super::lend::{LendSlot, State, TxHandle, open};
use crate::adapter::TransactionAdapter;
use crate::adapter::contract::{Abilities, CallTerms, ClaimReply};
use crate::adapter::transaction::OpenTransaction;
use crate::error::{Error, ErrorKind};
use crate::key::{DedupKey, Keys, List};

/// Those of every SQL adapter.
const ABILITIES: Abilities =
    Abilities { leases: true, inspection: true, stored_data: true, expires_keys: false };

/// Commits a key together with its handler's writes: every effect in that database exists exactly
/// once.
///
/// [`DedupLayer::transactional`](crate::DedupLayer::transactional) selects it.
pub struct Transactional<DB: Database> {
    adapter: Arc<dyn TransactionAdapter<Database = DB>>,
    /// The keys of this process's running deliveries.
    running: Arc<Pending>,
}

impl<DB: Database> Transactional<DB> {
    pub(crate) fn new(adapter: Arc<dyn TransactionAdapter<Database = DB>>) -> Self {
        Self { adapter, running: Arc::default() }
    }

    /// Lends `transaction`, or the one that its handler opens.
    fn claim(
        &self,
        keys: List<DedupKey>,
        terms: CallTerms,
        context: &BeginContext,
        transaction: Option<OpenTransaction<DB>>,
    ) -> TransactionClaim<DB> {
        let running = self.running.add((*keys).into(), ());
        let slot = LendSlot::new(&self.adapter, keys, terms, context.store_timeout, transaction);
        TransactionClaim { slot, _running: running }
    }
}

impl<DB: Database> fmt::Debug for Transactional<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transactional").finish_non_exhaustive()
    }
}

impl<DB: Database> Sealed for Transactional<DB> {}

impl<DB: Database> Ledger for Transactional<DB> {
    type Claim = TransactionClaim<DB>;

    const CAN_SHADOW: bool = false;

    async fn begin(
        self: &Arc<Self>,
        keys: &Keys,
        context: &BeginContext,
    ) -> Result<Begin<Self::Claim>, Error> {
        if keys.is_empty() {
            let terms = context.terms(&[], ABILITIES);
            let claim = self.claim(List::new(), terms, context, None);
            return Ok(Begin::WithoutKey(Some(claim)));
        }
        let (events, _) = flatten(keys);
        let mut asked = identities(&events);
        let pending = self.running.split(&mut asked);
        if asked.is_empty() {
            return Ok(Begin::InFlight);
        }
        let (adapter, store_timeout) = (&*self.adapter, context.store_timeout);
        let terms = context.terms(&events, ABILITIES);
        let opened = open(adapter, &asked, &terms, store_timeout).await?;
        if opened.replies.len() != asked.len() {
            return Err(Error::new(ErrorKind::Corrupt, "counting the replies of the store"));
        }
        let mut replies = Replies::default();
        replies.add(asked.into_iter().zip(opened.replies.into_iter().map(Ok)));
        replies.add(pending.into_iter().map(|(key, ())| (key, Ok(ClaimReply::InFlight))));
        let mut resolution = resolve(&events, &replies, &terms);
        let Some(mut transaction) = opened.transaction else {
            return Ok(resolution.without_new());
        };
        if resolution.new.is_empty() {
            let rollback = || adapter.rollback(transaction);
            bounded(&["rollback", "rolling back"], store_timeout, rollback).await?;
            return Ok(resolution.without_new());
        }
        if !resolution.release.is_empty() {
            let keys = &resolution.release;
            bounded(&["release_in", "releasing keys"], store_timeout, || {
                adapter.release_in(&mut transaction, keys, &terms)
            })
            .await?;
        }
        let held = std::mem::take(&mut resolution.held);
        Ok(resolution.begin(|_| (), |_| self.claim(held, terms, context, Some(transaction))))
    }

    /// An outer layer may lend its transaction. A second one would take another connection, and on SQLite
    /// it would wait for the first.
    fn runs_outside(extensions: &Extensions) -> bool {
        extensions.get::<TxHandle<DB>>().is_some()
    }

    fn stores_data(&self) -> bool {
        ABILITIES.stored_data
    }

    fn pending_writes(&self) -> PendingWrites {
        PendingWrites::default()
    }
}

impl<DB: Database> CanReplay for Transactional<DB> {}

/// Lends a transaction to a handler, and ends it. Dropped, it rolls the transaction back.
pub struct TransactionClaim<DB: Database> {
    slot: Arc<LendSlot<DB>>,
    /// Dropped last: a delivery that does not find the key here must find its row in the database.
    _running: PendingGuard,
}

impl<DB: Database> Claim for TransactionClaim<DB> {
    fn attach(&self, extensions: &mut Extensions) {
        TxHandle::attach(&self.slot, extensions);
    }

    async fn commit(self, success: &HandlerSuccess) -> Result<(), Error> {
        match self.slot.close() {
            State::Available(transaction) => self.slot.commit(transaction, success).await,
            State::Unopened | State::Closed => Ok(()),
            State::Lent => {
                let context = "committing: the handler has kept its transaction";
                Err(Error::new(ErrorKind::Transaction, context))
            }
        }
    }

    async fn rollback(self) -> Result<(), Error> {
        match self.slot.close() {
            State::Available(transaction) => self.slot.rollback(transaction).await,
            // A transaction that is still lent is rolled back when its holder drops it.
            State::Unopened | State::Lent | State::Closed => Ok(()),
        }
    }
}

impl<DB: Database> Drop for TransactionClaim<DB> {
    fn drop(&mut self) {
        if let State::Available(transaction) = self.slot.close() {
            self.slot.end_detached(transaction);
        }
    }
}

impl<DB: Database> fmt::Debug for TransactionClaim<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TransactionClaim").finish_non_exhaustive()
    }
}
