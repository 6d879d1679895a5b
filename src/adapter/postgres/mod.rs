//! [`PostgresAdapter`]: keys in a Postgres table, shared by all processes of a service.
//!
//! 1. Outside the transactional ledger, each statement is its own transaction. A first claim needs one
//!    statement, which inserts. A duplicate needs a second, which reads the row. A takeover needs a
//!    third. A completion, a renewal and a release need one. While half of the keys are known, claims
//!    read first. A duplicate writes nothing: no WAL, no wait for a disk. A stored response is read by
//!    one more statement, on a connection of the pool. Calls that arrive while a statement is in
//!    progress are sent [together](PostgresOptions::batching).
//! 2. A key that an open transaction holds is in flight after 100 ms (`lock_timeout`, set for the
//!    statement only). A batch waits 25 to 250 ms, then goes on without the key. So no call waits with a
//!    connection for a handler to end. To be in flight at once, a transaction of this crate holds
//!    advisory locks, 64 at most.
//! 3. The clock is Postgres's.
//! 4. A complete key is on disk, and on the disk of a synchronous standby where there is one, whatever
//!    `synchronous_commit` a role has.
//! 5. No error is recognised by its text. A unique violation never happens.
//! 6. The first call makes the schema, or [`migrate`](PostgresAdapter::migrate), safely from many
//!    processes at once; a failed migration is tried again by the next call. Where the table exists, a
//!    role with SELECT, INSERT, UPDATE and DELETE is enough. Statements name the table with its schema.
//!    If the table is dropped, the next call looks for it again.
//! 7. After a failover, a server in recovery answers no claim.
//!
//! The guide has the rights of a role and PgBouncer ([postgres](crate::guide::postgres)), pool sizes
//! ([sizing](crate::guide::sizing)), and how to look up an event ([incident](crate::guide::incident)).
//!
//! # Example
//!
//! ```no_run
//! # async fn example() -> Result<(), tower_dedup::Error> {
//! use tower_dedup::adapter::PostgresAdapter;
//! use tower_dedup::{DedupLayer, provider};
//!
//! let adapter = PostgresAdapter::connect("postgres://app@localhost/app").await?;
//! let layer = DedupLayer::new(provider::GITHUB, adapter);
//! # let _ = layer;
//! # Ok(())
//! # }
//! ```

mod abandoned;
mod adapter;
mod connections;
mod dialect;
mod errors;
mod inspection;
mod options;
mod params;
mod schema;
mod server_session;
mod statements;
mod store;
mod transaction;
mod transaction_end;
mod tuning;
mod walk;

pub use adapter::PostgresAdapter;
pub use options::PostgresOptions;
