//! For the command and the tests of this repository. Not a part of the API: every version may
//! change it.

#[cfg(any(feature = "postgres", feature = "sqlite"))]
use std::sync::Arc;

#[cfg(feature = "postgres")]
use crate::adapter::PostgresOptions;
#[cfg(any(feature = "postgres", feature = "redis", feature = "sqlite"))]
use crate::adapter::contract::StoredResponse;
#[cfg(feature = "sqlite")]
use crate::adapter::{SqliteAdapter, SqliteOptions};
#[cfg(any(feature = "postgres", feature = "redis", feature = "sqlite"))]
use crate::error::StoreError;

/// Returns the error and its causes in one line.
#[must_use]
pub fn in_one_line(error: &(dyn std::error::Error + 'static)) -> String {
    crate::observe::records::chain(error)
}

/// Returns `true` for the characters that log records escape.
#[must_use]
pub fn is_hidden(char: char) -> bool {
    crate::key::is_hidden(char)
}

/// Returns the schema, if it is set, and the table.
#[cfg(feature = "postgres")]
#[must_use]
pub fn postgres_table(options: &PostgresOptions) -> (Option<&str>, &str) {
    (options.schema.as_deref(), &options.sql.table)
}

/// Returns `true` if the file has the table of this version. Makes nothing.
///
/// # Errors
///
/// The file cannot be read.
#[cfg(feature = "sqlite")]
pub async fn has_sqlite_table(adapter: &SqliteAdapter) -> Result<bool, StoreError> {
    adapter.has_table().await
}

/// Sends a command without a key, such as `INFO`, to every primary, all at once. Returns the
/// address (`host:port`) and the reply of each.
///
/// # Errors
///
/// A primary does not reply. A refusal is a reply.
#[cfg(feature = "redis")]
pub async fn ask_primaries(
    adapter: &crate::adapter::RedisAdapter,
    command: &redis::Cmd,
) -> Result<Vec<(String, Result<redis::Value, StoreError>)>, StoreError> {
    adapter.ask_primaries(command, "asking a primary").await
}

/// Returns the extractor of [`DedupLayer::idempotency_key`](crate::DedupLayer::idempotency_key).
#[cfg(feature = "testing")]
#[must_use]
pub fn idempotency_key(scope: crate::key::KeyPart) -> crate::key::KeyExtractor {
    crate::key::KeyExtractor::idempotency_key(scope)
}

/// Returns the headers of a stored response as the stores of this crate hold them.
#[cfg(any(feature = "postgres", feature = "redis", feature = "sqlite"))]
#[must_use]
pub fn stored_headers(response: &StoredResponse) -> String {
    response.headers_json()
}

/// Reads a stored response from the parts that the stores of this crate hold.
///
/// # Errors
///
/// The status or the headers are unreadable.
#[cfg(any(feature = "postgres", feature = "redis", feature = "sqlite"))]
pub fn stored_response(
    status: i64,
    headers: &str,
    body: Vec<u8>,
) -> Result<StoredResponse, StoreError> {
    StoredResponse::from_stored(status, headers, body)
}

/// Returns the options with smaller bounds of the queue: how many calls a batch takes, and how many
/// wait.
#[cfg(feature = "postgres")]
pub fn with_postgres_bounds(
    mut options: PostgresOptions,
    batch: usize,
    waiting: usize,
) -> PostgresOptions {
    let bounds = &mut options.sql.bounds;
    (bounds.max_batch_keys, bounds.max_queued_keys) = (batch, waiting);
    options
}

/// Returns the options with smaller bounds of the queue: how many calls a batch takes, and how many
/// wait.
#[cfg(feature = "sqlite")]
pub fn with_sqlite_bounds(
    mut options: SqliteOptions,
    batch: usize,
    waiting: usize,
) -> SqliteOptions {
    let bounds = &mut options.sql.bounds;
    (bounds.max_batch_keys, bounds.max_queued_keys) = (batch, waiting);
    options
}

/// Purges as the SQL adapters do in the background, until it is dropped.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub async fn purge(
    purging: crate::adapter::Purging,
    adapter: Arc<impl crate::adapter::maintenance::MaintenanceAdapter>,
) {
    let never = tokio_util::sync::CancellationToken::new();
    purging.run(|| Some(Arc::clone(&adapter)), never).await;
}

/// Returns the statements of the adapter by the names of their files, for tests of their plans.
#[cfg(all(feature = "postgres", feature = "testing"))]
#[must_use]
pub fn postgres_statements(
    adapter: &crate::adapter::PostgresAdapter,
) -> Vec<(&'static str, Arc<str>)> {
    adapter.statements()
}

/// Returns the statements of the adapter by the names of their files, for tests of their plans.
#[cfg(all(feature = "sqlite", feature = "testing"))]
#[must_use]
pub fn sqlite_statements(adapter: &SqliteAdapter) -> Vec<(&'static str, Arc<str>)> {
    adapter.statements()
}

/// Returns what the tables of the guide say of a sender: its largest body, and when it retries.
#[cfg(feature = "testing")]
#[must_use]
pub fn body_and_retries(preset: &crate::provider::Preset) -> (Option<usize>, String) {
    (preset.max_body, format!("{:?}", preset.retries))
}
