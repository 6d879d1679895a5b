//! The server's side of a transaction that was lost.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use sqlx::Row;
use sqlx::pool::PoolConnection;
use sqlx::postgres::Postgres;
use tokio::runtime::Handle;
use tokio::time::Instant;

use super::super::sql::statement::render;
use super::connections::{Connections, Guard, LONGEST_PAUSE, as_ms, pauses};
use super::statements::TAG;
use crate::observe;

/// The statement that begins a transaction. Its tag distinguishes the session from others.
pub(super) const BEGIN: &str = "/* tower-dedup */ BEGIN";

/// Terminates lost sessions. The text has no tag, so that it does not find itself.
static TERMINATE: LazyLock<String> =
    LazyLock::new(|| render(include_str!("sql/terminate.sql"), &[("tag", TAG)]));

#[cfg(test)]
pub(super) fn text() -> (&'static str, String) {
    ("terminate", TERMINATE.clone())
}

/// For how long a session is looked for while the server cannot be reached.
const LOOK_FOR: Duration = Duration::from_secs(60);

/// For how long transactions without a lock are left alone, whatever the statement timeout.
const LEAST_AGE: Duration = Duration::from_secs(5);

/// Ends a transaction that was dropped before its end.
///
/// The server's session may outlive the connection. Without a Terminate message, the server holds the
/// transaction, its locks and the key until its own keepalive ends the session. The transaction holds an
/// advisory lock of a random number, and another connection terminates the session by this lock. The
/// token does not identify the session: a claim that is repeated in a new transaction has the same token.
///
/// A session that commits is left alone. It ends by itself, and to terminate one that waits for a
/// synchronous standby would show a commit that the standby does not have. The connection holds its
/// place in the pool until the session has ended, so that sessions do not pile up on the server.
pub(super) fn end(
    connections: Arc<Connections>,
    statement_timeout: Duration,
    lock: i64,
    connection: PoolConnection<Postgres>,
) {
    let held = Guard(Some(connection));
    // Without a runtime, the process or the runtime is about to end, and the server notices.
    if let Ok(runtime) = Handle::try_current() {
        runtime.spawn(terminate(connections, statement_timeout, lock, held));
    }
}

async fn terminate(
    connections: Arc<Connections>,
    statement_timeout: Duration,
    lock: i64,
    held: Guard,
) {
    let age = statement_timeout.max(LEAST_AGE);
    let (start, mut pauses) = (Instant::now(), pauses());
    loop {
        match connections.terminate(lock, age).await {
            Ok(SessionEnd::Terminated) => return,
            Ok(SessionEnd::NotFound) => break,
            Ok(SessionEnd::Commits) => {}
            Err(error) if start.elapsed() > LOOK_FOR || connections.is_closed() => {
                observe::session_not_terminated(&error);
                return;
            }
            Err(_) => {}
        }
        tokio::time::sleep(pauses.next().unwrap_or(LONGEST_PAUSE)).await;
    }
    // The claim may wait for a lock on the table, without a lock of its own yet.
    connections.wait_for_outstanding(statement_timeout).await;
    drop(held);
    // A session that began and did nothing else is found by its age only.
    tokio::time::sleep(age).await;
    let _ = connections.terminate(lock, age).await;
}

/// What [`Connections::terminate`] found of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SessionEnd {
    NotFound,
    Terminated,
    /// The session ends by itself.
    Commits,
}

impl Connections {
    /// Terminates the session whose open transaction holds this advisory lock, unless it commits.
    ///
    /// A transaction without a lock has written nothing. Those of this crate that have done nothing for
    /// `age` are terminated too: a claim takes less.
    async fn terminate(&self, lock: i64, age: Duration) -> Result<SessionEnd, sqlx::Error> {
        let row = self.query_server(&TERMINATE, Some(lock), as_ms(age)).await?;
        Ok(match (row.try_get::<i64, _>(0)?, row.try_get::<i64, _>(1)?) {
            (1.., _) => SessionEnd::Commits,
            (_, 1..) => SessionEnd::Terminated,
            _ => SessionEnd::NotFound,
        })
    }
}
