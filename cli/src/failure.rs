//! [`Failure`]: why a command could not answer, and its exit code.

use std::error::Error as _;
use std::io;
use std::time::Duration;

use tower_dedup::internals::in_one_line;
use tower_dedup::{BoxError, StoreError, StoreErrorKind, sqlx};
use tower_dedup_inbox::InboxError;

/// The end of each message that a migration helps.
pub(crate) const MIGRATE: &str = ": run `tower-dedup migrate`";
pub(crate) const NO_TABLE: &str =
    "the store has no table of this version: run `tower-dedup migrate`";

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

    pub(crate) fn file(name: &str, error: &io::Error) -> Self {
        Self::usage(format!("{name}: {error}"))
    }

    pub(crate) fn needs_migration(&self) -> bool {
        self.message.ends_with(MIGRATE)
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
        let is_older = error.to_string().starts_with("the Postgres schema is of an older version");
        if is_older || cause.is_some_and(is_without_table) {
            return Self::new(REFUSED, NO_TABLE);
        }
        let code = match error.kind() {
            StoreErrorKind::Unavailable if cause.is_some_and(is_damage) => REFUSED,
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
        // sqlx's own texts for the others contain no parameter of the connection.
        let Some(reply) = error.as_database_error() else { return Self::new(UNAVAILABLE, error) };
        let is_refusal = !reply.code().unwrap_or_default().starts_with("57P");
        Self::new(if is_refusal { REFUSED } else { UNAVAILABLE }, reply.message())
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

/// Returns `true` for the results `SQLITE_NOTADB` and `SQLITE_CORRUPT`.
fn is_damage(error: &sqlx::Error) -> bool {
    const MESSAGES: [&str; 2] = ["file is not a database", "database disk image is malformed"];
    error.as_database_error().is_some_and(|reply| MESSAGES.contains(&reply.message()))
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
    what: &str,
    work: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    let ended = tokio::time::timeout(timeout, work).await;
    ended.unwrap_or_else(|_| Err(Failure::new(UNAVAILABLE, format!("{what}: the store timed out"))))
}
