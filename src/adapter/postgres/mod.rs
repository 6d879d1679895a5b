//! [`PostgresAdapter`]: keys in a Postgres table, shared by all processes of a service.
//!
//! 1. Outside the transactional ledger, each statement is its own transaction. A first claim needs one statement, a
//!    duplicate two, and a takeover three. While half of the keys are known, claims read first.
//! 2. A statement waits 100 ms for a row that another transaction holds. A batch then goes on without the key. To
//!    be in flight at once, a transaction of this crate holds advisory locks, 63 at most.
//! 3. No error is recognised by its text. A unique violation never happens.

mod adapter;
mod connections;
mod errors;
mod inspection;
mod options;
mod params;
mod schema;
mod session;
mod statements;
mod store;
mod transaction;

pub use adapter::PostgresAdapter;
pub use options::PostgresOptions;
