//! The checks of a SQLite store.

use std::fs::{self, OpenOptions};
use std::io;
use std::path::Path;
use std::time::Duration;

use tower_dedup::sqlx;
use tower_dedup::sqlx::Connection;
use tower_dedup::sqlx::sqlite::SqliteConnection;

use super::finding::Level::{Error, Warning};
use super::finding::{self, Finding};
use crate::failure::{Failure, in_one_line};
use crate::store::{Sqlite, TableState};

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

pub(super) async fn findings(sqlite: &Sqlite) -> Result<Vec<Finding>, Failure> {
    let path = sqlite.path();
    if !path.exists() {
        // The same error as of every other command.
        sqlite.connect().await?;
    }
    let path = fs::canonicalize(&path)?;
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let mut findings = vec![rights(&path), durability(file_system(&mounts, &path).as_deref())];
    match sqlite.connect().await {
        Ok(connection) => findings.extend(database(sqlite, connection).await),
        Err(failure) => findings.push(damage(&Err(failure.message), sqlite.timeout)),
    }
    Ok(findings)
}

fn rights(path: &Path) -> Finding {
    const ADVICE: &str =
        "give the service's user the right to write both: SQLite makes files beside its own";
    let folder = folder_error(path.parent().unwrap_or(Path::new("/")));
    let (file, path) = (file_error(path), path.display());
    let text = |error: &Option<io::Error>, what: &str| {
        error.as_ref().map(|error| format!("{what} cannot be written: {error}")).unwrap_or_default()
    };
    let file_text = text(&file, &path.to_string());
    let folder_text = text(&folder, &format!("the folder of {path}"));
    let faults = [
        (file.is_some(), Error, &*file_text, ADVICE),
        (folder.is_some(), Error, &folder_text, ADVICE),
    ];
    Finding::first("rights", format!("{path} and its folder can be written"), &faults)
}

fn durability(file_system: Option<&str>) -> Finding {
    let kind = file_system.unwrap_or("its type is not known here");
    let network = format!("{kind} is a network file system");
    let faults = [
        (
            NETWORK.contains(&kind),
            Error,
            &*network,
            "move the file to a local disk, or use Postgres: processes of two machines would both \
             claim one event",
        ),
        (
            ["tmpfs", "ramfs"].contains(&kind),
            Warning,
            "the file is in memory",
            "move the file to a disk: a restart of the machine loses all keys",
        ),
    ];
    Finding::first("durability", format!("file system: {kind}"), &faults)
}

async fn database(sqlite: &Sqlite, mut connection: SqliteConnection) -> Vec<Finding> {
    let state = sqlite.table(&mut connection).await.map_err(|failure| failure.message);
    let mut findings = vec![finding::table(&state, false)];
    if state == Ok(TableState::Current) {
        let store = sqlite.open_reader();
        findings.push(finding::purge(&store.adapter.stats().await));
        store.close().await;
    }
    // The connection is not closed after its time: a check that goes on would keep it.
    let check = async {
        let check = sqlx::query_scalar("PRAGMA quick_check(1)");
        let reply: Result<String, _> = check.fetch_one(&mut connection).await;
        let _ = connection.close().await;
        reply.map(|reply| (reply != "ok").then_some(reply))
    };
    let ended = tokio::time::timeout(sqlite.timeout, check).await;
    let fault = match ended {
        Ok(Ok(fault)) => Ok(fault),
        Ok(Err(error)) => Ok(Some(in_one_line(&error))),
        Err(_) => Err(String::new()),
    };
    findings.push(damage(&fault, sqlite.timeout));
    findings
}

/// Judges the fault of the file. `Err` is the reason why there was no check: none if its time was up.
fn damage(fault: &Result<Option<String>, String>, bound: Duration) -> Finding {
    let (error, fault) = (fault.as_ref().err(), fault.as_ref().ok().and_then(Option::as_ref));
    let late = format!("the check did not end within {bound:?}");
    let unopened = format!("the file cannot be opened: {}", error.map_or("", |error| error));
    let damaged = format!("the file is damaged: {}", fault.map_or("", |fault| fault));
    let faults = [
        (error.is_some_and(String::is_empty), Warning, &*late, "give it more time with --timeout"),
        (
            error.is_some(),
            Error,
            &unopened,
            "see the other lines; if it is no SQLite file, restore it or move it away",
        ),
        (
            fault.is_some(),
            Error,
            &damaged,
            "stop the service and restore the file, or dump it with `sqlite3 FILE .recover`",
        ),
    ];
    Finding::first("damage", "PRAGMA quick_check passed", &faults)
}

/// Opens the file for writing, and writes nothing.
fn file_error(path: &Path) -> Option<io::Error> {
    OpenOptions::new().write(true).open(path).err()
}

/// Makes an empty file, and deletes it. SQLite makes the files `-wal` and `-shm` there.
fn folder_error(folder: &Path) -> Option<io::Error> {
    let probe = folder.join(format!(".tower-dedup-doctor-{}", std::process::id()));
    let made = OpenOptions::new().write(true).create_new(true).open(&probe);
    made.and_then(|_| fs::remove_file(probe)).err()
}

/// Returns the type of the file system of the longest mount point that holds this path.
fn file_system(mounts: &str, path: &Path) -> Option<String> {
    let mounts = mounts.lines().filter_map(|line| {
        let mut fields = line.split(' ').skip(1);
        // The kernel escapes a space in a path.
        let point = fields.next()?.replace("\\040", " ");
        path.starts_with(&point).then_some((point.len(), fields.next()?))
    });
    // A later mount hides an earlier one.
    mounts.max_by_key(|(length, _)| *length).map(|(_, kind)| kind.to_owned())
}

#[cfg(test)]
mod tests {
    use super::super::finding::Level::Ok as Fine;
    use super::*;

    #[test]
    fn file_must_be_on_a_local_disk() {
        for network in NETWORK {
            assert_eq!(durability(Some(network)).level, Error, "{network}");
        }
        assert_eq!(durability(Some("tmpfs")).level, Warning);
        assert_eq!(durability(Some("overlay")).level, Fine);
        assert_eq!(durability(None).level, Fine);
    }

    #[test]
    fn file_system_is_that_of_the_longest_mount_point() {
        let mounts = "/dev/sda1 / ext4 rw 0 0\nnas:/data /srv/my\\040data nfs4 rw 0 0\n\
                      tmpfs /srv tmpfs rw 0 0\n";
        let kind = |path| file_system(mounts, Path::new(path)).unwrap();
        assert_eq!(kind("/var/dedup.db"), "ext4");
        assert_eq!(kind("/srv/dedup.db"), "tmpfs");
        assert_eq!(kind("/srv/my data/dedup.db"), "nfs4");
        assert_eq!(kind("/srvx/dedup.db"), "ext4");
        let hidden = format!("{mounts}other /srv xfs rw 0 0\n");
        assert_eq!(file_system(&hidden, Path::new("/srv/a")).unwrap(), "xfs");
        assert_eq!(file_system("", Path::new("/a")), None);
    }
}
