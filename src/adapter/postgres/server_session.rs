//! [`ServerSession`]: the server's side of an open transaction.

use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBuilder};
use tokio::runtime::Handle;
use tokio::time::Instant;

use super::store::PostgresAdapter;

/// How a transaction begins. It tells the session's statements from others.
pub(super) const BEGIN: &str = "/* tower-dedup */ BEGIN";

/// For how long a session is looked for while the server cannot be reached.
const LOOK_FOR: Duration = Duration::from_secs(60);

/// The server's side of an open transaction, which may outlive the connection: a server that is not
/// told goodbye keeps the transaction, its locks and the key, until its own keepalive finds out.
///
/// A transaction takes an advisory lock of a random number. If this value is dropped before the
/// transaction has [ended](Self::ended), the session that holds the lock is terminated over another
/// connection. The token cannot name the session, because a claim that is repeated in a new transaction
/// has the same token. A session that commits is left alone: it ends by itself, and to terminate one
/// that waits for a synchronous standby would show a commit that the standby does not have.
pub(super) struct ServerSession {
    adapter: PostgresAdapter,
    lock: i64,
    ended: bool,
}

impl ServerSession {
    pub(super) fn of(adapter: &PostgresAdapter) -> Self {
        Self { adapter: adapter.clone(), lock: rand::random(), ended: false }
    }

    /// The lock for the transaction to take.
    pub(super) fn lock(&self) -> i64 {
        self.lock
    }

    /// The server has said that the transaction has ended.
    pub(super) fn ended(mut self) {
        self.ended = true;
    }
}

impl Drop for ServerSession {
    fn drop(&mut self) {
        // Without a runtime, the process is about to end, or the runtime is: the server finds out.
        if let (false, Ok(runtime)) = (self.ended, Handle::try_current()) {
            runtime.spawn(terminate(self.adapter.clone(), self.lock));
        }
    }
}

async fn terminate(adapter: PostgresAdapter, lock: i64) {
    let inner = adapter.inner();
    let mut pauses = ExponentialBuilder::new()
        .with_min_delay(Duration::from_millis(50))
        .with_max_delay(Duration::from_secs(2))
        .with_jitter()
        .without_max_times()
        .build();
    let bound = inner.statement_timeout();
    let (start, mut looked) = (Instant::now(), false);
    loop {
        let pause = match inner.connections.terminate(lock, bound).await {
            // A session that has no lock yet is known by its age only.
            Ok(false) if !looked => {
                looked = true;
                bound
            }
            Ok(_) => return,
            Err(error) if start.elapsed() > LOOK_FOR || inner.connections.is_closed() => {
                tracing::warn!(%error, "a lost transaction's session was not looked for");
                return;
            }
            Err(_) => pauses.next().unwrap_or(LOOK_FOR),
        };
        tokio::time::sleep(pause).await;
    }
}
