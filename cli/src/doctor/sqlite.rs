//! The checks of a SQLite store.

use std::fs::{self, OpenOptions};
use std::path::Path;
use std::{io, process};

use tower_dedup::internals::in_one_line;
use tower_dedup::sqlx;
use tower_dedup::sqlx::Connection;
use tower_dedup::sqlx::sqlite::SqliteConnection;

use super::finding::{self, Finding, Level};
use crate::failure::{Failure, NO_TABLE};
use crate::store::{Sqlite, Target};

/// File systems of a network: WAL mode needs memory that all processes share.
#[rustfmt::skip]
const NETWORK: [&str; 12] = [
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "ncpfs", "afs", "ceph", "lustre", "glusterfs", "fuse.glusterfs",
    "fuse.sshfs",
];

pub(super) async fn findings(target: &Target, sqlite: &Sqlite) -> Result<Vec<Finding>, Failure> {
    let path = sqlite.path();
    if !path.exists() {
        // The same error as of every other command.
        target.read_table().await?;
    }
    let path = fs::canonicalize(&path).map_err(Failure::usage)?;
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    // Before the first connection: to close a descriptor of the file drops the locks of this process.
    let rights = rights(&path);
    let is_writable = rights.level == Level::Ok;
    let mut findings = vec![rights, durability(file_system(&mounts, &path))];
    match sqlite.connect().await {
        Ok(connection) => {
            let table = target.read_table().await;
            let inbox = finding::inbox(target, sqlite.timeout).await;
            // An inbox has a file of its own.
            if inbox.is_none() || !table.as_ref().is_err_and(|failure| failure.message == NO_TABLE)
            {
                findings.push(finding::table(&table));
            }
            findings.extend(inbox);
            if table.is_ok() {
                if is_writable {
                    const ADVICE: &str = "find the process that holds a transaction open";
                    findings.push(finding::lock(sqlite.lock().await, ADVICE));
                }
                findings.push(finding::purge(target).await);
            }
            findings.push(damage(sqlite, connection).await);
        }
        Err(failure) => findings.push(Finding::ok("damage", "").error(
            Some(format!("the file cannot be opened: {}", failure.message)),
            "see the other lines; if it is no SQLite file, restore it or move it away",
        )),
    }
    Ok(findings)
}

fn rights(path: &Path) -> Finding {
    const ADVICE: &str =
        "give the service's user the right to write both: SQLite makes files beside its own";
    let name = path.display();
    let file = OpenOptions::new().write(true).open(path).err();
    let folder = write_folder(path.parent().unwrap_or(Path::new("/"))).err();
    Finding::ok("rights", format!("{name} and its folder can be written"))
        .error(file.map(|error| format!("{name} cannot be written: {error}")), ADVICE)
        .error(
            folder.map(|error| format!("the folder of {name} cannot be written: {error}")),
            ADVICE,
        )
}

/// Makes an empty file, and deletes it. SQLite makes the files `-wal` and `-shm` there.
fn write_folder(folder: &Path) -> io::Result<()> {
    let probe = folder.join(format!(".tower-dedup-doctor-{}", process::id()));
    OpenOptions::new().write(true).create_new(true).open(&probe)?;
    fs::remove_file(probe)
}

fn durability(file_system: Option<&str>) -> Finding {
    let kind = file_system.unwrap_or("its type is not known here");
    Finding::ok("durability", format!("file system: {kind}"))
        .error(
            NETWORK.contains(&kind).then(|| format!("{kind} is a network file system")),
            "move the file to a local disk, or use Postgres: processes of two machines would both \
             claim one event",
        )
        .warning(
            ["tmpfs", "ramfs"].contains(&kind).then_some("the file is in memory"),
            "move the file to a disk: a restart of the machine loses all keys",
        )
}

/// Returns the type of the file system of the longest mount point that holds this path.
fn file_system<'a>(mounts: &'a str, path: &Path) -> Option<&'a str> {
    let mounts = mounts.lines().filter_map(|line| {
        let mut fields = line.split(' ').skip(1);
        // The kernel escapes a space in a path.
        let point = fields.next()?.replace("\\040", " ");
        path.starts_with(&point).then_some((point.len(), fields.next()?))
    });
    // A later mount hides an earlier one.
    mounts.max_by_key(|(length, _)| *length).map(|(_, kind)| kind)
}

/// Reads the whole file.
async fn damage(sqlite: &Sqlite, mut connection: SqliteConnection) -> Finding {
    // The connection is not closed after its time: a check that goes on would keep it.
    let check = async {
        let check = sqlx::query_scalar("PRAGMA quick_check(1)");
        let reply: Result<String, _> = check.fetch_one(&mut connection).await;
        let _ = connection.close().await;
        reply.unwrap_or_else(|error| in_one_line(&error))
    };
    let ended = tokio::time::timeout(sqlite.timeout, check).await;
    let late = ended.as_ref().err();
    let fault = ended.as_ref().ok().filter(|reply| *reply != "ok");
    Finding::ok("damage", "PRAGMA quick_check passed")
        .warning(
            late.map(|_| format!("the check did not end within {:?}", sqlite.timeout)),
            "give it more time with --timeout",
        )
        .error(
            fault.map(|fault| format!("the file is damaged: {fault}")),
            "stop the service and restore the file, or dump it with `sqlite3 FILE .recover`",
        )
}

#[cfg(test)]
mod tests {
    use super::super::finding::Level::{Error, Ok as Fine, Warning};
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
        let hidden = format!("{mounts}other /srv xfs rw 0 0\n");
        for (mounts, path, kind) in [
            (mounts, "/var/dedup.db", Some("ext4")),
            (mounts, "/srv/dedup.db", Some("tmpfs")),
            (mounts, "/srv/my data/dedup.db", Some("nfs4")),
            (mounts, "/srvx/dedup.db", Some("ext4")),
            (&hidden, "/srv/a", Some("xfs")),
            ("", "/a", None),
        ] {
            assert_eq!(file_system(mounts, Path::new(path)), kind, "{path}");
        }
    }
}
