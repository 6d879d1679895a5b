//! [`Failure`]: why a command could not answer, and its exit code.

use std::error::Error as _;
use std::time::Duration;

use tower_dedup::internals::in_one_line;
use tower_dedup::{BoxError, StoreError, StoreErrorKind, sqlx};
use tower_dedup_inbox::InboxError;

pub(crate) const NO_TABLE: &str = "the store has no table: run `tower-dedup migrate`";

pub(crate) const NO_INBOX: &str =
    "the database has no table of an inbox by this name: the service makes it by `Inbox::migrate`";

/// A usage error: an option, an argument, a file.
pub(crate) const USAGE: u8 = 2;
/// The store cannot be reached, or did not reply in time.
pub(crate) const UNAVAILABLE: u8 = 3;
/// The store refused the call.
pub(crate) const REFUSED: u8 = 4;

/// Why a command could not answer.
pub(crate) struct Failure {
    pub(crate) code: u8,
    pub(crate) message: String,
}

impl Failure {
    pub(crate) fn new(code: u8, error: impl Into<BoxError>) -> Self {
        Self { code, message: in_one_line(&*error.into()) }
    }

    pub(crate) fn usage(error: impl Into<BoxError>) -> Self {
        Self::new(USAGE, error)
    }

    pub(crate) fn own_store() -> Self {
        Self::usage(
            "this program has a store of its own: `doctor`, `inbox` and `migrate` know only those of tower-dedup",
        )
    }
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        let cause = error.source().and_then(|source| source.downcast_ref::<sqlx::Error>());
        if cause.is_some_and(is_without_table) {
            return Self::new(REFUSED, NO_TABLE);
        }
        let code = match error.kind() {
            StoreErrorKind::Unavailable | StoreErrorKind::Timeout | StoreErrorKind::Overloaded => {
                UNAVAILABLE
            }
            StoreErrorKind::Config => USAGE,
            _ => REFUSED,
        };
        Self::new(code, error)
    }
}

/// The command's own statements. A server that replies with an error has refused the call, unless it ends
/// or starts (class 57P).
impl From<sqlx::Error> for Failure {
    fn from(error: sqlx::Error) -> Self {
        if is_without_table(&error) {
            return Self::new(REFUSED, NO_TABLE);
        }
        let code = error.as_database_error().map(|error| error.code().unwrap_or_default());
        let is_refusal = code.is_some_and(|code| !code.starts_with("57P"));
        // sqlx's own texts for these contain no parameter of the connection.
        Self::new(if is_refusal { REFUSED } else { UNAVAILABLE }, error)
    }
}

impl From<InboxError> for Failure {
    fn from(error: InboxError) -> Self {
        let InboxError::Table(error) = error else { return Self::usage(error) };
        match error.downcast::<sqlx::Error>() {
            Ok(error) if is_without_table(&error) => Self::new(REFUSED, NO_INBOX),
            Ok(error) => Self::from(*error),
            Err(error) => Self::new(REFUSED, error),
        }
    }
}

/// Returns `true` if a table of Postgres was dropped.
fn is_without_table(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(sqlx::error::DatabaseError::code);
    code.is_some_and(|code| code == "42P01")
}

/// Ends this work after `--timeout`. sqlx itself waits without end for a lock or a silent network. Work
/// that has ended leaves its connection unusable.
pub(crate) async fn within<T>(
    timeout: Duration,
    work: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    let ended = tokio::time::timeout(timeout, work).await;
    ended.unwrap_or_else(|_| Err(Failure::new(UNAVAILABLE, "the store timed out")))
}
