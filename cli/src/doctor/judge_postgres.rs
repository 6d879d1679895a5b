//! The judgement of the facts of a Postgres store. A pure function of the facts.

use std::time::Duration;

use super::finding::{Finding, judge_clock, judge_purge, judge_table};
use super::postgres::{Facts, Pooler, Server, Table};
use crate::options::Doctor;
use crate::output::{printable, span};

/// The oldest version that is tested.
const OLDEST: i32 = 130_000;
/// A delivery waits for two statements, and for its own work.
const SLOW: Duration = Duration::from_millis(20);
/// A lane is a connection beside the pool. A runtime has two, and four while the store is slow.
const LANES: u64 = 4;
/// A handler's statement, and its pause between two statements, may take this long.
const SHORTEST_TIMEOUT_MS: u64 = 5_000;
/// A table with fewer dead rows is small.
const MANY_DEAD: u64 = 10_000;

pub(super) fn judge(facts: &Facts, asked: &Doctor) -> Vec<Finding> {
    let server = &facts.server;
    let mut findings = vec![
        connection(facts),
        version(server),
        encoding(server),
        tls(server),
        primary(server),
        durability(server),
        isolation(server),
        pooler(facts.pooler),
        judge_table(&facts.state),
    ];
    if let Some(table) = &facts.table {
        findings.push(privileges(table));
        findings.push(persistence(table));
        findings.push(autovacuum(server, table));
    }
    findings.extend(facts.stats.as_ref().map(judge_purge));
    findings.push(judge_clock(facts.clock_ahead));
    findings.push(connections(server, asked));
    findings.push(timeouts(server));
    findings
}

fn connection(facts: &Facts) -> Finding {
    let Facts { name, round_trip, .. } = facts;
    let found = format!("{name}; a round trip takes {:.2} ms", round_trip.as_secs_f64() * 1e3);
    if *round_trip > SLOW {
        return Finding::warning(
            "connection",
            found,
            "run the service nearer to the database: a delivery waits for two round trips at least",
        );
    }
    Finding::ok("connection", found)
}

fn version(server: &Server) -> Finding {
    let found = format!("PostgreSQL {}", server.version);
    if server.version_num < OLDEST {
        return Finding::error("version", found, "upgrade the server to version 13 or later");
    }
    Finding::ok("version", found)
}

fn encoding(server: &Server) -> Finding {
    match &*server.encoding {
        "UTF8" | "SQL_ASCII" => Finding::ok("encoding", &*server.encoding),
        other => Finding::error(
            "encoding",
            other,
            "use a database with the encoding UTF8: the adapter refuses this one",
        ),
    }
}

fn tls(server: &Server) -> Finding {
    let version = server.tls_version.as_deref().unwrap_or_default();
    match server.tls {
        Some(true) => Finding::ok("tls", format!("the connection has {version}")),
        _ if server.is_local => Finding::ok("tls", "none, and the server is on this machine"),
        Some(false) => Finding::warning(
            "tls",
            "the connection to another machine is not encrypted",
            "add sslmode=verify-full to the URL, and a feature tls-… to the service",
        ),
        None => Finding::warning(
            "tls",
            "the server does not say whether the connection is encrypted",
            "add sslmode=verify-full to the URL, and a feature tls-… to the service",
        ),
    }
}

fn primary(server: &Server) -> Finding {
    if server.is_standby {
        return Finding::error(
            "primary",
            "the server is a standby",
            "use an address that leads to the primary: deliveries get 503 here",
        );
    }
    if server.is_read_only {
        return Finding::error(
            "primary",
            "the server takes no writes (default_transaction_read_only)",
            "set default_transaction_read_only = off for the role, or use the primary's address",
        );
    }
    Finding::ok("primary", "the server is a primary and takes writes")
}

fn durability(server: &Server) -> Finding {
    const CHECK: &str = "durability";
    let commit = &server.synchronous_commit;
    if !server.fsync {
        return Finding::error(
            CHECK,
            "fsync is off",
            "set fsync = on: a crash of the server loses completed keys, and their events run again",
        );
    }
    if !server.full_page_writes {
        return Finding::warning(
            CHECK,
            "full_page_writes is off",
            "set full_page_writes = on, unless the file system never tears a page",
        );
    }
    let raised = if matches!(&**commit, "off" | "local" | "remote_write") {
        "; the adapter raises it to on for its own commits"
    } else {
        ""
    };
    Finding::ok(CHECK, format!("fsync is on, synchronous_commit is {commit}{raised}"))
}

fn isolation(server: &Server) -> Finding {
    let level = &server.isolation;
    if level == "read committed" {
        return Finding::ok("isolation", level);
    }
    Finding::warning(
        "isolation",
        format!("the default is {level}"),
        "handlers of the transactional ledger get it, and more of them end in serialization errors, \
         which their retries repair; set default_transaction_isolation = 'read committed' for the \
         role if you do not need it",
    )
}

fn pooler(pooler: Pooler) -> Finding {
    match pooler {
        Pooler::None => Finding::ok("pooler", "each connection has its own session"),
        Pooler::Transaction => Finding::ok(
            "pooler",
            "connections share sessions, as with PgBouncer in transaction mode; prepared statements work",
        ),
        Pooler::TransactionWithoutPrepared => Finding::error(
            "pooler",
            "connections share sessions, and prepared statements fail",
            "use PgBouncer 1.21 or later with max_prepared_statements above 0, or session mode",
        ),
    }
}

fn privileges(table: &Table) -> Finding {
    let needed = [
        (table.may_use_schema, "USAGE on the schema"),
        (table.may_select, "SELECT"),
        (table.may_insert, "INSERT"),
        (table.may_update, "UPDATE"),
        (table.may_select_version, "SELECT on the version table"),
    ];
    let missing = needed.iter().filter(|(has, _)| !has).map(|(_, name)| *name);
    let missing = missing.collect::<Vec<_>>().join(", ");
    if !missing.is_empty() {
        return Finding::error(
            "privileges",
            format!("the role lacks {missing}"),
            "grant them, and run doctor with the role of the service",
        );
    }
    if !table.may_delete {
        return Finding::warning(
            "privileges",
            "the role lacks DELETE",
            "grant it, or purge with another role; forget and on-arrival releases need it too",
        );
    }
    Finding::ok("privileges", "SELECT, INSERT, UPDATE, DELETE")
}

fn persistence(table: &Table) -> Finding {
    if table.is_unlogged {
        return Finding::error(
            "persistence",
            "the table is unlogged: a crash of the server empties it",
            "ALTER TABLE … SET LOGGED",
        );
    }
    Finding::ok("persistence", "the table is logged")
}

fn autovacuum(server: &Server, table: &Table) -> Finding {
    const CHECK: &str = "autovacuum";
    let last = table.autovacuum_seconds_ago.and_then(|seconds| u64::try_from(seconds).ok());
    let last = match last {
        Some(seconds) => format!("the last was {} ago", span(Duration::from_secs(seconds))),
        None => "none has run yet".to_owned(),
    };
    let found = format!("{last}; {} live rows, {} dead", table.live, table.dead);
    if !server.autovacuum {
        return Finding::error(
            CHECK,
            format!("autovacuum is off on the server; {found}"),
            "set autovacuum = on and track_counts = on: the table grows without bound otherwise",
        );
    }
    if table.autovacuum_is_off {
        return Finding::error(
            CHECK,
            format!("autovacuum is off for the table; {found}"),
            "ALTER TABLE … RESET (autovacuum_enabled)",
        );
    }
    if table.dead >= MANY_DEAD && table.dead > table.live / 2 {
        return Finding::warning(
            CHECK,
            found,
            "VACUUM the table, look for transactions that are open for long, and lower \
             autovacuum_vacuum_scale_factor for the table",
        );
    }
    Finding::ok(CHECK, found)
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
    if needed > limit {
        Finding::error(CHECK, found, advice)
    } else if needed > limit / 10 * 8 {
        Finding::warning(CHECK, found, advice)
    } else {
        Finding::ok(CHECK, found)
    }
}

fn timeouts(server: &Server) -> Finding {
    let set = [
        ("statement_timeout", server.statement_timeout_ms),
        ("idle_in_transaction_session_timeout", server.idle_in_transaction_ms),
        ("transaction_timeout", server.transaction_timeout_ms),
    ];
    let set = set.into_iter().filter(|(_, ms)| *ms > 0).collect::<Vec<_>>();
    let words = |set: &[(&str, u64)]| {
        let words = set.iter().map(|(name, ms)| format!("{name} is {ms} ms"));
        words.collect::<Vec<_>>().join(", ")
    };
    let short = set.iter().copied().filter(|(_, ms)| *ms < SHORTEST_TIMEOUT_MS).collect::<Vec<_>>();
    if !short.is_empty() {
        return Finding::warning(
            "timeouts",
            printable(&words(&short)),
            "raise it for the role to 5 s at least: it ends statements, and handlers of the \
             transactional ledger that pause",
        );
    }
    if set.is_empty() {
        return Finding::ok("timeouts", "the role has none");
    }
    Finding::ok("timeouts", words(&set))
}

#[cfg(test)]
mod tests {
    use super::super::finding::Level::{self, Error, Ok as Fine, Warning};
    use super::*;
    use crate::store::TableState;

    fn server() -> Server {
        Server {
            version_num: 150_004,
            version: "15.4".to_owned(),
            is_standby: false,
            is_read_only: false,
            encoding: "UTF8".to_owned(),
            synchronous_commit: "on".to_owned(),
            fsync: true,
            full_page_writes: true,
            isolation: "read committed".to_owned(),
            autovacuum: true,
            statement_timeout_ms: 0,
            idle_in_transaction_ms: 0,
            transaction_timeout_ms: 0,
            max_connections: 100,
            reserved: 3,
            others: 7,
            database_others: 5,
            role_limit: -1,
            database_limit: -1,
            tls: Some(true),
            tls_version: Some("TLSv1.3".to_owned()),
            is_local: false,
        }
    }

    fn table() -> Table {
        Table {
            may_use_schema: true,
            may_select: true,
            may_insert: true,
            may_update: true,
            may_delete: true,
            may_select_version: true,
            is_unlogged: false,
            autovacuum_is_off: false,
            dead: 0,
            live: 1_000,
            autovacuum_seconds_ago: Some(60),
        }
    }

    fn facts() -> Facts {
        Facts {
            name: "app on db:5432 as app".to_owned(),
            round_trip: Duration::from_micros(300),
            clock_ahead: 0.0,
            pooler: Pooler::None,
            server: server(),
            state: Ok(TableState::Current),
            table: Some(table()),
            stats: Some(Ok(tower_dedup::adapter::Stats::default())),
        }
    }

    const ASKED: Doctor = Doctor { pool: 10, processes: 1 };

    /// Returns the level of this check for facts that differ in one way from a good store.
    fn level_of(check: &str, change: impl FnOnce(&mut Facts)) -> Level {
        let mut facts = facts();
        change(&mut facts);
        let findings = judge(&facts, &ASKED);
        let others = findings.iter().filter(|finding| finding.check != check);
        for other in others {
            assert_eq!(other.level, Fine, "{other:?}");
        }
        let finding = findings.iter().find(|finding| finding.check == check).unwrap();
        assert_eq!(finding.level == Fine, finding.advice.is_none(), "{finding:?}");
        finding.level
    }

    #[test]
    fn good_store_has_no_finding() {
        assert!(judge(&facts(), &ASKED).iter().all(|finding| finding.level == Fine));
    }

    #[test]
    fn slow_round_trip_is_a_warning() {
        let slow = |facts: &mut Facts| facts.round_trip = Duration::from_millis(21);
        assert_eq!(level_of("connection", slow), Warning);
    }

    #[test]
    fn old_version_and_other_encodings_are_errors() {
        assert_eq!(level_of("version", |facts| facts.server.version_num = 129_999), Error);
        let latin = |facts: &mut Facts| facts.server.encoding = "LATIN1".to_owned();
        assert_eq!(level_of("encoding", latin), Error);
    }

    #[test]
    fn plain_text_to_another_machine_is_a_warning() {
        assert_eq!(level_of("tls", |facts| facts.server.tls = Some(false)), Warning);
        assert_eq!(level_of("tls", |facts| facts.server.tls = None), Warning);
        let local = |facts: &mut Facts| {
            facts.server.tls = Some(false);
            facts.server.is_local = true;
        };
        assert_eq!(level_of("tls", local), Fine);
    }

    #[test]
    fn server_without_writes_is_an_error() {
        assert_eq!(level_of("primary", |facts| facts.server.is_standby = true), Error);
        assert_eq!(level_of("primary", |facts| facts.server.is_read_only = true), Error);
    }

    #[test]
    fn durability_needs_fsync_and_full_pages() {
        assert_eq!(level_of("durability", |facts| facts.server.fsync = false), Error);
        assert_eq!(level_of("durability", |facts| facts.server.full_page_writes = false), Warning);
        for (setting, is_raised) in [("off", true), ("local", true), ("remote_apply", false)] {
            let finding =
                durability(&Server { synchronous_commit: setting.to_owned(), ..server() });
            assert_eq!(finding.level, Fine);
            assert_eq!(finding.found.contains("raises it"), is_raised, "{finding:?}");
        }
    }

    #[test]
    fn isolation_above_read_committed_is_a_warning() {
        let serializable = |facts: &mut Facts| facts.server.isolation = "serializable".to_owned();
        assert_eq!(level_of("isolation", serializable), Warning);
    }

    #[test]
    fn pooler_needs_prepared_statements() {
        assert_eq!(level_of("pooler", |facts| facts.pooler = Pooler::Transaction), Fine);
        let without = |facts: &mut Facts| facts.pooler = Pooler::TransactionWithoutPrepared;
        assert_eq!(level_of("pooler", without), Error);
    }

    #[test]
    fn each_missing_privilege_is_named() {
        type Revoke = fn(&mut Table);
        let cases: [(Revoke, &str, Level); 6] = [
            (|table| table.may_use_schema = false, "USAGE", Error),
            (|table| table.may_select = false, "SELECT", Error),
            (|table| table.may_insert = false, "INSERT", Error),
            (|table| table.may_update = false, "UPDATE", Error),
            (|table| table.may_select_version = false, "version table", Error),
            (|table| table.may_delete = false, "DELETE", Warning),
        ];
        for (revoke, name, level) in cases {
            let mut table = table();
            revoke(&mut table);
            let finding = privileges(&table);
            assert_eq!(finding.level, level);
            assert!(finding.found.contains(name), "{finding:?}");
        }
    }

    #[test]
    fn unlogged_table_is_an_error() {
        let unlogged =
            |facts: &mut Facts| facts.table = Some(Table { is_unlogged: true, ..table() });
        assert_eq!(level_of("persistence", unlogged), Error);
    }

    #[test]
    fn autovacuum_must_run_and_keep_up() {
        assert_eq!(level_of("autovacuum", |facts| facts.server.autovacuum = false), Error);
        let judged = |table: &Table| autovacuum(&server(), table).level;
        assert_eq!(judged(&Table { autovacuum_is_off: true, ..table() }), Error);
        assert_eq!(judged(&Table { dead: 10_000, live: 19_000, ..table() }), Warning);
        assert_eq!(judged(&Table { dead: 10_000, live: 20_000, ..table() }), Fine);
        assert_eq!(judged(&Table { dead: 9_999, live: 0, ..table() }), Fine);
    }

    #[test]
    fn clock_difference_is_judged_in_both_directions() {
        for (ahead, level) in
            [(4.9, Fine), (5.0, Warning), (-5.0, Warning), (300.0, Error), (-300.0, Error)]
        {
            assert_eq!(level_of("clock", |facts| facts.clock_ahead = ahead), level, "{ahead}");
        }
    }

    #[test]
    fn connections_asked_for_must_fit_every_limit() {
        let judged = |server: &Server, pool, processes| {
            connections(server, &Doctor { pool, processes }).level
        };
        // 100 - 3 - 7 = 90 are free; a process needs its pool and four lanes.
        assert_eq!(judged(&server(), 10, 5), Fine);
        assert_eq!(judged(&server(), 71, 1), Warning);
        assert_eq!(judged(&server(), 86, 1), Warning);
        assert_eq!(judged(&server(), 87, 1), Error);
        assert_eq!(judged(&Server { role_limit: 13, ..server() }, 10, 1), Error);
        assert_eq!(judged(&Server { database_limit: 13, ..server() }, 10, 1), Error);
        // 5 sessions of other roles are in the database.
        assert_eq!(judged(&Server { database_limit: 18, ..server() }, 10, 1), Error);
        assert_eq!(judged(&Server { database_limit: 19, ..server() }, 10, 1), Warning);
        assert_eq!(judged(&Server { max_connections: 2, ..server() }, 10, 1), Error);
        assert_eq!(judged(&server(), u32::MAX, u32::MAX), Error);
    }

    #[test]
    fn short_timeouts_are_warnings() {
        type Set = fn(&mut Server, u64);
        let settings: [Set; 3] = [
            |server, ms| server.statement_timeout_ms = ms,
            |server, ms| server.idle_in_transaction_ms = ms,
            |server, ms| server.transaction_timeout_ms = ms,
        ];
        for set in settings {
            assert_eq!(level_of("timeouts", |facts| set(&mut facts.server, 4_999)), Warning);
            assert_eq!(level_of("timeouts", |facts| set(&mut facts.server, 5_000)), Fine);
        }
    }

    #[test]
    fn store_without_a_table_has_no_findings_about_it() {
        let mut facts = facts();
        facts.state = Ok(TableState::Missing);
        (facts.table, facts.stats) = (None, None);
        let findings = judge(&facts, &ASKED);
        let errors: Vec<_> = findings.iter().filter(|finding| finding.level != Fine).collect();
        assert_eq!(errors.len(), 1);
        assert_eq!(errors[0].check, "table");
    }
}
