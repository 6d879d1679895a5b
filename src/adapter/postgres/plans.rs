//! [`Plans`]: which plans a growing table still fits.
//!
//! Postgres keeps the plan of a prepared statement until the table is analyzed again. One that was
//! made while the table was known to be tiny reads all of it, and goes on to when it is not tiny
//! any more. So statements change their text, by a comment, and are planned anew
//!
//! 1. whenever this adapter has written as many rows as it had when they were planned, and
//! 2. when 30 s have passed in which it has written any.
//!
//! No setting of a session is needed, so this holds behind PgBouncer too. Old texts are forgotten
//! by the connection's own cache.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

const AFTER: Duration = Duration::from_secs(30);
/// Below, a table is read as fast as its index.
const FEW: u64 = 256;

#[derive(Debug)]
pub(super) struct Plans {
    written: AtomicU64,
    made: Mutex<Made>,
}

#[derive(Debug)]
struct Made {
    edition: u32,
    /// After so many rows.
    rows: u64,
    at: Instant,
}

impl Default for Plans {
    fn default() -> Self {
        let made = Made { edition: 0, rows: FEW, at: Instant::now() };
        Self { written: AtomicU64::new(0), made: Mutex::new(made) }
    }
}

impl Plans {
    pub(super) fn wrote(&self, rows: usize) {
        self.written.fetch_add(rows.try_into().unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// The statement, in the edition that is to be planned by now.
    pub(super) fn text(&self, sql: &Arc<str>) -> Arc<str> {
        match self.edition(Instant::now()) {
            0 => Arc::clone(sql),
            edition => format!("{sql} /* {edition} */").into(),
        }
    }

    fn edition(&self, now: Instant) -> u32 {
        let written = self.written.load(Ordering::Relaxed);
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        let since = written.saturating_sub(made.rows);
        let late = now.saturating_duration_since(made.at) >= AFTER;
        if since >= made.rows || (late && since > 0) {
            *made = Made { edition: made.edition.wrapping_add(1), rows: written, at: now };
        }
        made.edition
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statements_are_planned_anew_when_the_rows_have_doubled_or_after_a_while() {
        let (plans, start) = (Plans::default(), Instant::now());
        let mut editions = Vec::new();
        for rows in [500, 20, 500, 500, 1] {
            plans.wrote(rows);
            editions.push(plans.edition(start));
        }
        assert_eq!(editions, [0, 1, 1, 2, 2]);
        assert_eq!(plans.edition(start + AFTER * 2), 3);
        // Nothing was written since.
        assert_eq!(plans.edition(start + AFTER * 4), 3);
    }
}
