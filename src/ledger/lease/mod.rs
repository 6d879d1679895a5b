//! [`Lease`]: the key becomes permanent when the handler has succeeded.
//!
//! 1. A delivery claims its keys under a lease, which is renewed while the handler runs. If the process
//!    dies, the lease lapses. The retry then runs, flagged as a takeover.
//! 2. Success is success. After the handler's success, the answer is the handler's: the completion
//!    counts whichever delivery holds the lease by then. If the store does not reply, the completion
//!    continues in the background. Until it has ended, this process treats the key as complete and
//!    renews its lease.
//! 3. The keys of a handler that fails are released at once, so that the retry runs at once.
//! 4. A claim whose reply was lost is released by its token. Once the release has returned, the claim has no
//!    effect any more, however late it arrives. A store that does not reply is asked again until the lease
//!    would have lapsed.
//! 5. A claim that fails because stored data is unreadable is released by one call, because the store
//!    has executed it already.
//! 6. A runtime that shuts down drops its deliveries and starts no task. So their keys are not
//!    released: the leases lapse, as if the process had died.

mod ledger;
mod renewal;

pub use ledger::Lease;
