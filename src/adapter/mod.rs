//! Adapters: the stores that hold the keys.
//!
//! This module has the adapters and their options. [`contract`] is for authors of stores, and
//! [`maintenance`] for operators: statistics, lists, `forget`.
//!
//! # Choosing a store at run time
//!
//! [`connect`] takes a URL and returns an
//! `Arc<dyn `[`MaintenanceAdapter`](maintenance::MaintenanceAdapter)`>`, which is an adapter for
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
//! # Ok::<(), tower_dedup::StoreError>(())
//! # }).unwrap();
//! ```

pub(crate) mod around;
mod completion;
mod connect;
pub mod contract;
pub mod maintenance;
#[cfg(feature = "memory")]
mod memory;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub(crate) mod own_completion;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "redis")]
mod redis;
mod replies;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod sql;
#[cfg(feature = "sqlite")]
mod sqlite;
mod stored;
mod terms;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub(crate) mod transaction;

#[cfg(feature = "redis")]
pub use self::redis::{RedisAdapter, RedisClient, RedisOptions};
pub use connect::connect;
#[cfg(feature = "memory")]
pub use memory::MemoryAdapter;
#[cfg(feature = "postgres")]
pub use postgres::{PostgresAdapter, PostgresOptions};
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub use sql::Purging;
#[cfg(feature = "sqlite")]
pub use sqlite::{SqliteAdapter, SqliteOptions};
pub(crate) use terms::{DuplicateNote, KeyedTerms, Terms};
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub use transaction::CompletionDatabase;
