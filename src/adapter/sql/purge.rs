//! [`PurgeState`]: the state of an adapter between two purges.
//!
//! 1. Within a round, a portion begins where the last portion ended. Deleted rows stay in the index
//!    until no snapshot needs them, and a portion that begins at the front would read all of them.
//! 2. A portion that deletes less than its limit begins at the front once more, so that a result below
//!    the limit means that there are no more keys.
//! 3. Nothing is deleted while the store's clock is ahead of this process's monotonic clock by more
//!    than [`PURGE_GRACE`], measured from the last purge on. A clock that stays ahead for
//!    [`PURGE_GRACE`] is accepted, because it may be right now and have been wrong before.

use std::future::Future;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::super::contract::PURGE_GRACE;
use crate::error::{Error, ErrorKind};

/// The result of one statement.
pub(in crate::adapter) struct Portion {
    pub(in crate::adapter) keys: u64,
    /// The latest expiry among them, in milliseconds since the Unix epoch.
    pub(in crate::adapter) until: Option<i64>,
}

/// [`PURGE_GRACE`] for a statement.
pub(in crate::adapter) fn grace_ms() -> u128 {
    PURGE_GRACE.as_millis()
}

#[derive(Default)]
pub(in crate::adapter) struct PurgeState {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The expiry at which the last portion of a round ended.
    from: Option<i64>,
    /// When the store's clock was last right, and its time, in milliseconds.
    right: Option<(Instant, i64)>,
    /// Since when the store's clock is ahead.
    ahead_since: Option<Instant>,
}

impl PurgeState {
    /// Deletes at most `limit` keys. `delete` takes a limit and an expiry; it deletes keys that expired
    /// then or later, the earliest first.
    ///
    /// # Errors
    ///
    /// The error of `delete`.
    pub(in crate::adapter) async fn purge<F>(
        &self,
        limit: u32,
        delete: impl Fn(u32, Option<i64>) -> F,
    ) -> Result<u64, Error>
    where
        F: Future<Output = Result<Portion, Error>>,
    {
        let from = self.state().from;
        let mut portion = delete(limit, from).await?;
        if from.is_some() && portion.keys < u64::from(limit) {
            self.state().from = None;
            let left = limit - u32::try_from(portion.keys).unwrap_or(limit);
            let front = delete(left, None).await?;
            portion = Portion { keys: portion.keys + front.keys, until: front.until };
        }
        self.state().from = portion.until.filter(|_| portion.keys >= u64::from(limit));
        Ok(portion.keys)
    }

    /// Checks rule 3 for a store whose clock shows this many milliseconds since the Unix epoch.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Refused`] if the clock has jumped.
    pub(in crate::adapter) fn check_clock(&self, clock_ms: i64) -> Result<(), Error> {
        self.state().check_clock(Instant::now(), clock_ms)
    }

    fn state(&self) -> impl std::ops::DerefMut<Target = State> + '_ {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn check_clock(&mut self, now: Instant, clock_ms: i64) -> Result<(), Error> {
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
        let (start, mut state) = (Instant::now(), State::default());
        let mut says = 1_000 * HOUR_MS;
        for (hours, clock) in [(0, 0), (1, 1), (2, 2), (3, 4), (4, 5), (100, 101), (101, -900)] {
            says = (1_000 + clock) * HOUR_MS;
            state.check_clock(start + PURGE_GRACE * hours, says).unwrap();
        }
        assert_eq!(state.right.map(|(_, says)| says), Some(says));
    }

    #[test]
    fn a_clock_that_jumps_is_refused_until_it_is_back() {
        let (start, mut state) = (Instant::now(), State::default());
        let at = |seconds| start + Duration::from_secs(seconds);
        state.check_clock(at(0), 0).unwrap();
        state.check_clock(at(60), HOUR_MS + 60_000).unwrap();
        let month = 30 * 24 * HOUR_MS;
        for seconds in [120, 180, 3_700] {
            let refused = state.check_clock(at(seconds), month).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Refused);
        }
        state.check_clock(at(3_710), HOUR_MS).unwrap();
        // The time of a second jump starts at zero.
        assert!(state.check_clock(at(3_720), month).is_err());
        assert!(state.check_clock(at(7_310), month).is_err());
    }

    #[test]
    fn a_clock_that_jumps_and_stays_is_accepted_after_the_grace() {
        let (start, mut state) = (Instant::now(), State::default());
        let month = 30 * 24 * HOUR_MS;
        state.check_clock(start, 0).unwrap();
        assert!(state.check_clock(start, month).is_err());
        assert!(state.check_clock(start + PURGE_GRACE / 2, month + HOUR_MS / 2).is_err());
        state.check_clock(start + PURGE_GRACE, month + HOUR_MS).unwrap();
        state.check_clock(start + PURGE_GRACE * 2, month + 2 * HOUR_MS).unwrap();
    }

    /// A table of expiries, and the expiry at which each portion began.
    struct Table {
        expiries: RefCell<Vec<i64>>,
        begun_at: RefCell<Vec<Option<i64>>>,
    }

    impl Table {
        fn new(expiries: impl IntoIterator<Item = i64>) -> Self {
            Self {
                expiries: RefCell::new(expiries.into_iter().collect()),
                begun_at: RefCell::default(),
            }
        }

        fn delete(&self, limit: u32, from: Option<i64>) -> Portion {
            self.begun_at.borrow_mut().push(from);
            let mut expiries = self.expiries.borrow_mut();
            expiries.sort_unstable();
            let such = |at: &i64| from.is_none_or(|from| *at >= from);
            let gone: Vec<i64> =
                expiries.iter().copied().filter(such).take(limit as usize).collect();
            expiries.retain(|at| !gone.contains(at));
            Portion { keys: gone.len() as u64, until: gone.last().copied() }
        }

        async fn purge(&self, state: &PurgeState, limit: u32) -> u64 {
            state.purge(limit, async |limit, from| Ok(self.delete(limit, from))).await.unwrap()
        }
    }

    #[tokio::test]
    async fn a_portion_begins_where_the_last_one_ended() {
        let (table, state) = (Table::new(1..=10), PurgeState::default());
        let mut purged = Vec::new();
        for _ in 0..4 {
            purged.push(table.purge(&state, 3).await);
        }
        assert_eq!(purged, [3, 3, 3, 1]);
        let begun = [None, Some(3), Some(6), Some(9), None];
        assert_eq!(*table.begun_at.borrow(), begun);
        // The next round begins at the front.
        table.expiries.borrow_mut().push(0);
        assert_eq!(table.purge(&state, 3).await, 1);
    }

    #[tokio::test]
    async fn less_than_the_limit_means_that_nothing_is_left() {
        let (table, state) = (Table::new(11..=14), PurgeState::default());
        assert_eq!(table.purge(&state, 3).await, 3);
        table.expiries.borrow_mut().extend([1, 2, 3]);
        // One key behind the last portion, and two keys before it.
        assert_eq!(table.purge(&state, 3).await, 3);
        assert_eq!(table.purge(&state, 3).await, 1);
        assert!(table.expiries.borrow().is_empty());
    }

    #[tokio::test]
    async fn a_portion_that_fails_is_repeated_where_it_began() {
        let (table, state) = (Table::new(1..=6), PurgeState::default());
        assert_eq!(table.purge(&state, 2).await, 2);
        let failing = async |_, _| Err(Error::new(ErrorKind::Unavailable, "purging"));
        assert!(state.purge(2, failing).await.is_err());
        assert_eq!(table.purge(&state, 2).await, 2);
        assert_eq!(*table.begun_at.borrow(), [None, Some(2)]);
    }
}
