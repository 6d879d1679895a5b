//! [`Mode`]: whether a layer enforces its verdicts.

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicU8, Ordering};

use crate::error::ConfigError;

/// Whether a layer enforces its verdicts, only reports them, or does nothing.
///
/// [The guide](crate::guide::production#shadow) says how to put a layer on a live route with these
/// modes. [`DedupLayer::mode`](crate::DedupLayer::mode) sets the first mode, and
/// [`DedupHandle::set_mode`](crate::DedupHandle::set_mode) changes it while the layer serves. A
/// delivery reads the mode once, after its body has arrived, and keeps it to its end.
///
/// The bounds of the body ([`body_limit`](crate::DedupLayer::body_limit),
/// [`body_timeout`](crate::DedupLayer::body_timeout)) hold in every mode, because the inner service
/// takes a whole body. With the feature `axum`, so does the raised default of axum's limit.
///
/// # From text
///
/// ```
/// use tower_dedup::Mode;
///
/// assert_eq!("shadow".parse(), Ok(Mode::Shadow));
/// assert_eq!(Mode::default().to_string(), "enforce");
/// assert!("on".parse::<Mode>().is_err());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Mode {
    /// Runs the handler for new events, and answers any other delivery itself.
    #[default]
    Enforce,
    /// Runs the handler for every delivery, and reports the verdict that the delivery would have
    /// got.
    ///
    /// 1. Keys are read, claimed, and completed or released, as under `Enforce`. An event that was
    ///    completed in shadow is a duplicate after the switch to `Enforce`.
    /// 2. Every request reaches the handler once. The client gets the handler's response, error or
    ///    panic, without a result header.
    /// 3. No delivery waits for another one, nor for a permit. A delivery that is not the first
    ///    runs at once, without a claim.
    /// 4. [`replay`](crate::DedupLayer::replay) and
    ///    [`handler_timeout`](crate::DedupLayer::handler_timeout) do not apply. An event that was
    ///    completed in shadow has no stored response after the switch.
    /// 5. The claim delays the handler, and the completion delays its response, each by
    ///    [`store_timeout`](crate::DedupLayer::store_timeout) at most.
    /// 6. A request whose key is missing by choice
    ///    ([`PassThrough`](crate::OnMissingKey::PassThrough)), a handshake, and a method that is
    ///    not deduplicated reach the handler as if there were no layer.
    /// 7. The handler's [`Delivery`](crate::Delivery) has all events of the request and the
    ///    [`verdict`](crate::Delivery::verdict). A request without a valid key has the SHA-256 of
    ///    its body as its key, which is never claimed. If the body is empty too, or the namespace
    ///    or scope is missing, there is no `Delivery`, and axum's extractor refuses the request as
    ///    it does without the layer. Inside a layer that enforces its verdict, with other keys, the
    ///    handler keeps the `Delivery` of the outer layer: it decides what runs, and a transaction
    ///    completes its events.
    /// 8. No other layer with the same namespace may be inside: it would let the deliveries through
    ///    whose claim this layer holds.
    Shadow,
    /// Calls the inner service as if the layer were not there: no call to the store, no permit, no
    /// task, no log record, no metrics. A body that cannot be read is refused, logged and counted
    /// in every mode. [`drain`](crate::DedupHandle::drain) does not wait for handlers that began
    /// while the layer was off.
    ///
    /// The handler gets a `Delivery` as under `Shadow`, so that a handler that takes one works.
    /// Events that are handled while the layer is off are unknown: their retries run after the
    /// switch back.
    Off,
}

impl Mode {
    const ALL: [Self; 3] = [Self::Enforce, Self::Shadow, Self::Off];

    /// Returns the name.
    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::Enforce => "enforce",
            Self::Shadow => "shadow",
            Self::Off => "off",
        }
    }
}

/// The name: `enforce`, `shadow` or `off`.
impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Reads the name of a mode, for settings from a file or from an environment variable.
impl FromStr for Mode {
    type Err = ConfigError;

    /// # Errors
    ///
    /// Any other text.
    fn from_str(name: &str) -> Result<Self, ConfigError> {
        let mode = Self::ALL.into_iter().find(|mode| mode.as_str() == name);
        mode.ok_or_else(|| ConfigError::value("mode", "`enforce`, `shadow` or `off`", &name))
    }
}

/// The mode of a layer, which may change while deliveries run.
#[derive(Default)]
pub(super) struct SharedMode(AtomicU8);

impl SharedMode {
    pub(super) fn get(&self) -> Mode {
        // No other memory depends on the mode.
        Mode::ALL[usize::from(self.0.load(Ordering::Relaxed))]
    }

    /// Sets the mode and returns the previous one.
    pub(super) fn set(&self, mode: Mode) -> Mode {
        let previous = self.0.swap(mode as u8, Ordering::Relaxed);
        Mode::ALL[usize::from(previous)]
    }
}
