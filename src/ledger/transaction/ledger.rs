//! The ledger, and the claim that a delivery holds while its handler runs.

use std::fmt;
use std::sync::Arc;

use http::Extensions;
use sqlx::Database;

use super::super::call::bounded;
use super::super::contract::{
    Begin, BeginContext, CanReplay, Claim, HandlerSuccess, KeylessClaim, Ledger, Sealed, Settled,
};
use super::super::pending::{Pending, PendingGuard};
use super::super::resolve::{KeyState, flatten, resolve, states};
use super::super::retry::PendingWrites;
use super::lend::{Closed, LendSlot, TxHandle};
use super::open::OpenDelivery;
use crate::adapter::TransactionAdapter;
use crate::delivery::{Delivery, Protection};
use crate::error::{Error, ErrorKind};
use crate::key::Keys;

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
        let (events, flat) = flatten(keys);
        let (asked, pending) = self.running.split(&flat);
        if asked.is_empty() {
            return Ok(Begin::InFlight);
        }
        let (adapter, store_timeout) = (&*self.adapter, context.store_timeout);
        let terms = context.transaction_terms(&events, true);
        let bound = store_timeout.saturating_add(adapter.open_timeout());
        let opened =
            bounded(&["begin", "opening a transaction"], bound, || adapter.open(&asked, &terms))
                .await?;
        if opened.replies.len() != asked.len() {
            return Err(Error::new(ErrorKind::Corrupt, "counting the replies of the store"));
        }
        let states = states(&flat, opened.replies, pending, |_| KeyState::InFlight);
        let resolution = resolve(events, &flat, &states, &terms);
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
        resolution.report_run();
        let (in_flight, mismatch) = (resolution.in_flight, resolution.mismatch);
        let keys = resolution.held().into_vec();
        let running = self.running.add((*keys).into());
        let delivery = resolution.delivery(Protection::Claimed, ()).into();
        let adapter = Arc::clone(&self.adapter);
        let open = OpenDelivery { adapter, keys, terms, store_timeout };
        let lending = Lending(LendSlot::new(open, Some(transaction)));
        let claim = TransactionClaim { lending, delivery, _running: running };
        Ok(Begin::First { claim, in_flight, mismatch })
    }

    fn begin_without_key(
        &self,
        extensions: &Extensions,
        context: BeginContext,
    ) -> Option<Box<dyn KeylessClaim>> {
        // An outer layer lends its transaction. A second one would take another connection, and on
        // SQLite it would wait for the first.
        if extensions.get::<TxHandle<DB>>().is_some() {
            return None;
        }
        let (adapter, terms) = (Arc::clone(&self.adapter), context.transaction_terms(&[], false));
        let store_timeout = context.store_timeout;
        let open = OpenDelivery { adapter, keys: Vec::new(), terms, store_timeout };
        Some(Box::new(Lending(LendSlot::new(open, None))))
    }

    fn stores_data(&self) -> bool {
        self.adapter.stores_data()
    }

    fn pending_writes(&self) -> PendingWrites {
        PendingWrites::default()
    }
}

impl<DB: Database> CanReplay for Transactional<DB> {}

/// The claim of a delivery whose keys are claimed in a transaction.
pub struct TransactionClaim<DB: Database> {
    lending: Lending<DB>,
    delivery: Delivery,
    /// Dropped last: a delivery that does not find the key here must find its row in the database.
    _running: PendingGuard,
}

impl<DB: Database> Claim for TransactionClaim<DB> {
    fn delivery(&self) -> &Delivery {
        &self.delivery
    }

    fn attach(&self, extensions: &mut Extensions) {
        self.lending.attach(extensions);
    }

    async fn commit(self, success: &HandlerSuccess) -> Result<(), Error> {
        self.lending.commit(success).await
    }

    async fn rollback(self) -> Result<(), Error> {
        self.lending.rollback().await
    }
}

/// Lends a transaction to a handler, and ends it. Dropped, it rolls the transaction back.
struct Lending<DB: Database>(Arc<LendSlot<DB>>);

impl<DB: Database> Lending<DB> {
    async fn commit(&self, success: &HandlerSuccess) -> Result<(), Error> {
        match self.0.close() {
            Closed::Open(transaction) => self.0.open().commit(transaction, success).await,
            Closed::Unopened => Ok(()),
            Closed::Lent => {
                let context = "committing: the handler has kept its transaction";
                Err(Error::new(ErrorKind::Transaction, context))
            }
        }
    }

    async fn rollback(&self) -> Result<(), Error> {
        match self.0.close() {
            Closed::Open(transaction) => self.0.open().rollback(transaction).await,
            // A transaction that is still lent is rolled back when its holder drops it.
            Closed::Unopened | Closed::Lent => Ok(()),
        }
    }
}

impl<DB: Database> KeylessClaim for Lending<DB> {
    fn attach(&self, extensions: &mut Extensions) {
        TxHandle::attach(&self.0, extensions);
    }

    fn commit(self: Box<Self>) -> Settled {
        Box::pin(async move { (*self).commit(&HandlerSuccess::default()).await })
    }

    fn rollback(self: Box<Self>) -> Settled {
        Box::pin(async move { (*self).rollback().await })
    }
}

impl<DB: Database> Drop for Lending<DB> {
    fn drop(&mut self) {
        if let Closed::Open(transaction) = self.0.close() {
            self.0.end_detached(transaction);
        }
    }
}

impl<DB: Database> fmt::Debug for TransactionClaim<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TransactionClaim")
            .field("delivery", self.delivery())
            .finish_non_exhaustive()
    }
}
