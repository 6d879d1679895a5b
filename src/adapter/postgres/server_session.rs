//! The server's side of a transaction that was lost.

use std::time::Duration;

use sqlx::pool::PoolConnection;
use sqlx::postgres::Postgres;
use tokio::runtime::Handle;
use tokio::time::Instant;

use super::connections::{Found, Guard, LONGEST_PAUSE, pauses};
use super::store::PostgresAdapter;

/// How a transaction begins. It tells the session's statements from others.
pub(super) const BEGIN: &str = "/* tower-dedup */ BEGIN";

/// For how long a session is looked for while the server cannot be reached.
const LOOK_FOR: Duration = Duration::from_secs(60);

/// Transactions without a lock are left alone for as long, whatever a statement may take.
const LEAST_AGE: Duration = Duration::from_secs(5);

/// Ends a transaction that was dropped before its end.
///
/// The server's side may outlive the connection: a server that is not told goodbye keeps the
/// transaction, its locks and the key, until its own keepalive finds out. The transaction took an
/// advisory lock of a random number, and the session that holds it is terminated over another
/// connection. (The token would not do: a claim that is repeated in a new transaction has the same.)
///
/// A session that commits is left alone: it ends by itself, and to terminate one that waits for a
/// synchronous standby would show a commit that the standby does not have. The connection keeps its
/// place in the pool until the session has ended, so that sessions do not pile up on the server.
pub(super) fn end(adapter: PostgresAdapter, lock: i64, connection: PoolConnection<Postgres>) {
    let held = Guard(Some(connection));
    // Without a runtime, the process is about to end, or the runtime is: the server finds out.
    if let Ok(runtime) = Handle::try_current() {
        runtime.spawn(look(adapter, lock, held));
    }
}

async fn look(adapter: PostgresAdapter, lock: i64, held: Guard) {
    let inner = adapter.inner();
    let (bound, connections) = (inner.statement_timeout(), &inner.connections);
    let age = bound.max(LEAST_AGE);
    let (start, mut pauses) = (Instant::now(), pauses());
    loop {
        match connections.terminate(lock, age).await {
            Ok(Found::Terminated) => return,
            Ok(Found::Nothing) => break,
            Ok(Found::Commits) => {}
            Err(error) if start.elapsed() > LOOK_FOR || connections.is_closed() => {
                tracing::warn!(%error, "a lost transaction's session was not looked for");
                return;
            }
            Err(_) => {}
        }
        tokio::time::sleep(pauses.next().unwrap_or(LONGEST_PAUSE)).await;
    }
    // Its claim may wait for a lock on the table, and have no lock of its own yet.
    connections.settled(bound).await;
    drop(held);
    // It may have begun and done nothing else: then its age is all that tells it.
    tokio::time::sleep(age).await;
    let _ = connections.terminate(lock, age).await;
}
