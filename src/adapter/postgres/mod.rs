//! [`PostgresAdapter`]: keys in a Postgres table, shared by all processes of a service.
//!
//! 1. Every call is a statement, its own transaction, or a part of one: calls that arrive while a
//!    statement is on the wire go out [together](PostgresAdapter::batching). A first claim inserts.
//!    A duplicate is told by a second statement, which reads; while most keys are known, they are
//!    read first. Neither writes: no WAL, no wait for a disk. A key that is taken over takes a third.
//! 2. A key that somebody's open transaction holds is in flight after 100 ms (`lock_timeout`, set
//!    for the statement only; 25 to 250 ms in a batch, which then goes on without it): nobody waits
//!    with a connection in hand for a handler to end. To tell it at once, a transaction of ours holds
//!    advisory locks, 64 at most.
//! 3. The clock is Postgres's.
//! 4. What is complete or recorded is on disk, and on the disk of a synchronous standby where there is
//!    one, whatever `synchronous_commit` a role was given.
//! 5. Nothing is recognised by the text of an error; a unique violation never happens.
//! 6. The schema is made on first use, or by [`migrate`](PostgresAdapter::migrate), safely from many
//!    processes at once; a failed migration is tried again by the next call. Where the table is
//!    there already, a role that may SELECT, INSERT, UPDATE and DELETE is enough. Statements name the
//!    table with its schema. Should it go away, the next call looks for it anew.
//! 7. After a failover, nothing is answered by a server that is in recovery.
//!
//! What a role needs, PgBouncer, pool sizes and how to look an event up: see the
//! [operations guide](crate::guide::operations).
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

mod change;
mod connections;
mod ending;
mod maintain;
mod patience;
mod plans;
mod rows;
mod schema;
mod server_session;
mod statements;
mod store;
mod storm;
mod transaction;
mod url;

pub use store::PostgresAdapter;
