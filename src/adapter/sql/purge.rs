//! [`PurgeState`]: the state of an adapter between two steps of a purge.
//!
//! No index covers `expires_at`. A purge walks through the table instead, in its physical order.
//!
//! 1. A round reads every row once. A step reads a bounded part of the table and deletes in it; the next
//!    call goes on after that part. A table that fits into one step is read from its beginning.
//! 2. A step that deletes as many keys as its limit is repeated at the same place, because more may be
//!    there. So is a step that failed or was dropped.
//! 3. Nothing is deleted while the store's clock is ahead of this process's monotonic clock by more
//!    than [`PURGE_GRACE`], measured from the last purge on. A clock that stays ahead for
//!    [`PURGE_GRACE`] is accepted, because it may be right now and have been wrong before.
//! 4. The place of the walk is lost with the process. A round over a larger table begins at a random
//!    place: otherwise a process that restarts often would never reach the table's end.
//! 5. Each step counts the rows that it leaves. Their sum is exact as far as the table stays as it is
//!    during the round.

use std::future::Future;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::super::contract::PURGE_GRACE;
use super::super::inspection::{Purged, Stats};
use crate::error::{Error, ErrorKind};

/// The result of one step.
pub(in crate::adapter) struct Step<P> {
    /// Where the step began.
    pub(in crate::adapter) at: P,
    pub(in crate::adapter) deleted: u64,
    /// The rows that the step read and did not delete. Not used if the step is repeated.
    pub(in crate::adapter) left: Stats,
    /// Where the next step begins. `None` after the last step of a round.
    pub(in crate::adapter) next: Option<P>,
}

/// [`PURGE_GRACE`] for a statement.
pub(in crate::adapter) fn grace_ms() -> u128 {
    PURGE_GRACE.as_millis()
}

/// `P` is a place in the table.
pub(in crate::adapter) struct PurgeState<P> {
    state: Mutex<State<P>>,
}

struct State<P> {
    /// Where the walk stands, and the rows that the round has left until there. `None` between two
    /// rounds.
    round: Option<(P, Stats)>,
    clock: ClockCheck,
}

#[derive(Default)]
struct ClockCheck {
    /// When the store's clock was last right, and its time, in milliseconds.
    right: Option<(Instant, i64)>,
    /// Since when the store's clock is ahead.
    ahead_since: Option<Instant>,
}

impl<P> Default for PurgeState<P> {
    fn default() -> Self {
        Self { state: Mutex::new(State { round: None, clock: ClockCheck::default() }) }
    }
}

impl<P: Clone> PurgeState<P> {
    /// Deletes at most `limit` keys, in one step. `step` takes the place where it begins, or `None` to
    /// begin a round.
    ///
    /// Two calls at the same time may do the same step. Each deletes other rows, and both count what
    /// they left.
    ///
    /// # Errors
    ///
    /// The error of `step`.
    pub(in crate::adapter) async fn purge<F>(
        &self,
        limit: u32,
        step: impl FnOnce(Option<P>) -> F,
    ) -> Result<Purged, Error>
    where
        F: Future<Output = Result<Step<P>, Error>>,
    {
        let round = self.state().round.clone();
        let (at, mut left) = round.map_or((None, Stats::default()), |(at, left)| (Some(at), left));
        let step = step(at).await?;
        let deleted = step.deleted;
        let next = if deleted > 0 && deleted >= u64::from(limit) {
            Some(step.at)
        } else {
            left.add(&step.left);
            step.next
        };
        let purged = Purged::new(deleted, next.is_none());
        let Some(next) = next else {
            self.state().round = None;
            left.is_exact = true;
            return Ok(purged.with_stats(left));
        };
        self.state().round = Some((next, left));
        Ok(purged)
    }
}

impl<P> PurgeState<P> {
    /// Checks rule 3 for a store whose clock shows this many milliseconds since the Unix epoch.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Refused`] if the clock has jumped.
    pub(in crate::adapter) fn check_clock(&self, clock_ms: i64) -> Result<(), Error> {
        self.state().clock.check(Instant::now(), clock_ms)
    }

    fn state(&self) -> impl std::ops::DerefMut<Target = State<P>> + '_ {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ClockCheck {
    fn check(&mut self, now: Instant, clock_ms: i64) -> Result<(), Error> {
        let is_ahead = self.right.is_some_and(|(then, then_ms)| {
            let passed = now.saturating_duration_since(then) + PURGE_GRACE;
            let moved = u64::try_from(clock_ms.saturating_sub(then_ms)).unwrap_or(0);
            Duration::from_millis(moved) > passed
        });
        if is_ahead {
            let since = *self.ahead_since.get_or_insert(now);
            if now.saturating_duration_since(since) < PURGE_GRACE {
                return Err(Error::new(
                    ErrorKind::Refused,
                    "purging: the store's clock has jumped forward by more than an hour",
                ));
            }
        }
        (self.right, self.ahead_since) = (Some((now, clock_ms)), None);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    const HOUR_MS: i64 = 3_600_000;

    #[test]
    fn a_clock_that_keeps_pace_or_goes_back_is_accepted() {
        let (start, mut state) = (Instant::now(), ClockCheck::default());
        let mut says = 1_000 * HOUR_MS;
        for (hours, clock) in [(0, 0), (1, 1), (2, 2), (3, 4), (4, 5), (100, 101), (101, -900)] {
            says = (1_000 + clock) * HOUR_MS;
            state.check(start + PURGE_GRACE * hours, says).unwrap();
        }
        assert_eq!(state.right.map(|(_, says)| says), Some(says));
    }

    #[test]
    fn a_clock_that_jumps_is_refused_until_it_is_back() {
        let (start, mut state) = (Instant::now(), ClockCheck::default());
        let at = |seconds| start + Duration::from_secs(seconds);
        state.check(at(0), 0).unwrap();
        state.check(at(60), HOUR_MS + 60_000).unwrap();
        let month = 30 * 24 * HOUR_MS;
        for seconds in [120, 180, 3_700] {
            let refused = state.check(at(seconds), month).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Refused);
        }
        state.check(at(3_710), HOUR_MS).unwrap();
        // The time of a second jump starts at zero.
        assert!(state.check(at(3_720), month).is_err());
        assert!(state.check(at(7_310), month).is_err());
    }

    #[test]
    fn a_clock_that_jumps_and_stays_is_accepted_after_the_grace() {
        let (start, mut state) = (Instant::now(), ClockCheck::default());
        let month = 30 * 24 * HOUR_MS;
        state.check(start, 0).unwrap();
        assert!(state.check(start, month).is_err());
        assert!(state.check(start + PURGE_GRACE / 2, month + HOUR_MS / 2).is_err());
        state.check(start + PURGE_GRACE, month + HOUR_MS).unwrap();
        state.check(start + PURGE_GRACE * 2, month + 2 * HOUR_MS).unwrap();
    }

    /// A table: whether each row is expired. A place is the number of a row.
    struct Table {
        rows: RefCell<Vec<bool>>,
        begun_at: RefCell<Vec<Option<usize>>>,
    }

    /// How many rows a step reads.
    const STEP: usize = 4;

    impl Table {
        fn new(rows: &[bool]) -> Self {
            Self { rows: RefCell::new(rows.to_vec()), begun_at: RefCell::default() }
        }

        fn step(&self, at: Option<usize>, limit: u32) -> Step<usize> {
            self.begun_at.borrow_mut().push(at);
            let (from, mut rows) = (at.unwrap_or(0), self.rows.borrow_mut());
            let until = rows.len().min(from + STEP);
            let part = &mut rows[from..until];
            let mut deleted = 0;
            for row in part.iter_mut().filter(|row| **row).take(limit as usize) {
                *row = false;
                deleted += 1;
            }
            let left = part.iter().filter(|row| !**row).count() as u64;
            let left = Stats { rows: left, ..Stats::default() };
            Step { at: from, deleted, left, next: (until < rows.len()).then_some(until) }
        }

        async fn purge(&self, state: &PurgeState<usize>, limit: u32) -> Purged {
            state.purge(limit, async |at| Ok(self.step(at, limit))).await.unwrap()
        }
    }

    #[tokio::test]
    async fn a_round_reads_every_row_and_repeats_full_steps() {
        let (table, state) = (Table::new(&[true; 10]), PurgeState::default());
        let mut purged = Vec::new();
        let stats = loop {
            let portion = table.purge(&state, 3).await;
            purged.push(portion.deleted);
            assert_eq!(portion.is_round_complete, portion.stats.is_some());
            if let Some(stats) = portion.stats {
                break stats;
            }
        };
        assert_eq!(purged, [3, 1, 3, 1, 2]);
        assert_eq!(*table.begun_at.borrow(), [None, Some(0), Some(4), Some(4), Some(8)]);
        assert_eq!((stats.rows, stats.is_exact), (10, true));
        // The next round begins anew.
        table.rows.borrow_mut()[0] = true;
        assert_eq!(table.purge(&state, 3).await, Purged::new(1, false));
        assert_eq!(table.begun_at.borrow().last(), Some(&None));
    }

    #[tokio::test]
    async fn a_step_that_deletes_nothing_does_not_end_the_round() {
        let (table, state) =
            (Table::new(&[false, false, false, false, true]), PurgeState::default());
        assert_eq!(table.purge(&state, 3).await, Purged::new(0, false));
        let last = table.purge(&state, 3).await;
        assert_eq!((last.deleted, last.is_round_complete), (1, true));
        // Also if it may delete nothing: a step there would be repeated for ever.
        assert_eq!(table.purge(&state, 0).await, Purged::new(0, false));
        assert!(table.purge(&state, 0).await.is_round_complete);
    }

    #[tokio::test]
    async fn a_step_that_fails_or_is_dropped_is_repeated_where_it_began() {
        let (table, state) = (Table::new(&[true; 10]), PurgeState::default());
        assert_eq!(table.purge(&state, 10).await.deleted, 4);
        let failing = async |_| Err(Error::new(ErrorKind::Unavailable, "purging"));
        assert!(state.purge(10, failing).await.is_err());
        let hanging = state.purge(10, async |_| std::future::pending().await);
        assert!(futures_util::FutureExt::now_or_never(hanging).is_none());
        assert_eq!(table.purge(&state, 10).await.deleted, 4);
        assert_eq!(*table.begun_at.borrow(), [None, Some(4)]);
    }
}
