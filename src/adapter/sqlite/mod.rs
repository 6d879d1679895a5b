//! [`SqliteAdapter`]: keys in a SQLite file, shared by the processes of one machine.
//!
//! 1. One writer at a time in this process, in the order of arrival; SQLite's busy timeout waits for
//!    other processes. Each statement is its own transaction, and the transactional ledger begins with
//!    `BEGIN IMMEDIATE`. So no transaction is upgraded from reading to writing, which fails at once
//!    whatever the timeout. Calls that wait for the writer are sent [together](SqliteOptions::batching).
//! 2. Duplicates are read and never written: they are answered while another process holds the
//!    file, while the disk is full, and while the file is read-only. A stored response is read by one
//!    more statement, for at most two callers at the same time.
//! 3. The clock is SQLite's, read inside the statement, after any wait for the lock.
//! 4. A connection that this adapter opens runs in WAL mode at `synchronous = FULL`: a commit survives a
//!    power cut. A pool of yours with less causes a warning. The WAL of a file that the adapter opens
//!    grows to 16 MiB between checkpoints, because writers stand still during one
//!    (`wal_autocheckpoint` of your pool is yours).
//! 5. The first call makes the schema, or [`migrate`](SqliteAdapter::migrate), safely from many
//!    processes at once; a failed migration is tried again by the next call. Where the table exists, no
//!    right to create one is needed. A dropped table is made again by the call that misses it.
//! 6. A statement that writes runs in a task of its own: a caller that leaves its future unpolled delays
//!    no other caller.
//! 7. A file that is deleted or replaced while it is open is noticed within a second (on Unix). Every
//!    call is refused until the file is back, because two processes would take one key, each in its own
//!    file. A removed `-wal` or `-shm` is not noticed: never remove them while a process runs. SQLite
//!    does not remove them either, because the adapter holds one connection outside the pool.
//! 8. No index covers `expires_at`. A purge walks through the primary key and reads 20,000 rows in a step.
//!    Only the deletion takes the write lock, and lets every other writer of the process go first.
//! 9. `list` and `stats` read 20,000 and 100,000 rows at most, and wait for no writer. A larger file is
//!    estimated from a sample of its ids' prefixes. A state with few rows is estimated coarsely, or not
//!    found at all: `list` finds every key. The first 10,000 namespaces are counted.
//!
//! Do not use a file on a network file system: SQLite's locks do not work there.
//!
//! # Example
//!
//! ```
//! # tokio::runtime::Runtime::new().unwrap().block_on(async {
//! # let dir = tempfile::tempdir().unwrap();
//! # let url = format!("sqlite://{}", dir.path().join("dedup.db").display());
//! use std::time::Duration;
//! use tower_dedup::DedupKey;
//! use tower_dedup::adapter::{CallTerms, Claimed, DedupAdapter, SqliteAdapter, Token};
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

mod adapter;
mod dialect;
mod errors;
mod file;
mod inspection;
mod options;
mod params;
mod place;
mod purge;
mod sample;
mod statements;
mod store;
mod transaction;
mod write_lock;

pub use adapter::SqliteAdapter;
pub use options::SqliteOptions;
