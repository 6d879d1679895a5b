//! Renews the leases of running handlers, in one task (the sweeper) for each layer.
//!
//! 1. A lease is renewed at a third of its length, and after a failed attempt at a twelfth.
//! 2. The sweeper is a task of its own, so the lease of a handler that blocks its thread is renewed.
//! 3. The sweeper starts with the first claim, and again with the next one if its runtime has ended. It ends
//!    when it wakes and no delivery runs. It wakes at least every [`LINGER`], so it holds the adapter no longer
//!    than that after the last handler.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use slab::Slab;
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use super::call;
use crate::adapter::contract::{CallTerms, DedupAdapter, RenewReply};
use crate::delivery::Inner;
use crate::key::{DedupKey, List};
use crate::observe;

/// A sweeper that ended with each last delivery would start again with the next one, and a start makes
/// its delivery yield.
const LINGER: Duration = Duration::from_millis(250);

#[derive(Default)]
pub(super) struct Renewals {
    leases: Mutex<Leases>,
    /// Wakes the sweeper, because a lease is due earlier than the sweeper wakes.
    earlier: Notify,
}

#[derive(Default)]
struct Leases {
    running: Slab<Running>,
    sweeping: bool,
    wakes_at: Option<Instant>,
}

struct Running {
    lease: Arc<HeldLease>,
    due: Instant,
    /// The last renewal. It ends with the lease: a release must follow it.
    renewal: Option<AbortOnDropHandle<()>>,
}

/// Leases to renew, with their places.
type Due = Vec<(usize, Arc<HeldLease>)>;

/// A delivery with its lease, shared with its claim.
pub(super) type HeldLease = Inner<LeaseTerms>;

/// What a ledger holds with a delivery under a lease.
pub(super) struct LeaseTerms {
    /// Sorted.
    keys: List<DedupKey>,
    pub(super) terms: CallTerms,
    pub(super) store_timeout: Duration,
    handler_ended: AtomicBool,
}

impl LeaseTerms {
    pub(super) fn new(keys: List<DedupKey>, terms: CallTerms, store_timeout: Duration) -> Self {
        Self { keys, terms, store_timeout, handler_ended: AtomicBool::new(false) }
    }

    /// Returns the keys, sorted.
    pub(super) fn keys(&self) -> &[DedupKey] {
        &self.keys
    }

    /// Marks the handler as ended. The lease is still renewed. From now on only the completion reports
    /// a lost lease, because a renewal after the completion finds no lease.
    pub(super) fn mark_handler_ended(&self) {
        self.handler_ended.store(true, Ordering::Release);
    }

    /// Returns when to renew the lease, which counts from `since`.
    fn due(&self, since: Instant) -> Instant {
        since + clamped(self.terms.lease() / 3)
    }
}

/// Ends the renewals of a lease when it is dropped.
pub(super) struct RenewalGuard {
    renewals: Arc<Renewals>,
    place: usize,
    has_woken: bool,
}

impl RenewalGuard {
    /// Returns `true` if the caller must yield once before it runs a handler. The sweeper was woken on this
    /// thread. If the handler blocked this thread, no other thread would run the sweeper.
    pub(super) fn must_yield(&self) -> bool {
        self.has_woken
    }
}

impl Drop for RenewalGuard {
    fn drop(&mut self) {
        let running = self.renewals.lock().running.try_remove(self.place);
        // Dropped without the lock, because the drop may run other code.
        drop(running);
    }
}

impl Renewals {
    /// Renews `lease`, which counts from `since`, until the returned guard is dropped. Returns no guard
    /// outside a runtime.
    pub(super) fn start(
        self: &Arc<Self>,
        adapter: &Arc<dyn DedupAdapter>,
        lease: Arc<HeldLease>,
        since: Instant,
    ) -> Option<RenewalGuard> {
        let runtime = Handle::try_current().ok()?;
        let due = lease.of_ledger.due(since);
        let mut leases = self.lock();
        let place = leases.running.insert(Running { lease, due, renewal: None });
        let starts = !std::mem::replace(&mut leases.sweeping, true);
        let sleeps_too_long = leases.wakes_at.is_some_and(|wakes_at| due < wakes_at);
        drop(leases);
        if sleeps_too_long {
            self.earlier.notify_one();
        }
        if starts {
            let (renewals, adapter) = (Arc::clone(self), Arc::clone(adapter));
            runtime.spawn(Sweeper { renewals, adapter, ended: false }.run());
        }
        let has_woken = starts || sleeps_too_long;
        Some(RenewalGuard { renewals: Arc::clone(self), place, has_woken })
    }

    fn lock(&self) -> MutexGuard<'_, Leases> {
        // No holder panics between two changes that belong together.
        self.leases.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The task that renews the leases. If its runtime drops it, the next claim starts another.
struct Sweeper {
    renewals: Arc<Renewals>,
    adapter: Arc<dyn DedupAdapter>,
    ended: bool,
}

impl Sweeper {
    async fn run(mut self) {
        while let Some((due, next)) = self.next() {
            for (place, lease) in due {
                let (renewals, adapter) = (Arc::clone(&self.renewals), Arc::clone(&self.adapter));
                let renewal = renew(renewals, adapter, place, Arc::clone(&lease));
                self.attach(place, &lease, AbortOnDropHandle::new(tokio::spawn(renewal)));
            }
            tokio::select! {
                () = tokio::time::sleep_until(next) => {}
                () = self.renewals.earlier.notified() => {}
            }
        }
    }

    /// Makes the renewal end with the lease. It ends at once if the lease has ended.
    fn attach(&self, place: usize, lease: &Arc<HeldLease>, renewal: AbortOnDropHandle<()>) {
        let mut leases = self.renewals.lock();
        let running = leases.running.get_mut(place);
        let running = running.filter(|running| Arc::ptr_eq(&running.lease, lease));
        let before = running.and_then(|running| running.renewal.replace(renewal));
        drop(leases);
        drop(before);
    }

    /// Takes the leases that are due. Returns with them when to wake again; `None` if no delivery runs: the
    /// next claim starts another sweeper.
    fn next(&mut self) -> Option<(Due, Instant)> {
        let mut leases = self.renewals.lock();
        if leases.running.is_empty() {
            // The lock is held, so that no claim comes between the check and the end.
            (leases.sweeping, leases.wakes_at) = (false, None);
            self.ended = true;
            return None;
        }
        let now = Instant::now();
        let (mut due, mut next) = (Vec::new(), now + LINGER);
        for (place, running) in &mut leases.running {
            if running.due <= now {
                running.due = running.lease.of_ledger.due(now);
                due.push((place, Arc::clone(&running.lease)));
            }
            next = next.min(running.due);
        }
        leases.wakes_at = Some(next);
        Some((due, next))
    }
}

impl Drop for Sweeper {
    fn drop(&mut self) {
        // Another sweeper may run already.
        if !self.ended {
            let mut leases = self.renewals.lock();
            (leases.sweeping, leases.wakes_at) = (false, None);
        }
    }
}

async fn renew(
    renewals: Arc<Renewals>,
    adapter: Arc<dyn DedupAdapter>,
    place: usize,
    lease: Arc<HeldLease>,
) {
    let held = &lease.of_ledger;
    let keys = held.keys();
    let replies = call::renew(&*adapter, keys, &held.terms, held.store_timeout).await;
    let mut leases = renewals.lock();
    // The delivery may have ended during the call, and another delivery may have its place.
    let running = leases.running.get_mut(place).filter(|now| Arc::ptr_eq(&now.lease, &lease));
    let Some(running) = running else { return };
    match call::all(replies) {
        Ok(replies) if replies.iter().all(|renewed| *renewed == RenewReply::Held) => {}
        Ok(_) if held.handler_ended.load(Ordering::Acquire) => {}
        Ok(replies) => {
            let is_first_report = lease.mark_lease_lost();
            // The report calls a subscriber or a recorder, which is the user's code and may claim.
            drop(leases);
            if is_first_report {
                let lost = keys.iter().zip(&replies);
                let lost = lost.filter(|(_, renewed)| **renewed == RenewReply::Lost);
                lost.for_each(|(key, _)| observe::lease_lost(key));
            }
        }
        Err(_) => {
            running.due = Instant::now() + clamped(held.terms.lease() / 12);
            renewals.earlier.notify_one();
        }
    }
}

/// Returns a delay of at least 1 ms, so that the sweeper never spins, and of at most a day,
/// because an extreme lease would overflow.
fn clamped(delay: Duration) -> Duration {
    const DAY: Duration = Duration::from_secs(86_400);
    delay.clamp(Duration::from_millis(1), DAY)
}
