//! [`OpenDelivery`]: opens and ends the transaction of a delivery.

use std::sync::Arc;
use std::time::Duration;

use sqlx::Database;

use super::super::call::bounded;
use super::super::contract::HandlerSuccess;
use crate::adapter::TransactionAdapter;
use crate::adapter::contract::CallTerms;
use crate::adapter::transaction::OpenTransaction;
use crate::error::{Error, ErrorKind};
use crate::key::DedupKey;

/// The claim of a delivery whose transaction is open, without the transaction; or a request without a
/// key that may open one.
pub(super) struct OpenDelivery<DB: Database> {
    pub(super) adapter: Arc<dyn TransactionAdapter<Database = DB>>,
    /// The keys to complete, sorted.
    pub(super) keys: Vec<DedupKey>,
    pub(super) terms: CallTerms,
    pub(super) store_timeout: Duration,
}

impl<DB: Database> OpenDelivery<DB> {
    /// Opens a transaction without a key.
    pub(super) async fn open(&self) -> Result<OpenTransaction<DB>, Error> {
        let bound = self.store_timeout.saturating_add(self.adapter.open_timeout());
        let open = || self.adapter.open(&self.keys, &self.terms);
        let opened = bounded(&["begin", "opening a transaction"], bound, open).await?;
        opened.transaction.ok_or_else(|| {
            Error::new(ErrorKind::Corrupt, "opening a transaction: the adapter opened none")
        })
    }

    pub(super) async fn commit(
        &self,
        transaction: OpenTransaction<DB>,
        success: &HandlerSuccess,
    ) -> Result<(), Error> {
        let with_response = success.terms(&self.terms);
        let terms = with_response.as_ref().unwrap_or(&self.terms);
        bounded(&["commit", "committing the handler's transaction"], self.store_timeout, || {
            self.adapter.commit(transaction, &self.keys, terms)
        })
        .await
    }

    pub(super) async fn rollback(&self, transaction: OpenTransaction<DB>) -> Result<(), Error> {
        bounded(&["rollback", "rolling the handler's transaction back"], self.store_timeout, || {
            self.adapter.rollback(transaction)
        })
        .await
    }
}
