//! What the batcher needs of a runtime. The model in `tests` stands in for it.

use std::future::Future;

pub(super) use std::sync::Mutex;
pub(super) use tokio::task::yield_now;

/// Which runtime a caller is on.
pub(super) type Place = tokio::runtime::Id;

pub(super) fn here() -> Place {
    tokio::runtime::Handle::current().id()
}

/// Drops the task where there is no runtime, as when a caller's future outlives its own.
pub(super) fn spawn(task: impl Future<Output = ()> + Send + 'static) {
    if let Ok(runtime) = tokio::runtime::Handle::try_current() {
        drop(runtime.spawn(task));
    }
}
