//! One call to a store: bounded, measured, and checked.

use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::task::Poll;
use std::time::{Duration, Instant};

use tokio::task::coop::unconstrained;

use crate::adapter::{CallTerms, Claimed, Completed, DedupAdapter, Renewed, StoreFuture};
use crate::error::{Error, ErrorKind};
use crate::key::DedupKey;
use crate::observe;

/// The name of a call in metrics and spans, and the beginning of its error text. One pointer, because
/// the future of a delivery stores it.
type Operation = &'static [&'static str; 2];

/// Generates one bounded call for each method of the adapter that replies for each key.
macro_rules! calls {
    ($($method:ident $context:literal $reply:ty),+) => {$(
        pub(super) fn $method<'c>(
            adapter: &'c dyn DedupAdapter,
            keys: &'c [DedupKey],
            terms: &'c CallTerms,
            bound: Duration,
        ) -> impl Future<Output = Result<Vec<$reply>, Error>> + Send + 'c {
            let expected = keys.len();
            let of_every_key = move |replies: &Vec<$reply>| replies.len() == expected;
            let call = move || adapter.$method(keys, terms);
            checked(&[stringify!($method), $context], bound, call, of_every_key)
        }
    )+};
}

calls!(claim "claiming keys" Claimed, renew "renewing leases" Renewed,
    complete "completing keys" Completed);

pub(super) fn release<'c>(
    adapter: &'c dyn DedupAdapter,
    keys: &'c [DedupKey],
    terms: &'c CallTerms,
    bound: Duration,
) -> impl Future<Output = Result<(), Error>> + Send + 'c {
    bounded(&["release", "releasing keys"], bound, move || adapter.release(keys, terms))
}

/// Runs `call` within `bound`, and measures it.
///
/// A call that outlives its bound is dropped, and its outcome is unknown. A call that panics fails
/// with [`ErrorKind::Unavailable`].
pub(super) fn bounded<'c, T: 'c>(
    operation: Operation,
    bound: Duration,
    call: impl FnOnce() -> StoreFuture<'c, T> + Send,
) -> impl Future<Output = Result<T, Error>> + Send {
    checked(operation, bound, call, |_| true)
}

fn checked<'c, T: 'c>(
    operation: Operation,
    bound: Duration,
    call: impl FnOnce() -> StoreFuture<'c, T> + Send,
    is_whole: impl Fn(&T) -> bool + Send,
) -> impl Future<Output = Result<T, Error>> + Send {
    let start = Instant::now();
    let span = observe::store_span(operation[0]);
    // Outside of the future, which would store `call` beside its future. `None` after a panic.
    let mut called = catch_unwind(AssertUnwindSafe(|| span.in_scope(call))).ok();
    async move {
        let panicked = || {
            // The panic hook has reported the panic itself.
            let context = format!("{}: the adapter panicked", operation[1]);
            Err(Error::new(ErrorKind::Unavailable, context))
        };
        let reply = if let Some(call) = &mut called {
            // Set at the first wait: a store in memory replies without a timer.
            let mut deadline = None;
            let reply = poll_fn(|cx| {
                let poll = || span.in_scope(|| call.as_mut().poll(cx));
                match catch_unwind(AssertUnwindSafe(poll)) {
                    Ok(Poll::Ready(reply)) => return Poll::Ready(reply),
                    Ok(Poll::Pending) => {}
                    Err(_panic) => return Poll::Ready(panicked()),
                }
                let deadline = deadline.get_or_insert_with(|| {
                    let left = tokio::time::sleep(bound.saturating_sub(start.elapsed()));
                    // Polled even if the call has used up the task's budget.
                    Box::pin(unconstrained(left))
                });
                let error = || Error::new(ErrorKind::Timeout, operation[1]);
                deadline.as_mut().poll(cx).map(|()| Err(error()))
            });
            reply.await
        } else {
            panicked()
        };
        let reply = reply.and_then(|reply| {
            if is_whole(&reply) {
                return Ok(reply);
            }
            Err(Error::new(ErrorKind::Corrupt, "counting the replies of the store"))
        });
        observe::store_call(operation[0], start, reply.as_ref().err(), &span);
        reply
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn error_of_a_call_names_the_operation_and_the_fact() {
        let run = |call: fn() -> StoreFuture<'static, ()>| {
            checked(&["claim", "claiming keys"], Duration::from_secs(2), call, |()| true)
        };
        let hangs = run(|| Box::pin(std::future::pending())).await.unwrap_err();
        assert_eq!(hangs.to_string(), "claiming keys: the store timed out");
        let panics = run(|| Box::pin(async { panic!("on purpose") })).await.unwrap_err();
        let expected = "claiming keys: the adapter panicked: the store is unavailable";
        assert_eq!(panics.to_string(), expected);
    }
}
