//! [`WatchedFile`]: whether the path still names the file that the connections use.
//!
//! Open connections go on with a file after it is deleted or replaced. Another process, or the next
//! connection of this process, opens the new file: both would grant one key.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use sqlx::sqlite::SqliteConnectOptions;

use crate::error::{Error, ErrorKind};

/// The least time between two checks of the path. A check is one `stat`: about a microsecond for a path
/// in the kernel's cache, so it needs no thread of its own.
const INTERVAL: Duration = Duration::from_secs(1);

pub(super) struct WatchedFile {
    path: Option<PathBuf>,
    /// The opened file; empty until there is one, and for a database in memory.
    opened: OnceLock<FileId>,
    created_at: Instant,
    /// The time of the last check, in milliseconds since `created_at`.
    checked_at_ms: AtomicU64,
    is_another: AtomicBool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FileId {
    device: u64,
    inode: u64,
}

impl WatchedFile {
    /// The file that these options have opened, or will open.
    pub(super) fn new(options: &SqliteConnectOptions) -> Self {
        let watched = Self {
            // The process may change its directory.
            path: std::path::absolute(options.get_filename()).ok(),
            opened: OnceLock::new(),
            created_at: Instant::now(),
            checked_at_ms: AtomicU64::new(0),
            is_another: AtomicBool::new(false),
        };
        watched.note();
        watched
    }

    /// Takes the present file for the opened one, if none was known.
    pub(super) fn note(&self) {
        if self.opened.get().is_none()
            && let Some(Ok(found)) = self.path.as_deref().map(identify)
        {
            let _ = self.opened.set(found);
        }
    }

    /// Checks the path: at most once a second, or each time while it names another file.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Refused`] while the path names another file, or none.
    pub(super) fn check(&self) -> Result<(), Error> {
        if let (Some(path), Some(opened)) = (&self.path, self.opened.get())
            && self.is_due()
        {
            match identify(path) {
                Ok(found) => self.judge(found != *opened),
                Err(error) if error.kind() == io::ErrorKind::NotFound => self.judge(true),
                // Such an error says nothing about the file.
                Err(_) => {}
            }
        }
        if self.is_another.load(Ordering::Acquire) {
            return Err(Error::new(
                ErrorKind::Refused,
                "using the SQLite file: it was deleted or replaced while it was open",
            ));
        }
        Ok(())
    }

    fn judge(&self, is_another: bool) {
        let was_another = self.is_another.swap(is_another, Ordering::AcqRel);
        match (was_another, is_another) {
            (false, true) => tracing::error!(
                target: "tower_dedup",
                "the SQLite file was deleted or replaced while it was open: every call is refused \
                 until the file is back or the process is restarted"
            ),
            (true, false) => tracing::warn!(target: "tower_dedup", "the SQLite file is back"),
            _ => {}
        }
    }

    fn is_due(&self) -> bool {
        if self.is_another.load(Ordering::Acquire) {
            return true;
        }
        let now = u64::try_from(self.created_at.elapsed().as_millis()).unwrap_or(u64::MAX);
        let checked_at = self.checked_at_ms.load(Ordering::Relaxed);
        Duration::from_millis(now.saturating_sub(checked_at)) >= INTERVAL
            && self
                .checked_at_ms
                .compare_exchange(checked_at, now, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
    }
}

#[cfg(unix)]
fn identify(path: &Path) -> io::Result<FileId> {
    use std::os::unix::fs::MetadataExt;

    let metadata = std::fs::metadata(path)?;
    Ok(FileId { device: metadata.dev(), inode: metadata.ino() })
}

/// Where a file that is open can neither be deleted nor replaced.
#[cfg(not(unix))]
fn identify(_: &Path) -> io::Result<FileId> {
    Err(io::ErrorKind::Unsupported.into())
}
