//! [`Table`]: the calls of the inbox to its table, for each database.

use futures_util::future::BoxFuture;
use tower_dedup::BoxError;

use crate::inspect::{Count, Selection, ShownRequest, ShownRow};
use crate::row::{Change, NewRow, Parked, Place, TakenRow};
use crate::settings::InboxError;

pub(crate) type TableFuture<'t, T> = BoxFuture<'t, Result<T, TableError>>;

/// How many rows one sweep parks, and how many it deletes.
pub(crate) const SWEPT: usize = 1_000;

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

impl From<TableError> for InboxError {
    fn from(error: TableError) -> Self {
        Self::Table(error.error)
    }
}

/// The reply to the storing of one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stored {
    /// The row is new, and has this number and the version 1.
    New(i64),
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

/// The reply to a take.
#[derive(Debug, Default)]
pub(crate) struct Took {
    pub(crate) rows: Vec<TakenRow>,
    /// The namespaces of rows whose turn has lapsed, and why they are parked now.
    pub(crate) lapsed: Vec<(String, Option<Parked>)>,
}

/// A row that has ended by itself: its service, its namespace, and why it was parked now; `None` if
/// it was deleted.
pub(crate) type Swept = (String, String, Option<Parked>);

/// The statements of the inbox. Every call has a bound of its own, opens a connection if it has
/// none, and drops one whose reply did not come.
pub(crate) trait Table: Send + Sync {
    /// Creates the table, or adds what it lacks.
    fn migrate(&self) -> TableFuture<'_, ()>;

    /// Stores rows with distinct keys, durably, and returns the replies in their order.
    fn store<'t>(&'t self, rows: &'t [NewRow]) -> TableFuture<'t, Vec<Stored>>;

    /// Changes rows, and returns the replies in their order. Durable if one is answered.
    fn change<'t>(&'t self, changes: &'t [Change]) -> TableFuture<'t, Vec<Changed>>;

    /// Takes at most this many due rows of these namespaces of the service, of each the longest due
    /// ones. A row whose turn has lapsed is not taken: it is due after the next delay, ± 20 %, or
    /// parked as died after the last one.
    fn take<'t>(&'t self, namespaces: &'t [String], most: usize) -> TableFuture<'t, Took>;

    /// Renews the turns of these runs.
    fn renew<'t>(&'t self, runs: &'t [Place]) -> TableFuture<'t, ()>;

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
    fn show(&self, seq: i64) -> TableFuture<'_, Option<(ShownRow, ShownRequest)>>;

    /// Makes selected rows due now, with all attempts. Rows that are parked as expired stay.
    fn retry<'t>(&'t self, of: &'t Selection) -> TableFuture<'t, u64>;

    /// Deletes selected rows.
    fn delete<'t>(&'t self, of: &'t Selection) -> TableFuture<'t, u64>;
}
