//! The contract between a layer and a ledger.
//!
//! The traits are public, so that bounds of public types can name them.

use std::sync::Arc;

use crate::adapter::contract::StoredResponse;

/// The ledgers: when a key becomes permanent. No other crate can name this type, so that none
/// implements [`Ledger`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LedgerKind {
    /// After a success.
    Lease,
    /// Before the handler runs.
    OnArrival,
    /// In the handler's own transaction.
    Transactional,
}

/// A ledger: when a key becomes permanent.
///
/// A bound for code that is generic over the ledger, such as
/// `fn settings<L: Ledger>(layer: DedupLayer<L>) -> DedupLayer<L>`. It is sealed.
pub trait Ledger: Send + Sync + 'static {
    #[doc(hidden)]
    const KIND: LedgerKind;
}

/// A ledger that can run a handler while its store does not reply.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot run a handler without its store",
    note = "without its store, a transactional ledger completes no event in the handler's transaction"
)]
pub trait FailOpen: Ledger {}

/// A ledger that makes a key permanent *after* its handler has responded, so that the response can
/// be stored.
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

/// Completes a key in the transaction that has its handler's writes: each effect in it exists
/// exactly once.
///
/// [`DedupLayer::transactional`](crate::DedupLayer::transactional) selects it.
#[derive(Debug)]
pub enum Transactional {}

macro_rules! ledgers {
    ($($ledger:ident: $($can:ident)*;)+) => {$(
        impl Ledger for $ledger {
            const KIND: LedgerKind = LedgerKind::$ledger;
        }

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

/// How a handler succeeded.
#[derive(Debug, Clone, Default)]
pub(crate) struct HandlerSuccess {
    /// The response, if it is to be stored.
    pub(crate) response: Option<Arc<StoredResponse>>,
}
