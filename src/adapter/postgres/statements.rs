//! The statements of the Postgres adapter: one file each, in the folder `sql`.
//!
//! [`sql::row`](super::super::sql::row) defines the states of a row.
//!
//! 1. `key` is the first 16 bytes of the SHA-256 over namespace, line feed and id (a namespace holds no
//!    control character). The names stand beside it to be read; no index covers them.
//! 2. Every statement waits for a row for [`LOCK_TIMEOUT`] at most, except `release_complete` if it is sent alone.
//!    Statements hold row locks until they end, but an open transaction may hold them as long as a handler
//!    runs. The table's lock, which DDL takes, has no such bound.
//! 3. Every statement is as durable as `synchronous_commit = on`, whatever a role or a database is set
//!    to; except claims under a lease, if the server has no synchronous standby.
//! 4. The clock is `clock_timestamp()`, which advances while a statement waits. An insertion reads it once a row, before
//!    it waits for a row that is then rolled back: no longer than rule 2 allows.
//! 5. Rows are inserted and locked in the order of `key`, so that two batches never deadlock. Insertions
//!    have no ORDER BY: the arrays are sorted, and `unnest` keeps their order. So does the nested loop with the one
//!    row of `settings`, which no parallel worker shares, because `set_config` is not parallel safe.
//! 6. `key` and `expires_at` are the only indexed columns. An update that leaves `expires_at` as it is, such as a
//!    renewal or a completion, is a HOT update if its page has room.
//! 7. Statements that run with every delivery do not join the table. Postgres plans the others again
//!    each time, because a plan for any number of keys looks too expensive, and planning takes five
//!    times as long as inserting a row.
//! 8. Every statement takes any number of keys, and one retention and lease, because the calls of a batch have
//!    equal terms. A batch of one call is the same statement.
//!
//! `$1` to `$4` are the arrays of keys, namespaces, ids and tokens. `$5` is the retention in milliseconds. In
//! statements that set a lease, `$6` is the lease in milliseconds. In statements that store data, `$6` to `$9` are
//! arrays of the payload's SHA-256 and of the response's status, headers and body. In both, the array of the
//! events' types follows. An array without a value is null as a whole, which `unnest` fills with nulls. The
//! versions that were read come last. `get` and `forget` take one key.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::super::inspect::PURGE_GRACE;
use super::super::sql::batch::TRIES;
use super::super::sql::inspection::{COUNTED, PORTION};
use super::super::sql::statement::{render, statements};
use super::super::stored::Fetch;
use super::params::MAX_MS;
use super::schema::{TableName, literal};
use crate::key::MAX_ID_LEN;

/// The start of every statement: `pg_stat_activity` and the server's log show whose it is.
pub(super) const TAG: &str = "/* tower-dedup */ ";

/// How long a statement waits for a row that an open transaction holds: longer than a COMMIT over a slow disk or to
/// a standby takes, and shorter than a sender waits.
pub(super) const LOCK_TIMEOUT: &str = "100ms";

statements! {
    /// Every statement, with the table's name. A field is named after its file.
    pub(super) struct Statements {
        claim_insert,
        claim_existing,
        claim_complete_insert,
        renew,
        complete,
        release,
        release_complete,
        forget,
        read,
        read_digest,
        read_response,
        get,
        is_locked,
        purge,
        stats,
        size,
        list,
        version,
        encrypted,
        tx_begin,
        tx_claim_insert,
        tx_claim_existing,
        tx_release,
        tx_begin_end,
        tx_store,
        tx_complete,
        tx_restore_role,
        tx_open,
        tx_is_same,
    }
}

/// Returns a statement as it is sent.
pub(super) fn tagged(sql: &str) -> Arc<str> {
    [TAG, sql].concat().into()
}

impl Statements {
    pub(super) fn new(name: &TableName, durable_claims: bool) -> Self {
        let durable = render(include_str!("sql/durable.sql"), &[]);
        let asynchronous = render(include_str!("sql/claim_durable.sql"), &[("durable", &durable)]);
        let values = [
            ("table", &*name.quoted("")),
            ("version_table", &*name.quoted("_schema")),
            ("table_number", &*name.number()),
            ("claim_durable", if durable_claims { &*durable } else { &*asynchronous }),
            ("durable", &*durable),
            ("lock_timeout", LOCK_TIMEOUT),
            ("handler_lock_timeout", &*render(include_str!("sql/handler_lock_timeout.sql"), &[])),
            ("grace_ms", &*PURGE_GRACE.as_millis().to_string()),
            ("counted", &*COUNTED.to_string()),
            ("portion", &*PORTION.to_string()),
            ("state", &*render(include_str!("sql/state.sql"), &[])),
        ];
        Self::from_files(|file| tagged(&render(file, &values)))
    }

    /// Returns the statement that reads rows with as much of their stored data.
    pub(super) fn read(&self, fetch: Fetch) -> &Arc<str> {
        match fetch {
            Fetch::Nothing => &self.read,
            Fetch::Digest => &self.read_digest,
            Fetch::DigestAndResponse => &self.read_response,
        }
    }
}

/// Returns the statement that makes the function which records a key in the caller's transaction.
pub(super) fn record_function(name: &TableName) -> String {
    // `format` of Postgres fills the table's name in.
    let values = [
        ("table", "%1$s"),
        ("table_number", "to_regclass(%1$L)"),
        ("state", &*render(include_str!("sql/state.sql"), &[])),
        ("durable", &*render(include_str!("sql/durable.sql"), &[])),
        ("max_id_len", &*MAX_ID_LEN.to_string()),
        ("max_seconds", &*(MAX_MS / 1_000).to_string()),
        ("tries", &*TRIES.to_string()),
    ];
    let body = render(include_str!("sql/record_body.sql"), &values);
    let unqualified = TableName { schema: None, table: name.table.clone() };
    let values = [
        ("table_literal", &*literal(&name.quoted(""))),
        ("table_name", &*literal(&unqualified.quoted(""))),
        ("function_name", &*literal(&unqualified.quoted("_record"))),
        ("lock_timeout", LOCK_TIMEOUT),
        ("body", &*body),
    ];
    let make = render(include_str!("sql/record_function.sql"), &values);
    // The name of a schema may hold any character.
    let mut tag = "$tower_dedup$".to_owned();
    while make.contains(&tag) {
        tag.insert(1, 'x');
    }
    format!("DO {tag}\n{make}\n{tag}")
}

/// A smaller table is read as fast as its index.
const FEW_ROWS: u64 = 256;

/// Has statements planned again whenever the number of rows that this adapter has written has doubled.
///
/// Postgres reuses the plan of a prepared statement until the table is analyzed. A plan that was made for
/// a tiny table reads all rows, also after the table has grown. So the text of a statement has a generation in a
/// comment: no setting of the session is needed, which PgBouncer would give to others. If other processes fill the
/// table, autovacuum analyzes it after a minute.
#[derive(Debug, Default)]
pub(super) struct Replanner {
    rows_written: AtomicU64,
}

impl Replanner {
    pub(super) fn note_rows(&self, rows: usize) {
        self.rows_written.fetch_add(rows.try_into().unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Returns the statement with the comment of its generation.
    pub(super) fn text(&self, sql: &Arc<str>) -> Arc<str> {
        match (self.rows_written.load(Ordering::Relaxed) / FEW_ROWS).checked_ilog2() {
            None => Arc::clone(sql),
            Some(generation) => format!("{sql} /* {generation} */").into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_of_a_schema_ends_neither_the_body_nor_a_name() {
        let schema = Some(r#"a"$tower_dedup$'b"#.to_owned());
        let sql = record_function(&TableName { schema, ..TableName::default() });
        assert_eq!(sql.matches("$xtower_dedup$").count(), 2, "{sql}");
        assert!(sql.contains(r#"'"a""$tower_dedup$''b"."webhook_deliveries"'::regclass"#), "{sql}");
    }
}
