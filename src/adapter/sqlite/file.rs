//! [`Watched`]: whether the path still names the file that the connections are on.
//!
//! Connections that have a file open go on with it after it is deleted or replaced. Another process, or
//! the next connection of this one, opens the new file: both would grant one key.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use sqlx::sqlite::SqliteConnectOptions;

use crate::error::{Error, ErrorKind};

/// The least time between two looks at the path. A look is one `stat`: about a microsecond for a path
/// that the kernel has in its cache, so that it needs no thread of its own.
const INTERVAL: Duration = Duration::from_secs(1);

pub(super) struct Watched {
    path: Option<PathBuf>,
    /// Of the file that was opened; empty until there is one, and for a database in memory.
    opened: OnceLock<FileId>,
    made_at: Instant,
    /// When somebody last looked, in milliseconds from `made_at` on.
    looked_at_ms: AtomicU64,
    is_another: AtomicBool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FileId {
    device: u64,
    inode: u64,
}

impl Watched {
    /// Of a file that was just opened, or that these options will open.
    pub(super) fn new(options: &SqliteConnectOptions) -> Self {
        let watched = Self {
            // The process may change its directory.
            path: std::path::absolute(options.get_filename()).ok(),
            opened: OnceLock::new(),
            made_at: Instant::now(),
            looked_at_ms: AtomicU64::new(0),
            is_another: AtomicBool::new(false),
        };
        watched.note();
        watched
    }

    /// Takes the file that is there now for the one that was opened, if none was known.
    pub(super) fn note(&self) {
        if self.opened.get().is_none()
            && let Some(Ok(found)) = self.path.as_deref().map(identify)
        {
            let _ = self.opened.set(found);
        }
    }

    /// Looks at the path, once a second at most, or each time while it names another file.
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
                // That says nothing of the file.
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
        let now = u64::try_from(self.made_at.elapsed().as_millis()).unwrap_or(u64::MAX);
        let looked_at = self.looked_at_ms.load(Ordering::Relaxed);
        Duration::from_millis(now.saturating_sub(looked_at)) >= INTERVAL
            && self
                .looked_at_ms
                .compare_exchange(looked_at, now, Ordering::Relaxed, Ordering::Relaxed)
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
