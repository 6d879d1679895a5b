//! The sync time of a disk.

use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;
use std::time::{Duration, Instant};

/// A page of WAL.
const PAGE: [u8; 8_192] = [0; 8_192];
const PAGES: usize = 50;

/// The times to write a page and to sync it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SyncTime {
    pub(crate) median: Duration,
    pub(crate) p90: Duration,
}

impl SyncTime {
    /// Measures the disk of a folder. The pages exist, like those of a WAL segment.
    pub(crate) fn measure(folder: &Path) -> std::io::Result<Self> {
        let mut file = tempfile::tempfile_in(folder)?;
        for _ in 0..PAGES {
            file.write_all(&PAGE)?;
        }
        file.sync_all()?;
        file.seek(SeekFrom::Start(0))?;
        let mut times = (0..PAGES).map(|_| sync(&mut file)).collect::<Result<Vec<_>, _>>()?;
        times.sort();
        Ok(Self { median: times[PAGES / 2], p90: times[PAGES * 9 / 10] })
    }
}

fn sync(file: &mut File) -> std::io::Result<Duration> {
    let start = Instant::now();
    file.write_all(&PAGE)?;
    file.sync_data()?;
    Ok(start.elapsed())
}

/// Prints the sync time of the folder's disk. Warns if the folder is in memory, because a sync and the
/// baseline's commits would be free there.
pub(crate) fn print_sync_time(folder: &Path) {
    let Ok(SyncTime { median, p90 }) = SyncTime::measure(folder) else { return };
    println!(
        "\na sync of {} takes {} µs, p90 {} µs",
        folder.display(),
        median.as_micros(),
        p90.as_micros()
    );
    if median < Duration::from_micros(10) {
        println!("WARNING: this folder may be in memory. Set TMPDIR to a folder on a disk.");
    }
}

/// The tests of this module, which `postgres` runs under `cargo test`.
pub(crate) fn check() {
    let dir = tempfile::tempdir().expect("a folder");
    let SyncTime { median, p90 } = SyncTime::measure(dir.path()).expect("a file");
    assert!(median <= p90);
    assert!(SyncTime::measure(&dir.path().join("missing")).is_err());
}
