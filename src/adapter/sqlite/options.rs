//! [`SqliteOptions`], and URLs.

use std::str::FromStr;
use std::time::Duration;

use sqlx::sqlite::SqliteConnectOptions;

use super::super::purging::Purging;
use super::super::sql::Batching;
use super::super::sql::{Identifier, check_timeout, take_identifiers};
use crate::error::ConfigError;

/// How a [`SqliteAdapter`](super::SqliteAdapter) works. Set before the adapter exists.
#[derive(Debug, Clone)]
#[must_use]
pub struct SqliteOptions {
    pub(super) table: Identifier,
    pub(super) batching: Batching,
    pub(super) purging: Purging,
    pub(super) write_lock_timeout: Duration,
}

impl SqliteOptions {
    /// Returns the defaults: the table `webhook_deliveries`, [`Batching::new`], [`Purging::new`], and 5 s
    /// to wait for the write lock.
    pub fn new() -> Self {
        Self {
            table: Identifier::default_table(),
            batching: Batching::new(),
            purging: Purging::new(),
            write_lock_timeout: Duration::from_secs(5),
        }
    }

    /// Sets the table's name. The default is `webhook_deliveries`.
    pub fn table(mut self, table: Identifier) -> Self {
        self.table = table;
        self
    }

    /// Sets how concurrent calls are sent together.
    ///
    /// There is one lane, on the connection that writes. Lookups are sent together as well.
    pub fn batching(mut self, batching: Batching) -> Self {
        self.batching = batching;
        self
    }

    /// Sets how often expired keys are deleted, in the background; [`Purging::off`] deletes nothing.
    ///
    /// A portion of 1,000 keys is one write among those of deliveries, in the order of their begin.
    pub fn purging(mut self, purging: Purging) -> Self {
        self.purging = purging;
        self
    }

    /// Sets how long a transactional delivery waits for those before it, which run one at a time. The
    /// default is 5 s. After that its answer is 503.
    ///
    /// Every other write to the file in this process waits as long, and is then refused. So is a
    /// handler that holds the transaction and calls the adapter beside it.
    ///
    /// A time below 1 ms is invalid.
    pub fn write_lock_timeout(self, timeout: Duration) -> Self {
        Self { write_lock_timeout: timeout, ..self }
    }

    pub(super) fn check(&self) -> Result<(), ConfigError> {
        self.batching.check()?;
        self.purging.check()?;
        check_timeout("write_lock_timeout", self.write_lock_timeout)
    }

    pub(crate) fn table_name(&self) -> &Identifier {
        &self.table
    }

    /// Reads a URL: the name of the table into these options, everything else into sqlx's. For a pool
    /// of your own on the file that [`connect_with`](super::SqliteAdapter::connect_with) opens.
    ///
    /// # Errors
    ///
    /// [`ConfigError`], for a URL that `connect_with` refuses. The error does not contain the URL.
    pub fn read_url(mut self, url: &str) -> Result<(Self, SqliteConnectOptions), ConfigError> {
        let (url, [table]) = take_identifiers(url, ["dedup_table"])?;
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
