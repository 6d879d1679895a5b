//! Who may write to a file next, among all adapters of this process.
//!
//! SQLite lets one connection write at a time, and serves those that wait in no order. A
//! transaction that is lent to a handler holds the file for as long as the handler runs.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock, Mutex, PoisonError, Weak};

use sqlx::sqlite::SqliteConnectOptions;

/// Held by the one who writes. Fair: in the order of arrival.
pub(super) type Turn = tokio::sync::Mutex<()>;

static TURNS: LazyLock<Mutex<HashMap<PathBuf, Weak<Turn>>>> = LazyLock::new(Mutex::default);

/// The turn of the file that these options name: one and the same for all who name it, by whatever
/// path.
pub(super) fn turn_of(options: &SqliteConnectOptions) -> Arc<Turn> {
    let name = options.get_filename();
    // The file may not be there yet; its folder is.
    let folder = name.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or_else(|| std::path::Path::new(".")).canonicalize();
    let (Ok(folder), Some(file)) = (folder, name.file_name()) else {
        return Arc::default();
    };
    if name.to_string_lossy().contains(":memory:") {
        return Arc::default();
    }
    let path = folder.join(file);
    // A link leads to the file that is locked.
    let path = path.canonicalize().unwrap_or(path);
    let mut turns = TURNS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(turn) = turns.get(&path).and_then(Weak::upgrade) {
        return turn;
    }
    turns.retain(|_, turn| turn.strong_count() > 0);
    let turn = Arc::default();
    turns.insert(path, Arc::downgrade(&turn));
    turn
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_file_has_one_turn_by_whatever_name() {
        let dir = tempfile::tempdir().unwrap();
        let at = |path: PathBuf| turn_of(&SqliteConnectOptions::new().filename(path));
        let one = at(dir.path().join("a.db"));
        std::fs::write(dir.path().join("a.db"), "").unwrap();
        assert!(Arc::ptr_eq(&one, &at(dir.path().join(".").join("a.db"))));
        assert!(!Arc::ptr_eq(&one, &at(dir.path().join("b.db"))));
        let memory = || turn_of(&SqliteConnectOptions::new().filename(":memory:"));
        assert!(!Arc::ptr_eq(&memory(), &memory()));
    }
}
