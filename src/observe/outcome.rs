//! How a delivery ended.

/// Defines the outcomes from one list, and the macro `outcome_rows`: the rows of their documentation. The
/// comment above an outcome is its meaning there.
macro_rules! outcomes {
    ($($(#[doc = $meaning:literal])+ $outcome:ident = $name:literal $level:ident,)+) => {
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
    /// [retry](crate::provider::Preset::retries) after a response
    Failed = "failed" INFO,
    /// the handler ran for longer than [`handler_timeout`](crate::DedupLayer::handler_timeout) and was dropped;
    /// the key is free for the retry (on arrival: the event is lost)
    HandlerTimeout = "handler_timeout" WARN,
    /// the handler panicked; the key is free for the retry (on arrival: the event is lost)
    Panicked = "panicked" ERROR,
    /// the handler succeeded, but the ledger could not commit
    Uncommitted = "uncommitted" ERROR,
    /// every event is complete; the handler did not run
    Duplicate = "duplicate" INFO,
    /// another delivery runs an event, or may run it. Without `attempt`, the handler did not run; with it, the
    /// handler ran, and the events that it ran are complete
    InFlight = "in_flight" INFO,
    /// the id is complete with another payload, and the layer
    /// [compares](crate::DedupLayer::compare_payload) payloads or has a
    /// [content identity](crate::KeyExtractor::content_identity)
    Mismatch = "mismatch" WARN,
    /// the body of a response to be stored ended in an error; the key is free for the retry
    BrokenResponse = "broken_response" ERROR,
    /// the store did not reply in time, or returned an error
    Unavailable = "unavailable" WARN,
    /// `max_running` or `max_waiting` was reached, or the inner service was not ready when the wait ended
    Overloaded = "overloaded" WARN,
    /// the key is missing or malformed, its closure panicked, or there are too many keys
    InvalidKey = "invalid_key" WARN,
    /// the request body is larger than [`body_limit`](crate::DedupLayer::body_limit)
    TooLarge = "too_large" WARN,
    /// the request body ended in an error
    BrokenBody = "broken_body" WARN,
    /// the request body did not arrive within [`body_timeout`](crate::DedupLayer::body_timeout)
    SlowBody = "slow_body" WARN,
    /// the marker `Verified` is missing: the layers are in the wrong order
    Unverified = "unverified" ERROR,
    /// a request with an `Idempotency-Key` has no [scope](crate::DedupLayer::idempotency_key): no layer outside
    /// has set it
    Unscoped = "unscoped" ERROR,
    /// the caller dropped the future of [`Deduplicator::run`](crate::Deduplicator::run) before its end;
    /// [its documentation](crate::Deduplicator#cancel-safety) says what happens to the key
    Cancelled = "cancelled" WARN,
    /// the layer answered a [handshake](crate::KeyExtractor::handshake_when), such as GitHub's ping
    Handshake = "handshake" INFO,
    /// a request without an event for the handler, a missing key that passes through, or a delivery that an
    /// outer layer already runs. The record of the first two comes after the handler, and `uncommitted`,
    /// `panicked`, `handler_timeout` and `overloaded` apply to them too
    Bypass = "bypass" DEBUG,
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
