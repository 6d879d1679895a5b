//! [`Lease`]: the key becomes permanent when the handler has succeeded.
//!
//! 1. A delivery claims its keys under a lease, which is renewed while the handler runs. A process
//!    that dies leaves a lease that lapses: the retry runs, flagged as a takeover.
//! 2. Success is success. After the handler's success, the answer is the handler's: the completion
//!    counts whoever holds the lease by then. If the store does not reply, the completion continues in
//!    the background. Meanwhile this process treats the key as complete, and keeps its lease.
//! 3. A handler that fails has its keys released at once, so that the retry runs at once.
//! 4. A claim whose reply was lost is released by its token. The claim may still be on its way to the
//!    store. So a store that does not hold it is asked again for 5 s or twice `store_timeout`,
//!    whichever is longer, and a store that does not reply until the lease would have lapsed.

mod ledger;
mod renewal;

pub use ledger::Lease;
