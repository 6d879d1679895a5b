//! How many transactions may be under way, those that were lost included.
//!
//! The server notices within seconds that a connection was closed, except during a COMMIT, which may wait
//! for a disk or for a standby. Nothing searches for it on the server. So the place of a transaction that
//! was lost in its COMMIT stays taken for [`FIRST`], and then each time twice as long until a transaction
//! ends well: otherwise each delivery would leave one more session on the server.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use sqlx::pool::PoolConnection;
use sqlx::postgres::Postgres;
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

const FIRST: Duration = Duration::from_secs(10);
const LONGEST: Duration = Duration::from_secs(60);

/// The places of an adapter's transactions: as many as its pool has connections.
pub(super) struct Places {
    free: Arc<Semaphore>,
    /// How often the pause was doubled since a transaction ended well.
    doubled: Arc<AtomicU32>,
}

/// The place of one transaction.
pub(super) struct Place {
    permit: Option<OwnedSemaphorePermit>,
    doubled: Arc<AtomicU32>,
}

impl Places {
    pub(super) fn new(connections: u32) -> Self {
        let places = usize::try_from(connections).unwrap_or(usize::MAX);
        Self {
            free: Arc::new(Semaphore::new(places.min(Semaphore::MAX_PERMITS))),
            doubled: Arc::default(),
        }
    }

    pub(super) async fn place(&self) -> Place {
        // The semaphore is never closed.
        let permit = Arc::clone(&self.free).acquire_owned().await.ok();
        Place { permit, doubled: Arc::clone(&self.doubled) }
    }

    /// Notes that a transaction has ended well.
    pub(super) fn has_ended(&self) {
        self.doubled.store(0, Ordering::Relaxed);
    }
}

impl Place {
    /// Returns what to do with the connection of a transaction that was lost, in its COMMIT or before.
    pub(super) fn lost(
        self,
    ) -> impl FnOnce(PoolConnection<Postgres>, bool) + Send + Sync + 'static {
        move |connection, commits| {
            // The server notices a closed connection, unless nothing reaches it.
            drop(connection.detach());
            if !commits {
                return;
            }
            let doubled = self.doubled.load(Ordering::Relaxed);
            // Without a runtime, the place is released at once.
            if let (Some(permit), Ok(runtime)) = (self.permit, Handle::try_current()) {
                runtime.spawn(async move {
                    tokio::time::sleep(pause(doubled)).await;
                    // Those that were lost together double the pause once.
                    let next = doubled.saturating_add(1);
                    let _ = self.doubled.compare_exchange(
                        doubled,
                        next,
                        Ordering::Relaxed,
                        Ordering::Relaxed,
                    );
                    drop(permit);
                });
            }
        }
    }
}

fn pause(doubled: u32) -> Duration {
    FIRST.saturating_mul(1 << doubled.min(8)).min(LONGEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn place_of_a_lost_transaction_is_taken_for_10_to_60_s() {
        let pauses = [0, 1, 2, 3, u32::MAX].map(|doubled| pause(doubled).as_secs());
        assert_eq!(pauses, [10, 20, 40, 60, 60]);
    }
}
