//! [`SqliteAdapter`]: keys in a SQLite file, shared by the processes of one machine.
//!
//! 1. Each statement is its own transaction, and the transactional ledger begins with
//!    `BEGIN IMMEDIATE`. So no transaction is upgraded from reading to writing, which fails at once
//!    whatever the timeout.
//! 2. A statement that writes runs in a task of its own: a caller that leaves its future unpolled
//!    delays no other caller.
//! 3. `expires_at` has an index, by which a purge finds its rows.

mod adapter;
mod completion;
mod errors;
mod inspection;
mod options;
mod params;
mod session;
mod statements;
mod store;
mod write_lock;

pub use adapter::SqliteAdapter;
pub use options::SqliteOptions;
