//! Adapters: where keys are kept.
//!
//! 1. A store answers [`First`](Claimed::First) for a key to exactly one caller at a time, whatever
//!    the concurrency, in one atomic step: never a check, then an insert.
//! 2. Every call carries a [`Token`] that the caller made. A call repeated with the same token
//!    answers as it did the first time, so an answer that got lost can be asked for again.
//! 3. All times are the store's: deadlines are computed there, after any wait for a lock or a
//!    connection. A key is expired when `expires_at <= now`.
//! 4. A live lease is never expired, evicted or purged. A purge deletes a key [`PURGE_GRACE`] after it
//!    has expired, and not before.
//! 5. A completion is recorded whatever became of the lease; renew and release need the token that
//!    holds it.
//! 6. A store that cannot answer says so with an [`Error`]. It never guesses.
//!
//! A third party implements [`DedupAdapter`] for the `on_arrival` ledger, [`LeaseAdapter`] for the
//! `lease` ledger too, and [`MaintenanceAdapter`] for purging and looking things up; then runs the
//! conformance suite (feature `conformance`) against it.
//!
//! # Choosing a store at run time
//!
//! [`connect`] takes a URL and answers an `Arc<dyn `[`DynAdapter`]`>`, which is an adapter like any
//! other:
//!
//! ```
//! # #[cfg(feature = "memory")]
//! # tokio::runtime::Runtime::new().unwrap().block_on(async {
//! use tower_dedup::{DedupLayer, adapter, provider};
//!
//! let store = adapter::connect("memory:").await?;
//! let layer = DedupLayer::new(provider::GITHUB, store.clone());
//! # let _ = layer;
//! # Ok::<(), tower_dedup::Error>(())
//! # }).unwrap();
//! ```

use std::sync::Arc;

use crate::error::{ConfigError, Error};

mod contract;
mod dynamic;
#[cfg(feature = "memory")]
mod memory;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod sql;
#[cfg(feature = "sqlite")]
mod sqlite;
mod stored;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod transaction;

pub(crate) use contract::Payloads;
pub use contract::{
    CallTerms, Claimed, Completed, DedupAdapter, Entry, EntryState, Forgotten, LeaseAdapter,
    MaintenanceAdapter, PURGE_GRACE, Recorded, Released, Renewed, Seen, Token,
};
pub use dynamic::DynAdapter;
#[cfg(feature = "memory")]
pub use memory::{AtCapacity, MemoryAdapter};
#[cfg(feature = "postgres")]
pub use postgres::PostgresAdapter;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub use sql::{Batching, Identifier};
#[cfg(feature = "sqlite")]
pub use sqlite::SqliteAdapter;
pub use stored::{Fetch, Recall, StoredData, StoredResponse};
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub use transaction::{OpenTransaction, Opened, TransactionAdapter};

/// Connects to the store that a URL names.
///
/// | URL | adapter | feature |
/// |---|---|---|
/// | `memory:` | `MemoryAdapter` with its default capacity | `memory` |
/// | `sqlite://path/to/file.db` | `SqliteAdapter` | `sqlite` |
/// | `postgres://user@host/database` | `PostgresAdapter` | `postgres` |
///
/// # Errors
///
/// [`ErrorKind::Config`](crate::ErrorKind::Config) with a [`ConfigError`] as its source for a URL
/// that no adapter of this build answers to, and the errors of the adapter's own `connect`: a
/// Postgres URL names one host.
pub async fn connect(url: &str) -> Result<Arc<dyn DynAdapter>, Error> {
    let Some((scheme, _)) = url.split_once(':') else { return Err(ConfigError::InvalidUrl.into()) };
    match scheme {
        #[cfg(feature = "memory")]
        "memory" => Ok(Arc::new(MemoryAdapter::new())),
        #[cfg(not(feature = "memory"))]
        "memory" => Err(disabled("memory")),
        #[cfg(feature = "sqlite")]
        "sqlite" => Ok(Arc::new(SqliteAdapter::connect(url).await?)),
        #[cfg(not(feature = "sqlite"))]
        "sqlite" => Err(disabled("sqlite")),
        #[cfg(feature = "postgres")]
        "postgres" | "postgresql" => Ok(Arc::new(PostgresAdapter::connect(url).await?)),
        #[cfg(not(feature = "postgres"))]
        "postgres" | "postgresql" => Err(disabled("postgres")),
        other => Err(ConfigError::UnknownScheme(other.to_owned()).into()),
    }
}

#[cfg(not(all(feature = "memory", feature = "sqlite", feature = "postgres")))]
fn disabled(scheme: &'static str) -> Error {
    ConfigError::FeatureDisabled { scheme, feature: scheme }.into()
}
