//! [`Failure`]: why an attempt of a call has failed, and the classes of Redis's errors.
//!
//! A refusal of the server is certain: nothing was stored. Only the codes of [`REFUSALS`] are
//! refusals. After any other error the outcome is unknown: a proxy that has lost the reply to a
//! script answers by an error of its own.

use redis::{RedisError, RetryMethod, ServerErrorKind};
use tokio::time::error::Elapsed;

use super::client::RedisClient;
use crate::error::{ConfigError, StoreError, StoreErrorKind};

/// The codes by which a server refuses a script before its write. `OOM` is one too, with a kind of
/// its own.
#[rustfmt::skip]
const REFUSALS: [&str; 16] = [
    "READONLY", "NOPERM", "NOAUTH", "WRONGPASS", "LOADING", "MASTERDOWN", "CLUSTERDOWN", "MOVED", "ASK", "TRYAGAIN",
    "CROSSSLOT", "NOSCRIPT", "BUSY", "MISCONF", "NOREPLICAS", "EXECABORT",
];

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
    /// The next connection did not open in time. Nothing was sent.
    Unsent,
    /// The adapter is closed. Nothing was sent.
    Closed,
}

impl From<RedisError> for Failure {
    fn from(error: RedisError) -> Self {
        Self::Redis(error.detail().and_then(error_in_script).unwrap_or(error))
    }
}

impl From<Elapsed> for Failure {
    fn from(_: Elapsed) -> Self {
        Self::TimedOut
    }
}

impl Failure {
    /// Returns `true` if the same call may succeed within its time.
    pub(super) fn is_worth_repeating(&self) -> bool {
        match self {
            // `redis` would connect again.
            Self::Redis(error) if error.kind() == redis::ErrorKind::AuthenticationFailed => false,
            // A redirection is followed; one that is left comes from slots that are moving.
            Self::Redis(error) => !matches!(error.retry_method(), RetryMethod::NoRetry),
            Self::TimedOut | Self::Unsent => true,
            Self::Unfit(_) | Self::TooFewReplicas | Self::Closed => false,
        }
    }

    /// Returns `true` if the connection may be silent, or another server may be the primary.
    pub(super) fn is_doubt(&self, client: &RedisClient) -> bool {
        match self {
            // Sentinels know whether the replicas have another primary.
            Self::TooFewReplicas => client.is_sentinel(),
            Self::Redis(error) if error.code() == Some("NOREPLICAS") => client.is_sentinel(),
            failure => failure.is_worth_repeating(),
        }
    }

    /// Returns `true` if the server does not know the script that a call names by its hash.
    pub(super) fn is_unknown_script(&self) -> bool {
        matches!(self, Self::Redis(error) if error.kind() == ServerErrorKind::NoScript.into())
    }

    pub(super) fn into_error(self, context: &'static str) -> StoreError {
        let error = |kind| StoreError::new(kind, context);
        let unavailable = |why: &'static str| error(StoreErrorKind::Unavailable).with_source(why);
        match self {
            Self::Redis(reason) => error(kind(&reason)).with_source(reason),
            Self::Unfit(reason) => error(StoreErrorKind::Refused).with_source(reason),
            Self::TooFewReplicas => unavailable("too few replicas have the write"),
            Self::TimedOut | Self::Unsent => error(StoreErrorKind::Timeout),
            Self::Closed => unavailable("the adapter is closed"),
        }
    }
}

fn kind(error: &RedisError) -> StoreErrorKind {
    match error.code() {
        _ if error.is_timeout() => StoreErrorKind::Timeout,
        Some("OOM") => StoreErrorKind::Full,
        // A key of ours that another program wrote as a list or as a hash.
        Some("WRONGTYPE") => StoreErrorKind::Corrupt,
        Some(code) if REFUSALS.contains(&code) => StoreErrorKind::Refused,
        // No connection was opened.
        None if error.kind() == redis::ErrorKind::AuthenticationFailed => StoreErrorKind::Refused,
        _ => StoreErrorKind::Unavailable,
    }
}

/// Returns the error of a command in a script. Before 7.0 it follows places in the script's error:
/// `Error running script (call to f_…): @user_script:1: @user_script: 1: -OOM command not …`.
fn error_in_script(detail: &str) -> Option<RedisError> {
    let (_, mut error) = detail.strip_prefix("Error running script")?.split_once(": ")?;
    while let Some(place) = error.strip_prefix("@user_script:") {
        (_, error) = place.trim_start().split_once(": ")?;
    }
    let error = match error.trim_start_matches('-') {
        refused if refused.starts_with("The user executing the script can't") => "NOPERM",
        error => error,
    };
    let is_code = error.split(' ').next()?.bytes().all(|byte| byte.is_ascii_uppercase());
    let reply = redis::parse_redis_value(format!("-{error}\r\n").as_bytes());
    reply.ok().filter(|_| is_code)?.extract_error().err()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_code_of_the_list_is_a_refusal() {
        let refusals = REFUSALS.map(|code| (code, StoreErrorKind::Refused));
        let others = ["ERR", "UNKILLABLE", "NOTBUSY", "INPROG", "upstream", "readonly", "Redis"];
        let others = others.map(|code| (code, StoreErrorKind::Unavailable));
        let named = [("OOM", StoreErrorKind::Full), ("WRONGTYPE", StoreErrorKind::Corrupt)];
        for (code, kind) in refusals.into_iter().chain(others).chain(named) {
            let reply = redis::parse_redis_value(format!("-{code} it says\r\n").as_bytes());
            let error = Failure::from(reply.unwrap().extract_error().unwrap_err()).into_error("");
            let is_refusal = matches!(kind, StoreErrorKind::Refused | StoreErrorKind::Full);
            assert_eq!((error.kind(), error.is_unknown()), (kind, !is_refusal), "{code}");
        }
    }

    /// As Redis 6.2.5 replies.
    #[test]
    fn error_of_a_command_in_a_script_is_known_before_redis_7() {
        for (inner, expected) in [
            ("WRONGTYPE Operation against a key holding the wrong kind", StoreErrorKind::Corrupt),
            ("@user_script: 1: -OOM command not allowed when used memory", StoreErrorKind::Full),
            ("@user_script: 1: -READONLY You can't write against a read", StoreErrorKind::Refused),
            (
                "@user_script: 1: -MISCONF Errors writing to the AOF file: No space left on device",
                StoreErrorKind::Refused,
            ),
            ("@user_script: 1: The user executing the script can't run", StoreErrorKind::Refused),
            ("attempt to perform arithmetic on a nil value", StoreErrorKind::Unavailable),
        ] {
            let reply = format!(
                "-ERR Error running script (call to f_d3c21d0c): @user_script:1: {inner}\r\n"
            );
            let reply = redis::parse_redis_value(reply.as_bytes()).unwrap();
            let failure = Failure::from(reply.extract_error().unwrap_err());
            assert_eq!(failure.into_error("").kind(), expected, "{inner}");
        }
    }
}
