//! [`Table`]: the calls of the inbox to its table, for each database.

use std::time::Duration;

use futures_util::future::BoxFuture;
use tower_dedup::BoxError;
use tower_dedup::adapter::contract::Token;

use crate::inspect::{Count, Selection, ShownRow};
use crate::row::{Change, NewRow, Parked, Place, TakenRow};
use crate::settings::InboxError;

pub(crate) type TableFuture<'t, T> = BoxFuture<'t, Result<T, TableError>>;

/// How many rows one sweep parks, and how many it deletes.
pub(crate) const SWEPT: i64 = 1_000;

/// How a call has failed.
#[derive(Debug)]
pub(crate) struct TableError {
    /// The database has refused the statement because of a row of it, and has changed nothing.
    pub(crate) is_of_a_row: bool,
    pub(crate) error: BoxError,
}

impl std::fmt::Display for TableError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the table of the inbox: {}", self.error)
    }
}

impl std::error::Error for TableError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&*self.error)
    }
}

impl From<TableError> for InboxError {
    fn from(error: TableError) -> Self {
        Self::Table(error.error)
    }
}

/// The reply to the storing of one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stored {
    /// The row is new.
    New { seq: i64, version: i64 },
    /// The row exists: it is due now, or the run that has it will find its version changed.
    Known,
}

/// The reply to one change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Changed {
    /// The row is changed, or deleted.
    Done,
    /// The row is gone, or another run has it.
    Lost,
    /// Somebody has locked it.
    Locked,
}

/// Whose due rows a process takes.
#[derive(Debug, Clone)]
pub(crate) struct Take<'t> {
    pub(crate) service: &'t str,
    pub(crate) namespaces: &'t [String],
    /// The most rows of one namespace.
    pub(crate) each: usize,
    pub(crate) most: usize,
    pub(crate) turn: Token,
    pub(crate) lasts: Duration,
    /// The delays after failed runs.
    pub(crate) delays: &'t [Duration],
}

/// A row, its headers and its body.
pub(crate) type WholeRow = (ShownRow, Vec<u8>, Vec<u8>);

/// The reply to a take.
#[derive(Debug, Default)]
pub(crate) struct Took {
    pub(crate) rows: Vec<TakenRow>,
    /// The namespaces of rows whose turn has lapsed, and why they are parked now.
    pub(crate) lapsed: Vec<(String, Option<Parked>)>,
}

/// Rows that have ended by themselves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Swept {
    pub(crate) service: String,
    pub(crate) namespace: String,
    /// Why they were parked now; `None` if they were deleted.
    pub(crate) parked: Option<Parked>,
    pub(crate) rows: i64,
}

/// The statements of the inbox. Every call has a bound of its own, opens a connection if it has
/// none, and drops one whose reply did not come.
pub(crate) trait Table: Send + Sync {
    /// Creates the table, or adds what it lacks.
    fn migrate(&self) -> TableFuture<'_, ()>;

    /// Stores rows with distinct keys, durably, and returns the replies in their order.
    fn store<'t>(
        &'t self,
        service: &'t str,
        lasts: Duration,
        rows: &'t [NewRow],
    ) -> TableFuture<'t, Vec<Stored>>;

    /// Changes rows, and returns the replies in their order. Durable if one is answered.
    fn change<'t>(&'t self, changes: &'t [Change]) -> TableFuture<'t, Vec<Changed>>;

    /// Takes due rows, the longest due first. A row whose turn has lapsed is not taken: it is due
    /// after the next delay, ± 20 %, or parked as died after the last one.
    fn take<'t>(&'t self, take: Take<'t>) -> TableFuture<'t, Took>;

    /// Renews the turns of these runs.
    fn renew<'t>(&'t self, runs: &'t [Place], lasts: Duration) -> TableFuture<'t, ()>;

    /// Parks rows that are too old, and deletes parked rows that are older still, of every service:
    /// at most [`SWEPT`] of each.
    fn sweep(&self) -> TableFuture<'_, Vec<Swept>>;

    /// Counts the rows, of every service.
    fn count(&self) -> TableFuture<'_, Vec<Count>>;

    /// Returns selected rows after `seq`, without bodies.
    fn list<'t>(
        &'t self,
        of: &'t Selection,
        after: i64,
        most: usize,
    ) -> TableFuture<'t, Vec<ShownRow>>;

    /// Returns one row with the headers and the body of its request.
    fn show(&self, seq: i64) -> TableFuture<'_, Option<WholeRow>>;

    /// Makes selected rows due now, with all attempts. Rows that are parked as expired stay.
    fn retry<'t>(&'t self, of: &'t Selection) -> TableFuture<'t, u64>;

    /// Deletes selected rows.
    fn delete<'t>(&'t self, of: &'t Selection) -> TableFuture<'t, u64>;
}

/// Reads the column `keys`: see [`identities`](crate::row::identities).
pub(crate) fn parse_keys(text: &str) -> Vec<(String, String)> {
    let lines = text.split_terminator('\n').filter_map(|line| line.split_once('\t'));
    lines.map(|(namespace, id)| (namespace.to_owned(), id.to_owned())).collect()
}
