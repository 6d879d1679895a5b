//! What the lease ledger holds with a delivery.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};

use super::call::{self, Calls};
use crate::adapter::contract::{CompleteReply, Completion, StoredResponse};
use crate::delivery::Inner;
use crate::error::StoreError;
use crate::key::{DedupKey, List};
use crate::observe;

/// A delivery with its lease, shared with its claim.
pub(super) type HeldLease = Inner<Held>;

/// What a ledger holds with a delivery under a lease.
pub(super) struct Held {
    /// Sorted.
    pub(super) keys: List<DedupKey>,
    pub(super) calls: Calls,
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

impl Held {
    pub(super) fn new(keys: List<DedupKey>, calls: Calls) -> Self {
        Self { keys, calls, response: OnceLock::new(), known: AtomicU8::new(0) }
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
        let Calls { adapter, terms, .. } = &self.calls;
        let Some(response) = self.response.get() else {
            return adapter.completion(keys, terms, mark);
        };
        self.set(STORED);
        adapter.completion(keys, &terms.clone().with_response(Arc::clone(response)), mark)
    }

    /// Asks the store whether a transaction of the handler's has completed all keys.
    pub(super) async fn are_complete(&self) -> Result<bool, StoreError> {
        let replies = call::all(self.calls.is_complete(&self.keys).await)?;
        Ok(replies.iter().all(|is_complete| *is_complete))
    }
}

/// Reports claims that the store has lost, and lost leases, unless the delivery knew before.
pub(super) fn report(
    keys: &[DedupKey],
    replies: &[Result<CompleteReply, StoreError>],
    lease: &HeldLease,
) {
    // A delivery that ran unprotected has claimed nothing.
    if !lease.is_unprotected() {
        let missing = with_reply(keys, replies, CompleteReply::Inserted);
        missing.for_each(observe::records::claim_missing);
    }
    lease.report_lost(with_reply(keys, replies, CompleteReply::LeaseLost));
}

/// Returns the keys with this reply.
pub(super) fn with_reply<'k, T: PartialEq>(
    keys: &'k [DedupKey],
    replies: &'k [Result<T, StoreError>],
    reply: T,
) -> impl Iterator<Item = &'k DedupKey> {
    let replies = keys.iter().zip(replies);
    let replies = replies.filter(move |(_, other)| other.as_ref().is_ok_and(|it| *it == reply));
    replies.map(|(key, _)| key)
}

impl HeldLease {
    /// Reports the first leases that are lost.
    pub(super) fn report_lost<'k>(&self, keys: impl Iterator<Item = &'k DedupKey>) {
        let mut keys = keys.peekable();
        if keys.peek().is_some() && self.mark_lease_lost() {
            keys.for_each(observe::records::lease_lost);
        }
    }
}
