//! [`Calls`]: the calls to a store. Each is bounded and measured.

use std::future::Future;
use std::panic::{AssertUnwindSafe, RefUnwindSafe, UnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::future::join_all;
use futures_util::poll;
use tokio::task::coop::unconstrained;
use tokio::time::{Instant, timeout};

use crate::adapter::contract::{
    Abilities, CallTerms, ClaimReply, CompleteReply, DedupAdapter, Fetch, RenewReply, StoreFuture,
    Token,
};
use crate::adapter::{KeyedTerms, Terms};
use crate::error::{StoreError, StoreErrorKind};
use crate::key::{DedupKey, Event, List};
use crate::observe::{Meters, StoreSpan};
use crate::replay::Replay;

/// The name of a call in metrics and spans, and the beginning of its error text. One pointer,
/// because the future of a delivery stores it.
type Operation = &'static [&'static str; 2];

/// The reply of the store for one key, or what this process knows of the key. After an error of
/// unknown outcome, the key may be held.
pub(super) type Reply = Result<ClaimReply, StoreError>;

/// A key that was claimed, and the reply.
pub(super) type Claimed = (KeyedTerms, Reply);

/// The calls of one delivery: to which store, on which terms, within which bound.
#[derive(Clone)]
pub(crate) struct Calls {
    pub(super) adapter: Arc<dyn DedupAdapter>,
    pub(super) abilities: Abilities,
    /// The token exists before the first call, so that an unknown outcome can be released.
    pub(crate) terms: Terms,
    pub(crate) meters: Arc<Meters>,
    /// What of a response is stored, if the layer replays responses.
    pub(crate) replay: Option<Arc<Replay>>,
    /// The handler runs if the store does not reply.
    pub(crate) fails_open: bool,
    /// The bound on one call.
    pub(super) bound: Duration,
    /// How long a handler may hold its transaction. Zero for no bound.
    #[cfg_attr(not(feature = "postgres"), expect(dead_code, reason = "Postgres bounds it"))]
    pub(super) handler_bound: Duration,
}

// A panic of a handler leaves nothing half done in an adapter.
impl UnwindSafe for Calls {}
impl RefUnwindSafe for Calls {}

impl Calls {
    /// Returns these calls for another claim, which does not fail open. It has a token of its own,
    /// because the claim before it may still be released in the background.
    pub(crate) fn again(&self) -> Self {
        let mut again = self.clone();
        (again.terms.token, again.fails_open) = (Token::random(), false);
        again
    }

    /// Fetches what a claim of these events needs.
    ///
    /// The response to a multi-event delivery answered for other events too, so it is not replayed.
    pub(super) fn fetch_for(&mut self, events: &[Event]) {
        let has_second = events.iter().any(|event| event.second_identity().is_some());
        self.terms.fetch = match self.terms.fetch {
            Fetch::DigestAndResponse if events.len() != 1 => Fetch::Digest,
            Fetch::Nothing if has_second && self.abilities.stored_data => Fetch::Digest,
            fetch => fetch,
        };
    }

    /// Returns an identity of an event with the terms of its calls. With a second identity the
    /// store holds the SHA-256 of its event's key, and with a key the payload, or else the content
    /// that is the second identity.
    pub(super) fn keyed(&self, event: &Event, identity: &DedupKey) -> KeyedTerms {
        let Abilities { stored_data, inspection, .. } = self.abilities;
        let named = || Some(event.key().sha256()).filter(|_| stored_data);
        let content = || event.content_sha256().filter(|_| stored_data);
        let mut terms = CallTerms::new(self.terms);
        terms.payload_sha256 =
            if identity == event.key() { event.payload_sha256().or_else(content) } else { named() };
        terms.event_type = event.shared_event_type().filter(|_| inspection).map(Arc::clone);
        KeyedTerms { key: identity.clone(), terms: Box::new(terms) }
    }
}

/// Generates, for each method of the adapter, a call for each of several keys: the replies are in
/// the order of the keys.
macro_rules! calls {
    ($($method:ident $context:literal $reply:ty),+) => {
        impl Calls {$(
            pub(super) fn $method<'c>(
                &'c self,
                keys: &'c [KeyedTerms],
            ) -> impl Future<Output = List<Result<$reply, StoreError>>> + Send + 'c {
                let operation = &[stringify!($method), $context];
                let call = |KeyedTerms { key, terms }: &'c KeyedTerms| self.adapter.$method(key, terms);
                let bound = self.bound;
                async move {
                    match keys {
                        // Most deliveries have one key.
                        [key] => List::from([bounded(operation, bound, move || call(key)).await]),
                        keys => Box::pin(unconstrained(each(operation, keys, bound, call))).await,
                    }
                }
            }
        )+}
    };
}

calls!(claim "claiming keys" ClaimReply, renew "renewing leases" RenewReply,
    complete "completing keys" CompleteReply, release "releasing keys" (), is_complete "reading completions" bool);

/// Makes a call for each key, all at once, within one bound. Calls for which a store has no room
/// beside the others are made again, because the store has executed nothing of them.
async fn each<'k, T>(
    operation: Operation,
    keys: &'k [KeyedTerms],
    bound: Duration,
    call: impl Fn(&'k KeyedTerms) -> StoreFuture<'k, T> + Copy + Send,
) -> List<Result<T, StoreError>> {
    let end = Instant::now() + bound;
    let ask = |at: usize, left| bounded(operation, left, move || call(&keys[at]));
    let mut asked = keys.len();
    let mut replies = join_all((0..asked).map(|at| ask(at, bound))).await;
    loop {
        let is_refused = |at: &usize| {
            replies[*at].as_ref().is_err_and(|error| error.kind() == StoreErrorKind::Overloaded)
        };
        let refused: Vec<usize> = (0..keys.len()).filter(is_refused).collect();
        let left = end.saturating_duration_since(Instant::now());
        if refused.is_empty() || refused.len() == asked || left.is_zero() {
            return replies.into();
        }
        asked = refused.len();
        let again = join_all(refused.iter().map(|at| ask(*at, left))).await;
        for (at, reply) in refused.into_iter().zip(again) {
            replies[at] = reply;
        }
    }
}

/// Returns all replies, or the first error.
pub(super) fn all<T>(replies: List<Result<T, StoreError>>) -> Result<List<T>, StoreError> {
    replies.into_iter().collect()
}

/// Returns the first error.
pub(super) fn error<T>(replies: List<Result<T, StoreError>>) -> Option<StoreError> {
    replies.into_iter().find_map(Result::err)
}

/// Runs `call` within `bound`, and measures it.
///
/// A call that outlives its bound is dropped, and its outcome is unknown.
fn bounded<'c, T: 'c>(
    operation: Operation,
    bound: Duration,
    call: impl FnOnce() -> StoreFuture<'c, T>,
) -> impl Future<Output = Result<T, StoreError>> + Send {
    // Outside of the future, which would store `call` beside its future.
    let mut call = MeasuredCall::begin(operation, call);
    async move {
        // The bound begins with the first wait: a store in memory replies without a timer.
        if let Poll::Ready(reply) = poll!(&mut call) {
            return reply;
        }
        let ended = Box::pin(timeout(bound, &mut call)).await;
        ended.unwrap_or_else(|_| call.time_out())
    }
}

/// A call that is measured. If it panics, it fails with [`StoreErrorKind::Unavailable`].
struct MeasuredCall<'c, T> {
    operation: Operation,
    span: StoreSpan,
    /// `None` after a panic or a timeout.
    call: Option<StoreFuture<'c, T>>,
}

impl<'c, T> MeasuredCall<'c, T> {
    fn begin(operation: Operation, call: impl FnOnce() -> StoreFuture<'c, T>) -> Self {
        let span = StoreSpan::begin(operation[0]);
        let call = catch_unwind(AssertUnwindSafe(|| span.in_scope(call))).ok();
        Self { operation, span, call }
    }

    fn end(&self, reply: Result<T, StoreError>) -> Result<T, StoreError> {
        self.span.end(self.operation[0], reply.as_ref().err());
        reply
    }

    fn panicked(&self) -> Result<T, StoreError> {
        // The panic hook has reported the panic itself.
        let context = format!("{}: the adapter panicked", self.operation[1]);
        self.end(Err(StoreError::new(StoreErrorKind::Unavailable, context)))
    }

    /// Drops the call.
    fn time_out(&mut self) -> Result<T, StoreError> {
        self.call = None;
        self.end(Err(StoreError::new(StoreErrorKind::Timeout, self.operation[1])))
    }
}

impl<T> Future for MeasuredCall<'_, T> {
    type Output = Result<T, StoreError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        let Some(call) = &mut this.call else { return Poll::Ready(this.panicked()) };
        let poll = || this.span.in_scope(|| call.as_mut().poll(cx));
        match catch_unwind(AssertUnwindSafe(poll)) {
            Ok(Poll::Pending) => Poll::Pending,
            Ok(Poll::Ready(reply)) => Poll::Ready(this.end(reply)),
            Err(_panic) => Poll::Ready(this.panicked()),
        }
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
