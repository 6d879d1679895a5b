//! Adapters: the stores that hold the keys.
//!
//! 1. A store returns [`First`](ClaimReply::First) for a key to exactly one caller at a time, whatever the
//!    concurrency. It decides in one atomic step: never a check, then an insert.
//! 2. Every call carries a [`Token`] that the caller made. A call that is repeated with the same token
//!    returns the same reply, because the first reply may be lost.
//! 3. All times are the store's. Deadlines are computed in the store, after any wait for a lock or a
//!    connection. A key is expired when `expires_at <= now`.
//! 4. A live lease is never expired, evicted or purged. A purge deletes a key [`PURGE_GRACE`] after it
//!    has expired, and not before.
//! 5. A completion counts whoever holds the lease; renew and release need the token that holds it.
//!    A [release](DedupAdapter::release) is a fence: no earlier call with its token has an effect after it.
//! 6. Stored data comes with the duplicate, in the same call. A store may read it in a second step, if
//!    this step finds the row complete again. Otherwise the reply is [`InFlight`](ClaimReply::InFlight).
//! 7. A store that cannot answer returns an [`Error`](crate::Error). It never guesses.
//!
//! A third party implements [`DedupAdapter`] for layers and [`MaintenanceAdapter`] for the purger and
//! for operators, then runs the conformance suite (feature `conformance`): see
//! [the guide](crate::adapter::DedupAdapter).
//!
//! # Choosing a store at run time
//!
//! [`connect`] takes a URL and returns an `Arc<dyn `[`MaintenanceAdapter`]`>`, which is an adapter for
//! every layer:
//!
//! ```
//! # #[cfg(feature = "memory")]
//! # tokio::runtime::Runtime::new().unwrap().block_on(async {
//! use tower_dedup::{DedupLayer, adapter, provider};
//!
//! let store = adapter::connect("memory:").await?;
//! let layer = DedupLayer::new(provider::GITHUB, store.clone());
//! assert_eq!(store.stats().await?.rows, 0);
//! # let _ = layer;
//! # Ok::<(), tower_dedup::Error>(())
//! # }).unwrap();
//! ```

#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod background;
mod connect;
mod contract;
mod inspection;
#[cfg(feature = "memory")]
mod memory;
#[cfg(feature = "postgres")]
mod postgres;
mod purging;
#[cfg(feature = "redis")]
mod redis;
mod replies;
#[cfg(feature = "serde")]
mod serialize;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod sql;
#[cfg(feature = "sqlite")]
mod sqlite;
mod stored;
mod terms;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod transaction;

#[cfg(feature = "redis")]
pub use self::redis::{RedisAdapter, RedisClient, RedisOptions};
pub use connect::connect;
pub use contract::{Abilities, DedupAdapter, MaintenanceAdapter, PURGE_GRACE, StoreFuture};
pub use inspection::{Cursor, KeyState, ListFilter, Listing, Purged, Stats};
#[cfg(feature = "memory")]
pub use memory::{AtCapacity, MemoryAdapter};
#[cfg(feature = "postgres")]
pub use postgres::{PostgresAdapter, PostgresOptions};
pub use purging::Purging;
pub(crate) use purging::TIMEOUT as PURGE_TIMEOUT;
pub use replies::{ClaimReply, CompleteReply, Entry, EntryState, ForgetReply, RenewReply, Seen};
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub use sql::{Batching, Identifier};
#[cfg(feature = "sqlite")]
pub use sqlite::{SqliteAdapter, SqliteOptions};
pub use stored::{Fetch, StoredData, StoredResponse};
pub use terms::{CallTerms, Permanence, Token};
pub(crate) use terms::{DuplicateNote, EventTypes, Payloads};
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub use transaction::{OpenTransaction, Opened, TransactionAdapter};
