//! [`SqliteAdapter`]: keys in a SQLite file, shared by the processes of one machine.
//!
//! 1. One writer at a time in this process, in the order of arrival; other processes are waited
//!    for by SQLite's busy timeout. Every change is *one* statement, so nothing is ever upgraded
//!    from reading to writing, which fails at once however long the timeout is. What wants to be
//!    written while another is goes out [together](SqliteAdapter::batching), in one commit.
//! 2. Duplicates are read and never written: they are answered while another process holds the
//!    file, while it is full, and while it is read-only.
//! 3. The clock is SQLite's, read inside the statement, after any wait for the lock.
//! 4. A connection that this adapter opens runs in WAL mode at `synchronous = FULL`: what is
//!    committed survives a power cut. A pool of yours is warned about if it does less. The log of a
//!    file that the adapter opens grows to 16 MiB before it is carried over, for writers stand still
//!    meanwhile (`wal_autocheckpoint` of your pool is yours).
//! 5. The schema is made on first use, or by [`migrate`](SqliteAdapter::migrate), safely from many
//!    processes at once; a failed migration is tried again by the next call. Where the table is
//!    there already, no right to create one is needed. A table that is dropped is made again by the
//!    call that misses it.
//! 6. What changes the file runs in a task of its own: a caller that leaves its future unpolled holds
//!    nobody up.
//! 7. A file that is deleted or replaced while it is open is noticed within a second (on Unix), and
//!    every call is refused until it is back: two processes would take one key, each in its own file.
//!
//! A file on a network file system is no place for this: SQLite's locks do not work there.
//!
//! # Example
//!
//! ```
//! # tokio::runtime::Runtime::new().unwrap().block_on(async {
//! # let dir = tempfile::tempdir().unwrap();
//! # let url = format!("sqlite://{}", dir.path().join("dedup.db").display());
//! use std::time::Duration;
//! use tower_dedup::adapter::{CallTerms, Claimed, DedupAdapter, SqliteAdapter, Token};
//! use tower_dedup::DedupKey;
//!
//! let keys = [DedupKey::new("acme", "evt_1").unwrap()];
//! let month = Duration::from_secs(30 * 86_400);
//!
//! let adapter = SqliteAdapter::connect(&url).await?; // "sqlite://dedup.db"
//! let first = adapter.claim(&keys, &CallTerms::on_claim(Token::random(), month)).await?;
//! assert_eq!(first, [Claimed::first(1, false)]);
//!
//! // After a restart, or from another process:
//! let adapter = SqliteAdapter::connect(&url).await?;
//! let second = adapter.claim(&keys, &CallTerms::on_claim(Token::random(), month)).await?;
//! assert!(matches!(second[..], [Claimed::Duplicate(_)]));
//! # Ok::<(), tower_dedup::Error>(())
//! # }).unwrap();
//! ```

mod change;
mod file;
mod maintain;
mod rows;
mod schema;
mod store;
mod transaction;
mod turn;

pub use store::SqliteAdapter;
