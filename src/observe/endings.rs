//! The table of endings: how a delivery ends, and what the layer answers then.

use http::StatusCode;

/// Defines the outcomes and the answers from one list, and the macro `outcome_rows`: the rows of
/// their documentation. A row has the name of the outcome in records and metrics, and the level of
/// its record. If the layer answers in the handler's place, it has the value of the result header
/// and the status, too.
macro_rules! endings {
    ($($ending:ident = $name:literal $level:ident $(=> $value:literal $status:ident)?, $meaning:literal;)+) => {
        /// How one delivery ended.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum Outcome {
            $($ending),+
        }

        impl Outcome {
            #[cfg(feature = "metrics")]
            pub(super) const COUNT: usize = [$(Self::$ending),+].len();

            pub(crate) const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$ending => $name),+
                }
            }

            /// Returns the level of the log record of a delivery.
            pub(super) const fn level(self) -> tracing::Level {
                match self {
                    $(Self::$ending => tracing::Level::$level),+
                }
            }

            /// Returns the layer's answer. It has one for `Overloaded`, too. Every other outcome
            /// without one is the handler's, and never asked for it.
            pub(crate) const fn answer(self) -> DedupAnswer {
                match self {
                    // Where a row has a value, the answer has the name of the outcome.
                    $($(Self::$ending => { let _: &str = $value; DedupAnswer::$ending })?)+
                    _ => DedupAnswer::Unavailable,
                }
            }
        }

        /// Why the layer answered in the handler's place: an extension of each of its own
        /// responses, so that an outer layer can count them.
        ///
        /// The [guide](crate::guide::how_it_works#answers) has the table of all answers.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum DedupAnswer {
            $($(
                #[doc = concat!("`", $value, "`, after the outcome `", $name, "`: ", $meaning, ".")]
                $ending,
            )?)+
            /// `response-not-stored`, after the outcome `duplicate`: the request with this
            /// `Idempotency-Key` was handled before, and its response was not stored.
            ResponseNotStored,
        }

        impl DedupAnswer {
            /// Returns the value of the result header.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self {
                    $($(Self::$ending => $value,)?)+
                    Self::ResponseNotStored => "response-not-stored",
                }
            }

            /// Returns the status, unless a setting changes it.
            pub(crate) const fn status(self) -> StatusCode {
                match self {
                    $($(Self::$ending => StatusCode::$status,)?)+
                    Self::ResponseNotStored => StatusCode::UNPROCESSABLE_ENTITY,
                }
            }
        }

        macro_rules! outcome_rows {
            () => {
                concat!($("| `", $name, "` | ", stringify!($level), " | ", $meaning, " |\n"),+)
            };
        }
    };
}

endings! {
    Completed = "completed" INFO,
        "the handler succeeded; the key is complete";
    Failed = "failed" INFO,
        "the handler failed; the key is free for the retry (on arrival: the event is lost). Without a retry, the event \
         is lost unless somebody sends it again: the level is WARN for a preset whose sender does not \
         [retry](crate::guide::providers) after a response";
    HandlerTimeout = "handler_timeout" WARN => "handler-timeout" GATEWAY_TIMEOUT,
        "the handler ran for longer than [`handler_timeout`](crate::DedupLayer::handler_timeout) and was dropped; the \
         key is free for the retry (on arrival: the event is lost)";
    Panicked = "panicked" ERROR,
        "the handler panicked; the key is free for the retry (on arrival: the event is lost)";
    Uncommitted = "uncommitted" ERROR => "uncommitted" INTERNAL_SERVER_ERROR,
        "the handler succeeded, but the ledger could not commit";
    Duplicate = "duplicate" INFO => "duplicate" OK,
        "every event is complete; the handler did not run";
    InFlight = "in_flight" INFO => "in-flight" SERVICE_UNAVAILABLE,
        "another delivery runs an event, or may run it. Without `attempt`, the handler did not run; with it, the \
         handler ran, and the events that it ran are complete";
    // Client libraries repeat a request after a 5xx.
    Mismatch = "mismatch" WARN => "mismatch" UNPROCESSABLE_ENTITY,
        "the id is complete with another payload, and the layer \
         [compares](crate::DedupLayer::compare_payload) payloads or has a \
         [content identity](crate::KeyExtractor::content_identity)";
    BrokenResponse = "broken_response" ERROR => "broken-response" INTERNAL_SERVER_ERROR,
        "the body of a response to be stored ended in an error; the key is free for the retry";
    Unavailable = "unavailable" WARN => "unavailable" SERVICE_UNAVAILABLE,
        "the store did not reply in time, or returned an error; or a closure of the key panicked";
    Overloaded = "overloaded" WARN,
        "`max_running` or `max_waiting` was reached, or the inner service was not ready when the wait ended";
    InvalidKey = "invalid_key" WARN => "invalid-key" BAD_REQUEST,
        "the key is missing or malformed, or there are too many keys";
    TooLarge = "too_large" WARN => "too-large" PAYLOAD_TOO_LARGE,
        "the request body is larger than [`body_limit`](crate::DedupLayer::body_limit)";
    BrokenBody = "broken_body" WARN => "broken-body" BAD_REQUEST,
        "the request body ended in an error";
    SlowBody = "slow_body" WARN => "slow-body" REQUEST_TIMEOUT,
        "the request body did not arrive within [`body_timeout`](crate::DedupLayer::body_timeout)";
    Unverified = "unverified" ERROR => "unverified" INTERNAL_SERVER_ERROR,
        "the marker `Verified` is missing: the layers are in the wrong order";
    Unscoped = "unscoped" ERROR => "unscoped" INTERNAL_SERVER_ERROR,
        "a request with an `Idempotency-Key` has no [scope](crate::DedupLayer::idempotency_key): no layer outside has \
         set it";
    Cancelled = "cancelled" WARN,
        "the caller dropped the future of [`Deduplicator::run`](crate::Deduplicator::run) before its end; \
         [its documentation](crate::Deduplicator#cancel-safety) says what happens to the key";
    Handshake = "handshake" INFO => "handshake" OK,
        "the layer answered a [handshake](crate::KeyExtractor::handshake_when), such as GitHub's ping";
    Bypass = "bypass" DEBUG,
        "a request without an event for the handler, a missing key that passes through, or a delivery that an outer \
         layer already runs. The record of the first two comes after the handler, and `uncommitted`, `panicked`, \
         `handler_timeout` and `overloaded` apply to them too; in shadow, it comes before the handler";
}
pub(crate) use outcome_rows;

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
             call `nothing_to_write`; two layers around one handler demand one commit, so put both keys into one; an \
             `error` of the store passes by itself",
        ),
        _ => None,
    }
}

impl Outcome {
    /// Returns `true` if the events whose handler ran are complete.
    #[cfg(feature = "metrics")]
    pub(super) fn ends_completed(self) -> bool {
        // A run ends in a mismatch, or in flight, only after its success: it is another event that
        // was handled with another payload, or that another delivery runs.
        matches!(self, Self::Completed | Self::InFlight | Self::Mismatch)
    }
}
