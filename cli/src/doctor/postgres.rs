//! The checks of a Postgres store.

use super::finding::{self, Finding};
use crate::failure::Failure;
use crate::store::{Facts, PgTable, Postgres, TableState};

pub(super) async fn findings(postgres: &Postgres) -> Result<Vec<Finding>, Failure> {
    let (facts, state) = postgres.look().await?;
    let mut findings = vec![tls(&facts), primary(&facts), durability(&facts)];
    let is_unlogged = facts.table.as_ref().is_some_and(|table| table.is_unlogged);
    findings.push(finding::table(&state).error(
        is_unlogged.then_some("is unlogged: a crash of the server empties it"),
        "ALTER TABLE … SET LOGGED",
    ));
    findings.extend(facts.table.iter().flat_map(|table| [rights(table), index(table)]));
    if matches!(state, Ok(TableState::Current)) {
        findings.push(finding::purge(postgres.with(finding::stats).await));
    }
    Ok(findings)
}

fn tls(facts: &Facts) -> Finding {
    const ADVICE: &str = "add sslmode=verify-full to the URL, and a feature tls-… to the service";
    let is_encrypted = facts.tls == Some(true);
    let local = "none, and the server is on this machine";
    Finding::ok("tls", if is_encrypted { "the connection is encrypted" } else { local })
        .warning(
            (!facts.is_local && facts.tls.is_none())
                .then_some("the server does not say whether the connection is encrypted"),
            ADVICE,
        )
        .warning(
            (!facts.is_local && !is_encrypted)
                .then_some("the connection to another machine is not encrypted"),
            ADVICE,
        )
}

fn primary(facts: &Facts) -> Finding {
    Finding::ok("primary", "the server is a primary and takes writes")
        .error(
            facts.is_standby.then_some("the server is a standby"),
            "use an address that leads to the primary: deliveries get 503 here",
        )
        .error(
            facts
                .is_read_only
                .then_some("the server takes no writes (default_transaction_read_only)"),
            "set default_transaction_read_only = off for the role, or use the primary's address",
        )
}

fn durability(facts: &Facts) -> Finding {
    Finding::ok("durability", "fsync and full_page_writes are on")
        .error(
            (!facts.fsync).then_some("fsync is off"),
            "set fsync = on: a crash of the server loses completed keys, and their events run again",
        )
        .warning(
            (!facts.full_page_writes).then_some("full_page_writes is off"),
            "set full_page_writes = on, unless the file system never tears a page",
        )
}

fn rights(table: &PgTable) -> Finding {
    let lacks = (!table.lacks.is_empty()).then(|| format!("the role lacks {}", table.lacks));
    let lacks_delete = (!table.may_delete).then_some("the role lacks DELETE");
    Finding::ok("rights", "SELECT, INSERT, UPDATE, DELETE")
        .error(lacks, "grant them, and run doctor with the role of the service")
        .warning(lacks_delete, "grant it, or purge with another role")
}

fn index(table: &PgTable) -> Finding {
    Finding::ok("index", "expires_at has one").warning(
        (!table.has_index).then_some("none on expires_at: each purge reads the whole table"),
        "run the CREATE INDEX of `tower-dedup migrate --print`",
    )
}

#[cfg(test)]
mod tests {
    use super::super::finding::Level::{Ok as Fine, Warning};
    use super::*;

    #[test]
    fn plain_text_to_another_machine_is_a_warning() {
        for (told, is_local, level) in [
            (Some(true), false, Fine),
            (Some(false), true, Fine),
            (None, true, Fine),
            (Some(false), false, Warning),
            (None, false, Warning),
        ] {
            let facts = Facts {
                is_standby: false,
                is_read_only: false,
                fsync: true,
                full_page_writes: true,
                tls: told,
                is_local,
                table: None,
            };
            assert_eq!(tls(&facts).level, level, "{told:?} {is_local}");
        }
    }
}
