//! Renews the leases of running handlers, in one task for all of them.
//!
//! 1. A lease is renewed at a third of its length, and after a failed attempt at a twelfth.
//! 2. The task is not the handler's: a handler that blocks its thread keeps its lease.
//! 3. It starts with the first claim, and ends when it wakes to find that nothing runs: it holds on
//!    to the adapter for up to a third of a lease after the last handler.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use slab::Slab;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::call::store_call;
use crate::adapter::{LeaseAdapter, Receipt, Renewed};
use crate::delivery::Delivery;
use crate::key::{DedupKey, List};
use crate::observe;

#[derive(Default)]
pub(super) struct Renewals {
    state: Mutex<State>,
    /// A lease became due earlier than the task sleeps.
    earlier: Notify,
}

#[derive(Default)]
struct State {
    running: Slab<Running>,
    sweeping: bool,
    wakes_at: Option<Instant>,
}

struct Running {
    lease: Arc<Lease>,
    due: Instant,
}

impl State {
    fn end_sweep(&mut self) {
        self.sweeping = false;
        self.wakes_at = None;
    }
}

/// Leases to renew, by their places.
type Due = Vec<(usize, Arc<Lease>)>;

/// A lease to keep: of a delivery, and shared with its claim.
pub(super) struct Lease {
    keys: List<DedupKey>,
    pub(super) receipt: Receipt,
    pub(super) store_timeout: Duration,
    pub(super) delivery: Delivery,
    settling: AtomicBool,
}

impl Lease {
    pub(super) fn new(
        keys: List<DedupKey>,
        receipt: Receipt,
        store_timeout: Duration,
        delivery: Delivery,
    ) -> Self {
        Self { keys, receipt, store_timeout, delivery, settling: AtomicBool::new(false) }
    }

    /// Sorted.
    pub(super) fn keys(&self) -> &[DedupKey] {
        &self.keys
    }

    /// The handler has ended: from here on the lease is still renewed, but losing it is for the
    /// completion to tell, whose answer crosses with the renewal's.
    pub(super) fn settle(&self) {
        self.settling.store(true, Ordering::Release);
    }

    /// When to renew it, if it counts from `since`.
    fn due(&self, since: Instant) -> Instant {
        since + clamped(self.receipt.lease() / 3)
    }
}

/// Keeps a lease for as long as it lives.
pub(super) struct Kept {
    renewals: Arc<Renewals>,
    place: usize,
}

impl Drop for Kept {
    fn drop(&mut self) {
        let running = self.renewals.lock().running.try_remove(self.place);
        // With the lock given back.
        drop(running);
    }
}

impl Renewals {
    /// Keeps `lease`, which counts from `since`, until the answer is dropped.
    ///
    /// If it answers true, the caller has to yield once before it runs a handler: the task that
    /// was just woken waits for this very thread, and no other thread takes it over from there,
    /// should the handler block this one.
    pub(super) fn keep<A: LeaseAdapter>(
        self: &Arc<Self>,
        adapter: &Arc<A>,
        lease: Arc<Lease>,
        since: Instant,
    ) -> (Kept, bool) {
        let (kept, starts, earlier) = self.add(lease, since);
        if starts {
            let sweeping = Sweeping { renewals: Arc::clone(self), ended: false };
            tokio::spawn(sweep(sweeping, Arc::clone(adapter)));
        } else if earlier {
            self.earlier.notify_one();
        }
        (kept, starts || earlier)
    }

    /// Whether the task has to be started, and whether it sleeps for too long.
    fn add(self: &Arc<Self>, lease: Arc<Lease>, since: Instant) -> (Kept, bool, bool) {
        let due = lease.due(since);
        let mut state = self.lock();
        let place = state.running.insert(Running { lease, due });
        let starts = !std::mem::replace(&mut state.sweeping, true);
        let earlier = state.wakes_at.is_some_and(|wakes_at| due < wakes_at);
        (Kept { renewals: Arc::clone(self), place }, starts, earlier)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No holder leaves the state half-changed when it panics.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes what is due, and says when the next one is; `None` if nothing runs.
    fn due(&self) -> Option<(Due, Instant)> {
        let mut state = self.lock();
        let now = Instant::now();
        let mut due = Vec::new();
        for (place, running) in &mut state.running {
            if running.due <= now {
                running.due = running.lease.due(now);
                due.push((place, Arc::clone(&running.lease)));
            }
        }
        let next = state.running.iter().map(|(_, running)| running.due).min();
        state.wakes_at = next;
        next.map(|next| (due, next))
    }
}

/// The task; a runtime that drops it lets the next claim start another.
struct Sweeping {
    renewals: Arc<Renewals>,
    ended: bool,
}

impl Drop for Sweeping {
    fn drop(&mut self) {
        // After a proper end, another task may run already.
        if !self.ended {
            self.renewals.lock().end_sweep();
        }
    }
}

async fn sweep<A: LeaseAdapter>(mut sweeping: Sweeping, adapter: Arc<A>) {
    let renewals = Arc::clone(&sweeping.renewals);
    loop {
        match renewals.due() {
            Some((due, next)) => {
                for (place, lease) in due {
                    tokio::spawn(renew(Arc::clone(&renewals), Arc::clone(&adapter), place, lease));
                }
                tokio::select! {
                    () = tokio::time::sleep_until(next) => {}
                    () = renewals.earlier.notified() => {}
                }
            }
            None => {
                // Under the lock, so that no claim slips in between the look and the end.
                let mut state = renewals.lock();
                if state.running.is_empty() {
                    state.end_sweep();
                    sweeping.ended = true;
                    return;
                }
            }
        }
    }
}

async fn renew<A: LeaseAdapter>(
    renewals: Arc<Renewals>,
    adapter: Arc<A>,
    place: usize,
    lease: Arc<Lease>,
) {
    let call = Box::pin(async { adapter.renew(lease.keys(), &lease.receipt).await });
    let answer = store_call("renew", lease.store_timeout, lease.keys().len(), call).await;
    let mut state = renewals.lock();
    // A delivery that ended meanwhile has given its lease up itself, and its place may be another's.
    let running = state.running.get_mut(place).filter(|now| Arc::ptr_eq(&now.lease, &lease));
    let Some(running) = running else { return };
    match answer {
        Ok(answers) if answers.iter().all(|renewed| *renewed == Renewed::Held) => {}
        Ok(_) if lease.settling.load(Ordering::Acquire) => {}
        Ok(answers) => {
            let lost = lease.keys().iter().zip(&answers);
            let lost = lost.filter(|(_, renewed)| **renewed == Renewed::Lost).map(|(key, _)| key);
            if lease.delivery.mark_lease_lost() {
                lost.for_each(observe::lease_lost);
            }
        }
        Err(_) => {
            running.due = Instant::now() + clamped(lease.receipt.lease() / 12);
            renewals.earlier.notify_one();
        }
    }
}

/// Neither at once nor for ever: an extreme lease ends in a day's sleep at a time.
fn clamped(delay: Duration) -> Duration {
    const DAY: Duration = Duration::from_secs(86_400);
    delay.clamp(Duration::from_millis(1), DAY)
}
