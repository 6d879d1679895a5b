//! Ledgers: *when* a key becomes permanent.
//!
//! The table of the three ledgers is on the [crate page](crate#what-is-guaranteed).
//!
//! These types only select a ledger: [`DedupLayer`](crate::DedupLayer) and
//! [`Deduplicator`](crate::Deduplicator) make them.
//!
//! 1. The layer makes the token before the call. After an unknown outcome (a timeout, a lost
//!    connection) the ledger releases the token in the background. So a lost reply neither blocks a
//!    key for a lease nor loses an event on arrival.
//! 2. Every call to the store has a bound, which includes the wait for a connection.
//! 3. A store that fails after the handler's success does not undo that success: the answer is the
//!    handler's, and the completion continues in the background.
//! 4. A claim that is dropped without `commit` or `rollback` is rolled back; events that its handler
//!    marked as done are completed. A success whose completion has started is still completed. Keys
//!    that a dropped call may have claimed are released.

mod arrival;
mod call;
mod contract;
#[doc(hidden)]
pub mod internals;
mod lease;
mod pending;
mod release;
mod resolve;
mod retry;
mod times;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub(crate) mod transaction;

pub use arrival::OnArrival;
pub use contract::Ledger;
pub(crate) use contract::{
    Begin, BeginContext, CanReplay, Claim, DuplicateInfo, FailOpen, HandlerSuccess, KeylessClaim,
    Remainder,
};
pub use lease::Lease;
pub(crate) use retry::PendingWrites;
pub(crate) use times::{Times, deadline_in, poll_delays};
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub use transaction::Transactional;
