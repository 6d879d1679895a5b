//! Renews the leases of running handlers.
//!
//! 1. A lease is renewed at a third of its length. After a failed attempt, and while an open
//!    transaction locks the row, the renewal is repeated after a twelfth.
//! 2. One task for each layer and runtime (the sweeper) starts a task for each lease that is due
//!    for the first time. So the lease of a handler that blocks its thread is renewed.
//! 3. A lease is renewed on the runtime of its own delivery. A runtime that is blocked delays the
//!    renewals of its own deliveries only.
//! 4. The sweeper starts with the first claim of its runtime. It wakes at least every [`LINGER`],
//!    and ends when no delivery of its runtime runs. A lease that is due before it wakes has its
//!    task from the beginning.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use slab::Slab;
use tokio::runtime::{Handle, Id};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep_until};
use tokio_util::task::AbortOnDropHandle;

use super::held::{Effect, Held, HeldLease, with_reply};
use crate::adapter::contract::RenewReply;

/// A sweeper that ended with each last delivery would start again with the next one, and a start
/// makes its delivery yield.
const LINGER: Duration = Duration::from_millis(250);

#[derive(Default)]
pub(super) struct Renewals(Mutex<Leases>);

/// The leases of the deliveries that run.
#[derive(Default)]
struct Leases {
    running: Slab<Running>,
    /// The sweepers, by runtime. Those of runtimes that have ended are finished.
    sweepers: Vec<(Id, AbortHandle)>,
}

struct Running {
    lease: Arc<HeldLease>,
    runtime: Id,
    /// The time of the first renewal.
    due: Instant,
    /// Ends with the lease: a release must follow its last renewal.
    renewal: Option<AbortOnDropHandle<()>>,
}

/// Ends the renewals of a lease when it is dropped.
pub(super) struct RenewalGuard {
    renewals: Arc<Renewals>,
    /// Not a `usize`, so that the future of a delivery stays within 1,024 bytes.
    place: u32,
    /// The caller yields once before it runs a handler: a task was started on this thread. If the
    /// handler blocked this thread, no other thread would run the task.
    pub(super) must_yield: bool,
    /// The lease was over before its renewals began.
    pub(super) has_lapsed: bool,
}

impl Drop for RenewalGuard {
    fn drop(&mut self) {
        let running = self.renewals.lock().running.try_remove(self.place as usize);
        // Dropped without the lock, because the drop may run other code.
        drop(running);
    }
}

impl Renewals {
    /// Renews `lease`, which counts from `since`, until the returned guard is dropped. Returns no
    /// guard outside a runtime.
    pub(super) fn start(
        self: &Arc<Self>,
        lease: Arc<HeldLease>,
        since: Instant,
    ) -> Option<RenewalGuard> {
        let handle = Handle::try_current().ok()?;
        let (runtime, due) = (handle.id(), due(&lease.of_ledger, since));
        let now = Instant::now();
        let is_soon = due <= now + LINGER;
        let has_lapsed = now - since >= lease.of_ledger.calls.terms.lease();
        let renewal = is_soon.then(|| handle.spawn(renew(Arc::clone(&lease), due)));
        let renewal = renewal.map(AbortOnDropHandle::new);
        let mut leases = self.lock();
        let place = leases.running.insert(Running { lease, runtime, due, renewal });
        let place = u32::try_from(place).ok()?;
        leases.sweepers.retain(|(_, sweeper)| !sweeper.is_finished());
        let starts = leases.sweepers.iter().all(|(of, _)| *of != runtime);
        if starts {
            let sweeper = handle.spawn(sweep(Arc::clone(self), runtime));
            leases.sweepers.push((runtime, sweeper.abort_handle()));
        }
        drop(leases);
        let (renewals, must_yield) = (Arc::clone(self), starts || is_soon);
        Some(RenewalGuard { renewals, place, must_yield, has_lapsed })
    }

    /// Starts the renewals of one runtime that are due. Returns when to wake again; `None` if no
    /// delivery of it runs: the next claim starts another sweeper.
    fn start_due(&self, runtime: Id) -> Option<Instant> {
        let Leases { running, sweepers } = &mut *self.lock();
        let all = running.iter_mut().map(|(_, running)| running);
        let mut own = all.filter(|running| running.runtime == runtime).peekable();
        if own.peek().is_none() {
            // The lock is held, so that no claim comes between the check and the end.
            sweepers.retain(|(of, _)| *of != runtime);
            return None;
        }
        let now = Instant::now();
        let mut next = now + LINGER;
        // A renewal ends by itself only with its runtime.
        let waiting =
            |running: &Running| running.renewal.as_ref().is_none_or(|it| it.is_finished());
        for running in own {
            if !waiting(running) {
                continue;
            }
            if running.due <= now {
                let renewal = renew(Arc::clone(&running.lease), now);
                running.renewal = Some(AbortOnDropHandle::new(tokio::spawn(renewal)));
            } else {
                next = next.min(running.due);
            }
        }
        Some(next)
    }

    fn lock(&self) -> MutexGuard<'_, Leases> {
        // No holder panics between two changes that belong together.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Starts the renewals of the leases of one runtime, on that runtime.
async fn sweep(renewals: Arc<Renewals>, runtime: Id) {
    while let Some(next) = renewals.start_due(runtime) {
        sleep_until(next).await;
    }
}

/// Renews a lease from `due` on, until its guard is dropped.
async fn renew(lease: Arc<HeldLease>, mut due: Instant) {
    let held = &lease.of_ledger;
    loop {
        sleep_until(due).await;
        due = self::due(held, Instant::now());
        let replies = held.calls.renew(&held.keys).await;
        let mut lost = with_reply(&held.keys, &replies, RenewReply::Lost).peekable();
        if lost.peek().is_some() && !held.state().has_ended && !is_completed(held).await {
            lease.report_lost(lost);
        }
        if replies.iter().any(|reply| matches!(reply, Err(_) | Ok(RenewReply::Locked))) {
            due = Instant::now() + held.calls.terms.lease() / 12;
        }
    }
}

/// Returns `true` if the handler's own transaction has completed the keys: their leases are over,
/// and not lost.
async fn is_completed(held: &Held) -> bool {
    held.state().effect == Effect::Committed
        || held.are_complete().await.is_ok_and(|are_complete| are_complete)
}

/// Returns when to renew a lease that counts from `since`.
fn due(held: &Held, since: Instant) -> Instant {
    since + held.calls.terms.lease() / 3
}
