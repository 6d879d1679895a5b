//! [`Replanner`]: the time of the next plan.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A smaller table is read as fast as its index.
const FEW_ROWS: u64 = 256;

/// Has statements planned again as the table grows.
///
/// Postgres reuses the plan of a prepared statement until the table is analyzed. A plan that was made for
/// a tiny table reads all rows, also after the table has grown. So the text of a statement contains a
/// generation number, in a comment, and a new generation makes Postgres plan the statement again. It begins when the
/// number of rows that this adapter has written has doubled. If other processes fill the table, autovacuum analyzes
/// it after a minute.
///
/// Each text is one more prepared statement on each connection, until the connection closes or its
/// cache is full. No session setting is needed, so this also works behind PgBouncer.
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
