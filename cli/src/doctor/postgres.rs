//! The checks of a Postgres store.

use super::finding::{self, Finding};
use crate::failure::Failure;
use crate::store::{Facts, PgTable, Postgres, Target};

pub(super) async fn findings(
    target: &Target,
    postgres: &Postgres,
) -> Result<Vec<Finding>, Failure> {
    let facts = postgres.facts().await?;
    let mut findings = vec![tls(facts.tls, facts.is_local), primary(&facts), durability(&facts)];
    findings.extend(facts.table.iter().flat_map(|table| [rights(table), index(table)]));
    let is_primary = !facts.is_standby && !facts.is_read_only;
    let writable = facts.table.as_ref().filter(|table| is_primary && table.lacks.is_empty());
    let mut is_locked = false;
    if let Some(table) = writable {
        let lock = postgres.lock(table).await;
        is_locked = lock.is_err();
        findings.push(finding::lock(lock, "find the session in pg_locks and pg_stat_activity"));
    }
    // To read the table may wait for the lock, too.
    if !is_locked {
        let read = target.read_table().await;
        let is_unlogged = facts.table.is_some_and(|table| table.is_unlogged);
        findings.push(finding::table(&read).error(
            is_unlogged.then_some("is unlogged: a crash of the server empties it"),
            "ALTER TABLE … SET LOGGED",
        ));
        if read.is_ok() {
            findings.push(finding::purge(target).await);
        }
    }
    findings.extend(finding::inbox(target, postgres.timeout).await);
    Ok(findings)
}

fn tls(told: Option<bool>, is_local: bool) -> Finding {
    let found = match told {
        Some(true) => "the connection is encrypted",
        _ if is_local => "none, and the server is on this machine",
        Some(false) => "the connection to another machine is not encrypted",
        None => "the server does not say whether the connection is encrypted",
    };
    Finding::ok("tls", found).warning(
        (!is_local && told != Some(true)).then_some(found),
        "add sslmode=verify-full to the URL, and a feature tls-… to the service",
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
            assert_eq!(tls(told, is_local).level, level, "{told:?} {is_local}");
        }
    }
}
