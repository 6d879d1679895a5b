//! The statements, which stand in `sql/*.sql`.

use std::sync::Arc;

use tower_dedup::adapter::maintenance::PURGE_GRACE;

/// The name of the table.
pub(crate) const TABLE: &str = "webhook_deliveries";
/// How many rows of each end of the table the statistics count.
pub(crate) const COUNTED: u64 = 100_000;

/// The time at which this expression is evaluated, which is after a wait for a lock. `NOW` is the time at which the
/// statement began: a lease would be shorter than asked. In `INSERT … VALUES`, it is read before such a wait; what must
/// be exact there stands in `ON DUPLICATE KEY UPDATE`, whose expressions are evaluated under the lock of the row.
const NOW: &str = "CAST(UNIX_TIMESTAMP(SYSDATE(3)) * 1000 AS SIGNED)";
/// When the event of a claim was handled: now, or at the time of the argument, which is not later.
const HANDLED_AT: &str = "LEAST({now}, ?)";
/// The time at which the statement began: one value, by which an index finds rows.
const START: &str = "CAST(UNIX_TIMESTAMP(NOW(3)) * 1000 AS SIGNED)";
/// The first version of a row: the time in microseconds. A count from 1 would give a row that was purged and inserted
/// again a version that a late claim may name.
const VERSION: &str = "CAST(UNIX_TIMESTAMP(SYSDATE(6)) * 1000000 AS SIGNED)";
/// Lets a statement wait for a row that a transaction holds. The sessions of this store do not wait.
const PATIENT: &str = "SET STATEMENT innodb_lock_wait_timeout = 5 FOR ";

/// A statement, and the same with a wait for locked rows.
#[derive(Debug)]
pub(crate) struct Statement {
    /// Whether it returns rows.
    pub(crate) has_rows: bool,
    pub(crate) sql: Arc<str>,
    pub(crate) patient: Arc<str>,
}

macro_rules! statements {
    ($($name:ident),+ $(,)?) => {
        /// The statements of a store.
        #[derive(Debug)]
        pub(crate) struct Statements { $(pub(crate) $name: Statement,)+ }

        impl Statements {
            /// Returns the statements for the table of this database. They name the database, because a handler's
            /// connection, on which a completion is executed, may use another.
            pub(crate) fn new(database: &str) -> Self {
                let table = format!("`{}`.`{TABLE}`", database.replace('`', "``"));
                Self { $($name: statement(include_str!(concat!("sql/", stringify!($name), ".sql")), &table),)+ }
            }
        }
    };
}

statements! {
    check, create_table, insert, read, write, renew, release, release_complete,
    completion, is_complete, purge, list, stats,
}

fn statement(file: &str, table: &str) -> Statement {
    let lines = file.lines().filter(|line| !line.trim_start().starts_with("--"));
    let sql = lines
        .collect::<Vec<_>>()
        .join("\n")
        .replace("{handled_at}", HANDLED_AT)
        .replace("{now}", NOW)
        .replace("{start}", START)
        .replace("{version}", VERSION)
        .replace("{grace}", &PURGE_GRACE.as_millis().to_string())
        .replace("{counted}", &COUNTED.to_string())
        .replace("{name}", TABLE)
        .replace("{table}", table);
    let writes = ["CREATE ", "DELETE ", "INSERT ", "UPDATE "].iter().any(|verb| sql.contains(verb));
    let has_rows = !writes || sql.contains("RETURNING ");
    Statement { has_rows, patient: format!("{PATIENT}{sql}").into(), sql: sql.into() }
}
