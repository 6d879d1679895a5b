//! [`Waiters`]: the deliveries of one process that wait for events in flight.
//!
//! 1. At most [`MOST_OF_A_KEY`] deliveries wait for one key. So duplicates of one event take few
//!    slots.
//! 2. Deliveries with equal identities wait for the same rows. One of them has the turn: it alone
//!    claims again, at growing pauses. The others wait for the turn.
//! 3. It claims only if it may run: see [`Admission`]. If it may not now, it waits for its next
//!    pause.
//! 4. If the waiter with the turn is dropped, the turn goes to the next waiter, in the order of
//!    arrival. The pauses belong to the event, so the next waiter continues them.
//! 5. The end of a delivery wakes the waiter with the turn, which claims at once. If it finds the
//!    event complete, the next waiter claims at once, too. If it runs the event itself, the next
//!    waiter polls.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{self, Notify};
use tokio::time::{Instant, sleep_until, timeout_at};

use crate::error::StoreError;
use crate::key::{DedupKey, Keys};
use crate::ledger::{AnyLedger, Begin, Calls, PollDelays, poll_delays};

/// How many deliveries wait for one key.
const MOST_OF_A_KEY: usize = 8;

/// The longest wait. An extreme one would overflow.
const LONGEST_WAIT: Duration = Duration::from_secs(86_400);

/// The waiting deliveries, by the first key of each.
#[derive(Default)]
pub(crate) struct Waiters {
    by_key: Mutex<HashMap<DedupKey, Vec<Arc<Awaited>>>>,
    /// How many keys have waiters. At zero, `wake` takes no lock.
    count: AtomicUsize,
}

/// What deliveries with equal identities wait for. Each of them holds a handle to it, and the map
/// one more.
struct Awaited {
    keys: Keys,
    /// The pauses before the next claims.
    turn: sync::Mutex<PollDelays>,
    /// Keeps one permit if nobody waits for it: the waiter with the turn may be claiming.
    ended: Notify,
}

/// What a delivery holds while it runs, and not while it waits.
pub(crate) trait Admission {
    /// Why a delivery may not run.
    type Refusal;

    /// What a delivery that has waited holds until its claim has its reply.
    type Turn;

    /// Takes it before a claim. Returns `None` if the delivery may not run now, and the deadline
    /// has not passed.
    async fn admit(&mut self, deadline: Instant) -> Result<Option<Self::Turn>, Self::Refusal>;

    /// Gives it back before a wait.
    fn release(&mut self);
}

/// Why a delivery that has waited has not begun.
pub(crate) enum NotBegun<R> {
    /// The store has failed.
    Failed(StoreError),
    /// The delivery may not run.
    Refused(R),
}

/// For deliveries that hold nothing.
impl Admission for () {
    type Refusal = std::convert::Infallible;
    type Turn = ();

    async fn admit(&mut self, _: Instant) -> Result<Option<()>, Self::Refusal> {
        Ok(Some(()))
    }

    fn release(&mut self) {}
}

impl Waiters {
    /// Registers a waiter of these keys until the result is dropped. Returns `None` if too many
    /// deliveries wait for the first key.
    pub(crate) fn wait_for(&self, keys: &Keys) -> Option<Waiter<'_>> {
        let mut by_key = self.lock();
        let of_key = by_key.entry(keys.first().clone()).or_default();
        if of_key.iter().map(Awaited::waiters).sum::<usize>() >= MOST_OF_A_KEY {
            return None;
        }
        let known = of_key.iter().find(|awaited| awaited.keys == *keys).map(Arc::clone);
        let awaited = known.unwrap_or_else(|| {
            let (turn, ended) = (sync::Mutex::new(poll_delays()), Notify::new());
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

/// A place among the waiters of a key.
pub(crate) struct Waiter<'w> {
    waiters: &'w Waiters,
    /// `None` while it is dropped.
    awaited: Option<Arc<Awaited>>,
}

impl Waiter<'_> {
    /// Waits until the other delivery has ended, and claims the keys again. Past the bound, the
    /// event is in flight.
    ///
    /// # Errors
    ///
    /// The store has failed, or the delivery may not run.
    pub(crate) async fn claim<A: Admission>(
        &self,
        ledger: &Arc<AnyLedger>,
        calls: &Calls,
        bound: Duration,
        admission: &mut A,
    ) -> Result<Begin, NotBegun<A::Refusal>> {
        let deadline = Instant::now() + bound.min(LONGEST_WAIT);
        let Some(awaited) = &self.awaited else { return Ok(Begin::InFlight) };
        let Ok(mut pauses) = timeout_at(deadline, awaited.turn.lock()).await else {
            return Ok(Begin::InFlight);
        };
        loop {
            admission.release();
            let due = Instant::now() + pauses.next().unwrap_or_default();
            let is_woken = tokio::select! {
                biased;
                () = awaited.ended.notified() => true,
                () = sleep_until(due.min(deadline)) => false,
            };
            // A waiter that is alone claims a last time. The polls of others go on without it.
            if !is_woken && due > deadline && awaited.waiters() > 1 {
                return Ok(Begin::InFlight);
            }
            let admitted = admission.admit(deadline).await.map_err(NotBegun::Refused)?;
            let Some(turn) = admitted else {
                // The delivery that has ended gives its permit back soon.
                if is_woken {
                    *pauses = poll_delays();
                }
                continue;
            };
            // It does not fail open: another delivery runs this event, so an error of the store
            // must not start it unprotected.
            let begun = ledger.begin(&awaited.keys, calls.again()).await;
            drop(turn);
            if matches!(begun, Ok(Begin::Duplicate(_) | Begin::Mismatch(_))) {
                awaited.ended.notify_one();
            }
            let is_undecided = matches!(begun, Ok(Begin::InFlight) | Err(_));
            if !is_undecided || Instant::now() >= deadline {
                return match begun {
                    Err(_) if calls.fails_open => Ok(Begin::InFlight),
                    begun => begun.map_err(NotBegun::Failed),
                };
            }
        }
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        let mut by_key = self.waiters.lock();
        // Dropped under the lock, as the number of waiters is read.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::Event;

    fn key(id: &str) -> DedupKey {
        DedupKey::new("test", id).unwrap()
    }

    fn keys(id: &str) -> Keys {
        Event::new(key(id)).into()
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
