//! What the SQL adapters share: validated identifiers, errors, and what a row means.

use std::fmt;

use crate::error::{ConfigError, Error, ErrorKind};

mod calls;
mod purge;
mod rows;
mod stored;

pub(super) use calls::{
    Answer, Answers, Call, Database, Failed, Kind, RowTerms, Rows, Taken, carry,
};
#[cfg(feature = "postgres")]
pub(super) use calls::{PARTS, Told, one_by_one};
pub(super) use purge::{Portion, Purging, grace_ms};
pub(super) use rows::{
    Grant, KeptRow, Recorded, Stored, at, completed, completed_before, open_places,
};
pub(super) use stored::{StoredByKey, after_claim, attach, duplicates, stored_by_key};

/// The name of a table or a schema: `[A-Za-z_][A-Za-z0-9_]{0,47}`, and none that SQLite keeps for
/// itself, so that it can be quoted as it is and the names derived from it fit every database.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identifier(String);

impl Identifier {
    /// A name that is surely an identifier.
    ///
    /// # Errors
    ///
    /// [`ConfigError::InvalidIdentifier`].
    ///
    /// ```
    /// use tower_dedup::adapter::Identifier;
    ///
    /// assert_eq!(Identifier::new("seen_events")?.as_str(), "seen_events");
    /// assert!(Identifier::new("seen; DROP TABLE users").is_err());
    /// # Ok::<(), tower_dedup::ConfigError>(())
    /// ```
    pub fn new(name: &str) -> Result<Self, ConfigError> {
        let mut chars = name.chars();
        let starts = chars.next().is_some_and(|char| char.is_ascii_alphabetic() || char == '_');
        let goes_on = chars.all(|char| char.is_ascii_alphanumeric() || char == '_');
        let reserved = name.to_ascii_lowercase().starts_with("sqlite_");
        if starts && goes_on && !reserved && name.len() <= 48 {
            Ok(Self(name.to_owned()))
        } else {
            Err(ConfigError::InvalidIdentifier)
        }
    }

    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Identifier {
    #[cfg(feature = "postgres")]
    pub(super) fn into_string(self) -> String {
        self.0
    }

    /// The table of an adapter that was told no other.
    pub(super) fn default_table() -> Self {
        Self("webhook_deliveries".to_owned())
    }
}

impl fmt::Display for Identifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Every failure of a SQL store leaves the outcome unknown, but for those that say otherwise:
/// `refused` knows the database's own codes for them.
pub(super) fn store_error(
    context: &'static str,
    error: sqlx::Error,
    refused: impl Fn(&dyn sqlx::error::DatabaseError) -> bool,
) -> Error {
    let kind = match &error {
        sqlx::Error::PoolTimedOut => ErrorKind::Timeout,
        sqlx::Error::ColumnDecode { .. }
        | sqlx::Error::ColumnNotFound(_)
        | sqlx::Error::Decode(_) => ErrorKind::Corrupt,
        sqlx::Error::Database(answer) if refused(&**answer) => ErrorKind::Refused,
        _ => ErrorKind::Unavailable,
    };
    Error::new(kind, context).with_source(error)
}
