//! `doctor` on SQLite: a test makes each misconfiguration, and sees its line.
//!
//! A network file system is in a unit test.

use std::fs;
use std::path::Path;

use sqlx::{Connection, SqliteConnection};
use tempfile::TempDir;

use crate::command::{Ran, doctor, execute, run};
use support::sqlite_url;

async fn migrated() -> (TempDir, String) {
    let dir = tempfile::tempdir().unwrap();
    let url = sqlite_url(dir.path());
    run(&url, &["migrate"]).await.assert(0, "made");
    (dir, url)
}

async fn journal_mode(url: &str) -> String {
    let mut connection = SqliteConnection::connect(url).await.unwrap();
    sqlx::query_scalar("PRAGMA journal_mode").fetch_one(&mut connection).await.unwrap()
}

#[tokio::test]
async fn good_file_has_no_finding() {
    let (dir, url) = migrated().await;
    let files = || {
        let mut names: Vec<_> =
            dir.path().read_dir().unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    let before = files();
    run(&url, &["stats"]).await.assert(0, "rows");
    run(&url, &["migrate", "--check"]).await.assert(0, "current");
    let ran = doctor(&url).await;
    assert!(!ran.stdout.contains("synchronous"), "only each pool's own setting counts: {ran:?}");
    ran.assert_finding("damage", "ok", "passed");
    ran.assert_finding("table", "ok", "exists");
    ran.assert_finding("rights", "ok", "can be written");
    assert_eq!(files(), before, "no file is left");
    let missing = tempfile::tempdir().unwrap();
    run(&sqlite_url(missing.path()), &["doctor"]).await.assert(4, "there is no file");
}

/// The adapter's own connection would set WAL mode: `doctor` and the other commands that read must not.
#[tokio::test]
async fn journal_mode_stays() {
    let (_dir, url) = migrated().await;
    execute(&url, "PRAGMA journal_mode = DELETE").await;
    for _ in 0..2 {
        run(&url, &["doctor"]).await.assert(0, "0 error(s)");
        run(&url, &["stats"]).await.assert(0, "rows");
        assert_eq!(journal_mode(&url).await, "delete");
    }
}

#[tokio::test]
async fn damaged_file() {
    let (dir, url) = migrated().await;
    execute(
        &url,
        "CREATE TABLE t (a TEXT); WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n \
         WHERE i < 1000) INSERT INTO t SELECT hex(randomblob(100)) FROM n; PRAGMA journal_mode = DELETE",
    )
    .await;
    let path = dir.path().join("dedup.db");
    let mut bytes = fs::read(&path).unwrap();
    // Pages of the table `t`; the schema and the table of the keys are before them.
    let half = bytes.len() / 2;
    bytes[half..half + 8_192].fill(0xff);
    fs::write(&path, bytes).unwrap();
    doctor(&url).await.assert_finding("damage", "error", "damaged");

    fs::write(&path, "not a database".repeat(100)).unwrap();
    doctor(&url).await.assert_finding("damage", "error", "not a database");
    run(&url, &["stats"]).await.assert(4, "not a database");
}

#[tokio::test]
async fn quick_check_is_bounded_by_the_timeout() {
    let (_dir, url) = migrated().await;
    execute(
        &url,
        "CREATE TABLE t (a TEXT PRIMARY KEY); WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT \
         i + 1 FROM n WHERE i < 50000) INSERT INTO t SELECT hex(randomblob(50)) FROM n",
    )
    .await;
    let ran = run(&url, &["doctor", "--json", "--timeout", "1ms"]).await;
    ran.assert_finding("damage", "warning", "did not end within 1ms");
    doctor(&url).await.assert_finding("damage", "ok", "passed");
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn file_in_memory() {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    if !mounts.lines().any(|line| line.contains(" /dev/shm tmpfs ")) {
        eprintln!("/dev/shm is no tmpfs here");
        return;
    }
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let url = sqlite_url(dir.path());
    run(&url, &["migrate"]).await.assert(0, "made");
    doctor(&url).await.assert_finding("durability", "warning", "in memory");
}

/// Root may write everywhere, so root runs the command as another user.
#[cfg(unix)]
#[tokio::test]
async fn file_and_folder_that_cannot_be_written() {
    use std::os::unix::fs::PermissionsExt;

    let (dir, url) = migrated().await;
    let path = dir.path().join("dedup.db");
    let mode = |path: &Path, mode| {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    };
    // Without WAL mode, reading needs no other file.
    execute(&url, "PRAGMA journal_mode = DELETE").await;

    mode(&path, 0o444);
    mode(dir.path(), 0o777);
    let ran = as_nobody(&url).await;
    ran.assert_finding("rights", "error", "dedup.db cannot be written");
    ran.assert_finding("table", "ok", "exists");
    mode(&path, 0o666);
    mode(dir.path(), 0o555);
    as_nobody(&url).await.assert_finding("rights", "error", "the folder of");
    mode(dir.path(), 0o777);
    as_nobody(&url).await.assert_finding("rights", "ok", "can be written");
}

#[cfg(unix)]
async fn as_nobody(url: &str) -> Ran {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    use std::os::unix::process::CommandExt;

    use crate::command::{command, end_of};

    if fs::metadata("/proc/self").map_or(1, |process| process.uid()) != 0 {
        return doctor(url).await;
    }
    // The folder of the build may be closed to others.
    let dir = tempfile::tempdir_in("/tmp").unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let copy = dir.path().join("tower-dedup");
    fs::copy(command().get_program(), &copy).unwrap();
    let mut command = std::process::Command::new(&copy);
    command.args(["doctor", "--json"]).env_clear().env("TOWER_DEDUP_STORE", url).current_dir("/");
    command.uid(65_534).gid(65_534);
    end_of(command, "").await
}
