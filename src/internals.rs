//! For the command and the tests of this repository. Not a part of the API: every version may change it.

#[cfg(feature = "testing")]
use std::sync::Arc;

#[cfg(any(feature = "postgres", feature = "sqlite"))]
use crate::adapter::Identifier;
#[cfg(feature = "redis")]
use crate::adapter::RedisAdapter;
#[cfg(feature = "testing")]
use crate::adapter::TransactionAdapter;
#[cfg(feature = "testing")]
use crate::adapter::contract::DedupAdapter;
#[cfg(feature = "postgres")]
use crate::adapter::{PostgresAdapter, PostgresOptions};
#[cfg(feature = "sqlite")]
use crate::adapter::{SqliteAdapter, SqliteOptions};
#[cfg(feature = "redis")]
use crate::error::Error;
#[cfg(feature = "testing")]
use crate::key::{KeyExtractor, KeyPart};
#[cfg(feature = "testing")]
use crate::ledger::{Lease, OnArrival, Transactional};
use crate::observe;

#[cfg(feature = "testing")]
pub use crate::ledger::contract::{Begin, BeginContext, Claim, HandlerSuccess};

/// Returns the error and its causes in one line.
#[must_use]
pub fn in_one_line(error: &(dyn std::error::Error + 'static)) -> String {
    observe::chain(error)
}

/// The version of the table that `migrate` makes, as the version table stores it.
#[cfg(feature = "postgres")]
pub const POSTGRES_SCHEMA_VERSION: i32 = PostgresAdapter::SCHEMA_VERSION;

/// The version of the table that `migrate` makes, as the version table stores it.
#[cfg(feature = "sqlite")]
pub const SQLITE_SCHEMA_VERSION: i64 = SqliteAdapter::SCHEMA_VERSION;

/// Returns the schema, if it is set, and the table.
#[cfg(feature = "postgres")]
#[must_use]
pub fn postgres_table(options: &PostgresOptions) -> (Option<&str>, &Identifier) {
    (options.schema_name(), options.table_name())
}

/// Returns the table.
#[cfg(feature = "sqlite")]
#[must_use]
pub fn sqlite_table(options: &SqliteOptions) -> &Identifier {
    options.table_name()
}

/// Sends a command without a key, such as `INFO`, to every primary, all at once. Returns the address
/// (`host:port`) and the reply of each.
///
/// # Errors
///
/// A primary does not reply. A refusal is a reply.
#[cfg(feature = "redis")]
pub async fn ask_primaries(
    adapter: &RedisAdapter,
    command: &redis::Cmd,
) -> Result<Vec<(String, Result<redis::Value, Error>)>, Error> {
    adapter.ask_primaries(command, "asking a primary").await
}

/// Returns the extractor of [`DedupLayer::idempotency_key`](crate::DedupLayer::idempotency_key).
#[cfg(feature = "testing")]
#[must_use]
pub fn idempotency_key(scope: KeyPart) -> KeyExtractor {
    KeyExtractor::idempotency_key(scope)
}

/// Returns a ledger for a test that stops a delivery at every point.
#[cfg(feature = "testing")]
pub fn lease(adapter: impl DedupAdapter) -> Arc<Lease> {
    Arc::new(Lease::new(Arc::new(adapter)))
}

/// Returns a ledger for a test that stops a delivery at every point.
#[cfg(feature = "testing")]
pub fn on_arrival(adapter: impl DedupAdapter) -> Arc<OnArrival> {
    Arc::new(OnArrival::new(Arc::new(adapter)))
}

/// Returns a ledger for a test that stops a delivery at every point.
#[cfg(feature = "testing")]
pub fn transactional(adapter: impl TransactionAdapter) -> Arc<Transactional> {
    Arc::new(Transactional::new(Arc::new(adapter)))
}
