//! [`Failure`]: why an attempt of a call has failed, and the classes of Redis's errors.
//!
//! A reply of the server that refuses a command is certain: nothing was stored. After an error of the
//! connection or a timeout the outcome is unknown.

use redis::{RedisError, ServerErrorKind};

use super::client::RedisClient;
use crate::error::{ConfigError, Error, ErrorKind};

/// Why an attempt of a call has failed.
#[derive(Debug, Clone)]
pub(super) enum Failure {
    /// The server refused it, or the connection has failed.
    Redis(RedisError),
    /// The server may not be used. Nothing was sent.
    Unfit(ConfigError),
    /// The script ran, and too few replicas have its write.
    TooFewReplicas,
    /// No reply came in time.
    TimedOut,
    /// The adapter is closed. Nothing was sent.
    Closed,
}

impl From<RedisError> for Failure {
    fn from(error: RedisError) -> Self {
        Self::Redis(error)
    }
}

/// What a failure says of its connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Doubt {
    /// The connection carries nothing any more.
    Broken,
    /// The connection may be silent, or another server may be the primary.
    Silent,
    /// The connection works, and the primaries of the cluster may be others now.
    Moved,
}

impl Failure {
    /// Returns `true` if the same call may succeed within its time.
    pub(super) fn is_worth_repeating(&self) -> bool {
        match self {
            Self::Redis(error) => {
                is_of_the_connection(error)
                    // A redirection is followed; one that is left comes from slots that are moving.
                    || has_code(error, &["CLUSTERDOWN", "TRYAGAIN", "MOVED", "ASK"])
                    || has_code(error, &["LOADING", "READONLY", "MASTERDOWN"])
            }
            Self::TimedOut => true,
            Self::Unfit(_) | Self::TooFewReplicas | Self::Closed => false,
        }
    }

    pub(super) fn is_unfit(&self) -> bool {
        matches!(self, Self::Unfit(_))
    }

    /// Returns what the failure says of its connection, if it says anything.
    pub(super) fn doubt(&self, client: &RedisClient) -> Option<Doubt> {
        match self {
            // Sentinels know whether the replicas have another primary.
            Self::TooFewReplicas => client.is_sentinel().then_some(Doubt::Silent),
            Self::Redis(error) if has_code(error, &["NOREPLICAS"]) => {
                client.is_sentinel().then_some(Doubt::Silent)
            }
            _ if !self.is_worth_repeating() => None,
            // The client of a cluster connects again, and looks for the slots, by itself.
            Self::Redis(error) if client.is_cluster() && !is_of_the_connection(error) => {
                Some(Doubt::Moved)
            }
            Self::Redis(error) if !client.is_cluster() && is_of_the_connection(error) => {
                Some(Doubt::Broken)
            }
            _ => Some(Doubt::Silent),
        }
    }

    pub(super) fn into_error(self, context: &'static str) -> Error {
        match self {
            Self::Redis(error) => Error::new(kind(&error), context).with_source(error),
            Self::Unfit(reason) => Error::new(ErrorKind::Refused, context).with_source(reason),
            Self::TooFewReplicas => Error::new(ErrorKind::Unavailable, context)
                .with_source("too few replicas have the write"),
            Self::TimedOut => Error::new(ErrorKind::Timeout, context),
            Self::Closed => {
                Error::new(ErrorKind::Unavailable, context).with_source("the adapter is closed")
            }
        }
    }
}

/// Returns `true` if the connection is of no use any more. The outcome of the call is unknown.
fn is_of_the_connection(error: &RedisError) -> bool {
    matches!(
        error.kind(),
        redis::ErrorKind::Io
            | redis::ErrorKind::Parse
            | redis::ErrorKind::ClusterConnectionNotFound
            | redis::ErrorKind::MasterNameNotFoundBySentinel
    )
}

fn has_code(error: &RedisError, codes: &[&str]) -> bool {
    code(error).is_some_and(|code| codes.contains(&code))
}

/// Returns `true` if the server does not know the script that a call names by its hash.
pub(super) fn is_unknown_script(error: &RedisError) -> bool {
    error.kind() == redis::ErrorKind::Server(ServerErrorKind::NoScript)
}

/// Returns `true` for an error of a command or a script itself, not of the server's state.
pub(super) fn is_of_the_command(error: &RedisError) -> bool {
    code(error) == Some("ERR")
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
fn code(error: &RedisError) -> Option<&str> {
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
