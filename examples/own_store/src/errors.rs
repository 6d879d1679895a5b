//! What errors of the driver mean.
//!
//! Numbers: <https://mariadb.com/kb/en/mariadb-error-codes/>.

use sqlx::mysql::MySqlDatabaseError;
use tower_dedup::{StoreError, StoreErrorKind};

/// The server undid the statement: a duplicate key in a race, rights, an unknown table or column, a read-only server, a
/// lock, a deadlock, a changed row, a cancelled statement, a value that fits no column.
const REFUSED: [u16; 21] = [
    1020, 1044, 1045, 1049, 1054, 1062, 1064, 1142, 1143, 1146, 1205, 1213, 1264, 1290, 1317, 1366,
    1406, 1690, 1792, 1836, 1969,
];
/// The disk or the table is full.
const FULL: [u16; 2] = [1021, 1114];
/// The server opens no more connections.
const OVERLOADED: [u16; 2] = [1040, 1203];

/// Returns the error of a call.
///
/// It is a refusal only if the server has said so. After every other error the statement may have been executed, and the
/// layer releases the key.
pub(crate) fn store_error(context: &'static str, error: sqlx::Error) -> StoreError {
    let kind = match &error {
        sqlx::Error::Database(_) => match number(&error).unwrap_or_default() {
            refused if REFUSED.contains(&refused) => StoreErrorKind::Refused,
            full if FULL.contains(&full) => StoreErrorKind::Full,
            many if OVERLOADED.contains(&many) => StoreErrorKind::Overloaded,
            // 1053, for example: the server shuts down.
            _ => StoreErrorKind::Unavailable,
        },
        // No connection was free, so nothing was sent.
        sqlx::Error::PoolTimedOut => StoreErrorKind::Overloaded,
        sqlx::Error::Configuration(_) => StoreErrorKind::Config,
        sqlx::Error::ColumnDecode { .. }
        | sqlx::Error::Decode(_)
        | sqlx::Error::ColumnNotFound(_) => StoreErrorKind::Corrupt,
        _ => StoreErrorKind::Unavailable,
    };
    StoreError::new(kind, context).with_source(error)
}

/// Returns the server's number of an error.
pub(crate) fn number(error: &sqlx::Error) -> Option<u16> {
    let error = error.as_database_error()?.try_downcast_ref::<MySqlDatabaseError>()?;
    Some(error.number())
}

/// Returns `true` if another statement or transaction was in the way: a lock, a deadlock, a row that has changed. The
/// server undid the statement, so that it can be sent again.
pub(crate) fn is_contended(error: &sqlx::Error) -> bool {
    matches!(number(error), Some(1205 | 1213 | 1020))
}
