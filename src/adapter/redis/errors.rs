//! The classes of Redis's errors.
//!
//! A reply of the server that refuses a command is certain: nothing was stored. After an error of the
//! connection or a timeout the outcome is unknown.

use redis::RedisError;

use crate::error::{Error, ErrorKind};

/// Returns the error of an operation.
pub(super) fn store_error(context: &'static str, error: RedisError) -> Error {
    Error::new(kind(&error), context).with_source(error)
}

fn kind(error: &RedisError) -> ErrorKind {
    match error.kind() {
        _ if error.is_timeout() => ErrorKind::Timeout,
        redis::ErrorKind::Server(_) | redis::ErrorKind::Extension => match code(error) {
            Some("OOM") => ErrorKind::Full,
            // A key of ours that another program wrote as a list or as a hash.
            Some("WRONGTYPE") => ErrorKind::Corrupt,
            // An error of the script itself: a command of it may have been executed.
            Some("ERR") | None => ErrorKind::Unavailable,
            Some(_) => ErrorKind::Refused,
        },
        redis::ErrorKind::AuthenticationFailed => ErrorKind::Refused,
        _ => ErrorKind::Unavailable,
    }
}

/// Returns the code of a refusal: `READONLY`, `OOM`, `NOPERM`.
pub(super) fn code(error: &RedisError) -> Option<&str> {
    let code = error.code()?;
    // Before 7.0, the error of a command in a script is a part of the script's error:
    // `ERR Error running script (call to f_…): @user_script:1: -OOM command not allowed …`.
    match error.detail() {
        Some(detail) if code == "ERR" && detail.starts_with("Error running script") => {
            let (_, inner) = detail.rsplit_once(": -")?;
            inner.split(' ').next()
        }
        _ => Some(code),
    }
}
