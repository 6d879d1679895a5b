//! [`Plans`]: which plans a growing table still fits.
//!
//! Postgres keeps the plan of a prepared statement until the table is analyzed again. One that was
//! made while the table was known to be tiny reads all of it, and goes on to when it is not tiny
//! any more. So statements change their text, by a comment, and are planned anew
//!
//! 1. whenever this adapter has written as many rows as it had when they were planned, and
//! 2. when 30 s have passed in which it has written any, then a minute, and so on up to an hour: a
//!    table that others fill as well has about doubled by then.
//!
//! Each text is a prepared statement more, on each connection, until that is closed or its cache is
//! full. These are about a dozen in the half an hour for which a pool keeps a connection.
//!
//! No setting of a session is needed, so this holds behind PgBouncer too.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

const AFTER: Duration = Duration::from_secs(30);
const AT_LAST: Duration = Duration::from_secs(3_600);
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
    /// How long it is good for.
    good_for: Duration,
}

impl Default for Plans {
    fn default() -> Self {
        let made = Made { edition: 0, rows: FEW, at: Instant::now(), good_for: AFTER };
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
        let late = now.saturating_duration_since(made.at) >= made.good_for && since > 0;
        if late {
            made.good_for = (made.good_for * 2).min(AT_LAST);
        }
        if since >= made.rows || late {
            (made.edition, made.rows, made.at) = (made.edition.wrapping_add(1), written, now);
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

    #[test]
    fn editions_of_a_busy_connection_are_few() {
        let (plans, start) = (Plans::default(), Instant::now());
        let edition = |plans: &Plans, second: u64| {
            plans.wrote(100);
            plans.edition(start + Duration::from_secs(second))
        };
        let half_an_hour = (0..1_800).map(|second| edition(&plans, second)).max();
        assert!(half_an_hour < Some(20), "{half_an_hour:?} in half an hour");
        let day = (1_800..86_400).map(|second| edition(&plans, second)).max();
        assert!(day < Some(60), "{day:?} in a day");
    }
}
