//! The checks of a Postgres store.

use serde::Deserialize;
use tower_dedup::sqlx::postgres::PgConnection;
use tower_dedup::sqlx::{self, AssertSqlSafe, Connection, Decode, Row, Type};

use super::finding::Level::{Error, Warning};
use super::finding::{self, Finding};
use crate::failure::{Failure, REFUSED, within};
use crate::store::{Postgres, TableState};

#[derive(Debug, Clone, Deserialize)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
struct Server {
    is_standby: bool,
    is_read_only: bool,
    fsync: bool,
    full_page_writes: bool,
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
    has_index: bool,
}

pub(super) async fn findings(postgres: &Postgres) -> Result<Vec<Finding>, Failure> {
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
    // The last, because a lock of the version table leaves the connection unusable.
    let work = async {
        let state = postgres.state(&mut connection, found.as_ref()).await;
        // What was read stands.
        let _ = connection.close().await;
        state
    };
    let state = within(timeout, work).await.map_err(|failure| failure.message);
    let is_unlogged = table.as_ref().is_some_and(|table| table.is_unlogged);
    let mut findings = vec![tls(&server), primary(&server), durability(&server)];
    findings.push(finding::table(&state, is_unlogged));
    findings.extend(table.as_ref().map(rights));
    findings.extend(table.as_ref().map(index));
    if state == Ok(TableState::Current) {
        let store = postgres.open_pool();
        findings.push(finding::purge(&store.adapter.stats().await));
        store.close().await;
    }
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
            "grant it, or purge with another role",
        ),
    ];
    Finding::first("rights", "SELECT, INSERT, UPDATE, DELETE", &faults)
}

fn index(table: &Table) -> Finding {
    let fault = (
        !table.has_index,
        Warning,
        "none on expires_at: each purge reads the whole table",
        "run the CREATE INDEX of `tower-dedup migrate --print`",
    );
    Finding::first("index", "expires_at has one", &[fault])
}

async fn json<T: for<'de> Deserialize<'de>>(
    connection: &mut PgConnection,
    sql: &str,
) -> Result<T, Failure> {
    let text: String = scalar(connection, sql).await?;
    serde_json::from_str(&text)
        .map_err(|error| Failure::new(REFUSED, format!("reading the server's facts: {error}")))
}

/// Prepares nothing, because that fails behind some poolers.
async fn scalar<T>(connection: &mut PgConnection, sql: &str) -> Result<T, sqlx::Error>
where
    T: for<'r> Decode<'r, sqlx::Postgres> + Type<sqlx::Postgres>,
{
    let row = sqlx::raw_sql(AssertSqlSafe(sql)).fetch_one(connection).await?;
    row.try_get(0)
}

#[cfg(test)]
mod tests {
    use super::super::finding::Level::Ok as Fine;
    use super::*;

    fn server() -> Server {
        Server {
            is_standby: false,
            is_read_only: false,
            fsync: true,
            full_page_writes: true,
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
}
