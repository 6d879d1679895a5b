//! [`Transactional`]: the key becomes permanent in the same COMMIT as the handler's writes.
//!
//! 1. A delivery claims its keys in a transaction, lends the transaction to the handler, and commits
//!    it after a success, before the response leaves. After a failure the transaction is rolled back,
//!    and the key with it. The same happens when the process dies.
//! 2. The handler gets the transaction as a [`DedupTx`], which derefs to the connection, not to sqlx's
//!    `Transaction`: there is nothing to commit. Savepoints work as usual.
//! 3. A handler's mistake ends in a 500 and a rollback, never in a 2xx. The mistakes: it holds the
//!    transaction past its response, ends it, or continues after an error that has aborted it.
//! 4. A failed commit is 503 if a retry may succeed. A commit of unknown outcome is 503 too, because
//!    the retry finds the key complete or free. The layer never runs a handler again by itself.
//! 5. An event that this process runs already is in flight, without a call to the store.
//! 6. A request without a key (a handshake, a missing key that passes through) gets a transaction
//!    without a key when its handler borrows one. It is committed and rolled back by the same rules. So
//!    one handler serves deliveries and handshakes.

mod ledger;
mod lend;

pub use ledger::Transactional;
pub use lend::{DedupTx, TxHandle, TxUnavailable};
