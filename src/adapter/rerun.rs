//! The permission of an operator to run a known event again, and its audit.

use std::time::SystemTime;

use crate::error::{Error, ErrorKind};

/// Who lets an event run again, and why. The store holds both with the key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RerunOrder {
    by: String,
    reason: String,
}

impl RerunOrder {
    /// The longest name and the longest reason, in bytes.
    pub const MAX_BYTES: usize = 500;

    /// Returns an order.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Refused`] for a text that is empty, longer than [`MAX_BYTES`](Self::MAX_BYTES), or
    /// has a control character.
    pub fn new(by: impl Into<String>, reason: impl Into<String>) -> Result<Self, Error> {
        let (by, reason) = (by.into(), reason.into());
        for text in [&by, &reason] {
            let is_valid = !text.trim().is_empty()
                && text.len() <= Self::MAX_BYTES
                && !text.contains(char::is_control);
            if !is_valid {
                return Err(Error::new(
                    ErrorKind::Refused,
                    "allowing a rerun: a name and a reason of 1 to 500 bytes are needed",
                ));
            }
        }
        Ok(Self { by, reason })
    }

    /// Returns an order as a row holds it.
    #[cfg(any(feature = "postgres", feature = "sqlite", feature = "redis"))]
    pub(super) fn stored(by: String, reason: String) -> Self {
        Self { by, reason }
    }

    /// Returns who lets the event run again.
    #[must_use]
    pub fn by(&self) -> &str {
        &self.by
    }

    /// Returns why.
    #[must_use]
    pub fn reason(&self) -> &str {
        &self.reason
    }
}

/// The last rerun that an operator allowed: the audit of one key.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Rerun {
    /// When the rerun was allowed, by the store's clock.
    pub at: SystemTime,
    /// Who allowed it, and why.
    pub order: RerunOrder,
}

impl Rerun {
    /// Returns the audit of one key.
    #[must_use]
    pub const fn new(at: SystemTime, order: RerunOrder) -> Self {
        Self { at, order }
    }
}

/// The reply to [`MaintenanceAdapter::allow_rerun`](super::MaintenanceAdapter::allow_rerun) for one key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RerunReply {
    /// The next delivery of the event runs.
    Allowed,
    /// The key is unknown or expired: the next delivery runs anyway, and nothing was written.
    Missing,
    /// A live lease holds the key. Nothing changed: otherwise two handlers could run.
    InFlight,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rerun_order_needs_a_name_and_a_reason() {
        let order = RerunOrder::new("ada", "invoice was not sent").unwrap();
        assert_eq!((order.by(), order.reason()), ("ada", "invoice was not sent"));
        let long = "x".repeat(RerunOrder::MAX_BYTES + 1);
        for (by, reason) in [("", "why"), ("ada", " "), ("ada", "a\nb"), (&*long, "why")] {
            assert_eq!(RerunOrder::new(by, reason).unwrap_err().kind(), ErrorKind::Refused);
        }
    }
}
