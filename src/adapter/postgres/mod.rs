//! [`PostgresAdapter`]: keys in a Postgres table, shared by all processes of a service.
//!
//! 1. Outside the transactional ledger, each statement is its own transaction. A first claim needs
//!    one statement, a duplicate two, and a takeover three. While half of the keys are known,
//!    claims read first.
//! 2. No error is recognised by its text. A unique violation never happens.

mod adapter;
mod completion;
mod connections;
mod errors;
mod inspection;
mod options;
mod params;
mod schema;
mod senders;
mod statements;
mod store;

pub use adapter::PostgresAdapter;
pub use options::PostgresOptions;
