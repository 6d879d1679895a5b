//! The judgement of the facts of a SQLite store. A pure function of the facts.

use super::finding::{Finding, judge_purge, judge_table};
use super::sqlite::{Database, Facts, QuickCheck};
use crate::output::bytes;

/// The adapter checkpoints the WAL long before.
const LARGE_WAL: u64 = 64 << 20;
/// File systems of a network: WAL mode needs memory that all processes share.
const NETWORK: [&str; 12] = [
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "ncpfs",
    "afs",
    "ceph",
    "lustre",
    "glusterfs",
    "fuse.glusterfs",
    "fuse.sshfs",
];

pub(super) fn judge(facts: &Facts) -> Vec<Finding> {
    let mut findings =
        vec![files(facts), file_system(facts.file_system.as_deref()), wal(facts.wal_bytes)];
    match &facts.database {
        Ok(database) => findings.extend(judge_database(database)),
        Err(error) => findings.push(Finding::error(
            "open",
            format!("the file cannot be opened: {error}"),
            "see the other lines; if it is no SQLite file, restore it or move it away",
        )),
    }
    findings
}

fn judge_database(database: &Database) -> Vec<Finding> {
    let mut findings = vec![
        Finding::ok("version", format!("SQLite {}", database.version)),
        journal(&database.journal_mode),
        quick_check(&database.quick_check),
        judge_table(&database.state),
    ];
    findings.extend(database.stats.as_ref().map(judge_purge));
    findings
}

fn files(facts: &Facts) -> Finding {
    let path = facts.path.display();
    let advice =
        "give the service's user the right to write both: SQLite makes files beside its own";
    match (&facts.file_error, &facts.folder_error) {
        (None, None) => Finding::ok("files", format!("{path} and its folder can be written")),
        (Some(error), _) => {
            Finding::error("files", format!("{path} cannot be written: {error}"), advice)
        }
        (_, Some(error)) => Finding::error(
            "files",
            format!("the folder of {path} cannot be written: {error}"),
            advice,
        ),
    }
}

fn file_system(kind: Option<&str>) -> Finding {
    const CHECK: &str = "file system";
    match kind {
        None => Finding::ok(CHECK, "its type is not known here"),
        Some(kind) if NETWORK.contains(&kind) => Finding::error(
            CHECK,
            format!("{kind} is a network file system"),
            "move the file to a local disk, or use Postgres: processes of two machines would both \
             claim one event",
        ),
        Some("tmpfs" | "ramfs") => Finding::warning(
            CHECK,
            "the file is in memory",
            "move the file to a disk: a restart of the machine loses all keys",
        ),
        Some(kind) => Finding::ok(CHECK, kind),
    }
}

fn wal(length: u64) -> Finding {
    let found = format!("the WAL file has {}", bytes(length));
    if length > LARGE_WAL {
        return Finding::warning(
            "wal",
            found,
            "look for a connection that reads for long: it stops checkpoints, and the file grows",
        );
    }
    Finding::ok("wal", found)
}

fn journal(mode: &str) -> Finding {
    if mode.eq_ignore_ascii_case("wal") {
        return Finding::ok("journal", "WAL");
    }
    Finding::warning(
        "journal",
        format!("the journal mode is {mode}"),
        "run PRAGMA journal_mode = WAL once, or let the adapter open the file by its URL: duplicates \
         wait for writers otherwise",
    )
}

fn quick_check(check: &QuickCheck) -> Finding {
    const CHECK: &str = "quick_check";
    match check {
        QuickCheck::Passed(took) => {
            Finding::ok(CHECK, format!("passed in {:.1} s", took.as_secs_f64()))
        }
        QuickCheck::Failed(fault) => Finding::error(
            CHECK,
            format!("the file is damaged: {fault}"),
            "stop the service and restore the file, or dump it with `sqlite3 FILE .recover`",
        ),
        QuickCheck::Unfinished(bound) => Finding::warning(
            CHECK,
            format!("it did not end within {bound:?}"),
            "give it more time with --timeout",
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::time::Duration;

    use super::super::finding::Level::{self, Error, Ok as Fine, Warning};
    use super::*;
    use crate::store::TableState;

    fn database() -> Database {
        Database {
            version: "3.50.0".to_owned(),
            journal_mode: "wal".to_owned(),
            state: Ok(TableState::Current),
            quick_check: QuickCheck::Passed(Duration::from_millis(3)),
            stats: Some(Ok(tower_dedup::adapter::Stats::default())),
        }
    }

    fn facts() -> Facts {
        Facts {
            path: PathBuf::from("/var/dedup.db"),
            file_error: None,
            folder_error: None,
            file_system: Some("ext4".to_owned()),
            wal_bytes: 4 << 20,
            database: Ok(database()),
        }
    }

    /// Returns the level of this check for facts that differ in one way from a good store.
    fn level_of(check: &str, change: impl FnOnce(&mut Facts)) -> Level {
        let mut facts = facts();
        change(&mut facts);
        let findings = judge(&facts);
        for other in findings.iter().filter(|finding| finding.check != check) {
            assert_eq!(other.level, Fine, "{other:?}");
        }
        findings.iter().find(|finding| finding.check == check).unwrap().level
    }

    #[test]
    fn good_store_has_no_finding() {
        assert!(judge(&facts()).iter().all(|finding| finding.level == Fine));
    }

    #[test]
    fn file_and_folder_must_be_writable() {
        let denied = || Some("permission denied".to_owned());
        assert_eq!(level_of("files", |facts| facts.file_error = denied()), Error);
        assert_eq!(level_of("files", |facts| facts.folder_error = denied()), Error);
    }

    #[test]
    fn file_system_must_be_local_and_on_a_disk() {
        let kind =
            |kind: &str| level_of("file system", |facts| facts.file_system = Some(kind.to_owned()));
        for network in NETWORK {
            assert_eq!(kind(network), Error, "{network}");
        }
        assert_eq!(kind("tmpfs"), Warning);
        assert_eq!(kind("overlay"), Fine);
        assert_eq!(level_of("file system", |facts| facts.file_system = None), Fine);
    }

    #[test]
    fn large_wal_is_a_warning() {
        assert_eq!(level_of("wal", |facts| facts.wal_bytes = LARGE_WAL), Fine);
        assert_eq!(level_of("wal", |facts| facts.wal_bytes = LARGE_WAL + 1), Warning);
    }

    #[test]
    fn database_must_be_in_wal_mode() {
        let with = |check: &str, database: Database| {
            level_of(check, |facts| facts.database = Ok(database))
        };
        assert_eq!(
            with("journal", Database { journal_mode: "delete".into(), ..database() }),
            Warning
        );
    }

    #[test]
    fn damaged_file_is_an_error() {
        let with = |check: QuickCheck| {
            level_of("quick_check", |facts| {
                facts.database = Ok(Database { quick_check: check, ..database() });
            })
        };
        assert_eq!(with(QuickCheck::Failed("row 3 missing".to_owned())), Error);
        assert_eq!(with(QuickCheck::Unfinished(Duration::from_secs(10))), Warning);
        let unreadable = |facts: &mut Facts| facts.database = Err("no database".to_owned());
        assert_eq!(level_of("open", unreadable), Error);
    }
}
