//! How many statements and transactions may be under way, those that were lost included.
//!
//! The session of a statement that was lost may stay on the server: it waits for a lock, a disk or a standby. The
//! server notices within seconds that the connection of an open transaction was closed, except during its COMMIT.
//! Nothing searches for such a session. Its place stays taken for [`FIRST`], and then each time twice as long until one
//! ends well. Otherwise each call would leave one more session on the server.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use sqlx::pool::PoolConnection;
use sqlx::postgres::Postgres;
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

const FIRST: Duration = Duration::from_secs(10);
const LONGEST: Duration = Duration::from_secs(60);

/// How long a lost place stays taken. A clone is another handle to the same state.
#[derive(Clone, Default)]
pub(super) struct Holds {
    /// How often the time was doubled since a statement or a transaction ended well.
    doubled: Arc<AtomicU32>,
}

impl Holds {
    /// Notes that a statement or a transaction has ended well.
    pub(super) fn has_ended(&self) {
        self.doubled.store(0, Ordering::Relaxed);
    }

    /// Holds a place until its time is over, or until `end`. Without a runtime, it is free at once.
    pub(super) fn hold(
        &self,
        place: impl Send + 'static,
        end: impl Future<Output = ()> + Send + 'static,
    ) {
        let Ok(runtime) = Handle::try_current() else { return };
        let (doubled, before) = (Arc::clone(&self.doubled), self.doubled.load(Ordering::Relaxed));
        runtime.spawn(async move {
            tokio::select! {
                () = tokio::time::sleep(time(before)) => {}
                () = end => {}
            }
            // Those that were lost together double the time once.
            let (next, order) = (before.saturating_add(1), Ordering::Relaxed);
            let _ = doubled.compare_exchange(before, next, order, order);
            drop(place);
        });
    }
}

fn time(doubled: u32) -> Duration {
    FIRST.saturating_mul(1 << doubled.min(8)).min(LONGEST)
}

/// The places of one kind of work.
pub(super) struct Places {
    pub(super) count: usize,
    free: Arc<Semaphore>,
    pub(super) holds: Holds,
}

/// The place of a batch, a transaction or a migration.
pub(super) struct Place {
    permit: Option<OwnedSemaphorePermit>,
    pub(super) holds: Holds,
    /// Whether the place stays taken for a while after it is dropped.
    pub(super) is_lost: bool,
}

impl Places {
    pub(super) fn new(count: usize) -> Self {
        let count = count.min(Semaphore::MAX_PERMITS);
        Self { count, free: Arc::new(Semaphore::new(count)), holds: Holds::default() }
    }

    pub(super) async fn place(&self) -> Place {
        // The semaphore is never closed.
        let permit = Arc::clone(&self.free).acquire_owned().await.ok();
        Place { permit, holds: self.holds.clone(), is_lost: false }
    }
}

impl Place {
    /// Keeps the place taken until its time is over, or until `end`.
    pub(super) fn hold(mut self, end: impl Future<Output = ()> + Send + 'static) {
        self.holds.hold(self.permit.take(), end);
    }

    /// Returns what to do with the connection of a transaction that was lost, in its COMMIT or before.
    pub(super) fn lost(
        self,
    ) -> impl FnOnce(PoolConnection<Postgres>, bool) + Send + Sync + 'static {
        move |connection, commits| {
            // The server notices a closed connection, unless nothing reaches it.
            drop(connection.detach());
            if commits {
                self.hold(std::future::pending());
            }
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.is_lost {
            self.holds.hold(self.permit.take(), std::future::pending());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_place_is_taken_for_10_to_60_s() {
        let times = [0, 1, 2, 3, u32::MAX].map(|doubled| time(doubled).as_secs());
        assert_eq!(times, [10, 20, 40, 60, 60]);
    }
}
