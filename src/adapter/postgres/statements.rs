//! The statements of the Postgres adapter: one file each, in the folder `sql`. Only the names of
//! the tables, the time of a wait and the lines for [`Wait::PassOver`] are not as they are sent.
//!
//! `sql::row` defines the states of a row.
//!
//! 1. `key` is the first 16 bytes of the SHA-256 over namespace, line feed and id (a namespace
//!    holds no control character). The names stand beside it to be read; no index covers them.
//! 2. Statements hold row locks until they end, but an open transaction may hold them as long as a
//!    handler runs. [`Wait`] says what a statement of a batch does with such a row.
//!    `claim_existing`, `forget` and `purge` pass over it, and a read needs no lock. `lock_timeout`
//!    is set for the statement only; the table's lock, which DDL takes, has no such bound.
//! 3. Every statement is as durable as with `synchronous_commit = on`, whatever the setting of a
//!    role or a database. Claims under a lease are an exception if the server has no synchronous
//!    standby.
//! 4. The clock is `clock_timestamp()`, which advances while a statement waits. An insertion reads
//!    it once a row, before it waits for a row that is then rolled back: no longer than rule 2
//!    allows.
//! 5. Rows are inserted and locked in the order of `key`, so that two batches never deadlock.
//!    Insertions have no ORDER BY: the arrays are sorted, and `unnest` keeps their order. So does
//!    the nested loop with the one row of `settings`, which no parallel worker shares, because
//!    `set_config` is not parallel safe.
//! 6. `key` and `expires_at` are the only indexed columns. An update that leaves `expires_at` as it
//!    is, such as a renewal or a completion, is a HOT update if its page has room.
//! 7. Statements that run with every delivery do not join the table. Postgres plans the others
//!    again each time, because a plan for any number of keys looks too expensive, and planning
//!    takes five times as long as inserting a row.
//! 8. Every statement takes any number of keys, and one retention and lease, because the calls of a
//!    batch have equal terms. A batch of one call is the same statement.
//!
//! The parameters of these statements are those of [`bind_rows`](super::params::bind_rows). The
//! versions that were read come last. `forget` takes one key.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::super::sql::statement::{render, statements, with_section};
use super::options::PostgresOptions;

/// The start of every statement: `pg_stat_activity` and the server's log show whose it is.
pub(super) const TAG: &str = "/* tower-dedup */ ";

/// How long an insertion waits for a row that an open transaction has inserted: longer than a
/// COMMIT over a slow disk or to a standby takes, and shorter than a sender waits.
const LOCK_TIMEOUT: &str = "100ms";
/// How long a batch waits for a row that an open transaction holds, before it passes over such
/// rows: longer than a COMMIT over a disk takes.
const BRIEFLY: &str = "10ms";

/// How the statement of a batch meets a row that an open transaction holds. The names of the folder
/// `sql` stand for one statement of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wait {
    /// Waits for 10 ms, and then fails. Looks for no such row, which takes a tenth to a fifth of
    /// the server's time.
    Briefly,
    /// Passes over it: an insertion leaves out the keys that have a row; a completion, a release
    /// and a renewal leave out the rows that they cannot lock. Waits only for a row that an open
    /// transaction has inserted.
    PassOver,
    /// Waits nearly as long as the statement may run: then the server ends the wait.
    Long,
}

statements! {
    /// Every statement, with the table's name. A field is named after its file.
    pub(super) struct PostgresStatements {
        claim_insert,
        claim_existing,
        claim_complete_insert,
        renew,
        complete,
        completion,
        completion_lean,
        completion_check,
        release,
        forget,
        read,
        get,
        get_many,
        purge,
        stats,
        list,
        find,
        version,
        encrypted,
    }
}

impl PostgresStatements {
    /// Returns the statements of each [`Wait`].
    pub(super) fn by_wait(name: &TableName, options: &PostgresOptions) -> [Arc<Self>; 3] {
        let of = |wait| Arc::new(Self::new(name, options, wait));
        [Wait::Briefly, Wait::PassOver, Wait::Long].map(of)
    }

    fn new(name: &TableName, options: &PostgresOptions, wait: Wait) -> Self {
        // 0 is no bound.
        let long = format!("{}ms", (options.statement_timeout.as_millis() * 9 / 10).max(1));
        let values = [
            ("table", &*name.quoted("")),
            ("wait", [BRIEFLY, LOCK_TIMEOUT, &*long][wait as usize]),
            ("durable_claims", if options.durable_claims { "true" } else { "false" }),
            ("version_table", &*name.quoted("_schema")),
            ("version_name", &*literal(&format!(".\"{}_schema\"", name.table))),
            ("schema", &*name.schema.as_deref().map_or("current_schema()::text".into(), literal)),
            // Null where there is no such table.
            ("table_number", &*format!("to_regclass({})", literal(&name.quoted("")))),
        ];
        Self::from_files(|file| {
            let file = with_section(file, PASS_OVER, wait == Wait::PassOver);
            [TAG, &render(&file, &values)].concat().into()
        })
    }
}

/// The lines between this one and `-- end` are part of a statement only for [`Wait::PassOver`].
const PASS_OVER: &str = "-- only to pass over rows:";

/// A smaller table is read as fast as its index.
const FEW_ROWS: usize = 256;

/// Has statements planned again whenever the number of rows that this adapter has written has
/// doubled.
///
/// On Postgres 15, after 300,000 rows, plans that were made for the empty table took 66 ms for a
/// renewal, 82 ms for a claim that passes over locked rows and 197 ms for a take, in place of less
/// than 1 ms.
///
/// Postgres reuses the plan of a prepared statement until the table is analyzed. A plan that was
/// made for a tiny table reads all rows, also after the table has grown. So the text of a statement
/// has a generation in a comment: no setting of the session is needed, which PgBouncer would give
/// to others. If other processes fill the table, autovacuum analyzes it after a minute. The
/// statements of a completion have it, too, on the handlers' connections: 15 ms in place of 0.4 ms
/// after 60,000 rows. The text that other drivers get stays the same.
#[derive(Debug, Default)]
pub(super) struct Replanner(AtomicUsize);

impl Replanner {
    /// Notes that so many rows were written.
    pub(super) fn note_rows(&self, rows: usize) {
        self.0.fetch_add(rows, Ordering::Relaxed);
    }

    /// Returns the generation of the plans that are made now. `None` is that of the tiny table.
    pub(super) fn generation(&self) -> Option<u32> {
        (self.0.load(Ordering::Relaxed) / FEW_ROWS).checked_ilog2()
    }

    /// Returns the statement with the comment of its generation.
    pub(super) fn text(&self, sql: &Arc<str>) -> Arc<str> {
        of_generation(sql, self.generation())
    }
}

/// Returns the statement with the comment of this generation.
pub(super) fn of_generation(sql: &Arc<str>, generation: Option<u32>) -> Arc<str> {
    match generation {
        None => Arc::clone(sql),
        Some(generation) => format!("{sql} /* {generation} */").into(),
    }
}

/// The table's name.
#[derive(Debug, Clone)]
pub(super) struct TableName {
    /// `None` until the table was found, unless the options name a schema.
    pub(super) schema: Option<String>,
    pub(super) table: String,
}

impl TableName {
    /// Returns the name that the options give.
    pub(super) fn of(options: &PostgresOptions) -> Self {
        Self { schema: options.schema.clone(), table: options.sql.table.clone() }
    }

    /// Returns the quoted name: a name may be a word of SQL.
    pub(super) fn quoted(&self, suffix: &str) -> String {
        let table = quoted(&format!("{}{suffix}", self.table));
        match &self.schema {
            Some(schema) => format!("{}.{table}", quoted(schema)),
            None => table,
        }
    }
}

/// Returns a name in quotes.
pub(super) fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// Returns a string literal.
pub(super) fn literal(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}

#[cfg(all(test, feature = "testing"))]
mod tests {
    use super::*;

    /// Rule 3. A purge may be lost in a crash.
    #[test]
    fn every_statement_that_writes_is_durable() {
        let options = PostgresOptions::new();
        for statements in PostgresStatements::by_wait(&TableName::of(&options), &options) {
            let writes = |sql: &str| sql.contains("INSERT INTO") || sql.contains("UPDATE \"");
            let all = statements.by_name().into_iter().filter(|(_, sql)| writes(sql));
            let all: Vec<_> = all.collect();
            for (name, sql) in &all {
                assert!(sql.contains("IN ('off', 'local', 'remote_write')"), "{name}");
                assert!(sql.contains("set_config('synchronous_commit', 'on', true)"), "{name}");
            }
            assert_eq!(all.len(), 9);
        }
    }
}
