//! What the lease ledger holds with a delivery.

use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::adapter::contract::{CallTerms, Completion, DedupAdapter, StoredResponse, Token};
use crate::delivery::Inner;
use crate::error::StoreError;
use crate::key::{DedupKey, List};

/// A delivery with its lease, shared with its claim.
pub(super) type HeldLease = Inner<LeaseTerms>;

/// What a ledger holds with a delivery under a lease.
pub(super) struct LeaseTerms {
    /// Sorted.
    pub(super) keys: List<DedupKey>,
    pub(super) terms: CallTerms,
    pub(super) store_timeout: Duration,
    /// A panic of a handler leaves nothing half done in it.
    adapter: AssertUnwindSafe<Arc<dyn DedupAdapter>>,
    /// The response that the handler has set. Only the first one counts.
    pub(super) response: OnceLock<Arc<StoredResponse>>,
    /// What is known of the handler and of its transaction: the constants below.
    known: AtomicU8,
}

/// A [`DedupTx`](super::completion::DedupTx) has committed the events.
pub(super) const COMMITTED: u8 = 1;
/// The handler has nothing to write.
pub(super) const NOTHING: u8 = 2;
/// A completion was refused: another delivery may have completed the events.
pub(super) const REFUSED: u8 = 4;
/// A statement was made that stores the response of the handler.
pub(super) const STORED: u8 = 8;
/// The handler has ended. From now on only the completion reports a lost lease, because a renewal after the
/// completion or the release finds no lease.
pub(super) const ENDED: u8 = 16;

impl LeaseTerms {
    pub(super) fn new(
        keys: List<DedupKey>,
        terms: CallTerms,
        store_timeout: Duration,
        adapter: &Arc<dyn DedupAdapter>,
    ) -> Self {
        let adapter = AssertUnwindSafe(Arc::clone(adapter));
        let (response, known) = (OnceLock::new(), AtomicU8::new(0));
        Self { keys, terms, store_timeout, adapter, response, known }
    }

    /// Returns the terms of a delivery that holds nothing: its transaction is the handler's alone.
    pub(super) fn nothing(adapter: &Arc<dyn DedupAdapter>) -> Self {
        let terms = CallTerms::on_completion(Token::random(), Duration::ZERO, Duration::ZERO);
        Self::new(List::new(), terms, Duration::ZERO, adapter)
    }

    pub(super) fn set(&self, fact: u8) {
        self.known.fetch_or(fact, Ordering::AcqRel);
    }

    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    pub(super) fn unset(&self, fact: u8) {
        self.known.fetch_and(!fact, Ordering::AcqRel);
    }

    pub(super) fn is(&self, fact: u8) -> bool {
        self.known.load(Ordering::Acquire) & fact != 0
    }

    /// Returns the statement that completes these keys, with the response that the handler has set.
    pub(super) fn completion(
        &self,
        keys: &[DedupKey],
        mark: Option<&str>,
    ) -> Result<Completion, StoreError> {
        let Some(response) = self.response.get() else {
            return self.adapter.completion(keys, &self.terms, mark);
        };
        self.set(STORED);
        self.adapter.completion(keys, &self.terms.clone().with_response(Arc::clone(response)), mark)
    }
}
