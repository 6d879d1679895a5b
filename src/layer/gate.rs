//! [`Gate`]: bounds how many deliveries run and wait, and wakes those that wait. It also has the
//! mode.
//!
//! A layer shares one gate with its clones, its services and its handles.
//!
//! A delivery that has waited claims again only with a permit to run, because it may have to run: a
//! delivery that holds an event never waits, and a claim on arrival is final. Many such deliveries,
//! each for an event that runs elsewhere, must not cause new ones to be refused while no handler
//! runs:
//!
//! 1. At most [`TURNS`] of them claim at the same time. They take permits that are free, and wait
//!    for none.
//! 2. A new delivery that finds no free permit meanwhile waits for one, behind at most [`TURNS`]
//!    others.

use std::future::poll_fn;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};
use tokio_util::task::TaskTracker;
use tower_service::Service;

use super::mode::SharedMode;
use crate::error::{ConfigError, check};
use crate::run::{Admission, Waiters};

/// How many deliveries that have waited claim again at the same time.
const TURNS: usize = 16;

pub(super) struct Gate {
    pub(super) mode: SharedMode,
    /// The deliveries that run.
    pub(super) running: Permits,
    /// The deliveries that wait for another delivery of their event.
    pub(super) waiting: Permits,
    pub(super) waiters: Waiters,
    /// The deliveries that claim again after a wait.
    turns: Permits,
    /// The new deliveries that wait for their permits.
    behind: Permits,
    pub(super) tasks: TaskTracker,
}

/// Why a delivery may not run.
#[derive(Debug)]
pub(super) enum NotAdmitted<E> {
    /// Until the deadline, no permit was free, or the inner service was not ready.
    Full,
    /// The inner service returned an error instead of readiness.
    Inner(E),
}

impl Gate {
    pub(super) fn new() -> Self {
        Self {
            mode: SharedMode::default(),
            running: Permits::new(1_024),
            waiting: Permits::new(256),
            waiters: Waiters::default(),
            turns: Permits::new(TURNS),
            behind: Permits::new(TURNS),
            tasks: TaskTracker::new(),
        }
    }

    /// A bound of zero is a mistake: the layer would answer 503 to every delivery.
    pub(super) fn check(&self) -> Result<(), ConfigError> {
        let running = *self.running.limit();
        check(running > 0, "max_running", "at least 1 delivery", &running)
    }

    /// Returns a place behind the deliveries that claim again after a wait, if there are any: most
    /// of them find their event in flight, and give their permits back soon.
    pub(super) fn place_behind_turns(&self) -> Option<Permit> {
        (self.turns.held() > 0).then(|| self.behind.try_acquire()).flatten()
    }

    /// Returns how many deliveries run and wait, of how many that may.
    pub(super) fn load(&self) -> String {
        let of = |bound: &Permits| format!("{} of {}", bound.held(), *bound.limit());
        let [running, waiting] = [&self.running, &self.waiting].map(of);
        format!("{running} deliveries run, {waiting} wait for their event")
    }
}

/// The permit of a delivery, and the readiness of its inner service.
pub(super) struct Admitted<'d, S, R> {
    pub(super) inner: &'d mut S,
    pub(super) permit: &'d mut Option<Permit>,
    pub(super) gate: &'d Gate,
    pub(super) request: PhantomData<fn(R)>,
}

impl<S: Service<R> + Clone, R> Admission for Admitted<'_, S, R> {
    type Refusal = NotAdmitted<S::Error>;
    type Turn = Permit;

    /// Waits for a turn, then for the readiness of the inner service. A permit to run has to be
    /// free then: a new delivery, which has its readiness, may wait for the permit.
    async fn admit(&mut self, deadline: Instant) -> Result<Option<Permit>, Self::Refusal> {
        let turn = async {
            let turn = self.gate.turns.acquire().await.ok_or(NotAdmitted::Full)?;
            poll_fn(|cx| self.inner.poll_ready(cx)).await.map_err(NotAdmitted::Inner)?;
            Ok(turn)
        };
        let turn = timeout_at(deadline, turn).await.unwrap_or(Err(NotAdmitted::Full))?;
        *self.permit = self.gate.running.try_acquire();
        match self.permit {
            None if Instant::now() >= deadline => Err(NotAdmitted::Full),
            None => Ok(None),
            Some(_) => Ok(Some(turn)),
        }
    }

    fn release(&mut self) {
        *self.permit = None;
        release_readiness(self.inner);
    }
}

/// Replaces a ready service by a clone that is not ready. Readiness may be a permit of an inner
/// limit, and a delivery that waits must not hold one.
pub(super) fn release_readiness<S: Clone>(inner: &mut S) {
    let unready = inner.clone();
    drop(std::mem::replace(inner, unready));
}

/// A permit to run, or a place among the waiting deliveries. Dropped, it is free again.
pub(super) type Permit = OwnedSemaphorePermit;

/// A number of permits that may change while permits are held.
pub(super) struct Permits {
    permits: Arc<Semaphore>,
    limit: Mutex<usize>,
}

impl Permits {
    fn new(limit: usize) -> Self {
        Self { permits: Arc::new(Semaphore::new(limit)), limit: Mutex::new(limit) }
    }

    /// Changes the number of permits. Takes back none that is held.
    pub(super) fn resize(&self, limit: usize) {
        // No process reaches the number of permits that a semaphore can count.
        let limit = limit.min(Semaphore::MAX_PERMITS);
        let mut current = self.limit();
        if limit < *current {
            *current -= self.permits.forget_permits(*current - limit);
        } else {
            self.permits.add_permits(limit - *current);
            *current = limit;
        }
    }

    pub(super) fn held(&self) -> usize {
        self.limit().saturating_sub(self.permits.available_permits())
    }

    /// Returns a permit, if one is free.
    pub(super) fn try_acquire(&self) -> Option<Permit> {
        Arc::clone(&self.permits).try_acquire_owned().ok()
    }

    /// Waits for a permit. Never returns `None`, because the semaphore is never closed.
    pub(super) async fn acquire(&self) -> Option<Permit> {
        Arc::clone(&self.permits).acquire_owned().await.ok()
    }

    fn limit(&self) -> MutexGuard<'_, usize> {
        self.limit.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn bound_that_grows_admits_more_at_once() {
        let bound = Permits::new(0);
        let mut waits = std::pin::pin!(bound.acquire());
        assert!(futures_util::poll!(waits.as_mut()).is_pending());
        bound.resize(2);
        let held = [waits.await, bound.try_acquire()];
        assert!(held.iter().all(Option::is_some) && bound.try_acquire().is_none());
        bound.resize(usize::MAX);
        assert_eq!(bound.held(), 2);
    }
}
