//! The error types: [`StoreError`] of a store, [`KeyError`] of a request, and [`ConfigError`] of
//! the code that builds a layer or an adapter.
//!
//! 1. None of them is a service error, because the layer turns them into responses.
//! 2. `Display` gives this crate's part only. The cause is in
//!    [`source()`](std::error::Error::source).
//! 3. None of them contains an id, a header value, body bytes or a connection URL.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

/// A boxed error, named as in tower and axum.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The error of a store call: a kind, the operation, and the cause.
///
/// `Display` gives the operation, a colon and the fact. Clones share the cause: the calls of a
/// batch have one.
///
/// # Example
///
/// ```
/// use tower_dedup::{StoreError, StoreErrorKind};
///
/// let error = StoreError::new(StoreErrorKind::Unavailable, "connecting to the store")
///     .with_source(std::io::Error::other("connection refused"));
/// assert!(error.is_transient());
/// assert_eq!(error.to_string(), "connecting to the store: the store is unavailable");
/// ```
#[derive(Debug, Clone)]
pub struct StoreError {
    kind: StoreErrorKind,
    context: Cow<'static, str>,
    source: Option<Arc<dyn std::error::Error + Send + Sync>>,
}

/// The kinds of [`StoreError`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StoreErrorKind {
    /// The store could not be reached, or failed during the operation. The outcome is unknown.
    Unavailable,
    /// The store did not reply in time. The outcome is unknown.
    Timeout,
    /// The store has certainly not executed the call, for a reason that no other kind names. For
    /// example, it is read-only, or another process locks it. Nothing was stored.
    Refused,
    /// The store is at its capacity and does not evict live keys. Nothing was stored.
    Full,
    /// Too many calls are queued, so that this call was not sent. Nothing was stored.
    Overloaded,
    /// The store returned data that this version cannot read. It has executed the call, so it
    /// claims no further key for this call later. Which keys it claimed is unknown.
    Corrupt,
    /// The adapter does not support the call. Nothing was stored.
    Unsupported,
    /// A setting of the adapter is invalid.
    Config,
}

impl StoreErrorKind {
    /// Returns a short name for logs and metric labels: lower case, words joined by `_`.
    pub(crate) fn as_str(self) -> &'static str {
        self.words().0
    }

    /// Returns the name, and the fact about the operation; none if the operation says it.
    fn words(self) -> (&'static str, &'static str) {
        match self {
            Self::Unavailable => ("unavailable", "the store is unavailable"),
            Self::Timeout => ("timeout", "the store timed out"),
            Self::Refused => ("refused", "the store refused the call"),
            Self::Full => ("full", "the store is full"),
            Self::Overloaded => ("overloaded", "too many calls are queued"),
            Self::Corrupt => ("corrupt", "the store returned unreadable data"),
            Self::Unsupported => ("unsupported", "the adapter does not support this"),
            Self::Config => ("config", ""),
        }
    }
}

impl StoreError {
    /// Makes an error of this kind. `context` names the operation as a gerund: `"claiming keys"`.
    pub fn new(kind: StoreErrorKind, context: impl Into<Cow<'static, str>>) -> Self {
        Self { kind, context: context.into(), source: None }
    }

    /// Adds the cause, which [`source()`](std::error::Error::source) then returns.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<BoxError>) -> Self {
        self.source = Some(source.into().into());
        self
    }

    /// Returns `true` if the store may have executed the call in spite of the error. A ledger
    /// releases the key after such an error of a claim, and repeats a completion or a release.
    #[must_use]
    pub fn is_unknown(&self) -> bool {
        !matches!(
            self.kind,
            StoreErrorKind::Refused
                | StoreErrorKind::Full
                | StoreErrorKind::Overloaded
                | StoreErrorKind::Unsupported
                | StoreErrorKind::Config
        )
    }

    /// Marks the outcome as unknown, because the operation may be executed in part.
    ///
    /// [`StoreErrorKind::Corrupt`] stays: which keys were claimed is unknown already, and a layer
    /// must not fail open after it.
    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    #[must_use]
    pub(crate) fn with_unknown_outcome(mut self) -> Self {
        if self.kind != StoreErrorKind::Corrupt {
            self.kind = StoreErrorKind::Unavailable;
        }
        self
    }

    /// Returns the kind of the error.
    #[must_use]
    pub fn kind(&self) -> StoreErrorKind {
        self.kind
    }

    /// Returns `true` if the same call may succeed later without any change.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        !matches!(
            self.kind,
            StoreErrorKind::Corrupt | StoreErrorKind::Unsupported | StoreErrorKind::Config
        )
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind.words() {
            (_, "") => f.write_str(&self.context),
            (_, fact) => write!(f, "{}: {fact}", self.context),
        }
    }
}

impl std::error::Error for StoreError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }
}

impl From<ConfigError> for StoreError {
    fn from(error: ConfigError) -> Self {
        let context = format!("connecting to the store: {error}");
        Self::new(StoreErrorKind::Config, context).with_source(error)
    }
}

/// The reason why a request's key is malformed. The layer answers 400 and claims nothing.
///
/// The error names the place that was read, never the value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyError {
    kind: KeyErrorKind,
    place: Cow<'static, str>,
}

/// The kinds of [`KeyError`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum KeyErrorKind {
    /// A required value is missing.
    Missing,
    /// The value is empty, or has no visible character.
    Empty,
    /// The value occurs more than once, and the handler may read another one than the layer.
    Repeated,
    /// The value holds a NUL, which SQL text columns cannot store.
    Nul,
    /// The value is not UTF-8.
    NotUtf8,
    /// The body is not the JSON that the key is read from.
    InvalidJson,
    /// The value is a JSON object or array, or a number that is not a 64-bit integer. Such a value
    /// may be written differently on a retry.
    NotAnId,
    /// The value is not a JSON array, although a list of events is expected.
    NotAnArray,
    /// The value is not a String of RFC 9651.
    InvalidString,
    /// The value is longer than the limit.
    TooLong,
    /// The request has no [scope](crate::DedupLayer::idempotency_key): the layer answers 500.
    MissingScope,
    /// The delivery carries more keys than the layer accepts, or its ids are too long together.
    TooMany,
    /// A namespace is not 1 to 64 bytes without control characters.
    InvalidNamespace,
    /// The application's own extractor refused the request.
    Rejected,
    /// A closure of the application panicked: the layer answers 503, because the fault is not the
    /// sender's.
    Panicked,
}

impl KeyErrorKind {
    /// Returns `true` if the value is there, once and readable, but cannot be an id.
    pub(crate) const fn is_no_id(self) -> bool {
        matches!(self, Self::Empty | Self::NotAnId)
    }
}

impl KeyError {
    /// Makes an error of this kind. `place` names what was read: `"header webhook-id"`.
    pub fn new(kind: KeyErrorKind, place: impl Into<Cow<'static, str>>) -> Self {
        Self { kind, place: place.into() }
    }

    /// Returns the kind of the error.
    #[must_use]
    pub fn kind(&self) -> KeyErrorKind {
        self.kind
    }

    /// Returns the place that was read.
    pub(crate) fn place(&self) -> &str {
        &self.place
    }
}

impl fmt::Display for KeyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.kind {
            KeyErrorKind::Missing | KeyErrorKind::MissingScope => "is missing",
            KeyErrorKind::Empty => "is empty",
            KeyErrorKind::Repeated => "is given more than once",
            KeyErrorKind::Nul => "holds a NUL",
            KeyErrorKind::NotUtf8 => "is not UTF-8",
            KeyErrorKind::InvalidJson => "is not valid JSON",
            KeyErrorKind::NotAnId => "is neither a string, an integer nor a boolean",
            KeyErrorKind::NotAnArray => "is not a JSON array",
            KeyErrorKind::InvalidString => "is not a structured-field string",
            KeyErrorKind::TooLong => "is too long",
            KeyErrorKind::TooMany => "holds too many keys",
            KeyErrorKind::InvalidNamespace => "is not 1 to 64 bytes without control characters",
            KeyErrorKind::Rejected => "was rejected",
            KeyErrorKind::Panicked => "has a closure that panicked",
        };
        write!(f, "{} {what}", self.place)
    }
}

impl std::error::Error for KeyError {}

/// An invalid setting, found while a layer or an adapter is built.
///
/// Its text names the setting and its value, or the fault, and holds no URL of a store, which may
/// hold a password.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError(Cow<'static, str>);

impl ConfigError {
    pub(crate) fn new(message: impl Into<Cow<'static, str>>) -> Self {
        Self(message.into())
    }

    /// Returns the error of a setting: what its value must be (`at least 100 ms`).
    #[cfg(any(feature = "postgres", feature = "redis", feature = "sqlite"))]
    pub(crate) fn setting(setting: &str, rule: &str) -> Self {
        Self::new(format!("`{setting}` must be {rule}"))
    }

    /// Returns the error of a setting with this value.
    pub(crate) fn value(setting: &str, rule: &str, value: &dyn fmt::Debug) -> Self {
        Self::new(format!("`{setting}` must be {rule}, not {value:?}"))
    }

    /// Returns the error of a URL that cannot be parsed.
    pub(crate) fn url() -> Self {
        Self::new("the store URL cannot be parsed")
    }

    /// Returns the error of a URL scheme that no adapter has. Of a URL without a scheme, this may
    /// be the password.
    pub(crate) fn unknown_scheme(scheme: &str) -> Self {
        let is_part = |byte: u8| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte);
        if !scheme.bytes().all(is_part) {
            return Self::url();
        }
        Self::new(format!("no adapter for the scheme `{scheme}:`"))
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ConfigError {}

/// The rule of a setting that must be longer than zero.
pub(crate) const NOT_ZERO: &str = "longer than zero";

/// Refuses an invalid value of a setting.
pub(crate) fn check(
    is_valid: bool,
    setting: &'static str,
    rule: &'static str,
    value: &dyn fmt::Debug,
) -> Result<(), ConfigError> {
    if is_valid { Ok(()) } else { Err(ConfigError::value(setting, rule, value)) }
}

/// Returns what was checked.
///
/// # Panics
///
/// For an invalid setting. The panic names the caller.
#[track_caller]
pub(crate) fn valid<T>(set: Result<T, ConfigError>) -> T {
    // `#[track_caller]` would report the place of a closure.
    match set {
        Ok(set) => set,
        Err(error) => panic!("{error}"),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn error_of_a_url_says_what_is_wrong_with_it() {
        let error = super::StoreError::from(super::ConfigError::unknown_scheme("postgress"));
        let expected = "connecting to the store: no adapter for the scheme `postgress:`";
        assert_eq!(error.to_string(), expected);
    }

    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    #[test]
    fn with_unknown_outcome_keeps_only_the_kind_corrupt() {
        use super::{StoreError, StoreErrorKind};

        for kind in [StoreErrorKind::Refused, StoreErrorKind::Timeout, StoreErrorKind::Unavailable]
        {
            let error = StoreError::new(kind, "claiming keys").with_unknown_outcome();
            assert_eq!(error.kind(), StoreErrorKind::Unavailable);
            assert!(error.is_unknown());
        }
        let error =
            StoreError::new(StoreErrorKind::Corrupt, "claiming keys").with_unknown_outcome();
        assert_eq!(error.kind(), StoreErrorKind::Corrupt);
        assert!(error.is_unknown());
    }
}
