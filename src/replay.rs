//! [`Replay`]: what of a response is stored.

use std::sync::Arc;

use http::{HeaderMap, HeaderName, HeaderValue, header};

use crate::adapter::contract::StoredResponse;

/// Why a response is not stored.
pub(crate) const TOO_LONG: &str = "its body is too long";

/// Which part of a handler's response is stored with its event and replayed to duplicates.
///
/// The status is always stored. By default, so are the header `content-type` and a body of up to 64
/// KiB.
///
/// # Example
///
/// ```
/// use http::header::{CONTENT_LANGUAGE, CONTENT_TYPE};
/// use tower_dedup::Replay;
///
/// let replay = Replay::new().headers([CONTENT_TYPE, CONTENT_LANGUAGE]).body_limit(4 * 1024);
/// # let _ = replay;
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Replay {
    headers: Arc<[HeaderName]>,
    /// Whether the headers that begin with `content-` are stored, too.
    describes_content: bool,
    pub(crate) body_limit: usize,
}

/// Headers that are for one client, or for one connection (RFC 9110, section 7.6.1): a copy of
/// them would be wrong. The coding of a body is chosen for one client (section 12.5.3).
const NEVER_STORED: &[HeaderName] = &[
    header::SET_COOKIE,
    header::CONTENT_ENCODING,
    header::CONNECTION,
    header::CONTENT_LENGTH,
    header::PROXY_AUTHENTICATE,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    header::DATE,
];

impl Replay {
    /// Stores the status, the header `content-type` and a body of up to 64 KiB.
    #[must_use]
    pub fn new() -> Self {
        Self {
            headers: [header::CONTENT_TYPE].into(),
            describes_content: false,
            body_limit: 64 * 1024,
        }
    }

    /// Stores these headers instead of `content-type`.
    ///
    /// `set-cookie` is invalid, and so are headers that belong to one client, one connection or one
    /// moment: `content-encoding`, `connection`, `content-length`, `date`, `transfer-encoding` and
    /// similar ones. A response with a `content-encoding` is not stored.
    #[must_use]
    pub fn headers(mut self, headers: impl IntoIterator<Item = HeaderName>) -> Self {
        self.headers = headers.into_iter().collect();
        self
    }

    /// Stores every header that begins with `content-`, too, but for `content-length` and
    /// `content-encoding`.
    pub(crate) const fn describing_content(mut self) -> Self {
        self.describes_content = true;
        self
    }

    /// Sets the longest body that is stored, in bytes. A response with a longer body is not stored
    /// at all, which is logged and counted. Its duplicates get an empty response.
    #[must_use]
    pub const fn body_limit(mut self, bytes: usize) -> Self {
        self.body_limit = bytes;
        self
    }

    /// Returns the headers that no response may be stored with.
    pub(crate) fn invalid(&self) -> Vec<&HeaderName> {
        self.headers.iter().filter(|name| NEVER_STORED.contains(name)).collect()
    }

    fn stores(&self, name: &HeaderName) -> bool {
        let is_described = || name.as_str().starts_with("content-") && !NEVER_STORED.contains(name);
        self.headers.contains(name) || (self.describes_content && is_described())
    }

    /// Returns what is stored of a response, or why it cannot be stored.
    pub(crate) fn store(&self, response: &StoredResponse) -> Result<StoredResponse, &'static str> {
        if response.body.len() > self.body_limit {
            return Err(TOO_LONG);
        }
        let headers = self.select(&response.headers)?;
        Ok(StoredResponse::new(response.status, headers, response.body.clone()))
    }

    /// Returns those of `headers` that are stored, or why the response cannot be stored.
    pub(crate) fn select(&self, headers: &HeaderMap) -> Result<HeaderMap, &'static str> {
        if headers.contains_key(header::CONTENT_ENCODING) {
            // The client of a duplicate may not take that coding.
            return Err("its body is encoded");
        }
        let mut selected = HeaderMap::new();
        for (name, value) in headers.iter().filter(|(name, _)| self.stores(name)) {
            // Stores take text.
            if std::str::from_utf8(value.as_bytes()).is_err() {
                return Err("one of its headers is not text");
            }
            selected.append(name, value.clone());
        }
        Ok(selected)
    }
}

/// Returns `true` for a response whose body is a stream: it may not end, and its client reads it as
/// it comes. `x-accel-buffering: no` is what nginx and others take as the sign not to buffer a
/// response.
pub(crate) fn is_stream(headers: &HeaderMap) -> bool {
    let value = |name: &str| headers.get(name).map_or(&b""[..], HeaderValue::as_bytes);
    let kind = value("content-type").split(|byte| *byte == b';').next().unwrap_or_default();
    let kinds = [&b"text/event-stream"[..], b"multipart/x-mixed-replace"];
    kinds.iter().any(|stream| kind.trim_ascii().eq_ignore_ascii_case(stream))
        || value("x-accel-buffering").trim_ascii().eq_ignore_ascii_case(b"no")
}

impl Default for Replay {
    fn default() -> Self {
        Self::new()
    }
}
