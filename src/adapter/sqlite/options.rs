//! [`SqliteOptions`], and URLs.

use std::str::FromStr;
use std::time::Duration;

use sqlx::sqlite::SqliteConnectOptions;

use super::super::sql::{Purging, SqlOptions, check_timeout, take_names};
use crate::error::ConfigError;

/// How a [`SqliteAdapter`](super::SqliteAdapter) works. Set before the adapter exists.
///
/// The table's name is quoted in every statement. It matches `[A-Za-z_][A-Za-z0-9_]{0,47}`, and
/// does not begin with `sqlite_`. [`connect_with`](super::SqliteAdapter::connect_with) reports an
/// invalid option; without it, the first call does.
#[derive(Debug, Clone)]
#[must_use]
pub struct SqliteOptions {
    pub(crate) sql: SqlOptions,
    pub(super) write_lock_timeout: Duration,
}

impl SqliteOptions {
    /// Returns the defaults: the table `webhook_deliveries`, [`Purging::new`], and 5 s to wait for
    /// the write lock.
    pub fn new() -> Self {
        Self { sql: SqlOptions::new(), write_lock_timeout: Duration::from_secs(5) }
    }

    /// Sets the table's name. The default is `webhook_deliveries`.
    pub fn table(mut self, table: &str) -> Self {
        table.clone_into(&mut self.sql.table);
        self
    }

    /// Sets how often expired keys are deleted, in the background; [`Purging::off`] deletes
    /// nothing.
    pub fn purging(mut self, purging: Purging) -> Self {
        self.sql.purging = purging;
        self
    }

    /// Sets how long a transactional delivery waits for the transactional deliveries before it,
    /// which run one at a time. The default is 5 s. After that, its answer is 503.
    ///
    /// Every other write to the file in this process waits for the same time, and is then refused.
    /// So is a call to the adapter by a handler that holds the transaction.
    ///
    /// A time below 1 ms or above a day is invalid.
    pub fn write_lock_timeout(self, timeout: Duration) -> Self {
        Self { write_lock_timeout: timeout, ..self }
    }

    /// Returns these options, if each is valid.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] for the first option with an invalid value. Without this call, it is the
    /// error of every call to the store.
    pub fn checked(self) -> Result<Self, ConfigError> {
        self.check()?;
        Ok(self)
    }

    pub(super) fn check(&self) -> Result<(), ConfigError> {
        self.sql.check()?;
        check_timeout("write_lock_timeout", self.write_lock_timeout)
    }

    /// Reads a URL: the name of the table into these options, everything else into sqlx's. Public
    /// for the command, which has connections of its own.
    ///
    /// # Errors
    ///
    /// [`ConfigError`], for a URL that [`connect_with`](super::SqliteAdapter::connect_with)
    /// refuses. The error does not contain the URL.
    #[doc(hidden)]
    pub fn read_url(mut self, url: &str) -> Result<(Self, SqliteConnectOptions), ConfigError> {
        let (url, [table]) = take_names(url, ["dedup_table"])?;
        if let Some(table) = table {
            self = self.table(table);
        }
        let in_memory = url.contains(":memory:") || url.contains("mode=memory");
        if !url.starts_with("sqlite:") || in_memory {
            return Err(ConfigError::url());
        }
        let connect = SqliteConnectOptions::from_str(&url).map_err(|_| ConfigError::url())?;
        if connect.get_filename().as_os_str().is_empty() {
            return Err(ConfigError::url());
        }
        Ok((self, connect))
    }
}

impl Default for SqliteOptions {
    fn default() -> Self {
        Self::new()
    }
}
