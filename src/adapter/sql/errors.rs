//! Errors of a SQL store.

use crate::error::{StoreError, StoreErrorKind};

/// Returns the error of a failed statement. Its outcome is unknown, unless `is_refusal` knows the
/// database's code for a statement that changed nothing.
pub(in crate::adapter) fn store_error(
    context: &'static str,
    error: sqlx::Error,
    is_refusal: impl Fn(&dyn sqlx::error::DatabaseError) -> bool,
) -> StoreError {
    let kind = match &error {
        sqlx::Error::PoolTimedOut => StoreErrorKind::Timeout,
        sqlx::Error::ColumnDecode { .. }
        | sqlx::Error::ColumnNotFound(_)
        | sqlx::Error::Decode(_) => StoreErrorKind::Corrupt,
        sqlx::Error::Database(error) if is_refusal(&**error) => StoreErrorKind::Refused,
        _ => StoreErrorKind::Unavailable,
    };
    StoreError::new(kind, context).with_source(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_that_is_no_refusal_has_an_unknown_outcome() {
        for (error, kind) in [
            (sqlx::Error::PoolTimedOut, StoreErrorKind::Timeout),
            (sqlx::Error::ColumnNotFound("key".to_owned()), StoreErrorKind::Corrupt),
            (sqlx::Error::Decode("no number".into()), StoreErrorKind::Corrupt),
            (sqlx::Error::PoolClosed, StoreErrorKind::Unavailable),
        ] {
            let error = store_error("testing", error, |_| true);
            assert_eq!((error.kind(), error.is_unknown()), (kind, true));
        }
    }
}
