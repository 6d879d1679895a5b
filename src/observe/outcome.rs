//! How a delivery ended, by name.

/// How one delivery ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    Completed,
    Failed,
    HandlerTimeout,
    Panicked,
    Uncommitted,
    Duplicate,
    InFlight,
    Mismatch,
    BrokenResponse,
    Unavailable,
    Overloaded,
    InvalidKey,
    TooLarge,
    BrokenBody,
    SlowBody,
    Unverified,
    Unscoped,
    Cancelled,
    Handshake,
    Bypass,
}

impl Outcome {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::HandlerTimeout => "handler_timeout",
            Self::Panicked => "panicked",
            Self::Uncommitted => "uncommitted",
            Self::Duplicate => "duplicate",
            Self::InFlight => "in_flight",
            Self::Mismatch => "mismatch",
            Self::BrokenResponse => "broken_response",
            Self::Unavailable => "unavailable",
            Self::Overloaded => "overloaded",
            Self::InvalidKey => "invalid_key",
            Self::TooLarge => "too_large",
            Self::BrokenBody => "broken_body",
            Self::SlowBody => "slow_body",
            Self::Unverified => "unverified",
            Self::Unscoped => "unscoped",
            Self::Cancelled => "cancelled",
            Self::Handshake => "handshake",
            Self::Bypass => "bypass",
        }
    }

    /// Returns `true` if the events whose handler ran are complete.
    #[cfg(feature = "metrics")]
    pub(super) fn ends_completed(self) -> bool {
        // A run ends in a mismatch, or in flight, only after its success: it is another event that was
        // handled with another payload, or that another delivery runs.
        matches!(self, Self::Completed | Self::InFlight | Self::Mismatch)
    }
}
