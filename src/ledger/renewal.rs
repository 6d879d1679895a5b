//! Renews the leases of running handlers, in one task for each runtime.
//!
//! 1. A lease is renewed at a third of its length, and after a failed attempt at a twelfth.
//! 2. The task is not the handler's: a handler that blocks its thread keeps its lease.
//! 3. A task renews the leases that were claimed in its own runtime: a runtime that is alive but
//!    not driven stops no other runtime's renewals.
//! 4. The task starts with the runtime's first claim, and ends when it wakes to find that nothing
//!    runs: it holds on to the adapter for up to a third of a lease after the last handler.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use slab::Slab;
use tokio::runtime::{self, Handle};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::call::store_call;
use crate::adapter::{CallTerms, LeaseAdapter, Renewed};
use crate::delivery::Delivery;
use crate::key::{DedupKey, List};
use crate::observe;

#[derive(Default)]
pub(super) struct Renewals {
    /// Of runtimes that have a lease or a task.
    states: Mutex<HashMap<runtime::Id, State>>,
}

/// The leases of one runtime.
#[derive(Default)]
struct State {
    running: Slab<Running>,
    sweeping: bool,
    wakes_at: Option<Instant>,
    /// A lease became due earlier than the task sleeps.
    earlier: Arc<Notify>,
}

struct Running {
    lease: Arc<HeldLease>,
    due: Instant,
}

/// Leases to renew, by their places.
type Due = Vec<(usize, Arc<HeldLease>)>;

/// A lease to keep: of a delivery, and shared with its claim.
pub(super) struct HeldLease {
    keys: List<DedupKey>,
    pub(super) terms: CallTerms,
    pub(super) store_timeout: Duration,
    pub(super) delivery: Delivery,
    settling: AtomicBool,
}

impl HeldLease {
    pub(super) fn new(
        keys: List<DedupKey>,
        terms: CallTerms,
        store_timeout: Duration,
        delivery: Delivery,
    ) -> Self {
        Self { keys, terms, store_timeout, delivery, settling: AtomicBool::new(false) }
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
        since + clamped(self.terms.lease() / 3)
    }
}

/// Keeps a lease for as long as it lives.
pub(super) struct RenewalGuard {
    renewals: Arc<Renewals>,
    runtime: runtime::Id,
    place: usize,
}

impl Drop for RenewalGuard {
    fn drop(&mut self) {
        let mut states = self.renewals.lock();
        let Some(state) = states.get_mut(&self.runtime) else { return };
        let running = state.running.try_remove(self.place);
        // Of a runtime that has ended.
        if !state.sweeping && state.running.is_empty() {
            states.remove(&self.runtime);
        }
        // With the lock given back.
        drop(states);
        drop(running);
    }
}

impl Renewals {
    /// Keeps `lease`, which counts from `since`, until the returned [`RenewalGuard`] is dropped; `None`
    /// outside a runtime.
    ///
    /// If the second value is true, the caller has to yield once before it runs a handler: the
    /// task that was just woken waits for this very thread, and no other thread takes it over from
    /// there, should the handler block this one.
    pub(super) fn keep<A: LeaseAdapter>(
        self: &Arc<Self>,
        adapter: &Arc<A>,
        lease: Arc<HeldLease>,
        since: Instant,
    ) -> (Option<RenewalGuard>, bool) {
        let Ok(runtime) = Handle::try_current() else { return (None, false) };
        let (kept, starts, earlier) = self.add(runtime.id(), lease, since);
        if let Some(earlier) = &earlier {
            earlier.notify_one();
        }
        if starts {
            let sweeping =
                Sweeping { renewals: Arc::clone(self), runtime: runtime.id(), ended: false };
            runtime.spawn(sweep(sweeping, Arc::clone(adapter)));
        }
        (Some(kept), starts || earlier.is_some())
    }

    /// Adds a lease. Returns also whether the task has to be started, and what wakes a task that
    /// sleeps for too long.
    fn add(
        self: &Arc<Self>,
        runtime: runtime::Id,
        lease: Arc<HeldLease>,
        since: Instant,
    ) -> (RenewalGuard, bool, Option<Arc<Notify>>) {
        let due = lease.due(since);
        let mut states = self.lock();
        let state = states.entry(runtime).or_default();
        let place = state.running.insert(Running { lease, due });
        let starts = !std::mem::replace(&mut state.sweeping, true);
        let sleeps_too_long = state.wakes_at.is_some_and(|wakes_at| due < wakes_at);
        let earlier = sleeps_too_long.then(|| Arc::clone(&state.earlier));
        (RenewalGuard { renewals: Arc::clone(self), runtime, place }, starts, earlier)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<runtime::Id, State>> {
        // No holder leaves the state half-changed when it panics.
        self.states.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a task does next.
enum Next {
    /// Renews these, and sleeps until then or until it is woken.
    Renew(Due, Instant, Arc<Notify>),
    /// Nothing runs: another task starts with the next claim.
    End,
}

/// The task; a runtime that drops it lets the next claim start another.
struct Sweeping {
    renewals: Arc<Renewals>,
    runtime: runtime::Id,
    ended: bool,
}

impl Sweeping {
    /// Takes what is due.
    fn next(&mut self) -> Next {
        let mut states = self.renewals.lock();
        let running = states.get_mut(&self.runtime).filter(|state| !state.running.is_empty());
        let Some(state) = running else {
            // Under the lock, so that no claim slips in between the look and the end.
            states.remove(&self.runtime);
            self.ended = true;
            return Next::End;
        };
        let now = Instant::now();
        let (mut due, mut next) = (Vec::new(), None);
        for (place, running) in &mut state.running {
            if running.due <= now {
                running.due = running.lease.due(now);
                due.push((place, Arc::clone(&running.lease)));
            }
            next = next.min(Some(running.due)).or(Some(running.due));
        }
        state.wakes_at = next;
        Next::Renew(due, next.unwrap_or(now), Arc::clone(&state.earlier))
    }
}

impl Drop for Sweeping {
    fn drop(&mut self) {
        // After a proper end, another task may run already.
        if self.ended {
            return;
        }
        let mut states = self.renewals.lock();
        if let Some(state) = states.get_mut(&self.runtime) {
            state.sweeping = false;
            state.wakes_at = None;
            if state.running.is_empty() {
                states.remove(&self.runtime);
            }
        }
    }
}

async fn sweep<A: LeaseAdapter>(mut sweeping: Sweeping, adapter: Arc<A>) {
    while let Next::Renew(due, next, earlier) = sweeping.next() {
        for (place, lease) in due {
            let (renewals, adapter) = (Arc::clone(&sweeping.renewals), Arc::clone(&adapter));
            tokio::spawn(renew(renewals, sweeping.runtime, adapter, place, lease));
        }
        tokio::select! {
            () = tokio::time::sleep_until(next) => {}
            () = earlier.notified() => {}
        }
    }
}

async fn renew<A: LeaseAdapter>(
    renewals: Arc<Renewals>,
    runtime: runtime::Id,
    adapter: Arc<A>,
    place: usize,
    lease: Arc<HeldLease>,
) {
    let call = Box::pin(async { adapter.renew(lease.keys(), &lease.terms).await });
    let answer = store_call("renew", lease.store_timeout, lease.keys().len(), call).await;
    let mut states = renewals.lock();
    let Some(state) = states.get_mut(&runtime) else { return };
    // A delivery that ended meanwhile has given its lease up itself, and its place may be another's.
    let running = state.running.get_mut(place).filter(|now| Arc::ptr_eq(&now.lease, &lease));
    let Some(running) = running else { return };
    match answer {
        Ok(answers) if answers.iter().all(|renewed| *renewed == Renewed::Held) => {}
        Ok(_) if lease.settling.load(Ordering::Acquire) => {}
        Ok(answers) => {
            let is_news = lease.delivery.mark_lease_lost();
            // Subscribers and recorders are the user's code, which may claim or end a claim.
            drop(states);
            if is_news {
                let lost = lease.keys().iter().zip(&answers);
                let lost = lost.filter(|(_, renewed)| **renewed == Renewed::Lost);
                lost.for_each(|(key, _)| observe::lease_lost(key));
            }
        }
        Err(_) => {
            running.due = Instant::now() + clamped(lease.terms.lease() / 12);
            state.earlier.notify_one();
        }
    }
}

/// Neither at once nor for ever: an extreme lease ends in a day's sleep at a time.
fn clamped(delay: Duration) -> Duration {
    const DAY: Duration = Duration::from_secs(86_400);
    delay.clamp(Duration::from_millis(1), DAY)
}
