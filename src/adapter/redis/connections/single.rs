//! [`Single`]: a value that one task at a time makes for all.

use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::failure::Failure;

/// After a value was made, or could not be made, no other one is begun for this time: many callers fail at
/// once.
const REST: Duration = Duration::from_millis(20);

/// A value that is made when it is first needed, and made anew when it is of no use any more.
///
/// The task that makes it belongs to no caller: it goes on if a caller is dropped. It must end by
/// itself. It belongs to the runtime of a caller: if that runtime is not polled any more, the task counts as
/// ended after `bound`, and its result is dropped.
pub(super) struct Single<T> {
    state: Mutex<State<T>>,
    bound: Duration,
}

enum State<T> {
    Empty,
    /// Since when.
    Made(Arc<T>, Instant),
    /// Since when.
    Failed(Failure, Instant),
    Making {
        result: Pending<T>,
        since: Instant,
        /// What callers get in the meantime.
        old: Option<Arc<T>>,
    },
    Closed,
}

type Pending<T> = watch::Receiver<Option<Result<Arc<T>, Failure>>>;

impl<T: Send + Sync + 'static> Single<T> {
    /// `bound` is longer than it takes to make a value.
    pub(super) fn new(bound: Duration) -> Arc<Self> {
        Arc::new(Self { state: Mutex::new(State::Empty), bound })
    }

    /// Returns the value. Makes it if there is none, and waits until it is made.
    pub(super) async fn get<F>(
        self: &Arc<Self>,
        make: impl FnOnce() -> F,
    ) -> Result<Arc<T>, Failure>
    where
        F: Future<Output = Result<T, Failure>> + Send + 'static,
    {
        let mut result = {
            let mut state = self.lock();
            match &*state {
                State::Made(value, _) | State::Making { old: Some(value), .. } => {
                    return Ok(Arc::clone(value));
                }
                State::Failed(failure, at) if at.elapsed() < REST => return Err(failure.clone()),
                State::Closed => return Err(Failure::Closed),
                State::Making { result, since, .. } if self.is_making(result, *since) => {
                    result.clone()
                }
                State::Making { .. } | State::Empty | State::Failed(..) => {
                    self.start(&mut state, make, None)
                }
            }
        };
        match result.wait_for(Option::is_some).await.as_deref() {
            Ok(Some(result)) => result.clone(),
            _ => Err(Failure::Interrupted),
        }
    }

    /// Starts to replace the value, unless it is another one by now or has just been made. Callers get
    /// `old` in the meantime, and afterwards if there is no other one.
    pub(super) fn renew<F>(self: &Arc<Self>, old: &Arc<T>, make: impl FnOnce() -> F)
    where
        F: Future<Output = Result<T, Failure>> + Send + 'static,
    {
        let mut state = self.lock();
        let is_stale = match &*state {
            State::Made(value, at) => Arc::ptr_eq(value, old) && at.elapsed() >= REST,
            State::Making { result, since, .. } => !self.is_making(result, *since),
            State::Empty | State::Failed(..) | State::Closed => false,
        };
        if is_stale {
            self.start(&mut state, make, Some(Arc::clone(old)));
        }
    }

    /// Drops the value, unless it is another one by now.
    pub(super) fn forget(&self, value: &Arc<T>) {
        let mut state = self.lock();
        if matches!(&*state, State::Made(current, _) if Arc::ptr_eq(current, value)) {
            *state = State::Empty;
        }
    }

    /// Returns the value, if there is one.
    pub(super) fn current(&self) -> Option<Arc<T>> {
        match &*self.lock() {
            State::Made(value, _) | State::Making { old: Some(value), .. } => {
                Some(Arc::clone(value))
            }
            _ => None,
        }
    }

    /// Drops the value. From now on, [`get`](Self::get) fails.
    pub(super) fn close(&self) {
        *self.lock() = State::Closed;
    }

    pub(super) fn is_closed(&self) -> bool {
        matches!(&*self.lock(), State::Closed)
    }

    /// Returns `false` if the task has ended without a result, because its runtime has ended or it has
    /// panicked, and if it takes longer than it can.
    fn is_making(&self, result: &Pending<T>, since: Instant) -> bool {
        result.has_changed().is_ok() && since.elapsed() < self.bound
    }

    fn start<F>(
        self: &Arc<Self>,
        state: &mut State<T>,
        make: impl FnOnce() -> F,
        old: Option<Arc<T>>,
    ) -> Pending<T>
    where
        F: Future<Output = Result<T, Failure>> + Send + 'static,
    {
        let (sender, result) = watch::channel(None);
        let (single, making, own) = (Arc::clone(self), make(), result.clone());
        tokio::spawn(async move {
            let made = making.await.map(Arc::new);
            if single.end(&made, &own) {
                sender.send_replace(Some(made));
            }
        });
        *state = State::Making { result: result.clone(), since: Instant::now(), old };
        result
    }

    /// Returns `false` if nobody waits for this result any more.
    fn end(&self, made: &Result<Arc<T>, Failure>, own: &Pending<T>) -> bool {
        let mut state = self.lock();
        let State::Making { result, old, .. } = &mut *state else { return false };
        if !result.same_channel(own) {
            return false;
        }
        *state = match (made, old.take()) {
            (Ok(value), _) => State::Made(Arc::clone(value), Instant::now()),
            (Err(_), Some(old)) => State::Made(old, Instant::now()),
            (Err(failure), None) => State::Failed(failure.clone(), Instant::now()),
        };
        true
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use tokio::runtime::{Builder, Runtime};
    use tokio::time::timeout;

    use super::*;

    const BOUND: Duration = Duration::from_millis(100);

    fn runtime() -> Runtime {
        Builder::new_current_thread().enable_all().build().unwrap()
    }

    #[test]
    fn value_that_an_idle_runtime_makes_is_made_by_another_one() {
        let single = Single::new(BOUND);
        let make = |value: u8, pause: u64| {
            move || async move {
                tokio::time::sleep(Duration::from_millis(pause)).await;
                Ok(value)
            }
        };
        let (idle, other) = (runtime(), runtime());
        let (short, long) = (Duration::from_millis(10), Duration::from_secs(5));
        idle.block_on(async { timeout(short, single.get(make(1, 30))).await.unwrap_err() });
        // From here on, nobody polls the first runtime.
        other.block_on(async { timeout(short, single.get(make(2, 0))).await.unwrap_err() });
        std::thread::sleep(BOUND);
        assert_eq!(
            *other
                .block_on(async { timeout(long, single.get(make(2, 0))).await.unwrap() })
                .unwrap(),
            2
        );
        // A late result changes nothing.
        let value = single.current().unwrap();
        single.forget(&value);
        other.block_on(async { timeout(short, single.get(make(3, 30))).await.unwrap_err() });
        idle.block_on(async { tokio::time::sleep(short).await });
        assert!(single.current().is_none());
        assert_eq!(
            *other
                .block_on(async { timeout(long, single.get(make(4, 0))).await.unwrap() })
                .unwrap(),
            3
        );
    }
}
