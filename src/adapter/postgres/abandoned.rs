//! Statements that the server still runs after their callers have stopped waiting.

use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use sqlx::Row;
use tokio::runtime::Handle;
use tokio::sync::OwnedSemaphorePermit;

use super::super::sql::statement::render;
use super::connections::{Connections, LONGEST_PAUSE, as_ms, pauses};
use super::statements::TAG;

/// A statement that has run for less than this does not count as abandoned.
const YOUNG: Duration = Duration::from_millis(250);
/// A statement may reach the server this long after its caller has abandoned it.
const ARRIVAL: Duration = Duration::from_secs(1);

/// How long a migration waits on the server for another one.
pub(super) const MIGRATION_WAIT: Duration = Duration::from_secs(5);

/// Counts and cancels abandoned statements. The text has no tag, so that it does not find itself.
static OUTSTANDING: LazyLock<String> =
    LazyLock::new(|| render(include_str!("sql/outstanding.sql"), &[("tag", TAG)]));

#[cfg(test)]
pub(super) fn text() -> (&'static str, String) {
    ("outstanding", OUTSTANDING.clone())
}

impl Connections {
    /// Holds a place in the pool, or one for batches, until the statement that was abandoned now has ended.
    /// Otherwise each statement that waits for a lock or for a standby would leave one more session on the
    /// server.
    pub(super) fn hold_until_ended(self: &Arc<Self>, place: impl Send + 'static, bound: Duration) {
        // Without a runtime the place is released at once.
        let Ok(runtime) = Handle::try_current() else { return };
        let connections = Arc::clone(self);
        runtime.spawn(async move {
            tokio::time::sleep(YOUNG).await;
            connections.wait_for_outstanding(bound).await;
            drop(place);
        });
    }

    /// Waits until the server runs no statement that began before this call: so the abandoned one has
    /// ended. On a slow server there may always be a later one. Cancels statements that have waited for a
    /// lock for longer than `bound`; a purge, statistics, or a call with a longer timeout may fail by that.
    pub(super) async fn wait_for_outstanding(&self, bound: Duration) {
        let (abandoned, bound, mut pauses) = (Instant::now(), as_ms(bound.max(YOUNG)), pauses());
        loop {
            let age = as_ms(abandoned.elapsed().saturating_sub(ARRIVAL).max(YOUNG));
            let outstanding = self.query_server(&OUTSTANDING, Some(bound), age).await;
            match outstanding.and_then(|row| row.try_get::<i64, _>(0)) {
                Ok(1..) => tokio::time::sleep(pauses.next().unwrap_or(LONGEST_PAUSE)).await,
                // A server that cannot be asked takes no further session either.
                Ok(_) | Err(_) => return,
            }
        }
    }
}

/// The place of a migration. If it is dropped before the server has replied, it stays taken until the server
/// has stopped waiting: otherwise each call would leave one more session on the server.
pub(super) struct MigrationPlace(Option<OwnedSemaphorePermit>);

impl MigrationPlace {
    pub(super) fn new(place: OwnedSemaphorePermit) -> Self {
        Self(Some(place))
    }

    /// Gives the place to the next call at once.
    pub(super) fn release(mut self) {
        self.0 = None;
    }
}

impl Drop for MigrationPlace {
    fn drop(&mut self) {
        if let (Some(place), Ok(runtime)) = (self.0.take(), Handle::try_current()) {
            runtime.spawn(async move {
                tokio::time::sleep(MIGRATION_WAIT).await;
                drop(place);
            });
        }
    }
}
