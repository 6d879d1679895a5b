//! The classes of Redis's errors.
//!
//! A reply of the server that refuses a command is certain: nothing was stored. After an error of the
//! connection or a timeout the outcome is unknown.

use redis::{RedisError, ServerErrorKind};

use crate::error::{Error, ErrorKind};

/// Returns the error of an operation.
pub(super) fn store_error(context: &'static str, error: RedisError) -> Error {
    Error::new(kind(&error), context).with_source(error)
}

fn kind(error: &RedisError) -> ErrorKind {
    match error.kind() {
        _ if error.is_timeout() => ErrorKind::Timeout,
        _ if error.code() == Some("OOM") => ErrorKind::Full,
        redis::ErrorKind::Server(
            ServerErrorKind::ReadOnly
            | ServerErrorKind::BusyLoading
            | ServerErrorKind::ClusterDown
            | ServerErrorKind::MasterDown
            | ServerErrorKind::TryAgain
            | ServerErrorKind::NoPerm,
        ) => ErrorKind::Refused,
        _ => ErrorKind::Unavailable,
    }
}
