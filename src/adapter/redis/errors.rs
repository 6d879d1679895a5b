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
            let (_, inner) = detail.rsplit_once(": ")?;
            if inner.starts_with("The user executing the script can't") {
                return Some("NOPERM");
            }
            let inner = inner.trim_start_matches('-').split(' ').next()?;
            inner.bytes().all(|byte| byte.is_ascii_uppercase()).then_some(inner)
        }
        _ => Some(code),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_of_a_command_in_a_script_is_known_before_redis_7() {
        for (inner, expected) in [
            ("WRONGTYPE Operation against a key holding the wrong kind", ErrorKind::Corrupt),
            ("@user_script: 1: -OOM command not allowed when used memory", ErrorKind::Full),
            ("@user_script: 1: -READONLY You can't write against a read", ErrorKind::Refused),
            ("@user_script: 1: The user executing the script can't run", ErrorKind::Refused),
            ("attempt to perform arithmetic on a nil value", ErrorKind::Unavailable),
        ] {
            let reply = format!(
                "-ERR Error running script (call to f_d3c21d0c): @user_script:1: {inner}\r\n"
            );
            let reply = redis::parse_redis_value(reply.as_bytes()).unwrap();
            assert_eq!(kind(&reply.extract_error().unwrap_err()), expected, "{inner}");
        }
    }
}
