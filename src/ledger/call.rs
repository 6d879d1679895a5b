//! The calls to a store: each is bounded and measured.

use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::task::Poll;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tokio::task::coop::unconstrained;

use crate::adapter::{CallTerms, Claimed, Completed, DedupAdapter, Renewed, StoreFuture};
use crate::error::{Error, ErrorKind};
use crate::key::{DedupKey, List};
use crate::observe;

/// The name of a call in metrics and spans, and the beginning of its error text. One pointer, because
/// the future of a delivery stores it.
type Operation = &'static [&'static str; 2];

/// How many calls of one delivery run at once: as many keys as a SQL store sends in one statement.
const MOST_AT_ONCE: usize = 1_024;
/// How many calls of a background write run at once, each with its whole bound. A store that writes one key
/// after the other and waits 100 ms for a replica takes 1.6 s. With more, the last keys would never have their turn.
pub(super) const MOST_IN_BACKGROUND: usize = 16;

/// Generates, for each method of the adapter, a call for each of several keys: the replies are in the
/// order of the keys.
macro_rules! calls {
    ($($method:ident $context:literal $reply:ty),+) => {$(
        pub(super) fn $method<'c>(
            adapter: &'c dyn DedupAdapter,
            keys: &'c [DedupKey],
            terms: &'c CallTerms,
            bound: Duration,
        ) -> impl Future<Output = List<Result<$reply, Error>>> + Send + 'c {
            let call = move |key, bound| {
                let operation = &[stringify!($method), $context];
                bounded(operation, bound, move || adapter.$method(key, terms))
            };
            async move {
                match keys {
                    // Most deliveries have one key.
                    [key] => List::from([call(key, bound).await]),
                    keys => Box::pin(each(keys, bound, call)).await,
                }
            }
        }
    )+};
}

calls!(claim "claiming keys" Claimed, renew "renewing leases" Renewed,
    complete "completing keys" Completed, release "releasing keys" ());

/// Makes a call for each key, many of them at once, within one bound for all. Calls for which a store has no room
/// beside the others are made again, because the store has executed nothing of them.
async fn each<'k, T, F: Future<Output = Result<T, Error>>>(
    keys: &'k [DedupKey],
    bound: Duration,
    call: impl Fn(&'k DedupKey, Duration) -> F,
) -> List<Result<T, Error>> {
    let start = Instant::now();
    let mut replies: Vec<Option<Result<T, Error>>> = keys.iter().map(|_| None).collect();
    let mut waiting: Vec<usize> = (0..keys.len()).collect();
    while !waiting.is_empty() {
        let left = bound.saturating_sub(start.elapsed());
        let rest = waiting.split_off(waiting.len().min(MOST_AT_ONCE));
        let made = join_all(waiting.iter().map(|at| call(&keys[*at], left))).await;
        let has_room = made.iter().any(|reply| !is_refused(reply)) && !left.is_zero();
        let mut again = Vec::new();
        for (at, reply) in waiting.into_iter().zip(made) {
            if has_room && is_refused(&reply) {
                again.push(at);
            } else {
                replies[at] = Some(reply);
            }
        }
        waiting = again;
        waiting.extend(rest);
    }
    replies.into_iter().flatten().collect()
}

fn is_refused<T>(reply: &Result<T, Error>) -> bool {
    reply.as_ref().is_err_and(|error| error.kind() == ErrorKind::Overloaded)
}

/// Returns all replies, or the first error.
pub(super) fn all<T>(replies: List<Result<T, Error>>) -> Result<List<T>, Error> {
    replies.into_iter().collect()
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
            bounded(&["claim", "claiming keys"], Duration::from_secs(2), call)
        };
        let hangs = run(|| Box::pin(std::future::pending())).await.unwrap_err();
        assert_eq!(hangs.to_string(), "claiming keys: the store timed out");
        let panics = run(|| Box::pin(async { panic!("on purpose") })).await.unwrap_err();
        let expected = "claiming keys: the adapter panicked: the store is unavailable";
        assert_eq!(panics.to_string(), expected);
    }
}
