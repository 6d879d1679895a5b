//! The statements of the SQLite adapter: one file each, in the folder `sql`.
//!
//! [`sql::row`](super::super::sql::row) defines the states of a row. Times are integers, in milliseconds
//! since the Unix epoch.
//!
//! 1. `?1` is a JSON array of rows: [`rows_json`](super::params::rows_json) for statements that write,
//!    [`keys_json`](super::params::keys_json) for the others.
//! 2. Every key is searched by the primary key, also in a table that ANALYZE saw tiny.

use std::sync::Arc;

use super::super::inspect::PURGE_GRACE;
use super::super::sql::Identifier;
use super::super::sql::inspection::{COUNTED, PORTION};
use super::super::sql::statement::{render, statements};
use super::super::stored::Fetch;

/// The version of the schema that this code writes.
pub(super) const VERSION: i64 = 1;

/// The store's clock, in milliseconds. It does not advance within one statement.
const NOW: &str = "CAST(round(unixepoch('subsec') * 1000) AS INTEGER)";

/// The state of a row, with the names of [`KeyState`](super::super::inspect::KeyState). `now` is a column.
const STATE: &str = "CASE
    WHEN completed_at IS NULL AND token IS NOT NULL AND lease_until > now THEN 'in-flight'
    WHEN expires_at <= now THEN 'expired'
    WHEN completed_at IS NOT NULL THEN 'complete'
    WHEN token IS NOT NULL THEN 'lapsed'
    ELSE 'released'
  END";

statements! {
    /// Every statement, with the table's name. A field is named after its file.
    pub(super) struct Statements {
        claim_insert,
        claim_upsert,
        claim_complete_insert,
        claim_complete_upsert,
        renew,
        complete,
        complete_held,
        completion,
        completion_check,
        release,
        release_complete,
        forget,
        read,
        read_digest,
        get,
        purge,
        list,
        stats,
        bytes,
        tables,
        version,
        create_table,
        create_index,
        create_version_table,
        create_version,
    }
}

impl Statements {
    pub(super) fn new(name: &Identifier) -> Self {
        // Quoted: a name may be a word of SQL.
        let values = [
            ("name", name.as_str()),
            ("table", &*format!("\"{name}\"")),
            ("version_table", &*format!("\"{name}_schema\"")),
            ("version", &*VERSION.to_string()),
            ("now", NOW),
            ("state", STATE),
            ("grace_ms", &*PURGE_GRACE.as_millis().to_string()),
            ("counted", &*COUNTED.to_string()),
            ("portion", &*PORTION.to_string()),
        ];
        Self::from_files(|file| render(file, &values).into())
    }

    /// Returns the statements that make the schema.
    pub(super) fn create(&self) -> [&Arc<str>; 4] {
        [&self.create_table, &self.create_index, &self.create_version_table, &self.create_version]
    }

    /// Returns the statement that reads rows with as much of their stored data.
    pub(super) fn read(&self, fetch: Fetch) -> &Arc<str> {
        match fetch {
            Fetch::Nothing => &self.read,
            Fetch::Digest => &self.read_digest,
            Fetch::DigestAndResponse => &self.get,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::sql::statement::check_golden;
    use super::*;

    #[test]
    fn golden() {
        let statements = Statements::new(&Identifier::default_table());
        check_golden("src/adapter/sqlite/sql/golden.txt", &statements.all());
    }
}
