//! The adapter measures its statements to choose two things: the first statement of a claim, and the time of the
//! next plan.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Whether claims read before they insert: while at least half of their keys are known.
///
/// An insertion shows without extra cost whether a key is new. The row of a known key takes a second
/// statement. So claims insert first in quiet times, and read first while a sender delivers old events
/// again.
#[derive(Debug, Default)]
pub(super) struct ReadFirst(AtomicBool);

impl ReadFirst {
    pub(super) fn is_on(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Notes how many of the rows of a claim were known.
    pub(super) fn note(&self, known: usize, rows: usize) {
        if rows == 0 {
            return;
        }
        let on = known * 2 >= rows;
        // Every statement reads the flag, and few change it.
        if on != self.is_on() {
            self.0.store(on, Ordering::Relaxed);
        }
    }
}

const FIRST_REPLAN: Duration = Duration::from_secs(30);
const LAST_REPLAN: Duration = Duration::from_secs(3_600);
/// A smaller table is read as fast as its index.
const FEW_ROWS: u64 = 256;

/// Has statements planned again as the table grows.
///
/// Postgres reuses the plan of a prepared statement until the table is analyzed. A plan that was made for
/// a tiny table reads all rows, also after the table has grown. So the text of a statement contains a
/// generation number, in a comment. A new generation makes Postgres plan the statement again. It begins
///
/// 1. when the number of rows that this adapter has written has doubled since the last generation began,
/// 2. or 30 s after the last generation began, if this adapter has written a row since. Each use doubles
///    this time, up to an hour. It is needed because other processes fill the table as well.
///
/// Each text is one more prepared statement on each connection, until the connection closes or its
/// cache is full: about twelve in the half hour for which a pool reuses a connection. No session setting
/// is needed, so this also works behind PgBouncer.
#[derive(Debug)]
pub(super) struct Replanner {
    rows_written: AtomicU64,
    last: Mutex<Generation>,
}

#[derive(Debug)]
struct Generation {
    number: u32,
    /// The rows that were written by then.
    rows: u64,
    at: Instant,
    /// The time until the next generation.
    lasts: Duration,
}

impl Default for Replanner {
    fn default() -> Self {
        let at = Instant::now();
        let last = Generation { number: 0, rows: FEW_ROWS, at, lasts: FIRST_REPLAN };
        Self { rows_written: AtomicU64::new(0), last: Mutex::new(last) }
    }
}

impl Replanner {
    pub(super) fn note_rows(&self, rows: usize) {
        self.rows_written.fetch_add(rows.try_into().unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Returns the statement with the comment of its generation.
    pub(super) fn text(&self, sql: &Arc<str>) -> Arc<str> {
        match self.generation(Instant::now()) {
            0 => Arc::clone(sql),
            generation => format!("{sql} /* {generation} */").into(),
        }
    }

    fn generation(&self, now: Instant) -> u32 {
        let written = self.rows_written.load(Ordering::Relaxed);
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let rows = written.saturating_sub(last.rows);
        let is_late = now.saturating_duration_since(last.at) >= last.lasts && rows > 0;
        if is_late {
            last.lasts = (last.lasts * 2).min(LAST_REPLAN);
        }
        if rows >= last.rows || is_late {
            (last.number, last.rows, last.at) = (last.number.wrapping_add(1), written, now);
        }
        last.number
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn read_first_is_on_while_half_of_the_rows_are_known() {
        let read_first = ReadFirst::default();
        assert!(!read_first.is_on());
        for (known, rows, on) in
            [(1, 3, false), (1, 2, true), (0, 1, false), (0, 0, false), (1, 1, true)]
        {
            read_first.note(known, rows);
            assert_eq!(read_first.is_on(), on, "{known} of {rows}");
        }
    }

    #[test]
    fn generation_changes_when_rows_double_or_after_a_while() {
        let (replanner, start) = (Replanner::default(), Instant::now());
        let mut generations = Vec::new();
        for rows in [500, 20, 500, 500, 1] {
            replanner.note_rows(rows);
            generations.push(replanner.generation(start));
        }
        assert_eq!(generations, [0, 1, 1, 2, 2]);
        assert_eq!(replanner.generation(start + FIRST_REPLAN * 2), 3);
        // No row was written since.
        assert_eq!(replanner.generation(start + FIRST_REPLAN * 4), 3);
    }

    #[test]
    fn generations_of_a_busy_connection_are_few() {
        let (replanner, start) = (Replanner::default(), Instant::now());
        let generation = |replanner: &Replanner, second: u64| {
            replanner.note_rows(100);
            replanner.generation(start + Duration::from_secs(second))
        };
        let half_an_hour = (0..1_800).map(|second| generation(&replanner, second)).max();
        assert!(half_an_hour < Some(20), "{half_an_hour:?} in half an hour");
        let day = (1_800..86_400).map(|second| generation(&replanner, second)).max();
        assert!(day < Some(60), "{day:?} in a day");
    }
}
