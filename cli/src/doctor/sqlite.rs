//! The facts of a SQLite store.

use std::fs::{self, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tower_dedup::adapter::Stats;
use tower_dedup::sqlx::sqlite::SqliteConnection;
use tower_dedup::sqlx::{self, Connection};

use crate::failure::{Failure, in_one_line};
use crate::store::{Sqlite, TableState};

#[derive(Debug, Clone)]
pub(super) struct Facts {
    pub(super) path: PathBuf,
    /// Why the file or its folder cannot be written.
    pub(super) file_error: Option<String>,
    pub(super) folder_error: Option<String>,
    /// The type of the file system, where the system tells it.
    pub(super) file_system: Option<String>,
    pub(super) wal_bytes: u64,
    /// Or why the file cannot be opened.
    pub(super) database: Result<Database, String>,
}

#[derive(Debug, Clone)]
pub(super) struct Database {
    pub(super) version: String,
    pub(super) journal_mode: String,
    pub(super) state: Result<TableState, String>,
    pub(super) quick_check: QuickCheck,
    /// `None` if the table is not usable.
    pub(super) stats: Option<Result<Stats, String>>,
}

#[derive(Debug, Clone)]
pub(super) enum QuickCheck {
    Passed(Duration),
    /// The first fault.
    Failed(String),
    /// It did not end within this time.
    Unfinished(Duration),
}

pub(super) async fn gather(sqlite: &Sqlite) -> Result<Facts, Failure> {
    let path = sqlite.path();
    if !path.exists() {
        // The same error as of every other command.
        sqlite.connect().await?;
    }
    let path = fs::canonicalize(&path)?;
    let folder = path.parent().unwrap_or(Path::new("/"));
    let wal = PathBuf::from(format!("{}-wal", path.display()));
    Ok(Facts {
        file_error: file_error(&path).map(|error| error.to_string()),
        folder_error: folder_error(folder).map(|error| error.to_string()),
        file_system: fs::read_to_string("/proc/self/mounts")
            .ok()
            .and_then(|mounts| file_system(&mounts, &path)),
        wal_bytes: fs::metadata(wal).map(|wal| wal.len()).unwrap_or_default(),
        database: database(sqlite).await.map_err(|failure| failure.message),
        path,
    })
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

async fn database(sqlite: &Sqlite) -> Result<Database, Failure> {
    let mut connection = sqlite.connect().await?;
    let version = scalar(&mut connection, "SELECT sqlite_version()").await?;
    let journal_mode = scalar(&mut connection, "PRAGMA journal_mode").await?;
    let state = sqlite.table(&mut connection).await.map_err(|failure| failure.message);
    let mut stats = None;
    if state == Ok(TableState::Current) {
        let store = sqlite.open_reader();
        stats = Some(store.adapter.stats().await.map_err(|error| in_one_line(&error)));
        store.close().await;
    }
    // The connection is not closed: a check that goes on would keep it.
    let quick_check = quick_check(connection, sqlite.timeout).await;
    Ok(Database { version, journal_mode, state, quick_check, stats })
}

async fn quick_check(mut connection: SqliteConnection, longest: Duration) -> QuickCheck {
    let started = Instant::now();
    let check = async {
        let fault = scalar(&mut connection, "PRAGMA quick_check(1)").await;
        let _ = connection.close().await;
        fault
    };
    match tokio::time::timeout(longest, check).await {
        Ok(Ok(reply)) if reply == "ok" => QuickCheck::Passed(started.elapsed()),
        Ok(Ok(fault)) => QuickCheck::Failed(fault),
        Ok(Err(error)) => QuickCheck::Failed(in_one_line(&error)),
        Err(_) => QuickCheck::Unfinished(longest),
    }
}

async fn scalar(
    connection: &mut SqliteConnection,
    sql: &'static str,
) -> Result<String, sqlx::Error> {
    sqlx::query_scalar(sql).fetch_one(connection).await
}

#[cfg(test)]
mod tests {
    use super::*;

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
