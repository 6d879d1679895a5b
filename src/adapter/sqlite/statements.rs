//! The statements of the SQLite adapter: one file each, in the folder `sql`.
//!
//! `sql::row` defines the states of a row. Times are integers, in milliseconds
//! since the Unix epoch.
//!
//! 1. `?1` is a JSON array of rows: [`rows_json`](super::params::rows_json) for statements that
//!    write, [`keys_json`](super::params::keys_json) for the others.
//! 2. Every key is searched by the primary key, also in a table that ANALYZE saw tiny.

use std::sync::Arc;

use super::super::maintenance::PURGE_GRACE;
use super::super::sql::statement::{render, statements};
use super::super::sql::{COUNTED, PORTION};

/// The version of the schema that this code writes.
pub(super) const VERSION: i64 = 1;

/// The store's clock, in milliseconds. It does not advance within one statement.
const NOW: &str = "CAST(round(unixepoch('subsec') * 1000) AS INTEGER)";

/// When the event of a claim was handled: now, or at the time in `?1`, which is not later.
const HANDLED_AT: &str = "min(coalesce(value ->> 10, {now}), {now})";

/// The state of a row, with the names of [`KeyState`](super::super::maintenance::KeyState). `now`
/// is a column.
const STATE: &str = "CASE
    WHEN completed_at IS NULL AND token IS NOT NULL AND lease_until > now THEN 'in-flight'
    WHEN expires_at <= now THEN 'expired'
    WHEN completed_at IS NOT NULL THEN 'complete'
    WHEN token IS NOT NULL THEN 'lapsed'
    ELSE 'released'
  END";

/// Whether a claim under a lease finds the row of its own token.
const IS_OWN: &str =
    "(excluded.completed_at IS NULL AND t.completed_at IS NULL AND t.token IS excluded.token)";

/// The columns of stored data, and their values in `?1`.
const DATA: [&str; 2] = [
    ", payload_sha256, response_status, response_headers, response_body",
    ", unhex(value ->> 6), value ->> 7, value ->> 8, unhex(value ->> 9)",
];

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
        // Quoted: a name may be a word of SQL.
        let (table, now) = (("table", &*format!("\"{name}\"")), ("now", NOW));
        let lease_until = format!("{NOW} + (value ->> 4)");
        let handled_at = render(HANDLED_AT, &[now]);
        let rows = |now, attempts, lease_until, completed_at, [data, stored]: [&str; 2]| {
            let values = [
                table,
                ("now", now),
                ("attempts", attempts),
                ("lease_until", lease_until),
                ("completed_at", completed_at),
                ("data", data),
                ("values", stored),
            ];
            render(include_str!("sql/rows.sql"), &values)
        };
        let values = [
            ("name", name),
            table,
            now,
            ("leased_rows", &*rows(NOW, "1", &lease_until, "NULL", [""; 2])),
            ("claimed_rows", &*rows(NOW, "1", "NULL", NOW, DATA)),
            ("past_rows", &*rows(&handled_at, "1", "NULL", &handled_at, DATA)),
            ("complete_rows", &*rows(NOW, "0", "NULL", NOW, DATA)),
            ("take", &*render(include_str!("sql/take.sql"), &[now, ("is_own", IS_OWN)])),
            ("version_table", &*format!("\"{name}_schema\"")),
            ("version", &*VERSION.to_string()),
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
}
