//! One call to a store: bounded, measured, and checked.

use std::future::poll_fn;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::task::Poll;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;

use super::background::Step;
use crate::adapter::Released;
use crate::error::{Error, ErrorKind};
use crate::observe;

/// Runs `call` within `bound` and checks that it answers for every key.
///
/// A call that outlives its bound is dropped: its outcome is unknown from then on. One that panics
/// is a failure like any other. Boxed, for a store's futures are large, and this one would be part
/// of every delivery's task several times over.
pub(super) async fn store_call<T>(
    operation: &'static str,
    bound: Duration,
    keys: usize,
    call: BoxFuture<'_, Result<Vec<T>, Error>>,
) -> Result<Vec<T>, Error> {
    let counted = async {
        let answers = call.await?;
        if answers.len() != keys {
            return Err(Error::new(ErrorKind::Corrupt, "counting the answers of the store"));
        }
        Ok(answers)
    };
    bounded(operation, bound, counted).await
}

/// Runs `call` within `bound`, and measures it.
pub(super) async fn bounded<T>(
    operation: &'static str,
    bound: Duration,
    call: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    let start = Instant::now();
    let mut call = pin!(AssertUnwindSafe(call).catch_unwind());
    // What answers at once, from memory, needs no timer, not even one that is never set.
    let answer = match poll_fn(|cx| Poll::Ready(call.as_mut().poll(cx))).await {
        Poll::Ready(answer) => Ok(answer),
        Poll::Pending => {
            let left = bound.saturating_sub(start.elapsed());
            tokio::time::timeout(left, call).await
        }
    };
    let answer = match answer {
        Ok(Ok(answer)) => answer,
        // The panic hook has said what it was.
        Ok(Err(_panic)) => Err(Error::new(ErrorKind::Unavailable, "surviving the store's panic")),
        Err(_elapsed) => Err(Error::new(ErrorKind::Timeout, operation)),
    };
    observe::store_call(operation, start.elapsed(), answer.as_ref().err());
    answer
}

/// Whether the store may have done what it answered this error to.
pub(super) fn outcome_unknown(error: &Error) -> bool {
    !matches!(
        error.kind(),
        ErrorKind::Refused | ErrorKind::Full | ErrorKind::Overloaded | ErrorKind::Config
    )
}

/// What the answers to a repeated release or undoing come to.
pub(super) fn undone(answer: Result<Vec<Released>, Error>) -> Step {
    match answer {
        Ok(all) if all.iter().all(|one| *one == Released::Released) => Step::Settled,
        Ok(_) => Step::Absent,
        Err(_) => Step::Again,
    }
}
