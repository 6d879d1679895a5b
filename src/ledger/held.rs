//! What the lease ledger holds with a delivery.

use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::adapter::contract::{CallTerms, DedupAdapter, StoredResponse, Token};
use crate::delivery::Inner;
use crate::key::{DedupKey, List};

/// A delivery with its lease, shared with its claim.
pub(super) type HeldLease = Inner<LeaseTerms>;

/// What a ledger holds with a delivery under a lease.
pub(super) struct LeaseTerms {
    /// Sorted.
    pub(super) keys: List<DedupKey>,
    pub(super) terms: CallTerms,
    pub(super) store_timeout: Duration,
    pub(super) writes: HandlerWrites,
    handler_ended: AtomicBool,
}

impl LeaseTerms {
    pub(super) fn new(
        keys: List<DedupKey>,
        terms: CallTerms,
        store_timeout: Duration,
        adapter: &Arc<dyn DedupAdapter>,
    ) -> Self {
        let writes = HandlerWrites {
            adapter: AssertUnwindSafe(Arc::clone(adapter)),
            state: AtomicU8::new(0),
            response: OnceLock::new(),
        };
        Self { keys, terms, store_timeout, writes, handler_ended: AtomicBool::new(false) }
    }

    /// Marks the handler as ended. From now on only the completion reports a lost lease, because a renewal
    /// after the completion or the release finds no lease.
    pub(super) fn mark_handler_ended(&self) {
        self.handler_ended.store(true, Ordering::Release);
    }

    /// Returns the terms of a delivery that holds nothing: its transaction is the handler's alone.
    pub(super) fn nothing(adapter: &Arc<dyn DedupAdapter>) -> Self {
        let terms = CallTerms::on_completion(Token::random(), Duration::ZERO, Duration::ZERO);
        Self::new(List::new(), terms, Duration::ZERO, adapter)
    }

    pub(super) fn has_handler_ended(&self) -> bool {
        self.handler_ended.load(Ordering::Acquire)
    }
}

/// What the ledger knows of the handler's transaction.
pub(super) struct HandlerWrites {
    /// A panic of a handler leaves nothing half done in it.
    pub(super) adapter: AssertUnwindSafe<Arc<dyn DedupAdapter>>,
    state: AtomicU8,
    response: OnceLock<Arc<StoredResponse>>,
}

/// A [`DedupTx`] has committed the events.
const COMMITTED: u8 = 1;
/// The handler has nothing to write.
const NOTHING: u8 = 2;
/// A completion was refused: another delivery may have completed the events.
const REFUSED: u8 = 4;
/// A statement was made that stores the response of the handler.
const STORED: u8 = 8;

impl HandlerWrites {
    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    pub(super) fn set_committed(&self) {
        self.set(COMMITTED);
    }

    pub(super) fn set_none(&self) {
        self.set(NOTHING);
    }

    /// The handler writes after all.
    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    pub(super) fn set_begun(&self) {
        self.state.fetch_and(!NOTHING, Ordering::AcqRel);
    }

    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    pub(super) fn set_refused(&self) {
        self.set(REFUSED);
    }

    pub(super) fn set_stored(&self) {
        self.set(STORED);
    }

    /// Only the first response counts.
    pub(super) fn set_response(&self, response: StoredResponse) {
        let _ = self.response.set(Arc::new(response));
    }

    fn set(&self, flag: u8) {
        self.state.fetch_or(flag, Ordering::AcqRel);
    }

    fn has(&self, flag: u8) -> bool {
        self.state.load(Ordering::Acquire) & flag != 0
    }

    pub(super) fn are_committed(&self) -> bool {
        self.has(COMMITTED)
    }

    pub(super) fn are_none(&self) -> bool {
        self.has(NOTHING)
    }

    /// A completion after the commit is refused by the events' own completion.
    pub(super) fn are_refused(&self) -> bool {
        self.has(REFUSED) && !self.has(COMMITTED)
    }

    pub(super) fn have_stored_response(&self) -> bool {
        self.has(STORED)
    }

    /// Returns the response that the handler has set.
    pub(super) fn response(&self) -> Option<&Arc<StoredResponse>> {
        self.response.get()
    }
}
