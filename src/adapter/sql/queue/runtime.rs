//! What the batcher needs of a runtime. The model in `tests` stands in for it.

use std::future::Future;
use std::time::Duration;

pub(super) use std::sync::Mutex;
pub(super) use tokio::task::yield_now;

/// Which runtime a caller is on.
pub(super) type Place = tokio::runtime::Id;

pub(super) fn here() -> Place {
    tokio::runtime::Handle::current().id()
}

pub(super) fn spawn(task: impl Future<Output = ()> + Send + 'static) {
    drop(tokio::spawn(task));
}

/// How long a batch may take before it is late.
const LATE: Duration = Duration::from_millis(500);

/// Returns once a batch that begins now is late.
pub(super) async fn late() {
    tokio::time::sleep(LATE).await;
}

/// A caller's runtime, for when the caller is dropped outside of it.
pub(super) type Home = tokio::runtime::Handle;

pub(super) fn home() -> Home {
    Home::current()
}

/// The task is dropped if that runtime has ended.
pub(super) fn spawn_at(home: &Home, task: impl Future<Output = ()> + Send + 'static) {
    drop(home.spawn(task));
}
