//! What Postgres's errors mean.
//!
//! SQLSTATEs: <https://www.postgresql.org/docs/current/errcodes-appendix.html>.

use sqlx::error::DatabaseError;
use sqlx::postgres::{PgDatabaseError, PgSeverity};

use super::super::sql::statement;
use crate::error::{StoreError, StoreErrorKind};

pub(super) fn store_error(context: &'static str, error: sqlx::Error) -> StoreError {
    // A prepared statement exists, or does not exist: sqlx names its statements by connection, and
    // an older pooler gives the session to another client.
    if has_code(&error, &["42P05", "26000"]) {
        let text = "sending a statement: the pooler does not keep prepared statements \
                    (PgBouncer needs version 1.21 and max_prepared_statements above 0)";
        return StoreError::new(StoreErrorKind::Config, text).with_source(error);
    }
    statement::store_error(context, error, is_refusal)
}

/// The classes of SQLSTATEs by which the server refuses a statement, which it then rolls back, and
/// 57014 (cancelled).
const REFUSALS: [&str; 12] =
    ["22", "23", "25", "28", "3D", "3F", "40", "42", "53", "54", "55", "57014"];

/// Returns `true` if a statement with this error changed nothing. After any other error the outcome
/// is unknown: the connection or the server ends (08, 57P, XX), or a pooler has lost the server
/// (58, or a code of its own). Two codes of the classes are no refusals: 40003 says that the
/// outcome is unknown, and a server that dies with a COMMIT in its log (PANIC) says so with any
/// code.
fn is_refusal(error: &dyn DatabaseError) -> bool {
    let Some(code) = error.code() else { return false };
    !panics(error) && code != "40003" && REFUSALS.iter().any(|class| code.starts_with(class))
}

/// Returns `true` if the server ends all its sessions and recovers, as it does if the disk of its
/// log is full.
fn panics(error: &dyn DatabaseError) -> bool {
    let error = error.try_downcast_ref::<PgDatabaseError>();
    error.is_some_and(|error| matches!(error.severity(), PgSeverity::Panic))
}

/// Returns `true` if the SQLSTATE begins with one of these.
fn has_code(error: &sqlx::Error, codes: &[&str]) -> bool {
    let code = error.as_database_error().and_then(DatabaseError::code);
    code.is_some_and(|code| codes.iter().any(|start| code.starts_with(start)))
}

/// Returns `true` if an open transaction holds a row.
pub(super) fn is_locked(error: &sqlx::Error) -> bool {
    has_code(error, &["55P03"])
}

/// Returns `true` if one row may have caused the error: its value (22, 23, 54), its lock (55P03,
/// 40), or a trigger (P0). All other errors meet every row.
pub(super) fn is_row_error(error: &sqlx::Error) -> bool {
    has_code(error, &["55P03", "22", "23", "40", "54", "P0"])
}

/// Returns `true` after a serialization failure or a deadlock: the same statement may succeed at
/// once.
pub(super) fn is_conflict(error: &sqlx::Error) -> bool {
    has_code(error, &["40001", "40P01"])
}

/// Returns `true` if the connection is gone, as all connections of a pool are after a restart of
/// the server.
pub(super) fn is_broken(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Io(_) | sqlx::Error::Protocol(_) | sqlx::Error::WorkerCrashed => true,
        sqlx::Error::Database(error) if panics(&**error) => true,
        error => has_code(error, &["57P", "08"]),
    }
}

/// Returns `true` if a statement needs another connection: its own is gone, or leads to a server
/// that takes no writes, as after a failover.
pub(super) fn is_gone(error: &sqlx::Error) -> bool {
    is_broken(error) || has_code(error, &["25006"])
}

/// Returns the error of an abandoned statement.
pub(super) fn timed_out() -> sqlx::Error {
    sqlx::Error::Io(std::io::ErrorKind::TimedOut.into())
}

/// Returns `true` if a statement was abandoned, or the kernel timed its connection out.
pub(super) fn is_timed_out(error: &sqlx::Error) -> bool {
    matches!(error, sqlx::Error::Io(error) if error.kind() == std::io::ErrorKind::TimedOut)
}
