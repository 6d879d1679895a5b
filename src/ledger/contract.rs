//! The contract between a layer and a ledger.
//!
//! The traits are public in a private module. So bounds of public types can name them, and other crates
//! cannot implement them.

use std::sync::Arc;
use std::time::Duration;

use super::times::Times;
use crate::adapter::contract::{Abilities, CallTerms, Fetch, StoredResponse, Token};
use crate::error::{StoreError, StoreErrorKind};
use crate::key::{DedupKey, Event};

/// When a key becomes permanent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Permanent {
    /// After a success.
    Lease,
    /// Before the handler runs.
    OnArrival,
    /// In the handler's own transaction.
    Transactional,
}

/// Prevents implementations of [`Ledger`] in other crates.
pub trait Sealed {
    const PERMANENT: Permanent;
}

/// A ledger: when a key becomes permanent.
///
/// A bound for code that is generic over the ledger, such as
/// `fn settings<L: Ledger>(layer: DedupLayer<L>) -> DedupLayer<L>`. It is sealed.
pub trait Ledger: Sealed + Send + Sync + 'static {}

/// A ledger that can run a handler while its store does not reply.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot run a handler without its store",
    note = "without its store, a transactional ledger completes no event in the handler's transaction"
)]
pub trait FailOpen: Ledger {}

/// A ledger that makes a key permanent *after* its handler has responded, so that the response can be
/// stored.
#[diagnostic::on_unimplemented(
    message = "`{Self}` stores no responses",
    note = "a key that is permanent before its handler runs has no response to store"
)]
pub trait CanReplay: Ledger {}

/// Claims keys under a lease, and completes them after success: no event is lost, and one runs
/// twice only if a process or the store dies in between.
///
/// [`DedupLayer::new`](crate::DedupLayer::new) selects it.
#[derive(Debug)]
pub enum Lease {}

/// Claims keys that are complete at once: no event runs twice, and an event whose handler fails is
/// lost.
///
/// [`DedupLayer::on_arrival`](crate::DedupLayer::on_arrival) selects it.
#[derive(Debug)]
pub enum OnArrival {}

/// Completes a key in the transaction that has its handler's writes: each effect in it exists exactly once.
///
/// [`DedupLayer::transactional`](crate::DedupLayer::transactional) selects it.
#[derive(Debug)]
pub enum Transactional {}

macro_rules! ledgers {
    ($($ledger:ident: $($can:ident)*;)+) => {$(
        impl Sealed for $ledger {
            const PERMANENT: Permanent = Permanent::$ledger;
        }

        impl Ledger for $ledger {}

        $(impl $can for $ledger {})*
    )+};
}

ledgers! {
    Lease: FailOpen CanReplay;
    OnArrival: FailOpen;
    Transactional: CanReplay;
}

/// An extension of a request without a key that a layer runs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RunsWithoutKey;

/// The terms on which a delivery begins.
#[derive(Debug, Clone)]
pub(crate) struct BeginContext {
    /// The terms of a lease. The token exists before the first call to the store, so that an unknown outcome can be
    /// released. With a duplicate note, the handler runs if the store does not reply.
    pub(crate) terms: CallTerms,
    /// The bound on every call to the store.
    pub(super) store_timeout: Duration,
}

impl BeginContext {
    /// Makes the terms of one delivery, with a token of its own.
    #[must_use]
    pub(crate) fn new(retention: Duration, lease: Duration, store_timeout: Duration) -> Self {
        let terms = CallTerms::on_completion(Token::random(), retention, lease);
        Self { terms, store_timeout }
    }

    /// Makes the terms of one delivery under these times. `after` is the bound on what follows the handler before the
    /// commit.
    pub(crate) fn of(times: &Times, after: Duration) -> Self {
        let mut context = Self::new(times.retention, times.lease, times.store_timeout);
        let most =
            |bound: Duration| bound.saturating_add(after).saturating_add(times.store_timeout);
        // No honest handler is ended by it. The setting of Postgres has 31 bits.
        let ms = |bound| i32::try_from(most(bound).as_millis()).unwrap_or(i32::MAX);
        context.terms.handler_bound_ms = times.handler_timeout.map_or(0, ms);
        context
    }

    pub(crate) const fn is_open(&self) -> bool {
        self.terms.duplicate_note.is_some()
    }

    /// Returns these terms for another claim, which does not fail open. It has a token of its own, because
    /// the claim before it may still be released in the background.
    pub(crate) fn again(&self) -> Self {
        let mut again = self.clone();
        (again.terms.token, again.terms.duplicate_note) = (Token::random(), None);
        again
    }

    /// Returns the terms for a store of these abilities, for a delivery of these events.
    ///
    /// The response to a multi-event delivery answered for other events too, so it is not replayed.
    pub(super) fn terms(self, events: &[Event], abilities: Abilities) -> CallTerms {
        let mut terms = self.terms;
        let keys = if abilities.stored_data { digests(events) } else { Vec::new() };
        terms.fetch = match terms.fetch {
            Fetch::DigestAndResponse if events.len() != 1 => Fetch::Digest,
            Fetch::Nothing if !keys.is_empty() => Fetch::Digest,
            fetch => fetch,
        };
        if abilities.inspection {
            let mut types = Vec::new();
            for event in events {
                let Some(event_type) = event.shared_event_type() else { continue };
                types.extend(event.identities().map(|key| (key.clone(), Arc::clone(event_type))));
            }
            types.sort_unstable();
            terms.event_types = (!types.is_empty()).then(|| types.into());
        }
        if keys.is_empty() {
            return terms;
        }
        // The first digest of a key counts: a compared payload before a content.
        let payloads = terms.payloads.take().unwrap_or_default();
        terms.with_payloads(payloads.iter().cloned().chain(keys))
    }
}

/// Returns `true` if the handler runs unprotected after this error of a claim.
///
/// [`StoreErrorKind::Corrupt`] never fails open: the unreadable data may belong to a duplicate. Nor does
/// an error after the store has found a duplicate, when only the read of its response failed.
pub(super) fn fails_open(terms: &CallTerms, error: &StoreError) -> bool {
    let found_no_duplicate = terms.duplicate_note.as_ref().is_some_and(|note| note.get().is_none());
    found_no_duplicate && error.kind() != StoreErrorKind::Corrupt
}

/// Returns the digests that the store holds with the identities of these events: with a second identity the SHA-256
/// of its event's key, and with a key that of its event's content, if that is the second identity.
fn digests(events: &[Event]) -> Vec<(DedupKey, [u8; 32])> {
    let mut digests = Vec::new();
    for event in events {
        let Some(second) = event.second_identity() else { continue };
        digests.push((second.clone(), event.key().sha256()));
        if let Some(content) = event.content_sha256() {
            digests.push((event.key().clone(), content));
        }
    }
    digests
}

/// How a handler succeeded.
#[derive(Debug, Clone, Default)]
pub(crate) struct HandlerSuccess {
    /// The response, if it is to be stored.
    pub(crate) response: Option<Arc<StoredResponse>>,
}
