//! The error types: [`Error`] from a store, [`KeyError`] from a request, [`ConfigError`] from the
//! code that sets a layer up.
//!
//! 1. None of them is ever a service error: the layer turns them into responses.
//! 2. `Display` says this crate's part only; the cause is in
//!    [`source()`](std::error::Error::source).
//! 3. None of them carries an id, a header value, a body byte or a connection URL.

use std::borrow::Cow;
use std::fmt;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
use std::sync::Arc;

/// A boxed error, as tower and axum name it.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// What a store answers when it could not do what it was asked.
///
/// # Example
///
/// ```
/// use tower_dedup::{Error, ErrorKind};
///
/// let error = Error::new(ErrorKind::Unavailable, "connecting to the store")
///     .with_source(std::io::Error::other("connection refused"));
/// assert!(error.is_transient());
/// assert_eq!(error.to_string(), "connecting to the store: the store is unavailable");
/// ```
pub struct Error {
    kind: ErrorKind,
    context: Cow<'static, str>,
    source: Option<BoxError>,
}

/// The kinds of [`Error`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The store could not be reached, refused the operation, or failed while doing it. The
    /// outcome is unknown.
    Unavailable,
    /// The store did not answer in time. The outcome is unknown.
    Timeout,
    /// The store answered that it did not do it: it is read-only, full, or held by somebody else.
    /// Nothing was recorded.
    Refused,
    /// The store is at its capacity and will not evict a live key. Nothing was recorded.
    Full,
    /// So much waits for the store that this call was not even sent. Nothing was recorded.
    Overloaded,
    /// The store answered something that this version cannot read.
    Corrupt,
    /// The handler has ended, broken or kept the transaction that it was lent. Nothing was
    /// committed, but for what it may have marked as done before.
    Transaction,
    /// The adapter does not support the call. Nothing was recorded.
    Unsupported,
    /// The adapter was configured with something that cannot work.
    Config,
}

impl ErrorKind {
    /// A short name for logs and metric labels: lower case, words joined by `_`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unavailable => "unavailable",
            Self::Timeout => "timeout",
            Self::Refused => "refused",
            Self::Full => "full",
            Self::Overloaded => "overloaded",
            Self::Corrupt => "corrupt",
            Self::Transaction => "transaction",
            Self::Unsupported => "unsupported",
            Self::Config => "config",
        }
    }
}

impl Error {
    /// An error of this kind; `context` says what was being done.
    pub fn new(kind: ErrorKind, context: impl Into<Cow<'static, str>>) -> Self {
        Self { kind, context: context.into(), source: None }
    }

    /// Adds the cause, which [`source()`](std::error::Error::source) answers from then on.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<BoxError>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// Whether the store may have done what it answered this error to.
    pub(crate) fn is_unknown(&self) -> bool {
        !matches!(
            self.kind,
            ErrorKind::Refused
                | ErrorKind::Full
                | ErrorKind::Overloaded
                | ErrorKind::Unsupported
                | ErrorKind::Config
        )
    }

    /// The same failure, of something that may have been done in part.
    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    pub(crate) fn unknown(mut self) -> Self {
        self.kind = ErrorKind::Unavailable;
        self
    }

    /// The same failure, for each of those that it is the failure of.
    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    pub(crate) fn shared(self) -> impl Fn() -> Self {
        let Self { kind, context, source } = self;
        let source: Option<Arc<dyn std::error::Error + Send + Sync>> = source.map(Arc::from);
        move || Self {
            kind,
            context: context.clone(),
            source: source.clone().map(|source| Box::new(source) as BoxError),
        }
    }

    /// The same failure, laid at the handler's door.
    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    pub(crate) fn of_the_transaction(mut self) -> Self {
        self.kind = ErrorKind::Transaction;
        self
    }

    /// What kind of failure this is.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// Whether the same call may succeed later with nothing changed but time.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        match self.kind {
            ErrorKind::Unavailable
            | ErrorKind::Timeout
            | ErrorKind::Refused
            | ErrorKind::Full
            | ErrorKind::Overloaded => true,
            ErrorKind::Corrupt
            | ErrorKind::Transaction
            | ErrorKind::Unsupported
            | ErrorKind::Config => false,
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Error")
            .field("kind", &self.kind)
            .field("context", &self.context)
            .field("source", &self.source)
            .finish()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.kind {
            ErrorKind::Unavailable => "the store is unavailable",
            ErrorKind::Timeout => "the store did not answer in time",
            ErrorKind::Refused => "the store refused",
            ErrorKind::Full => "the store is full",
            ErrorKind::Overloaded => "too much waits for the store",
            ErrorKind::Corrupt => "the store holds something unreadable",
            ErrorKind::Transaction => "the transaction is not what it was",
            ErrorKind::Unsupported => "the adapter does not support this",
            ErrorKind::Config => return f.write_str(&self.context),
        };
        write!(f, "{}: {what}", self.context)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }
}

impl From<ConfigError> for Error {
    fn from(error: ConfigError) -> Self {
        Self::new(ErrorKind::Config, "choosing the store").with_source(error)
    }
}

/// Why a request's key is malformed: the layer answers 400 and records nothing.
///
/// It names the place that was read, never the value that was found there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyError {
    kind: KeyErrorKind,
    place: Cow<'static, str>,
}

/// The kinds of [`KeyError`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum KeyErrorKind {
    /// There is no value where one is required.
    Missing,
    /// The value is there, and empty.
    Empty,
    /// The value is there more than once: which one the handler reads is anybody's guess.
    Repeated,
    /// The value holds a NUL, which SQL text columns cannot.
    Nul,
    /// The value is not UTF-8.
    NotUtf8,
    /// The body is not the JSON that the key is read from.
    InvalidJson,
    /// The value is a JSON object or array, or a number that is no 64-bit integer: no
    /// representation of it is surely the same on every delivery.
    NotAnId,
    /// The value is there and no JSON array, where the events of a batch are expected.
    NotAnArray,
    /// The value's percent-encoding is broken.
    InvalidEncoding,
    /// The delivery carries more keys than the layer takes at once, or ids that are too long
    /// together.
    TooMany,
    /// A namespace is not 1 to 64 bytes without control characters.
    InvalidNamespace,
    /// A user's own extractor refused the request.
    Rejected,
}

impl KeyError {
    /// An error of this kind; `place` says where it was read: `"header webhook-id"`.
    pub fn new(kind: KeyErrorKind, place: impl Into<Cow<'static, str>>) -> Self {
        Self { kind, place: place.into() }
    }

    /// What is wrong.
    #[must_use]
    pub fn kind(&self) -> KeyErrorKind {
        self.kind
    }

    /// Where it was read.
    #[must_use]
    pub fn place(&self) -> &str {
        &self.place
    }
}

impl fmt::Display for KeyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.kind {
            KeyErrorKind::Missing => "is missing",
            KeyErrorKind::Empty => "is empty",
            KeyErrorKind::Repeated => "is given more than once",
            KeyErrorKind::Nul => "holds a NUL",
            KeyErrorKind::NotUtf8 => "is not UTF-8",
            KeyErrorKind::InvalidJson => "is not valid JSON",
            KeyErrorKind::NotAnId => "is neither a string, an integer nor a boolean",
            KeyErrorKind::NotAnArray => "is not a JSON array",
            KeyErrorKind::InvalidEncoding => "is not percent-encoded as it should be",
            KeyErrorKind::TooMany => "holds too many keys",
            KeyErrorKind::InvalidNamespace => "is not 1 to 64 bytes without control characters",
            KeyErrorKind::Rejected => "was rejected",
        };
        write!(f, "{} {what}", self.place)
    }
}

impl std::error::Error for KeyError {}

/// A setting that cannot work, found while a layer or an adapter is built.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConfigError {
    /// A namespace must be 1 to 64 bytes without control characters.
    InvalidNamespace,
    /// Not the name of an HTTP header.
    InvalidHeaderName,
    /// Not a JSON pointer (RFC 6901): empty, or starting with `/`, with `~` only in `~0` and `~1`.
    InvalidPointer,
    /// The name of a table or a schema must match `[A-Za-z_][A-Za-z0-9_]{0,47}` and not start with `sqlite_`.
    InvalidIdentifier,
    /// A setting has a value without meaning.
    #[non_exhaustive]
    InvalidSetting {
        /// The name of the setter.
        setting: &'static str,
        /// What the value must be: `"at least 100 ms"`.
        rule: &'static str,
    },
    /// Duplicates must be answered with a 2xx: every sender takes anything else for a failure.
    InvalidDuplicateStatus,
    /// A header that belongs to one client, one connection or one moment is not replayed.
    InvalidReplayHeader,
    /// The adapter has no leases, or stores no data, as this layer needs it.
    UnsupportedByAdapter(&'static str),
    /// The store URL cannot be read. (The URL is not repeated here: it may hold a password.)
    InvalidUrl,
    /// The Postgres URL names several hosts, or `PGHOST` does. `sqlx` connects to one host only:
    /// give one address that leads to the primary.
    SeveralHosts,
    /// The Postgres URL has a parameter that chooses between servers, which `sqlx` ignores: give
    /// one address that leads to the primary.
    UnsupportedUrlParameter(&'static str),
    /// No adapter answers to this URL scheme.
    UnknownScheme(String),
    /// The adapter for this URL scheme is behind a cargo feature that is off.
    FeatureDisabled {
        /// The URL scheme that was asked for.
        scheme: &'static str,
        /// The cargo feature that brings its adapter.
        feature: &'static str,
    },
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InvalidNamespace => {
                f.write_str("a namespace is 1 to 64 bytes without control characters")
            }
            Self::InvalidHeaderName => f.write_str("not an HTTP header name"),
            Self::InvalidPointer => f.write_str("not a JSON pointer (RFC 6901)"),
            Self::InvalidIdentifier => {
                f.write_str("a table or schema name matches [A-Za-z_][A-Za-z0-9_]{0,47}")
            }
            Self::InvalidReplayHeader => f.write_str("this header cannot be replayed"),
            Self::InvalidSetting { setting, rule } => write!(f, "`{setting}` must be {rule}"),
            Self::InvalidDuplicateStatus => f.write_str("duplicates are answered with a 2xx"),
            Self::UnsupportedByAdapter(what) => write!(f, "the adapter does not support {what}"),
            Self::InvalidUrl => f.write_str("the store URL cannot be read"),
            Self::SeveralHosts => f.write_str(
                "the store URL names several hosts: give one address that leads to the primary",
            ),
            Self::UnsupportedUrlParameter(name) => write!(
                f,
                "the URL parameter `{name}` is not supported: give one address that leads to the \
                 primary"
            ),
            Self::UnknownScheme(scheme) => write!(f, "no adapter for the scheme `{scheme}:`"),
            Self::FeatureDisabled { scheme, feature } => {
                write!(f, "`{scheme}:` needs the cargo feature `{feature}` of tower-dedup")
            }
        }
    }
}

impl std::error::Error for ConfigError {}
