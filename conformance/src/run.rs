//! Runs a case within a bound, and shows its last calls if it fails.

use std::any::{Any, TypeId};
use std::panic::{AssertUnwindSafe, resume_unwind};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, LocalBoxFuture};

use super::case::{AnyStore, Case};
use super::store::{Store, runtime};
use super::trace::Trace;

/// How long a case may take, with its store.
const DEADLINE: Duration = Duration::from_secs(180);
const CREATED_WITHIN: Duration = Duration::from_secs(60);

/// The types of the stores that could not be created: their other cases fail at once.
static NOT_CREATED: Mutex<Vec<TypeId>> = Mutex::new(Vec::new());

/// A case.
pub(super) type Run = Box<dyn FnOnce(Case) -> LocalBoxFuture<'static, ()> + Send>;

/// How the store of a case is made.
type Create = Box<dyn FnOnce() -> BoxFuture<'static, Box<dyn AnyStore>> + Send>;

/// Runs a case with a fresh store, in a thread of its own: a store that hangs, even in its drop, fails the case.
///
/// Panics if the case does, or if it does not end in time.
pub(super) fn run<S: Store>(name: &str, case: Run, of: fn(S) -> Box<dyn AnyStore>) {
    let create = Box::new(move || -> BoxFuture<'static, _> {
        Box::pin(async move { of(S::create().await) })
    });
    run_on(name, case, TypeId::of::<S>(), create);
}

#[expect(clippy::print_stderr, reason = "the test harness shows it for a test that failed")]
fn run_on(name: &str, case: Run, store: TypeId, create: Create) {
    let (trace, (running, ended)) = (Arc::<Trace>::default(), mpsc::channel::<()>());
    let kept = Arc::clone(&trace);
    let body = move || {
        let _running = running;
        runtime().block_on(async { case(Case::new(created(store, create).await, kept)).await });
    };
    let thread = thread::Builder::new().name(name.to_owned()).spawn(body).expect("a thread");
    let ended = ended.recv_timeout(DEADLINE);
    let is_over = ended == Err(RecvTimeoutError::Disconnected);
    assert!(is_over, "{name}: the case has no end within {DEADLINE:?}.\n{trace}");
    if let Err(panic) = thread.join() {
        eprintln!("{trace}");
        resume_unwind(panic);
    }
}

async fn created(store: TypeId, create: Create) -> Box<dyn AnyStore> {
    let not_created = || NOT_CREATED.lock().unwrap_or_else(PoisonError::into_inner);
    let has_failed = not_created().contains(&store);
    assert!(!has_failed, "see `store_can_be_created`: a store was not created");
    let created = AssertUnwindSafe(async { create().await }).catch_unwind();
    let failed: Box<dyn Any + Send> = match tokio::time::timeout(CREATED_WITHIN, created).await {
        Ok(Ok(store)) => return store,
        Ok(Err(panic)) => panic,
        Err(_) => Box::new(format!("no store within {CREATED_WITHIN:?}")),
    };
    not_created().push(store);
    resume_unwind(failed)
}
