//! One call to a store: bounded, measured, and checked.

use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::task::Poll;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::task::coop::unconstrained;

use super::retry::RetryResult;
use crate::adapter::Released;
use crate::error::{Error, ErrorKind};
use crate::observe;

/// Runs `call` within `bound` and checks that it answers for every key.
///
/// A call that outlives its bound is dropped: its outcome is unknown from then on. One that panics
/// is a failure like any other. Boxed, for a store's futures are large, and this one would be part
/// of every delivery's task several times over.
pub(super) fn store_call<T>(
    operation: &'static str,
    bound: Duration,
    keys: usize,
    call: BoxFuture<'_, Result<Vec<T>, Error>>,
) -> impl Future<Output = Result<Vec<T>, Error>> {
    let counted = move |answers: Vec<T>| {
        if answers.len() == keys {
            return Ok(answers);
        }
        Err(Error::new(ErrorKind::Corrupt, "counting the answers of the store"))
    };
    checked(operation, bound, call, counted)
}

/// Runs `call` within `bound`, and measures it.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub(super) fn bounded<T>(
    operation: &'static str,
    bound: Duration,
    call: impl Future<Output = Result<T, Error>> + Unpin,
) -> impl Future<Output = Result<T, Error>> {
    checked(operation, bound, call, Ok)
}

#[expect(clippy::manual_async_fn, reason = "an `async fn` has room for its arguments twice")]
fn checked<T>(
    operation: &'static str,
    bound: Duration,
    mut call: impl Future<Output = Result<T, Error>> + Unpin,
    check: impl Fn(T) -> Result<T, Error>,
) -> impl Future<Output = Result<T, Error>> {
    async move {
        let start = Instant::now();
        // Set once the store keeps us waiting: what answers from memory needs none.
        let mut deadline = None;
        let answer = poll_fn(|cx| {
            match catch_unwind(AssertUnwindSafe(|| call.poll_unpin(cx))) {
                Ok(Poll::Ready(answer)) => return Poll::Ready(answer.and_then(&check)),
                Ok(Poll::Pending) => {}
                // The panic hook has said what it was.
                Err(_panic) => {
                    let error = Error::new(ErrorKind::Unavailable, "surviving the store's panic");
                    return Poll::Ready(Err(error));
                }
            }
            let deadline = deadline.get_or_insert_with(|| {
                let left = tokio::time::sleep(bound.saturating_sub(start.elapsed()));
                // Looked at even if the call has used up what a task may do at a time.
                Box::pin(unconstrained(left))
            });
            deadline.as_mut().poll(cx).map(|()| Err(Error::new(ErrorKind::Timeout, operation)))
        });
        let answer = answer.await;
        observe::store_call(operation, start.elapsed(), answer.as_ref().err());
        answer
    }
}

/// What the answers to a repeated release or undoing come to.
pub(super) fn undone(answer: Result<Vec<Released>, Error>) -> RetryResult {
    match answer {
        Ok(all) if all.iter().all(|one| *one == Released::Released) => RetryResult::Done,
        Ok(_) => RetryResult::NotHeld,
        Err(_) => RetryResult::Again,
    }
}
