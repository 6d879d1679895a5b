//! The statements of the SQLite adapter: one file each, in the folder `sql`.
//!
//! `sql::row` defines the states of a row. Times are integers, in milliseconds
//! since the Unix epoch.
//!
//! 1. `?1` is a JSON array of rows: [`rows_json`](super::params::rows_json) for statements that
//!    write, [`keys_json`](super::params::keys_json) for the others.
//! 2. Every key is searched by the primary key, also in a table that ANALYZE saw tiny.

use std::sync::Arc;

use super::super::sql::statement::{render, statements};

/// The version of the schema that this code writes.
pub(super) const VERSION: i64 = 1;

/// The store's clock, in milliseconds. It does not advance within one statement.
const NOW: &str = "CAST(round(unixepoch('subsec') * 1000) AS INTEGER)";

statements! {
    /// Every statement, with the table's name. A field is named after its file.
    pub(super) struct SqliteStatements {
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
        forget,
        read,
        get,
        get_many,
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

impl SqliteStatements {
    pub(super) fn new(name: &str) -> Self {
        let values = [
            ("name", name),
            // Quoted: a name may be a word of SQL.
            ("table", &*format!("\"{name}\"")),
            ("version_table", &*format!("\"{name}_schema\"")),
            ("version", &*VERSION.to_string()),
            ("now", NOW),
        ];
        Self::from_files(|file| render(file, &values).into())
    }

    /// Returns the statements that make the schema.
    pub(super) fn create(&self) -> [&Arc<str>; 4] {
        [&self.create_table, &self.create_index, &self.create_version_table, &self.create_version]
    }
}
