//! What was done to the receivers and to the store, and when.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

/// Milliseconds since the Unix epoch.
pub(crate) type Millis = u64;

pub(crate) fn now() -> Millis {
    millis(SystemTime::now())
}

pub(crate) fn millis(time: SystemTime) -> Millis {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).expect("a time of this age")
}

/// A time from the first to the second moment, both included.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Window(pub(crate) Millis, pub(crate) Millis);

impl Window {
    pub(crate) fn meets(self, other: Self) -> bool {
        self.0 <= other.1 && other.0 <= self.1
    }
}

/// The faults of a row.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    /// The receivers that were killed: the number of the process, and when it died.
    pub(crate) deaths: Vec<(u32, Window)>,
    /// The faults of the store: from the first action until the store serves again.
    pub(crate) store: Vec<(Kind, Window)>,
    /// A receiver ended, and nobody had killed it.
    pub(crate) ended: Vec<u32>,
}

impl Faults {
    pub(crate) fn count(&self, kind: Kind) -> usize {
        self.store.iter().filter(|fault| fault.0 == kind).count()
    }
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Faults>>);

impl Log {
    pub(crate) fn faults(&self) -> MutexGuard<'_, Faults> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A fault of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The store dies without a warning, and starts again.
    Restart,
    /// The primary dies, and another server takes its place.
    Failover,
    /// One process of Postgres is killed by SIGKILL, and Postgres restarts all its processes.
    Backend,
    /// The receivers' open connections carry no byte any more, and nobody closes them for 10 s.
    Silence,
    /// Another process holds the write lock of SQLite.
    WriteLock,
}
