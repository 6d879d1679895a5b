//! [`Held`]: what a ledger holds with a delivery under a lease, shared with its handler.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use super::call::{self, Calls};
use crate::adapter::KeyedTerms;
use crate::adapter::contract::{CompleteReply, Completion, Fetch, StoredResponse};
use crate::delivery::Inner;
use crate::error::StoreError;
use crate::key::{DedupKey, List};
use crate::observe;

/// A delivery with its lease, shared with its claim.
pub(super) type HeldLease = Inner<Held>;

/// What a ledger holds with a delivery under a lease.
pub(super) struct Held {
    /// Sorted.
    pub(super) keys: List<KeyedTerms>,
    pub(super) calls: Calls,
    /// The part of the response that is stored, if the handler has set one. Only the first response
    /// counts.
    pub(super) response: OnceLock<Arc<StoredResponse>>,
    state: Mutex<HeldState>,
}

/// The known facts about a delivery under a lease. A fact that has become true stays true.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct HeldState {
    pub(super) effect: Effect,
    /// A success must have completed the events, unless the handler has nothing to write.
    pub(super) demands_commit: bool,
    /// A completion was refused: another delivery may have completed the events.
    pub(super) is_refused: bool,
    /// A statement may have completed the events in a transaction of the handler's, which may have
    /// been rolled back since.
    #[cfg_attr(
        not(any(feature = "postgres", feature = "sqlite")),
        expect(dead_code, reason = "`DedupTx` reads it")
    )]
    pub(super) may_have_completed: bool,
    /// A statement was made that stores the response of the handler.
    is_response_stored: bool,
    /// The handler has ended. From now on only the completion reports a lost lease, because a
    /// renewal after the completion or the release finds no lease.
    pub(super) has_ended: bool,
}

/// What a handler has said and done about the transaction of its events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Effect {
    /// It has said nothing.
    #[default]
    Unsaid,
    /// It has nothing to write.
    NothingToWrite,
    /// It has begun a transaction, or has taken a statement for one.
    Begun,
    /// A [`DedupTx`](super::completion::DedupTx) has committed the events.
    Committed,
}

impl Held {
    pub(super) fn new(keys: List<KeyedTerms>, calls: Calls) -> Self {
        Self { keys, calls, response: OnceLock::new(), state: Mutex::default() }
    }

    pub(super) fn state(&self) -> HeldState {
        *self.lock()
    }

    pub(super) fn note(&self, fact: impl FnOnce(&mut HeldState)) {
        fact(&mut self.lock());
    }

    /// Sets what the handler has said or done last. What is committed stays so.
    pub(super) fn say(&self, effect: Effect) {
        let said = &mut self.lock().effect;
        if *said != Effect::Committed {
            *said = effect;
        }
    }

    fn lock(&self) -> MutexGuard<'_, HeldState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps what the layer stores of this response. It stores none of a delivery of several
    /// events.
    pub(super) fn set_response(&self, response: &StoredResponse) {
        let Calls { replay, terms, meters, .. } = &self.calls;
        let Some(replay) = replay.as_ref().filter(|_| terms.fetch == Fetch::DigestAndResponse)
        else {
            return;
        };
        match replay.store(response) {
            Ok(stored) => drop(self.response.set(Arc::new(stored))),
            Err(reason) => self
                .keys
                .iter()
                .for_each(|it| observe::records::response_not_stored(meters, &it.key, reason)),
        }
    }

    /// Returns `true` if the layer stores a response, and none was stored with the completion.
    pub(super) fn awaits_response(&self) -> bool {
        self.calls.terms.fetch == Fetch::DigestAndResponse && !self.state().is_response_stored
    }

    /// Returns the statement that completes these keys, with the response that the handler has set.
    pub(super) fn completion(&self, keys: &[KeyedTerms]) -> Result<Completion, StoreError> {
        let response = self.response.get();
        let with_response: List<KeyedTerms>;
        let keys = match response {
            Some(response) => {
                self.note(|it| it.is_response_stored = true);
                with_response = self::with_response(keys, response);
                &with_response
            }
            None => keys,
        };
        let keys: List<_> = keys.iter().map(|it| (&it.key, &*it.terms)).collect();
        let completion = self.calls.adapter.completion(&keys)?;
        #[cfg(feature = "postgres")]
        let completion = completion.for_handler(self.calls.handler_bound);
        Ok(completion)
    }

    /// Asks the store whether a transaction of the handler's has completed all keys. A store
    /// without this ability has completed none.
    pub(super) async fn are_complete(&self) -> Result<bool, StoreError> {
        if !self.calls.abilities.completion {
            return Ok(false);
        }
        let replies = call::all(self.calls.is_complete(&self.keys).await)?;
        Ok(replies.iter().all(|is_complete| *is_complete))
    }
}

/// Returns these keys with a response that is stored with each.
pub(super) fn with_response(
    keys: &[KeyedTerms],
    response: &Arc<StoredResponse>,
) -> List<KeyedTerms> {
    let with = |KeyedTerms { key, terms }: &KeyedTerms| {
        let terms = terms.clone().with_response(Arc::clone(response));
        KeyedTerms { key: key.clone(), terms: Box::new(terms) }
    };
    keys.iter().map(with).collect()
}

/// Reports claims that the store has lost, and lost leases, unless the delivery knew before.
pub(super) fn report(
    keys: &[KeyedTerms],
    replies: &[Result<CompleteReply, StoreError>],
    lease: &HeldLease,
) {
    // A delivery that ran unprotected has claimed nothing.
    if !lease.is_unprotected() {
        let missing = with_reply(keys, replies, CompleteReply::Inserted);
        let meters = &lease.of_ledger.calls.meters;
        missing.for_each(|key| observe::records::claim_missing(meters, key));
    }
    lease.report_lost(with_reply(keys, replies, CompleteReply::LeaseLost));
}

/// Returns the keys with this reply.
pub(super) fn with_reply<'k, T: PartialEq>(
    keys: &'k [KeyedTerms],
    replies: &'k [Result<T, StoreError>],
    reply: T,
) -> impl Iterator<Item = &'k DedupKey> {
    let replies = keys.iter().zip(replies);
    let replies = replies.filter(move |(_, other)| other.as_ref().is_ok_and(|it| *it == reply));
    replies.map(|(it, _)| &it.key)
}

impl HeldLease {
    /// Reports the first leases that are lost.
    pub(super) fn report_lost<'k>(&self, keys: impl Iterator<Item = &'k DedupKey>) {
        let mut keys = keys.peekable();
        if keys.peek().is_some() && self.mark_lease_lost() {
            keys.for_each(|key| observe::records::lease_lost(&self.of_ledger.calls.meters, key));
        }
    }
}
