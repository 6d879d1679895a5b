//! Ledgers: *when* a key becomes permanent.
//!
//! The table of the three ledgers is on the [crate page](crate#ledgers).
//!
//! These types only select a ledger: [`DedupLayer`](crate::DedupLayer) and
//! [`Deduplicator`](crate::Deduplicator) make them.
//!
//! 1. Every call to the store has a bound, which includes the wait for a connection.
//! 2. A token is made before the call. A claim of unknown outcome (a timeout, a lost connection, a
//!    dropped future) may hold keys. The token is released in the background.
//! 3. On arrival, an event is lost if its retry reaches another process, or a layer that is not a
//!    clone, before that release has ended.
//! 4. If the store fails after the handler's success: under a *lease*, the sender gets the
//!    handler's answer, and the completion continues in the background. *On arrival*, no call
//!    follows the handler. A *transactional* event that the handler has committed is answered as
//!    under a lease; if another driver has completed it and the read fails, the answer is 503.
//! 5. If a claim is dropped before it is settled, its keys are released under a *lease* and in a
//!    *transaction*. *On arrival*, the key stays complete.
//! 6. The events of a delivery are completed or released together.
//! 7. If a completion is dropped, it continues under a *lease*. In a *transaction*, the handler's
//!    COMMIT has decided.

mod arrival;
mod background;
pub(crate) mod begin;
mod call;
pub(crate) mod claim;
pub(crate) mod completion;
pub(crate) mod contract;
mod held;
mod hold;
mod renewal;
mod resolve;
mod times;

pub(crate) use begin::Begin;
pub(crate) use call::Calls;
pub(crate) use claim::{Claim, Settled};
pub(crate) use contract::{CanReplay, FailOpen, HandlerSuccess, RunsWithoutKey};
pub use contract::{Lease, Ledger, OnArrival, Transactional};
pub(crate) use hold::AnyLedger;
pub(crate) use times::{PollDelays, TRANSACTIONAL_LEASE, Times, poll_delays};
