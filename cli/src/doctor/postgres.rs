//! The facts of a Postgres store.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::Deserialize;
use tower_dedup::adapter::Stats;
use tower_dedup::sqlx::postgres::PgConnection;
use tower_dedup::sqlx::{self, AssertSqlSafe, Connection, Decode, Row, Type};

use crate::failure::{Failure, REFUSED, in_one_line, within};
use crate::store::{Postgres, TableState};

/// How often the round trip is measured. The fastest counts.
const ROUND_TRIPS: usize = 5;

#[derive(Debug, Clone)]
pub(super) struct Facts {
    /// The server, the database and the user.
    pub(super) name: String,
    pub(super) round_trip: Duration,
    /// The server's clock minus this machine's, in seconds.
    pub(super) clock_ahead: f64,
    pub(super) pooler: Pooler,
    pub(super) server: Server,
    pub(super) state: Result<TableState, String>,
    /// `None` if there is no table.
    pub(super) table: Option<Table>,
    /// `None` if the table is not usable.
    pub(super) stats: Option<Result<Stats, String>>,
}

/// What stands between this command and the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pooler {
    None,
    /// Two open connections share a session of the server.
    Transaction,
    /// And prepared statements fail.
    TransactionWithoutPrepared,
}

#[derive(Debug, Clone, Deserialize)]
pub(super) struct Server {
    pub(super) version_num: i32,
    pub(super) version: String,
    pub(super) is_standby: bool,
    pub(super) is_read_only: bool,
    pub(super) encoding: String,
    pub(super) synchronous_commit: String,
    pub(super) fsync: bool,
    pub(super) full_page_writes: bool,
    pub(super) isolation: String,
    pub(super) autovacuum: bool,
    pub(super) statement_timeout_ms: u64,
    pub(super) idle_in_transaction_ms: u64,
    pub(super) transaction_timeout_ms: u64,
    pub(super) max_connections: u64,
    /// Connections that only superusers, or roles with a right of their own, may take.
    pub(super) reserved: u64,
    /// Sessions of other roles.
    pub(super) others: u64,
    /// Those of this database.
    pub(super) database_others: u64,
    /// Negative if there is no limit.
    pub(super) role_limit: i64,
    pub(super) database_limit: i64,
    pub(super) tls: Option<bool>,
    pub(super) tls_version: Option<String>,
    /// The connection comes from the server's own machine.
    pub(super) is_local: bool,
}

#[derive(Debug, Clone, Deserialize)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
pub(super) struct Table {
    pub(super) may_use_schema: bool,
    pub(super) may_select: bool,
    pub(super) may_insert: bool,
    pub(super) may_update: bool,
    pub(super) may_delete: bool,
    pub(super) may_select_version: bool,
    pub(super) is_unlogged: bool,
    pub(super) autovacuum_is_off: bool,
    pub(super) dead: u64,
    pub(super) live: u64,
    pub(super) autovacuum_seconds_ago: Option<i64>,
}

pub(super) async fn gather(postgres: &Postgres) -> Result<Facts, Failure> {
    let timeout = postgres.timeout;
    let mut connection = postgres.connect().await?;
    let work = async {
        let (round_trip, clock_ahead) = clock(&mut connection).await?;
        let server = json(&mut connection, include_str!("../sql/server.sql")).await?;
        let found = postgres.find(&mut connection).await?;
        let table = match &found {
            Some(table) => {
                let sql =
                    include_str!("../sql/table_facts.sql").replace("$1", &table.oid.to_string());
                Some(json(&mut connection, &sql).await?)
            }
            None => None,
        };
        Ok((round_trip, clock_ahead, server, found, table))
    };
    let (round_trip, clock_ahead, server, found, table) = within(timeout, work).await?;
    let pooler = within(timeout, pooler(postgres, &mut connection)).await?;
    // The last, because a lock of the version table leaves the connection unusable.
    let work = async {
        let state = postgres.state(&mut connection, found.as_ref()).await;
        // What was read stands.
        let _ = connection.close().await;
        state
    };
    let state = within(timeout, work).await.map_err(|failure| failure.message);
    let mut stats = None;
    if state == Ok(TableState::Current) {
        let store = postgres.open_pool();
        stats = Some(store.adapter.stats().await.map_err(|error| in_one_line(&error)));
        store.close().await;
    }
    let name = postgres.describe();
    Ok(Facts { name, round_trip, clock_ahead, pooler, server, state, table, stats })
}

/// Returns the fastest round trip, and how far the server's clock is ahead by it.
async fn clock(connection: &mut PgConnection) -> Result<(Duration, f64), Failure> {
    let mut best = (Duration::MAX, 0.0);
    for _ in 0..ROUND_TRIPS {
        let (wall, started) = (SystemTime::now(), Instant::now());
        let now = "SELECT extract(epoch FROM clock_timestamp())::float8";
        let now: f64 = scalar(connection, now).await?;
        let took = started.elapsed();
        if took < best.0 {
            let wall = wall.duration_since(UNIX_EPOCH).unwrap_or_default() + took / 2;
            best = (took, now - wall.as_secs_f64());
        }
    }
    Ok(best)
}

/// Two open connections to a server have two sessions. PgBouncer in transaction mode lends both
/// connections the session that it used last.
async fn pooler(postgres: &Postgres, first: &mut PgConnection) -> Result<Pooler, Failure> {
    let mut second = postgres.connect().await?;
    let mut fails = false;
    let mut pids = [0, 0];
    for (pid, connection) in pids.iter_mut().zip([first, &mut second]) {
        // Prepared under a name, as the adapter does it: sqlx gives the same names on each connection.
        let prepared = sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(&mut *connection);
        *pid = match prepared.await {
            Ok(pid) => pid,
            Err(error) if is_prepared_fault(&error) => {
                fails = true;
                scalar(connection, "SELECT pg_backend_pid()").await?
            }
            Err(error) => return Err(error.into()),
        };
    }
    let [first, second_pid]: [i32; 2] = pids;
    second.close().await?;
    Ok(match (fails, first == second_pid) {
        (true, _) => Pooler::TransactionWithoutPrepared,
        (false, true) => Pooler::Transaction,
        (false, false) => Pooler::None,
    })
}

/// Returns `true` if another client has prepared a statement of this name, or the statement is in another
/// session.
fn is_prepared_fault(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(sqlx::error::DatabaseError::code);
    code.is_some_and(|code| code == "42P05" || code == "26000")
}

async fn json<T: for<'de> Deserialize<'de>>(
    connection: &mut PgConnection,
    sql: &str,
) -> Result<T, Failure> {
    let text: String = scalar(connection, sql).await?;
    serde_json::from_str(&text)
        .map_err(|error| Failure::new(REFUSED, format!("reading the server's facts: {error}")))
}

/// Prepares nothing, because that may be what fails behind a pooler.
async fn scalar<T>(connection: &mut PgConnection, sql: &str) -> Result<T, sqlx::Error>
where
    T: for<'r> Decode<'r, sqlx::Postgres> + Type<sqlx::Postgres>,
{
    let row = sqlx::raw_sql(AssertSqlSafe(sql)).fetch_one(connection).await?;
    row.try_get(0)
}
