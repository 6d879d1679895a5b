//! [`Failure`]: why an attempt of a call has failed, and what follows from it.

use redis::{RedisError, ServerErrorKind};

use super::super::errors::{code, store_error};
use crate::error::{ConfigError, Error, ErrorKind};

/// Why an attempt has failed.
#[derive(Debug, Clone)]
pub(super) enum Failure {
    /// The server refused it, or the connection has failed.
    Redis(RedisError),
    /// The connection has failed for good: it is the user's, and does not connect again.
    Broken(RedisError),
    /// The server may not be used. Nothing was sent.
    Unfit(ConfigError),
    /// The script ran, and too few replicas have its write.
    TooFewReplicas,
    /// The time of the call is up.
    TimedOut,
    /// A task that worked for this call has ended without a result.
    Interrupted,
    /// The adapter is closed. Nothing was sent.
    Closed,
}

impl From<RedisError> for Failure {
    fn from(error: RedisError) -> Self {
        Self::Redis(error)
    }
}

impl Failure {
    /// Returns `true` if the same call may succeed within its time.
    pub(super) fn is_worth_repeating(&self) -> bool {
        match self {
            Self::Redis(error) => is_of_the_connection(error) || is_transient_refusal(error),
            Self::Interrupted => true,
            Self::Broken(_)
            | Self::Unfit(_)
            | Self::TooFewReplicas
            | Self::TimedOut
            | Self::Closed => false,
        }
    }

    pub(super) fn into_error(self, context: &'static str) -> Error {
        match self {
            Self::Redis(error) | Self::Broken(error) => store_error(context, error),
            Self::Unfit(reason) => Error::new(ErrorKind::Refused, context).with_source(reason),
            Self::TooFewReplicas => Error::new(ErrorKind::Unavailable, context)
                .with_source("too few replicas have the write"),
            Self::TimedOut => Error::new(ErrorKind::Timeout, context),
            Self::Interrupted => Error::new(ErrorKind::Unavailable, context)
                .with_source("the task of the connection has ended"),
            Self::Closed => {
                Error::new(ErrorKind::Unavailable, context).with_source("the adapter is closed")
            }
        }
    }
}

/// Returns `true` if the connection is of no use any more. The outcome of the call is unknown.
pub(super) fn is_of_the_connection(error: &RedisError) -> bool {
    matches!(
        error.kind(),
        redis::ErrorKind::Io
            | redis::ErrorKind::Parse
            | redis::ErrorKind::ClusterConnectionNotFound
            | redis::ErrorKind::MasterNameNotFoundBySentinel
    )
}

fn is_transient_refusal(error: &RedisError) -> bool {
    // A redirection is followed; one that is left comes from slots that are moving.
    let codes = ["LOADING", "READONLY", "CLUSTERDOWN", "TRYAGAIN", "MASTERDOWN", "MOVED", "ASK"];
    code(error).is_some_and(|code| codes.contains(&code))
}

/// Returns `true` if the server is not the one to write to, or not yet.
pub(super) fn is_of_another_master(error: &RedisError) -> bool {
    let codes = ["LOADING", "READONLY", "MASTERDOWN", "NOREPLICAS"];
    code(error).is_some_and(|code| codes.contains(&code))
}

pub(super) fn is_unknown_script(error: &RedisError) -> bool {
    error.kind() == redis::ErrorKind::Server(ServerErrorKind::NoScript)
}

/// Returns `true` for the reply of a server before 7.0 to a script that begins with its flags.
pub(super) fn is_unreadable_script(error: &RedisError) -> bool {
    error.code() == Some("ERR")
        && error.detail().is_some_and(|detail| detail.contains("compiling script"))
}
