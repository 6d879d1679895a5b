//! What the queue needs of a runtime. The model in `model` replaces this file.

use std::future::Future;
use std::time::Duration;

pub(super) use std::sync::Mutex;
pub(super) use tokio::task::yield_now;

pub(super) type RuntimeId = tokio::runtime::Id;

/// How long a batch may take before it is late.
const LATE: Duration = Duration::from_millis(500);

/// Returns the runtime of the caller.
pub(super) fn current() -> RuntimeId {
    tokio::runtime::Handle::current().id()
}

pub(super) fn spawn(task: impl Future<Output = ()> + Send + 'static) {
    drop(tokio::spawn(task));
}

/// Waits until a batch that is sent now is late.
pub(super) async fn late() {
    tokio::time::sleep(LATE).await;
}
