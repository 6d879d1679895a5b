//! The checks of a Postgres store.

use serde::Deserialize;
use tower_dedup::sqlx::postgres::PgConnection;
use tower_dedup::sqlx::{self, AssertSqlSafe, Connection, Decode, Row, Type};

use super::finding::Level::{Error, Warning};
use super::finding::{self, Finding};
use crate::failure::{Failure, REFUSED, within};
use crate::options::Doctor;
use crate::store::{Postgres, TableState};

/// A lane is a connection beside the pool. A runtime has two, and four while the store is slow.
const LANES: u64 = 4;

#[derive(Debug, Clone, Deserialize)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
struct Server {
    is_standby: bool,
    is_read_only: bool,
    fsync: bool,
    full_page_writes: bool,
    max_connections: u64,
    /// Connections that only superusers, or roles with a right of their own, may take.
    reserved: u64,
    /// Sessions of other roles.
    others: u64,
    /// Those of this database.
    database_others: u64,
    /// Negative if there is no limit.
    role_limit: i64,
    database_limit: i64,
    tls: Option<bool>,
    /// The connection comes from the server's own machine.
    is_local: bool,
}

#[derive(Debug, Clone, Deserialize)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
struct Table {
    may_use_schema: bool,
    may_select: bool,
    may_insert: bool,
    may_update: bool,
    may_delete: bool,
    may_select_version: bool,
    is_unlogged: bool,
}

pub(super) async fn findings(postgres: &Postgres, asked: &Doctor) -> Result<Vec<Finding>, Failure> {
    let timeout = postgres.timeout;
    let mut connection = postgres.connect().await?;
    let work = async {
        let server: Server = json(&mut connection, include_str!("../sql/server.sql")).await?;
        let found = postgres.find(&mut connection).await?;
        let table: Option<Table> = match &found {
            Some(table) => {
                let sql =
                    include_str!("../sql/table_facts.sql").replace("$1", &table.oid.to_string());
                Some(json(&mut connection, &sql).await?)
            }
            None => None,
        };
        Ok((server, found, table))
    };
    let (server, found, table) = within(timeout, work).await?;
    let pooler = within(timeout, pooler(postgres, &mut connection)).await?;
    // The last, because a lock of the version table leaves the connection unusable.
    let work = async {
        let state = postgres.state(&mut connection, found.as_ref()).await;
        // What was read stands.
        let _ = connection.close().await;
        state
    };
    let state = within(timeout, work).await.map_err(|failure| failure.message);
    let is_unlogged = table.as_ref().is_some_and(|table| table.is_unlogged);
    let mut findings = vec![tls(&server), primary(&server), durability(&server), pooler];
    findings.push(finding::table(&state, is_unlogged));
    findings.extend(table.as_ref().map(rights));
    if state == Ok(TableState::Current) {
        let store = postgres.open_pool();
        findings.push(finding::purge(&store.adapter.stats().await));
        store.close().await;
    }
    findings.push(connections(&server, asked));
    Ok(findings)
}

fn tls(server: &Server) -> Finding {
    const ADVICE: &str = "add sslmode=verify-full to the URL, and a feature tls-… to the service";
    let ok = match server.tls {
        Some(true) => "the connection is encrypted",
        _ => "none, and the server is on this machine",
    };
    let is_remote = !server.is_local;
    let faults = [
        (
            is_remote && server.tls == Some(false),
            Warning,
            "the connection to another machine is not encrypted",
            ADVICE,
        ),
        (
            is_remote && server.tls.is_none(),
            Warning,
            "the server does not say whether the connection is encrypted",
            ADVICE,
        ),
    ];
    Finding::first("tls", ok, &faults)
}

fn primary(server: &Server) -> Finding {
    let faults = [
        (
            server.is_standby,
            Error,
            "the server is a standby",
            "use an address that leads to the primary: deliveries get 503 here",
        ),
        (
            server.is_read_only,
            Error,
            "the server takes no writes (default_transaction_read_only)",
            "set default_transaction_read_only = off for the role, or use the primary's address",
        ),
    ];
    Finding::first("primary", "the server is a primary and takes writes", &faults)
}

fn durability(server: &Server) -> Finding {
    let faults = [
        (
            !server.fsync,
            Error,
            "fsync is off",
            "set fsync = on: a crash of the server loses completed keys, and their events run again",
        ),
        (
            !server.full_page_writes,
            Warning,
            "full_page_writes is off",
            "set full_page_writes = on, unless the file system never tears a page",
        ),
    ];
    Finding::first("durability", "fsync and full_page_writes are on", &faults)
}

fn rights(table: &Table) -> Finding {
    let needed = [
        (table.may_use_schema, "USAGE on the schema"),
        (table.may_select, "SELECT"),
        (table.may_insert, "INSERT"),
        (table.may_update, "UPDATE"),
        (table.may_select_version, "SELECT on the version table"),
    ];
    let missing = needed.iter().filter(|(has, _)| !has).map(|(_, name)| *name);
    let missing = missing.collect::<Vec<_>>().join(", ");
    let faults = [
        (
            !missing.is_empty(),
            Error,
            &*format!("the role lacks {missing}"),
            "grant them, and run doctor with the role of the service",
        ),
        (
            !table.may_delete,
            Warning,
            "the role lacks DELETE",
            "grant it, or purge with another role; forget and on-arrival releases need it too",
        ),
    ];
    Finding::first("rights", "SELECT, INSERT, UPDATE, DELETE", &faults)
}

fn connections(server: &Server, asked: &Doctor) -> Finding {
    const CHECK: &str = "connections";
    let (processes, pool) = (u64::from(asked.processes), u64::from(asked.pool));
    let needed = processes.saturating_mul(pool.saturating_add(LANES));
    let shared = server.max_connections.saturating_sub(server.reserved);
    let free = shared.saturating_sub(server.others);
    let mut limits = vec![(free, "the server leaves")];
    for (limit, others, name) in [
        (server.role_limit, 0, "the role may have"),
        (server.database_limit, server.database_others, "the database takes"),
    ] {
        let limit = u64::try_from(limit).ok();
        limits.extend(limit.map(|limit| (limit.saturating_sub(others), name)));
    }
    let (limit, name) = limits.into_iter().min().unwrap_or((free, "the server leaves"));
    let found = format!(
        "{processes} process(es) with a pool of {pool} and up to {LANES} lanes need {needed}; \
         {name} {limit} (max_connections {}, reserved {}, other roles {})",
        server.max_connections, server.reserved, server.others
    );
    let advice = "make the pools smaller, raise the limit, or put PgBouncer between";
    let is_near = needed > limit / 10 * 8;
    let faults = [(needed > limit, Error, &*found, advice), (is_near, Warning, &*found, advice)];
    Finding::first(CHECK, &*found, &faults)
}
/// Two open connections to a server have two sessions. PgBouncer in transaction mode lends both
/// connections the session that it used last.
async fn pooler(postgres: &Postgres, first: &mut PgConnection) -> Result<Finding, Failure> {
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
    let ok = if first == second_pid {
        "connections share sessions, as with PgBouncer in transaction mode; prepared statements work"
    } else {
        "each connection has its own session"
    };
    let faults = [(
        fails,
        Error,
        "connections share sessions, and prepared statements fail",
        "use PgBouncer 1.21 or later with max_prepared_statements above 0, or session mode",
    )];
    Ok(Finding::first("pooler", ok, &faults))
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

#[cfg(test)]
mod tests {
    use super::super::finding::Level::{self, Ok as Fine};
    use super::*;

    fn server() -> Server {
        Server {
            is_standby: false,
            is_read_only: false,
            fsync: true,
            full_page_writes: true,
            max_connections: 100,
            reserved: 3,
            others: 7,
            database_others: 5,
            role_limit: -1,
            database_limit: -1,
            tls: Some(true),
            is_local: false,
        }
    }

    #[test]
    fn plain_text_to_another_machine_is_a_warning() {
        for (told, is_local, level) in [
            (Some(true), false, Fine),
            (Some(false), true, Fine),
            (Some(false), false, Warning),
            (None, false, Warning),
        ] {
            assert_eq!(tls(&Server { tls: told, is_local, ..server() }).level, level, "{told:?}");
        }
    }

    #[test]
    fn connections_asked_for_must_fit_every_limit() {
        let judged = |server: &Server, pool, processes| -> Level {
            connections(server, &Doctor { pool, processes }).level
        };
        // 100 - 3 - 7 = 90 are free; a process needs its pool and four lanes.
        assert_eq!(judged(&server(), 10, 5), Fine);
        assert_eq!(judged(&server(), 71, 1), Warning);
        assert_eq!(judged(&server(), 86, 1), Warning);
        assert_eq!(judged(&server(), 87, 1), Error);
        assert_eq!(judged(&Server { role_limit: 13, ..server() }, 10, 1), Error);
        // 5 sessions of other roles are in the database.
        assert_eq!(judged(&Server { database_limit: 18, ..server() }, 10, 1), Error);
        assert_eq!(judged(&Server { database_limit: 19, ..server() }, 10, 1), Warning);
        assert_eq!(judged(&Server { max_connections: 2, ..server() }, 10, 1), Error);
        assert_eq!(judged(&server(), u32::MAX, u32::MAX), Error);
    }
}
