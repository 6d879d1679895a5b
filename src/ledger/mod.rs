//! Ledgers: *when* a key becomes permanent.
//!
//! | ledger | key is permanent | handler fails or panics | process dies mid-handler | concurrent duplicate | effect |
//! |---|---|---|---|---|---|
//! | [`Lease`] (default) | after a successful response | released at once; the retry runs | the lease lapses; the retry runs (takeover) | waits, then 200; past the bound 503 | at least once; once while no process and no store dies |
//! | [`OnArrival`] | before the handler | lost | lost | 200 | at most once |
//! | `Transactional` (features `postgres`, `sqlite`) | in the same COMMIT as the handler's writes | rolled back together | rolled back together | waits, then 200; past the bound 503 | exactly once, for everything written in that database |
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
    Begin, BeginContext, CanReplay, Claim, DuplicateInfo, FailOpen, HandlerSuccess, Remainder,
};
pub use lease::Lease;
pub(crate) use retry::PendingWrites;
pub(crate) use times::{Times, deadline_in, poll_delays};
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub use transaction::Transactional;
