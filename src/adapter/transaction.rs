//! [`TransactionAdapter`]: stores for the transactional ledger.

use std::sync::Arc;

use super::contract::DedupAdapter;

/// A store in a SQL database, whose keys a handler completes in its own transaction.
///
/// The bound of [`DedupLayer::transactional`](crate::DedupLayer::transactional): with another store, key and effect
/// would be in two stores. Implement it for a store of your own that has
/// [`completion`](super::contract::Abilities::completion).
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot claim keys in the handler's transaction",
    label = "not an adapter of a SQL database",
    note = "the transactional ledger commits the key and the handler's writes together, so both must be \
            in one SQL database",
    note = "with this adapter, the key and the effect are in two stores: use the lease ledger, \
            `DedupLayer::new`"
)]
pub trait TransactionAdapter: DedupAdapter {}

impl<A: TransactionAdapter + ?Sized> TransactionAdapter for Arc<A> {}
