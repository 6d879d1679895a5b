//! The write lock of a file, for all adapters of this process.
//!
//! SQLite lets one connection write at a time, and serves waiting connections in no order. A
//! transaction of a handler holds the file until it ends.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock, Mutex, PoisonError, Weak};
use std::time::Duration;

use sqlx::sqlite::SqliteConnectOptions;
use tokio::sync::OwnedMutexGuard;
use tokio::time::timeout;

use crate::error::{StoreError, StoreErrorKind};

/// The caller that writes holds it. It is fair: it goes to callers in the order of arrival.
pub(super) type WriteLock = tokio::sync::Mutex<()>;

/// The right to write to the file.
pub(super) type WriteGuard = OwnedMutexGuard<()>;

/// Waits for a lock until `bound`. Past it returns an error of this kind.
pub(super) async fn locked(
    lock: &Arc<WriteLock>,
    bound: Duration,
    kind: StoreErrorKind,
) -> Result<WriteGuard, StoreError> {
    let locked = timeout(bound, Arc::clone(lock).lock_owned()).await;
    locked.map_err(|_| StoreError::new(kind, "waiting for the write lock of the SQLite file"))
}

/// The locks of a file.
#[derive(Debug, Default)]
pub(super) struct FileLocks {
    pub(super) writer: Arc<WriteLock>,
    /// The handler that waits for `writer`, or holds it: the others wait here, so that a batch
    /// waits behind one.
    pub(super) handlers: Arc<WriteLock>,
}

static LOCKS: LazyLock<Mutex<HashMap<PathBuf, Weak<FileLocks>>>> = LazyLock::new(Mutex::default);

/// Returns the locks of the file that these options name: the same for every path to the file.
pub(super) fn locks_of(options: &SqliteConnectOptions) -> Arc<FileLocks> {
    let name = options.get_filename();
    // The file may not exist yet; its folder does.
    let folder = name.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or_else(|| std::path::Path::new(".")).canonicalize();
    let (Ok(folder), Some(file)) = (folder, name.file_name()) else {
        return Arc::default();
    };
    if name.to_string_lossy().contains(":memory:") {
        return Arc::default();
    }
    let path = folder.join(file);
    // Follows a link to the locked file.
    let path = path.canonicalize().unwrap_or(path);
    let mut locks = LOCKS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(lock) = locks.get(&path).and_then(Weak::upgrade) {
        return lock;
    }
    locks.retain(|_, lock| lock.strong_count() > 0);
    let lock = Arc::default();
    locks.insert(path, Arc::downgrade(&lock));
    lock
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_file_has_one_write_lock_under_every_name() {
        let dir = tempfile::tempdir().unwrap();
        let at = |path: PathBuf| locks_of(&SqliteConnectOptions::new().filename(path));
        let one = at(dir.path().join("a.db"));
        std::fs::write(dir.path().join("a.db"), "").unwrap();
        assert!(Arc::ptr_eq(&one, &at(dir.path().join(".").join("a.db"))));
        assert!(!Arc::ptr_eq(&one, &at(dir.path().join("b.db"))));
        let memory = || locks_of(&SqliteConnectOptions::new().filename(":memory:"));
        assert!(!Arc::ptr_eq(&memory(), &memory()));
    }
}
