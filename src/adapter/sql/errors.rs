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

#[cfg(all(test, feature = "sqlite"))]
mod tests {
    use std::error::Error as _;

    use sqlx::Connection;

    use super::*;

    #[tokio::test]
    async fn only_a_refusal_says_that_a_statement_changed_nothing() {
        let mut database = sqlx::SqliteConnection::connect("sqlite::memory:").await.unwrap();
        let mut refused =
            async || sqlx::query("nonsense").execute(&mut database).await.unwrap_err();
        for (error, is_refusal, kind) in [
            (sqlx::Error::PoolTimedOut, true, StoreErrorKind::Timeout),
            (sqlx::Error::ColumnNotFound("key".to_owned()), true, StoreErrorKind::Corrupt),
            (sqlx::Error::Decode("no number".into()), true, StoreErrorKind::Corrupt),
            (sqlx::Error::PoolClosed, true, StoreErrorKind::Unavailable),
            (refused().await, true, StoreErrorKind::Refused),
            (refused().await, false, StoreErrorKind::Unavailable),
        ] {
            let text = error.to_string();
            let error = store_error("testing", error, |_| is_refusal);
            assert_eq!(error.kind(), kind, "{text}");
            assert_eq!(error.is_unknown(), kind != StoreErrorKind::Refused, "{text}");
            assert_eq!(error.source().map(ToString::to_string), Some(text));
        }
    }
}
