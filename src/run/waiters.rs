//! [`Waiters`]: the deliveries of one process that wait for events in flight.
//!
//! 1. At most [`MOST_OF_A_KEY`] deliveries wait for one key. So duplicates of one event take few places.
//! 2. Deliveries with equal identities wait for the same rows. One of them has the [`Turn`]: it alone claims
//!    again, at growing pauses. The others wait for the turn.
//! 3. Dropped, a turn goes to the next waiter, in the order of arrival. The pauses are those of the event, so the
//!    next waiter goes on where the one before has stopped.
//! 4. The end of a delivery wakes the waiter with the turn, which claims at once. If it finds the event complete,
//!    the next waiter claims at once, too. If it runs the event itself, the next waiter polls.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{self, Notify};
use tokio::time::{Instant, sleep_until, timeout_at};

use crate::key::{DedupKey, Keys};
use crate::ledger::{PollDelays, poll_delays};

/// How many deliveries wait for one key.
const MOST_OF_A_KEY: usize = 8;

/// The times at which an event in flight is claimed again.
pub(crate) struct Polls {
    delays: PollDelays,
    due: Instant,
}

impl Polls {
    pub(crate) fn start() -> Self {
        let mut polls = Self { delays: poll_delays(), due: Instant::now() };
        polls.advance();
        polls
    }

    /// Returns when to claim again.
    pub(crate) fn due(&self) -> Instant {
        self.due
    }

    /// Counts the next pause from now.
    pub(crate) fn advance(&mut self) {
        self.due = Instant::now() + self.delays.next().unwrap_or_default();
    }
}

/// The waiting deliveries, by the first key of each.
#[derive(Default)]
pub(crate) struct Waiters {
    by_key: Mutex<HashMap<DedupKey, Vec<Arc<Awaited>>>>,
    /// How many keys have waiters. At zero, `wake` takes no lock.
    count: AtomicUsize,
}

/// What deliveries with equal identities wait for. Each of them holds a handle to it, and the map one more.
struct Awaited {
    keys: Keys,
    turn: sync::Mutex<Polls>,
    /// Keeps one permit if nobody waits for it: the waiter with the turn may be claiming.
    ended: Notify,
}

impl Waiters {
    /// Registers a waiter of these keys until the result is dropped. Returns `None` if too many deliveries wait for
    /// the first key.
    pub(crate) fn wait_for(&self, keys: &Keys) -> Option<Waiter<'_>> {
        let mut by_key = self.lock();
        let of_key = by_key.entry(keys.first().clone()).or_default();
        if of_key.iter().map(|awaited| awaited.waiters()).sum::<usize>() >= MOST_OF_A_KEY {
            return None;
        }
        let known = of_key.iter().find(|awaited| awaited.keys == *keys).map(Arc::clone);
        let awaited = known.unwrap_or_else(|| {
            let (turn, ended) = (sync::Mutex::new(Polls::start()), Notify::new());
            let awaited = Arc::new(Awaited { keys: keys.clone(), turn, ended });
            of_key.push(Arc::clone(&awaited));
            awaited
        });
        self.count.store(by_key.len(), Ordering::Release);
        Some(Waiter { waiters: self, awaited: Some(awaited) })
    }

    /// Wakes the waiters of these keys: their delivery has ended.
    pub(crate) fn wake<'k>(&self, keys: impl Iterator<Item = &'k DedupKey>) {
        if self.count.load(Ordering::Acquire) == 0 {
            return;
        }
        let by_key = self.lock();
        for awaited in keys.filter_map(|key| by_key.get(key)).flatten() {
            awaited.ended.notify_one();
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<DedupKey, Vec<Arc<Awaited>>>> {
        self.by_key.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Awaited {
    /// Waiters are registered and removed under the lock of the map, so the number is exact there.
    fn waiters(self: &Arc<Self>) -> usize {
        Arc::strong_count(self) - 1
    }
}

pub(crate) struct Waiter<'w> {
    waiters: &'w Waiters,
    /// `None` while it is dropped.
    awaited: Option<Arc<Awaited>>,
}

impl Waiter<'_> {
    /// Waits until no other waiter has the turn. Returns `None` past the deadline.
    pub(crate) async fn turn(&self, deadline: Instant) -> Option<Turn<'_>> {
        let awaited = self.awaited.as_ref()?;
        let polls = timeout_at(deadline, awaited.turn.lock()).await.ok()?;
        Some(Turn { awaited, polls })
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        let mut by_key = self.waiters.lock();
        let Some(awaited) = self.awaited.take() else { return };
        if awaited.waiters() > 1 {
            return;
        }
        let key = awaited.keys.first();
        if let Some(of_key) = by_key.get_mut(key) {
            of_key.retain(|other| !Arc::ptr_eq(other, &awaited));
            if of_key.is_empty() {
                by_key.remove(key);
            }
        }
        self.waiters.count.store(by_key.len(), Ordering::Release);
    }
}

/// The right to claim an event again. One waiter of it has the right.
pub(crate) struct Turn<'w> {
    awaited: &'w Arc<Awaited>,
    polls: sync::MutexGuard<'w, Polls>,
}

impl Turn<'_> {
    /// Waits until the event is to be claimed again. Returns `false` past the deadline. Before that, a waiter that is
    /// alone claims a last time; the polls of others go on without it.
    pub(crate) async fn next(&mut self, deadline: Instant) -> bool {
        let due = self.polls.due();
        tokio::select! {
            biased;
            () = self.awaited.ended.notified() => true,
            () = sleep_until(due.min(deadline)) => due <= deadline || self.awaited.waiters() == 1,
        }
    }

    /// Notes that the event was claimed again. If it is complete, the next waiter claims at once.
    pub(crate) fn claimed(&mut self, is_complete: bool) {
        self.polls.advance();
        if is_complete {
            self.awaited.ended.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures_util::{FutureExt, poll};

    use super::*;
    use crate::key::Event;

    fn key(id: &str) -> DedupKey {
        DedupKey::new("test", id).unwrap()
    }

    fn keys(id: &str) -> Keys {
        Event::new(key(id)).into()
    }

    fn in_a_minute() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    #[tokio::test(start_paused = true)]
    async fn end_of_a_delivery_wakes_the_turn_of_its_keys_only() {
        let waiters = Waiters::default();
        waiters.wake([&key("a")].into_iter());
        let waiter = waiters.wait_for(&keys("a")).unwrap();
        let mut turn = waiter.turn(in_a_minute()).await.unwrap();
        {
            let mut next = std::pin::pin!(turn.next(in_a_minute()));
            waiters.wake([&key("b")].into_iter());
            assert!(poll!(next.as_mut()).is_pending());
            waiters.wake([&key("b"), &key("a")].into_iter());
            assert!(next.await);
        }
        // The delivery may end while the waiter claims.
        waiters.wake([&key("a")].into_iter());
        assert_eq!(turn.next(in_a_minute()).now_or_never(), Some(true));
        assert_eq!(turn.next(in_a_minute()).now_or_never(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn turn_that_is_dropped_goes_to_the_next_waiter_with_its_pauses() {
        let waiters = Waiters::default();
        let [first, second] = [(); 2].map(|()| waiters.wait_for(&keys("a")).unwrap());
        let mut turn = first.turn(in_a_minute()).await.unwrap();
        let mut waits = std::pin::pin!(second.turn(in_a_minute()));
        assert!(poll!(waits.as_mut()).is_pending());
        let start = Instant::now();
        for _ in 0..12 {
            assert!(turn.next(in_a_minute()).await);
            turn.claimed(false);
        }
        let due = turn.polls.due();
        // The runtime of the first one ends.
        drop(turn);
        drop(first);
        let mut turn = waits.now_or_never().flatten().expect("the turn");
        assert_eq!(turn.polls.due(), due);
        assert!(due - start > Duration::from_millis(400));
        // The event is complete, so the next one claims at once.
        turn.claimed(true);
        assert_eq!(turn.next(in_a_minute()).now_or_never(), Some(true));
    }

    #[tokio::test(start_paused = true)]
    async fn only_a_waiter_that_is_alone_claims_at_its_deadline() {
        let waiters = Waiters::default();
        let [first, second] = [(); 2].map(|()| waiters.wait_for(&keys("a")).unwrap());
        let deadline = Instant::now() + Duration::from_millis(1);
        let mut turn = first.turn(deadline).await.unwrap();
        assert!(second.turn(deadline).await.is_none());
        assert!(!turn.next(deadline).await);
        drop(second);
        assert!(turn.next(deadline).await);
    }

    #[test]
    fn eight_wait_for_one_key_and_the_last_one_removes_its_entry() {
        let waiters = Waiters::default();
        let left = || (waiters.lock().len(), waiters.count.load(Ordering::Acquire));
        let list = |ids: [&str; 2]| Keys::new(ids.map(|id| Event::new(key(id))).to_vec()).unwrap();
        let mut waiting: Vec<_> = (0..6).map(|_| waiters.wait_for(&keys("a")).unwrap()).collect();
        waiting.extend([["a", "b"], ["a", "c"]].map(|ids| waiters.wait_for(&list(ids)).unwrap()));
        assert!(waiters.wait_for(&keys("a")).is_none());
        assert!(waiters.wait_for(&list(["a", "d"])).is_none());
        let other = waiters.wait_for(&keys("b")).unwrap();
        assert_eq!(left(), (2, 2));
        waiting.pop();
        waiting.push(waiters.wait_for(&keys("a")).unwrap());
        assert!(waiters.wait_for(&keys("a")).is_none());
        drop(waiting);
        assert_eq!(left(), (1, 1));
        drop(other);
        assert_eq!(left(), (0, 0));
    }
}
