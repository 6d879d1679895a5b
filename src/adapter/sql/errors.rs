//! Errors of a SQL store.

use std::error::Error as StdError;
use std::sync::Arc;

use crate::error::{Error, ErrorKind};

/// Returns the error of a failed statement. Its outcome is unknown, unless `is_refusal` knows the
/// database's code for a statement that changed nothing.
pub(in crate::adapter) fn store_error(
    context: &'static str,
    error: sqlx::Error,
    is_refusal: impl Fn(&dyn sqlx::error::DatabaseError) -> bool,
) -> Error {
    let kind = match &error {
        sqlx::Error::PoolTimedOut => ErrorKind::Timeout,
        sqlx::Error::ColumnDecode { .. }
        | sqlx::Error::ColumnNotFound(_)
        | sqlx::Error::Decode(_) => ErrorKind::Corrupt,
        sqlx::Error::Database(error) if is_refusal(&**error) => ErrorKind::Refused,
        _ => ErrorKind::Unavailable,
    };
    Error::new(kind, context).with_source(error)
}

/// Returns the database's error that caused this one. The callers of a batch share their source.
pub(in crate::adapter) fn cause(error: &Error) -> Option<&sqlx::Error> {
    let source = error.source()?;
    let shared = source.downcast_ref::<Arc<dyn StdError + Send + Sync>>();
    source.downcast_ref().or_else(|| shared?.downcast_ref())
}
