//! Renews the leases of running handlers.
//!
//! 1. A lease is renewed at a third of its length. After a failed attempt, and while an open transaction holds the row,
//!    it is asked again at a twelfth.
//! 2. One task for each layer and runtime (the sweeper) starts a task for each lease that is due for the first
//!    time. So the lease of a handler that blocks its thread is renewed.
//! 3. A lease is renewed on the runtime of its own delivery. A runtime that is blocked delays the renewals of
//!    its own deliveries only.
//! 4. The sweeper starts with the first claim of its runtime. It ends when it wakes and no delivery of its
//!    runtime runs. It wakes at least every [`LINGER`], so it holds the adapter no longer than that after the
//!    last handler.

use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use slab::Slab;
use tokio::runtime::{Handle, Id};
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep_until};
use tokio_util::task::AbortOnDropHandle;

use super::call;
use super::held::{COMMITTED, ENDED, HeldLease, LeaseTerms};
use crate::adapter::contract::{CompleteReply, DedupAdapter, RenewReply};
use crate::error::StoreError;
use crate::key::DedupKey;
use crate::observe;

/// A sweeper that ended with each last delivery would start again with the next one, and a start makes
/// its delivery yield.
const LINGER: Duration = Duration::from_millis(250);

#[derive(Default)]
pub(super) struct Renewals(Mutex<Vec<RuntimeLeases>>);

/// The leases of the deliveries of one runtime.
struct RuntimeLeases {
    runtime: Id,
    running: Slab<Running>,
    sweeper: Option<AbortHandle>,
    wakes_at: Option<Instant>,
    /// Wakes the sweeper, because a lease is due earlier than the sweeper wakes.
    earlier: Arc<Notify>,
}

impl RuntimeLeases {
    fn of(runtime: Id) -> Self {
        let (running, earlier) = (Slab::new(), Arc::default());
        Self { runtime, running, sweeper: None, wakes_at: None, earlier }
    }

    /// Returns `false` if there is no sweeper, or if its runtime has ended.
    fn is_swept(&self) -> bool {
        self.sweeper.as_ref().is_some_and(|sweeper| !sweeper.is_finished())
    }
}

struct Running {
    lease: Arc<HeldLease>,
    /// The time of the first renewal.
    due: Instant,
    /// Ends with the lease: a release must follow its last renewal.
    renewal: Option<AbortOnDropHandle<()>>,
}

/// Ends the renewals of a lease when it is dropped.
pub(super) struct RenewalGuard {
    renewals: Arc<Renewals>,
    runtime: Id,
    /// Not a `usize`, so that the future of a delivery stays within 1,024 bytes.
    place: u32,
    /// The caller yields once before it runs a handler: the sweeper was woken on this thread. If the handler blocked
    /// this thread, no other thread would run the sweeper.
    pub(super) must_yield: bool,
    /// The lease was over before its renewals began.
    pub(super) has_lapsed: bool,
}

impl Drop for RenewalGuard {
    fn drop(&mut self) {
        let mut runtimes = self.renewals.lock();
        let of_runtime = runtimes.iter_mut().find(|leases| leases.runtime == self.runtime);
        let running = of_runtime.and_then(|leases| leases.running.try_remove(self.place as usize));
        drop(runtimes);
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
        let handle = Handle::try_current().ok()?;
        let (runtime, due) = (handle.id(), due(&lease.of_ledger, since));
        let has_lapsed = since.elapsed() >= lease.of_ledger.terms.lease();
        let mut runtimes = self.lock();
        let known = runtimes.iter().position(|leases| leases.runtime == runtime);
        let at = known.unwrap_or_else(|| {
            runtimes.retain(|leases| !leases.running.is_empty() || leases.is_swept());
            runtimes.push(RuntimeLeases::of(runtime));
            runtimes.len() - 1
        });
        let leases = &mut runtimes[at];
        let place = leases.running.insert(Running { lease, due, renewal: None });
        let place = u32::try_from(place).ok()?;
        let starts = !leases.is_swept();
        if starts {
            let sweeper = sweeper(Arc::clone(self), Arc::clone(adapter), leases);
            (leases.sweeper, leases.wakes_at) = (Some(handle.spawn(sweeper).abort_handle()), None);
        }
        let sleeps_too_long = leases.wakes_at.is_some_and(|wakes_at| due < wakes_at);
        let earlier = sleeps_too_long.then(|| Arc::clone(&leases.earlier));
        drop(runtimes);
        if let Some(earlier) = earlier {
            earlier.notify_one();
        }
        let must_yield = starts || sleeps_too_long;
        let renewals = Arc::clone(self);
        Some(RenewalGuard { renewals, runtime, place, must_yield, has_lapsed })
    }

    /// Starts the renewals of one runtime that are due. Returns when to wake again; `None` if no delivery of it
    /// runs: the next claim starts another sweeper.
    fn sweep(&self, adapter: &Arc<dyn DedupAdapter>, runtime: Id) -> Option<Instant> {
        let mut runtimes = self.lock();
        let at = runtimes.iter().position(|leases| leases.runtime == runtime)?;
        if runtimes[at].running.is_empty() {
            // The lock is held, so that no claim comes between the check and the end.
            runtimes.swap_remove(at);
            return None;
        }
        let leases = &mut runtimes[at];
        let now = Instant::now();
        let mut next = now + LINGER;
        for (_, running) in &mut leases.running {
            // A renewal ends by itself only with its runtime.
            if running.renewal.as_ref().is_some_and(|renewal| !renewal.is_finished()) {
                continue;
            }
            if running.due <= now {
                let renewal = renew(Arc::clone(adapter), Arc::clone(&running.lease));
                running.renewal = Some(AbortOnDropHandle::new(tokio::spawn(renewal)));
            } else {
                next = next.min(running.due);
            }
        }
        leases.wakes_at = Some(next);
        Some(next)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<RuntimeLeases>> {
        // No holder panics between two changes that belong together.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Starts the renewals of the leases of one runtime, on that runtime.
fn sweeper(
    renewals: Arc<Renewals>,
    adapter: Arc<dyn DedupAdapter>,
    leases: &RuntimeLeases,
) -> impl Future<Output = ()> + use<> {
    let (runtime, earlier) = (leases.runtime, Arc::clone(&leases.earlier));
    async move {
        while let Some(next) = renewals.sweep(&adapter, runtime) {
            tokio::select! {
                () = sleep_until(next) => {}
                () = earlier.notified() => {}
            }
        }
    }
}

/// Renews a lease until its guard is dropped.
async fn renew(adapter: Arc<dyn DedupAdapter>, lease: Arc<HeldLease>) {
    let held = &lease.of_ledger;
    loop {
        let (next, soon) = (due(held, Instant::now()), clamped(held.terms.lease() / 12));
        let replies = call::renew(&*adapter, &held.keys, &held.terms, held.store_timeout).await;
        let Ok(replies) = call::all(replies) else {
            tokio::time::sleep(soon).await;
            continue;
        };
        let is_locked = replies.contains(&RenewReply::Locked);
        let is_lost = replies.contains(&RenewReply::Lost);
        if is_lost
            && !held.is(ENDED)
            && !is_completed(&*adapter, held).await
            && lease.mark_lease_lost()
        {
            let lost = held.keys.iter().zip(&replies).filter(|(_, it)| **it == RenewReply::Lost);
            lost.for_each(|(key, _)| observe::records::lease_lost(key));
        }
        if is_locked {
            tokio::time::sleep(soon).await;
        } else {
            sleep_until(next).await;
        }
    }
}

/// Returns `true` if the handler's own transaction has completed the keys: their leases are over, and not lost.
async fn is_completed(adapter: &dyn DedupAdapter, held: &LeaseTerms) -> bool {
    if held.is(COMMITTED) {
        return true;
    }
    if !adapter.abilities().completion {
        return false;
    }
    let read = call::is_complete(adapter, &held.keys, &held.terms, held.store_timeout).await;
    read.iter().all(|reply| matches!(reply, Ok(true)))
}

/// Reports claims that the store has lost, and lost leases, unless the delivery knew before.
pub(super) fn report(
    keys: &[DedupKey],
    replies: &[Result<CompleteReply, StoreError>],
    is_claimed: bool,
    lease: &HeldLease,
) {
    let with = |completed| {
        let replies = keys.iter().zip(replies);
        let replies = replies.filter(move |(_, reply)| matches!(reply, Ok(it) if *it == completed));
        replies.map(|(key, _)| key)
    };
    if is_claimed {
        with(CompleteReply::Inserted).for_each(observe::records::claim_missing);
    }
    let mut lost = with(CompleteReply::LeaseLost).peekable();
    if lost.peek().is_some() && lease.mark_lease_lost() {
        lost.for_each(observe::records::lease_lost);
    }
}

/// Returns when to renew a lease that counts from `since`.
fn due(held: &LeaseTerms, since: Instant) -> Instant {
    since + clamped(held.terms.lease() / 3)
}

/// Returns a delay of at least 1 ms, so that the sweeper never spins, and of at most a day,
/// because an extreme lease would overflow.
fn clamped(delay: Duration) -> Duration {
    const DAY: Duration = Duration::from_secs(86_400);
    delay.clamp(Duration::from_millis(1), DAY)
}
