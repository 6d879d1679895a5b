//! The table of endings: how a delivery ends, and what the layer answers then.

use http::StatusCode;

/// Defines the outcomes from one list, and the macro `outcome_rows`: the rows of their documentation. The
/// comment above an outcome is its meaning there. After the level stands the answer in the handler's place, if there
/// is one.
macro_rules! outcomes {
    ($($(#[doc = $meaning:literal])+ $outcome:ident = $name:literal $level:ident $(=> $answer:ident)?,)+) => {
        /// How one delivery ended.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum Outcome {
            $($outcome),+
        }

        impl Outcome {
            #[cfg(feature = "metrics")]
            pub(super) const COUNT: usize = [$(Self::$outcome),+].len();

            pub(super) fn as_str(self) -> &'static str {
                match self {
                    $(Self::$outcome => $name),+
                }
            }

            /// Returns the level of the log record of a delivery.
            pub(super) fn level(self) -> tracing::Level {
                match self {
                    $(Self::$outcome => tracing::Level::$level),+
                }
            }

            /// Returns the layer's answer. An outcome without one is the handler's, and never asked for it.
            pub(crate) fn answer(self) -> DedupAnswer {
                match self {
                    $($(Self::$outcome => DedupAnswer::$answer,)?)+
                    _ => DedupAnswer::Unavailable,
                }
            }
        }

        macro_rules! outcome_rows {
            () => { concat!($("| `", $name, "` | ", stringify!($level), " |", $($meaning,)+ " |\n"),+) };
        }
    };
}

outcomes! {
    /// the handler succeeded; the key is complete
    Completed = "completed" INFO,
    /// the handler failed; the key is free for the retry (on arrival: the event is lost). Without a retry, the
    /// event is lost unless somebody sends it again: the level is WARN for a preset whose sender does not
    /// [retry](crate::guide::providers) after a response
    Failed = "failed" INFO,
    /// the handler ran for longer than [`handler_timeout`](crate::DedupLayer::handler_timeout) and was dropped;
    /// the key is free for the retry (on arrival: the event is lost)
    HandlerTimeout = "handler_timeout" WARN => HandlerTimeout,
    /// the handler panicked; the key is free for the retry (on arrival: the event is lost)
    Panicked = "panicked" ERROR,
    /// the handler succeeded, but the ledger could not commit
    Uncommitted = "uncommitted" ERROR => Uncommitted,
    /// every event is complete; the handler did not run
    Duplicate = "duplicate" INFO => Duplicate,
    /// another delivery runs an event, or may run it. Without `attempt`, the handler did not run; with it, the
    /// handler ran, and the events that it ran are complete
    InFlight = "in_flight" INFO => InFlight,
    /// the id is complete with another payload, and the layer
    /// [compares](crate::DedupLayer::compare_payload) payloads or has a
    /// [content identity](crate::KeyExtractor::content_identity)
    Mismatch = "mismatch" WARN => Mismatch,
    /// the body of a response to be stored ended in an error; the key is free for the retry
    BrokenResponse = "broken_response" ERROR => BrokenResponse,
    /// the store did not reply in time, or returned an error; or a closure of the key panicked
    Unavailable = "unavailable" WARN => Unavailable,
    /// `max_running` or `max_waiting` was reached, or the inner service was not ready when the wait ended
    Overloaded = "overloaded" WARN => Unavailable,
    /// the key is missing or malformed, or there are too many keys
    InvalidKey = "invalid_key" WARN => InvalidKey,
    /// the request body is larger than [`body_limit`](crate::DedupLayer::body_limit)
    TooLarge = "too_large" WARN => TooLarge,
    /// the request body ended in an error
    BrokenBody = "broken_body" WARN => BrokenBody,
    /// the request body did not arrive within [`body_timeout`](crate::DedupLayer::body_timeout)
    SlowBody = "slow_body" WARN => SlowBody,
    /// the marker `Verified` is missing: the layers are in the wrong order
    Unverified = "unverified" ERROR => Unverified,
    /// a request with an `Idempotency-Key` has no [scope](crate::DedupLayer::idempotency_key): no layer outside
    /// has set it
    Unscoped = "unscoped" ERROR => Unscoped,
    /// the caller dropped the future of [`Deduplicator::run`](crate::Deduplicator::run) before its end;
    /// [its documentation](crate::Deduplicator#cancel-safety) says what happens to the key
    Cancelled = "cancelled" WARN,
    /// the layer answered a [handshake](crate::KeyExtractor::handshake_when), such as GitHub's ping
    Handshake = "handshake" INFO => Handshake,
    /// a request without an event for the handler, a missing key that passes through, or a delivery that an
    /// outer layer already runs. The record of the first two comes after the handler, and `uncommitted`,
    /// `panicked`, `handler_timeout` and `overloaded` apply to them too
    Bypass = "bypass" DEBUG,
}
pub(crate) use outcome_rows;

/// Defines the answers from one list: the value of the result header, and the status by default.
macro_rules! answers {
    ($($(#[doc = $meaning:literal])+ $answer:ident = $value:literal $status:ident,)+) => {
        /// Why the layer answered in the handler's place: an extension of each of its own responses, so
        /// that an outer layer can count them.
        ///
        /// The [guide](crate::guide::how_it_works#answers) has the table of all answers.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum DedupAnswer {
            $($(#[doc = $meaning])+ $answer),+
        }

        impl DedupAnswer {
            /// Returns the value of the result header.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$answer => $value),+
                }
            }

            /// Returns the status, unless a setting changes it.
            pub(crate) const fn status(self) -> StatusCode {
                match self {
                    $(Self::$answer => StatusCode::$status),+
                }
            }
        }
    };
}

answers! {
    /// The event was handled before.
    Duplicate = "duplicate" OK,
    /// The request is a [handshake](crate::KeyExtractor::handshake_when), which carries no event.
    Handshake = "handshake" OK,
    /// The event is in flight.
    InFlight = "in-flight" SERVICE_UNAVAILABLE,
    /// The store failed, or no permit was free.
    Unavailable = "unavailable" SERVICE_UNAVAILABLE,
    /// The key is missing or malformed, or there are too many keys.
    InvalidKey = "invalid-key" BAD_REQUEST,
    /// The event was handled with another payload. Client libraries repeat a request after a 5xx, so it is none.
    Mismatch = "mismatch" UNPROCESSABLE_ENTITY,
    /// The body is over the limit.
    TooLarge = "too-large" PAYLOAD_TOO_LARGE,
    /// The body ended in an error.
    BrokenBody = "broken-body" BAD_REQUEST,
    /// The body did not arrive in time.
    SlowBody = "slow-body" REQUEST_TIMEOUT,
    /// The handler ran for longer than its timeout and was dropped.
    HandlerTimeout = "handler-timeout" GATEWAY_TIMEOUT,
    /// The handler succeeded, and no transaction has completed its event.
    Uncommitted = "uncommitted" INTERNAL_SERVER_ERROR,
    /// The handler's response was to be stored, and its body ended in an error.
    BrokenResponse = "broken-response" INTERNAL_SERVER_ERROR,
    /// The request with this `Idempotency-Key` was handled before, and its response was not stored.
    ResponseNotStored = "broken-response" UNPROCESSABLE_ENTITY,
    /// The layer requires verified requests, and this request is not verified.
    Unverified = "unverified" INTERNAL_SERVER_ERROR,
    /// The request has an `Idempotency-Key`, and no [scope](crate::DedupLayer::idempotency_key).
    Unscoped = "unscoped" INTERNAL_SERVER_ERROR,
}

/// Returns what to change after this outcome, or after this verdict in shadow.
pub(super) fn fix(name: &str) -> Option<&'static str> {
    match name {
        "unverified" => Some(
            "put the verifying layer outside the DedupLayer: first in a tuple, `.layer((verify, dedup))`",
        ),
        "unscoped" => Some(
            "put the layer that authenticates outside the DedupLayer, and let it insert what the scope reads",
        ),
        "overloaded" => Some(
            "raise the bound that is reached, `max_running` or `max_waiting`, or add processes; if none is \
             reached, an inner service was not ready",
        ),
        "uncommitted" => Some(
            "commit the transaction of `Delivery::begin`, execute `Delivery::completion` in that of another driver, or \
             call `nothing_to_write`; an `error` of the store passes by itself",
        ),
        _ => None,
    }
}

impl Outcome {
    /// Returns `true` if the events whose handler ran are complete.
    #[cfg(feature = "metrics")]
    pub(super) fn ends_completed(self) -> bool {
        // A run ends in a mismatch, or in flight, only after its success: it is another event that was
        // handled with another payload, or that another delivery runs.
        matches!(self, Self::Completed | Self::InFlight | Self::Mismatch)
    }
}
